// From plain C messages to the wire. Arrays that a message holds as arrays are borrowed by the protobuf-c structs; what is
// an array of structs there becomes parallel arrays in scratch memory (message.proto says why).
#include <stdlib.h>
#include <string.h>

#include "message.pb-c.h"
#include "proto/message_internal.h"

// Sizes come from checked messages, so lack of memory is the only failure.
static void *take(struct arena *a, size_t count, size_t size)
{
	void *p = arena_alloc(a, count * size);
	ASSERT(p);
	return p;
}

#define TEXT(array) ((ProtobufCBinaryData){strlen(array), (uint8_t *)(uintptr_t)(array)})
// Borrows an array of ours as a repeated field.
#define BORROW(w, name, n, p) ((w)->n_##name = (n), (w)->name = (void *)(uintptr_t)(p))

static void encode_news(struct arena *a, Wire__Step *w, const struct message_step *m)
{
	Wire__NewSequence *items = take(a, m->n_new, sizeof *items);
	w->news = take(a, m->n_new, sizeof *w->news);
	w->n_news = m->n_new;
	for (uint32_t i = 0; i < m->n_new; i++) {
		const struct step_new *n = &m->news[i];
		const struct sampling_params *s = &n->sampling;
		Wire__NewSequence *x = &items[i];
		wire__new_sequence__init(x);
		w->news[i] = x;
		x->slot = n->slot;
		x->n_prompt = n->n_prompt;
		x->temperature = s->temperature;
		x->top_p = s->top_p;
		x->min_p = s->min_p;
		x->repetition_penalty = s->repetition_penalty;
		x->presence_penalty = s->presence_penalty;
		x->frequency_penalty = s->frequency_penalty;
		x->top_k = s->top_k;
		x->seed = s->seed;
		x->choice = s->choice;
		x->n_logprobs = s->n_logprobs;
		x->min_tokens = s->min_tokens;
		BORROW(x, bias_ids, s->n_bias, s->bias_ids);
		BORROW(x, bias_values, s->n_bias, s->bias_values);
		BORROW(x, stop_ids, s->n_stop_ids, s->stop_ids);
		BORROW(x, history, n->n_history, n->history);
	}
}

static void encode_step(struct arena *a, Wire__Step *w, const struct message_step *m, uint64_t step)
{
	uint32_t n = m->n_seqs, groups = 0;
	bool all_one = true;
	w->micro_batch = m->micro_batch;
	BORROW(w, ends, m->n_ends, m->ends);
	BORROW(w, tokens, m->n_tokens, m->tokens);
	BORROW(w, blocks, m->n_blocks, m->blocks);
	if (m->n_new)
		encode_news(a, w, m);
	for (uint32_t i = 0; i < n; i++) {
		all_one &= m->seqs[i].n_tokens == 1;
		for (uint32_t g = groups; g < MAX_KV_GROUPS; g++)
			if (m->seqs[i].n_blocks[g])
				groups = g + 1;
	}
	w->n_slots = w->n_starts = w->n_flags = n;
	w->n_row_counts = all_one ? 0 : n;
	w->n_groups = groups;
	w->n_block_counts = (size_t)n * groups;
	w->slots = take(a, n, 4);
	w->starts = take(a, n, 4);
	w->flags = take(a, n, 4);
	w->row_counts = take(a, n, 4);
	w->ref_backs = take(a, n, 4);
	w->ref_rows = take(a, n, 4);
	w->first_tokens = take(a, n, 4);
	w->block_counts = take(a, w->n_block_counts, 4);
	w->first_blocks = take(a, w->n_block_counts, 4);
	uint32_t refs = 0, given = 0, ranges = 0;
	for (uint32_t i = 0; i < n; i++) {
		const struct step_seq *q = &m->seqs[i];
		w->slots[i] = q->slot;
		w->starts[i] = q->start;
		w->row_counts[i] = q->n_tokens;
		w->flags[i] = (q->truncate ? FLAG_TRUNCATE : 0) | (q->sample ? FLAG_SAMPLE : 0) |
		              (q->not_ahead ? FLAG_NOT_AHEAD : 0) | (q->by_reference ? FLAG_BY_REFERENCE : 0);
		if (q->by_reference) {
			w->ref_backs[refs] = (uint32_t)(step - q->ref_step);
			w->ref_rows[refs++] = q->ref_row;
		} else {
			w->first_tokens[given++] = q->first_token;
		}
		for (uint32_t g = 0; g < groups; g++) {
			w->block_counts[i * groups + g] = q->n_blocks[g];
			if (q->n_blocks[g])
				w->first_blocks[ranges++] = q->first_block[g];
		}
	}
	w->n_ref_backs = w->n_ref_rows = refs;
	w->n_first_tokens = given;
	w->n_first_blocks = ranges;
}

static void encode_result(struct arena *a, Wire__StepResult *w, const struct message_step_result *m)
{
	uint32_t n = m->n_tokens;
	size_t tops = 0;
	bool logprobs = false;
	for (uint32_t i = 0; i < n; i++) {
		tops += m->tokens[i].n_top;
		logprobs |= m->tokens[i].logprob != 0;
	}
	w->micro_batch = m->micro_batch;
	w->stage_us = m->stage_us;
	w->n_slots = w->n_ids = n;
	w->n_logprobs = logprobs ? n : 0;
	w->n_top_counts = tops ? n : 0;
	w->n_top_ids = w->n_top_logprobs = tops;
	w->slots = take(a, n, 4);
	w->ids = take(a, n, 4);
	w->logprobs = take(a, n, 4);
	w->top_counts = take(a, n, 4);
	w->top_ids = take(a, tops, 4);
	w->top_logprobs = take(a, tops, 4);
	size_t at = 0;
	for (uint32_t i = 0; i < n; i++) {
		const struct sampled_token *t = &m->tokens[i];
		w->slots[i] = t->slot;
		w->ids[i] = t->id;
		w->logprobs[i] = t->logprob;
		w->top_counts[i] = t->n_top;
		if (t->n_top) {
			memcpy(w->top_ids + at, t->top_ids, t->n_top * 4ul);
			memcpy(w->top_logprobs + at, t->top_logprobs, t->n_top * 4ul);
			at += t->n_top;
		}
	}
}

static void encode_heartbeat(struct arena *a, Wire__Heartbeat *w, const struct message_heartbeat *m)
{
	uint32_t n = m->n_events;
	w->last_step_taken = m->last_step_taken;
	w->last_step_done = m->last_step_done;
	w->holding_us = m->holding_us;
	w->queue_length = m->queue_length;
	w->busy_us = m->busy_us;
	w->wait_us = m->wait_us;
	w->rows = m->rows;
	w->rss_bytes = m->rss_bytes;
	w->n_event_steps = w->n_event_micro_batches = w->n_event_begins_us = w->n_event_lengths_us = w->n_event_kinds =
		w->n_event_rows = n;
	w->event_steps = take(a, n, 8);
	w->event_micro_batches = take(a, n, 4);
	w->event_begins_us = take(a, n, 8);
	w->event_lengths_us = take(a, n, 8);
	w->event_kinds = take(a, n, 4);
	w->event_rows = take(a, n, 4);
	for (uint32_t i = 0; i < n; i++) {
		const struct trace_event *t = &m->events[i];
		w->event_steps[i] = t->step;
		w->event_micro_batches[i] = t->micro_batch;
		w->event_begins_us[i] = t->begin_us;
		w->event_lengths_us[i] = t->end_us - t->begin_us;
		w->event_kinds[i] = t->kind;
		w->event_rows[i] = t->n_rows;
	}
}

static void encode_hello(Wire__Hello *w, const struct message_hello *m)
{
	w->protocol_version = m->protocol_version;
	w->version = TEXT(m->version);
	w->host = TEXT(m->host);
	w->pid = m->pid;
	w->worker_index = m->worker_index;
	w->incarnation = m->incarnation;
	w->device_kind = m->device_kind;
	w->device_index = m->device_index;
	w->device_name = TEXT(m->device_name);
	w->threads = m->threads;
	w->isa = m->isa;
	w->memory_total_bytes = m->memory_total_bytes;
	w->memory_free_bytes = m->memory_free_bytes;
	w->memory_limit_bytes = m->memory_limit_bytes;
	w->bandwidth_bytes_per_s = m->bandwidth_bytes_per_s;
	w->matmul_flops = m->matmul_flops;
	BORROW(w, weight_ratio, DTYPE_COUNT, m->weight_ratio);
	w->base_bytes = m->base_bytes;
}

static void encode_assign(Wire__Assign *w, const struct message_assign *m)
{
	w->stage = m->stage;
	w->rank = m->rank;
	w->n_stages = m->n_stages;
	w->n_ranks = m->n_ranks;
	w->first_layer = m->first_layer;
	w->n_layers = m->n_layers;
	w->has_embedding = m->has_embedding;
	w->has_head = m->has_head;
	w->model_path = TEXT(m->model_path);
	w->load_dummy = m->load_dummy;
	w->act_dtype = m->act_dtype;
	w->kv_dtype = m->kv_dtype;
	w->block_size = m->block_size;
	w->max_seqs = m->max_seqs;
	w->max_batch_tokens = m->max_batch_tokens;
	w->max_context = m->max_context;
	w->isa = m->isa;
	BORROW(w, cores, m->n_cores, m->cores);
	w->may_spin = m->may_spin;
	w->trace = m->trace;
}

static void encode_budget(Wire__Budget *w, const struct message_budget *m)
{
	w->stage = m->stage;
	w->rank = m->rank;
	w->weight_bytes = m->weight_bytes;
	w->workspace_bytes = m->workspace_bytes;
	w->other_bytes = m->other_bytes;
	w->kv_bytes = m->kv_bytes;
	BORROW(w, bytes_per_block, m->n_groups, m->bytes_per_block);
	w->data_address = TEXT(m->data_address);
}

union bodies {
	Wire__Hello hello;
	Wire__Assign assign;
	Wire__Progress progress;
	Wire__Budget budget;
	Wire__Configure configure;
	Wire__Step step;
	Wire__StepResult result;
	Wire__Heartbeat heartbeat;
	Wire__Error error;
};

static void encode_body(struct arena *a, Wire__Envelope *env, union bodies *b, const struct message *m)
{
	switch (m->type) {
	case MESSAGE_HELLO:
		wire__hello__init(&b->hello);
		encode_hello(env->hello = &b->hello, &m->hello);
		break;
	case MESSAGE_ASSIGN:
		wire__assign__init(&b->assign);
		encode_assign(env->assign = &b->assign, &m->assign);
		break;
	case MESSAGE_PROGRESS:
		wire__progress__init(env->progress = &b->progress);
		b->progress.done_bytes = m->progress.done_bytes;
		b->progress.total_bytes = m->progress.total_bytes;
		b->progress.what = TEXT(m->progress.what);
		break;
	case MESSAGE_BUDGET:
		wire__budget__init(&b->budget);
		encode_budget(env->budget = &b->budget, &m->budget);
		break;
	case MESSAGE_CONFIGURE:
		wire__configure__init(env->configure = &b->configure);
		b->configure.steps_endpoint = TEXT(m->configure.steps_endpoint);
		BORROW(&b->configure, blocks, m->configure.n_groups, m->configure.n_blocks);
		b->configure.next_address = TEXT(m->configure.next_address);
		b->configure.first_address = TEXT(m->configure.first_address);
		break;
	case MESSAGE_STEP:
		wire__step__init(&b->step);
		encode_step(a, env->body = &b->step, &m->step_, m->step);
		break;
	case MESSAGE_STEP_RESULT:
		wire__step_result__init(&b->result);
		encode_result(a, env->result = &b->result, &m->result);
		break;
	case MESSAGE_HEARTBEAT:
		wire__heartbeat__init(&b->heartbeat);
		encode_heartbeat(a, env->heartbeat = &b->heartbeat, &m->heartbeat);
		break;
	case MESSAGE_ERROR:
		wire__error__init(env->error = &b->error);
		b->error.status = m->error.status;
		b->error.text = TEXT(m->error.text);
		break;
	case MESSAGE_PROBE: case MESSAGE_READY: case MESSAGE_DRAIN: case MESSAGE_TYPE_COUNT:
		break;
	}
}

enum status message_encode(const struct message *m, uint8_t **buf, size_t *len, size_t *capacity, struct error *e)
{
	TRY(message_check(m, NULL, e));
	struct arena arena;
	union bodies bodies;
	Wire__Envelope env;
	arena_init(&arena, SIZE_MAX);
	wire__envelope__init(&env);
	env.version = PROTOCOL_VERSION;
	env.type = m->type;
	env.epoch = m->epoch;
	env.step = m->step;
	encode_body(&arena, &env, &bodies, m);
	size_t n = wire__envelope__get_packed_size(&env);
	enum status status = STATUS_OK;
	if (n > message_type_cap(m->type)) {
		status = error_set(e, STATUS_INVALID, "a message of type %s has %zu bytes, the most is %zu",
		                   message_type_name(m->type), n, message_type_cap(m->type));
		goto out;
	}
	if (n > *capacity) {
		*buf = xrealloc(*buf, n + n / 2);
		*capacity = n + n / 2;
	}
	*len = wire__envelope__pack(&env, *buf);
out:
	arena_release(&arena);
	return status;
}
