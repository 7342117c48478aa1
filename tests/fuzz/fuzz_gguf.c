// A GGUF file of any content: parsed, all its arrays unpacked, and read as a model's configuration.
#include <stdlib.h>
#include <string.h>

#include "common/model_parts.h"

static void unpack(const struct gguf *g, const struct gguf_kv *kv)
{
	char key[GGUF_MAX_KEY + 1];
	struct gguf_string *strings = NULL, one;
	int32_t *ints = NULL;
	float *floats = NULL;
	uint64_t n;
	volatile char last = 0;
	memcpy(key, kv->key.data, kv->key.len);
	key[kv->key.len] = 0;
	if (gguf_get_string_array(g, key, &strings, &n, NULL) == STATUS_OK)
		for (uint64_t i = 0; i < n; i++)
			last = strings[i].len ? strings[i].data[strings[i].len - 1] : 0;
	gguf_get_i32_array(g, key, &ints, &n, NULL);
	gguf_get_f32_array(g, key, &floats, &n, NULL);
	if (gguf_get_string(g, key, &one, NULL) == STATUS_OK && one.len)
		last = one.data[one.len - 1];
	(void)last;
	free(strings);
	free(ints);
	free(floats);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct gguf *g;
	struct error e;
	struct model_config config;
	struct model_generation generation;
	const struct model_arch *arch;
	if (gguf_parse(&g, data, size, "fuzz.gguf", &e) != STATUS_OK)
		return 0;
	for (uint64_t i = 0; i < gguf_kv_count(g); i++)
		unpack(g, gguf_kv_at(g, i));
	for (uint64_t i = 0; i < gguf_tensor_count(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		volatile uint8_t last = gguf_data(g)[t->offset + (uint64_t)t->bytes - 1];
		(void)last;
	}
	if (config_from_gguf(g, &config, &arch, &e) == STATUS_OK) {
		ASSERT(config_check(&config, "fuzz.gguf", &e) == STATUS_OK);
		generation_init(&generation);
		generation_from_gguf(g, &generation, &e);
	}
	gguf_destroy(&g);
	return 0;
}
