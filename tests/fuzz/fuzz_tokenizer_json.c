// tokenizer.json as untrusted input, then the rest of the input as a text for it: up to a zero byte, or the whole twice.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"
#include "coordinator/tokenizer_utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const uint8_t *zero = size ? memchr(data, 0, size) : NULL;
	size_t len = zero ? (size_t)(zero - data) : size;
	const char *text = zero ? (const char *)zero + 1 : (const char *)data;
	size_t text_len = zero ? size - len - 1 : size;
	struct tokenizer *t;
	struct error e = {""};
	if (tokenizer_from_json(&t, (const char *)data, len, &e) != STATUS_OK)
		return 0;
	struct token_list ids = {0};
	char *back = NULL;
	size_t back_len = 0, capacity = 0;
	struct detokenizer d;
	for (int i = 0; i < 4; i++) {
		struct encode_options options = {.add_special = i & 1, .parse_special = i & 2};
		if (tokenizer_encode(t, text, text_len < 4096 ? text_len : 4096, &options, &ids, &e) != STATUS_OK)
			break;
	}
	detokenizer_init(&d, t, false);
	for (size_t i = 0; i < ids.count; i++)
		detokenizer_push(&d, ids.ids[i], &back, &back_len, &capacity);
	detokenizer_finish(&d, &back, &back_len, &capacity);
	ASSERT(utf8_valid_prefix((uint8_t *)back, back_len) == back_len);
	free(back);
	free(ids.ids);
	tokenizer_destroy(&t);
	return 0;
}
