// Element types of tensors, activations and KV. A quantised type is described by its block: so many elements in so many
// bytes, exactly as GGUF lays them out. The table is the only place that knows sizes.
#ifndef STAGECOACH_COMMON_DTYPE_H
#define STAGECOACH_COMMON_DTYPE_H

#include <stdbool.h>
#include <stdint.h>

enum dtype {
	DTYPE_F32,
	DTYPE_F16,
	DTYPE_BF16,
	DTYPE_Q4_0,
	DTYPE_Q4_1,
	DTYPE_Q5_0,
	DTYPE_Q5_1,
	DTYPE_Q8_0,
	DTYPE_Q4_K,
	DTYPE_Q5_K,
	DTYPE_Q6_K,
	DTYPE_FP8, // e4m3, KV only
	DTYPE_COUNT,
};

struct dtype_info {
	const char *name;      // "q4_1"
	int block_elements;    // 1 for plain types
	int block_bytes;
	int gguf_id;           // ggml type number, -1 if GGUF has none
	const char *safetensors; // "BF16", or NULL
};

const struct dtype_info *dtype_info(enum dtype t);
bool dtype_from_gguf(uint32_t id, enum dtype *out);
bool dtype_from_safetensors(const char *name, enum dtype *out);
// Bytes of a row of `elements` (a multiple of the block); -1 if it is not a multiple or overflows.
int64_t dtype_row_bytes(enum dtype t, int64_t elements);

#endif
