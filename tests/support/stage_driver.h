// Runs a pipeline of 1 to 8 stages inside one test, one after another on the calling thread, over a transport of queues in
// memory. Makes steps as the scheduler would: prompts in chunks, then decode rows by reference.
#ifndef STAGECOACH_TESTS_STAGE_DRIVER_H
#define STAGECOACH_TESTS_STAGE_DRIVER_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "worker/stage.h"

enum { DRIVER_MAX_STAGES = 8, DRIVER_BLOCKS = 512 };

// An edge: what was sent is kept until it is waited for.
struct edge {
	struct { uint64_t step; void *data; size_t bytes; } frame[1024];
	struct { uint64_t step; void *buffer; size_t bytes; } post[1024];
	unsigned frame_head, frame_count, post_head, post_count;
};

static enum status memory_post(struct edge *edge, uint64_t step, void *buffer, size_t bytes, struct error *e)
{
	unsigned i = (edge->post_head + edge->post_count++) % 1024;
	edge->post[i].step = step;
	edge->post[i].buffer = buffer;
	edge->post[i].bytes = bytes;
	return STATUS_OK;
}

static enum status memory_wait(struct edge *edge, unsigned timeout_ms, struct error *e)
{
	if (!edge->frame_count)
		return error_set(e, STATUS_CLOSED, "nothing was sent");
	unsigned p = edge->post_head, f = edge->frame_head;
	if (edge->post[p].step != edge->frame[f].step || edge->post[p].bytes != edge->frame[f].bytes)
		return error_set(e, STATUS_INVALID, "step %llu, %zu bytes posted, step %llu, %zu bytes sent",
		                 (unsigned long long)edge->post[p].step, edge->post[p].bytes,
		                 (unsigned long long)edge->frame[f].step, edge->frame[f].bytes);
	memcpy(edge->post[p].buffer, edge->frame[f].data, edge->post[p].bytes);
	free(edge->frame[f].data);
	edge->post_head = (p + 1) % 1024;
	edge->post_count--;
	edge->frame_head = (f + 1) % 1024;
	edge->frame_count--;
	return STATUS_OK;
}

static enum status memory_send(struct edge *edge, uint64_t step, const void *buffer, size_t bytes, struct error *e)
{
	unsigned i = (edge->frame_head + edge->frame_count++) % 1024;
	edge->frame[i].step = step;
	edge->frame[i].bytes = bytes;
	edge->frame[i].data = malloc(bytes);
	memcpy(edge->frame[i].data, buffer, bytes);
	return STATUS_OK;
}

static const struct transport memory_transport = {
	.name = "memory", .post_receive = memory_post, .wait_receive = memory_wait, .send = memory_send};

struct driver_options {
	const char *model;             // path
	bool dummy;
	int n_stages;
	uint32_t max_batch_tokens, max_seqs, max_context, block_size;
	int threads;                   // per stage
	enum dtype kv_dtype;
	enum ops_isa isa;
};

struct driver_seq {
	uint32_t slot;
	uint32_t prompt[2048], n_prompt;
	uint32_t done;                 // tokens in the cache
	uint32_t n_blocks, block[256];
	uint32_t out[1024], n_out;
	float logprob[1024];
	uint64_t ref_step; uint32_t ref_row; // where its last token was sampled
	struct sampling_params sampling;
	bool known;                    // workers know it
	bool truncate;                 // the next step cuts it to `done` tokens first
	uint32_t prompt_counts;        // tokens that sampling takes as prompt; 0 = n_prompt
	bool want_logits;
	float *logits;                 // [n_prompt + n_out, vocab_rows], of every row that was run
};

struct driver {
	struct driver_options o;
	struct ops_context *context;
	struct model *model;           // while something is read in place
	struct stage *stage[DRIVER_MAX_STAGES];
	struct edge *edge[DRIVER_MAX_STAGES]; // into stage i
	struct model_config config;
	uint64_t step;
	uint32_t next_block;
};

static void driver_open(struct driver *d, const struct driver_options *o)
{
	struct error e = {""};
	memset(d, 0, sizeof *d);
	d->o = *o;
	struct model *model = NULL;
	cr_assert_eq(model_open(&model, o->model, &(struct model_open_options){.load_dummy = o->dummy}, &e), STATUS_OK, "%s",
	             e.text);
	d->config = *model_config(model);
	cr_assert_eq(ops_cpu()->create(&d->context, &(struct ops_options){
		.threads = o->threads ? o->threads : 1, .max_rows = (int)o->max_batch_tokens, .isa = o->isa}, &e),
		STATUS_OK, "%s", e.text);
	uint32_t at = 0, blocks = DRIVER_BLOCKS, n = (uint32_t)o->n_stages, layers = (uint32_t)d->config.n_layers;
	bool borrows = false;
	for (uint32_t i = 0; i < n; i++) {
		uint32_t end = (i + 1) * layers / n;
		struct message_assign a = {
			.stage = i, .n_stages = n, .n_ranks = 1, .first_layer = at, .n_layers = end - at,
			.has_embedding = i == 0, .has_head = i + 1 == n, .act_dtype = DTYPE_F32, .kv_dtype = o->kv_dtype,
			.block_size = o->block_size, .max_seqs = o->max_seqs, .max_batch_tokens = o->max_batch_tokens,
			.max_context = o->max_context};
		cr_assert_eq(stage_create(&d->stage[i], &(struct stage_options){
			.ops = ops_cpu(), .context = d->context, .assign = &a, .model = model}, &e), STATUS_OK, "%s", e.text);
		cr_assert_eq(stage_configure(d->stage[i], 1, 1, &blocks, &e), STATUS_OK, "%s", e.text);
		borrows |= stage_borrows_model(d->stage[i]);
		d->edge[i] = calloc(1, sizeof **d->edge);
		at = end;
	}
	if (n > 1)
		for (uint32_t i = 0; i < n; i++)
			stage_set_edges(d->stage[i], &memory_transport, d->edge[i], d->edge[(i + 1) % n]);
	d->model = model;
	if (!borrows)
		model_close(&d->model);
}

static void driver_close(struct driver *d)
{
	for (int i = 0; i < d->o.n_stages; i++) {
		stage_destroy(&d->stage[i]);
		while (d->edge[i]->frame_count) {
			free(d->edge[i]->frame[d->edge[i]->frame_head].data);
			d->edge[i]->frame_head = (d->edge[i]->frame_head + 1) % 1024;
			d->edge[i]->frame_count--;
		}
		free(d->edge[i]);
	}
	ops_cpu()->destroy(&d->context);
	model_close(&d->model);
}

static void driver_seq_init(struct driver_seq *s, uint32_t slot, const uint32_t *prompt, uint32_t n_prompt)
{
	memset(s, 0, sizeof *s);
	s->slot = slot;
	s->n_prompt = n_prompt;
	memcpy(s->prompt, prompt, n_prompt * sizeof *prompt);
	s->sampling = (struct sampling_params){.top_p = 1, .repetition_penalty = 1, .n_logprobs = 0, .top_k = -1};
}

// One step with the given sequences: each gets at most `chunk` tokens. Sequences whose prompt is done decode one token.
static void driver_run(struct driver *d, struct driver_seq **seqs, int n_seqs, uint32_t chunk, const uint32_t *shared,
                       uint32_t n_shared)
{
	struct error e = {""};
	struct step_seq q[64];
	struct step_new news[64];
	static uint32_t tokens[65536], blocks[4096];
	struct message m = {.type = MESSAGE_STEP, .epoch = 1, .step = ++d->step};
	m.step_ = (struct message_step){.news = news, .seqs = q, .tokens = tokens, .blocks = blocks};
	uint32_t left = d->o.max_batch_tokens;
	struct driver_seq *in[64];
	for (int i = 0; i < n_seqs && left > 0; i++) {
		struct driver_seq *s = seqs[i];
		struct step_seq *r = &q[m.step_.n_seqs];
		memset(r, 0, sizeof *r);
		if (!s->known)
			news[m.step_.n_new++] = (struct step_new){.slot = s->slot,
			                                          .n_prompt = s->prompt_counts ? s->prompt_counts : s->n_prompt,
			                                          .sampling = s->sampling, .n_history = s->done,
			                                          .history = s->prompt};
		s->known = true;
		r->slot = s->slot;
		r->start = s->done;
		r->truncate = s->truncate;
		s->truncate = false;
		if (s->done < s->n_prompt) {
			uint32_t n = s->n_prompt - s->done;
			n = n < chunk ? n : chunk;
			n = n < left ? n : left;
			r->n_tokens = n;
			r->first_token = m.step_.n_tokens;
			memcpy(tokens + m.step_.n_tokens, s->prompt + s->done, n * sizeof *tokens);
			m.step_.n_tokens += n;
			r->sample = s->done + n == s->n_prompt;
		} else {
			r->n_tokens = 1;
			r->by_reference = true;
			r->ref_step = s->ref_step;
			r->ref_row = s->ref_row;
			r->sample = true;
		}
		s->done += r->n_tokens;
		left -= r->n_tokens;
		r->first_block[0] = m.step_.n_blocks;
		for (uint32_t b = 0; b < n_shared; b++) {
			s->block[s->n_blocks++] = shared[b];
			blocks[m.step_.n_blocks++] = shared[b];
			r->n_blocks[0]++;
		}
		while (s->n_blocks * d->o.block_size < s->done) { // ids in a scattered order on purpose
			cr_assert(d->next_block < DRIVER_BLOCKS);
			uint32_t id = d->next_block++ * 197 % DRIVER_BLOCKS;
			s->block[s->n_blocks++] = id;
			blocks[m.step_.n_blocks++] = id;
			r->n_blocks[0]++;
		}
		in[m.step_.n_seqs++] = s;
	}
	struct message result = {0};
	for (int i = 0; i < d->o.n_stages; i++)
		cr_assert_eq(stage_run(d->stage[i], &m, &result, &e), STATUS_OK, "stage %d: %s", i, e.text);
	uint32_t row = 0, sampled = 0;
	for (uint32_t i = 0; i < m.step_.n_seqs; i++) {
		if (q[i].sample) {
			const struct sampled_token *t = &result.result.tokens[sampled];
			cr_assert_eq(t->slot, in[i]->slot);
			in[i]->logprob[in[i]->n_out] = t->logprob;
			in[i]->out[in[i]->n_out++] = t->id;
			in[i]->ref_step = d->step;
			in[i]->ref_row = sampled++;
		}
		if (in[i]->want_logits) {
			size_t vocab = (size_t)d->config.vocab_rows;
			in[i]->logits = realloc(in[i]->logits, in[i]->done * vocab * sizeof(float));
			for (uint32_t t = 0; t < q[i].n_tokens; t++)
				memcpy(in[i]->logits + (q[i].start + t) * vocab,
				       stage_logits(d->stage[d->o.n_stages - 1], (int)(row + t)), vocab * sizeof(float));
		}
		row += q[i].n_tokens;
	}
	cr_assert_eq(sampled, result.result.n_tokens);
}

static void driver_step(struct driver *d, struct driver_seq **seqs, int n_seqs, uint32_t chunk)
{
	driver_run(d, seqs, n_seqs, chunk, NULL, 0);
}

// The first step of a sequence whose `done` tokens lie in blocks that another one filled.
__attribute__((unused)) static void driver_step_shared(struct driver *d, struct driver_seq *s, const uint32_t *shared, uint32_t n_shared)
{
	driver_run(d, &s, 1, 512, shared, n_shared);
}

__attribute__((unused)) static void driver_end(struct driver *d, struct driver_seq *s)
{
	struct error e = {""};
	struct message m = {.type = MESSAGE_STEP, .epoch = 1, .step = ++d->step};
	m.step_ = (struct message_step){.n_ends = 1, .ends = &s->slot};
	struct message result = {0};
	for (int i = 0; i < d->o.n_stages; i++)
		cr_assert_eq(stage_run(d->stage[i], &m, &result, &e), STATUS_OK, "stage %d: %s", i, e.text);
	s->known = false;
}

// Prompt in chunks, then greedy decoding to n_out tokens.
static void driver_generate(struct driver *d, struct driver_seq *s, uint32_t chunk, uint32_t n_out)
{
	while (s->n_out < n_out)
		driver_step(d, &s, 1, chunk);
}

#endif
