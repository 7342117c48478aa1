// See gguf.h. The surprising decision: tables of keys and tensors grow as entries are read, never by the counts that
// the header claims, so that a lying count costs nothing before the bytes run out.
#include "common/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/quote.h"

struct gguf {
	const uint8_t *data;
	size_t len;
	char *label;
	struct gguf_kv *kvs;
	uint64_t kv_count;
	const struct gguf_kv **sorted_kvs; // [kv_count] by key
	struct gguf_tensor *tensors;
	uint64_t tensor_count;
};

// A position in the bytes and what is being read there, for messages.
struct cursor {
	const struct gguf *g;
	size_t pos;
	char place[160];
	uint64_t strings; // items of string arrays so far: the only thing here that takes time
	struct error *error;
};

static const struct { const char *name; int bytes; } types[] = {
	[GGUF_UINT8] = {"uint8", 1},     [GGUF_INT8] = {"int8", 1},       [GGUF_UINT16] = {"uint16", 2},
	[GGUF_INT16] = {"int16", 2},     [GGUF_UINT32] = {"uint32", 4},   [GGUF_INT32] = {"int32", 4},
	[GGUF_FLOAT32] = {"float32", 4}, [GGUF_BOOL] = {"bool", 1},       [GGUF_STRING] = {"string", 0},
	[GGUF_ARRAY] = {"array", 0},     [GGUF_UINT64] = {"uint64", 8},   [GGUF_INT64] = {"int64", 8},
	[GGUF_FLOAT64] = {"float64", 8},
};
enum { TYPE_COUNT = sizeof types / sizeof types[0] };

// ggml's element types by number, to name the ones that are refused.
static const char *const ggml_types[] = {
	"F32",     "F16",     "Q4_0",   "Q4_1", "Q4_2",   "Q4_3",  "Q5_0",    "Q5_1",    "Q8_0",     "Q8_1",     "Q2_K",
	"Q3_K",    "Q4_K",    "Q5_K",   "Q6_K", "Q8_K",   "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",   "IQ4_NL",   "IQ3_S",
	"IQ2_S",   "IQ4_XS",  "I8",     "I16",  "I32",    "I64",   "F64",     "IQ1_M",   "BF16",     "Q4_0_4_4", "Q4_0_4_8",
	"Q4_0_8_8", "TQ1_0",  "TQ2_0",  "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",
};

const char *gguf_type_name(enum gguf_type t)
{
	return (unsigned)t < TYPE_COUNT ? types[t].name : "unknown";
}

// Bytes go through memcpy since nothing in the header is aligned; both of our machines are little-endian, like GGUF.
static uint32_t load_u32(const uint8_t *p)
{
	uint32_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

static uint64_t load_u64(const uint8_t *p)
{
	uint64_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

static enum status take(struct cursor *c, uint64_t bytes, const uint8_t **out)
{
	size_t present = c->g->len - c->pos;
	if (bytes > present)
		return error_set(c->error, STATUS_REFUSED,
		                 "%s: truncated or wrong in %s: at byte %zu it needs %llu bytes, %zu are present", c->g->label,
		                 c->place, c->pos, (unsigned long long)bytes, present);
	*out = c->g->data + c->pos;
	c->pos += bytes;
	return STATUS_OK;
}

static enum status take_u32(struct cursor *c, uint32_t *out)
{
	const uint8_t *p = NULL;
	TRY(take(c, 4, &p));
	*out = load_u32(p);
	return STATUS_OK;
}

static enum status take_u64(struct cursor *c, uint64_t *out)
{
	const uint8_t *p = NULL;
	TRY(take(c, 8, &p));
	*out = load_u64(p);
	return STATUS_OK;
}

static enum status take_string(struct cursor *c, struct gguf_string *out)
{
	const uint8_t *p = NULL;
	TRY(take_u64(c, &out->len));
	TRY(take(c, out->len, &p));
	out->data = (const char *)p;
	return STATUS_OK;
}

// A key or a tensor's name: not empty, no NUL, within its limit.
static enum status take_name(struct cursor *c, uint64_t limit, struct gguf_string *out)
{
	char q[80];
	TRY(take_string(c, out));
	if (out->len == 0)
		return error_set(c->error, STATUS_REFUSED, "%s: %s has an empty name", c->g->label, c->place);
	if (out->len > limit)
		return error_set(c->error, STATUS_REFUSED, "%s: %s has a name of %llu bytes, at most %llu are allowed: \"%s\"",
		                 c->g->label, c->place, (unsigned long long)out->len, (unsigned long long)limit,
		                 quote_bytes(q, sizeof q, out->data, out->len));
	if (memchr(out->data, 0, out->len))
		return error_set(c->error, STATUS_REFUSED, "%s: %s has a name with a NUL byte: \"%s\"", c->g->label, c->place,
		                 quote_bytes(q, sizeof q, out->data, out->len));
	return STATUS_OK;
}

static enum status check_bools(struct cursor *c, const uint8_t *p, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		if (p[i] > 1)
			return error_set(c->error, STATUS_REFUSED, "%s: %s: a bool is 0 or 1, found %u", c->g->label, c->place, p[i]);
	return STATUS_OK;
}

static enum status take_value(struct cursor *c, struct gguf_kv *kv)
{
	uint32_t type = 0, item = 0;
	TRY(take_u32(c, &type));
	if (type >= TYPE_COUNT)
		return error_set(c->error, STATUS_REFUSED, "%s: %s has the unknown value type %u", c->g->label, c->place, type);
	kv->type = kv->item_type = (enum gguf_type)type;
	kv->count = 1;
	if (type == GGUF_ARRAY) {
		TRY(take_u32(c, &item));
		TRY(take_u64(c, &kv->count));
		if (item >= TYPE_COUNT || item == GGUF_ARRAY)
			return error_set(c->error, STATUS_REFUSED, "%s: %s is an array of %s, which is not supported", c->g->label,
			                 c->place, item == GGUF_ARRAY ? "arrays" : "an unknown type");
		if (kv->count > GGUF_MAX_ITEMS)
			return error_set(c->error, STATUS_REFUSED, "%s: %s claims %llu items, at most %llu are allowed",
			                 c->g->label, c->place, (unsigned long long)kv->count,
			                 (unsigned long long)GGUF_MAX_ITEMS);
		kv->item_type = (enum gguf_type)item;
		c->strings += item == GGUF_STRING ? kv->count : 0;
		if (c->strings > GGUF_MAX_ITEMS)
			return error_set(c->error, STATUS_REFUSED, "%s: %s: more than %llu strings in arrays", c->g->label, c->place,
			                 (unsigned long long)GGUF_MAX_ITEMS);
	}
	kv->value = c->g->data + c->pos;
	if (kv->item_type == GGUF_STRING) {
		struct gguf_string s = {0};
		for (uint64_t i = 0; i < kv->count; i++)
			TRY(take_string(c, &s));
		return STATUS_OK;
	}
	const uint8_t *p = NULL;
	TRY(take(c, kv->count * (uint64_t)types[kv->item_type].bytes, &p)); // both factors are bounded above
	return kv->item_type == GGUF_BOOL ? check_bools(c, p, kv->count) : STATUS_OK;
}

static int compare_strings(const struct gguf_string *a, const struct gguf_string *b)
{
	int order = memcmp(a->data, b->data, a->len < b->len ? a->len : b->len);
	return order ? order : (a->len > b->len) - (a->len < b->len);
}

static int compare_kvs(const void *a, const void *b)
{
	return compare_strings(&(*(const struct gguf_kv *const *)a)->key, &(*(const struct gguf_kv *const *)b)->key);
}

static int compare_tensor_names(const void *a, const void *b)
{
	return compare_strings(&(*(const struct gguf_tensor *const *)a)->name,
	                       &(*(const struct gguf_tensor *const *)b)->name);
}

static int compare_tensor_offsets(const void *a, const void *b)
{
	const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a, *y = *(const struct gguf_tensor *const *)b;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return x < y ? -1 : x > y;
}

static enum status parse_kvs(struct gguf *g, struct cursor *c, uint64_t claimed)
{
	char q[80];
	uint64_t capacity = 0;
	for (uint64_t i = 0; i < claimed; i++) {
		snprintf(c->place, sizeof c->place, "metadata key %llu of %llu", (unsigned long long)i + 1,
		         (unsigned long long)claimed);
		struct gguf_kv kv = {0};
		TRY(take_name(c, GGUF_MAX_KEY, &kv.key));
		snprintf(c->place, sizeof c->place, "metadata key \"%s\"", quote_bytes(q, sizeof q, kv.key.data, kv.key.len));
		TRY(take_value(c, &kv));
		if (g->kv_count == capacity) {
			capacity = capacity ? capacity * 2 : 64;
			g->kvs = xrealloc(g->kvs, capacity * sizeof *g->kvs);
		}
		g->kvs[g->kv_count++] = kv;
	}
	g->sorted_kvs = xmalloc(g->kv_count * sizeof *g->sorted_kvs);
	for (uint64_t i = 0; i < g->kv_count; i++)
		g->sorted_kvs[i] = &g->kvs[i];
	if (g->kv_count)
		qsort(g->sorted_kvs, g->kv_count, sizeof *g->sorted_kvs, compare_kvs);
	for (uint64_t i = 1; i < g->kv_count; i++)
		if (!compare_kvs(&g->sorted_kvs[i - 1], &g->sorted_kvs[i]))
			return error_set(c->error, STATUS_REFUSED, "%s: metadata key \"%s\" stands there twice", g->label,
			                 quote_bytes(q, sizeof q, g->sorted_kvs[i]->key.data, g->sorted_kvs[i]->key.len));
	return STATUS_OK;
}

static enum status parse_tensor(struct cursor *c, struct gguf_tensor *t)
{
	char q[80];
	TRY(take_name(c, GGUF_MAX_NAME, &t->name));
	snprintf(c->place, sizeof c->place, "tensor \"%s\"", quote_bytes(q, sizeof q, t->name.data, t->name.len));
	uint32_t n_dims = 0, type = 0;
	TRY(take_u32(c, &n_dims));
	if (n_dims < 1 || n_dims > 4)
		return error_set(c->error, STATUS_REFUSED, "%s: %s: expected 1 to 4 dimensions, found %u", c->g->label, c->place,
		                 n_dims);
	t->n_dims = (int)n_dims;
	int64_t rows = 1;
	for (uint32_t i = 0; i < 4; i++) {
		uint64_t dim = 1;
		if (i < n_dims)
			TRY(take_u64(c, &dim));
		if (dim < 1 || dim > INT64_MAX)
			return error_set(c->error, STATUS_REFUSED, "%s: %s: dimension %u is %llu", c->g->label, c->place, i,
			                 (unsigned long long)dim);
		t->dims[i] = (int64_t)dim;
		if (i > 0 && __builtin_mul_overflow(rows, t->dims[i], &rows))
			return error_set(c->error, STATUS_REFUSED, "%s: %s: the product of its dimensions overflows", c->g->label,
			                 c->place);
	}
	TRY(take_u32(c, &type));
	if (!dtype_from_gguf(type, &t->dtype))
		return error_set(c->error, STATUS_REFUSED, "%s: %s has element type %s (%u), which is not supported", c->g->label,
		                 c->place, type < sizeof ggml_types / sizeof *ggml_types ? ggml_types[type] : "unknown", type);
	int64_t row_bytes = dtype_row_bytes(t->dtype, t->dims[0]);
	if (row_bytes < 0 && t->dims[0] % dtype_info(t->dtype)->block_elements)
		return error_set(c->error, STATUS_REFUSED, "%s: %s: rows of %lld elements are not whole blocks of %d (%s)",
		                 c->g->label, c->place, (long long)t->dims[0], dtype_info(t->dtype)->block_elements,
		                 dtype_info(t->dtype)->name);
	if (row_bytes < 0 || __builtin_mul_overflow(row_bytes, rows, &t->bytes))
		return error_set(c->error, STATUS_REFUSED, "%s: %s: its size in bytes overflows", c->g->label, c->place);
	return take_u64(c, &t->offset);
}

// Turns offsets into places in the file. In order of offset, so that the message about a truncated file names the first
// tensor that does not fit.
static enum status place_tensors(struct gguf *g, uint64_t data_start, uint64_t alignment,
                                 const struct gguf_tensor **order, struct error *e)
{
	char q[80], q2[80];
	for (uint64_t i = 0; i < g->tensor_count; i++) {
		struct gguf_tensor *t = &g->tensors[i];
		if (t->offset % alignment)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\": offset %llu is not a multiple of the alignment %llu",
			                 g->label, quote_bytes(q, sizeof q, t->name.data, t->name.len),
			                 (unsigned long long)t->offset, (unsigned long long)alignment);
		if (__builtin_add_overflow(t->offset, data_start, &t->offset) || t->offset > INT64_MAX)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\": its offset overflows", g->label,
			                 quote_bytes(q, sizeof q, t->name.data, t->name.len));
		order[i] = t;
	}
	if (g->tensor_count)
		qsort(order, g->tensor_count, sizeof *order, compare_tensor_offsets);
	uint64_t end = data_start; // of the tensor before; below 2^64 since both terms are below 2^63
	for (uint64_t i = 0; i < g->tensor_count; i++) {
		const struct gguf_tensor *t = order[i];
		quote_bytes(q, sizeof q, t->name.data, t->name.len);
		if (t->offset < end)
			return error_set(e, STATUS_REFUSED, "%s: tensors \"%s\" and \"%s\" overlap: one ends at byte %llu, the other "
			                 "begins at byte %llu", g->label,
			                 quote_bytes(q2, sizeof q2, order[i - 1]->name.data, order[i - 1]->name.len), q,
			                 (unsigned long long)end, (unsigned long long)t->offset);
		uint64_t present = g->len > t->offset ? g->len - t->offset : 0;
		if ((uint64_t)t->bytes > present)
			return error_set(e, STATUS_REFUSED, "%s: truncated: tensor \"%s\" needs %lld bytes at byte %llu, %llu are "
			                 "present", g->label, q, (long long)t->bytes, (unsigned long long)t->offset,
			                 (unsigned long long)present);
		end = t->offset + (uint64_t)t->bytes;
	}
	return STATUS_OK;
}

static enum status check_tensor_names(struct gguf *g, const struct gguf_tensor **order, struct error *e)
{
	char q[80];
	for (uint64_t i = 0; i < g->tensor_count; i++)
		order[i] = &g->tensors[i];
	if (g->tensor_count)
		qsort(order, g->tensor_count, sizeof *order, compare_tensor_names);
	for (uint64_t i = 1; i < g->tensor_count; i++)
		if (!compare_tensor_names(&order[i - 1], &order[i]))
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\" stands there twice", g->label,
			                 quote_bytes(q, sizeof q, order[i]->name.data, order[i]->name.len));
	return STATUS_OK;
}

static enum status parse_tensors(struct gguf *g, struct cursor *c, uint64_t claimed)
{
	uint64_t capacity = 0;
	for (uint64_t i = 0; i < claimed; i++) {
		snprintf(c->place, sizeof c->place, "tensor %llu of %llu", (unsigned long long)i + 1,
		         (unsigned long long)claimed);
		struct gguf_tensor t = {0};
		TRY(parse_tensor(c, &t));
		if (g->tensor_count == capacity) {
			capacity = capacity ? capacity * 2 : 64;
			g->tensors = xrealloc(g->tensors, capacity * sizeof *g->tensors);
		}
		g->tensors[g->tensor_count++] = t;
	}
	uint32_t alignment = 32;
	enum status status = gguf_get_u32(g, "general.alignment", &alignment, c->error);
	if (status != STATUS_OK && status != STATUS_ABSENT)
		return status;
	if (alignment < 8 || alignment > 1 << 20 || (alignment & (alignment - 1)))
		return error_set(c->error, STATUS_REFUSED, "%s: general.alignment: expected a power of two from 8 to 1048576, "
		                 "found %u", g->label, alignment);
	uint64_t data_start = ((uint64_t)c->pos + alignment - 1) & ~(uint64_t)(alignment - 1);
	const struct gguf_tensor **order = xmalloc(g->tensor_count * sizeof *order);
	status = check_tensor_names(g, order, c->error);
	if (status == STATUS_OK)
		status = place_tensors(g, data_start, alignment, order, c->error);
	free(order);
	return status;
}

static enum status parse_all(struct gguf *g, struct error *e)
{
	struct cursor c = {.g = g, .place = "the header", .error = e};
	char q[8];
	const uint8_t *magic = NULL;
	uint32_t version = 0;
	uint64_t tensors = 0, kvs = 0;
	TRY(take(&c, 4, &magic));
	if (memcmp(magic, "GGUF", 4))
		return error_set(e, STATUS_REFUSED, "%s: not a GGUF file: it begins with \"%s\"", g->label,
		                 quote_bytes(q, sizeof q, (const char *)magic, 4));
	TRY(take_u32(&c, &version));
	if (version == __builtin_bswap32(2) || version == __builtin_bswap32(3))
		return error_set(e, STATUS_REFUSED, "%s: a big-endian GGUF file, which is not supported", g->label);
	if (version != 2 && version != 3)
		return error_set(e, STATUS_REFUSED, "%s: GGUF version: expected 2 or 3, found %u", g->label, version);
	TRY(take_u64(&c, &tensors));
	TRY(take_u64(&c, &kvs));
	if (tensors > GGUF_MAX_TENSORS || kvs > GGUF_MAX_KEYS)
		return error_set(e, STATUS_REFUSED, "%s: claims %llu tensors and %llu metadata keys, at most %d and %d are "
		                 "allowed", g->label, (unsigned long long)tensors, (unsigned long long)kvs, GGUF_MAX_TENSORS,
		                 GGUF_MAX_KEYS);
	TRY(parse_kvs(g, &c, kvs));
	return parse_tensors(g, &c, tensors);
}

enum status gguf_parse(struct gguf **out, const uint8_t *data, size_t len, const char *label, struct error *e)
{
	struct gguf *g = xcalloc(1, sizeof *g);
	g->data = data;
	g->len = len;
	g->label = xstrdup(label);
	enum status status = parse_all(g, e);
	if (status != STATUS_OK)
		gguf_destroy(&g);
	*out = g;
	return status;
}

void gguf_destroy(struct gguf **g)
{
	if (!*g)
		return;
	free((*g)->tensors);
	free((*g)->sorted_kvs);
	free((*g)->kvs);
	free((*g)->label);
	free(*g);
	*g = NULL;
}

uint64_t gguf_kv_count(const struct gguf *g)
{
	return g->kv_count;
}

const struct gguf_kv *gguf_kv_at(const struct gguf *g, uint64_t i)
{
	ASSERT(i < g->kv_count);
	return &g->kvs[i];
}

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key)
{
	struct gguf_kv wanted = {.key = {key, strlen(key)}};
	const struct gguf_kv *p = &wanted;
	if (!g->kv_count)
		return NULL;
	const struct gguf_kv **found = bsearch(&p, g->sorted_kvs, g->kv_count, sizeof *g->sorted_kvs, compare_kvs);
	return found ? *found : NULL;
}

uint64_t gguf_tensor_count(const struct gguf *g)
{
	return g->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, uint64_t i)
{
	ASSERT(i < g->tensor_count);
	return &g->tensors[i];
}

const uint8_t *gguf_data(const struct gguf *g)
{
	return g->data;
}

const char *gguf_label(const struct gguf *g)
{
	return g->label;
}

static enum status wrong_type(const struct gguf *g, const struct gguf_kv *kv, const char *expected, struct error *e)
{
	char q[80];
	bool array = kv->type == GGUF_ARRAY;
	return error_set(e, STATUS_REFUSED, "%s: metadata key \"%s\": expected %s, found %s%s", g->label,
	                 quote_bytes(q, sizeof q, kv->key.data, kv->key.len), expected, array ? "an array of " : "",
	                 gguf_type_name(kv->item_type));
}

static enum status find_scalar(const struct gguf *g, const char *key, enum gguf_type type, const uint8_t **value,
                               struct error *e)
{
	const struct gguf_kv *kv = gguf_find(g, key);
	if (!kv)
		return error_set(e, STATUS_ABSENT, "%s: metadata key \"%s\" is missing", g->label, key);
	if (kv->type != type)
		return wrong_type(g, kv, gguf_type_name(type), e);
	*value = kv->value;
	return STATUS_OK;
}

enum status gguf_get_u16(const struct gguf *g, const char *key, uint16_t *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_UINT16, &p, e));
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

enum status gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_UINT32, &p, e));
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

enum status gguf_get_i32(const struct gguf *g, const char *key, int32_t *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_INT32, &p, e));
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

enum status gguf_get_f32(const struct gguf *g, const char *key, float *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_FLOAT32, &p, e));
	memcpy(out, p, sizeof *out);
	return STATUS_OK;
}

enum status gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_BOOL, &p, e));
	*out = *p != 0;
	return STATUS_OK;
}

enum status gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out, struct error *e)
{
	const uint8_t *p = NULL;
	TRY(find_scalar(g, key, GGUF_STRING, &p, e));
	out->len = load_u64(p);
	out->data = (const char *)p + 8;
	return STATUS_OK;
}

static enum status find_array(const struct gguf *g, const char *key, enum gguf_type type, enum gguf_type or_type,
                              const struct gguf_kv **out, struct error *e)
{
	char expected[48];
	const struct gguf_kv *kv = gguf_find(g, key);
	if (!kv)
		return error_set(e, STATUS_ABSENT, "%s: metadata key \"%s\" is missing", g->label, key);
	snprintf(expected, sizeof expected, "an array of %s", gguf_type_name(type));
	if (kv->type != GGUF_ARRAY || (kv->item_type != type && kv->item_type != or_type))
		return wrong_type(g, kv, expected, e);
	*out = kv;
	return STATUS_OK;
}

enum status gguf_get_string_array(const struct gguf *g, const char *key, struct gguf_string **items, uint64_t *count,
                                  struct error *e)
{
	const struct gguf_kv *kv = NULL;
	TRY(find_array(g, key, GGUF_STRING, GGUF_STRING, &kv, e));
	const uint8_t *p = kv->value; // lengths were checked when the file was parsed
	*count = kv->count;
	*items = xmalloc(kv->count * sizeof **items);
	for (uint64_t i = 0; i < kv->count; i++) {
		(*items)[i] = (struct gguf_string){(const char *)p + 8, load_u64(p)};
		p += 8 + (*items)[i].len;
	}
	return STATUS_OK;
}

enum status gguf_get_i32_array(const struct gguf *g, const char *key, int32_t **items, uint64_t *count, struct error *e)
{
	const struct gguf_kv *kv = NULL;
	TRY(find_array(g, key, GGUF_INT32, GGUF_UINT32, &kv, e));
	int32_t *copy = xmalloc(kv->count * sizeof *copy);
	if (kv->count)
		memcpy(copy, kv->value, kv->count * sizeof *copy);
	for (uint64_t i = 0; kv->item_type == GGUF_UINT32 && i < kv->count; i++)
		if (copy[i] < 0) {
			enum status status = error_set(e, STATUS_REFUSED, "%s: metadata key \"%s\": item %llu is %u, at most "
			                               "2147483647 is allowed", g->label, key, (unsigned long long)i,
			                               (uint32_t)copy[i]);
			free(copy);
			return status;
		}
	*items = copy;
	*count = kv->count;
	return STATUS_OK;
}

enum status gguf_get_f32_array(const struct gguf *g, const char *key, float **items, uint64_t *count, struct error *e)
{
	const struct gguf_kv *kv = NULL;
	TRY(find_array(g, key, GGUF_FLOAT32, GGUF_FLOAT32, &kv, e));
	*items = xmalloc(kv->count * sizeof **items);
	if (kv->count)
		memcpy(*items, kv->value, kv->count * sizeof **items);
	*count = kv->count;
	return STATUS_OK;
}
