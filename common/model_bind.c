// Matches the tensors that files offer with the roles that the architecture asks for. The surprising decision: a tensor
// that no role asks for is an error, since a weight that is silently left out changes every answer.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model_parts.h"
#include "common/quote.h"

struct binding {
	struct model *model;
	enum model_format format;
	struct offered_tensor *offered; // sorted by name
	size_t count;
	const char *label;
	struct error *error;
};

static int compare_names(const char *a, size_t a_len, const char *b, size_t b_len)
{
	int order = memcmp(a, b, a_len < b_len ? a_len : b_len);
	return order ? order : (a_len > b_len) - (a_len < b_len);
}

static int compare_offered(const void *a, const void *b)
{
	const struct offered_tensor *x = a, *y = b;
	return compare_names(x->name, x->name_len, y->name, y->name_len);
}

static enum status sort_offered(struct binding *b)
{
	char q[140];
	if (b->count)
		qsort(b->offered, b->count, sizeof *b->offered, compare_offered);
	for (size_t i = 1; i < b->count; i++)
		if (!compare_offered(&b->offered[i - 1], &b->offered[i]))
			return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\" stands in %s too", b->offered[i].file,
			                 quote_bytes(q, sizeof q, b->offered[i].name, b->offered[i].name_len),
			                 b->offered[i - 1].file);
	return STATUS_OK;
}

static struct offered_tensor *find(const struct binding *b, const char *name)
{
	struct offered_tensor wanted = {.name = name, .name_len = strlen(name)};
	return b->count ? bsearch(&wanted, b->offered, b->count, sizeof wanted, compare_offered) : NULL;
}

static void print_dims(char *buf, size_t cap, const int64_t *dims, int n)
{
	size_t used = (size_t)snprintf(buf, cap, "[");
	for (int i = 0; i < n && used < cap; i++)
		used += (size_t)snprintf(buf + used, cap - used, "%s%lld", i ? ", " : "", (long long)dims[i]);
	if (used < cap)
		snprintf(buf + used, cap - used, "]");
}

static bool is_plain(enum dtype t)
{
	return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
}

// rows x cols as the role wants them, against what the file has. A vector is one dimension; GGUF may add ones.
static bool shape_matches(const struct offered_tensor *t, enum model_format format, bool vector, int64_t rows,
                          int64_t cols)
{
	int first = 0;
	while (format == MODEL_GGUF && first < t->n_dims - 1 && t->dims[first] == 1)
		first++;
	int n = t->n_dims - first;
	if (n == 1)
		return t->dims[first] == cols && rows == 1 && (vector || format == MODEL_GGUF);
	return n == 2 && !vector && t->dims[first] == rows && t->dims[first + 1] == cols;
}

static enum status check_tensor(const struct binding *b, const struct offered_tensor *t, const struct arch_tensor *want,
                                int64_t rows, int64_t cols)
{
	char q[140], found[112], expected[64];
	bool vector = want->rows == DIM_ONE;
	if (!shape_matches(t, b->format, vector, rows, cols)) {
		print_dims(found, sizeof found, t->dims, t->n_dims);
		print_dims(expected, sizeof expected, vector ? &cols : (int64_t[]){rows, cols}, vector ? 1 : 2);
		return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\": expected shape %s, found %s", t->file,
		                 quote_bytes(q, sizeof q, t->name, t->name_len), expected, found);
	}
	// Norms and biases are not quantised by anyone; the divisors of RoPE need all their bits.
	if (vector && (!is_plain(t->dtype) || (want->role == TENSOR_ROPE_FACTORS && t->dtype != DTYPE_F32)))
		return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\": expected type %s, found %s", t->file,
		                 quote_bytes(q, sizeof q, t->name, t->name_len),
		                 want->role == TENSOR_ROPE_FACTORS ? "float32" : "float32, float16 or bfloat16",
		                 dtype_info(t->dtype)->name);
	size_t element = is_plain(t->dtype) ? (size_t)dtype_info(t->dtype)->block_bytes : 1;
	if ((uintptr_t)t->data % element)
		return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\": its data are not aligned to its elements of %zu "
		                 "bytes", t->file, quote_bytes(q, sizeof q, t->name, t->name_len), element);
	return STATUS_OK;
}

static enum status bind_one(const struct binding *b, const struct arch_tensor *want, int layer, struct tensor *out)
{
	const struct model_config *c = &b->model->config;
	int64_t rows = model_arch_dim(c, want->rows), cols = model_arch_dim(c, want->cols);
	char name[128];
	// The table's names hold "%d" or nothing.
	int at = 0;
	const char *pattern = want->name[b->format], *mark = strstr(pattern, "%d");
	if (mark)
		at = snprintf(name, sizeof name, "%.*s%d%s", (int)(mark - pattern), pattern, layer, mark + 2);
	else
		at = snprintf(name, sizeof name, "%s", pattern);
	ASSERT(at > 0 && (size_t)at < sizeof name);

	struct offered_tensor *t = c->dummy ? NULL : find(b, name);
	if (t) {
		TRY(check_tensor(b, t, want, rows, cols));
		t->used = true;
	} else if (want->role == TENSOR_OUTPUT_HEAD ? c->tied_head : want->optional) {
		return STATUS_OK;
	} else if (!c->dummy) {
		char dims[64];
		print_dims(dims, sizeof dims, want->rows == DIM_ONE ? &cols : (int64_t[]){rows, cols},
		           want->rows == DIM_ONE ? 1 : 2);
		return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\" is missing; expected shape %s", b->label, name,
		                 dims);
	}
	memcpy(out->name, name, sizeof out->name);
	out->dtype = t ? t->dtype : c->dtype;
	out->rows = rows;
	out->cols = cols;
	out->data = t ? t->data : NULL;
	out->bytes = t ? t->bytes : rows * dtype_row_bytes(c->dtype, cols);
	return STATUS_OK;
}

// transformers before 4.32 stored RoPE's inverse frequencies, which follow from the config, beside the weights.
static bool is_derived(enum model_format format, const struct offered_tensor *t)
{
	static const char tail[] = ".self_attn.rotary_emb.inv_freq";
	size_t n = sizeof tail - 1;
	return format == MODEL_SAFETENSORS && t->name_len > n && !memcmp(t->name + t->name_len - n, tail, n);
}

static enum status refuse_leftovers(const struct binding *b)
{
	char q[140], dims[112];
	for (size_t i = 0; i < b->count; i++) {
		const struct offered_tensor *t = &b->offered[i];
		if (t->used || is_derived(b->format, t))
			continue;
		print_dims(dims, sizeof dims, t->dims, t->n_dims);
		return error_set(b->error, STATUS_REFUSED, "%s: tensor \"%s\" of shape %s: architecture %s with %d layers has no "
		                 "such tensor", t->file, quote_bytes(q, sizeof q, t->name, t->name_len), dims,
		                 b->model->config.architecture, b->model->config.n_layers);
	}
	return STATUS_OK;
}

// The type that most bytes of the layers' matrices have.
static enum dtype commonest_dtype(const struct model *m)
{
	int64_t bytes[DTYPE_COUNT] = {0};
	enum dtype best = DTYPE_F32;
	for (int i = 0; i < m->config.n_layers; i++)
		for (int role = TENSOR_FIRST_LAYER_ROLE; role < TENSOR_ROLE_COUNT; role++) {
			const struct tensor *t = model_tensor(m, (enum tensor_role)role, i);
			if (t && t->rows > 1)
				bytes[t->dtype] += t->bytes;
		}
	for (int t = 0; t < DTYPE_COUNT; t++)
		if (bytes[t] > bytes[best])
			best = (enum dtype)t;
	return best;
}

enum status model_bind(struct model *m, enum model_format format, struct offered_tensor *offered, size_t count,
                       const char *label, struct error *e)
{
	struct binding b = {m, format, offered, count, label, e};
	struct model_config *c = &m->config;
	const int per_layer = TENSOR_ROLE_COUNT - TENSOR_FIRST_LAYER_ROLE;
	TRY(sort_offered(&b));
	m->globals = xcalloc(TENSOR_FIRST_LAYER_ROLE, sizeof *m->globals);
	m->layers = xcalloc((unsigned long)c->n_layers * (unsigned long)per_layer, sizeof *m->layers);
	for (int i = 0; i < m->arch->n_tensors; i++) {
		const struct arch_tensor *want = &m->arch->tensors[i];
		if (!want->name[format] || (want->needs & m->arch->features) != want->needs)
			continue;
		if (want->role < TENSOR_FIRST_LAYER_ROLE) {
			TRY(bind_one(&b, want, 0, &m->globals[want->role]));
			continue;
		}
		for (int layer = 0; layer < c->n_layers; layer++)
			TRY(bind_one(&b, want, layer, &m->layers[layer * per_layer + want->role - TENSOR_FIRST_LAYER_ROLE]));
	}
	TRY(refuse_leftovers(&b));
	// A head that is stored is used, whatever the config says of tying: equal to the embedding it gives the same
	// numbers, and different from it, it is the one that was trained.
	c->tied_head = !m->globals[TENSOR_OUTPUT_HEAD].name[0];
	if (c->dtype == DTYPE_COUNT)
		c->dtype = commonest_dtype(m);
	return STATUS_OK;
}
