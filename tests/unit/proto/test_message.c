// The codec: what goes in comes out, a step stays small, and nothing that a rule forbids passes in either direction.
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "proto/message.h"
#include "sample_messages.h"

struct wire { uint8_t *data; size_t len, capacity; };

static struct wire encoded(const struct message *m)
{
	struct wire w = {0};
	struct error e = {""};
	cr_assert_eq(message_encode(m, &w.data, &w.len, &w.capacity, &e), STATUS_OK, "%s: %s", message_type_name(m->type), e.text);
	return w;
}

static bool same(const void *a, const void *b, size_t bytes)
{
	return bytes == 0 || (a && b && !memcmp(a, b, bytes));
}

static void assert_same_step(const struct message_step *a, const struct message_step *b)
{
	cr_assert_eq(a->micro_batch, b->micro_batch);
	cr_assert_eq(a->n_ends, b->n_ends);
	cr_assert(same(a->ends, b->ends, a->n_ends * 4));
	cr_assert_eq(a->n_seqs, b->n_seqs);
	for (uint32_t i = 0; i < a->n_seqs; i++) {
		const struct step_seq *x = &a->seqs[i], *y = &b->seqs[i];
		cr_assert(x->slot == y->slot && x->start == y->start && x->n_tokens == y->n_tokens, "seq %u", i);
		cr_assert(x->truncate == y->truncate && x->sample == y->sample && x->not_ahead == y->not_ahead &&
		          x->by_reference == y->by_reference, "flags of seq %u", i);
		cr_assert(x->ref_step == y->ref_step && x->ref_row == y->ref_row && x->first_token == y->first_token);
		cr_assert(same(x->n_blocks, y->n_blocks, sizeof x->n_blocks) && same(x->first_block, y->first_block, sizeof x->first_block));
	}
	cr_assert_eq(a->n_new, b->n_new);
	for (uint32_t i = 0; i < a->n_new; i++) {
		const struct step_new *x = &a->news[i], *y = &b->news[i];
		struct sampling_params s = x->sampling, t = y->sampling;
		cr_assert(x->slot == y->slot && x->n_prompt == y->n_prompt && x->n_history == y->n_history);
		cr_assert(same(x->history, y->history, x->n_history * 4));
		cr_assert(s.n_bias == t.n_bias && s.n_stop_ids == t.n_stop_ids);
		cr_assert(same(s.bias_ids, t.bias_ids, s.n_bias * 4) && same(s.bias_values, t.bias_values, s.n_bias * 4));
		cr_assert(same(s.stop_ids, t.stop_ids, s.n_stop_ids * 4));
		cr_assert(s.temperature == t.temperature && s.top_p == t.top_p && s.min_p == t.min_p && s.top_k == t.top_k);
		cr_assert(s.repetition_penalty == t.repetition_penalty && s.presence_penalty == t.presence_penalty &&
		          s.frequency_penalty == t.frequency_penalty);
		cr_assert(s.seed == t.seed && s.choice == t.choice && s.n_logprobs == t.n_logprobs && s.min_tokens == t.min_tokens);
	}
	cr_assert(a->n_tokens == b->n_tokens && same(a->tokens, b->tokens, a->n_tokens * 4));
	cr_assert(a->n_blocks == b->n_blocks && same(a->blocks, b->blocks, a->n_blocks * 4));
}

static void assert_same(const struct message *a, const struct message *b)
{
	cr_assert(a->type == b->type && a->epoch == b->epoch && a->step == b->step);
	switch (a->type) {
	case MESSAGE_STEP: assert_same_step(&a->step_, &b->step_); break;
	case MESSAGE_STEP_RESULT:
		cr_assert(a->result.micro_batch == b->result.micro_batch && a->result.stage_us == b->result.stage_us);
		cr_assert_eq(a->result.n_tokens, b->result.n_tokens);
		for (uint32_t i = 0; i < a->result.n_tokens; i++) {
			const struct sampled_token *x = &a->result.tokens[i], *y = &b->result.tokens[i];
			cr_assert(x->slot == y->slot && x->id == y->id && x->logprob == y->logprob && x->n_top == y->n_top);
			cr_assert(same(x->top_ids, y->top_ids, x->n_top * 4) && same(x->top_logprobs, y->top_logprobs, x->n_top * 4));
		}
		break;
	case MESSAGE_HEARTBEAT:
		cr_assert(!memcmp(&a->heartbeat, &b->heartbeat, offsetof(struct message_heartbeat, events)));
		for (uint32_t i = 0; i < a->heartbeat.n_events; i++) {
			const struct trace_event *x = &a->heartbeat.events[i], *y = &b->heartbeat.events[i];
			cr_assert(x->step == y->step && x->micro_batch == y->micro_batch && x->begin_us == y->begin_us &&
			          x->end_us == y->end_us && x->kind == y->kind && x->n_rows == y->n_rows);
		}
		break;
	case MESSAGE_HELLO: cr_assert(!memcmp(&a->hello, &b->hello, sizeof a->hello)); break;
	case MESSAGE_ASSIGN: cr_assert(!memcmp(&a->assign, &b->assign, sizeof a->assign)); break;
	case MESSAGE_PROGRESS: cr_assert(!memcmp(&a->progress, &b->progress, sizeof a->progress)); break;
	case MESSAGE_BUDGET: cr_assert(!memcmp(&a->budget, &b->budget, sizeof a->budget)); break;
	case MESSAGE_CONFIGURE: cr_assert(!memcmp(&a->configure, &b->configure, sizeof a->configure)); break;
	case MESSAGE_ERROR: cr_assert(!memcmp(&a->error, &b->error, sizeof a->error)); break;
	default: break;
	}
}

Test(message, every_type_comes_out_as_it_went_in)
{
	for (int type = 1; type < MESSAGE_TYPE_COUNT; type++) {
		struct message m = sample_message((enum message_type)type), back;
		struct wire w = encoded(&m);
		struct error e = {""};
		cr_assert_eq(message_decode(&back, w.data, w.len, NULL, &e), STATUS_OK, "%s: %s", message_type_name(m.type), e.text);
		assert_same(&m, &back);
		message_free(&back);
		free(w.data);
	}
}

static void fill_decode_step(struct step_seq *seqs, uint32_t *blocks, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		seqs[i] = (struct step_seq){.slot = i, .start = 100000 + i, .n_tokens = 1, .sample = true, .by_reference = true,
		                            .ref_step = 999990, .ref_row = i, .first_block = {i}, .n_blocks = {1}};
		blocks[i] = 200000 + i;
	}
}

Test(message, a_decode_step_of_256_sequences_stays_below_8_kib)
{
	static struct step_seq seqs[256];
	static uint32_t blocks[256];
	fill_decode_step(seqs, blocks, 256);
	struct message m = {.type = MESSAGE_STEP, .epoch = 3, .step = 1000000,
	                    .step_ = {.n_seqs = 256, .seqs = seqs, .n_blocks = 256, .blocks = blocks}};
	struct wire w = encoded(&m);
	cr_assert_lt(w.len, (size_t)8192, "%zu bytes", w.len);
	struct message back;
	struct error e;
	cr_assert_eq(message_decode(&back, w.data, w.len, NULL, &e), STATUS_OK);
	assert_same(&m, &back);
	message_free(&back);
	free(w.data);
}

Test(message, a_message_cut_anywhere_is_refused_or_still_valid)
{
	for (int type = 1; type < MESSAGE_TYPE_COUNT; type++) {
		struct message m = sample_message((enum message_type)type), back;
		struct wire w = encoded(&m);
		for (size_t n = 0; n < w.len; n++) {
			uint8_t *copy = malloc(n + 1);
			memcpy(copy, w.data, n);
			struct error e = {""};
			enum status s = message_decode(&back, copy, n, NULL, &e);
			cr_assert(s == STATUS_OK || (s == STATUS_INVALID && e.text[0]));
			message_free(&back);
			free(copy);
		}
		free(w.data);
	}
}

Test(message, flipped_bits_never_break_the_rules)
{
	for (int type = 1; type < MESSAGE_TYPE_COUNT; type++) {
		struct message m = sample_message((enum message_type)type), back;
		struct wire w = encoded(&m), again = {0};
		for (size_t bit = 0; bit < w.len * 8; bit++) {
			struct error e = {""};
			w.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
			if (message_decode(&back, w.data, w.len, NULL, &e) == STATUS_OK)
				cr_assert_eq(message_encode(&back, &again.data, &again.len, &again.capacity, &e), STATUS_OK, "%s", e.text);
			message_free(&back);
			w.data[bit / 8] ^= (uint8_t)(1 << bit % 8);
		}
		free(w.data);
		free(again.data);
	}
}

// ---- violations ----------------------------------------------------------------------------------------------------

// Each breaks one rule of a valid message; the error has to name the field.
struct violation { const char *field; enum message_type type; void (*breaks)(struct message *); };

static struct step_new broken_new;
static struct step_seq broken_seqs[2];
static struct sampled_token broken_token;
static struct trace_event broken_event;
static uint32_t two_equal[2] = {3, 3};

static struct sampling_params *new_sampling(struct message *m)
{
	broken_new = sample_news[0];
	m->step_.n_new = 1;
	m->step_.news = &broken_new;
	return &broken_new.sampling;
}

static struct step_seq *seq(struct message *m)
{
	memcpy(broken_seqs, sample_seqs, sizeof broken_seqs);
	m->step_.seqs = broken_seqs;
	return broken_seqs;
}

static struct sampled_token *token(struct message *m)
{
	broken_token = sample_results[0];
	m->result.n_tokens = 1;
	m->result.tokens = &broken_token;
	return &broken_token;
}

static struct trace_event *event(struct message *m)
{
	broken_event = sample_events[0];
	m->heartbeat.n_events = 1;
	m->heartbeat.events = &broken_event;
	return &broken_event;
}

#define BREAK(name, ...) \
	static void name(struct message *m)                                                                            \
	{                                                                                                              \
		__VA_ARGS__; \
	}
BREAK(hello_version, m->hello.protocol_version = 2)
BREAK(hello_kind, m->hello.device_kind = (enum device_kind)9)
BREAK(hello_bandwidth, m->hello.bandwidth_bytes_per_s = NAN)
BREAK(hello_flops, m->hello.matmul_flops = INFINITY)
BREAK(hello_ratio, m->hello.weight_ratio[2] = -1)
BREAK(hello_index, m->hello.worker_index = 100000)
BREAK(hello_host, memset(m->hello.host, 'x', sizeof m->hello.host))
BREAK(assign_stage, m->assign.stage = 2)
BREAK(assign_stages, m->assign.n_stages = MAX_STAGES + 1)
BREAK(assign_layers, m->assign.n_layers = 1020)
BREAK(assign_act, m->assign.act_dtype = DTYPE_Q4_0)
BREAK(assign_kv, m->assign.kv_dtype = DTYPE_Q8_0)
BREAK(assign_block_size, m->assign.block_size = 0)
BREAK(assign_seqs, m->assign.max_seqs = MAX_STEP_SEQS + 1)
BREAK(assign_batch, m->assign.max_batch_tokens = 0)
BREAK(assign_cores, m->assign.n_cores = MAX_CORES + 1)
BREAK(progress_done, m->progress.done_bytes = 101)
BREAK(budget_groups, m->budget.n_groups = 0)
BREAK(budget_address, strcpy(m->budget.data_address, "http://x"))
BREAK(configure_endpoint, strcpy(m->configure.steps_endpoint, "inproc://x"))
BREAK(configure_blocks, m->configure.n_blocks[0] = 0)
BREAK(configure_groups, m->configure.n_groups = 5)
BREAK(step_number, m->step = 0)
BREAK(step_epoch, m->epoch = 0)
BREAK(step_micro, m->step_.micro_batch = MAX_STAGES)
BREAK(step_ends_twice, m->step_.ends = two_equal)
BREAK(step_temperature, new_sampling(m)->temperature = NAN)
BREAK(step_temperature_low, new_sampling(m)->temperature = -1)
BREAK(step_top_p, new_sampling(m)->top_p = 1.5f)
BREAK(step_min_p, new_sampling(m)->min_p = -0.1f)
BREAK(step_repetition, new_sampling(m)->repetition_penalty = 0)
BREAK(step_presence, new_sampling(m)->presence_penalty = INFINITY)
BREAK(step_top_k, new_sampling(m)->top_k = -2)
BREAK(step_logprobs, new_sampling(m)->n_logprobs = 21)
BREAK(step_bias, static const float bad[2] = {NAN, 0}; new_sampling(m)->bias_values = bad)
BREAK(step_new_slot, new_sampling(m); broken_new.slot = MAX_STEP_SEQS)
BREAK(step_slot, seq(m)->slot = MAX_STEP_SEQS)
BREAK(step_slot_twice, seq(m)->slot = 1)
BREAK(step_rows, seq(m)->n_tokens = 0)
BREAK(step_start, seq(m)->start = 0xffffffff)
BREAK(step_first_token, seq(m)->first_token = 1)
BREAK(step_first_token_wraps, seq(m)->first_token = 0xfffffffe)
BREAK(step_block_range, seq(m)->first_block[0] = 2)
BREAK(step_block_wraps, seq(m)->n_blocks[0] = 0xffffffff)
BREAK(step_ref_now, seq(m)[1].ref_step = 42)
BREAK(step_ref_none, seq(m)[1].ref_step = 0)
BREAK(step_ref_row, seq(m)[1].ref_row = MAX_STEP_SEQS)
BREAK(step_ref_rows, seq(m)[1].n_tokens = 2)
BREAK(result_slot, token(m)->slot = MAX_STEP_SEQS)
BREAK(result_logprob, token(m)->logprob = NAN)
BREAK(result_positive, token(m)->logprob = 1)
BREAK(result_top, token(m)->n_top = MAX_TOP_LOGPROBS + 1)
BREAK(heartbeat_done, m->heartbeat.last_step_done = 72)
BREAK(heartbeat_kind, event(m)->kind = 99)
BREAK(heartbeat_time, event(m)->end_us = 1)
BREAK(error_status, m->error.status = (enum status)1)
BREAK(probe_step, m->step = 4)
BREAK(no_type, m->type = MESSAGE_TYPE_COUNT)

static const struct violation violations[] = {
	{"hello.protocol_version", MESSAGE_HELLO, hello_version}, {"hello.device_kind", MESSAGE_HELLO, hello_kind},
	{"hello.bandwidth", MESSAGE_HELLO, hello_bandwidth}, {"hello.matmul_flops", MESSAGE_HELLO, hello_flops},
	{"hello.weight_ratio", MESSAGE_HELLO, hello_ratio}, {"hello.worker_index", MESSAGE_HELLO, hello_index},
	{"hello.host", MESSAGE_HELLO, hello_host}, {"assign.stage", MESSAGE_ASSIGN, assign_stage},
	{"assign.n_stages", MESSAGE_ASSIGN, assign_stages}, {"assign.n_layers", MESSAGE_ASSIGN, assign_layers},
	{"assign.act_dtype", MESSAGE_ASSIGN, assign_act}, {"assign.kv_dtype", MESSAGE_ASSIGN, assign_kv},
	{"assign.block_size", MESSAGE_ASSIGN, assign_block_size}, {"assign.max_seqs", MESSAGE_ASSIGN, assign_seqs},
	{"assign.max_batch_tokens", MESSAGE_ASSIGN, assign_batch}, {"assign.n_cores", MESSAGE_ASSIGN, assign_cores},
	{"progress.done_bytes", MESSAGE_PROGRESS, progress_done}, {"budget.n_groups", MESSAGE_BUDGET, budget_groups},
	{"budget.data_address", MESSAGE_BUDGET, budget_address},
	{"configure.steps_endpoint", MESSAGE_CONFIGURE, configure_endpoint},
	{"configure.n_blocks", MESSAGE_CONFIGURE, configure_blocks}, {"configure.n_groups", MESSAGE_CONFIGURE, configure_groups},
	{"step is 0", MESSAGE_STEP, step_number}, {"epoch is 0", MESSAGE_STEP, step_epoch},
	{"step.micro_batch", MESSAGE_STEP, step_micro}, {"step.ends", MESSAGE_STEP, step_ends_twice},
	{"step.new.temperature", MESSAGE_STEP, step_temperature}, {"step.new.temperature", MESSAGE_STEP, step_temperature_low},
	{"step.new.top_p", MESSAGE_STEP, step_top_p}, {"step.new.min_p", MESSAGE_STEP, step_min_p},
	{"step.new.repetition_penalty", MESSAGE_STEP, step_repetition},
	{"step.new.presence_penalty", MESSAGE_STEP, step_presence}, {"step.new.top_k", MESSAGE_STEP, step_top_k},
	{"step.new.n_logprobs", MESSAGE_STEP, step_logprobs}, {"step.new.bias_values", MESSAGE_STEP, step_bias},
	{"step.new.slot", MESSAGE_STEP, step_new_slot}, {"step.seq.slot", MESSAGE_STEP, step_slot},
	{"slot 1 twice", MESSAGE_STEP, step_slot_twice}, {"step.seq.n_tokens", MESSAGE_STEP, step_rows},
	{"step.seq.start", MESSAGE_STEP, step_start}, {"step.seq.first_token", MESSAGE_STEP, step_first_token},
	{"step.seq.first_token", MESSAGE_STEP, step_first_token_wraps}, {"step.seq.first_block", MESSAGE_STEP, step_block_range},
	{"step.seq.first_block", MESSAGE_STEP, step_block_wraps}, {"step.seq.ref_step", MESSAGE_STEP, step_ref_now},
	{"step.seq.ref_step", MESSAGE_STEP, step_ref_none}, {"step.seq.ref_row", MESSAGE_STEP, step_ref_row},
	{"row by reference", MESSAGE_STEP, step_ref_rows}, {"result.slot", MESSAGE_STEP_RESULT, result_slot},
	{"result.logprob", MESSAGE_STEP_RESULT, result_logprob}, {"result.logprob", MESSAGE_STEP_RESULT, result_positive},
	{"result.n_top", MESSAGE_STEP_RESULT, result_top}, {"heartbeat.last_step_done", MESSAGE_HEARTBEAT, heartbeat_done},
	{"heartbeat.event.kind", MESSAGE_HEARTBEAT, heartbeat_kind}, {"heartbeat.event.begin_us", MESSAGE_HEARTBEAT, heartbeat_time},
	{"error.status", MESSAGE_ERROR, error_status}, {"step is 4", MESSAGE_PROBE, probe_step}, {"type is", MESSAGE_DRAIN, no_type},
};

Test(message, each_broken_rule_is_named)
{
	for (size_t i = 0; i < sizeof violations / sizeof violations[0]; i++) {
		const struct violation *v = &violations[i];
		struct message m = sample_message(v->type);
		struct wire w = {0};
		struct error e = {""};
		v->breaks(&m);
		cr_assert_eq(message_encode(&m, &w.data, &w.len, &w.capacity, &e), STATUS_INVALID, "row %zu (%s) passed", i, v->field);
		cr_assert(strstr(e.text, v->field), "row %zu: \"%s\" does not name %s", i, e.text, v->field);
		free(w.data);
	}
}

Test(message, what_a_receiver_knows_limits_what_it_takes)
{
	static const struct { const char *field; enum message_type type; struct message_limits limits; } rows[] = {
		{"step.ends", MESSAGE_STEP, {.max_seqs = 9}}, {"step.tokens", MESSAGE_STEP, {.vocab_size = 14}},
		{"rows of the step", MESSAGE_STEP, {.max_batch_tokens = 5}}, {"step.seq.start", MESSAGE_STEP, {.max_context = 64}},
		{"step.blocks", MESSAGE_STEP, {.n_groups = 2, .n_blocks = {6, 100}}},
		{"step.blocks", MESSAGE_STEP, {.n_groups = 2, .n_blocks = {7, 99}}}, {"KV group 1", MESSAGE_STEP, {.n_groups = 1}},
		{"step.new.bias_ids", MESSAGE_STEP, {.vocab_size = 8}}, {"result.id", MESSAGE_STEP_RESULT, {.vocab_size = 40}},
		{"result.top_ids", MESSAGE_STEP_RESULT, {.vocab_size = 41}}, {"result.slot", MESSAGE_STEP_RESULT, {.max_seqs = 3}},
	};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		struct message m = sample_message(rows[i].type), back;
		struct wire w = encoded(&m);
		struct error e = {""};
		cr_assert_eq(message_decode(&back, w.data, w.len, &rows[i].limits, &e), STATUS_INVALID, "row %zu passed", i);
		cr_assert(strstr(e.text, rows[i].field), "row %zu: \"%s\" does not name %s", i, e.text, rows[i].field);
		free(w.data);
	}
	const struct message_limits exact = {.max_seqs = 10, .max_batch_tokens = 6, .max_context = 65, .vocab_size = 15,
	                                     .n_groups = 2, .n_blocks = {7, 100}};
	struct message m = sample_message(MESSAGE_STEP), back;
	struct wire w = encoded(&m);
	struct error e = {""};
	cr_assert_eq(message_decode(&back, w.data, w.len, &exact, &e), STATUS_OK, "%s", e.text);
	message_free(&back);
	free(w.data);
}

// ---- hostile input (also see fuzz_message.c) -----------------------------------------------------------------------

static void put_varint(struct wire *w, uint64_t v)
{
	do {
		if (w->len == w->capacity) {
			w->capacity = w->capacity ? w->capacity * 2 : 4096;
			w->data = realloc(w->data, w->capacity);
		}
		w->data[w->len++] = (uint8_t)(v & 127) | (v > 127 ? 128 : 0);
	} while (v >>= 7);
}

static struct wire header(enum message_type type)
{
	struct wire w = {0};
	put_varint(&w, 1 << 3);
	put_varint(&w, PROTOCOL_VERSION);
	put_varint(&w, 2 << 3);
	put_varint(&w, type);
	put_varint(&w, 3 << 3);
	put_varint(&w, 1);
	put_varint(&w, 4 << 3);
	put_varint(&w, 1);
	return w;
}

static void put_bytes(struct wire *w, const void *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (w->len == w->capacity) {
			w->capacity = w->capacity ? w->capacity * 2 : 4096;
			w->data = realloc(w->data, w->capacity);
		}
		w->data[w->len++] = ((const uint8_t *)p)[i];
	}
}

static void put_body(struct wire *w, uint32_t field, const struct wire *body)
{
	put_varint(w, field << 3 | 2);
	put_varint(w, body->len);
	put_bytes(w, body->data, body->len);
}


static void refused(struct wire *w, const char *text)
{
	struct message m;
	struct error e = {""};
	cr_assert_eq(message_decode(&m, w->data, w->len, NULL, &e), STATUS_INVALID, "accepted; expected \"%s\"", text);
	cr_assert(strstr(e.text, text), "\"%s\" does not say \"%s\"", e.text, text);
	cr_assert_null(m.storage);
	free(w->data);
	memset(w, 0, sizeof *w);
}

Test(message, two_million_empty_submessages_are_refused)
{
	struct wire w = header(MESSAGE_STEP), body = {0};
	for (int i = 0; i < 2000000; i++) {
		put_varint(&body, 3 << 3 | 2);
		put_varint(&body, 0);
	}
	put_body(&w, 10, &body);
	refused(&w, "too many fields");
	free(body.data);
}

Test(message, two_million_unknown_fields_are_refused_wherever_they_stand)
{
	struct wire fields = {0}, body = {0};
	for (int i = 0; i < 2000000; i++) {
		put_varint(&fields, 99 << 3);
		put_varint(&fields, 0);
	}
	struct wire w = header(MESSAGE_PROBE);
	put_bytes(&w, fields.data, fields.len < 8000 ? fields.len : 8000);
	refused(&w, "too many fields");
	w = header(MESSAGE_STEP);
	put_body(&w, 10, &fields);
	refused(&w, "too many fields");
	w = header(MESSAGE_STEP);
	put_body(&body, 3, &fields);
	put_body(&w, 10, &body);
	refused(&w, "too many fields");
	free(fields.data);
	free(body.data);
}

Test(message, nesting_a_million_deep_is_refused_without_recursion)
{
	// Groups and submessages of a type that the schema does not nest.
	struct wire w = header(MESSAGE_STEP);
	for (int i = 0; i < 1000000; i++)
		put_varint(&w, 3 << 3 | 3);
	refused(&w, "malformed");
	struct wire inner = {0};
	put_varint(&inner, 8);
	for (int depth = 0; depth < 2000; depth++) {
		struct wire outer = {0};
		put_body(&outer, 10, &inner);
		free(inner.data);
		inner = outer;
	}
	w = header(MESSAGE_STEP);
	put_body(&w, 10, &inner);
	free(inner.data);
	struct message m;
	struct error e = {""};
	enum status s = message_decode(&m, w.data, w.len, NULL, &e);
	cr_assert(s == STATUS_OK || s == STATUS_INVALID); // an unknown field of a step: its bytes are never looked into
	message_free(&m);
	free(w.data);
}

Test(message, what_is_too_large_for_its_type_is_refused_before_decoding)
{
	struct wire w = header(MESSAGE_HELLO), body = {0};
	for (int i = 0; i < 20000; i++)
		put_varint(&body, 0);
	put_body(&w, 5, &body);
	free(body.data);
	refused(&w, "the most is 16384");
}

Test(message, another_version_an_unknown_type_and_no_message_are_named)
{
	struct wire w = header(MESSAGE_PROBE);
	w.data[1] = 9;
	refused(&w, "protocol version 9");
	w = header(MESSAGE_PROBE);
	w.data[3] = 77;
	refused(&w, "message type 77");
	w = (struct wire){0};
	put_bytes(&w, "GET / HTTP/1.1\r\n", 16);
	refused(&w, "not a message");
	w = (struct wire){0};
	put_bytes(&w, "", 0);
	put_varint(&w, 8);
	refused(&w, "not a message");
}

Test(message, a_type_named_twice_or_a_body_of_another_type_is_refused)
{
	struct wire w = header(MESSAGE_PROBE), body = {0};
	put_varint(&w, 2 << 3);
	put_varint(&w, MESSAGE_HELLO);
	refused(&w, "two versions or types");
	w = header(MESSAGE_STEP);
	refused(&w, "without a body");
	w = header(MESSAGE_STEP);
	put_body(&w, 10, &body);
	put_body(&w, 12, &body);
	refused(&w, "with a body");
}

Test(message, arrays_of_different_lengths_and_texts_with_a_nul_are_refused)
{
	struct wire w = header(MESSAGE_STEP), body = {0};
	static const uint8_t three[] = {1, 2, 3}, two[] = {0, 0};
	put_varint(&body, 4 << 3 | 2); // slots
	put_varint(&body, 3);
	put_bytes(&body, three, 3);
	put_varint(&body, 5 << 3 | 2); // starts
	put_varint(&body, 2);
	put_bytes(&body, two, 2);
	put_body(&w, 10, &body);
	refused(&w, "step.starts has 2 items, expected 3");
	free(body.data);
	struct message m = sample_message(MESSAGE_ERROR);
	w = encoded(&m);
	memcpy(w.data + w.len - 4, "\0abc", 4);
	refused(&w, "NUL");
}

Test(message, the_largest_step_goes_through)
{
	enum { N = MAX_STEP_SEQS, ROWS = MAX_STEP_TOKENS };
	struct step_seq *seqs = calloc(N, sizeof *seqs);
	struct step_new *news = calloc(N, sizeof *news);
	uint32_t *tokens = calloc(ROWS, 4), *blocks = calloc(N, 4);
	for (uint32_t i = 0; i < N; i++) {
		seqs[i] = (struct step_seq){.slot = i, .n_tokens = ROWS / N, .sample = true, .first_token = i * (ROWS / N),
		                            .first_block = {i}, .n_blocks = {1}};
		news[i] = (struct step_new){.slot = i, .n_prompt = 1, .sampling = {.temperature = 1, .top_p = 0.5f, .min_p = 0.1f,
		                            .repetition_penalty = 1.5f, .top_k = 3, .seed = UINT64_MAX, .n_logprobs = 20}};
		blocks[i] = 1000000 + i;
	}
	for (uint32_t i = 0; i < ROWS; i++)
		tokens[i] = 250000 + i;
	struct message m = {.type = MESSAGE_STEP, .epoch = 1, .step = 1,
	                    .step_ = {.n_new = N, .news = news, .n_seqs = N, .seqs = seqs, .n_tokens = ROWS, .tokens = tokens, .n_blocks = N, .blocks = blocks}};
	struct wire w = encoded(&m);
	struct message back;
	struct error e = {""};
	cr_assert_eq(message_decode(&back, w.data, w.len, NULL, &e), STATUS_OK, "%s", e.text);
	assert_same(&m, &back);
	message_free(&back);
	free(w.data);
	free(seqs);
	free(news);
	free(tokens);
	free(blocks);
}
