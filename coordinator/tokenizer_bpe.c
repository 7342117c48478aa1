// Byte pair merging. Short pieces look for the lowest rank again after each merge, which is fastest for them; longer
// ones use a heap over a linked list, n log n. Both give what `tokenizers` gives: lowest rank first, leftmost among equals.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"

enum { SHORT_PIECE = 48 };

struct symbol { uint32_t id; int32_t previous, next; };          // id NO_TOKEN: merged away
struct candidate { uint32_t rank; uint32_t position; uint32_t result; };

static const struct merge *find_merge(const struct tokenizer *t, uint32_t left, uint32_t right)
{
	if (!t->merges.slots)
		return NULL;
	uint64_t h = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
	for (size_t i = (h >> 32) & t->merges.mask;; i = (i + 1) & t->merges.mask) {
		const struct merge *m = &t->merges.slots[i];
		if (m->left == left && m->right == right)
			return m;
		if (m->left == NO_TOKEN)
			return NULL;
	}
}

static void *grown(void **p, size_t *capacity, size_t count, size_t item)
{
	if (count > *capacity) {
		*capacity = count + count / 2;
		*p = xrealloc(*p, *capacity * item);
	}
	return *p;
}

// The tokens of the single bytes. A byte without one becomes its fallback, else the unknown token (a row of them one,
// where they are fused), else nothing.
static size_t first_symbols(const struct tokenizer *t, const uint8_t *piece, size_t len, struct bpe_scratch *s)
{
	struct symbol *symbols = grown(&s->symbols, &s->symbol_capacity, 2 * len, sizeof *symbols);
	size_t n = 0;
	bool unknown = false; // one is pending
	for (size_t i = 0; i < len; i++) {
		uint8_t b = piece[i];
		if (t->byte_ids[b] != NO_TOKEN) {
			if (unknown)
				symbols[n++].id = t->unknown_id;
			unknown = false;
			symbols[n++].id = t->byte_ids[b];
		} else if (t->fallback_count[b]) {
			// A pending unknown token stays behind these, as in the reference.
			for (int k = 0; k < t->fallback_count[b]; k++)
				symbols[n++].id = t->fallback_ids[b][k];
		} else if (t->unknown_id != NO_TOKEN) {
			if (unknown && !t->fuse_unknown)
				symbols[n++].id = t->unknown_id;
			unknown = true;
		}
	}
	if (unknown)
		symbols[n++].id = t->unknown_id;
	return n;
}

static size_t merge_short(const struct tokenizer *t, struct symbol *symbols, size_t n)
{
	struct { uint32_t rank, result; } pairs[2 * SHORT_PIECE];
	for (size_t i = 0; i + 1 < n; i++) {
		const struct merge *m = find_merge(t, symbols[i].id, symbols[i + 1].id);
		pairs[i].rank = m ? m->rank : UINT32_MAX;
		pairs[i].result = m ? m->result : 0;
	}
	while (n > 1) {
		size_t best = 0;
		for (size_t i = 1; i + 1 < n; i++)
			if (pairs[i].rank < pairs[best].rank)
				best = i;
		if (pairs[best].rank == UINT32_MAX)
			break;
		symbols[best].id = pairs[best].result;
		memmove(&symbols[best + 1], &symbols[best + 2], (n - best - 2) * sizeof *symbols);
		memmove(&pairs[best], &pairs[best + 1], (n - best - 2) * sizeof *pairs);
		n--;
		for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < n; i++) {
			const struct merge *m = find_merge(t, symbols[i].id, symbols[i + 1].id);
			pairs[i].rank = m ? m->rank : UINT32_MAX;
			pairs[i].result = m ? m->result : 0;
		}
	}
	return n;
}

static bool earlier(struct candidate a, struct candidate b)
{
	return a.rank != b.rank ? a.rank < b.rank : a.position < b.position;
}

struct heap { struct candidate *at; size_t count; };

static void heap_push(struct heap *h, struct candidate c)
{
	size_t i = h->count++;
	for (; i > 0 && earlier(c, h->at[(i - 1) / 2]); i = (i - 1) / 2)
		h->at[i] = h->at[(i - 1) / 2];
	h->at[i] = c;
}

static struct candidate heap_pop(struct heap *h)
{
	struct candidate top = h->at[0], c = h->at[--h->count];
	size_t i = 0;
	for (size_t k; (k = 2 * i + 1) < h->count; i = k) {
		if (k + 1 < h->count && earlier(h->at[k + 1], h->at[k]))
			k++;
		if (!earlier(h->at[k], c))
			break;
		h->at[i] = h->at[k];
	}
	h->at[i] = c;
	return top;
}

static void offer(const struct tokenizer *t, const struct symbol *symbols, int32_t position, struct heap *h)
{
	const struct merge *m = find_merge(t, symbols[position].id, symbols[symbols[position].next].id);
	if (m)
		heap_push(h, (struct candidate){m->rank, (uint32_t)position, m->result});
}

static size_t merge_long(const struct tokenizer *t, struct symbol *symbols, size_t n, struct bpe_scratch *s)
{
	// Each of at most n - 1 merges offers two pairs more.
	struct heap h = {grown(&s->heap, &s->heap_capacity, 3 * n, sizeof(struct candidate)), 0};
	for (size_t i = 0; i < n; i++) {
		symbols[i].previous = (int32_t)i - 1;
		symbols[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
	}
	for (size_t i = 0; i + 1 < n; i++)
		offer(t, symbols, (int32_t)i, &h);
	while (h.count) {
		struct candidate c = heap_pop(&h);
		struct symbol *left = &symbols[c.position];
		if (left->id == NO_TOKEN || left->next == -1)
			continue;
		struct symbol *right = &symbols[left->next];
		const struct merge *m = find_merge(t, left->id, right->id);
		if (!m || m->result != c.result)
			continue;
		left->id = c.result;
		left->next = right->next;
		right->id = NO_TOKEN;
		if (right->next != -1)
			symbols[right->next].previous = (int32_t)c.position;
		if (left->previous != -1)
			offer(t, symbols, left->previous, &h);
		if (left->next != -1)
			offer(t, symbols, (int32_t)c.position, &h);
	}
	size_t kept = 0;
	for (size_t i = 0; i < n; i++)
		if (symbols[i].id != NO_TOKEN)
			symbols[kept++].id = symbols[i].id;
	return kept;
}

void bpe_encode(const struct tokenizer *t, const uint8_t *piece, size_t len, struct bpe_scratch *s,
                struct token_list *out)
{
	uint32_t whole = tokenizer_find_bytes(t, piece, len);
	if (whole != NO_TOKEN) {
		if (t->ignore_merges || __atomic_load_n(&t->whole[whole], __ATOMIC_RELAXED) == 1) {
			token_list_push(out, whole);
			return;
		}
	}
	size_t n = first_symbols(t, piece, len, s);
	struct symbol *symbols = s->symbols;
	n = n <= SHORT_PIECE ? merge_short(t, symbols, n) : merge_long(t, symbols, n, s);
	if (whole != NO_TOKEN)
		__atomic_store_n(&t->whole[whole], n == 1 && symbols[0].id == whole ? 1 : 2, __ATOMIC_RELAXED);
	for (size_t i = 0; i < n; i++)
		token_list_push(out, symbols[i].id);
}

void bpe_scratch_free(struct bpe_scratch *s)
{
	free(s->symbols);
	free(s->heap);
	memset(s, 0, sizeof *s);
}
