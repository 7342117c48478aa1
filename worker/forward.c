// See forward.h. The workspace is one allocation carved by a table.
#include "worker/forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/rope_table.h"

struct forward {
	const struct ops *ops;
	struct ops_context *context;
	struct model_config config;
	const struct stage_weights *weights;
	uint64_t bytes;
	void *memory;                // what the fields below are carved from
	float *hidden[2];            // [max_rows, hidden]
	float *norm;                 // [max_rows, hidden]
	float *q;                    // [max_rows, n_heads * head_dim]
	float *k, *v;                // [max_rows, n_kv_heads * head_dim]
	float *attention;            // [max_rows, n_heads * head_dim]
	float *ffn;                  // [max_rows, ffn]
	float *logits;               // [FORWARD_LOGIT_ROWS, vocab_rows], with a head
	float *cos_sin;              // [max_context, rope_dim / 2, 2]
	int logit_rows;
};

enum status forward_create(struct forward **out, const struct forward_options *o, struct error *e)
{
	const struct model_config *c = o->config;
	struct forward *f = xcalloc(1, sizeof *f);
	*out = NULL;
	f->ops = o->ops;
	f->context = o->context;
	f->config = *c;
	f->weights = o->weights;
	f->logit_rows = o->max_seqs < FORWARD_LOGIT_ROWS ? (int)o->max_seqs : FORWARD_LOGIT_ROWS;
	uint64_t rows = o->max_rows, heads = (uint64_t)c->n_heads * (uint64_t)c->head_dim;
	uint64_t kv = (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim;
	bool has_layers = o->weights->n_layers > 0;
	struct { float **field; uint64_t elements; } table[] = {
		{&f->hidden[0], rows * (uint64_t)c->hidden},
		{&f->hidden[1], rows * (uint64_t)c->hidden},
		{&f->norm, rows * (uint64_t)c->hidden},
		{&f->q, has_layers ? rows * heads : 0},
		{&f->k, has_layers ? rows * kv : 0},
		{&f->v, has_layers ? rows * kv : 0},
		{&f->attention, has_layers ? rows * heads : 0},
		{&f->ffn, has_layers ? rows * (uint64_t)c->ffn : 0},
		{&f->logits, o->has_head ? (uint64_t)f->logit_rows * (uint64_t)c->vocab_rows : 0},
		{&f->cos_sin, has_layers ? (uint64_t)o->max_context * (uint64_t)c->rope_dim : 0},
	};
	for (size_t i = 0; i < sizeof table / sizeof *table; i++)
		f->bytes += (table[i].elements * sizeof(float) + 63) / 64 * 64;
	f->memory = f->ops->alloc(f->context, f->bytes);
	if (!f->memory) {
		error_set(e, STATUS_REFUSED, "no memory for a workspace of %llu bytes (%u rows)",
		          (unsigned long long)f->bytes, o->max_rows);
		free(f);
		return STATUS_REFUSED;
	}
	memset(f->memory, 0, f->bytes); // in use from now on, and not at the first large batch
	char *at = f->memory;
	for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
		*table[i].field = (float *)at;
		at += (table[i].elements * sizeof(float) + 63) / 64 * 64;
	}
	if (has_layers)
		rope_table(f->cos_sin, &(struct rope_table_options){
			.rope_dim = c->rope_dim, .max_position = o->max_context, .theta = c->rope_theta,
			.scaling = c->rope_scaling, .factor = c->rope_factor, .low_freq_factor = c->rope_low_freq_factor,
			.high_freq_factor = c->rope_high_freq_factor, .original_context = c->rope_original_context,
			.factors = o->weights->rope_factors});
	*out = f;
	return STATUS_OK;
}

void forward_destroy(struct forward **forward)
{
	struct forward *f = *forward;
	if (!f)
		return;
	f->ops->free(f->context, f->memory);
	free(f);
	*forward = NULL;
}

uint64_t forward_workspace_bytes(const struct forward *f)
{
	return f->bytes;
}

float *forward_hidden(struct forward *f, int which)
{
	return f->hidden[which];
}

void forward_embed(struct forward *f, const struct batch *b, float *x)
{
	f->ops->embed(f->context, &(struct embed_args){
		.table = f->weights->embedding, .n_rows = b->n_rows, .ids = b->ids, .out = x});
}

static void attention_block(struct forward *f, const struct layer_weights *w, const struct batch *b, struct kv_view kv,
                            int group, float *x)
{
	const struct model_config *c = &f->config;
	f->ops->rms_norm(f->context, &(struct rms_norm_args){
		.n_rows = b->n_rows, .cols = c->hidden, .eps = c->norm_eps, .x = x, .weight = w->attn_norm, .out = f->norm});
	f->ops->matmul(f->context, &(struct matmul_args){
		.n_rows = b->n_rows, .x = f->norm, .n_parts = 3,
		.part = {{w->wq, w->bq, f->q}, {w->wk, w->bk, f->k}, {w->wv, w->bv, f->v}}});
	f->ops->rope_kv(f->context, &(struct rope_kv_args){
		.n_rows = b->n_rows, .n_heads = c->n_heads, .q = f->q, .k = f->k, .v = f->v,
		.q_norm = w->q_norm, .k_norm = w->k_norm, .norm_eps = c->norm_eps,
		.interleaved = c->rope_kind == ROPE_INTERLEAVED, .rope_dim = c->rope_dim, .cos_sin = f->cos_sin,
		.position = b->position, .slot = b->group[group].slot, .kv = kv});
	f->ops->attention(f->context, &(struct attention_args){
		.n_seqs = b->n_seqs, .n_rows = b->n_rows, .n_heads = c->n_heads, .first_row = b->first_row,
		.kv_len = b->kv_len, .block_table = b->group[group].block_table, .max_blocks = b->group[group].max_blocks,
		.scale = 1.0f / sqrtf((float)c->head_dim), .q = f->q, .out = f->attention, .kv = kv});
	f->ops->matmul(f->context, &(struct matmul_args){
		.n_rows = b->n_rows, .x = f->attention, .n_parts = 1, .part = {{w->wo, w->bo, x}}, .add = true});
}

static void ffn_block(struct forward *f, const struct layer_weights *w, const struct batch *b, float *x)
{
	const struct model_config *c = &f->config;
	f->ops->rms_norm(f->context, &(struct rms_norm_args){
		.n_rows = b->n_rows, .cols = c->hidden, .eps = c->norm_eps, .x = x, .weight = w->ffn_norm, .out = f->norm});
	f->ops->matmul(f->context, &(struct matmul_args){
		.n_rows = b->n_rows, .x = f->norm, .n_parts = 2,
		.part = {{w->w_gate, NULL, f->ffn}, {w->w_up, NULL, NULL}}, .swiglu = true});
	f->ops->matmul(f->context, &(struct matmul_args){
		.n_rows = b->n_rows, .x = f->ffn, .n_parts = 1, .part = {{w->w_down, NULL, x}}, .add = true});
}

void forward_layers(struct forward *f, const struct batch *b, const struct kv_cache *kv, int n_layers, float *x,
                    void (*between)(void *user), void *user)
{
	ASSERT(n_layers <= f->weights->n_layers);
	for (int l = 0; l < n_layers; l++) {
		if (between)
			between(user);
		attention_block(f, &f->weights->layers[l], b, kv_cache_view(kv, l), kv_cache_layer_group(kv, l), x);
		ffn_block(f, &f->weights->layers[l], b, x);
	}
}

// Logits of the rows of x named by row_index, at most logit_rows of them.
static void head(struct forward *f, const float *x, const int32_t *row_index, int n_rows)
{
	const struct model_config *c = &f->config;
	f->ops->rms_norm(f->context, &(struct rms_norm_args){
		.n_rows = n_rows, .cols = c->hidden, .eps = c->norm_eps, .x = x, .weight = f->weights->output_norm,
		.out = f->norm, .row_index = row_index});
	f->ops->matmul(f->context, &(struct matmul_args){
		.n_rows = n_rows, .x = f->norm, .n_parts = 1, .part = {{f->weights->head, NULL, f->logits}},
		.y_float32 = true});
}

void forward_sample(struct forward *f, const struct batch *b, const float *x, struct sample_row *rows)
{
	for (int done = 0; done < b->n_samples;) {
		int n = b->n_samples - done < f->logit_rows ? b->n_samples - done : f->logit_rows;
		head(f, x, b->sample_row + done, n);
		f->ops->sample(f->context, &(struct sample_args){
			.n_rows = n, .vocab_size = f->config.vocab_size, .stride = f->config.vocab_rows,
			.logits = f->logits, .rows = rows + done});
		done += n;
	}
}

const float *forward_logits(struct forward *f, const float *x, int row)
{
	int32_t index = row;
	head(f, x, &index, 1);
	return f->logits;
}
