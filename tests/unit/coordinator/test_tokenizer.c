// Replays what Hugging Face `tokenizers` made of 2,000 texts under the demo model's tokenizer, under tokenizer.json files
// and under GGUF pre-tokenizer names. golden/make_tokenizer_reference.py made the files and describes their layout.
#include <criterion/criterion.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"

#define GOLDEN TEST_DATA_DIR "/golden/tokenizer/"

struct bytes { uint8_t *at; size_t len; };

static struct bytes read_file(const char *name)
{
	char path[1024];
	snprintf(path, sizeof path, "%s%s", GOLDEN, name);
	FILE *f = fopen(path, "rb");
	cr_assert_not_null(f, "cannot open %s", path);
	fseek(f, 0, SEEK_END);
	struct bytes b = {NULL, (size_t)ftell(f)};
	rewind(f);
	b.at = malloc(b.len + 1);
	cr_assert_eq(fread(b.at, 1, b.len, f), b.len);
	b.at[b.len] = 0;
	fclose(f);
	return b;
}

struct cursor { const uint8_t *p, *end; };

static size_t varint(struct cursor *c)
{
	size_t n = 0;
	for (int shift = 0;; shift += 7) {
		cr_assert_lt(c->p, c->end, "the reference ends early");
		n |= (size_t)(*c->p & 127) << shift;
		if (!(*c->p++ & 128))
			return n;
	}
}

static struct bytes blob(struct cursor *c)
{
	size_t n = varint(c);
	cr_assert_leq(n, (size_t)(c->end - c->p));
	struct bytes b = {(uint8_t *)c->p, n};
	c->p += n;
	return b;
}

static struct tokenizer *open_gguf(const char *name, struct bytes *file)
{
	struct gguf *g;
	struct tokenizer *t;
	struct error e = {""};
	*file = read_file(name);
	cr_assert_eq(gguf_parse(&g, file->at, file->len, name, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(tokenizer_from_gguf(&t, g, &e), STATUS_OK, "%s: %s", name, e.text);
	gguf_destroy(&g);
	memset(file->at, 0xEE, file->len); // nothing may be borrowed from it
	free(file->at);
	return t;
}

static struct tokenizer *open_config(const char *name)
{
	struct bytes vocabulary = read_file("tiny_vocabulary.json"), configs = read_file("configs.json");
	json_t *v = json_loadb((char *)vocabulary.at, vocabulary.len, 0, NULL);
	json_t *all = json_loadb((char *)configs.at, configs.len, 0, NULL), *config = json_object_get(all, name);
	cr_assert(v && config, "%s", name);
	json_object_update(json_object_get(config, "model"), v);
	char *text = json_dumps(config, JSON_COMPACT);
	struct tokenizer *t;
	struct error e = {""};
	cr_assert_eq(tokenizer_from_json(&t, text, strlen(text), &e), STATUS_OK, "%s: %s", name, e.text);
	free(text);
	json_decref(v);
	json_decref(all);
	free(vocabulary.at);
	free(configs.at);
	return t;
}

static struct tokenizer *open_named(struct bytes name)
{
	char text[64], file[96];
	struct bytes ignored;
	snprintf(text, sizeof text, "%.*s", (int)name.len, (char *)name.at);
	if (!strcmp(text, "demo"))
		return open_gguf("demo_vocabulary.gguf", &ignored);
	if (strncmp(text, "gguf ", 5))
		return open_config(text);
	snprintf(file, sizeof file, "tiny_%s.gguf", text + 5);
	return open_gguf(file, &ignored);
}

static uint32_t fnv(uint32_t h, const void *bytes, size_t n)
{
	const uint8_t *p = bytes;
	while (n--)
		h = (h ^ *p++) * 16777619u;
	return h;
}

struct text { char *at; size_t len, capacity; };

static void decode(struct text *out, const struct tokenizer *t, const uint32_t *ids, size_t n, bool skip)
{
	struct detokenizer d;
	out->len = 0;
	detokenizer_init(&d, t, skip);
	for (size_t i = 0; i < n; i++)
		detokenizer_push(&d, ids[i], &out->at, &out->len, &out->capacity);
	detokenizer_finish(&d, &out->at, &out->len, &out->capacity);
}

static void print_ids(const char *what, const uint32_t *ids, size_t n)
{
	printf("%s:", what);
	for (size_t i = 0; i < n && i < 60; i++)
		printf(" %u", ids[i]);
	printf("\n");
}

// Compares with stored ids, says where they differ.
static bool same_ids(struct cursor *c, const struct token_list *got, const char *what)
{
	size_t n = varint(c);
	uint32_t *want = malloc((n + 1) * sizeof *want);
	for (size_t i = 0; i < n; i++)
		want[i] = (uint32_t)varint(c);
	bool same = n == got->count && (n == 0 || !memcmp(want, got->ids, n * sizeof *want));
	if (!same) {
		print_ids(what, want, n);
		print_ids("  got", got->ids, got->count);
	}
	free(want);
	return same;
}

// One text under one tokenizer; false if anything differs.
static bool replay_text(const struct tokenizer *t, struct bytes text, struct cursor *c, bool stored,
                        struct token_list lists[2], struct text decoded[2])
{
	bool same = true;
	uint32_t h = 2166136261u;
	for (int i = 0; i < 2; i++) {
		struct encode_options options = {.add_special = true, .parse_special = i == 0};
		struct error e = {""};
		lists[i].count = 0;
		cr_assert_eq(tokenizer_encode(t, (char *)text.at, text.len, &options, &lists[i], &e), STATUS_OK, "%s", e.text);
		if (stored)
			same &= same_ids(c, &lists[i], i == 0 ? "want, parsed" : "want, as text");
		else
			same &= varint(c) == lists[i].count;
		h = fnv(h, lists[i].ids, lists[i].count * sizeof(uint32_t));
	}
	for (int i = 0; i < 2; i++) {
		decode(&decoded[i], t, lists[0].ids, lists[0].count, i == 1);
		h = fnv(h, decoded[i].at, decoded[i].len);
	}
	uint32_t want = (uint32_t)c->p[0] | (uint32_t)c->p[1] << 8 | (uint32_t)c->p[2] << 16 | (uint32_t)c->p[3] << 24;
	c->p += 4;
	return same && h == want;
}

Test(tokenizer, gives_the_ids_and_texts_of_the_reference_for_every_text, .timeout = 200)
{
	struct bytes file = read_file("reference.bin");
	struct cursor c = {file.at + 4, file.at + file.len};
	cr_assert(file.len > 4 && !memcmp(file.at, "STKR", 4));
	size_t n = varint(&c), wrong = 0;
	cr_assert_geq(n, 2000);
	struct bytes *texts = malloc(n * sizeof *texts);
	for (size_t i = 0; i < n; i++)
		texts[i] = blob(&c);
	struct token_list lists[2] = {{0}, {0}};
	struct text decoded[2] = {{0}, {0}};
	size_t tokenizers = varint(&c);
	cr_assert_geq(tokenizers, 15);
	for (size_t k = 0; k < tokenizers; k++) {
		struct bytes name = blob(&c);
		struct tokenizer *t = open_named(name);
		bool stored = *c.p++;
		for (size_t i = 0; i < n; i++) {
			if (replay_text(t, texts[i], &c, stored, lists, decoded))
				continue;
			if (++wrong < 20) {
				printf("%.*s: text %zu: %.*s\n", (int)name.len, (char *)name.at, i, (int)texts[i].len,
				       (char *)texts[i].at);
				print_ids("  got parsed", lists[0].ids, lists[0].count);
				print_ids("  got as text", lists[1].ids, lists[1].count);
			}
		}
		for (size_t left = varint(&c); left > 0; left--) {
			struct token_list *ids = &lists[0];
			ids->count = 0;
			for (size_t m = varint(&c); m > 0; m--)
				token_list_push(ids, (uint32_t)varint(&c));
			struct bytes want = blob(&c);
			decode(&decoded[0], t, ids->ids, ids->count, false);
			if (decoded[0].len != want.len || (want.len && memcmp(decoded[0].at, want.at, want.len))) {
				printf("%.*s: decoded '%.*s' instead of '%.*s'\n", (int)name.len, (char *)name.at, (int)decoded[0].len,
				       decoded[0].at, (int)want.len, (char *)want.at);
				wrong++;
			}
		}
		tokenizer_destroy(&t);
	}
	cr_assert_eq(c.p, c.end);
	cr_assert_eq(wrong, 0, "%zu differ", wrong);
	for (int i = 0; i < 2; i++) {
		free(lists[i].ids);
		free(decoded[i].at);
	}
	free(texts);
	free(file.at);
}
