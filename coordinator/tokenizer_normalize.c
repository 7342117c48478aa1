// Decompose, sort marks, compose: the algorithm of the Unicode Standard, section 3.11 and annex 15, over code points.
#include "coordinator/tokenizer_normalize.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"
#include "coordinator/tokenizer_utf8.h"
#include "coordinator/unicode_table.h"

enum {
	HANGUL_S = 0xAC00, HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11A7,
	HANGUL_LS = 19, HANGUL_VS = 21, HANGUL_TS = 28, HANGUL_SS = HANGUL_LS * HANGUL_VS * HANGUL_TS,
};

static int combining_class(uint32_t cp)
{
	if (cp < 0x300)
		return 0;
	int lo = 0, hi = unicode_combining_count - 1;
	while (lo <= hi) {
		int mid = (lo + hi) / 2;
		const struct unicode_combining *r = &unicode_combinings[mid];
		if (cp < r->from)
			hi = mid - 1;
		else if (cp > r->to)
			lo = mid + 1;
		else
			return r->class;
	}
	return 0;
}

static const struct unicode_decomposition *decomposition(uint32_t cp)
{
	int lo = 0, hi = unicode_decomposition_count - 1;
	while (lo <= hi) {
		int mid = (lo + hi) / 2;
		const struct unicode_decomposition *d = &unicode_decompositions[mid];
		if (cp < d->cp)
			hi = mid - 1;
		else if (cp > d->cp)
			lo = mid + 1;
		else
			return d;
	}
	return NULL;
}

static uint32_t composition(uint32_t a, uint32_t b)
{
	if (a - HANGUL_L < HANGUL_LS && b - HANGUL_V < HANGUL_VS)
		return HANGUL_S + ((a - HANGUL_L) * HANGUL_VS + (b - HANGUL_V)) * HANGUL_TS;
	if (a - HANGUL_S < HANGUL_SS && (a - HANGUL_S) % HANGUL_TS == 0 && b - HANGUL_T - 1 < HANGUL_TS - 1)
		return a + (b - HANGUL_T);
	int lo = 0, hi = unicode_composition_count - 1;
	while (lo <= hi) {
		int mid = (lo + hi) / 2;
		const struct unicode_composition *c = &unicode_compositions[mid];
		if (a < c->first || (a == c->first && b < c->second))
			hi = mid - 1;
		else if (a > c->first || b > c->second)
			lo = mid + 1;
		else
			return c->composed;
	}
	return 0;
}

struct point { uint32_t cp; uint32_t class; };
struct points { struct point *at; size_t count, capacity; };

static void put(struct points *p, uint32_t cp)
{
	if (p->count == p->capacity) {
		p->capacity *= 2;
		p->at = xrealloc(p->at, p->capacity * sizeof *p->at);
	}
	p->at[p->count++] = (struct point){cp, (uint32_t)combining_class(cp)};
}

static void decompose(struct points *p, uint32_t cp)
{
	if (cp - HANGUL_S < HANGUL_SS) {
		uint32_t s = cp - HANGUL_S;
		put(p, HANGUL_L + s / (HANGUL_VS * HANGUL_TS));
		put(p, HANGUL_V + s % (HANGUL_VS * HANGUL_TS) / HANGUL_TS);
		if (s % HANGUL_TS)
			put(p, HANGUL_T + s % HANGUL_TS);
		return;
	}
	const struct unicode_decomposition *d = cp < 0xC0 ? NULL : decomposition(cp);
	if (!d) {
		put(p, cp);
		return;
	}
	for (int i = 0; i < d->len; i++)
		put(p, unicode_decomposition_pool[d->offset + i]);
}

// Stable merge sort of one run of marks by class: a run may be as long as the text.
static void sort_marks(struct point *a, struct point *scratch, size_t n)
{
	if (n <= 16) {
		for (size_t i = 1; i < n; i++) {
			struct point x = a[i];
			size_t j = i;
			for (; j > 0 && a[j - 1].class > x.class; j--)
				a[j] = a[j - 1];
			a[j] = x;
		}
		return;
	}
	size_t half = n / 2, i = 0, j = half, k = 0;
	sort_marks(a, scratch, half);
	sort_marks(a + half, scratch, n - half);
	while (i < half && j < n)
		scratch[k++] = a[j].class < a[i].class ? a[j++] : a[i++];
	while (i < half)
		scratch[k++] = a[i++];
	memcpy(a, scratch, k * sizeof *a); // what is left of the second half is in place
}

static void order_marks(struct points *p)
{
	struct point *scratch = NULL;
	for (size_t i = 0; i < p->count; i++) {
		size_t start = i;
		bool sorted = true;
		for (; i < p->count && p->at[i].class; i++)
			sorted &= i == start || p->at[i - 1].class <= p->at[i].class;
		if (sorted)
			continue;
		if (!scratch)
			scratch = xmalloc(p->count * sizeof *scratch);
		sort_marks(p->at + start, scratch, i - start);
	}
	free(scratch);
}

static void compose(struct points *p)
{
	size_t n = 0, starter = SIZE_MAX;
	uint32_t last_class = 0; // of what stands between the starter and here
	for (size_t i = 0; i < p->count; i++) {
		struct point x = p->at[i];
		bool adjacent = starter != SIZE_MAX && n == starter + 1;
		if (starter != SIZE_MAX && (adjacent || last_class < x.class)) {
			uint32_t c = composition(p->at[starter].cp, x.cp);
			if (c) {
				p->at[starter].cp = c;
				continue;
			}
		}
		if (!x.class)
			starter = n;
		last_class = x.class;
		p->at[n++] = x;
	}
	p->count = n;
}

uint8_t *unicode_normalize(const uint8_t *text, size_t len, enum normal_form form, size_t *out_len)
{
	// Nothing below U+00C0 decomposes and nothing below U+0300 takes part in composition as a second character.
	uint8_t limit = form == NORMAL_FORM_C ? 0xCC : 0xC3;
	size_t i = 0;
	while (i < len && text[i] < limit)
		i++;
	if (i == len)
		return NULL;
	struct points p = {.capacity = len + 16};
	p.at = xmalloc(p.capacity * sizeof *p.at);
	for (const uint8_t *s = text, *end = text + len; s < end;)
		decompose(&p, utf8_next(&s));
	order_marks(&p);
	if (form == NORMAL_FORM_C)
		compose(&p);
	uint8_t *out = xmalloc(p.count * 4);
	size_t n = 0;
	for (size_t k = 0; k < p.count; k++)
		n += utf8_put(out + n, p.at[k].cp);
	free(p.at);
	*out_len = n;
	return out;
}
