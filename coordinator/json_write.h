// JSON and other text written by hand into one growing buffer. The surprising decision: no JSON library on the way out,
// since a streamed token must cost a few microseconds and its JSON has a fixed shape.
#ifndef STAGECOACH_COORDINATOR_JSON_WRITE_H
#define STAGECOACH_COORDINATOR_JSON_WRITE_H

#include <stddef.h>
#include <stdint.h>

struct json_buf {
	char *data;
	size_t len, capacity;
}; // {0} is an empty one; data is not NUL-terminated

void json_buf_free(struct json_buf *);
void json_reserve(struct json_buf *, size_t more);
void json_add(struct json_buf *, const char *text, size_t len);
void json_adds(struct json_buf *, const char *text);
void json_addf(struct json_buf *, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void json_add_u64(struct json_buf *, uint64_t);
// 9 significant digits, enough to get the same float32 back. JSON has no infinities: they become -9999 and 9999 (as
// vLLM writes them), NaN becomes null.
void json_add_float(struct json_buf *, float);
// The inside of a JSON string: escapes what JSON demands, keeps other UTF-8 as it is, one U+FFFD for each maximal
// invalid part.
void json_add_escaped(struct json_buf *, const char *text, size_t len);
void json_add_string(struct json_buf *, const char *text, size_t len); // with quotes

// Length of the valid UTF-8 character at text[0..len), len > 0; 0 if invalid, and *bad (may be NULL) is then the length
// of the maximal invalid part, >= 1.
size_t utf8_char_len(const char *text, size_t len, size_t *bad);
// Whether all of text[0..len) is valid UTF-8.
int utf8_valid(const char *text, size_t len);

#endif
