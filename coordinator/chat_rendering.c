// See chat_rendering.h.
#include "coordinator/chat_rendering.h"

#include <stdlib.h>

static uint32_t get_u32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

enum status chat_rendering_parse(uint8_t *answer, size_t len, struct chat_rendering *out)
{
	*out = (struct chat_rendering){0};
	if (len < 5)
		return STATUS_INVALID;
	size_t count = get_u32(answer + 1);
	if (count > (len - 5) / 8)
		return STATUS_INVALID;
	const uint8_t *ranges = answer + 5;
	const char *text = (const char *)ranges + 8 * count;
	size_t text_len = len - 5 - 8 * count, at = 0;
	out->segments = xmalloc((2 * count + 1) * sizeof *out->segments);
	for (size_t i = 0; i < count; i++) {
		size_t from = get_u32(ranges + 8 * i), to = get_u32(ranges + 8 * i + 4);
		if (from < at || to <= from || to > text_len) {
			free(out->segments);
			*out = (struct chat_rendering){0};
			return STATUS_INVALID;
		}
		if (from > at)
			out->segments[out->count++] = (struct text_segment){text + at, from - at, false};
		out->segments[out->count++] = (struct text_segment){text + from, to - from, true};
		at = to;
	}
	if (at < text_len)
		out->segments[out->count++] = (struct text_segment){text + at, text_len - at, false};
	out->storage = (char *)answer;
	return STATUS_OK;
}

void chat_rendering_free(struct chat_rendering *r)
{
	free(r->segments);
	free(r->storage);
	*r = (struct chat_rendering){0};
}
