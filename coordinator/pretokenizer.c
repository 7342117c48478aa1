// The steps and how they cut. See pretokenizer.h.
#include "coordinator/pretokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_utf8.h"
#include "coordinator/unicode_table.h"

enum step_kind { STEP_SPLIT, STEP_DIGITS, STEP_LEADING_SPACE };

struct step {
	enum step_kind kind;
	struct regex *regex;
	enum split_behavior behavior;
	bool invert;
};

struct pretokenizer {
	struct step *steps;
	size_t count;
};

struct pretokenizer *pretokenizer_create(void)
{
	return xcalloc(1, sizeof(struct pretokenizer));
}

void pretokenizer_destroy(struct pretokenizer **p)
{
	if (!*p)
		return;
	for (size_t i = 0; i < (*p)->count; i++)
		regex_destroy(&(*p)->steps[i].regex);
	free((*p)->steps);
	free(*p);
	*p = NULL;
}

static void add(struct pretokenizer *p, struct step s)
{
	p->steps = xrealloc(p->steps, (p->count + 1) * sizeof *p->steps);
	p->steps[p->count++] = s;
}

enum status pretokenizer_add_split(struct pretokenizer *p, const char *pattern, size_t len, bool literal,
                                   enum split_behavior behavior, bool invert, struct error *e)
{
	struct step s = {.kind = STEP_SPLIT, .behavior = behavior, .invert = invert};
	char *escaped = NULL;
	if (literal) {
		if (len == 0)
			return error_set(e, STATUS_REFUSED, "a Split at an empty string is not supported");
		escaped = xmalloc(2 * len);
		size_t n = 0;
		for (size_t i = 0; i < len; i++) {
			uint8_t c = (uint8_t)pattern[i], letter = c | 0x20;
			if (c > 0x20 && c < 0x7F && !(c >= '0' && c <= '9') && !(letter >= 'a' && letter <= 'z'))
				escaped[n++] = '\\';
			escaped[n++] = pattern[i];
		}
		pattern = escaped;
		len = n;
	}
	enum status status = regex_create(&s.regex, pattern, len, e);
	free(escaped);
	if (status == STATUS_OK)
		add(p, s);
	return status;
}

void pretokenizer_add_digits(struct pretokenizer *p, bool individual)
{
	add(p, (struct step){.kind = STEP_DIGITS, .behavior = individual ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS});
}

void pretokenizer_add_leading_space(struct pretokenizer *p)
{
	add(p, (struct step){.kind = STEP_LEADING_SPACE});
}

static void push(struct pieces *p, size_t start, size_t end)
{
	if (p->count == p->capacity) {
		p->capacity = p->capacity ? 2 * p->capacity : 64;
		p->at = xrealloc(p->at, p->capacity * sizeof *p->at);
	}
	p->at[p->count++] = (struct piece){start, end - start};
}

// Gathers what a step finds in one piece, in order, and joins or drops it as the behavior says. MERGED_WITH_NEXT is the
// mirror of MERGED_WITH_PREVIOUS, told from the front: of a row of matches only the last joins what follows it.
struct cutter {
	struct pieces *out;
	enum split_behavior behavior;
	size_t floor;       // out->count when the piece began
	bool last_match;
};

static void cut(struct cutter *c, size_t start, size_t end, bool is_match)
{
	struct pieces *out = c->out;
	struct piece *last = out->count > c->floor ? &out->at[out->count - 1] : NULL;
	switch (c->behavior) {
	case SPLIT_REMOVED:
		if (!is_match)
			push(out, start, end);
		break;
	case SPLIT_ISOLATED:
		push(out, start, end);
		break;
	case SPLIT_MERGED_WITH_PREVIOUS:
		if (is_match && !c->last_match && last)
			last->len = end - last->start;
		else
			push(out, start, end);
		break;
	case SPLIT_MERGED_WITH_NEXT:
		if (!is_match && c->last_match && last)
			last->len = end - last->start;
		else
			push(out, start, end);
		break;
	case SPLIT_CONTIGUOUS:
		if (is_match == c->last_match && last)
			last->len = end - last->start;
		else
			push(out, start, end);
		break;
	}
	c->last_match = is_match;
}

static void split(const struct step *s, const uint8_t *base, struct piece piece, struct regex_walk *walk,
                  struct pieces *out)
{
	struct cutter c = {.out = out, .behavior = s->behavior, .floor = out->count};
	size_t from = 0, start, end;
	regex_walk_begin(walk, s->regex, base + piece.start, piece.len);
	while (regex_walk_next(walk, &start, &end)) {
		if (start > from)
			cut(&c, piece.start + from, piece.start + start, s->invert);
		cut(&c, piece.start + start, piece.start + end, !s->invert);
		from = end;
	}
	if (from < piece.len)
		cut(&c, piece.start + from, piece.start + piece.len, s->invert);
}

static void split_digits(const struct step *s, const uint8_t *base, struct piece piece, struct pieces *out)
{
	struct cutter c = {.out = out, .behavior = s->behavior, .floor = out->count};
	const uint8_t *p = base + piece.start, *end = p + piece.len, *from = p;
	while (p < end) {
		const uint8_t *at = p;
		if (!unicode_has(utf8_next(&p), UNICODE_NUMERIC))
			continue;
		if (at > from)
			cut(&c, (size_t)(from - base), (size_t)(at - base), false);
		cut(&c, (size_t)(at - base), (size_t)(p - base), true);
		from = p;
	}
	if (from < end)
		cut(&c, (size_t)(from - base), (size_t)(end - base), false);
}

static const uint8_t *put_leading_spaces(const uint8_t *base, const struct pieces *in, struct pieces *out,
                                         uint8_t **owned)
{
	size_t bytes = 1, n = 0;
	for (size_t i = 0; i < in->count; i++)
		bytes += in->at[i].len + 1;
	uint8_t *text = xmalloc(bytes);
	for (size_t i = 0; i < in->count; i++) {
		size_t start = n;
		if (base[in->at[i].start] != ' ')
			text[n++] = ' ';
		memcpy(text + n, base + in->at[i].start, in->at[i].len);
		n += in->at[i].len;
		push(out, start, n);
	}
	free(*owned);
	*owned = text;
	return text;
}

// A pattern that a model brings may take exponential time; the known ones take a few steps a byte.
static const uint64_t steps_per_byte = 2000, steps_at_least = 20000000;

enum status pretokenizer_run(const struct pretokenizer *p, const uint8_t *text, size_t len,
                             struct pretokenizer_scratch *s, const uint8_t **base, const struct pieces **pieces,
                             struct error *e)
{
	struct pieces *in = &s->pieces[0], *out = &s->pieces[1];
	*base = text;
	in->count = 0;
	if (len > 0)
		push(in, 0, len);
	for (size_t i = 0; i < p->count; i++) {
		const struct step *step = &p->steps[i];
		out->count = 0;
		s->walk.steps = 0;
		s->walk.step_limit = steps_at_least + steps_per_byte * len;
		if (step->kind == STEP_LEADING_SPACE)
			*base = put_leading_spaces(*base, in, out, &s->text);
		for (size_t k = 0; k < in->count; k++) {
			if (step->kind == STEP_SPLIT)
				split(step, *base, in->at[k], &s->walk, out);
			else if (step->kind == STEP_DIGITS)
				split_digits(step, *base, in->at[k], out);
		}
		if (s->walk.gave_up)
			return error_set(e, STATUS_INVALID, "a pattern of the model's pre-tokenizer takes too long on this text");
		size_t kept = 0; // an empty match cuts, but is no piece
		for (size_t k = 0; k < out->count; k++)
			if (out->at[k].len > 0)
				out->at[kept++] = out->at[k];
		out->count = kept;
		struct pieces *t = in;
		in = out;
		out = t;
	}
	*pieces = in;
	return STATUS_OK;
}

void pretokenizer_scratch_free(struct pretokenizer_scratch *s)
{
	free(s->pieces[0].at);
	free(s->pieces[1].at);
	free(s->text);
	regex_walk_end(&s->walk);
	memset(s, 0, sizeof *s);
}
