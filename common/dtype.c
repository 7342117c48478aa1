// The table of element types; see dtype.h. Block sizes follow the GGUF specification.
#include "common/dtype.h"

#include <stddef.h>
#include <string.h>

static const struct dtype_info table[DTYPE_COUNT] = {
	[DTYPE_F32] = {"float32", 1, 4, 0, "F32"},     [DTYPE_F16] = {"float16", 1, 2, 1, "F16"},
	[DTYPE_BF16] = {"bfloat16", 1, 2, 30, "BF16"}, [DTYPE_Q4_0] = {"q4_0", 32, 18, 2, NULL},
	[DTYPE_Q4_1] = {"q4_1", 32, 20, 3, NULL},      [DTYPE_Q5_0] = {"q5_0", 32, 22, 6, NULL},
	[DTYPE_Q5_1] = {"q5_1", 32, 24, 7, NULL},      [DTYPE_Q8_0] = {"q8_0", 32, 34, 8, NULL},
	[DTYPE_Q4_K] = {"q4_k", 256, 144, 12, NULL},   [DTYPE_Q5_K] = {"q5_k", 256, 176, 13, NULL},
	[DTYPE_Q6_K] = {"q6_k", 256, 210, 14, NULL},   [DTYPE_FP8] = {"fp8", 1, 1, -1, NULL},
};

const struct dtype_info *dtype_info(enum dtype t)
{
	return &table[t];
}

bool dtype_from_gguf(uint32_t id, enum dtype *out)
{
	for (int i = 0; i < DTYPE_COUNT; i++)
		if (table[i].gguf_id >= 0 && (uint32_t)table[i].gguf_id == id) {
			*out = (enum dtype)i;
			return true;
		}
	return false;
}

bool dtype_from_safetensors(const char *name, enum dtype *out)
{
	for (int i = 0; i < DTYPE_COUNT; i++)
		if (table[i].safetensors && !strcmp(table[i].safetensors, name)) {
			*out = (enum dtype)i;
			return true;
		}
	return false;
}

int64_t dtype_row_bytes(enum dtype t, int64_t elements)
{
	int64_t bytes;
	if (elements < 0 || elements % table[t].block_elements)
		return -1;
	if (__builtin_mul_overflow(elements / table[t].block_elements, (int64_t)table[t].block_bytes, &bytes))
		return -1;
	return bytes;
}
