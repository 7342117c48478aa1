// JSON and other text written by hand into one growing buffer. See json_write.h.
#include "coordinator/json_write.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"

void json_buf_free(struct json_buf *b)
{
	free(b->data);
	*b = (struct json_buf){0};
}

void json_reserve(struct json_buf *b, size_t more)
{
	if (b->capacity - b->len >= more)
		return;
	size_t want = b->capacity ? b->capacity * 2 : 256;
	while (want - b->len < more)
		want *= 2;
	b->data = xrealloc(b->data, want);
	b->capacity = want;
}

void json_add(struct json_buf *b, const char *text, size_t len)
{
	if (!len)
		return;
	json_reserve(b, len);
	memcpy(b->data + b->len, text, len);
	b->len += len;
}

void json_adds(struct json_buf *b, const char *text)
{
	json_add(b, text, strlen(text));
}

void json_addf(struct json_buf *b, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	json_reserve(b, 128);
	int n = vsnprintf(b->data + b->len, b->capacity - b->len, fmt, ap);
	va_end(ap);
	ASSERT(n >= 0);
	if ((size_t)n >= b->capacity - b->len) {
		json_reserve(b, (size_t)n + 1);
		va_start(ap, fmt);
		vsnprintf(b->data + b->len, b->capacity - b->len, fmt, ap);
		va_end(ap);
	}
	b->len += (size_t)n;
}

void json_add_u64(struct json_buf *b, uint64_t v)
{
	char digits[20];
	size_t n = 0;
	do {
		digits[sizeof digits - ++n] = (char)('0' + v % 10);
		v /= 10;
	} while (v);
	json_add(b, digits + sizeof digits - n, n);
}

void json_add_float(struct json_buf *b, float v)
{
	if (isnan(v))
		json_adds(b, "null");
	else if (isinf(v))
		json_adds(b, v < 0 ? "-9999.0" : "9999.0");
	else
		json_addf(b, "%.9g", (double)v);
}

size_t utf8_char_len(const char *text, size_t len, size_t *bad)
{
	const unsigned char *s = (const unsigned char *)text;
	unsigned char low = 0x80, high = 0xbf;
	size_t need;
	if (s[0] < 0x80)
		return 1;
	if (s[0] >= 0xc2 && s[0] <= 0xdf)
		need = 2;
	else if (s[0] >= 0xe0 && s[0] <= 0xef)
		need = 3, low = s[0] == 0xe0 ? 0xa0 : 0x80, high = s[0] == 0xed ? 0x9f : 0xbf;
	else if (s[0] >= 0xf0 && s[0] <= 0xf4)
		need = 4, low = s[0] == 0xf0 ? 0x90 : 0x80, high = s[0] == 0xf4 ? 0x8f : 0xbf;
	else
		need = 0;
	size_t i = 1;
	for (; i < need && i < len; i++) {
		if (s[i] < low || s[i] > high)
			break;
		low = 0x80, high = 0xbf;
	}
	if (need && i == need)
		return need;
	if (bad)
		*bad = i;
	return 0;
}

int utf8_valid(const char *text, size_t len)
{
	for (size_t i = 0; i < len;) {
		size_t n = utf8_char_len(text + i, len - i, NULL);
		if (!n)
			return 0;
		i += n;
	}
	return 1;
}

static const char escape_of[256] = {
    ['"'] = '"', ['\\'] = '\\', ['\n'] = 'n', ['\r'] = 'r', ['\t'] = 't', ['\b'] = 'b', ['\f'] = 'f',
    [0] = 'u',	 [1] = 'u',	[2] = 'u',    [3] = 'u',    [4] = 'u',	  [5] = 'u',	[6] = 'u',
    [7] = 'u',	 [11] = 'u',	[14] = 'u',   [15] = 'u',   [16] = 'u',	  [17] = 'u',	[18] = 'u',
    [19] = 'u',	 [20] = 'u',	[21] = 'u',   [22] = 'u',   [23] = 'u',	  [24] = 'u',	[25] = 'u',
    [26] = 'u',	 [27] = 'u',	[28] = 'u',   [29] = 'u',   [30] = 'u',	  [31] = 'u',
};

void json_add_escaped(struct json_buf *b, const char *text, size_t len)
{
	json_reserve(b, len + 16);
	size_t plain = 0; // text[plain..i) is copied as it is
	for (size_t i = 0; i < len;) {
		unsigned char c = (unsigned char)text[i];
		if (c < 0x80) {
			char e = escape_of[c];
			if (e) {
				json_add(b, text + plain, i - plain);
				if (e == 'u')
					json_addf(b, "\\u%04x", c);
				else
					json_add(b, (char[]){'\\', e}, 2);
				plain = i + 1;
			}
			i++;
			continue;
		}
		size_t bad = 0, n = utf8_char_len(text + i, len - i, &bad);
		if (!n) {
			json_add(b, text + plain, i - plain);
			json_add(b, "\xef\xbf\xbd", 3);
			plain = i + bad;
			n = bad;
		}
		i += n;
	}
	json_add(b, text + plain, len - plain);
}

void json_add_string(struct json_buf *b, const char *text, size_t len)
{
	json_add(b, "\"", 1);
	json_add_escaped(b, text, len);
	json_add(b, "\"", 1);
}
