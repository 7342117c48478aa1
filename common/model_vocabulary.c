// See model_vocabulary.h. The surprising decision: tokenizer.json is scanned by hand and not parsed into a tree, because
// workers, which only need a count, would otherwise spend a third of a second and 200 MB on a vocabulary of 250k.
#include "common/model_vocabulary.h"

#include <jansson.h>
#include <stdbool.h>
#include <string.h>

enum { DEPTH_LIMIT = 512 };

// A position in JSON text. Once `bad` is set, every step fails.
struct scan {
	const char *p, *end;
	bool bad;
};

static void skip_space(struct scan *s)
{
	while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r'))
		s->p++;
}

static bool accept(struct scan *s, char c)
{
	skip_space(s);
	if (s->bad || s->p >= s->end || *s->p != c)
		return false;
	s->p++;
	return true;
}

static bool expect(struct scan *s, char c)
{
	if (!accept(s, c))
		s->bad = true;
	return !s->bad;
}

// Steps over a string; its raw bytes, escapes and all, lie between *begin and *begin + *len.
static bool scan_string(struct scan *s, const char **begin, size_t *len)
{
	if (!expect(s, '"'))
		return false;
	*begin = s->p;
	while (s->p < s->end && *s->p != '"')
		s->p += *s->p == '\\' && s->end - s->p > 1 ? 2 : 1;
	if (s->p >= s->end)
		return !(s->bad = true);
	*len = (size_t)(s->p++ - *begin);
	return true;
}

// Steps over any value. Brackets are only counted; whether they match is the full parser's business.
static void skip_value(struct scan *s)
{
	const char *begin;
	size_t len;
	int depth = 0;
	do {
		skip_space(s);
		if (s->p >= s->end) {
			s->bad = true;
			return;
		}
		char c = *s->p;
		if (c == '"') {
			if (!scan_string(s, &begin, &len))
				return;
		} else if (c == '{' || c == '[') {
			s->p++;
			if (++depth > DEPTH_LIMIT)
				s->bad = true;
		} else if (c == '}' || c == ']') {
			s->p++;
			if (--depth < 0)
				s->bad = true;
		} else if (c == ',' || c == ':') {
			s->p++;
			if (depth == 0)
				s->bad = true;
		} else {
			const char *start = s->p;
			while (s->p < s->end && !strchr(" \n\t\r,:{}[]\"", *s->p))
				s->p++;
			if (s->p == start)
				s->bad = true; // a NUL
		}
	} while (!s->bad && depth > 0);
}

static bool scan_id(struct scan *s, int32_t *out)
{
	int64_t n = 0;
	skip_space(s);
	const char *start = s->p;
	while (s->p < s->end && *s->p >= '0' && *s->p <= '9' && n <= INT32_MAX)
		n = n * 10 + (*s->p++ - '0');
	if (s->p == start || n >= INT32_MAX)
		return !(s->bad = true);
	*out = (int32_t)n;
	return true;
}

static void include(int32_t id, int32_t *size)
{
	if (id + 1 > *size)
		*size = id + 1;
}

static bool key_is(const char *key, size_t len, const char *name)
{
	return len == strlen(name) && !memcmp(key, name, len);
}

// Calls one of the handlers below for each field of an object.
static void scan_object(struct scan *s, void (*field)(struct scan *, const char *, size_t, void *), void *arg)
{
	const char *key;
	size_t len;
	if (!expect(s, '{') || accept(s, '}'))
		return;
	do {
		if (!scan_string(s, &key, &len) || !expect(s, ':'))
			return;
		field(s, key, len, arg);
	} while (!s->bad && accept(s, ','));
	expect(s, '}');
}

static void vocab_field(struct scan *s, const char *key, size_t len, void *arg)
{
	int32_t id;
	if (scan_id(s, &id))
		include(id, arg);
}

static void model_field(struct scan *s, const char *key, size_t len, void *arg)
{
	skip_space(s);
	if (!key_is(key, len, "vocab")) {
		skip_value(s);
	} else if (s->p < s->end && *s->p == '[') { // unigram: [[piece, score], ...], ids by order
		int32_t id = 0;
		s->p++;
		if (accept(s, ']'))
			return;
		do {
			skip_value(s);
			include(id++, arg);
		} while (!s->bad && accept(s, ','));
		expect(s, ']');
	} else {
		scan_object(s, vocab_field, arg);
	}
}

static void added_field(struct scan *s, const char *key, size_t len, void *arg)
{
	int32_t id;
	if (!key_is(key, len, "id"))
		skip_value(s);
	else if (scan_id(s, &id))
		include(id, arg);
}

static void root_field(struct scan *s, const char *key, size_t len, void *arg)
{
	struct vocabulary_summary *out = arg;
	skip_space(s);
	if (key_is(key, len, "model")) {
		scan_object(s, model_field, &out->size);
	} else if (key_is(key, len, "added_tokens") && s->p < s->end && *s->p == '[') {
		out->added = s->p++;
		if (!accept(s, ']')) {
			do
				scan_object(s, added_field, &out->size);
			while (!s->bad && accept(s, ','));
			expect(s, ']');
		}
		out->added_len = (size_t)(s->p - out->added);
	} else {
		skip_value(s);
	}
}

enum status vocabulary_scan(const char *text, size_t len, const char *label, struct vocabulary_summary *out,
                            struct error *e)
{
	struct scan s = {text, text + len, false};
	*out = (struct vocabulary_summary){0};
	scan_object(&s, root_field, out);
	skip_space(&s);
	if (s.bad || s.p != s.end)
		return error_set(e, STATUS_REFUSED, "%s: not the JSON of a tokenizer, or broken at byte %zu", label,
		                 (size_t)(s.p - text));
	if (out->size == 0)
		return error_set(e, STATUS_REFUSED, "%s: has no vocabulary", label);
	return STATUS_OK;
}

int32_t vocabulary_find_added(const struct vocabulary_summary *v, const char *token)
{
	int32_t id = -1;
	size_t i;
	const json_t *item;
	json_t *root = v->added ? json_loadb(v->added, v->added_len, 0, NULL) : NULL;
	json_array_foreach(root, i, item) {
		const char *content = json_string_value(json_object_get(item, "content"));
		const json_t *number = json_object_get(item, "id");
		if (content && !strcmp(content, token) && json_is_integer(number) && json_integer_value(number) < v->size)
			id = (int32_t)json_integer_value(number);
	}
	json_decref(root);
	return id;
}
