// What both formats need to build a tokenizer: the printable characters that stand for bytes, maps, merges, strings.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"
#include "coordinator/tokenizer_utf8.h"

// --- bytes as printable characters, GPT-2's way: those that print stand for themselves, the others for U+0100 on ------

static uint32_t character_of_byte(uint8_t b)
{
	if ((b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE)
		return b;
	if (b <= 0x20)
		return 0x100u + b;
	if (b <= 0xA0)
		return 0x100u + 33 + (b - 0x7Fu);
	return 0x100u + 33 + 34; // 0xAD
}

static int byte_of_character(uint32_t cp)
{
	if (cp < 0x100)
		return character_of_byte((uint8_t)cp) == cp ? (int)cp : -1;
	if (cp <= 0x120)
		return (int)(cp - 0x100);
	if (cp <= 0x142)
		return (int)(cp - 0x121 + 0x7F);
	return cp == 0x143 ? 0xAD : -1;
}

// --- strings ---------------------------------------------------------------------------------------------------------

enum { ARENA_BYTES = 1 << 20 };

static char *arena_take(struct tokenizer *t, size_t n)
{
	if (!t->arena || t->arena_capacity - t->arena_count < n) {
		size_t slots = 0;
		while (t->arenas && t->arenas[slots])
			slots++;
		t->arenas = xrealloc(t->arenas, (slots + 2) * sizeof *t->arenas);
		t->arena_capacity = n > ARENA_BYTES ? n : ARENA_BYTES;
		t->arena = xmalloc(t->arena_capacity);
		t->arenas[slots] = t->arena;
		t->arenas[slots + 1] = NULL;
		t->arena_count = 0;
	}
	char *p = t->arena + t->arena_count;
	t->arena_count += n;
	return p;
}

const char *tokenizer_keep(struct tokenizer *t, const char *text, size_t len)
{
	char *p = arena_take(t, len + 1);
	if (len)
		memcpy(p, text, len);
	p[len] = 0;
	return p;
}

struct tokenizer *tokenizer_allocate(uint32_t vocab_size)
{
	struct tokenizer *t = xcalloc(1, sizeof *t);
	t->vocab_size = vocab_size;
	t->tokens = xcalloc(vocab_size, sizeof *t->tokens);
	t->whole = xcalloc(vocab_size, 1);
	t->pretokenizer = pretokenizer_create();
	t->unknown_id = NO_TOKEN;
	t->generation.bos = -1;
	return t;
}

void tokenizer_destroy(struct tokenizer **p)
{
	struct tokenizer *t = *p;
	if (!t)
		return;
	for (size_t i = 0; t->arenas && t->arenas[i]; i++)
		free(t->arenas[i]);
	free(t->arenas);
	free(t->tokens);
	free(t->whole);
	free(t->by_text.slots);
	free(t->by_bytes.slots);
	free(t->added_by_text.slots);
	free(t->merges.slots);
	free(t->added);
	free(t->tries[0].nodes);
	free(t->tries[1].nodes);
	pretokenizer_destroy(&t->pretokenizer);
	free(t);
	*p = NULL;
}

void tokenizer_set_token(struct tokenizer *t, uint32_t id, const char *text, size_t len, bool in_model)
{
	struct token *k = &t->tokens[id];
	const uint8_t *s = (const uint8_t *)text, *end = s + len;
	bool mapped = utf8_valid_prefix(s, len) == len;
	k->text = k->bytes = tokenizer_keep(t, text, len);
	k->text_len = k->bytes_len = (uint32_t)len;
	k->in_model = in_model;
	// A token with any character that stands for no byte is shown as it is spelt; the reference does so too.
	for (const uint8_t *p = s; mapped && p < end;)
		mapped = byte_of_character(utf8_next(&p)) >= 0;
	if (!mapped)
		return;
	char *bytes = arena_take(t, len + 1);
	uint32_t n = 0;
	while (s < end)
		bytes[n++] = (char)byte_of_character(utf8_next(&s));
	k->bytes = bytes;
	k->bytes_len = n;
}

// --- maps ------------------------------------------------------------------------------------------------------------

static uint64_t hash_bytes(const char *s, size_t len)
{
	uint64_t h = 0x9E3779B97F4A7C15u ^ len, x;
	for (; len >= 8; s += 8, len -= 8) {
		memcpy(&x, s, 8);
		h = (h ^ x) * 0xFF51AFD7ED558CCDu;
		h ^= h >> 32;
	}
	x = 0;
	memcpy(&x, s, len);
	h = (h ^ x) * 0xFF51AFD7ED558CCDu;
	return h ^ h >> 32;
}

static size_t table_size(size_t count)
{
	size_t n = 16;
	while (n < 2 * count)
		n *= 2;
	return n;
}

typedef const char *(*token_string)(const struct token *, size_t *len);

static const char *string_text(const struct token *k, size_t *len)
{
	*len = k->text_len;
	return k->text;
}

static const char *string_bytes(const struct token *k, size_t *len)
{
	*len = k->bytes_len;
	return k->bytes;
}

// The slot of a string: taken by its token, or free (NO_TOKEN).
static uint32_t *slot(const struct tokenizer *t, const struct string_map *m, token_string string, const char *s,
                      size_t len)
{
	for (size_t i = hash_bytes(s, len) & m->mask;; i = (i + 1) & m->mask) {
		size_t n;
		if (m->slots[i] == NO_TOKEN)
			return &m->slots[i];
		const char *other = string(&t->tokens[m->slots[i]], &n);
		if (n == len && !memcmp(other, s, n))
			return &m->slots[i];
	}
}

static void map_create(struct string_map *m, size_t count)
{
	size_t n = table_size(count);
	m->slots = xmalloc(n * sizeof *m->slots);
	memset(m->slots, 0xFF, n * sizeof *m->slots);
	m->mask = n - 1;
}

static uint32_t find(const struct tokenizer *t, const struct string_map *m, token_string string, const char *s,
                     size_t len)
{
	return m->slots ? *slot(t, m, string, s, len) : NO_TOKEN;
}

uint32_t tokenizer_find_text(const struct tokenizer *t, const char *text, size_t len)
{
	return find(t, &t->by_text, string_text, text, len);
}

uint32_t tokenizer_find_bytes(const struct tokenizer *t, const uint8_t *bytes, size_t len)
{
	return find(t, &t->by_bytes, string_bytes, (const char *)bytes, len);
}

uint32_t tokenizer_find_added(const struct tokenizer *t, const char *text, size_t len)
{
	return find(t, &t->added_by_text, string_text, text, len);
}

void tokenizer_index_vocabulary(struct tokenizer *t, bool byte_fallback)
{
	map_create(&t->by_text, t->vocab_size);
	map_create(&t->by_bytes, t->vocab_size);
	for (uint32_t id = 0; id < t->vocab_size; id++) {
		const struct token *k = &t->tokens[id];
		if (!k->text || !k->in_model)
			continue;
		*slot(t, &t->by_text, string_text, k->text, k->text_len) = id; // of equal ones the last, as in a hash map
		if (k->bytes != k->text && k->bytes_len)
			*slot(t, &t->by_bytes, string_bytes, k->bytes, k->bytes_len) = id;
	}
	for (int b = 0; b < 256; b++) {
		uint8_t character[4];
		unsigned n = utf8_put(character, character_of_byte((uint8_t)b));
		t->byte_ids[b] = tokenizer_find_text(t, (const char *)character, n);
		bool all = byte_fallback;
		for (unsigned i = 0; i < n; i++) {
			char name[8];
			snprintf(name, sizeof name, "<0x%02X>", character[i]);
			t->fallback_ids[b][i] = tokenizer_find_text(t, name, 6);
			all &= t->fallback_ids[b][i] != NO_TOKEN;
		}
		t->fallback_count[b] = all ? (uint8_t)n : 0;
	}
}

// --- merges ----------------------------------------------------------------------------------------------------------

void tokenizer_merges_reserve(struct tokenizer *t, size_t count)
{
	size_t n = table_size(count);
	t->merges.slots = xmalloc(n * sizeof *t->merges.slots);
	memset(t->merges.slots, 0xFF, n * sizeof *t->merges.slots);
	t->merges.mask = n - 1;
}

enum status tokenizer_add_merge(struct tokenizer *t, uint32_t rank, const char *left, size_t left_len, const char *right,
                                size_t right_len, struct error *e)
{
	char small[256], *both = left_len + right_len <= sizeof small ? small : xmalloc(left_len + right_len);
	memcpy(both, left, left_len);
	memcpy(both + left_len, right, right_len);
	struct merge m = {tokenizer_find_text(t, left, left_len), tokenizer_find_text(t, right, right_len), rank,
	                  tokenizer_find_text(t, both, left_len + right_len)};
	if (both != small)
		free(both);
	if (m.left == NO_TOKEN || m.right == NO_TOKEN || m.result == NO_TOKEN)
		return error_set(e, STATUS_REFUSED, "merge %u of '%.*s' and '%.*s': %s is not in the vocabulary", rank,
		                 (int)(left_len < 80 ? left_len : 80), left, (int)(right_len < 80 ? right_len : 80), right,
		                 m.left == NO_TOKEN ? "the first" : m.right == NO_TOKEN ? "the second" : "the result");
	uint64_t h = ((uint64_t)m.left << 32 | m.right) * 0x9E3779B97F4A7C15u; // as in tokenizer_bpe.c
	size_t i = (h >> 32) & t->merges.mask;
	while (t->merges.slots[i].left != NO_TOKEN &&
	       (t->merges.slots[i].left != m.left || t->merges.slots[i].right != m.right))
		i = (i + 1) & t->merges.mask;
	t->merges.slots[i] = m; // of equal ones the last
	return STATUS_OK;
}

enum status tokenizer_add_merge_line(struct tokenizer *t, uint32_t rank, const char *line, size_t len, struct error *e)
{
	const char *space = memchr(line, ' ', len);
	size_t left = space ? (size_t)(space - line) : 0;
	if (!space || memchr(space + 1, ' ', len - left - 1))
		return error_set(e, STATUS_REFUSED, "merge %u '%.*s' is not two tokens with a space between", rank,
		                 (int)(len < 80 ? len : 80), line);
	return tokenizer_add_merge(t, rank, line, left, space + 1, len - left - 1, e);
}

// --- added tokens and the end ----------------------------------------------------------------------------------------

uint8_t *tokenizer_normalize(const struct tokenizer *t, const uint8_t *text, size_t len, size_t *out_len)
{
	uint8_t *owned = NULL;
	*out_len = len;
	for (int i = 0; i < t->normalizer_count; i++) {
		size_t n;
		uint8_t *next = unicode_normalize(owned ? owned : text, *out_len, t->normalizers[i], &n);
		if (!next)
			continue;
		free(owned);
		owned = next;
		*out_len = n;
	}
	if (owned && *out_len == len && !memcmp(owned, text, len)) {
		free(owned);
		owned = NULL;
	}
	return owned;
}

void tokenizer_add_added(struct tokenizer *t, uint32_t id, struct added_token a)
{
	struct token *k = &t->tokens[id];
	a.id = id;
	k->control |= a.control;
	a.match = k->text;
	a.match_len = k->text_len;
	if (a.normalized) {
		size_t n;
		uint8_t *normal = tokenizer_normalize(t, (const uint8_t *)k->text, k->text_len, &n);
		if (normal) {
			a.match = tokenizer_keep(t, (const char *)normal, n);
			a.match_len = (uint32_t)n;
		}
		free(normal);
	}
	if ((t->added_count & (t->added_count - 1)) == 0)
		t->added = xrealloc(t->added, (t->added_count ? 2 * t->added_count : 1) * sizeof *t->added);
	t->added[t->added_count++] = a;
}

void tokenizer_finish(struct tokenizer *t)
{
	map_create(&t->added_by_text, t->added_count);
	for (size_t i = 0; i < t->added_count; i++) {
		const struct token *k = &t->tokens[t->added[i].id];
		*slot(t, &t->added_by_text, string_text, k->text, k->text_len) = t->added[i].id;
	}
	added_index(t);
}
