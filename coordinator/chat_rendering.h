// The answer of the template helper: pure over its bytes, checked like any untrusted message, since a template might have
// got hold of the helper.
#ifndef STAGECOACH_COORDINATOR_CHAT_RENDERING_H
#define STAGECOACH_COORDINATOR_CHAT_RENDERING_H

#include <stdint.h>

#include "coordinator/chat_template.h"

// `answer` (malloc'ed, `len` bytes) is: one byte, a little-endian uint32 count of ranges, for each two uint32 (from and to,
// in bytes of the text), the text. The ranges ascend, are not empty and lie in the text. On success the rendering owns
// `answer`; else STATUS_INVALID and it is still the caller's.
enum status chat_rendering_parse(uint8_t *answer, size_t len, struct chat_rendering *out);

#endif
