// See stage.h.
#include "worker/stage.h"

#include <stdlib.h>
#include <string.h>

enum { WAIT_SLICE_MS = 1000 };

struct stage {
	const struct ops *ops;
	struct ops_context *context;
	struct message_assign assign;
	struct model_config config;
	struct ring *ring;
	const struct message *(*peek_next)(void *user);
	void *user;

	struct stage_weights *weights;
	struct forward *forward;
	struct sampler *sampler;       // last stage
	struct batch_options batch_options;
	struct batch batch;
	struct ids_ring ids;           // first and last stage
	struct sample_row *rows;       // [max_seqs], last stage
	struct sampled_token *tokens;  // [max_seqs], last stage
	uint32_t *top_ids; float *top_logprobs; // [max_seqs, MAX_TOP_LOGPROBS], last stage

	uint32_t epoch;
	struct kv_cache *kv;
	const struct transport *transport;
	struct edge *in, *out;
	uint64_t last_step;            // run in this epoch
	uint64_t posted_step;          // hidden states are posted up to here
	int hidden_of_posted;          // which buffer posted_step's hidden states go to
	struct { uint64_t step[IDS_RING_STEPS]; unsigned head, count; } ids_due; // frames posted, in order
	float *last_hidden;
};

static bool is_first(const struct stage *s)
{
	return s->assign.stage == 0;
}

bool stage_is_last(const struct stage *s)
{
	return s->assign.stage + 1 == s->assign.n_stages;
}

static enum status check_assign(const struct message_assign *a, const struct model_config *c, struct error *e)
{
	if (a->n_ranks != 1 || a->rank != 0)
		return error_set(e, STATUS_REFUSED, "tensor parallelism: rank %u of %u; one rank per stage is built", a->rank,
		                 a->n_ranks);
	if (a->stage >= a->n_stages || a->has_embedding != (a->stage == 0) ||
	    a->has_head != (a->stage + 1 == a->n_stages))
		return error_set(e, STATUS_REFUSED,
		                 "stage %u of %u: the first one holds the embedding and the last one the head", a->stage,
		                 a->n_stages);
	if (a->act_dtype != DTYPE_F32)
		return error_set(e, STATUS_REFUSED, "activations of type %s: CPU workers compute in float32",
		                 dtype_info(a->act_dtype)->name);
	if (a->kv_dtype != DTYPE_F32 && a->kv_dtype != DTYPE_F16 && a->kv_dtype != DTYPE_BF16)
		return error_set(e, STATUS_REFUSED, "KV of type %s: CPU workers have float32, float16 and bfloat16",
		                 dtype_info(a->kv_dtype)->name);
	if (a->max_context < 1 || a->max_batch_tokens < 1 || a->max_seqs < 1 || a->block_size < 1)
		return error_set(e, STATUS_REFUSED, "context %u, batch tokens %u, sequences %u, block size %u: all from 1",
		                 a->max_context, a->max_batch_tokens, a->max_seqs, a->block_size);
	if (c->n_heads < 1 || c->n_kv_heads < 1 || c->n_heads % c->n_kv_heads)
		return error_set(e, STATUS_REFUSED, "%d query heads over %d KV heads", c->n_heads, c->n_kv_heads);
	return STATUS_OK;
}

enum status stage_create(struct stage **out, const struct stage_options *o, struct error *e)
{
	enum status status;
	const struct message_assign *a = o->assign;
	struct stage *s = xcalloc(1, sizeof *s);
	*out = NULL;
	s->ops = o->ops;
	s->context = o->context;
	s->assign = *a;
	s->config = *model_config(o->model);
	s->ring = o->ring;
	s->peek_next = o->peek_next;
	s->user = o->user;
	TRY_GOTO(check_assign(a, &s->config, e), out);
	TRY_GOTO(stage_weights_load(&s->weights, &(struct stage_weights_options){
		.ops = o->ops, .context = o->context, .model = o->model, .first_layer = a->first_layer,
		.n_layers = a->n_layers, .has_embedding = a->has_embedding, .has_head = a->has_head,
		.progress = o->progress, .user = o->user}, e), out);
	TRY_GOTO(forward_create(&s->forward, &(struct forward_options){
		.ops = o->ops, .context = o->context, .config = &s->config, .weights = s->weights,
		.has_head = a->has_head, .max_rows = a->max_batch_tokens, .max_seqs = a->max_seqs,
		.max_context = a->max_context}, e), out);
	s->batch_options = (struct batch_options){
		.max_rows = a->max_batch_tokens, .max_seqs = a->max_seqs, .max_context = a->max_context,
		.block_size = a->block_size, .n_groups = 1, .vocab_rows = s->config.vocab_rows};
	batch_create(&s->batch, &s->batch_options);
	if (is_first(s) || stage_is_last(s))
		ids_ring_create(&s->ids, a->max_seqs);
	if (stage_is_last(s)) {
		sampler_create(&s->sampler, a->max_seqs, a->max_context);
		s->rows = xcalloc(a->max_seqs, sizeof *s->rows);
		s->tokens = xcalloc(a->max_seqs, sizeof *s->tokens);
		s->top_ids = xcalloc((unsigned long)a->max_seqs * MAX_TOP_LOGPROBS, sizeof *s->top_ids);
		s->top_logprobs = xcalloc((unsigned long)a->max_seqs * MAX_TOP_LOGPROBS, sizeof *s->top_logprobs);
	}
out:
	if (status == STATUS_OK)
		*out = s;
	else
		stage_destroy(&s);
	return status;
}

void stage_destroy(struct stage **stage)
{
	struct stage *s = *stage;
	if (!s)
		return;
	kv_cache_destroy(&s->kv);
	sampler_destroy(&s->sampler);
	batch_destroy(&s->batch);
	ids_ring_destroy(&s->ids);
	forward_destroy(&s->forward);
	stage_weights_destroy(&s->weights);
	free(s->rows);
	free(s->tokens);
	free(s->top_ids);
	free(s->top_logprobs);
	free(s);
	*stage = NULL;
}

bool stage_borrows_model(const struct stage *s)
{
	return s->weights->borrows;
}

const struct model_config *stage_config(const struct stage *s)
{
	return &s->config;
}

uint64_t stage_weight_bytes(const struct stage *s)
{
	return s->weights->own_bytes + s->weights->borrowed_bytes;
}

uint64_t stage_own_weight_bytes(const struct stage *s)
{
	return s->weights->own_bytes;
}

uint64_t stage_workspace_bytes(const struct stage *s)
{
	return forward_workspace_bytes(s->forward) + batch_bytes(&s->batch_options);
}

uint64_t stage_block_bytes(const struct stage *s)
{
	return kv_cache_block_bytes(s->assign.kv_dtype, (int)s->assign.block_size, s->config.n_kv_heads, s->config.head_dim,
	                            (int)s->assign.n_layers);
}

enum frame_kind stage_in_kind(const struct stage *s)
{
	return is_first(s) ? FRAME_IDS : FRAME_HIDDEN;
}

enum frame_kind stage_out_kind(const struct stage *s)
{
	return stage_is_last(s) ? FRAME_IDS : FRAME_HIDDEN;
}

struct message_limits stage_limits(const struct stage *s)
{
	struct message_limits l = {
		.max_seqs = s->assign.max_seqs, .max_batch_tokens = s->assign.max_batch_tokens,
		.max_context = s->assign.max_context, .vocab_size = (uint32_t)s->config.vocab_rows, .n_groups = 1};
	return l;
}

enum status stage_configure(struct stage *s, uint32_t epoch, uint32_t n_groups, const uint32_t *n_blocks, struct error *e)
{
	if (n_groups != 1)
		return error_set(e, STATUS_REFUSED, "%u KV groups: this model has one", n_groups);
	kv_cache_destroy(&s->kv);
	struct kv_cache_options o = {
		.ops = s->ops, .context = s->context, .n_layers = (int)s->assign.n_layers, .n_groups = n_groups,
		.dtype = s->assign.kv_dtype, .block_size = (int)s->assign.block_size, .n_kv_heads = s->config.n_kv_heads,
		.head_dim = s->config.head_dim, .max_seqs = s->assign.max_seqs, .max_context = s->assign.max_context};
	o.n_blocks[0] = n_blocks[0];
	TRY(kv_cache_create(&s->kv, &o, e));
	s->epoch = epoch;
	s->in = s->out = NULL;
	s->last_step = s->posted_step = 0;
	s->hidden_of_posted = 0;
	s->ids_due.head = s->ids_due.count = 0;
	s->last_hidden = NULL;
	if (s->ids.ids)
		ids_ring_clear(&s->ids);
	return STATUS_OK;
}

void stage_set_edges(struct stage *s, const struct transport *transport, struct edge *in, struct edge *out)
{
	s->transport = transport;
	s->in = in;
	s->out = out;
	if (in && transport->set_spin)
		transport->set_spin(in, s->assign.may_spin);
}

static size_t hidden_bytes(const struct stage *s, uint32_t n_rows)
{
	return (size_t)n_rows * (size_t)s->config.hidden * sizeof(float);
}

// Posts the hidden states of `step` if that is the next to be posted; a step without rows has none.
static enum status post_hidden(struct stage *s, const struct message *step, struct error *e)
{
	uint32_t n_rows, n_samples;
	if (step->step != s->posted_step + 1 || step->epoch != s->epoch)
		return STATUS_OK;
	batch_count(&step->step_, &n_rows, &n_samples);
	if (n_rows > s->assign.max_batch_tokens)
		return error_set(e, STATUS_INVALID, "step %llu: %u rows, a step has at most %u",
		                 (unsigned long long)step->step, n_rows, s->assign.max_batch_tokens);
	s->posted_step = step->step;
	s->hidden_of_posted ^= 1;
	if (n_rows == 0)
		return STATUS_OK;
	return s->transport->post_receive(s->in, step->step, forward_hidden(s->forward, s->hidden_of_posted),
	                                  hidden_bytes(s, n_rows), e);
}

static enum status wait_frame(struct stage *s, struct error *e)
{
	enum status status;
	do // a neighbour that computes for long is not a failure: heartbeats and abort() end the wait
		status = s->transport->wait_receive(s->in, WAIT_SLICE_MS, e);
	while (status == STATUS_TIMEOUT);
	return status;
}

static void record(struct stage *s, uint32_t kind, uint64_t begin_us, uint64_t end_us)
{
	if (s->ring)
		ring_add(s->ring, kind, s->batch.step, s->batch.micro_batch, begin_us, end_us, (uint32_t)s->batch.n_rows);
}

// First stage: takes id frames until the one of `step` is here.
static enum status take_ids(struct stage *s, uint64_t step, struct error *e)
{
	while (s->ids_due.count > 0) {
		uint64_t got = s->ids_due.step[s->ids_due.head];
		TRY(wait_frame(s, e));
		s->ids_due.head = (s->ids_due.head + 1) % IDS_RING_STEPS;
		s->ids_due.count--;
		ids_ring_arrived(&s->ids, got);
		if (got == step)
			return STATUS_OK;
	}
	return error_set(e, STATUS_INVALID, "step %llu was waited for, but it samples nothing", (unsigned long long)step);
}

// First stage: tokens of this step, embedded. Rows by reference wait for the ids of their step.
static enum status first_input(struct stage *s, const struct message *step, float *x, struct error *e)
{
	for (;;) {
		uint64_t wanted = 0;
		enum status status = batch_resolve(&s->batch, &s->batch_options, &step->step_, &s->ids, &wanted, e);
		if (status == STATUS_OK)
			break;
		if (status != STATUS_ABSENT)
			return status;
		if (!s->in)
			return error_set(e, STATUS_INVALID, "a row names step %llu, which has not been sampled",
			                 (unsigned long long)wanted);
		uint64_t begin = ring_now_us();
		TRY(take_ids(s, wanted, e));
		record(s, TRACE_WAIT_DATA, begin, ring_now_us());
	}
	if (s->in && s->batch.n_samples > 0) {
		while (s->ids_due.count > 0 && // nobody named the oldest; its place is needed
		       (s->ids_due.count == IDS_RING_STEPS - 1 ||
		        s->ids_due.step[s->ids_due.head] + IDS_RING_STEPS <= step->step))
			TRY(take_ids(s, s->ids_due.step[s->ids_due.head], e));
		int32_t *to = ids_ring_expect(&s->ids, step->step, (uint32_t)s->batch.n_samples);
		TRY(s->transport->post_receive(s->in, step->step, to, (size_t)s->batch.n_samples * sizeof *to, e));
		s->ids_due.step[(s->ids_due.head + s->ids_due.count++) % IDS_RING_STEPS] = step->step;
	}
	forward_embed(s->forward, &s->batch, x);
	return STATUS_OK;
}

struct between_state { struct stage *stage; enum status status; struct error error; };

static void between_layers(void *user)
{
	struct between_state *b = user;
	const struct message *next = b->stage->peek_next(b->stage->user);
	if (next && b->status == STATUS_OK)
		b->status = post_hidden(b->stage, next, &b->error);
}

// Last stage: samples, keeps the ids, and fills the result.
static void sample(struct stage *s, const float *x, int32_t *ids)
{
	struct batch *b = &s->batch;
	for (int i = 0; i < b->n_samples; i++) {
		int seq = b->sample_seq[i];
		sampler_fill(s->sampler, (uint32_t)b->seq_slot[seq], (uint32_t)b->kv_len[seq], &s->rows[i]);
	}
	forward_sample(s->forward, b, x, s->rows);
	for (int i = 0; i < b->n_samples; i++) {
		const struct sample_row *row = &s->rows[i];
		int seq = b->sample_seq[i];
		sampler_record(s->sampler, (uint32_t)b->seq_slot[seq], (uint32_t)b->kv_len[seq], row->id);
		uint32_t *top_ids = s->top_ids + (size_t)i * MAX_TOP_LOGPROBS;
		float *top_logprobs = s->top_logprobs + (size_t)i * MAX_TOP_LOGPROBS;
		for (int t = 0; t < row->n_top; t++) {
			top_ids[t] = (uint32_t)row->top_id[t];
			top_logprobs[t] = row->top_logprob[t];
		}
		ids[i] = row->id;
		s->tokens[i] = (struct sampled_token){
			.slot = (uint32_t)b->seq_slot[seq], .id = (uint32_t)row->id,
			.logprob = row->want_logprob ? row->logprob : 0, .n_top = (uint32_t)row->n_top,
			.top_ids = row->n_top ? top_ids : NULL, .top_logprobs = row->n_top ? top_logprobs : NULL};
	}
}

static enum status run_rows(struct stage *s, const struct message *step, struct error *e)
{
	struct batch *b = &s->batch;
	uint64_t begin, end;
	float *x;
	if (is_first(s)) {
		x = forward_hidden(s->forward, 0);
		TRY(first_input(s, step, x, e));
		begin = ring_now_us();
	} else {
		begin = ring_now_us();
		TRY(wait_frame(s, e));
		x = forward_hidden(s->forward, s->hidden_of_posted);
		end = ring_now_us();
		record(s, TRACE_WAIT_DATA, begin, end);
		begin = end;
	}
	struct between_state between = {.stage = s};
	bool ahead = s->peek_next && !is_first(s);
	forward_layers(s->forward, b, s->kv, s->weights->n_layers, x, ahead ? between_layers : NULL, &between);
	if (between.status != STATUS_OK) {
		if (e)
			*e = between.error;
		return between.status;
	}
	s->last_hidden = x;
	end = ring_now_us();
	record(s, TRACE_COMPUTE, begin, end);
	begin = end;
	if (!stage_is_last(s)) {
		TRY(s->transport->send(s->out, step->step, x, hidden_bytes(s, (uint32_t)b->n_rows), e));
		record(s, TRACE_SEND, begin, ring_now_us());
	} else if (b->n_samples > 0) {
		int32_t *ids = ids_ring_expect(&s->ids, step->step, (uint32_t)b->n_samples);
		sample(s, x, ids);
		ids_ring_arrived(&s->ids, step->step);
		end = ring_now_us();
		record(s, TRACE_SAMPLE, begin, end);
		if (s->out) {
			TRY(s->transport->send(s->out, step->step, ids, (size_t)b->n_samples * sizeof *ids, e));
			record(s, TRACE_SEND, end, ring_now_us());
		}
	}
	return STATUS_OK;
}

enum status stage_run(struct stage *s, const struct message *step, struct message *result, struct error *e)
{
	uint64_t begin = ring_now_us();
	ASSERT(step->type == MESSAGE_STEP && s->kv);
	if (step->step != s->last_step + 1)
		return error_set(e, STATUS_INVALID, "step %llu came after step %llu", (unsigned long long)step->step,
		                 (unsigned long long)s->last_step);
	if (s->assign.n_stages > 1 && (!s->in || !s->out))
		return error_set(e, STATUS_CLOSED, "step %llu came before the data plane", (unsigned long long)step->step);
	if (s->ring)
		ring_step_taken(s->ring, step->step);
	TRY(batch_build(&s->batch, &s->batch_options, step, s->kv, s->sampler, e));
	if (!is_first(s))
		TRY(post_hidden(s, step, e));
	if (s->batch.n_rows > 0)
		TRY(run_rows(s, step, e));
	s->last_step = step->step;
	if (s->ring)
		ring_step_done(s->ring, step->step, (uint32_t)s->batch.n_rows);
	if (stage_is_last(s) && result)
		*result = (struct message){
			.type = MESSAGE_STEP_RESULT, .epoch = s->epoch, .step = step->step,
			.result = {.micro_batch = step->step_.micro_batch, .n_tokens = (uint32_t)s->batch.n_samples,
			           .tokens = s->tokens, .stage_us = ring_now_us() - begin}};
	return STATUS_OK;
}

const float *stage_logits(struct stage *s, int row)
{
	ASSERT(stage_is_last(s) && s->last_hidden && row < s->batch.n_rows);
	return forward_logits(s->forward, s->last_hidden, row);
}

// The largest batch there can be, in KV of its own that is dropped afterwards: one sequence per max_context rows.
enum status stage_profile(struct stage *s, struct error *e)
{
	uint32_t rows = s->assign.max_batch_tokens, bs = s->assign.block_size, context = s->assign.max_context;
	uint32_t n_seqs = (rows + context - 1) / context;
	if (n_seqs > s->assign.max_seqs) {
		n_seqs = s->assign.max_seqs;
		rows = n_seqs * context;
	}
	uint32_t per_seq = (rows + n_seqs - 1) / n_seqs, blocks_each = (per_seq + bs - 1) / bs;
	uint32_t n_blocks = blocks_each * n_seqs;
	TRY(stage_configure(s, 0, 1, &n_blocks, e));
	struct step_new *news = xcalloc(n_seqs, sizeof *news);
	struct step_seq *seqs = xcalloc(n_seqs, sizeof *seqs);
	uint32_t *tokens = xcalloc(per_seq, sizeof *tokens), *blocks = xcalloc(n_blocks, sizeof *blocks);
	for (uint32_t i = 0; i < n_blocks; i++)
		blocks[i] = i;
	uint32_t left = rows, n = 0;
	for (; n < n_seqs && left > 0; n++) {
		news[n] = (struct step_new){.slot = n, .sampling = {.repetition_penalty = 1, .top_p = 1, .n_logprobs = -1}};
		seqs[n] = (struct step_seq){.slot = n, .n_tokens = left < per_seq ? left : per_seq, .sample = true,
		                            .first_block = {n * blocks_each}, .n_blocks = {blocks_each}};
		left -= seqs[n].n_tokens;
	}
	struct message step = {
		.type = MESSAGE_STEP, .step = 1,
		.step_ = {.n_new = n, .news = news, .n_seqs = n, .seqs = seqs, .n_tokens = per_seq, .tokens = tokens,
		          .n_blocks = n_blocks, .blocks = blocks}};
	enum status status;
	TRY_GOTO(batch_build(&s->batch, &s->batch_options, &step, s->kv, s->sampler, e), out);
	struct batch *b = &s->batch;
	float *x = forward_hidden(s->forward, 0);
	memset(forward_hidden(s->forward, 1), 0, hidden_bytes(s, (uint32_t)b->n_rows));
	if (is_first(s))
		forward_embed(s->forward, b, x);
	forward_layers(s->forward, b, s->kv, s->weights->n_layers > 0, x, NULL, NULL); // layers share their workspace
	if (stage_is_last(s)) { // as many rows of logits as are held at once, whatever the number of sequences
		int n_samples = b->n_rows < (int)s->assign.max_seqs ? b->n_rows : (int)s->assign.max_seqs;
		if (n_samples > FORWARD_LOGIT_ROWS)
			n_samples = FORWARD_LOGIT_ROWS;
		b->n_samples = n_samples;
		for (int i = 0; i < n_samples; i++) {
			b->sample_row[i] = i;
			sampler_fill(s->sampler, 0, 0, &s->rows[i]);
		}
		forward_sample(s->forward, b, x, s->rows);
	}
out:
	free(news);
	free(seqs);
	free(tokens);
	free(blocks);
	kv_cache_destroy(&s->kv);
	return status;
}
