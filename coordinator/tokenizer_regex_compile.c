// From the text of a pattern to its program, by recursive descent: each rule appends its part, and repetition moves or
// copies the part just written.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_regex_internal.h"
#include "coordinator/tokenizer_utf8.h"
#include "coordinator/unicode_table.h"

enum { MAX_CODE = 20000, MAX_DEPTH = 32, MAX_CLASSES = 4000 };

struct compiler {
	struct regex *re;
	uint32_t capacity, class_capacity;
	const uint8_t *p, *end, *start;
	bool fold;
	int depth, alternatives;
	struct error *error;
};

static enum status refuse(struct compiler *c, const char *what)
{
	return error_set(c->error, STATUS_REFUSED, "regular expression '%.*s': %s (at byte %zu)",
	                 (int)(c->end - c->start > 200 ? 200 : c->end - c->start), (const char *)c->start, what,
	                 (size_t)(c->p - c->start));
}

static enum status emit(struct compiler *c, struct regex_instruction in)
{
	struct regex *re = c->re;
	if (re->code_count >= MAX_CODE)
		return refuse(c, "is too large");
	if (re->code_count == c->capacity) {
		c->capacity = c->capacity ? 2 * c->capacity : 64;
		re->code = xrealloc(re->code, c->capacity * sizeof *re->code);
	}
	re->code[re->code_count++] = in;
	return STATUS_OK;
}

static enum status insert(struct compiler *c, uint32_t at, struct regex_instruction in)
{
	TRY(emit(c, in));
	memmove(c->re->code + at + 1, c->re->code + at, (c->re->code_count - 1 - at) * sizeof in);
	c->re->code[at] = in;
	return STATUS_OK;
}

static bool one_character(const struct regex_instruction *in)
{
	return in->op <= REGEX_ANY;
}

// --- classes ---------------------------------------------------------------------------------------------------------

struct set { // of one class while it is being read
	bool ascii[128];
	bool records[256];
	struct regex_range *ranges;
	uint32_t count, capacity;
};

static void set_range(struct set *s, uint32_t from, uint32_t to)
{
	for (uint32_t i = from; i <= to && i < 128; i++)
		s->ascii[i] = true;
	if (to < 128)
		return;
	if (s->count == s->capacity) {
		s->capacity = s->capacity ? 2 * s->capacity : 8;
		s->ranges = xrealloc(s->ranges, s->capacity * sizeof *s->ranges);
	}
	s->ranges[s->count++] = (struct regex_range){from < 128 ? 128 : from, to};
}

static bool record_has(const struct unicode_record *r, uint32_t categories, int script, int flag)
{
	return (categories >> r->category & 1) || (script && r->script == script) || (flag && (r->flags & flag));
}

static void set_property(struct set *s, uint32_t categories, int script, int flag, bool negated)
{
	for (int i = 0; i < 128; i++)
		if (record_has(&unicode_records[unicode_record_index((uint32_t)i)], categories, script, flag) != negated)
			s->ascii[i] = true;
	for (int i = 0; i < unicode_record_count; i++)
		if (record_has(&unicode_records[i], categories, script, flag) != negated)
			s->records[i] = true;
}

static enum status add_class(struct compiler *c, struct set *s, bool negated)
{
	struct regex *re = c->re;
	if (re->class_count >= MAX_CLASSES) {
		free(s->ranges);
		return refuse(c, "has too many classes");
	}
	if (re->class_count == c->class_capacity) {
		c->class_capacity = c->class_capacity ? 2 * c->class_capacity : 16;
		re->classes = xrealloc(re->classes, c->class_capacity * sizeof *re->classes);
	}
	struct regex_class k = {.ranges = s->ranges, .range_count = s->count, .negated = negated};
	for (int i = 0; i < 128; i++)
		if (s->ascii[i] != negated)
			k.ascii[i >> 6] |= 1ull << (i & 63);
	for (int i = 0; i < 256; i++)
		if (s->records[i])
			k.records[i >> 6] |= 1ull << (i & 63);
	re->classes[re->class_count] = k;
	return emit(c, (struct regex_instruction){.op = REGEX_CLASS, .value = re->class_count++});
}

#define BIT(x) (1u << UNICODE_##x)
#define LETTERS (BIT(LL) | BIT(LM) | BIT(LO) | BIT(LT) | BIT(LU))
#define MARKS (BIT(MC) | BIT(ME) | BIT(MN))
#define NUMBERS (BIT(ND) | BIT(NL) | BIT(NO))
#define PUNCTUATION (BIT(PC) | BIT(PD) | BIT(PE) | BIT(PF) | BIT(PI) | BIT(PO) | BIT(PS))
#define SYMBOLS (BIT(SC) | BIT(SK) | BIT(SM) | BIT(SO))
#define SEPARATORS (BIT(ZL) | BIT(ZP) | BIT(ZS))
#define OTHERS (BIT(CN) | BIT(CC) | BIT(CF) | BIT(CO) | BIT(CS))

static const struct { const char *name; uint32_t categories; int script; } properties[] = {
	{"L", LETTERS, 0}, {"M", MARKS, 0}, {"N", NUMBERS, 0}, {"P", PUNCTUATION, 0}, {"S", SYMBOLS, 0},
	{"Z", SEPARATORS, 0}, {"C", OTHERS, 0}, {"Cn", BIT(CN), 0}, {"Cc", BIT(CC), 0}, {"Cf", BIT(CF), 0},
	{"Co", BIT(CO), 0}, {"Cs", BIT(CS), 0}, {"Ll", BIT(LL), 0}, {"Lm", BIT(LM), 0}, {"Lo", BIT(LO), 0},
	{"Lt", BIT(LT), 0}, {"Lu", BIT(LU), 0}, {"Mc", BIT(MC), 0}, {"Me", BIT(ME), 0}, {"Mn", BIT(MN), 0},
	{"Nd", BIT(ND), 0}, {"Nl", BIT(NL), 0}, {"No", BIT(NO), 0}, {"Pc", BIT(PC), 0}, {"Pd", BIT(PD), 0},
	{"Pe", BIT(PE), 0}, {"Pf", BIT(PF), 0}, {"Pi", BIT(PI), 0}, {"Po", BIT(PO), 0}, {"Ps", BIT(PS), 0},
	{"Sc", BIT(SC), 0}, {"Sk", BIT(SK), 0}, {"Sm", BIT(SM), 0}, {"So", BIT(SO), 0}, {"Zl", BIT(ZL), 0},
	{"Zp", BIT(ZP), 0}, {"Zs", BIT(ZS), 0}, {"Letter", LETTERS, 0}, {"Han", 0, UNICODE_HAN},
	{"Hiragana", 0, UNICODE_HIRAGANA}, {"Katakana", 0, UNICODE_KATAKANA}, {"Hangul", 0, UNICODE_HANGUL},
	{"Latin", 0, UNICODE_LATIN}, {"Cyrillic", 0, UNICODE_CYRILLIC}, {"Greek", 0, UNICODE_GREEK},
	{"Arabic", 0, UNICODE_ARABIC}, {"Hebrew", 0, UNICODE_HEBREW}, {"Thai", 0, UNICODE_THAI},
	{"Devanagari", 0, UNICODE_DEVANAGARI},
};

// Behind \p or \P: {Name} or {^Name}.
static enum status read_property(struct compiler *c, struct set *s, bool negated)
{
	if (c->p == c->end || *c->p != '{')
		return refuse(c, "\\p without {");
	const uint8_t *name = c->p + 1, *close = memchr(name, '}', (size_t)(c->end - name));
	if (!close)
		return refuse(c, "\\p{ without }");
	if (name < close && *name == '^') {
		negated = !negated;
		name++;
	}
	for (size_t i = 0; i < sizeof properties / sizeof *properties; i++) {
		size_t n = strlen(properties[i].name);
		if (n == (size_t)(close - name) && !memcmp(properties[i].name, name, n)) {
			if (c->fold)
				return refuse(c, "a property under (?i) is not supported");
			c->p = close + 1;
			set_property(s, properties[i].categories, properties[i].script, 0, negated);
			return STATUS_OK;
		}
	}
	return refuse(c, "unknown property");
}

// --- characters and escapes ------------------------------------------------------------------------------------------

static bool read_hex(struct compiler *c, int max_digits, uint32_t *value)
{
	int n = 0;
	for (*value = 0; n < max_digits && c->p < c->end; n++, c->p++) {
		uint8_t x = *c->p;
		uint32_t d;
		if (x >= '0' && x <= '9')
			d = x - '0';
		else if ((x | 0x20) >= 'a' && (x | 0x20) <= 'f')
			d = (x | 0x20) - 'a' + 10u;
		else
			break;
		*value = *value << 4 | d;
	}
	return n > 0;
}

// Behind a backslash. *is_set: members were added to s; otherwise *cp is one character.
static enum status read_escape(struct compiler *c, bool in_class, struct set *s, bool *is_set, uint32_t *cp)
{
	*is_set = false;
	if (c->p == c->end)
		return refuse(c, "ends in a backslash");
	uint8_t e = *c->p;
	if (e >= 0x80 || !((e >= '0' && e <= '9') || ((e | 0x20) >= 'a' && (e | 0x20) <= 'z'))) {
		*cp = utf8_next(&c->p);
		return STATUS_OK;
	}
	c->p++;
	switch (e) {
	case 's': case 'S':
		*is_set = true;
		set_property(s, 0, 0, UNICODE_SPACE, e == 'S');
		return STATUS_OK;
	case 'w': case 'W':
		*is_set = true;
		set_property(s, 0, 0, in_class ? UNICODE_WORD_IN_CLASS : UNICODE_WORD, e == 'W');
		return STATUS_OK;
	case 'd': case 'D':
		*is_set = true;
		set_property(s, BIT(ND), 0, 0, e == 'D');
		return STATUS_OK;
	case 'p': case 'P':
		*is_set = true;
		return read_property(c, s, e == 'P');
	case 'n': *cp = '\n'; return STATUS_OK;
	case 'r': *cp = '\r'; return STATUS_OK;
	case 't': *cp = '\t'; return STATUS_OK;
	case 'f': *cp = '\f'; return STATUS_OK;
	case 'v': *cp = '\v'; return STATUS_OK;
	case 'a': *cp = '\a'; return STATUS_OK;
	case 'e': *cp = 27; return STATUS_OK;
	case 'u': {
		const uint8_t *from = c->p;
		if (!read_hex(c, 4, cp) || c->p - from != 4 || (*cp >= 0xD800 && *cp <= 0xDFFF))
			return refuse(c, "\\u without four digits of a character");
		return STATUS_OK;
	}
	case 'x':
		if (c->p < c->end && *c->p == '{') {
			c->p++;
			if (!read_hex(c, 6, cp) || c->p == c->end || *c->p != '}' || *cp > 0x10FFFF ||
			    (*cp >= 0xD800 && *cp <= 0xDFFF))
				return refuse(c, "\\x{ without a character and }");
			c->p++;
			return STATUS_OK;
		}
		if (!read_hex(c, 2, cp) || *cp >= 0x80)
			return refuse(c, "\\x without digits, or of a byte that is no character");
		return STATUS_OK;
	}
	c->p--;
	return refuse(c, "this escape is not supported");
}

// Behind [.
static enum status read_class(struct compiler *c)
{
	struct set s = {0};
	enum status status = STATUS_OK;
	bool negated = false, first = true;
	if (c->p < c->end && *c->p == '^') {
		negated = true;
		c->p++;
	}
	for (;; first = false) {
		uint32_t from = 0, to;
		bool is_set = false;
		if (c->p == c->end) {
			status = refuse(c, "[ without ]");
			break;
		}
		if (*c->p == ']') {
			if (first) {
				status = refuse(c, "an empty class is not supported");
				break;
			}
			c->p++;
			TRY_GOTO(add_class(c, &s, negated), out_added);
			return STATUS_OK;
		}
		if (*c->p == '[' || (*c->p == '&' && c->p + 1 < c->end && c->p[1] == '&')) {
			status = refuse(c, "a class within a class is not supported");
			break;
		}
		if (*c->p == '\\') {
			c->p++;
			TRY_GOTO(read_escape(c, true, &s, &is_set, &from), out);
			if (is_set)
				continue;
		} else {
			from = utf8_next(&c->p);
		}
		to = from;
		if (c->end - c->p >= 2 && c->p[0] == '-' && c->p[1] != ']') {
			c->p++;
			if (*c->p == '[') {
				status = refuse(c, "a class within a class is not supported");
				break;
			}
			if (*c->p == '\\') {
				c->p++;
				TRY_GOTO(read_escape(c, true, &s, &is_set, &to), out);
				if (is_set) {
					status = refuse(c, "a range that ends in a class");
					break;
				}
			} else {
				to = utf8_next(&c->p);
			}
			if (to < from) {
				status = refuse(c, "a range that runs backwards");
				break;
			}
		}
		set_range(&s, from, to);
		if (!c->fold)
			continue;
		if (to >= 0x80) {
			status = refuse(c, "a class beyond ASCII under (?i) is not supported");
			break;
		}
		for (uint32_t i = from; i <= to; i++) {
			uint32_t small = i | 0x20;
			if (small < 'a' || small > 'z')
				continue;
			set_range(&s, small, small);
			set_range(&s, small & ~0x20u, small & ~0x20u);
			if (small == 's')
				set_range(&s, 0x17F, 0x17F);
			if (small == 'k')
				set_range(&s, 0x212A, 0x212A);
		}
	}
out:
	free(s.ranges);
out_added:
	return status;
}

static enum status literal(struct compiler *c, uint32_t cp)
{
	if (!c->fold)
		return emit(c, (struct regex_instruction){.op = REGEX_CHAR, .value = cp});
	if (cp >= 0x80)
		return refuse(c, "a character beyond ASCII under (?i) is not supported");
	if ((cp | 0x20) < 'a' || (cp | 0x20) > 'z')
		return emit(c, (struct regex_instruction){.op = REGEX_CHAR, .value = cp});
	const struct regex_instruction *last = c->re->code_count ? &c->re->code[c->re->code_count - 1] : NULL;
	if (last && last->op == REGEX_FOLD) { // pairs that one character folds to, such as sharp s
		static const char pairs[][3] = {"ss", "st", "ff", "fi", "fl"};
		for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
			if (last->value == (uint32_t)pairs[i][0] && (cp | 0x20) == (uint32_t)pairs[i][1])
				return refuse(c, "this pair of letters under (?i) is not supported");
	}
	return emit(c, (struct regex_instruction){.op = REGEX_FOLD, .value = cp | 0x20});
}

// --- structure -------------------------------------------------------------------------------------------------------

static enum status read_alternatives(struct compiler *c, bool *nullable);

// Behind (. *nullable: the group can match nothing.
static enum status read_group(struct compiler *c, bool *nullable)
{
	static const struct { const char *text; int kind; } kinds[] = {
		{"?:", 0}, {"?i:", 1}, {"?-i:", 2}, {"?=", 3}, {"?!", 4}, {"?<=", 5}, {"?<!", 6}, {"?>", 7}, {"?i)", 8},
	};
	int kind = -1;
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		size_t n = strlen(kinds[i].text);
		if ((size_t)(c->end - c->p) >= n && !memcmp(c->p, kinds[i].text, n)) {
			kind = kinds[i].kind;
			c->p += n;
			break;
		}
	}
	if (kind == -1 && c->p < c->end && (*c->p == '?' || *c->p == '*'))
		return refuse(c, "this kind of group is not supported");
	if (kind == 8) { // (?i) holds to the end of the enclosing group
		c->fold = true;
		*nullable = true;
		return STATUS_OK;
	}
	if (c->depth >= MAX_DEPTH)
		return refuse(c, "is nested too deeply");
	bool fold = c->fold;
	if (kind == 1 || kind == 2)
		c->fold = kind == 1;
	uint32_t at = c->re->code_count;
	bool look_ahead = kind == 3 || kind == 4, look_behind = kind == 5 || kind == 6;
	if (look_ahead)
		TRY(emit(c, (struct regex_instruction){.op = REGEX_AHEAD, .negated = kind == 4}));
	if (look_behind)
		TRY(emit(c, (struct regex_instruction){.op = REGEX_BEHIND, .negated = kind == 6}));
	if (kind == 7)
		TRY(emit(c, (struct regex_instruction){.op = REGEX_ATOMIC}));
	c->depth++;
	TRY(read_alternatives(c, nullable));
	c->depth--;
	c->fold = fold;
	if (c->p == c->end || *c->p != ')')
		return refuse(c, "( without )");
	c->p++;
	if (look_ahead || kind == 7) {
		c->re->code[at].x = (int32_t)(c->re->code_count - at);
		TRY(emit(c, (struct regex_instruction){.op = REGEX_DONE}));
	}
	if (look_behind && (c->re->code_count != at + 2 || !one_character(&c->re->code[at + 1])))
		return refuse(c, "a look-behind of more than one character is not supported");
	if (look_ahead || look_behind)
		*nullable = true;
	return STATUS_OK;
}


// Repeats the part written from `at` on.
static enum status repeat(struct compiler *c, uint32_t at, uint32_t min, uint32_t max, enum regex_greed greed,
                          bool nullable)
{
	uint32_t n = c->re->code_count - at;
	if (n == 1 && one_character(&c->re->code[at]))
		return insert(c, at, (struct regex_instruction){.op = REGEX_RUN, .greed = (uint8_t)greed, .min = min,
		                                                .max = max});
	if (nullable || n == 0)
		return refuse(c, "repeating what can match nothing is not supported");
	if (greed == REGEX_POSSESSIVE) {
		TRY(insert(c, at, (struct regex_instruction){.op = REGEX_ATOMIC}));
		at++;
	}
	// body min times, then (max - min) optional ones or a loop; the first body is in place
	struct regex_instruction *body = xmalloc(n * sizeof *body);
	memcpy(body, c->re->code + at, n * sizeof *body);
	c->re->code_count = at;
	enum status status = STATUS_OK;
	for (uint32_t i = 0; i < min; i++)
		for (uint32_t k = 0; k < n; k++)
			TRY_GOTO(emit(c, body[k]), out);
	bool lazy = greed == REGEX_LAZY;
	if (max == UINT32_MAX) {
		int32_t in = 1, over = (int32_t)n + 2;
		TRY_GOTO(emit(c, (struct regex_instruction){.op = REGEX_SPLIT, .x = lazy ? over : in, .y = lazy ? in : over}),
		         out);
		for (uint32_t k = 0; k < n; k++)
			TRY_GOTO(emit(c, body[k]), out);
		TRY_GOTO(emit(c, (struct regex_instruction){.op = REGEX_JUMP, .x = -(int32_t)n - 1}), out);
	} else {
		if (max - min > MAX_CODE)
			TRY_GOTO(refuse(c, "is too large"), out);
		for (uint32_t i = min; i < max; i++) {
			int32_t in = 1, over = (int32_t)((max - i) * (n + 1));
			TRY_GOTO(emit(c, (struct regex_instruction){.op = REGEX_SPLIT, .x = lazy ? over : in,
			                                            .y = lazy ? in : over}), out);
			for (uint32_t k = 0; k < n; k++)
				TRY_GOTO(emit(c, body[k]), out);
		}
	}
	if (greed == REGEX_POSSESSIVE) {
		c->re->code[at - 1].x = (int32_t)(c->re->code_count - (at - 1));
		TRY_GOTO(emit(c, (struct regex_instruction){.op = REGEX_DONE}), out);
	}
out:
	free(body);
	return status;
}

static bool read_number(struct compiler *c, uint32_t *value)
{
	const uint8_t *from = c->p;
	for (*value = 0; c->p < c->end && *c->p >= '0' && *c->p <= '9' && *value <= MAX_CODE; c->p++)
		*value = *value * 10 + (*c->p - '0');
	return c->p > from;
}

// ? * + {n,m} behind the part written from `at` on.
static enum status read_repeats(struct compiler *c, uint32_t at, bool *nullable)
{
	while (c->p < c->end) {
		uint32_t min = 0, max = UINT32_MAX;
		bool interval = false, exact = false;
		if (*c->p == '?') {
			max = 1;
		} else if (*c->p == '+') {
			min = 1;
		} else if (*c->p == '{') {
			interval = true;
			c->p++;
			bool low = read_number(c, &min), high = false;
			exact = c->p < c->end && *c->p == '}';
			if (!exact && c->p < c->end && *c->p == ',') {
				c->p++;
				high = read_number(c, &max);
			}
			if (c->p == c->end || *c->p != '}' || (!low && !high) || (exact && !low))
				return refuse(c, "{ that is no interval is not supported");
			if (exact)
				max = min;
			else if (!high)
				max = UINT32_MAX;
			if (max < min || min > MAX_CODE || max == 0)
				return refuse(c, "this interval is not supported");
		} else if (*c->p != '*') {
			break;
		}
		c->p++;
		enum regex_greed greed = REGEX_GREEDY;
		if (c->p < c->end && *c->p == '?') {
			if (exact)
				return refuse(c, "{n}? is not supported");
			greed = REGEX_LAZY;
			c->p++;
		} else if (c->p < c->end && *c->p == '+' && !interval) { // behind an interval, + repeats the interval
			greed = REGEX_POSSESSIVE;
			c->p++;
		}
		TRY(repeat(c, at, min, max, greed, *nullable));
		if (min == 0)
			*nullable = true;
	}
	return STATUS_OK;
}

static enum status read_sequence(struct compiler *c, bool *nullable)
{
	*nullable = true;
	while (c->p < c->end && *c->p != '|' && *c->p != ')') {
		uint32_t at = c->re->code_count;
		uint8_t x = *c->p;
		bool empty = false;
		if (x == '(') {
			c->p++;
			TRY(read_group(c, &empty));
			if (c->re->code_count == at)
				continue; // (?i), or a group of nothing
		} else if (x == '[') {
			c->p++;
			TRY(read_class(c));
		} else if (x == '\\') {
			struct set s = {0};
			bool is_set;
			uint32_t cp = 0;
			c->p++;
			enum status status = read_escape(c, false, &s, &is_set, &cp);
			if (status == STATUS_OK)
				status = is_set ? add_class(c, &s, false) : literal(c, cp);
			TRY(status);
		} else if (x == '.') {
			c->p++;
			TRY(emit(c, (struct regex_instruction){.op = REGEX_ANY}));
		} else if (x == '$') {
			c->p++;
			TRY(emit(c, (struct regex_instruction){.op = REGEX_LINE_END}));
			empty = true;
		} else if (x == '^' || x == '*' || x == '+' || x == '?' || x == '{' || x == ']' || x == '}') {
			return refuse(c, "this character is not supported here");
		} else {
			TRY(literal(c, utf8_next(&c->p)));
		}
		TRY(read_repeats(c, at, &empty));
		*nullable &= empty;
	}
	return STATUS_OK;
}

static enum status read_alternatives(struct compiler *c, bool *nullable)
{
	uint32_t at = c->re->code_count;
	bool fold = c->fold;
	TRY(read_sequence(c, nullable));
	if (c->p == c->end || *c->p != '|')
		return STATUS_OK;
	// SPLIT here, rest; here; JUMP behind rest; rest
	if (++c->alternatives > 400)
		return refuse(c, "has too many alternatives");
	c->p++;
	uint32_t n = c->re->code_count - at;
	TRY(insert(c, at, (struct regex_instruction){.op = REGEX_SPLIT, .x = 1, .y = (int32_t)n + 2}));
	TRY(emit(c, (struct regex_instruction){.op = REGEX_JUMP}));
	uint32_t jump = c->re->code_count - 1;
	if (c->fold != fold)
		return refuse(c, "(?i) before | is not supported");
	bool rest;
	TRY(read_alternatives(c, &rest));
	c->re->code[jump].x = (int32_t)(c->re->code_count - jump);
	*nullable |= rest;
	return STATUS_OK;
}

// Marks the bytes with which a match from pc on can begin; true if it can be empty (or that is not known).
static bool first_bytes(struct regex *re, uint32_t pc, bool *seen)
{
	while (!seen[pc]) {
		seen[pc] = true;
		const struct regex_instruction *in = &re->code[pc], *ch = in->op == REGEX_RUN ? in + 1 : in;
		switch ((enum regex_op)in->op) {
		case REGEX_CHAR:
		case REGEX_FOLD:
		case REGEX_CLASS:
		case REGEX_ANY:
		case REGEX_RUN:
			if (ch->op == REGEX_CHAR) {
				uint8_t bytes[4];
				utf8_put(bytes, ch->value);
				re->first_bytes[bytes[0]] = true;
			} else {
				for (uint32_t i = 0; i < 256; i++)
					re->first_bytes[i] |= i >= 0x80 || ch->op == REGEX_ANY ||
					                      (ch->op == REGEX_FOLD && (i | 0x20) == ch->value) ||
					                      (ch->op == REGEX_CLASS && regex_class_has(&re->classes[ch->value], i));
			}
			if (in->op != REGEX_RUN || in->min > 0)
				return false;
			pc += 2;
			break;
		case REGEX_SPLIT: {
			bool a = first_bytes(re, (uint32_t)((int32_t)pc + in->x), seen);
			bool b = first_bytes(re, (uint32_t)((int32_t)pc + in->y), seen);
			return a || b;
		}
		case REGEX_JUMP:
			pc = (uint32_t)((int32_t)pc + in->x);
			break;
		case REGEX_AHEAD:
			pc += (uint32_t)in->x + 1;
			break;
		case REGEX_BEHIND:
			pc += 2;
			break;
		case REGEX_ATOMIC:
		case REGEX_LINE_END:
			pc++;
			break;
		case REGEX_DONE:
			return true;
		}
	}
	return false;
}

enum status regex_create(struct regex **out, const char *pattern, size_t len, struct error *e)
{
	const uint8_t *p = (const uint8_t *)pattern;
	*out = NULL;
	if (utf8_valid_prefix(p, len) != len)
		return error_set(e, STATUS_REFUSED, "regular expression that is not UTF-8");
	struct compiler c = {.re = xcalloc(1, sizeof *c.re), .p = p, .start = p, .end = p + len, .error = e};
	bool nullable = false;
	enum status status;
	TRY_GOTO(read_alternatives(&c, &nullable), out);
	if (c.p < c.end)
		TRY_GOTO(refuse(&c, ") without ("), out);
	TRY_GOTO(emit(&c, (struct regex_instruction){.op = REGEX_DONE}), out);
	bool *seen = xcalloc(c.re->code_count, sizeof *seen);
	if (first_bytes(c.re, 0, seen))
		memset(c.re->first_bytes, true, sizeof c.re->first_bytes);
	free(seen);
	*out = c.re;
	return STATUS_OK;
out:
	regex_destroy(&c.re);
	return status;
}
