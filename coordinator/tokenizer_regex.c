// The matcher: depth first over the program with an explicit stack, so that no text can exhaust the C stack; only
// look-arounds and atomic groups call it again, as deep as the pattern nests them.
#include "coordinator/tokenizer_regex.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_regex_internal.h"
#include "coordinator/tokenizer_utf8.h"
#include "coordinator/unicode_table.h"

#define NO_MATCH SIZE_MAX

bool regex_class_has(const struct regex_class *c, uint32_t cp)
{
	if (cp < 0x80)
		return c->ascii[cp >> 6] >> (cp & 63) & 1;
	uint8_t r = unicode_record_index(cp);
	bool in = c->records[r >> 6] >> (r & 63) & 1;
	for (uint32_t i = 0; !in && i < c->range_count; i++)
		in = cp >= c->ranges[i].from && cp <= c->ranges[i].to;
	return in != c->negated;
}

// Length of the character at `pos` if the instruction matches it, else 0.
static inline unsigned one(const struct regex_walk *w, const struct regex_instruction *in, size_t pos)
{
	if (pos >= w->len)
		return 0;
	const uint8_t *s = w->text + pos;
	uint32_t cp = utf8_next(&s);
	bool ok = false;
	switch (in->op) {
	case REGEX_CHAR:
		ok = cp == in->value;
		break;
	case REGEX_FOLD:
		ok = (cp < 0x80 && (cp | 0x20) == in->value) || (cp == 0x17F && in->value == 's') ||
		     (cp == 0x212A && in->value == 'k');
		break;
	case REGEX_CLASS:
		ok = regex_class_has(&w->regex->classes[in->value], cp);
		break;
	case REGEX_ANY:
		ok = cp != '\n';
		break;
	}
	return ok ? (unsigned)(s - (w->text + pos)) : 0;
}

static size_t before(const struct regex_walk *w, size_t pos)
{
	do
		pos--;
	while ((w->text[pos] & 0xC0) == 0x80);
	return pos;
}

static void push(struct regex_walk *w, struct regex_frame f)
{
	if (w->stack_count == w->stack_capacity) {
		w->stack_capacity = w->stack_capacity ? 2 * w->stack_capacity : 64;
		w->stack = xrealloc(w->stack, w->stack_capacity * sizeof *w->stack);
	}
	w->stack[w->stack_count++] = f;
}

// Where the match of the program from pc at pos ends, or NO_MATCH.
static size_t match(struct regex_walk *w, uint32_t pc, size_t pos)
{
	const struct regex_instruction *code = w->regex->code;
	size_t base = w->stack_count;
	for (;;) {
		const struct regex_instruction *in = &code[pc];
		bool ok = true;
		w->steps++;
		switch ((enum regex_op)in->op) {
		case REGEX_CHAR:
		case REGEX_FOLD:
		case REGEX_CLASS:
		case REGEX_ANY: {
			unsigned n = one(w, in, pos);
			ok = n > 0;
			pos += n;
			pc++;
			break;
		}
		case REGEX_RUN: {
			uint32_t count = 0;
			size_t least = pos; // end of the first `min` characters
			uint32_t want = in->greed == REGEX_LAZY ? in->min : in->max;
			for (unsigned n; count < want && (n = one(w, in + 1, pos)); pos += n) {
				if (++count <= in->min)
					least = pos + n;
			}
			w->steps += count / 8;
			ok = count >= in->min;
			pc += 2;
			if (ok && in->greed == REGEX_GREEDY && pos > least)
				push(w, (struct regex_frame){.pc = pc, .run = true, .from = least, .pos = pos});
			break;
		}
		case REGEX_SPLIT:
			push(w, (struct regex_frame){.pc = (uint32_t)((int32_t)pc + in->y), .pos = pos});
			pc = (uint32_t)((int32_t)pc + in->x);
			break;
		case REGEX_JUMP:
			pc = (uint32_t)((int32_t)pc + in->x);
			break;
		case REGEX_AHEAD:
			ok = (match(w, pc + 1, pos) != NO_MATCH) != in->negated;
			pc += (uint32_t)in->x + 1;
			break;
		case REGEX_BEHIND:
			ok = (pos > 0 && one(w, in + 1, before(w, pos)) > 0) != in->negated;
			pc += 2;
			break;
		case REGEX_ATOMIC: {
			size_t end = match(w, pc + 1, pos);
			ok = end != NO_MATCH;
			pos = end;
			pc += (uint32_t)in->x + 1;
			break;
		}
		case REGEX_LINE_END:
			ok = pos == w->len || w->text[pos] == '\n';
			pc++;
			break;
		case REGEX_DONE:
			w->stack_count = base;
			return pos;
		}
		if (w->step_limit && w->steps > w->step_limit) {
			w->gave_up = true;
			w->stack_count = base;
			return NO_MATCH;
		}
		if (ok)
			continue;
		if (w->stack_count == base)
			return NO_MATCH;
		struct regex_frame *f = &w->stack[w->stack_count - 1];
		pc = f->pc;
		if (f->run) {
			f->pos = pos = before(w, f->pos);
			if (f->pos > f->from)
				continue;
		} else {
			pos = f->pos;
		}
		w->stack_count--;
	}
}

void regex_walk_begin(struct regex_walk *w, const struct regex *re, const uint8_t *text, size_t len)
{
	w->regex = re;
	w->text = text;
	w->len = len;
	w->next = 0;
	w->last_end = SIZE_MAX;
	w->stack_count = 0;
}

// A pattern that begins with an unlimited run and fails behind it fails likewise from every later start in that run:
// what could follow has been tried at each place. Without this, \s+$ would be quadratic over long white space.
static size_t skip_failed_run(const struct regex_walk *w, size_t start)
{
	const struct regex_instruction *in = w->regex->code;
	if (in->op != REGEX_RUN || in->max != UINT32_MAX || in->min > 1 || in->greed == REGEX_LAZY)
		return start;
	for (unsigned n; (n = one(w, in + 1, start)); start += n)
		;
	return start;
}

bool regex_walk_next(struct regex_walk *w, size_t *start, size_t *end)
{
	size_t pos = w->next;
	while (pos <= w->len && !w->gave_up) {
		if (pos < w->len && !w->regex->first_bytes[w->text[pos]]) {
			pos += utf8_width(w->text[pos]);
			continue;
		}
		size_t e = match(w, 0, pos);
		if (e == NO_MATCH) {
			if (pos == w->len)
				break;
			size_t skipped = skip_failed_run(w, pos);
			pos = skipped > pos ? skipped : pos + utf8_width(w->text[pos]);
			continue;
		}
		if (e == pos && pos == w->last_end) {
			if (pos == w->len)
				break;
			pos += utf8_width(w->text[pos]);
			continue;
		}
		*start = pos;
		*end = e;
		w->next = w->last_end = e;
		return true;
	}
	w->next = w->len + 1;
	return false;
}

void regex_walk_end(struct regex_walk *w)
{
	free(w->stack);
	w->stack = NULL;
	w->stack_capacity = w->stack_count = 0;
}

void regex_destroy(struct regex **re)
{
	if (!*re)
		return;
	for (uint32_t i = 0; i < (*re)->class_count; i++)
		free((*re)->classes[i].ranges);
	free((*re)->classes);
	free((*re)->code);
	free(*re);
	*re = NULL;
}
