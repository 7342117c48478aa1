// See stage_weights.h. A list of {role, place, shape} is walked twice: to tell the kernel which pages will be read, and
// to load. Pages of the file that a repacked matrix no longer needs are given back as soon as it is done.
#include "common/half.h"
#include "worker/stage_weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct binding {
	enum tensor_role role;
	int layer;                   // -1: not per layer
	int64_t rows, cols;
	bool required, as_embedding, as_matrix;
	struct weight **matrix;      // one of these two
	float **vector;
};

struct binder {
	const struct stage_weights_options *options;
	struct stage_weights *weights;
	struct binding *list;
	int n, capacity;
};

static void bind(struct binder *b, struct binding binding)
{
	if (b->n == b->capacity) {
		b->capacity = b->capacity ? b->capacity * 2 : 64;
		b->list = xrealloc(b->list, (unsigned long)b->capacity * sizeof *b->list);
	}
	b->list[b->n++] = binding;
}

static void bind_matrix(struct binder *b, enum tensor_role role, int layer, int64_t rows, int64_t cols, struct weight **to)
{
	bind(b, (struct binding){.role = role, .layer = layer, .rows = rows, .cols = cols, .required = true,
	                         .as_matrix = true, .matrix = to});
}

static void bind_vector(struct binder *b, enum tensor_role role, int layer, int64_t n, bool required, float **to)
{
	bind(b, (struct binding){.role = role, .layer = layer, .rows = 1, .cols = n, .required = required, .vector = to});
}

static void bind_stage(struct binder *b)
{
	const struct stage_weights_options *o = b->options;
	const struct model_config *c = model_config(o->model);
	struct stage_weights *w = b->weights;
	int64_t q_rows = (int64_t)c->n_heads * c->head_dim, kv_rows = (int64_t)c->n_kv_heads * c->head_dim;

	bool shared = o->has_embedding && o->has_head && c->tied_head;
	if (o->has_embedding)
		bind(b, (struct binding){.role = TENSOR_TOKEN_EMBEDDING, .layer = -1, .rows = c->vocab_rows,
		                         .cols = c->hidden, .required = true, .as_embedding = true, .as_matrix = shared,
		                         .matrix = &w->embedding});
	for (uint32_t i = 0; i < o->n_layers; i++) {
		struct layer_weights *l = &w->layers[i];
		int at = (int)(o->first_layer + i);
		bind_vector(b, TENSOR_ATTN_NORM, at, c->hidden, true, &l->attn_norm);
		bind_matrix(b, TENSOR_WQ, at, q_rows, c->hidden, &l->wq);
		bind_matrix(b, TENSOR_WK, at, kv_rows, c->hidden, &l->wk);
		bind_matrix(b, TENSOR_WV, at, kv_rows, c->hidden, &l->wv);
		bind_vector(b, TENSOR_BQ, at, q_rows, c->has_qkv_bias, &l->bq);
		bind_vector(b, TENSOR_BK, at, kv_rows, c->has_qkv_bias, &l->bk);
		bind_vector(b, TENSOR_BV, at, kv_rows, c->has_qkv_bias, &l->bv);
		bind_vector(b, TENSOR_Q_NORM, at, c->head_dim, c->has_qk_norm, &l->q_norm);
		bind_vector(b, TENSOR_K_NORM, at, c->head_dim, c->has_qk_norm, &l->k_norm);
		bind_matrix(b, TENSOR_WO, at, c->hidden, q_rows, &l->wo);
		bind_vector(b, TENSOR_BO, at, c->hidden, false, &l->bo);
		bind_vector(b, TENSOR_FFN_NORM, at, c->hidden, true, &l->ffn_norm);
		bind_matrix(b, TENSOR_W_GATE, at, c->ffn, c->hidden, &l->w_gate);
		bind_matrix(b, TENSOR_W_UP, at, c->ffn, c->hidden, &l->w_up);
		bind_matrix(b, TENSOR_W_DOWN, at, c->hidden, c->ffn, &l->w_down);
	}
	if (o->n_layers > 0)
		bind_vector(b, TENSOR_ROPE_FACTORS, -1, c->rope_dim / 2, false, &w->rope_factors);
	if (o->has_head) {
		bind_vector(b, TENSOR_OUTPUT_NORM, -1, c->hidden, true, &w->output_norm);
		if (!shared)
			bind_matrix(b, TENSOR_OUTPUT_HEAD, -1, c->vocab_rows, c->hidden, &w->head);
	}
}

// Random weights from the tensor's name alone, so that they do not depend on the split. Matrices are uniform with the
// variance 1 / cols that keeps activations at one size; vectors are near 1 for norms and near 0 for biases.
static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static void *dummy_data(const struct tensor *t, bool is_norm)
{
	uint64_t seed = 0;
	for (const char *p = t->name; *p; p++)
		seed = mix(seed ^ (uint8_t)*p);
	int64_t n = t->rows * t->cols;
	float scale = sqrtf(3.0f / (float)t->cols), offset = 0;
	if (t->rows == 1) {
		scale = 0.1f;
		offset = is_norm ? 1.0f : 0.0f;
	}
	char *data = xmalloc((unsigned long)t->bytes);
	for (int64_t i = 0; i < n; i++) {
		float u = (float)(int32_t)(mix(seed + (uint64_t)i) >> 32) * 0x1p-31f;
		float value = offset + scale * u;
		if (t->dtype == DTYPE_F32) {
			memcpy(data + i * 4, &value, 4);
		} else if (t->dtype == DTYPE_F16) {
			uint16_t h = half_from_float(value);
			memcpy(data + i * 2, &h, 2);
		} else {
			uint32_t bits;
			memcpy(&bits, &value, 4);
			uint16_t h = (uint16_t)(bits >> 16);
			memcpy(data + i * 2, &h, 2);
		}
	}
	return data;
}

static enum status copy_vector(float **out, const struct tensor *t, const void *data, struct error *e)
{
	if (t->dtype != DTYPE_F32 && t->dtype != DTYPE_F16 && t->dtype != DTYPE_BF16)
		return error_set(e, STATUS_REFUSED, "tensor %s: expected float32, float16 or bfloat16, found %s", t->name,
		                 dtype_info(t->dtype)->name);
	float *to = xmalloc((unsigned long)t->cols * sizeof *to);
	for (int64_t i = 0; i < t->cols; i++) {
		if (t->dtype == DTYPE_F32) {
			memcpy(&to[i], (const char *)data + i * 4, 4);
			continue;
		}
		uint16_t half;
		memcpy(&half, (const char *)data + i * 2, 2);
		if (t->dtype == DTYPE_F16) {
			to[i] = half_to_float(half);
		} else {
			uint32_t bits = (uint32_t)half << 16;
			memcpy(&to[i], &bits, 4);
		}
	}
	*out = to;
	return STATUS_OK;
}

// Advises about the pages that hold [data, data + bytes); the file is mapped read-only, so any advice is harmless.
static void advise(const void *data, int64_t bytes, int advice)
{
	if (!data || bytes <= 0)
		return;
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)data & ~(page - 1);
	madvise((void *)begin, (uintptr_t)data + (uintptr_t)bytes - begin, advice);
}

static enum status check(const struct binding *b, const struct tensor *t, const struct stage_weights_options *o,
                         struct error *e)
{
	if (t->rows != b->rows || t->cols != b->cols)
		return error_set(e, STATUS_REFUSED, "tensor %s: expected %lld x %lld, found %lld x %lld", t->name,
		                 (long long)b->rows, (long long)b->cols, (long long)t->rows, (long long)t->cols);
	if (b->matrix && !o->ops->weight_supported(t->dtype))
		return error_set(e, STATUS_REFUSED, "tensor %s: the %s backend has no matrices of type %s", t->name,
		                 o->ops->name, dtype_info(t->dtype)->name);
	if (!t->data && t->dtype != DTYPE_F32 && t->dtype != DTYPE_F16 && t->dtype != DTYPE_BF16)
		return error_set(e, STATUS_REFUSED, "tensor %s: no dummy weights of type %s", t->name,
		                 dtype_info(t->dtype)->name);
	return STATUS_OK;
}

static enum status load_one(struct binder *binder, const struct binding *b, const struct tensor *t, struct error *e)
{
	const struct stage_weights_options *o = binder->options;
	struct stage_weights *w = binder->weights;
	bool is_norm = b->role == TENSOR_ATTN_NORM || b->role == TENSOR_FFN_NORM || b->role == TENSOR_OUTPUT_NORM ||
	               b->role == TENSOR_Q_NORM || b->role == TENSOR_K_NORM;
	void *made = t->data ? NULL : dummy_data(t, is_norm);
	const void *data = made ? made : t->data;
	enum status status;
	if (b->vector) {
		TRY_GOTO(copy_vector(b->vector, t, data, e), out);
		w->own_bytes += (uint64_t)t->cols * sizeof(float);
	} else {
		struct weight_source source = {.dtype = t->dtype, .rows = t->rows, .cols = t->cols, .data = data};
		status = o->ops->weight_create(o->context, b->matrix, &source, b->as_embedding, b->as_matrix, e);
		if (status != STATUS_OK) {
			error_prefix(e, "tensor %s", t->name);
			goto out;
		}
		w->own_bytes += o->ops->weight_bytes(*b->matrix);
		if (o->ops->weight_borrows(*b->matrix)) {
			w->borrows = true;
			w->borrowed_bytes += (uint64_t)t->bytes;
			if (made) {
				w->dummy = xrealloc(w->dummy, ((unsigned long)w->n_dummy + 1) * sizeof *w->dummy);
				w->dummy[w->n_dummy++] = made;
				made = NULL;
			}
		} else {
			advise(t->data, t->bytes, MADV_DONTNEED);
		}
	}
out:
	free(made);
	return status;
}

enum status stage_weights_load(struct stage_weights **out, const struct stage_weights_options *o, struct error *e)
{
	enum status status = STATUS_OK;
	*out = NULL;
	const struct model_config *c = model_config(o->model);
	if (o->first_layer > (uint32_t)c->n_layers || o->n_layers > (uint32_t)c->n_layers - o->first_layer)
		return error_set(e, STATUS_REFUSED, "layers %u and %u more of %d", o->first_layer, o->n_layers, c->n_layers);

	struct stage_weights *w = xcalloc(1, sizeof *w);
	w->ops = o->ops;
	w->context = o->context;
	w->n_layers = (int)o->n_layers;
	w->layers = xcalloc(o->n_layers + 1ul, sizeof *w->layers);
	struct binder binder = {.options = o, .weights = w};
	bind_stage(&binder);

	uint64_t total = 0, done = 0;
	for (int i = 0; i < binder.n; i++) {
		const struct tensor *t = model_tensor(o->model, binder.list[i].role, binder.list[i].layer);
		if (!t && binder.list[i].required) {
			status = error_set(e, STATUS_REFUSED, "layer %d: tensor %s is missing", binder.list[i].layer,
			                   tensor_role_name(binder.list[i].role));
			goto out;
		}
		if (t) {
			TRY_GOTO(check(&binder.list[i], t, o, e), out);
			total += (uint64_t)t->bytes;
			advise(t->data, t->bytes, MADV_WILLNEED);
		}
	}
	for (int i = 0; i < binder.n; i++) {
		const struct tensor *t = model_tensor(o->model, binder.list[i].role, binder.list[i].layer);
		if (!t)
			continue;
		TRY_GOTO(load_one(&binder, &binder.list[i], t, e), out);
		done += (uint64_t)t->bytes;
		if (o->progress)
			o->progress(o->user, done, total);
	}
	if (o->has_embedding && o->has_head && c->tied_head)
		w->head = w->embedding;
out:
	free(binder.list);
	if (status == STATUS_OK)
		*out = w;
	else
		stage_weights_destroy(&w);
	return status;
}

void stage_weights_destroy(struct stage_weights **weights)
{
	struct stage_weights *w = *weights;
	if (!w)
		return;
	const struct ops *ops = w->ops;
	if (w->head && w->head != w->embedding)
		ops->weight_destroy(w->context, &w->head);
	if (w->embedding)
		ops->weight_destroy(w->context, &w->embedding);
	for (int i = 0; i < w->n_layers; i++) {
		struct layer_weights *l = &w->layers[i];
		struct weight **matrices[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w_gate, &l->w_up, &l->w_down};
		for (size_t m = 0; m < sizeof matrices / sizeof *matrices; m++)
			if (*matrices[m])
				ops->weight_destroy(w->context, matrices[m]);
		float *vectors[] = {l->attn_norm, l->bq, l->bk, l->bv, l->q_norm, l->k_norm, l->bo, l->ffn_norm};
		for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++)
			free(vectors[v]);
	}
	for (int i = 0; i < w->n_dummy; i++)
		free(w->dummy[i]);
	free(w->dummy);
	free(w->output_norm);
	free(w->rope_factors);
	free(w->layers);
	free(w);
	*weights = NULL;
}
