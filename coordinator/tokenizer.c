// The life of a text: repaired, cut at added tokens, normalised, cut into pieces, merged; and tokens back to bytes.
#include "coordinator/tokenizer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"
#include "coordinator/tokenizer_utf8.h"

void token_list_push(struct token_list *list, uint32_t id)
{
	if (list->count == list->capacity) {
		list->capacity = list->capacity ? 2 * list->capacity : 64;
		list->ids = xrealloc(list->ids, list->capacity * sizeof *list->ids);
	}
	list->ids[list->count++] = id;
}

struct encoding { // of one call
	const struct tokenizer *t;
	const struct encode_options *options;
	struct pretokenizer_scratch pretokenizer;
	struct bpe_scratch bpe;
	struct token_list *out;
	struct error *error;
};

static enum status encode_words(struct encoding *e, const uint8_t *text, size_t len)
{
	const uint8_t *base;
	const struct pieces *pieces;
	TRY(pretokenizer_run(e->t->pretokenizer, text, len, &e->pretokenizer, &base, &pieces, e->error));
	for (size_t i = 0; i < pieces->count; i++) {
		if (pieces->at[i].len > INT32_MAX / 2)
			return error_set(e->error, STATUS_INVALID, "a word of more than 1 GiB");
		bpe_encode(e->t, base + pieces->at[i].start, pieces->at[i].len, &e->bpe, e->out);
	}
	return STATUS_OK;
}

// A text between added tokens that are matched raw: normalise, then cut at those that are matched normalised.
// forbidden ranges are relative to `text`.
static enum status encode_between(struct encoding *e, const uint8_t *text, size_t len,
                                  const struct byte_range *forbidden, size_t forbidden_count)
{
	if (len == 0)
		return STATUS_OK;
	size_t n = len;
	uint8_t *normal = tokenizer_normalize(e->t, text, len, &n);
	struct byte_range all = {0, n};
	struct added_search s = {.text = normal ? normal : text, .len = n, .parse_special = e->options->parse_special,
	                         .forbidden = forbidden, .forbidden_count = forbidden_count};
	if (normal && forbidden_count) { // places have moved: take no risk
		s.forbidden = &all;
		s.forbidden_count = 1;
	}
	struct added_match m;
	enum status status = STATUS_OK;
	while (added_next(e->t, 1, &s, &m)) {
		if (m.start > s.taken)
			TRY_GOTO(encode_words(e, s.text + s.taken, m.start - s.taken), out);
		token_list_push(e->out, m.token->id);
		s.taken = m.end;
	}
	if (s.taken < n)
		status = encode_words(e, s.text + s.taken, n - s.taken);
out:
	free(normal);
	return status;
}

// The ranges of `all` that touch [from, to), made relative to `from`.
static struct byte_range *ranges_within(const struct byte_range *all, size_t count, size_t from, size_t to,
                                        size_t *found)
{
	size_t lo = 0, hi = count;
	while (lo < hi) { // first that ends behind `from`
		size_t mid = (lo + hi) / 2;
		if (all[mid].to <= from)
			lo = mid + 1;
		else
			hi = mid;
	}
	for (hi = lo; hi < count && all[hi].from < to; hi++)
		;
	*found = hi - lo;
	struct byte_range *some = *found ? xmalloc(*found * sizeof *some) : NULL;
	for (size_t i = lo; i < hi; i++) {
		size_t start = all[i].from > from ? all[i].from : from, end = all[i].to < to ? all[i].to : to;
		some[i - lo] = (struct byte_range){start - from, end - from};
	}
	return some;
}

static enum status encode_part(struct encoding *e, const uint8_t *text, size_t from, size_t to,
                               const struct byte_range *forbidden, size_t forbidden_count)
{
	size_t found;
	struct byte_range *some = ranges_within(forbidden, forbidden_count, from, to, &found);
	enum status status = encode_between(e, text + from, to - from, some, found);
	free(some);
	return status;
}

static enum status encode_valid(const struct tokenizer *t, const uint8_t *text, size_t len,
                                const struct byte_range *forbidden, size_t forbidden_count,
                                const struct encode_options *options, struct token_list *out, struct error *error)
{
	struct encoding e = {.t = t, .options = options, .out = out, .error = error};
	size_t begin = out->count;
	struct added_search s = {.text = text, .len = len, .parse_special = options->parse_special,
	                         .forbidden = forbidden, .forbidden_count = forbidden_count};
	struct added_match m;
	enum status status = STATUS_OK;
	while (added_next(t, 0, &s, &m)) {
		if (m.start > s.taken)
			TRY_GOTO(encode_part(&e, text, s.taken, m.start, forbidden, forbidden_count), out);
		token_list_push(out, m.token->id);
		s.taken = m.end;
	}
	if (s.taken < len)
		TRY_GOTO(encode_part(&e, text, s.taken, len, forbidden, forbidden_count), out);
	if (options->add_special) {
		size_t n = (size_t)t->prefix_count;
		// Exactly one: a text that begins with them already, such as a rendered template, is left alone.
		if (n && (out->count - begin < n || memcmp(out->ids + begin, t->prefix, n * sizeof *t->prefix))) {
			for (size_t i = 0; i < n; i++)
				token_list_push(out, 0);
			memmove(out->ids + begin + n, out->ids + begin, (out->count - begin - n) * sizeof *out->ids);
			memcpy(out->ids + begin, t->prefix, n * sizeof *t->prefix);
		}
		for (int i = 0; i < t->suffix_count; i++)
			token_list_push(out, t->suffix[i]);
	}
out:
	pretokenizer_scratch_free(&e.pretokenizer);
	bpe_scratch_free(&e.bpe);
	if (status != STATUS_OK)
		out->count = begin;
	return status;
}

static enum status refuse_without_vocabulary(struct error *error)
{
	return error_set(error, STATUS_INVALID, "this model has no vocabulary: the prompt has to be a list of token ids");
}

enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, const struct encode_options *options,
                             struct token_list *out, struct error *error)
{
	if (t->no_vocabulary)
		return refuse_without_vocabulary(error);
	uint8_t *repaired = NULL;
	if (utf8_valid_prefix((const uint8_t *)text, len) != len)
		repaired = utf8_repair((const uint8_t *)text, len, &len);
	enum status status = encode_valid(t, repaired ? repaired : (const uint8_t *)text, len, NULL, 0, options, out, error);
	free(repaired);
	return status;
}

enum status tokenizer_encode_segments(const struct tokenizer *t, const struct text_segment *segments, size_t count,
                                      bool add_special, struct token_list *out, struct error *error)
{
	if (t->no_vocabulary)
		return refuse_without_vocabulary(error);
	size_t len = 0, n = 0, ranges = 0;
	for (size_t i = 0; i < count; i++)
		len += segments[i].len;
	uint8_t *text = xmalloc(3 * len);
	struct byte_range *forbidden = xmalloc(count * sizeof *forbidden);
	for (size_t i = 0; i < count; i++) {
		size_t part_len = segments[i].len, start = n;
		const uint8_t *part = (const uint8_t *)segments[i].text;
		if (utf8_valid_prefix(part, part_len) == part_len) {
			memcpy(text + n, part, part_len);
		} else {
			uint8_t *repaired = utf8_repair(part, part_len, &part_len);
			memcpy(text + n, repaired, part_len);
			free(repaired);
		}
		n += part_len;
		if (segments[i].from_content && n > start)
			forbidden[ranges++] = (struct byte_range){start, n};
	}
	struct encode_options options = {.add_special = add_special, .parse_special = true};
	enum status status = encode_valid(t, text, n, forbidden, ranges, &options, out, error);
	free(forbidden);
	free(text);
	return status;
}

uint32_t tokenizer_vocab_size(const struct tokenizer *t)
{
	return t->vocab_size;
}

const char *tokenizer_token_bytes(const struct tokenizer *t, uint32_t id, bool skip_special, size_t *len)
{
	if (t->no_vocabulary && id < t->vocab_size) {
		*len = t->tokens[id].bytes_len;
		return t->tokens[id].bytes;
	}
	if (id >= t->vocab_size || !t->tokens[id].bytes || (skip_special && t->tokens[id].control)) {
		*len = 0;
		return "";
	}
	*len = t->tokens[id].bytes_len;
	return t->tokens[id].bytes;
}

bool tokenizer_is_control(const struct tokenizer *t, uint32_t id)
{
	return id < t->vocab_size && t->tokens[id].control;
}

bool tokenizer_find(const struct tokenizer *t, const char *text, uint32_t *id)
{
	if (t->no_vocabulary)
		return false;
	size_t len = strlen(text);
	uint32_t found = tokenizer_find_added(t, text, len);
	if (found == NO_TOKEN)
		found = tokenizer_find_text(t, text, len);
	if (found != NO_TOKEN)
		*id = found;
	return found != NO_TOKEN;
}

const struct model_generation *tokenizer_generation(const struct tokenizer *t)
{
	return &t->generation;
}

const char *tokenizer_special_text(const struct tokenizer *t, enum tokenizer_special special)
{
	return t->specials[special] ? t->specials[special] : "";
}
