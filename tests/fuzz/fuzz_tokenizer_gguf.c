// A GGUF header with a vocabulary as untrusted input, and its bytes again as a text for that vocabulary.
#include <stdlib.h>

#include "coordinator/tokenizer_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct gguf *g;
	struct tokenizer *t;
	struct error e = {""};
	if (gguf_parse(&g, data, size, "input", &e) != STATUS_OK)
		return 0;
	if (tokenizer_from_gguf(&t, g, &e) == STATUS_OK) {
		struct token_list ids = {0};
		struct encode_options options = {.add_special = true, .parse_special = true};
		(void)tokenizer_encode(t, (const char *)data, size < 4096 ? size : 4096, &options, &ids, &e);
		free(ids.ids);
		tokenizer_destroy(&t);
	}
	gguf_destroy(&g);
	return 0;
}
