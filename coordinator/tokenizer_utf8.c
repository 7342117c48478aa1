// Validation and repair of UTF-8. See tokenizer_utf8.h.
#include "coordinator/tokenizer_utf8.h"

#include <string.h>

#include "common/status.h"

enum utf8_kind utf8_examine(const uint8_t *s, size_t len, unsigned *used)
{
	uint8_t a = s[0];
	*used = 1;
	if (a < 0x80)
		return UTF8_VALID;
	if (a < 0xC2 || a > 0xF4)
		return UTF8_INVALID;
	unsigned width = utf8_width(a);
	uint8_t low = a == 0xE0 ? 0xA0 : a == 0xF0 ? 0x90 : 0x80; // no overlong forms,
	uint8_t high = a == 0xED ? 0x9F : a == 0xF4 ? 0x8F : 0xBF; // no surrogates, nothing past U+10FFFF
	for (unsigned i = 1; i < width; i++) {
		if (i >= len) {
			*used = i;
			return UTF8_UNFINISHED;
		}
		if (s[i] < low || s[i] > high) {
			*used = i;
			return UTF8_INVALID;
		}
		low = 0x80;
		high = 0xBF;
	}
	*used = width;
	return UTF8_VALID;
}

size_t utf8_valid_prefix(const uint8_t *s, size_t len)
{
	size_t i = 0;
	while (i < len) {
		uint64_t eight;
		if (len - i >= 8 && (memcpy(&eight, s + i, 8), !(eight & 0x8080808080808080u))) {
			i += 8;
			continue;
		}
		unsigned used;
		if (utf8_examine(s + i, len - i, &used) != UTF8_VALID)
			return i;
		i += used;
	}
	return len;
}

uint8_t *utf8_repair(const uint8_t *s, size_t len, size_t *out_len)
{
	uint8_t *out = xmalloc(3 * len); // a replaced part has at least one byte
	size_t n = 0;
	for (size_t i = 0; i < len;) {
		unsigned used;
		if (utf8_examine(s + i, len - i, &used) == UTF8_VALID) {
			memcpy(out + n, s + i, used);
			n += used;
		} else {
			n += utf8_put(out + n, 0xFFFD);
		}
		i += used;
	}
	*out_len = n;
	return out;
}
