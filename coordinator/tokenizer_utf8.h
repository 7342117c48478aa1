// UTF-8 as the tokenizer needs it: stepping through text known to be valid, and repairing text that is not, by the rule
// of Python's decode(errors="replace"): each maximal part that cannot be completed becomes one U+FFFD.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_UTF8_H
#define STAGECOACH_COORDINATOR_TOKENIZER_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The code point at p of valid UTF-8; *p moves behind it.
static inline uint32_t utf8_next(const uint8_t **p)
{
	const uint8_t *s = *p;
	if (s[0] < 0x80) {
		*p = s + 1;
		return s[0];
	}
	if (s[0] < 0xE0) {
		*p = s + 2;
		return (s[0] & 0x1Fu) << 6 | (s[1] & 0x3Fu);
	}
	if (s[0] < 0xF0) {
		*p = s + 3;
		return (s[0] & 0x0Fu) << 12 | (s[1] & 0x3Fu) << 6 | (s[2] & 0x3Fu);
	}
	*p = s + 4;
	return (s[0] & 0x07u) << 18 | (s[1] & 0x3Fu) << 12 | (s[2] & 0x3Fu) << 6 | (s[3] & 0x3Fu);
}

// Bytes of the valid character that begins with this byte.
static inline unsigned utf8_width(uint8_t first)
{
	return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

// Writes cp as UTF-8, returns its length (1 to 4).
static inline unsigned utf8_put(uint8_t *out, uint32_t cp)
{
	if (cp < 0x80) {
		out[0] = (uint8_t)cp;
		return 1;
	}
	if (cp < 0x800) {
		out[0] = (uint8_t)(0xC0 | cp >> 6);
		out[1] = (uint8_t)(0x80 | (cp & 0x3F));
		return 2;
	}
	if (cp < 0x10000) {
		out[0] = (uint8_t)(0xE0 | cp >> 12);
		out[1] = (uint8_t)(0x80 | (cp >> 6 & 0x3F));
		out[2] = (uint8_t)(0x80 | (cp & 0x3F));
		return 3;
	}
	out[0] = (uint8_t)(0xF0 | cp >> 18);
	out[1] = (uint8_t)(0x80 | (cp >> 12 & 0x3F));
	out[2] = (uint8_t)(0x80 | (cp >> 6 & 0x3F));
	out[3] = (uint8_t)(0x80 | (cp & 0x3F));
	return 4;
}

enum utf8_kind { UTF8_VALID, UTF8_INVALID, UTF8_UNFINISHED };

// Looks at the character that begins at s (len >= 1). VALID: *used is its width. INVALID: *used is the maximal part to
// replace by one U+FFFD. UNFINISHED: all of s may still become valid, *used = len.
enum utf8_kind utf8_examine(const uint8_t *s, size_t len, unsigned *used);
// Length of the longest prefix that is valid.
size_t utf8_valid_prefix(const uint8_t *s, size_t len);
// A malloc'ed valid copy, *out_len bytes.
uint8_t *utf8_repair(const uint8_t *s, size_t len, size_t *out_len);

#endif
