// The JSON files of a model folder. The first byte says which: config.json, generation_config.json or tokenizer.json.
#include <stdlib.h>

#include "common/model_parts.h"
#include "common/model_vocabulary.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct model_config config;
	struct model_generation generation;
	struct vocabulary_summary vocabulary;
	const struct model_arch *arch;
	struct error e;
	if (size == 0)
		return 0;
	const char *text = (const char *)data + 1;
	generation_init(&generation);
	switch (data[0] % 3) {
	case 0:
		if (config_from_json(text, size - 1, "fuzz config.json", &config, &arch, &generation, &e) == STATUS_OK) {
			ASSERT(config_check(&config, "fuzz config.json", &e) == STATUS_OK);
			for (int i = 0; i < arch->n_tensors; i++)
				ASSERT(model_arch_dim(&config, arch->tensors[i].rows) > 0 &&
				       model_arch_dim(&config, arch->tensors[i].cols) > 0);
		}
		break;
	case 1:
		generation_from_json(text, size - 1, "fuzz generation_config.json", &generation, &e);
		break;
	case 2:
		if (vocabulary_scan(text, size - 1, "fuzz tokenizer.json", &vocabulary, &e) == STATUS_OK) {
			ASSERT(vocabulary.size > 0);
			vocabulary_find_added(&vocabulary, "<|eos|>");
		}
		break;
	}
	return 0;
}
