// tokenizer.h over a vocabulary that a test can do in its head: ids 0 to 255 are bytes, then a few control tokens and
// longer ones. Included by tests in place of the real one.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer.h"

enum { FAKE_BOS = 256, FAKE_START = 257, FAKE_END = 258, FAKE_FIRST_WORD = 259 };

static const char *const fake_words[] = {
    "<s>", "<|im_start|>", "<|im_end|>", "hello", " world", "STOP", "\xf0\x9f\x98", "\x80!", "\xe4\xbd\xa0", "\xa5\xbd",
};
enum { FAKE_VOCABULARY = 256 + sizeof fake_words / sizeof fake_words[0] };

struct tokenizer {
	struct model_generation generation;
};
static struct tokenizer fake_tokenizer = {{.temperature = 0.5f,
					   .top_p = -1,
					   .min_p = -1,
					   .repetition_penalty = -1,
					   .top_k = -1,
					   .n_eos = 1,
					   .eos = {FAKE_END},
					   .bos = FAKE_BOS,
					   .add_bos = false}};
static const char fake_bytes[] =
#define B4(a) a, a + 1, a + 2, a + 3
#define B16(a) B4(a), B4(a + 4), B4(a + 8), B4(a + 12)
#define B64(a) B16(a), B16(a + 16), B16(a + 32), B16(a + 48)
    {B64(0), B64(64), B64((char)128), B64((char)192)};

static void fake_add(struct token_list *out, uint32_t id)
{
	if (out->count == out->capacity) {
		out->capacity = out->capacity ? out->capacity * 2 : 16;
		out->ids = realloc(out->ids, out->capacity * sizeof *out->ids);
	}
	out->ids[out->count++] = id;
}

static void fake_encode(const char *text, size_t len, bool parse_special, struct token_list *out)
{
	for (size_t i = 0; i < len;) {
		uint32_t id = (unsigned char)text[i];
		size_t n = 1;
		for (uint32_t w = FAKE_BOS; parse_special && w <= FAKE_END; w++) {
			size_t m = strlen(fake_words[w - 256]);
			if (m <= len - i && !memcmp(text + i, fake_words[w - 256], m))
				id = w, n = m;
		}
		fake_add(out, id);
		i += n;
	}
}

enum status tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, const struct encode_options *o,
			     struct token_list *out, struct error *e)
{
	if (o->add_special && t->generation.add_bos)
		fake_add(out, FAKE_BOS);
	fake_encode(text, len, o->parse_special, out);
	return STATUS_OK;
}

enum status tokenizer_encode_segments(const struct tokenizer *t, const struct text_segment *segments, size_t count,
				      bool add_special, struct token_list *out, struct error *e)
{
	for (size_t i = 0; i < count; i++)
		fake_encode(segments[i].text, segments[i].len, !segments[i].from_content, out);
	return STATUS_OK;
}

uint32_t tokenizer_vocab_size(const struct tokenizer *t)
{
	return FAKE_VOCABULARY;
}

const char *tokenizer_token_bytes(const struct tokenizer *t, uint32_t id, bool skip_special, size_t *len)
{
	*len = id < 256 ? 1 : strlen(fake_words[id - 256]);
	if (skip_special && tokenizer_is_control(t, id))
		*len = 0;
	return id < 256 ? &fake_bytes[id] : fake_words[id - 256];
}

bool tokenizer_is_control(const struct tokenizer *t, uint32_t id)
{
	return id >= FAKE_BOS && id <= FAKE_END;
}

const struct model_generation *tokenizer_generation(const struct tokenizer *t)
{
	return &t->generation;
}

void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special)
{
	*d = (struct detokenizer){.tokenizer = t, .skip_special = skip_special};
}

static void fake_text(char **buf, size_t *len, size_t *capacity, const void *text, size_t n)
{
	if (*capacity - *len < n)
		*buf = realloc(*buf, *capacity = *len + n + 64);
	memcpy(*buf + *len, text, n);
	*len += n;
}

static unsigned fake_need(unsigned char lead)
{
	return lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 0;
}

void detokenizer_finish(struct detokenizer *d, char **buf, size_t *len, size_t *capacity)
{
	if (d->pending_len)
		fake_text(buf, len, capacity, "\xef\xbf\xbd", 3);
	d->pending_len = 0;
}

void detokenizer_push(struct detokenizer *d, uint32_t id, char **buf, size_t *len, size_t *capacity)
{
	size_t n;
	const char *bytes = tokenizer_token_bytes(d->tokenizer, id, d->skip_special, &n);
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)bytes[i];
		if (d->pending_len && (c & 0xc0) != 0x80)
			detokenizer_finish(d, buf, len, capacity);
		d->pending[d->pending_len++] = c;
		unsigned need = fake_need(d->pending[0]);
		if (!need) {
			detokenizer_finish(d, buf, len, capacity);
		} else if (d->pending_len == need) {
			fake_text(buf, len, capacity, d->pending, need);
			d->pending_len = 0;
		}
	}
}
