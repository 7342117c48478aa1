// What the template helper answers, as untrusted input: the segments have to cover the text without gap or overlap.
#include <stdlib.h>
#include <string.h>

#include "coordinator/chat_rendering.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t *copy = malloc(size + 1);
	struct chat_rendering r;
	if (size)
		memcpy(copy, data, size);
	if (chat_rendering_parse(copy, size, &r) != STATUS_OK) {
		free(copy);
		return 0;
	}
	const char *at = r.count ? r.segments[0].text : (char *)copy + size;
	for (size_t i = 0; i < r.count; i++) {
		ASSERT(r.segments[i].text == at && r.segments[i].len > 0);
		at += r.segments[i].len;
	}
	ASSERT(at == (char *)copy + size);
	chat_rendering_free(&r);
	return 0;
}
