// See safetensors.h. JSON is jansson's job; here are the checks of what it says.
#include "common/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/json_fields.h"
#include "common/quote.h"

struct safetensors {
	json_t *header; // owns the names
	struct safetensors_tensor *tensors;
	size_t count;
};

struct safetensors_index {
	json_t *root;
	const char **tensors; // [count] names, borrowed from root
	const char **files;   // [count] the file of each
	size_t count;
	const char **distinct; // [n_files] sorted
	int n_files;
};

struct place {
	const char *label;
	char name[SAFETENSORS_MAX_NAME + 1]; // of the tensor, printable
	struct error *error;
};

static enum status parse_shape(const struct place *p, const json_t *shape, struct safetensors_tensor *t)
{
	size_t n = json_array_size(shape);
	if (!json_is_array(shape) || n < 1 || n > 4)
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": shape: expected 1 to 4 dimensions, found %s of %zu",
		                 p->label, p->name, json_kind(shape), n);
	t->n_dims = (int)n;
	int64_t elements = 1;
	for (size_t i = 0; i < n; i++) {
		const json_t *dim = json_array_get(shape, i);
		if (!json_is_integer(dim) || json_integer_value(dim) < 1)
			return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": dimension %zu: expected a positive integer, "
			                 "found %s", p->label, p->name, i,
			                 json_is_integer(dim) ? "one that is not positive" : json_kind(dim));
		t->dims[i] = json_integer_value(dim);
		if (__builtin_mul_overflow(elements, t->dims[i], &elements))
			return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": the product of its dimensions overflows",
			                 p->label, p->name);
	}
	t->bytes = dtype_row_bytes(t->dtype, elements);
	if (t->bytes < 0)
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": its size in bytes overflows", p->label, p->name);
	return STATUS_OK;
}

static enum status parse_place(const struct place *p, const json_t *offsets, uint64_t data_start,
                               struct safetensors_tensor *t)
{
	const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
	if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": data_offsets: expected an array of two integers, "
		                 "found %s", p->label, p->name, json_is_array(offsets) ? "another array" : json_kind(offsets));
	int64_t first = json_integer_value(begin), last = json_integer_value(end);
	if (first < 0 || last < first)
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": data_offsets: %lld to %lld is no range", p->label,
		                 p->name, (long long)first, (long long)last);
	if (last - first != t->bytes)
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": its shape and type need %lld bytes, data_offsets "
		                 "give %lld", p->label, p->name, (long long)t->bytes, (long long)(last - first));
	t->offset = (uint64_t)first + data_start; // below 2^63 + 2^25
	return STATUS_OK;
}

static enum status parse_tensor(const struct place *p, const json_t *v, uint64_t data_start,
                                struct safetensors_tensor *t)
{
	char q[32];
	const char *type = json_string_value(json_object_get(v, "dtype"));
	if (!json_is_object(v))
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": expected an object, found %s", p->label, p->name,
		                 json_kind(v));
	if (!type)
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\": dtype: expected a string, found %s", p->label,
		                 p->name, json_kind(json_object_get(v, "dtype")));
	if (!dtype_from_safetensors(type, &t->dtype))
		return error_set(p->error, STATUS_REFUSED, "%s: tensor \"%s\" has element type %s, which is not supported; "
		                 "supported are F32, F16 and BF16", p->label, p->name,
		                 quote_bytes(q, sizeof q, type, strlen(type)));
	TRY(parse_shape(p, json_object_get(v, "shape"), t));
	return parse_place(p, json_object_get(v, "data_offsets"), data_start, t);
}

static int compare_offsets(const void *a, const void *b)
{
	const struct safetensors_tensor *x = a, *y = b;
	if (x->offset != y->offset)
		return x->offset < y->offset ? -1 : 1;
	return strcmp(x->name, y->name);
}

// In order of offset, so that the message about a truncated file names the first tensor that does not fit.
static enum status check_places(const struct safetensors *s, uint64_t data_start, size_t len, const char *label,
                                struct error *e)
{
	char q[128], q2[128];
	uint64_t end = data_start;
	for (size_t i = 0; i < s->count; i++) {
		const struct safetensors_tensor *t = &s->tensors[i];
		quote_bytes(q, sizeof q, t->name, strlen(t->name));
		if (t->offset < end)
			return error_set(e, STATUS_REFUSED, "%s: tensors \"%s\" and \"%s\" overlap: one ends at byte %llu, the other "
			                 "begins at byte %llu", label,
			                 quote_bytes(q2, sizeof q2, s->tensors[i - 1].name, strlen(s->tensors[i - 1].name)), q,
			                 (unsigned long long)end, (unsigned long long)t->offset);
		if (t->offset > end)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\" begins at byte %llu, but what stands before it ends at "
			                 "byte %llu: holes are not allowed", label, q, (unsigned long long)t->offset,
			                 (unsigned long long)end);
		uint64_t present = len > t->offset ? len - t->offset : 0;
		if ((uint64_t)t->bytes > present)
			return error_set(e, STATUS_REFUSED, "%s: truncated: tensor \"%s\" needs %lld bytes at byte %llu, %llu are "
			                 "present", label, q, (long long)t->bytes, (unsigned long long)t->offset,
			                 (unsigned long long)present);
		end = t->offset + (uint64_t)t->bytes;
	}
	if (end != len)
		return error_set(e, STATUS_REFUSED, "%s: %llu bytes after the last tensor belong to none", label,
		                 (unsigned long long)(len - end));
	return STATUS_OK;
}

static enum status parse_all(struct safetensors *s, const uint8_t *data, size_t len, const char *label, struct error *e)
{
	struct place p = {.label = label, .error = e};
	uint64_t header_bytes = 0;
	if (len < sizeof header_bytes)
		return error_set(e, STATUS_REFUSED, "%s: truncated: the header's length needs 8 bytes, %zu are present", label,
		                 len);
	memcpy(&header_bytes, data, sizeof header_bytes);
	if (header_bytes > SAFETENSORS_MAX_HEADER_BYTES)
		return error_set(e, STATUS_REFUSED, "%s: not a safetensors file: it claims a header of %llu bytes, at most %d are "
		                 "allowed", label, (unsigned long long)header_bytes, SAFETENSORS_MAX_HEADER_BYTES);
	if (header_bytes > len - 8)
		return error_set(e, STATUS_REFUSED, "%s: truncated: the header needs %llu bytes, %zu are present", label,
		                 (unsigned long long)header_bytes, len - 8);
	TRY(json_fields_parse(&s->header, (const char *)data + 8, (size_t)header_bytes, 0, label, e));

	const uint64_t data_start = 8 + header_bytes;
	const char *name;
	json_t *v;
	s->tensors = xcalloc(json_object_size(s->header), sizeof *s->tensors);
	json_object_foreach(s->header, name, v) {
		if (!strcmp(name, "__metadata__"))
			continue;
		quote_bytes(p.name, sizeof p.name, name, strlen(name));
		if (!*name || strlen(name) > SAFETENSORS_MAX_NAME)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\": its name has %zu bytes; expected 1 to %d", label,
			                 p.name, strlen(name), SAFETENSORS_MAX_NAME);
		struct safetensors_tensor *t = &s->tensors[s->count];
		t->name = name;
		TRY(parse_tensor(&p, v, data_start, t));
		s->count++;
	}
	if (s->count)
		qsort(s->tensors, s->count, sizeof *s->tensors, compare_offsets);
	return check_places(s, data_start, len, label, e);
}

enum status safetensors_parse(struct safetensors **out, const uint8_t *data, size_t len, const char *label,
                              struct error *e)
{
	struct safetensors *s = xcalloc(1, sizeof *s);
	enum status status = parse_all(s, data, len, label, e);
	if (status != STATUS_OK)
		safetensors_destroy(&s);
	*out = s;
	return status;
}

void safetensors_destroy(struct safetensors **s)
{
	if (!*s)
		return;
	free((*s)->tensors);
	json_decref((*s)->header);
	free(*s);
	*s = NULL;
}

size_t safetensors_count(const struct safetensors *s)
{
	return s->count;
}

const struct safetensors_tensor *safetensors_at(const struct safetensors *s, size_t i)
{
	ASSERT(i < s->count);
	return &s->tensors[i];
}

static int compare_texts(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static enum status index_all(struct safetensors_index *x, const char *text, size_t len, const char *label,
                             struct error *e)
{
	char q[128], q2[128];
	const json_t *map = NULL;
	const char *name;
	json_t *v;
	TRY(json_fields_parse(&x->root, text, len, 0, label, e));
	enum status status = json_fields_object(&(struct json_fields){x->root, label, "", e}, "weight_map", &map);
	TRY(status == STATUS_ABSENT ? STATUS_REFUSED : status);
	size_t n = json_object_size(map);
	x->tensors = xcalloc(n, sizeof *x->tensors);
	x->files = xcalloc(n, sizeof *x->files);
	x->distinct = xcalloc(n, sizeof *x->distinct);
	json_object_foreach((json_t *)map, name, v) {
		const char *file = json_string_value(v);
		if (!file || !*file || *file == '.' || strchr(file, '/') || strlen(file) > 255)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"%s\": expected the name of a file in this folder, found "
			                 "\"%s\"", label, quote_bytes(q, sizeof q, name, strlen(name)),
			                 file ? quote_bytes(q2, sizeof q2, file, strlen(file)) : json_kind(v));
		x->tensors[x->count] = name;
		x->files[x->count] = x->distinct[x->count] = file;
		x->count++;
	}
	if (!x->count)
		return error_set(e, STATUS_REFUSED, "%s: field \"weight_map\" is empty", label);
	qsort(x->distinct, x->count, sizeof *x->distinct, compare_texts);
	for (size_t i = 0; i < x->count; i++)
		if (!x->n_files || strcmp(x->distinct[x->n_files - 1], x->distinct[i])) {
			if (x->n_files == SAFETENSORS_MAX_SHARDS)
				return error_set(e, STATUS_REFUSED, "%s: names more than %d files", label, SAFETENSORS_MAX_SHARDS);
			x->distinct[x->n_files++] = x->distinct[i];
		}
	return STATUS_OK;
}

enum status safetensors_index_parse(struct safetensors_index **out, const char *text, size_t len, const char *label,
                                    struct error *e)
{
	struct safetensors_index *x = xcalloc(1, sizeof *x);
	enum status status = index_all(x, text, len, label, e);
	if (status != STATUS_OK)
		safetensors_index_destroy(&x);
	*out = x;
	return status;
}

void safetensors_index_destroy(struct safetensors_index **x)
{
	if (!*x)
		return;
	free((*x)->distinct);
	free((*x)->files);
	free((*x)->tensors);
	json_decref((*x)->root);
	free(*x);
	*x = NULL;
}

int safetensors_index_file_count(const struct safetensors_index *x)
{
	return x->n_files;
}

const char *safetensors_index_file(const struct safetensors_index *x, int i)
{
	ASSERT(i >= 0 && i < x->n_files);
	return x->distinct[i];
}

size_t safetensors_index_count(const struct safetensors_index *x)
{
	return x->count;
}

void safetensors_index_at(const struct safetensors_index *x, size_t i, const char **tensor, const char **file)
{
	ASSERT(i < x->count);
	*tensor = x->tensors[i];
	*file = x->files[i];
}
