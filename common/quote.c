// See quote.h. Bytes beyond ASCII become '?' too, so that a message is valid UTF-8 whatever the file holds.
#include "common/quote.h"

#include <string.h>

const char *quote_bytes(char *buf, size_t cap, const char *data, size_t len)
{
	size_t n = len < cap - 1 ? len : cap - 1;
	for (size_t i = 0; i < n; i++) {
		unsigned char c = (unsigned char)data[i];
		buf[i] = c >= 0x20 && c < 0x7f ? (char)c : '?';
	}
	buf[n] = 0;
	if (n < len)
		memcpy(buf + n - 3, "...", 3);
	return buf;
}
