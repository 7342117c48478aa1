// Any bytes as a message: decoding never reads outside, never allocates much, and what it accepts it can encode again to
// something that decodes to the same.
#include <stdlib.h>
#include <string.h>

#include "proto/message.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct message_limits limits = {.max_seqs = 64, .max_batch_tokens = 512, .max_context = 4096,
	                                             .vocab_size = 1000, .n_groups = 2, .n_blocks = {100, 50}};
	struct message m, again;
	uint8_t *buf = NULL;
	size_t len = 0, capacity = 0;
	if (message_decode(&m, data, size, &limits, NULL) == STATUS_OK) {
		ASSERT(message_encode(&m, &buf, &len, &capacity, NULL) == STATUS_OK);
		ASSERT(message_decode(&again, buf, len, &limits, NULL) == STATUS_OK);
		ASSERT(again.type == m.type && again.epoch == m.epoch && again.step == m.step);
		message_free(&again);
	}
	message_free(&m);
	free(buf);
	return 0;
}
