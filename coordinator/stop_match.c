// Stop strings over text that arrives in pieces. See stop_match.h.
#include "coordinator/stop_match.h"

#include <stdlib.h>
#include <string.h>

#include "common/status.h"

struct stop_string {
	char *text;
	uint32_t len;
	uint32_t *fallback; // [len]: longest proper border of text[0..i]
};

struct stop_set {
	unsigned count;
	bool first_byte[256]; // bytes with which some string begins
	struct stop_string strings[];
};

struct stop_set *stop_set_create(const char *const *strings, const size_t *lens, unsigned count)
{
	ASSERT(count >= 1 && count <= STOP_MAX_STRINGS);
	struct stop_set *set = xcalloc(1, sizeof *set + count * sizeof set->strings[0]);
	set->count = count;
	for (unsigned s = 0; s < count; s++) {
		struct stop_string *p = &set->strings[s];
		ASSERT(lens[s] >= 1 && lens[s] <= STOP_MAX_BYTES);
		p->len = (uint32_t)lens[s];
		p->text = xmalloc(lens[s]);
		memcpy(p->text, strings[s], lens[s]);
		p->fallback = xcalloc(p->len, sizeof *p->fallback);
		set->first_byte[(unsigned char)p->text[0]] = true;
		for (uint32_t i = 1, k = 0; i < p->len; i++) {
			while (k && p->text[i] != p->text[k])
				k = p->fallback[k - 1];
			if (p->text[i] == p->text[k])
				k++;
			p->fallback[i] = k;
		}
	}
	return set;
}

void stop_set_destroy(struct stop_set **set)
{
	if (!*set)
		return;
	for (unsigned s = 0; s < (*set)->count; s++) {
		free((*set)->strings[s].text);
		free((*set)->strings[s].fallback);
	}
	free(*set);
	*set = NULL;
}

void stop_matcher_init(struct stop_matcher *m, const struct stop_set *set)
{
	*m = (struct stop_matcher){.set = set};
	if (set)
		m->matched = xcalloc(set->count, sizeof *m->matched);
}

void stop_matcher_free(struct stop_matcher *m)
{
	free(m->matched);
	json_buf_free(&m->held);
	*m = (struct stop_matcher){0};
}

int stop_matcher_push(struct stop_matcher *m, const char *text, size_t len, bool keep_stop, struct json_buf *out)
{
	const struct stop_set *set = m->set;
	if (!set) {
		json_add(out, text, len);
		return -1;
	}
	if (!m->held.len) { // mostly nothing of a stop string is in sight
		size_t i = 0;
		while (i < len && !set->first_byte[(unsigned char)text[i]])
			i++;
		json_add(out, text, i);
		text += i;
		len -= i;
	}
	if (!len)
		return -1;
	uint32_t hold = 0;
	for (size_t i = 0; i < len; i++) {
		int found = -1;
		hold = 0;
		json_add(&m->held, text + i, 1);
		for (unsigned s = 0; s < set->count; s++) {
			const struct stop_string *p = &set->strings[s];
			uint32_t k = m->matched[s];
			while (k && p->text[k] != text[i])
				k = p->fallback[k - 1];
			if (p->text[k] == text[i])
				k++;
			if (k == p->len && (found < 0 || p->len > set->strings[found].len))
				found = (int)s;
			m->matched[s] = k;
			if (k > hold)
				hold = k;
		}
		if (found >= 0) {
			size_t keep = m->held.len - (keep_stop ? 0 : set->strings[found].len);
			json_add(out, m->held.data, keep);
			m->held.len = 0;
			return found;
		}
	}
	if (m->held.len > hold) {
		json_add(out, m->held.data, m->held.len - hold);
		memmove(m->held.data, m->held.data + m->held.len - hold, hold);
		m->held.len = hold;
	}
	return -1;
}

void stop_matcher_finish(struct stop_matcher *m, struct json_buf *out)
{
	json_add(out, m->held.data, m->held.len);
	m->held.len = 0;
}
