// The GGUF reader alone: what a good file gives, and a table of broken ones with what the refusal has to say.
#include "common/gguf.h"

#include <criterion/criterion.h>

#include "gguf_builder.h"

static struct error e;

static enum status parse(struct gguf **g, struct bytes *b)
{
	e.text[0] = 0;
	return gguf_parse(g, b->p, b->n, "x.gguf", &e);
}

// Two tensors and a key of each kind.
static struct bytes good(uint32_t version)
{
	struct bytes b = {0};
	put_header(&b, version, 2, 8);
	put_kv_string(&b, "general.architecture", "llama");
	put_kv_u32(&b, "a.u32", 4000000000u);
	put_kv_f32(&b, "a.f32", 1.5f);
	put_kv_bool(&b, "a.bool", 1);
	put_array(&b, "a.strings", GGUF_STRING, 3);
	put_string(&b, "one");
	put_string(&b, "");
	put_text(&b, "th\0ree", 6);
	put_array(&b, "a.ints", GGUF_INT32, 2);
	put_u32(&b, 7);
	put_u32(&b, (uint32_t)-7);
	put_array(&b, "a.floats", GGUF_FLOAT32, 1);
	put(&b, &(float){0.25f}, 4);
	put_kv_u16(&b, "a.u16", 65535);
	put_tensor(&b, "second", 1, (uint64_t[]){3}, 0, 64);
	put_tensor(&b, "first", 2, (uint64_t[]){32, 2}, 3, 0);
	put_padding(&b, 32);
	for (int i = 0; i < 64 + 12; i++)
		put(&b, &(uint8_t){(uint8_t)i}, 1);
	return b;
}

Test(gguf, a_good_file_gives_keys_and_tensors_in_both_versions)
{
	for (uint32_t version = 2; version <= 3; version++) {
		struct bytes b = good(version);
		struct gguf *g;
		cr_assert_eq(parse(&g, &b), STATUS_OK, "%s", e.text);
		cr_assert_eq(gguf_kv_count(g), 8u);
		cr_assert_eq(gguf_tensor_count(g), 2u);
		uint32_t u32;
		uint16_t u16;
		float f32;
		bool flag;
		struct gguf_string s;
		cr_assert_eq(gguf_get_u32(g, "a.u32", &u32, &e), STATUS_OK);
		cr_assert_eq(u32, 4000000000u);
		cr_assert_eq(gguf_get_u16(g, "a.u16", &u16, &e), STATUS_OK);
		cr_assert_eq(u16, 65535);
		cr_assert_eq(gguf_get_f32(g, "a.f32", &f32, &e), STATUS_OK);
		cr_assert_eq(f32, 1.5f);
		cr_assert_eq(gguf_get_bool(g, "a.bool", &flag, &e), STATUS_OK);
		cr_assert(flag);
		cr_assert_eq(gguf_get_string(g, "general.architecture", &s, &e), STATUS_OK);
		cr_assert(s.len == 5 && !memcmp(s.data, "llama", 5));

		const struct gguf_tensor *t = gguf_tensor_at(g, 1);
		cr_assert(t->name.len == 5 && !memcmp(t->name.data, "first", 5));
		cr_assert_eq(t->dtype, DTYPE_Q4_1);
		cr_assert_eq(t->bytes, 40);
		cr_assert_eq(t->offset % 32, 0u);
		cr_assert_eq(gguf_data(g)[t->offset], 0);
		cr_assert_eq(gguf_data(g)[gguf_tensor_at(g, 0)->offset], 64);
		gguf_destroy(&g);
		cr_assert_null(g);
		gguf_destroy(&g);
		free(b.p);
	}
}

Test(gguf, arrays_are_copied_out_with_their_counts)
{
	struct bytes b = good(3);
	struct gguf *g;
	struct gguf_string *strings;
	int32_t *ints;
	float *floats;
	uint64_t n;
	cr_assert_eq(parse(&g, &b), STATUS_OK, "%s", e.text);
	cr_assert_eq(gguf_get_string_array(g, "a.strings", &strings, &n, &e), STATUS_OK);
	cr_assert_eq(n, 3u);
	cr_assert(strings[0].len == 3 && strings[1].len == 0 && strings[2].len == 6 && !memcmp(strings[2].data, "th\0ree", 6));
	cr_assert_eq(gguf_get_i32_array(g, "a.ints", &ints, &n, &e), STATUS_OK);
	cr_assert(n == 2 && ints[0] == 7 && ints[1] == -7);
	cr_assert_eq(gguf_get_f32_array(g, "a.floats", &floats, &n, &e), STATUS_OK);
	cr_assert(n == 1 && floats[0] == 0.25f);
	free(strings);
	free(ints);
	free(floats);
	gguf_destroy(&g);
	free(b.p);
}

Test(gguf, a_getter_says_which_type_it_wanted_and_which_it_found)
{
	struct bytes b = good(3);
	struct gguf *g;
	uint32_t u;
	float f;
	struct gguf_string *strings;
	uint64_t n;
	cr_assert_eq(parse(&g, &b), STATUS_OK, "%s", e.text);
	cr_assert_eq(gguf_get_u32(g, "a.f32", &u, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "x.gguf: metadata key \"a.f32\": expected uint32, found float32");
	cr_assert_eq(gguf_get_f32(g, "a.u32", &f, &e), STATUS_REFUSED);
	cr_assert_eq(gguf_get_string_array(g, "a.ints", &strings, &n, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "x.gguf: metadata key \"a.ints\": expected an array of string, found an array of int32");
	cr_assert_eq(gguf_get_u32(g, "a.strings", &u, &e), STATUS_REFUSED);
	cr_assert_eq(gguf_get_u32(g, "absent", &u, &e), STATUS_ABSENT);
	cr_assert_str_eq(e.text, "x.gguf: metadata key \"absent\" is missing");
	gguf_destroy(&g);
	free(b.p);
}

Test(gguf, every_beginning_of_a_file_is_refused)
{
	struct bytes b = good(3);
	for (size_t n = 0; n < b.n; n++) {
		uint8_t *copy = malloc(n ? n : 1); // exact, for the sanitizer
		struct gguf *g;
		memcpy(copy, b.p, n);
		e.text[0] = 0;
		cr_assert_eq(gguf_parse(&g, copy, n, "x.gguf", &e), STATUS_REFUSED, "%zu of %zu bytes", n, b.n);
		cr_assert_null(g);
		cr_assert(strstr(e.text, "x.gguf"), "%s", e.text);
		free(copy);
	}
	free(b.p);
}

Test(gguf, a_truncated_file_names_the_first_tensor_that_does_not_fit)
{
	struct bytes b = good(3);
	struct gguf *g;
	cr_assert_eq(gguf_parse(&g, b.p, b.n - 1, "x.gguf", &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "\"second\" needs 12 bytes"), "%s", e.text);
	cr_assert(strstr(e.text, "11 are present"), "%s", e.text);
	cr_assert_eq(gguf_parse(&g, b.p, b.n - 12 - 30, "x.gguf", &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "\"first\" needs 40 bytes"), "%s", e.text);
	free(b.p);
}

static void not_gguf(struct bytes *b) { put(b, "GGML\3\0\0\0aaaaaaaaaaaaaaaa", 24); }
static void version_1(struct bytes *b) { put_header(b, 1, 0, 0); }
static void version_4(struct bytes *b) { put_header(b, 4, 0, 0); }
static void big_endian(struct bytes *b) { put_header(b, __builtin_bswap32(3), 0, 0); }
static void many_tensors(struct bytes *b) { put_header(b, 3, UINT64_MAX, 0); }
static void many_keys(struct bytes *b) { put_header(b, 3, 0, UINT64_C(1) << 60); }
static void lying_tensors(struct bytes *b) { put_header(b, 3, 100000, 0); }
static void lying_keys(struct bytes *b) { put_header(b, 3, 0, 65536); }
static void long_key(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_u64(b, UINT64_MAX);
	put(b, "abc", 3);
}
static void empty_key(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_kv_u32(b, "", 1);
}
static void nul_in_key(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_text(b, "a\0b", 3);
	put_u32(b, GGUF_UINT32);
	put_u32(b, 1);
}
static void key_twice(struct bytes *b)
{
	put_header(b, 3, 0, 3);
	put_kv_u32(b, "general.same", 1);
	put_kv_u32(b, "general.other", 1);
	put_kv_u32(b, "general.same", 1);
}
static void unknown_value_type(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_key(b, "general.odd", 13);
	put_u64(b, 0);
}
static void array_of_arrays(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_array(b, "general.nested", GGUF_ARRAY, 1);
	put_u64(b, 0);
}
static void array_of_unknown(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_array(b, "general.odd", 77, 1);
}
static void lying_array(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_array(b, "tokenizer.ggml.tokens", GGUF_UINT64, UINT64_MAX / 4);
	put_u64(b, 0);
}
static void lying_small_array(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_array(b, "tokenizer.ggml.scores", GGUF_FLOAT32, 1000000);
	put_u64(b, 0);
}
static void lying_string(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_key(b, "general.name", GGUF_STRING);
	put_u64(b, UINT64_MAX - 7);
	put(b, "abc", 3);
}
static void bool_of_two(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_kv_bool(b, "general.flag", 2);
}

// A header with one key (alignment) and then what the row does with tensors.
static void tensors(struct bytes *b, int n)
{
	put_header(b, 3, (uint64_t)n, 1);
	put_kv_u32(b, "general.alignment", 32);
}
static void data(struct bytes *b, size_t n)
{
	put_padding(b, 32);
	for (size_t i = 0; i < n; i++)
		put(b, "", 1);
}
static void no_dims(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 0, NULL, 0, 0);
	data(b, 32);
}
static void five_dims(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 5, (uint64_t[]){1, 1, 1, 1, 1}, 0, 0);
	data(b, 32);
}
static void zero_dim(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 2, (uint64_t[]){4, 0}, 0, 0);
	data(b, 32);
}
static void negative_dim(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){UINT64_MAX}, 0, 0);
	data(b, 32);
}
static void overflowing_dims(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 4, (uint64_t[]){1, UINT64_C(1) << 31, UINT64_C(1) << 31, 4}, 0, 0);
	data(b, 32);
}
static void overflowing_bytes(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 2, (uint64_t[]){UINT64_C(1) << 31, UINT64_C(1) << 30}, 0, 0);
	data(b, 32);
}
static void overflowing_row(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){UINT64_C(1) << 62}, 0, 0);
	data(b, 32);
}
static void unknown_type(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){256}, 16, 0);
	data(b, 256);
}
static void nonsense_type(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){256}, 4000000000u, 0);
	data(b, 256);
}
static void half_block(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 2, (uint64_t[]){48, 2}, 8, 0);
	data(b, 256);
}
static void unaligned_offset(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){2}, 0, 4);
	data(b, 32);
}
static void offset_outside(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){2}, 0, 1 << 20);
	data(b, 32);
}
static void overflowing_offset(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "t", 1, (uint64_t[]){2}, 0, UINT64_MAX - 31);
	data(b, 32);
}
static void overlap(struct bytes *b)
{
	tensors(b, 2);
	put_tensor(b, "left", 1, (uint64_t[]){9}, 0, 0);
	put_tensor(b, "right", 1, (uint64_t[]){2}, 0, 32);
	data(b, 64);
}
static void same_place(struct bytes *b)
{
	tensors(b, 2);
	put_tensor(b, "left", 1, (uint64_t[]){2}, 0, 0);
	put_tensor(b, "right", 1, (uint64_t[]){2}, 0, 0);
	data(b, 64);
}
static void tensor_twice(struct bytes *b)
{
	tensors(b, 2);
	put_tensor(b, "same", 1, (uint64_t[]){2}, 0, 0);
	put_tensor(b, "same", 1, (uint64_t[]){2}, 0, 32);
	data(b, 64);
}
static void nul_in_tensor(struct bytes *b)
{
	tensors(b, 1);
	put_text(b, "t\0u", 3);
	put_u32(b, 1);
	put_u64(b, 2);
	put_u32(b, 0);
	put_u64(b, 0);
	data(b, 32);
}
static void empty_tensor_name(struct bytes *b)
{
	tensors(b, 1);
	put_tensor(b, "", 1, (uint64_t[]){2}, 0, 0);
	data(b, 32);
}
static void long_tensor_name(struct bytes *b)
{
	char name[129];
	memset(name, 'n', 128);
	name[128] = 0;
	tensors(b, 1);
	put_tensor(b, name, 1, (uint64_t[]){2}, 0, 0);
	data(b, 32);
}
static void alignment(struct bytes *b, uint32_t a)
{
	put_header(b, 3, 1, 1);
	put_kv_u32(b, "general.alignment", a);
	put_tensor(b, "t", 1, (uint64_t[]){2}, 0, 0);
	data(b, 32);
}
static void alignment_0(struct bytes *b) { alignment(b, 0); }
static void alignment_24(struct bytes *b) { alignment(b, 24); }
static void alignment_1(struct bytes *b) { alignment(b, 1); }
static void alignment_huge(struct bytes *b) { alignment(b, 1u << 31); }
static void alignment_text(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_kv_string(b, "general.alignment", "32");
}
static void alignment_u64(struct bytes *b)
{
	put_header(b, 3, 0, 1);
	put_key(b, "general.alignment", GGUF_UINT64);
	put_u64(b, 32);
}

static const struct {
	const char *name;
	void (*build)(struct bytes *);
	const char *place, *reason;
} broken[] = {
	{"another magic", not_gguf, "GGML", "not a GGUF file"},
	{"version 1", version_1, "version", "found 1"},
	{"version 4", version_4, "version", "found 4"},
	{"big-endian", big_endian, "big-endian", "not supported"},
	{"2^64 tensors", many_tensors, "18446744073709551615 tensors", "at most"},
	{"2^60 keys", many_keys, "1152921504606846976 metadata keys", "at most"},
	{"tensors that are not there", lying_tensors, "tensor 1 of 100000", "0 are present"},
	{"keys that are not there", lying_keys, "key 1 of 65536", "0 are present"},
	{"a key of 2^64 bytes", long_key, "key 1 of 1", "18446744073709551615 bytes, 3 are present"},
	{"an empty key", empty_key, "key 1 of 1", "empty name"},
	{"a NUL in a key", nul_in_key, "a?b", "NUL"},
	{"a key twice", key_twice, "general.same", "twice"},
	{"an unknown value type", unknown_value_type, "general.odd", "unknown value type 13"},
	{"an array of arrays", array_of_arrays, "general.nested", "array of arrays"},
	{"an array of an unknown type", array_of_unknown, "general.odd", "unknown type"},
	{"an array of 2^62 items", lying_array, "tokenizer.ggml.tokens", "claims 4611686018427387903 items"},
	{"an array longer than the file", lying_small_array, "tokenizer.ggml.scores", "needs 4000000 bytes, 8 are present"},
	{"a string of 2^64 bytes", lying_string, "general.name", "3 are present"},
	{"a bool of 2", bool_of_two, "general.flag", "found 2"},
	{"no dimensions", no_dims, "\"t\"", "1 to 4 dimensions, found 0"},
	{"five dimensions", five_dims, "\"t\"", "1 to 4 dimensions, found 5"},
	{"a dimension of zero", zero_dim, "\"t\"", "dimension 1 is 0"},
	{"a dimension of 2^64 - 1", negative_dim, "\"t\"", "dimension 0 is 18446744073709551615"},
	{"a product that overflows", overflowing_dims, "\"t\"", "overflows"},
	{"bytes that overflow", overflowing_bytes, "\"t\"", "overflows"},
	{"a row that overflows", overflowing_row, "\"t\"", "overflows"},
	{"a type we lack", unknown_type, "\"t\"", "IQ2_XXS (16)"},
	{"a type nobody has", nonsense_type, "\"t\"", "unknown (4000000000)"},
	{"half a block", half_block, "\"t\"", "not whole blocks of 32 (q8_0)"},
	{"an offset that is not aligned", unaligned_offset, "\"t\"", "not a multiple of the alignment 32"},
	{"an offset outside", offset_outside, "\"t\"", "needs 8 bytes at byte"},
	{"an offset that overflows", overflowing_offset, "\"t\"", "overflows"},
	{"two that overlap", overlap, "\"left\" and \"right\"", "overlap"},
	{"two in one place", same_place, "\"left\" and \"right\"", "overlap"},
	{"a tensor twice", tensor_twice, "\"same\"", "twice"},
	{"a NUL in a tensor's name", nul_in_tensor, "t?u", "NUL"},
	{"a tensor without a name", empty_tensor_name, "tensor 1 of 1", "empty name"},
	{"a tensor with a long name", long_tensor_name, "nnn...", "128 bytes"},
	{"alignment 0", alignment_0, "general.alignment", "found 0"},
	{"alignment 24", alignment_24, "general.alignment", "found 24"},
	{"alignment 1", alignment_1, "general.alignment", "found 1"},
	{"alignment 2^31", alignment_huge, "general.alignment", "found 2147483648"},
	{"alignment as text", alignment_text, "general.alignment", "expected uint32, found string"},
	{"alignment of 64 bits", alignment_u64, "general.alignment", "expected uint32, found uint64"},
};

Test(gguf, every_broken_file_of_the_table_is_refused_with_place_and_reason)
{
	for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
		struct bytes b = {0};
		struct gguf *g;
		broken[i].build(&b);
		cr_assert_eq(parse(&g, &b), STATUS_REFUSED, "%s", broken[i].name);
		cr_assert_null(g);
		cr_assert(strstr(e.text, "x.gguf"), "%s: %s", broken[i].name, e.text);
		cr_assert(strstr(e.text, broken[i].place), "%s: %s", broken[i].name, e.text);
		cr_assert(strstr(e.text, broken[i].reason), "%s: %s", broken[i].name, e.text);
		free(b.p);
	}
}
