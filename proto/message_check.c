// What a message may say: ranges, shapes and cross references of every type, checked on the plain structs. The
// surprising decision: the sender is checked by the same rules as the receiver, so that a bug shows where it is made and
// not as a disconnected peer.
#include "proto/message_internal.h"

#include <math.h>
#include <string.h>

enum {
	MAX_LAYERS = 1024,
	MAX_CONTEXT = 1 << 26,
	MAX_BLOCK_SIZE = 4096,
	MAX_STEP_BLOCKS = MESSAGE_CAP_BYTES / 4,
	MAX_STEP_HISTORY = MESSAGE_CAP_BYTES / 4,
};

static enum status out_of_range(struct error *e, const char *field, unsigned long long v, unsigned long long low,
                                unsigned long long high)
{
	return error_set(e, STATUS_INVALID, "%s is %llu, expected %llu to %llu", field, v, low, high);
}

#define CHECK_RANGE(field, value, low, high)                                                                           \
	do {                                                                                                           \
		unsigned long long v_ = (unsigned long long)(value), l_ = (low), h_ = (unsigned long long)(high);      \
		if (v_ < l_ || v_ > h_)                                                                                \
			return out_of_range(e, field, v_, l_, h_);                                                     \
	} while (0)

// Also refuses NaN and infinities.
#define CHECK_REAL(field, value, low, high)                                                                            \
	do {                                                                                                           \
		double v_ = (value);                                                                                   \
		if (!(v_ >= (low) && v_ <= (high)))                                                                    \
			return error_set(e, STATUS_INVALID, "%s is %g, expected %g to %g", field, v_, (double)(low),   \
			                 (double)(high));                                                              \
	} while (0)

#define CHECK_TEXT(field, array)                                                                                       \
	do {                                                                                                           \
		if (!memchr(array, 0, sizeof(array)))                                                                  \
			return error_set(e, STATUS_INVALID, "%s is longer than %zu bytes", field, sizeof(array) - 1);  \
	} while (0)

static enum status check_hello(const struct message_hello *h, struct error *e)
{
	if (h->protocol_version != PROTOCOL_VERSION)
		return error_set(e, STATUS_INVALID, "hello.protocol_version is %u, expected %d", h->protocol_version,
		                 PROTOCOL_VERSION);
	CHECK_TEXT("hello.version", h->version);
	CHECK_TEXT("hello.host", h->host);
	CHECK_TEXT("hello.device_name", h->device_name);
	CHECK_RANGE("hello.worker_index", h->worker_index, 0, MAX_STAGES * MAX_RANKS - 1);
	CHECK_RANGE("hello.device_kind", h->device_kind, DEVICE_CPU, DEVICE_CUDA);
	CHECK_RANGE("hello.device_index", h->device_index, 0, 1023);
	CHECK_RANGE("hello.threads", h->threads, 0, 4096);
	CHECK_RANGE("hello.isa", h->isa, 0, 63);
	CHECK_REAL("hello.bandwidth_bytes_per_s", h->bandwidth_bytes_per_s, 0, 1e18);
	CHECK_REAL("hello.matmul_flops", h->matmul_flops, 0, 1e21);
	for (int i = 0; i < DTYPE_COUNT; i++)
		CHECK_REAL("hello.weight_ratio", h->weight_ratio[i], 0, 1000);
	return STATUS_OK;
}

static enum status check_assign(const struct message_assign *a, struct error *e)
{
	CHECK_RANGE("assign.n_stages", a->n_stages, 1, MAX_STAGES);
	CHECK_RANGE("assign.n_ranks", a->n_ranks, 1, MAX_RANKS);
	CHECK_RANGE("assign.stage", a->stage, 0, a->n_stages - 1);
	CHECK_RANGE("assign.rank", a->rank, 0, a->n_ranks - 1);
	CHECK_RANGE("assign.first_layer", a->first_layer, 0, MAX_LAYERS);
	CHECK_RANGE("assign.n_layers", a->n_layers, 0, MAX_LAYERS - a->first_layer);
	CHECK_TEXT("assign.model_path", a->model_path);
	CHECK_RANGE("assign.act_dtype", a->act_dtype, DTYPE_F32, DTYPE_BF16);
	if (a->kv_dtype != DTYPE_FP8)
		CHECK_RANGE("assign.kv_dtype", a->kv_dtype, DTYPE_F32, DTYPE_BF16);
	CHECK_RANGE("assign.block_size", a->block_size, 1, MAX_BLOCK_SIZE);
	CHECK_RANGE("assign.max_seqs", a->max_seqs, 1, MAX_STEP_SEQS);
	CHECK_RANGE("assign.max_batch_tokens", a->max_batch_tokens, 1, MAX_STEP_TOKENS);
	CHECK_RANGE("assign.max_context", a->max_context, 1, MAX_CONTEXT);
	CHECK_RANGE("assign.isa", a->isa, 0, 63);
	CHECK_RANGE("assign.n_cores", a->n_cores, 0, MAX_CORES);
	for (uint32_t i = 0; i < a->n_cores; i++)
		CHECK_RANGE("assign.cores", a->cores[i], 0, 65535);
	return STATUS_OK;
}

static bool address_ok(const char *s)
{
	return !*s || !strncmp(s, "unix:", 5) || !strncmp(s, "tcp:", 4);
}

static enum status check_budget(const struct message_budget *b, struct error *e)
{
	CHECK_RANGE("budget.stage", b->stage, 0, MAX_STAGES - 1);
	CHECK_RANGE("budget.rank", b->rank, 0, MAX_RANKS - 1);
	CHECK_RANGE("budget.n_groups", b->n_groups, 1, MAX_KV_GROUPS);
	CHECK_TEXT("budget.data_address", b->data_address);
	if (!address_ok(b->data_address))
		return error_set(e, STATUS_INVALID, "budget.data_address is \"%.64s\", expected unix: or tcp:", b->data_address);
	return STATUS_OK;
}

static enum status check_configure(const struct message_configure *c, struct error *e)
{
	CHECK_TEXT("configure.steps_endpoint", c->steps_endpoint);
	if (strncmp(c->steps_endpoint, "ipc://", 6) && strncmp(c->steps_endpoint, "tcp://", 6))
		return error_set(e, STATUS_INVALID, "configure.steps_endpoint is \"%.64s\", expected ipc:// or tcp://",
		                 c->steps_endpoint);
	CHECK_RANGE("configure.n_groups", c->n_groups, 1, MAX_KV_GROUPS);
	for (uint32_t g = 0; g < c->n_groups; g++)
		CHECK_RANGE("configure.n_blocks", c->n_blocks[g], 1, INT32_MAX);
	CHECK_TEXT("configure.next_address", c->next_address);
	CHECK_TEXT("configure.first_address", c->first_address);
	if (!address_ok(c->next_address) || !address_ok(c->first_address))
		return error_set(e, STATUS_INVALID, "configure: a data address is neither unix: nor tcp:");
	return STATUS_OK;
}

static enum status check_ids(const char *field, const uint32_t *ids, uint32_t n, uint32_t limit, struct error *e)
{
	if (limit)
		for (uint32_t i = 0; i < n; i++)
			CHECK_RANGE(field, ids[i], 0, limit - 1);
	return STATUS_OK;
}

static enum status check_new(const struct step_new *n, const struct message_limits *l, uint32_t max_context, struct error *e)
{
	const struct sampling_params *s = &n->sampling;
	CHECK_RANGE("step.new.n_prompt", n->n_prompt, 0, max_context);
	CHECK_REAL("step.new.temperature", s->temperature, 0, 1e6);
	CHECK_REAL("step.new.top_p", s->top_p, 0, 1);
	CHECK_REAL("step.new.min_p", s->min_p, 0, 1);
	CHECK_REAL("step.new.repetition_penalty", s->repetition_penalty, 1e-6, 1e6);
	CHECK_REAL("step.new.presence_penalty", s->presence_penalty, -1e6, 1e6);
	CHECK_REAL("step.new.frequency_penalty", s->frequency_penalty, -1e6, 1e6);
	if (s->top_k < -1)
		return error_set(e, STATUS_INVALID, "step.new.top_k is %d, expected -1 or more", s->top_k);
	if (s->n_logprobs < -1 || s->n_logprobs > MAX_TOP_LOGPROBS)
		return error_set(e, STATUS_INVALID, "step.new.n_logprobs is %d, expected -1 to %d", s->n_logprobs,
		                 MAX_TOP_LOGPROBS);
	CHECK_RANGE("step.new.n_bias", s->n_bias, 0, MAX_BIAS);
	TRY(check_ids("step.new.bias_ids", s->bias_ids, s->n_bias, l->vocab_size, e));
	for (uint32_t i = 0; i < s->n_bias; i++)
		CHECK_REAL("step.new.bias_values", s->bias_values[i], -1e6, 1e6);
	CHECK_RANGE("step.new.n_stop_ids", s->n_stop_ids, 0, MAX_STOP_IDS);
	TRY(check_ids("step.new.stop_ids", s->stop_ids, s->n_stop_ids, l->vocab_size, e));
	CHECK_RANGE("step.new.n_history", n->n_history, 0, max_context);
	return check_ids("step.new.history", n->history, n->n_history, l->vocab_size, e);
}

// Marks slot in the bitmap; false if it was there.
static bool mark(uint64_t *bits, uint32_t slot)
{
	uint64_t b = 1ull << (slot & 63);
	bool fresh = !(bits[slot >> 6] & b);
	bits[slot >> 6] |= b;
	return fresh;
}

static enum status check_seq(const struct message_step *m, uint64_t step, const struct step_seq *q, const struct message_limits *l,
                             uint32_t max_context, struct error *e)
{
	CHECK_RANGE("step.seq.n_tokens", q->n_tokens, 1, MAX_STEP_TOKENS);
	CHECK_RANGE("step.seq.start", q->start, 0, max_context - 1);
	CHECK_RANGE("step.seq.start + n_tokens", (uint64_t)q->start + q->n_tokens, 1, max_context);
	if (q->by_reference) {
		CHECK_RANGE("step.seq.n_tokens of a row by reference", q->n_tokens, 1, 1);
		if (q->ref_step < 1 || q->ref_step >= step || step - q->ref_step > UINT32_MAX)
			return error_set(e, STATUS_INVALID, "step.seq.ref_step is %llu in step %llu, expected an earlier one",
			                 (unsigned long long)q->ref_step, (unsigned long long)step);
		CHECK_RANGE("step.seq.ref_row", q->ref_row, 0, MAX_STEP_SEQS - 1);
	} else {
		CHECK_RANGE("step.seq.first_token + n_tokens", (uint64_t)q->first_token + q->n_tokens, 1, m->n_tokens);
	}
	for (uint32_t g = 0; g < MAX_KV_GROUPS; g++) {
		if (!q->n_blocks[g])
			continue;
		if (l->n_groups && g >= l->n_groups)
			return error_set(e, STATUS_INVALID, "step.seq has blocks of KV group %u, expected below %u", g, l->n_groups);
		CHECK_RANGE("step.seq.first_block + n_blocks", (uint64_t)q->first_block[g] + q->n_blocks[g], 1, m->n_blocks);
		if (l->n_blocks[g])
			for (uint32_t i = 0; i < q->n_blocks[g]; i++)
				CHECK_RANGE("step.blocks", m->blocks[q->first_block[g] + i], 0, l->n_blocks[g] - 1);
	}
	return STATUS_OK;
}

static enum status check_step(const struct message_step *m, uint64_t step, const struct message_limits *l, struct error *e)
{
	uint32_t max_seqs = l->max_seqs && l->max_seqs < MAX_STEP_SEQS ? l->max_seqs : MAX_STEP_SEQS;
	uint32_t max_rows = l->max_batch_tokens && l->max_batch_tokens < MAX_STEP_TOKENS ? l->max_batch_tokens : MAX_STEP_TOKENS;
	uint32_t max_context = l->max_context ? l->max_context : MAX_CONTEXT;
	uint64_t ended[MAX_STEP_SEQS / 64] = {0}, begun[MAX_STEP_SEQS / 64] = {0}, seen[MAX_STEP_SEQS / 64] = {0};
	CHECK_RANGE("step.micro_batch", m->micro_batch, 0, MAX_STAGES - 1);
	CHECK_RANGE("step.n_ends", m->n_ends, 0, max_seqs);
	CHECK_RANGE("step.n_new", m->n_new, 0, max_seqs);
	CHECK_RANGE("step.n_seqs", m->n_seqs, 0, max_seqs);
	CHECK_RANGE("step.n_tokens", m->n_tokens, 0, max_rows);
	CHECK_RANGE("step.n_blocks", m->n_blocks, 0, MAX_STEP_BLOCKS);
	for (uint32_t i = 0; i < m->n_ends; i++) {
		CHECK_RANGE("step.ends", m->ends[i], 0, max_seqs - 1);
		if (!mark(ended, m->ends[i]))
			return error_set(e, STATUS_INVALID, "step.ends names slot %u twice", m->ends[i]);
	}
	uint64_t history = 0;
	for (uint32_t i = 0; i < m->n_new; i++) {
		CHECK_RANGE("step.new.slot", m->news[i].slot, 0, max_seqs - 1);
		if (!mark(begun, m->news[i].slot))
			return error_set(e, STATUS_INVALID, "step.new names slot %u twice", m->news[i].slot);
		TRY(check_new(&m->news[i], l, max_context, e));
		history += m->news[i].n_history;
	}
	CHECK_RANGE("tokens of step.new.history", history, 0, MAX_STEP_HISTORY);
	uint64_t rows = 0;
	for (uint32_t i = 0; i < m->n_seqs; i++) {
		CHECK_RANGE("step.seq.slot", m->seqs[i].slot, 0, max_seqs - 1);
		if (!mark(seen, m->seqs[i].slot))
			return error_set(e, STATUS_INVALID, "step.seq names slot %u twice", m->seqs[i].slot);
		TRY(check_seq(m, step, &m->seqs[i], l, max_context, e));
		rows += m->seqs[i].n_tokens;
	}
	CHECK_RANGE("rows of the step", rows, 0, max_rows);
	return check_ids("step.tokens", m->tokens, m->n_tokens, l->vocab_size, e);
}

static enum status check_result(const struct message_step_result *r, const struct message_limits *l, struct error *e)
{
	uint32_t max_seqs = l->max_seqs && l->max_seqs < MAX_STEP_SEQS ? l->max_seqs : MAX_STEP_SEQS;
	CHECK_RANGE("result.micro_batch", r->micro_batch, 0, MAX_STAGES - 1);
	CHECK_RANGE("result.n_tokens", r->n_tokens, 0, max_seqs);
	for (uint32_t i = 0; i < r->n_tokens; i++) {
		const struct sampled_token *t = &r->tokens[i];
		CHECK_RANGE("result.slot", t->slot, 0, max_seqs - 1);
		if (l->vocab_size)
			CHECK_RANGE("result.id", t->id, 0, l->vocab_size - 1);
		CHECK_REAL("result.logprob", t->logprob, -1e30, 1e-3);
		CHECK_RANGE("result.n_top", t->n_top, 0, MAX_TOP_LOGPROBS);
		TRY(check_ids("result.top_ids", t->top_ids, t->n_top, l->vocab_size, e));
		for (uint32_t k = 0; k < t->n_top; k++)
			CHECK_REAL("result.top_logprobs", t->top_logprobs[k], -1e30, 1e-3);
	}
	return STATUS_OK;
}

static enum status check_heartbeat(const struct message_heartbeat *h, struct error *e)
{
	CHECK_RANGE("heartbeat.n_events", h->n_events, 0, MAX_TRACE_EVENTS);
	if (h->last_step_done > h->last_step_taken)
		return error_set(e, STATUS_INVALID, "heartbeat.last_step_done is %llu, expected at most last_step_taken %llu",
		                 (unsigned long long)h->last_step_done, (unsigned long long)h->last_step_taken);
	for (uint32_t i = 0; i < h->n_events; i++) {
		CHECK_RANGE("heartbeat.event.kind", h->events[i].kind, 0, TRACE_SAMPLE);
		CHECK_RANGE("heartbeat.event.micro_batch", h->events[i].micro_batch, 0, MAX_STAGES - 1);
		CHECK_RANGE("heartbeat.event.begin_us", h->events[i].begin_us, 0, h->events[i].end_us);
	}
	return STATUS_OK;
}

static enum status check_error(const struct message_error *m, struct error *e)
{
	CHECK_TEXT("error.text", m->text);
	switch (m->status) {
	case STATUS_USAGE: case STATUS_REFUSED: case STATUS_UNAVAILABLE: case STATUS_FATAL: case STATUS_INVALID:
	case STATUS_BUSY: case STATUS_CLOSED: case STATUS_TIMEOUT: case STATUS_ABSENT:
		return STATUS_OK;
	case STATUS_OK:
		break;
	}
	return error_set(e, STATUS_INVALID, "error.status is %d, which is none", (int)m->status);
}

enum status message_check(const struct message *m, const struct message_limits *limits, struct error *e)
{
	static const struct message_limits none;
	const struct message_limits *l = limits ? limits : &none;
	bool numbered = m->type == MESSAGE_STEP || m->type == MESSAGE_STEP_RESULT;
	if (numbered != (m->step != 0))
		return error_set(e, STATUS_INVALID, "step is %llu in a message of type %s", (unsigned long long)m->step,
		                 message_type_name(m->type));
	if (numbered && m->epoch == 0)
		return error_set(e, STATUS_INVALID, "epoch is 0 in a message of type %s", message_type_name(m->type));
	switch (m->type) {
	case MESSAGE_HELLO: return check_hello(&m->hello, e);
	case MESSAGE_ASSIGN: return check_assign(&m->assign, e);
	case MESSAGE_PROGRESS:
		CHECK_TEXT("progress.what", m->progress.what);
		CHECK_RANGE("progress.done_bytes", m->progress.done_bytes, 0, m->progress.total_bytes);
		return STATUS_OK;
	case MESSAGE_BUDGET: return check_budget(&m->budget, e);
	case MESSAGE_CONFIGURE: return check_configure(&m->configure, e);
	case MESSAGE_STEP: return check_step(&m->step_, m->step, l, e);
	case MESSAGE_STEP_RESULT: return check_result(&m->result, l, e);
	case MESSAGE_HEARTBEAT: return check_heartbeat(&m->heartbeat, e);
	case MESSAGE_ERROR: return check_error(&m->error, e);
	case MESSAGE_PROBE: case MESSAGE_READY: case MESSAGE_DRAIN:
		return STATUS_OK;
	case MESSAGE_TYPE_COUNT:
		break;
	}
	return error_set(e, STATUS_INVALID, "type is %d, which is none", (int)m->type);
}

// A step carries prompts and histories, a result up to MAX_TOP_LOGPROBS per row, a heartbeat trace events.
size_t message_type_cap(enum message_type t)
{
	switch (t) {
	case MESSAGE_STEP: return MESSAGE_CAP_BYTES;
	case MESSAGE_STEP_RESULT: return 2 << 20;
	case MESSAGE_HEARTBEAT: return 256 << 10;
	default: return 16 << 10;
	}
}

const char *message_type_name(enum message_type t)
{
	static const char *const names[MESSAGE_TYPE_COUNT] = {
		[MESSAGE_HELLO] = "hello", [MESSAGE_ASSIGN] = "assign", [MESSAGE_PROGRESS] = "progress",
		[MESSAGE_BUDGET] = "budget", [MESSAGE_CONFIGURE] = "configure", [MESSAGE_PROBE] = "probe",
		[MESSAGE_READY] = "ready", [MESSAGE_STEP] = "step", [MESSAGE_STEP_RESULT] = "step result",
		[MESSAGE_HEARTBEAT] = "heartbeat", [MESSAGE_DRAIN] = "drain", [MESSAGE_ERROR] = "error",
	};
	return (unsigned)t < MESSAGE_TYPE_COUNT && names[t] ? names[t] : "unknown";
}
