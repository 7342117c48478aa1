// Reads rows as they lie in a model file, block by block. Every other layout (weight.h) and the reference of the tests
// come from here. Layouts follow the GGUF specification.
#ifndef STAGECOACH_KERNELS_DEQUANT_H
#define STAGECOACH_KERNELS_DEQUANT_H

#include <stdint.h>

#include "common/dtype.h"

// 32 weights of a quantised row, w[i] = scale[i / 16] * (q[i] - offset) + minimum. q is unsigned for every type; offset
// depends on the type only (quant_offset). The raw fields are what the file holds, for layouts that keep them.
struct quant_block {
	uint8_t q[32];
	float scale[2], minimum;
	uint16_t raw_d, raw_m;  // float16; of the 256-element block for K types
	uint8_t raw_scale[2];   // K types only; Q6_K has two, signed
	uint8_t raw_minimum;    // Q4_K and Q5_K
};

int quant_offset(enum dtype); // 8, 16, 32 or 128; 0 for types with a minimum
// Block `index` (of 32 elements) of the row at `row`. The type must be quantised.
void quant_read(enum dtype, const void *row, int64_t index, struct quant_block *out);
// Row of n elements (a multiple of the type's block) to float32.
void dequant_row(enum dtype, const void *row, int64_t n, float *out);

#endif
