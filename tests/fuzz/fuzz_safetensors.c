// A safetensors file of any content, and the same bytes as an index.
#include "common/safetensors.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct safetensors *s;
	struct safetensors_index *x;
	struct error e;
	if (safetensors_parse(&s, data, size, "fuzz.safetensors", &e) == STATUS_OK) {
		uint64_t end = 0;
		for (size_t i = 0; i < safetensors_count(s); i++) {
			const struct safetensors_tensor *t = safetensors_at(s, i);
			ASSERT(t->offset >= end && t->bytes > 0 && t->offset + (uint64_t)t->bytes <= size);
			end = t->offset + (uint64_t)t->bytes;
		}
		safetensors_destroy(&s);
	}
	if (safetensors_index_parse(&x, (const char *)data, size, "fuzz.index.json", &e) == STATUS_OK) {
		const char *tensor, *file;
		for (size_t i = 0; i < safetensors_index_count(x); i++) {
			safetensors_index_at(x, i, &tensor, &file);
			ASSERT(!strchr(file, '/') && file[0] != '.');
		}
		ASSERT(safetensors_index_file_count(x) >= 1);
		safetensors_index_destroy(&x);
	}
	return 0;
}
