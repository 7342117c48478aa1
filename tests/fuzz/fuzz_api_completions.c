// Bodies of /v1/completions: whatever comes, a request is parsed and freed or refused with a message.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/api_request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const struct model_generation generation = {
	    .temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN, .top_k = -1, .bos = -1};
	const struct api_limits limits = {.vocab_size = 49152, .generation = &generation};
	struct api_request r;
	struct api_error e = {0};
	char *copy = malloc(size ? size : 1); // no NUL after it, so that a read too far is seen
	if (size)
		memcpy(copy, data, size);
	enum status status = api_request_parse(&r, API_COMPLETIONS, copy, size, &limits, &e);
	free(copy);
	if (status == STATUS_OK) {
		ASSERT(r.n_prompts >= 1);
		ASSERT(r.number.n >= 1 && r.number.temperature >= 0 && r.number.top_p > 0);
	} else {
		ASSERT(status == STATUS_INVALID && e.http_status == 400 && e.message[0]);
		struct json_buf out = {0};
		api_error_write(&e, &out);
		json_t *root = json_loadb(out.data, out.len, 0, NULL);
		ASSERT(root);
		json_decref(root);
		json_buf_free(&out);
	}
	api_request_free(&r);
	return 0;
}
