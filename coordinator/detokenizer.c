// Tokens to text as they come: whole characters at once, the beginning of one kept until it is complete or cannot be.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer.h"
#include "coordinator/tokenizer_utf8.h"

static void append(char **buf, size_t *len, size_t *capacity, const void *bytes, size_t n)
{
	if (n == 0)
		return;
	if (*len + n > *capacity) {
		*capacity = (*len + n) * 2 + 64;
		*buf = xrealloc(*buf, *capacity);
	}
	memcpy(*buf + *len, bytes, n);
	*len += n;
}

static const char replacement[] = "\xEF\xBF\xBD";

void detokenizer_init(struct detokenizer *d, const struct tokenizer *t, bool skip_special)
{
	*d = (struct detokenizer){.tokenizer = t, .skip_special = skip_special};
}

void detokenizer_push(struct detokenizer *d, uint32_t id, char **buf, size_t *len, size_t *capacity)
{
	size_t n;
	const uint8_t *bytes = (const uint8_t *)tokenizer_token_bytes(d->tokenizer, id, d->skip_special, &n);
	size_t i = 0;
	while (d->pending_len && i < n) { // finish the character begun, one byte at a time
		d->pending[d->pending_len] = bytes[i];
		unsigned used;
		enum utf8_kind kind = utf8_examine(d->pending, d->pending_len + 1, &used);
		if (kind == UTF8_INVALID) { // the byte at hand begins anew
			append(buf, len, capacity, replacement, 3);
			d->pending_len = 0;
			break;
		}
		d->pending_len++;
		i++;
		if (kind == UTF8_VALID) {
			append(buf, len, capacity, d->pending, used);
			d->pending_len = 0;
		}
	}
	while (i < n) {
		size_t valid = utf8_valid_prefix(bytes + i, n - i);
		append(buf, len, capacity, bytes + i, valid);
		i += valid;
		if (i == n)
			break;
		unsigned used;
		if (utf8_examine(bytes + i, n - i, &used) == UTF8_UNFINISHED) {
			memcpy(d->pending, bytes + i, n - i);
			d->pending_len = (unsigned)(n - i);
			break;
		}
		append(buf, len, capacity, replacement, 3);
		i += used;
	}
}

void detokenizer_finish(struct detokenizer *d, char **buf, size_t *len, size_t *capacity)
{
	if (d->pending_len)
		append(buf, len, capacity, replacement, 3);
	d->pending_len = 0;
}
