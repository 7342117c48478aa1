// Added tokens (control tokens and those that a user defined) are cut out of the text before anything else: leftmost,
// then longest, never overlapping. The surprising decision, which is the reference's: a control token that is not to be
// parsed still covers its place, so that no shorter added token is found inside it.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"
#include "coordinator/tokenizer_utf8.h"
#include "coordinator/unicode_table.h"

static uint32_t add_node(struct added_trie *trie, uint8_t byte)
{
	if (trie->count == trie->capacity) {
		trie->capacity = trie->capacity ? 2 * trie->capacity : 256;
		trie->nodes = xrealloc(trie->nodes, trie->capacity * sizeof *trie->nodes);
	}
	trie->nodes[trie->count] = (struct trie_node){.added = NO_TOKEN, .byte = byte};
	return (uint32_t)trie->count++;
}

static void insert(struct added_trie *trie, const char *text, size_t len, uint32_t added)
{
	if (trie->count == 0)
		add_node(trie, 0); // number 0 means none
	uint32_t node = trie->root[(uint8_t)text[0]];
	if (!node)
		node = trie->root[(uint8_t)text[0]] = add_node(trie, (uint8_t)text[0]);
	for (size_t i = 1; i < len; i++) {
		uint8_t b = (uint8_t)text[i];
		uint32_t child = trie->nodes[node].child;
		while (child && trie->nodes[child].byte != b)
			child = trie->nodes[child].sibling;
		if (!child) {
			child = add_node(trie, b);
			trie->nodes[child].sibling = trie->nodes[node].child;
			trie->nodes[node].child = child;
		}
		node = child;
	}
	trie->nodes[node].added = added;
}

void added_index(struct tokenizer *t)
{
	for (size_t i = 0; i < t->added_count; i++)
		if (t->added[i].match_len)
			insert(&t->tries[t->added[i].normalized], t->added[i].match, t->added[i].match_len, (uint32_t)i);
}

static const struct added_token *longest_at(const struct tokenizer *t, const struct added_trie *trie,
                                            const uint8_t *text, size_t len, size_t *matched)
{
	uint32_t best = NO_TOKEN, node = trie->root[text[0]];
	for (size_t i = 0; node;) {
		if (trie->nodes[node].added != NO_TOKEN) {
			best = trie->nodes[node].added;
			*matched = i + 1;
		}
		if (++i == len)
			break;
		node = trie->nodes[node].child;
		while (node && trie->nodes[node].byte != text[i])
			node = trie->nodes[node].sibling;
	}
	return best == NO_TOKEN ? NULL : &t->added[best];
}

static bool forbidden(const struct added_search *s, size_t start, size_t end)
{
	size_t lo = 0, hi = s->forbidden_count;
	while (lo < hi) { // first range that ends behind `start`
		size_t mid = (lo + hi) / 2;
		if (s->forbidden[mid].to <= start)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo < s->forbidden_count && s->forbidden[lo].from < end;
}

static size_t character_before(const uint8_t *text, size_t at)
{
	do
		at--;
	while ((text[at] & 0xC0) == 0x80);
	return at;
}

static bool has_before(const uint8_t *text, size_t at, int flag)
{
	const uint8_t *p = text + character_before(text, at);
	return unicode_has(utf8_next(&p), flag);
}

static bool has_at(const uint8_t *text, size_t at, int flag)
{
	const uint8_t *p = text + at;
	return unicode_has(utf8_next(&p), flag);
}

bool added_next(const struct tokenizer *t, int which, struct added_search *s, struct added_match *out)
{
	const struct added_trie *trie = &t->tries[which];
	if (trie->count == 0)
		return false;
	while (s->next < s->len) {
		size_t start = s->next, n = 0;
		if (!trie->root[s->text[start]]) {
			s->next++;
			continue;
		}
		const struct added_token *a = longest_at(t, trie, s->text + start, s->len - start, &n);
		if (!a) {
			s->next++;
			continue;
		}
		size_t end = start + n;
		s->next = end;
		if (a->control && (!s->parse_special || forbidden(s, start, end)))
			continue;
		if (a->single_word && ((start > 0 && has_before(s->text, start, UNICODE_ADDED_WORD)) ||
		                       (end < s->len && has_at(s->text, end, UNICODE_ADDED_WORD))))
			continue;
		if (a->lstrip) {
			while (start > s->taken && has_before(s->text, start, UNICODE_SPACE))
				start = character_before(s->text, start);
		}
		if (a->rstrip) {
			while (end < s->len && has_at(s->text, end, UNICODE_SPACE))
				end += utf8_width(s->text[end]);
		}
		*out = (struct added_match){start, end, a};
		return true;
	}
	return false;
}
