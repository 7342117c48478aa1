// From the wire to plain C messages. protobuf-c limits neither how much it allocates for a byte of input nor how many
// fields it takes, so two things happen before it runs: the type is read from the first bytes and gives the size cap,
// and a scan over the tags counts them. The surprising decision: everything that a decoded message points to is carved
// from one block, by a function that runs twice, first to count and then to fill.
#include <stdlib.h>
#include <string.h>

#include "message.pb-c.h"
#include "proto/message_internal.h"

enum {
	MAX_ENVELOPE_FIELDS = 8,
	MAX_SMALL_FIELDS = 64,                       // of a body or a new sequence; arrays are packed, so one field each
	ARENA_BYTES_PER_INPUT_BYTE = 64, ARENA_BASE_BYTES = 64 << 10,
	FIELD_BODY = 10, FIELD_NEWS = 3,             // of Envelope and of Step
};

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *out)
{
	uint64_t v = 0;
	for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
		uint8_t b = *(*at)++;
		v |= (uint64_t)(b & 127) << shift;
		if (b < 128) {
			*out = v;
			return true;
		}
	}
	return false;
}

enum scan_level { SCAN_ENVELOPE, SCAN_STEP, SCAN_FLAT };

// Counts the fields of one level and, where the schema has messages inside, of the next; there are three levels.
static bool scan_fields(const uint8_t *at, const uint8_t *end, enum scan_level level, uint32_t most)
{
	uint32_t count = 0;
	while (at < end) {
		uint64_t tag, n;
		if (++count > most || !read_varint(&at, end, &tag))
			return false;
		switch (tag & 7) {
		case 0:
			if (!read_varint(&at, end, &n))
				return false;
			continue;
		case 1: n = 8; break;
		case 5: n = 4; break;
		case 2:
			if (!read_varint(&at, end, &n))
				return false;
			break;
		default: return false;
		}
		if (n > (uint64_t)(end - at))
			return false;
		uint64_t field = tag >> 3;
		if ((tag & 7) == 2) {
			if (level == SCAN_ENVELOPE) {
				bool step = field == FIELD_BODY;
				if (!scan_fields(at, at + n, step ? SCAN_STEP : SCAN_FLAT,
				                 MAX_SMALL_FIELDS + (step ? MAX_STEP_SEQS : 0)))
					return false;
			} else if (level == SCAN_STEP && field == FIELD_NEWS &&
			           !scan_fields(at, at + n, SCAN_FLAT, MAX_SMALL_FIELDS)) {
				return false;
			}
		}
		at += n;
	}
	return true;
}

// Version and type stand first on the wire, so that both are known before anything is allocated.
static enum status peek_type(const uint8_t *data, size_t len, enum message_type *out, struct error *e)
{
	const uint8_t *at = data + 1, *end = data + len;
	uint64_t version, type;
	if (len < 4 || data[0] != 0x08 || !read_varint(&at, end, &version))
		return error_set(e, STATUS_INVALID, "%zu bytes that are not a message", len);
	if (version != PROTOCOL_VERSION)
		return error_set(e, STATUS_INVALID, "protocol version %llu, expected %d", (unsigned long long)version,
		                 PROTOCOL_VERSION);
	if (at == end || *at++ != 0x10 || !read_varint(&at, end, &type))
		return error_set(e, STATUS_INVALID, "%zu bytes that are not a message", len);
	if (type < 1 || type >= MESSAGE_TYPE_COUNT)
		return error_set(e, STATUS_INVALID, "message type %llu, expected 1 to %d", (unsigned long long)type,
		                 MESSAGE_TYPE_COUNT - 1);
	*out = (enum message_type)type;
	return STATUS_OK;
}

// ---- decoding ------------------------------------------------------------------------------------------------------

// One block of memory, carved. With base == NULL it only counts.
struct carver { uint8_t *base; size_t used; };

static void *carve(struct carver *c, size_t count, size_t size)
{
	void *p = c->base && count ? c->base + c->used : NULL;
	c->used += (count * size + 7) & ~(size_t)7;
	return p;
}

static const void *carve_copy(struct carver *c, const void *from, size_t count, size_t size)
{
	void *p = carve(c, count, size);
	return p ? memcpy(p, from, count * size) : NULL;
}

static enum status copy_text(char *to, size_t size, const ProtobufCBinaryData *from, const char *field, struct error *e)
{
	if (from->len >= size)
		return error_set(e, STATUS_INVALID, "%s has %zu bytes, the most is %zu", field, from->len, size - 1);
	if (from->len && memchr(from->data, 0, from->len))
		return error_set(e, STATUS_INVALID, "%s has a NUL inside", field);
	if (from->len)
		memcpy(to, from->data, from->len);
	to[from->len] = 0;
	return STATUS_OK;
}

#define COPY_TEXT(array, from, field) TRY(copy_text(array, sizeof(array), &(from), field, e))

static enum status count_differs(struct error *e, const char *field, size_t found, size_t expected)
{
	return error_set(e, STATUS_INVALID, "%s has %zu items, expected %zu", field, found, expected);
}

#define SAME_COUNT(field, found, expected)                                                                             \
	do {                                                                                                           \
		if ((found) != (expected))                                                                             \
			return count_differs(e, field, found, expected);                                               \
	} while (0)

static enum status decode_hello(struct message_hello *m, const Wire__Hello *w, struct error *e)
{
	m->protocol_version = w->protocol_version;
	COPY_TEXT(m->version, w->version, "hello.version");
	COPY_TEXT(m->host, w->host, "hello.host");
	m->pid = w->pid;
	m->worker_index = w->worker_index;
	m->incarnation = w->incarnation;
	m->device_kind = (enum device_kind)w->device_kind;
	m->device_index = w->device_index;
	COPY_TEXT(m->device_name, w->device_name, "hello.device_name");
	m->threads = w->threads;
	m->isa = w->isa;
	m->memory_total_bytes = w->memory_total_bytes;
	m->memory_free_bytes = w->memory_free_bytes;
	m->memory_limit_bytes = w->memory_limit_bytes;
	m->bandwidth_bytes_per_s = w->bandwidth_bytes_per_s;
	m->matmul_flops = w->matmul_flops;
	SAME_COUNT("hello.weight_ratio", w->n_weight_ratio, (size_t)DTYPE_COUNT);
	memcpy(m->weight_ratio, w->weight_ratio, sizeof m->weight_ratio);
	m->base_bytes = w->base_bytes;
	return STATUS_OK;
}

static enum status decode_assign(struct message_assign *m, const Wire__Assign *w, struct error *e)
{
	m->stage = w->stage;
	m->rank = w->rank;
	m->n_stages = w->n_stages;
	m->n_ranks = w->n_ranks;
	m->first_layer = w->first_layer;
	m->n_layers = w->n_layers;
	m->has_embedding = w->has_embedding;
	m->has_head = w->has_head;
	COPY_TEXT(m->model_path, w->model_path, "assign.model_path");
	m->load_dummy = w->load_dummy;
	m->act_dtype = (enum dtype)w->act_dtype;
	m->kv_dtype = (enum dtype)w->kv_dtype;
	m->block_size = w->block_size;
	m->max_seqs = w->max_seqs;
	m->max_batch_tokens = w->max_batch_tokens;
	m->max_context = w->max_context;
	m->isa = w->isa;
	if (w->n_cores > MAX_CORES)
		return count_differs(e, "assign.cores", w->n_cores, MAX_CORES);
	m->n_cores = (uint32_t)w->n_cores;
	if (w->n_cores)
		memcpy(m->cores, w->cores, w->n_cores * 4);
	m->may_spin = w->may_spin;
	m->trace = w->trace;
	return STATUS_OK;
}

static enum status decode_budget(struct message_budget *m, const Wire__Budget *w, struct error *e)
{
	m->stage = w->stage;
	m->rank = w->rank;
	m->weight_bytes = w->weight_bytes;
	m->workspace_bytes = w->workspace_bytes;
	m->other_bytes = w->other_bytes;
	m->kv_bytes = w->kv_bytes;
	if (w->n_bytes_per_block > MAX_KV_GROUPS)
		return count_differs(e, "budget.bytes_per_block", w->n_bytes_per_block, MAX_KV_GROUPS);
	m->n_groups = (uint32_t)w->n_bytes_per_block;
	for (uint32_t g = 0; g < m->n_groups; g++)
		m->bytes_per_block[g] = w->bytes_per_block[g];
	COPY_TEXT(m->data_address, w->data_address, "budget.data_address");
	return STATUS_OK;
}

static enum status decode_configure(struct message_configure *m, const Wire__Configure *w, struct error *e)
{
	COPY_TEXT(m->steps_endpoint, w->steps_endpoint, "configure.steps_endpoint");
	if (w->n_blocks > MAX_KV_GROUPS)
		return count_differs(e, "configure.n_blocks", w->n_blocks, MAX_KV_GROUPS);
	m->n_groups = (uint32_t)w->n_blocks;
	for (uint32_t g = 0; g < m->n_groups; g++)
		m->n_blocks[g] = w->blocks[g];
	COPY_TEXT(m->next_address, w->next_address, "configure.next_address");
	COPY_TEXT(m->first_address, w->first_address, "configure.first_address");
	return STATUS_OK;
}

static enum status check_step_shape(const Wire__Step *w, struct error *e)
{
	size_t n = w->n_slots, refs = 0, ranges = 0;
	if (n > MAX_STEP_SEQS)
		return count_differs(e, "step.slots", n, MAX_STEP_SEQS);
	SAME_COUNT("step.starts", w->n_starts, n);
	SAME_COUNT("step.flags", w->n_flags, n);
	if (w->n_row_counts)
		SAME_COUNT("step.row_counts", w->n_row_counts, n);
	for (size_t i = 0; i < n; i++) {
		if (w->flags[i] > FLAG_ALL)
			return error_set(e, STATUS_INVALID, "step.flags is %u, expected 0 to %d", w->flags[i], FLAG_ALL);
		refs += !!(w->flags[i] & FLAG_BY_REFERENCE);
	}
	SAME_COUNT("step.ref_backs", w->n_ref_backs, refs);
	SAME_COUNT("step.ref_rows", w->n_ref_rows, refs);
	SAME_COUNT("step.first_tokens", w->n_first_tokens, n - refs);
	if (w->n_groups > MAX_KV_GROUPS)
		return error_set(e, STATUS_INVALID, "step.n_groups is %u, expected 0 to %d", w->n_groups, MAX_KV_GROUPS);
	SAME_COUNT("step.block_counts", w->n_block_counts, n * w->n_groups);
	for (size_t i = 0; i < w->n_block_counts; i++)
		ranges += !!w->block_counts[i];
	SAME_COUNT("step.first_blocks", w->n_first_blocks, ranges);
	for (size_t i = 0; i < w->n_news; i++)
		SAME_COUNT("step.new.bias_values", w->news[i]->n_bias_values, w->news[i]->n_bias_ids);
	return STATUS_OK;
}

static void carve_news(struct carver *c, struct message_step *m, const Wire__Step *w)
{
	struct step_new *news = carve(c, w->n_news, sizeof *news);
	for (size_t i = 0; i < w->n_news; i++) {
		const Wire__NewSequence *x = w->news[i];
		const void *bias_ids = carve_copy(c, x->bias_ids, x->n_bias_ids, 4);
		const void *bias_values = carve_copy(c, x->bias_values, x->n_bias_values, 4);
		const void *stop_ids = carve_copy(c, x->stop_ids, x->n_stop_ids, 4);
		const void *history = carve_copy(c, x->history, x->n_history, 4);
		if (!news)
			continue;
		news[i] = (struct step_new){
			.slot = x->slot, .n_prompt = x->n_prompt,
			.sampling = {
				.temperature = x->temperature, .top_p = x->top_p, .min_p = x->min_p,
				.repetition_penalty = x->repetition_penalty, .presence_penalty = x->presence_penalty,
				.frequency_penalty = x->frequency_penalty, .top_k = x->top_k, .seed = x->seed,
				.choice = x->choice, .n_logprobs = x->n_logprobs, .min_tokens = x->min_tokens,
				.n_bias = (uint32_t)x->n_bias_ids, .bias_ids = bias_ids, .bias_values = bias_values,
				.n_stop_ids = (uint32_t)x->n_stop_ids, .stop_ids = stop_ids,
			},
			.n_history = (uint32_t)x->n_history, .history = history,
		};
	}
	m->n_new = (uint32_t)w->n_news;
	m->news = news;
}

static void carve_step(struct carver *c, struct message_step *m, const Wire__Step *w, uint64_t step)
{
	m->micro_batch = w->micro_batch;
	m->n_ends = (uint32_t)w->n_ends;
	m->ends = carve_copy(c, w->ends, w->n_ends, 4);
	carve_news(c, m, w);
	struct step_seq *seqs = carve(c, w->n_slots, sizeof *seqs);
	uint32_t refs = 0, given = 0, ranges = 0;
	for (size_t i = 0; seqs && i < w->n_slots; i++) {
		struct step_seq *q = &seqs[i];
		uint32_t flags = w->flags[i];
		*q = (struct step_seq){
			.slot = w->slots[i], .start = w->starts[i], .n_tokens = w->n_row_counts ? w->row_counts[i] : 1,
			.truncate = flags & FLAG_TRUNCATE, .sample = flags & FLAG_SAMPLE,
			.not_ahead = flags & FLAG_NOT_AHEAD, .by_reference = flags & FLAG_BY_REFERENCE,
		};
		if (q->by_reference) {
			// A reference to before the first step becomes 0, which the check refuses.
			q->ref_step = w->ref_backs[refs] < step ? step - w->ref_backs[refs] : 0;
			q->ref_row = w->ref_rows[refs++];
		} else {
			q->first_token = w->first_tokens[given++];
		}
		for (uint32_t g = 0; g < w->n_groups; g++) {
			q->n_blocks[g] = w->block_counts[i * w->n_groups + g];
			if (q->n_blocks[g])
				q->first_block[g] = w->first_blocks[ranges++];
		}
	}
	m->n_seqs = (uint32_t)w->n_slots;
	m->seqs = seqs;
	m->n_tokens = (uint32_t)w->n_tokens;
	m->tokens = carve_copy(c, w->tokens, w->n_tokens, 4);
	m->n_blocks = (uint32_t)w->n_blocks;
	m->blocks = carve_copy(c, w->blocks, w->n_blocks, 4);
}

static void carve_result(struct carver *c, struct message_step_result *m, const Wire__StepResult *w)
{
	m->micro_batch = w->micro_batch;
	m->stage_us = w->stage_us;
	struct sampled_token *tokens = carve(c, w->n_slots, sizeof *tokens);
	const uint32_t *top_ids = carve_copy(c, w->top_ids, w->n_top_ids, 4);
	const float *top_logprobs = carve_copy(c, w->top_logprobs, w->n_top_logprobs, 4);
	size_t at = 0;
	for (size_t i = 0; tokens && i < w->n_slots; i++) {
		uint32_t n_top = w->n_top_counts ? w->top_counts[i] : 0;
		tokens[i] = (struct sampled_token){
			.slot = w->slots[i], .id = w->ids[i], .logprob = w->n_logprobs ? w->logprobs[i] : 0, .n_top = n_top,
			.top_ids = n_top ? top_ids + at : NULL, .top_logprobs = n_top ? top_logprobs + at : NULL,
		};
		at += n_top;
	}
	m->n_tokens = (uint32_t)w->n_slots;
	m->tokens = tokens;
}

static enum status check_result_shape(const Wire__StepResult *w, struct error *e)
{
	size_t n = w->n_slots, tops = 0;
	if (n > MAX_STEP_SEQS)
		return count_differs(e, "result.slots", n, MAX_STEP_SEQS);
	SAME_COUNT("result.ids", w->n_ids, n);
	if (w->n_logprobs)
		SAME_COUNT("result.logprobs", w->n_logprobs, n);
	if (w->n_top_counts)
		SAME_COUNT("result.top_counts", w->n_top_counts, n);
	for (size_t i = 0; i < w->n_top_counts; i++)
		tops += w->top_counts[i];
	SAME_COUNT("result.top_ids", w->n_top_ids, tops);
	SAME_COUNT("result.top_logprobs", w->n_top_logprobs, tops);
	return STATUS_OK;
}

static enum status check_heartbeat_shape(const Wire__Heartbeat *w, struct error *e)
{
	size_t n = w->n_event_steps;
	if (n > MAX_TRACE_EVENTS)
		return count_differs(e, "heartbeat.event_steps", n, MAX_TRACE_EVENTS);
	SAME_COUNT("heartbeat.event_micro_batches", w->n_event_micro_batches, n);
	SAME_COUNT("heartbeat.event_begins_us", w->n_event_begins_us, n);
	SAME_COUNT("heartbeat.event_lengths_us", w->n_event_lengths_us, n);
	SAME_COUNT("heartbeat.event_kinds", w->n_event_kinds, n);
	SAME_COUNT("heartbeat.event_rows", w->n_event_rows, n);
	for (size_t i = 0; i < n; i++)
		if (w->event_begins_us[i] > UINT64_MAX - w->event_lengths_us[i])
			return error_set(e, STATUS_INVALID, "heartbeat.event_lengths_us overflows");
	return STATUS_OK;
}

static void carve_heartbeat(struct carver *c, struct message_heartbeat *m, const Wire__Heartbeat *w)
{
	m->last_step_taken = w->last_step_taken;
	m->last_step_done = w->last_step_done;
	m->holding_us = w->holding_us;
	m->queue_length = w->queue_length;
	m->busy_us = w->busy_us;
	m->wait_us = w->wait_us;
	m->rows = w->rows;
	m->rss_bytes = w->rss_bytes;
	struct trace_event *events = carve(c, w->n_event_steps, sizeof *events);
	for (size_t i = 0; events && i < w->n_event_steps; i++)
		events[i] = (struct trace_event){
			.step = w->event_steps[i], .micro_batch = w->event_micro_batches[i],
			.begin_us = w->event_begins_us[i], .end_us = w->event_begins_us[i] + w->event_lengths_us[i],
			.kind = w->event_kinds[i], .n_rows = w->event_rows[i],
		};
	m->n_events = (uint32_t)w->n_event_steps;
	m->events = events;
}

static void carve_body(struct carver *c, struct message *m, const Wire__Envelope *env)
{
	if (m->type == MESSAGE_STEP)
		carve_step(c, &m->step_, env->body, env->step);
	else if (m->type == MESSAGE_STEP_RESULT)
		carve_result(c, &m->result, env->result);
	else if (m->type == MESSAGE_HEARTBEAT)
		carve_heartbeat(c, &m->heartbeat, env->heartbeat);
}

// Exactly the body that the type says, and no other.
static enum status check_bodies(enum message_type type, const Wire__Envelope *env, struct error *e)
{
	const struct { const void *body; enum message_type type; } bodies[] = {
		{env->hello, MESSAGE_HELLO}, {env->assign, MESSAGE_ASSIGN}, {env->progress, MESSAGE_PROGRESS},
		{env->budget, MESSAGE_BUDGET}, {env->configure, MESSAGE_CONFIGURE}, {env->body, MESSAGE_STEP},
		{env->result, MESSAGE_STEP_RESULT}, {env->heartbeat, MESSAGE_HEARTBEAT}, {env->error, MESSAGE_ERROR},
	};
	for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++)
		if (!!bodies[i].body != (bodies[i].type == type))
			return error_set(e, STATUS_INVALID, "a message of type %s %s a body of type %s", message_type_name(type),
			                 bodies[i].body ? "with" : "without", message_type_name(bodies[i].type));
	return STATUS_OK;
}

static enum status decode_body(struct message *m, const Wire__Envelope *env, struct error *e)
{
	switch (m->type) {
	case MESSAGE_HELLO: return decode_hello(&m->hello, env->hello, e);
	case MESSAGE_ASSIGN: return decode_assign(&m->assign, env->assign, e);
	case MESSAGE_PROGRESS:
		m->progress.done_bytes = env->progress->done_bytes;
		m->progress.total_bytes = env->progress->total_bytes;
		return copy_text(m->progress.what, sizeof m->progress.what, &env->progress->what, "progress.what", e);
	case MESSAGE_BUDGET: return decode_budget(&m->budget, env->budget, e);
	case MESSAGE_CONFIGURE: return decode_configure(&m->configure, env->configure, e);
	case MESSAGE_STEP: return check_step_shape(env->body, e);
	case MESSAGE_STEP_RESULT: return check_result_shape(env->result, e);
	case MESSAGE_HEARTBEAT: return check_heartbeat_shape(env->heartbeat, e);
	case MESSAGE_ERROR:
		m->error.status = (enum status)env->error->status;
		return copy_text(m->error.text, sizeof m->error.text, &env->error->text, "error.text", e);
	case MESSAGE_PROBE: case MESSAGE_READY: case MESSAGE_DRAIN: case MESSAGE_TYPE_COUNT:
		break;
	}
	return STATUS_OK;
}

enum status message_decode(struct message *out, const uint8_t *data, size_t len, const struct message_limits *limits,
                           struct error *e)
{
	memset(out, 0, sizeof *out);
	TRY(peek_type(data, len, &out->type, e));
	if (len > message_type_cap(out->type))
		return error_set(e, STATUS_INVALID, "a message of type %s has %zu bytes, the most is %zu",
		                 message_type_name(out->type), len, message_type_cap(out->type));
	if (!scan_fields(data, data + len, SCAN_ENVELOPE, MAX_ENVELOPE_FIELDS))
		return error_set(e, STATUS_INVALID, "a message of type %s has too many fields or is malformed",
		                 message_type_name(out->type));
	struct arena arena;
	arena_init(&arena, len * ARENA_BYTES_PER_INPUT_BYTE + ARENA_BASE_BYTES);
	ProtobufCAllocator allocator = {arena_alloc, arena_free_one, &arena};
	struct carver carver = {NULL, 0};
	enum status status;
	Wire__Envelope *env = wire__envelope__unpack(&allocator, len, data);
	if (!env) {
		status = error_set(e, STATUS_INVALID, "a message of type %s is malformed", message_type_name(out->type));
		goto out;
	}
	// A later field overrides an earlier one, so what the first bytes said has to be said again.
	if (env->version != PROTOCOL_VERSION || env->type != out->type) {
		status = error_set(e, STATUS_INVALID, "a message names two versions or types");
		goto out;
	}
	out->epoch = env->epoch;
	out->step = env->step;
	TRY_GOTO(check_bodies(out->type, env, e), out);
	TRY_GOTO(decode_body(out, env, e), out);
	carve_body(&carver, out, env);
	if (carver.used) {
		out->storage = carver.base = xmalloc(carver.used);
		carver.used = 0;
		carve_body(&carver, out, env);
	}
	status = message_check(out, limits, e);
out:
	arena_release(&arena);
	if (status != STATUS_OK)
		message_free(out);
	return status;
}

void message_free(struct message *m)
{
	free(m->storage);
	m->storage = NULL;
}
