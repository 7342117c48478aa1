// Safetensors files and their index: what good ones give, and tables of broken ones with what the refusal has to say.
#include "common/safetensors.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static struct error e;

// A file of a header and `data_bytes` zero bytes; exact, for the sanitizer. Caller frees.
static uint8_t *file(const char *header, size_t data_bytes, size_t *len)
{
	uint64_t n = strlen(header);
	*len = 8 + n + data_bytes;
	uint8_t *p = calloc(1, *len);
	memcpy(p, &n, 8);
	memcpy(p + 8, header, n);
	return p;
}

static enum status parse(struct safetensors **s, const char *header, size_t data_bytes)
{
	size_t len;
	uint8_t *p = file(header, data_bytes, &len);
	e.text[0] = 0;
	enum status status = safetensors_parse(s, p, len, "x.safetensors", &e);
	free(p);
	return status;
}

#define F32_AT(from, to) "{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[" #from "," #to "]}"

Test(safetensors, a_good_file_gives_its_tensors_in_order_of_place)
{
	struct safetensors *s;
	cr_assert_eq(parse(&s, "{\"b\":" F32_AT(24, 48) ",\"__metadata__\":{\"format\":\"pt\"},\"a\":" F32_AT(0, 24) ","
	                   "\"h\":{\"dtype\":\"BF16\",\"shape\":[5],\"data_offsets\":[48,58]}}  ", 58), STATUS_OK, "%s", e.text);
	cr_assert_eq(safetensors_count(s), 3u);
	cr_assert_str_eq(safetensors_at(s, 0)->name, "a");
	const struct safetensors_tensor *b = safetensors_at(s, 1), *h = safetensors_at(s, 2);
	cr_assert_str_eq(b->name, "b");
	cr_assert(b->n_dims == 2 && b->dims[0] == 2 && b->dims[1] == 3 && b->bytes == 24 && b->dtype == DTYPE_F32);
	cr_assert_eq(b->offset, safetensors_at(s, 0)->offset + 24);
	cr_assert(h->n_dims == 1 && h->dims[0] == 5 && h->bytes == 10 && h->dtype == DTYPE_BF16);
	safetensors_destroy(&s);
	cr_assert_null(s);
	safetensors_destroy(&s);
}

Test(safetensors, every_beginning_of_a_file_is_refused)
{
	size_t len;
	uint8_t *p = file("{\"a\":" F32_AT(0, 24) "}", 24, &len);
	for (size_t n = 0; n < len; n++) {
		uint8_t *copy = malloc(n ? n : 1);
		struct safetensors *s;
		memcpy(copy, p, n);
		e.text[0] = 0;
		cr_assert_eq(safetensors_parse(&s, copy, n, "x.safetensors", &e), STATUS_REFUSED, "%zu of %zu bytes", n, len);
		cr_assert(strstr(e.text, "x.safetensors"), "%s", e.text);
		free(copy);
	}
	free(p);
}

Test(safetensors, a_header_longer_than_the_file_is_refused_before_anything_is_allocated)
{
	struct safetensors *s;
	uint8_t p[8] = {255, 255, 255, 255, 255, 255, 255, 255};
	cr_assert_eq(safetensors_parse(&s, p, 8, "x.safetensors", &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "claims a header of 18446744073709551615 bytes"), "%s", e.text);
	uint64_t n = 1000;
	memcpy(p, &n, 8);
	cr_assert_eq(safetensors_parse(&s, p, 8, "x.safetensors", &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "the header needs 1000 bytes, 0 are present"), "%s", e.text);
}

static const struct {
	const char *header;
	size_t data_bytes;
	const char *place, *reason;
} broken[] = {
	{"", 0, "x.safetensors", "not valid JSON"},
	{"nonsense", 0, "x.safetensors", "not valid JSON"},
	{"[1]", 0, "x.safetensors", "expected a JSON object, found an array"},
	{"{\"a\":" F32_AT(0, 24) ",\"a\":" F32_AT(0, 24) "}", 24, "x.safetensors", "duplicate"},
	{"{\"a\\u0000b\":" F32_AT(0, 24) "}", 24, "x.safetensors", "NUL"},
	{"{\"\":" F32_AT(0, 24) "}", 24, "tensor \"\"", "has 0 bytes"},
	{"{\"a\":7}", 0, "\"a\"", "expected an object, found an integer"},
	{"{\"a\":{\"shape\":[6],\"data_offsets\":[0,24]}}", 24, "\"a\"", "dtype: expected a string, found nothing"},
	{"{\"a\":{\"dtype\":3,\"shape\":[6],\"data_offsets\":[0,24]}}", 24, "\"a\"", "dtype: expected a string, found an integer"},
	{"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[24],\"data_offsets\":[0,24]}}", 24, "\"a\"", "F8_E4M3, which is not supported"},
	{"{\"a\":{\"dtype\":\"I64\",\"shape\":[3],\"data_offsets\":[0,24]}}", 24, "\"a\"", "I64, which is not supported"},
	{"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,24]}}", 24, "\"a\"", "shape: expected 1 to 4 dimensions"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "\"a\"", "shape: expected 1 to 4 dimensions"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "\"a\"", "1 to 4 dimensions"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}}", 24, "\"a\"", "found an integer"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[-6],\"data_offsets\":[0,24]}}", 24, "\"a\"", "dimension 0: expected a positive"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,0],\"data_offsets\":[0,0]}}", 0, "\"a\"", "dimension 1: expected a positive"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[6.0],\"data_offsets\":[0,24]}}", 24, "\"a\"", "found a number with a fraction"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,24]}}", 24, "x.safetensors", "integer"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,24]}}", 24, "\"a\"", "overflows"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,24]}}", 24, "\"a\"", "overflows"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[6]}}", 24, "\"a\"", "data_offsets: expected an array of two integers"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[0]}}", 24, "\"a\"", "an array of two integers"},
	{"{\"a\":{\"dtype\":\"F32\",\"shape\":[6],\"data_offsets\":[\"0\",24]}}", 24, "\"a\"", "an array of two integers"},
	{"{\"a\":" F32_AT(-24, 0) "}", 24, "\"a\"", "-24 to 0 is no range"},
	{"{\"a\":" F32_AT(24, 0) "}", 24, "\"a\"", "24 to 0 is no range"},
	{"{\"a\":" F32_AT(0, 20) "}", 20, "\"a\"", "need 24 bytes, data_offsets give 20"},
	{"{\"a\":" F32_AT(0, 9223372036854775807) "}", 24, "\"a\"", "need 24 bytes, data_offsets give 9223372036854775807"},
	{"{\"a\":" F32_AT(9223372036854775783, 9223372036854775807) "}", 24, "\"a\"", "holes are not allowed"},
	{"{\"a\":" F32_AT(0, 24) ",\"b\":" F32_AT(20, 44) "}", 44, "\"a\" and \"b\"", "overlap"},
	{"{\"a\":" F32_AT(0, 24) ",\"b\":" F32_AT(0, 24) "}", 24, "\"a\" and \"b\"", "overlap"},
	{"{\"a\":" F32_AT(0, 24) ",\"b\":" F32_AT(32, 56) "}", 56, "\"b\"", "holes are not allowed"},
	{"{\"a\":" F32_AT(8, 32) "}", 32, "\"a\"", "holes are not allowed"},
	{"{\"a\":" F32_AT(0, 24) ",\"b\":" F32_AT(24, 48) "}", 47, "truncated: tensor \"b\" needs 24 bytes", "23 are present"},
	{"{\"a\":" F32_AT(0, 24) "}", 32, "8 bytes after the last tensor", "belong to none"},
};

Test(safetensors, every_broken_file_of_the_table_is_refused_with_place_and_reason)
{
	for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
		struct safetensors *s;
		cr_assert_eq(parse(&s, broken[i].header, broken[i].data_bytes), STATUS_REFUSED, "%s", broken[i].header);
		cr_assert_null(s);
		cr_assert(strstr(e.text, "x.safetensors"), "%s: %s", broken[i].header, e.text);
		cr_assert(strstr(e.text, broken[i].place), "%s: %s", broken[i].header, e.text);
		cr_assert(strstr(e.text, broken[i].reason), "%s: %s", broken[i].header, e.text);
	}
}

Test(safetensors, nesting_of_a_million_levels_is_refused)
{
	size_t n = 1000000;
	char *text = malloc(n + 1);
	struct safetensors *s;
	memset(text, '[', n);
	text[n] = 0;
	cr_assert_eq(parse(&s, text, 0), STATUS_REFUSED);
	cr_assert(strstr(e.text, "not valid JSON"), "%s", e.text);
	free(text);
}

static enum status parse_index(struct safetensors_index **x, const char *text)
{
	e.text[0] = 0;
	return safetensors_index_parse(x, text, strlen(text), "index.json", &e);
}

Test(safetensors, an_index_gives_each_file_once_in_order)
{
	struct safetensors_index *x;
	const char *tensor, *file_name;
	cr_assert_eq(parse_index(&x, "{\"metadata\":{\"total_size\":3},\"weight_map\":{\"a\":\"2.safetensors\","
	                         "\"b\":\"1.safetensors\",\"c\":\"2.safetensors\"}}"), STATUS_OK, "%s", e.text);
	cr_assert_eq(safetensors_index_count(x), 3u);
	cr_assert_eq(safetensors_index_file_count(x), 2);
	cr_assert_str_eq(safetensors_index_file(x, 0), "1.safetensors");
	cr_assert_str_eq(safetensors_index_file(x, 1), "2.safetensors");
	safetensors_index_at(x, 1, &tensor, &file_name);
	cr_assert_str_eq(tensor, "b");
	cr_assert_str_eq(file_name, "1.safetensors");
	safetensors_index_destroy(&x);
	safetensors_index_destroy(&x);
}

static const struct { const char *text, *reason; } broken_indexes[] = {
	{"", "not valid JSON"},
	{"[]", "found an array"},
	{"{}", "\"weight_map\" is missing"},
	{"{\"weight_map\":[]}", "expected an object, found an array"},
	{"{\"weight_map\":{}}", "is empty"},
	{"{\"weight_map\":{\"a\":1}}", "found \"an integer\""},
	{"{\"weight_map\":{\"a\":\"\"}}", "expected the name of a file in this folder"},
	{"{\"weight_map\":{\"a\":\"../../etc/passwd\"}}", "expected the name of a file in this folder"},
	{"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "expected the name of a file in this folder"},
	{"{\"weight_map\":{\"a\":\"..\"}}", "expected the name of a file in this folder"},
	{"{\"weight_map\":{\"a\":\"b\",\"a\":\"c\"}}", "duplicate"},
};

Test(safetensors, every_broken_index_of_the_table_is_refused)
{
	for (size_t i = 0; i < sizeof broken_indexes / sizeof *broken_indexes; i++) {
		struct safetensors_index *x;
		cr_assert_eq(parse_index(&x, broken_indexes[i].text), STATUS_REFUSED, "%s", broken_indexes[i].text);
		cr_assert_null(x);
		cr_assert(strstr(e.text, "index.json"), "%s: %s", broken_indexes[i].text, e.text);
		cr_assert(strstr(e.text, broken_indexes[i].reason), "%s: %s", broken_indexes[i].text, e.text);
	}
}
