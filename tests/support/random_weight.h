// Random matrices in the layouts of model files, and random activations; fixed seeds, the same everywhere.
#ifndef STAGECOACH_TESTS_RANDOM_WEIGHT_H
#define STAGECOACH_TESTS_RANDOM_WEIGHT_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/half.h"
#include "common/dtype.h"
#include "common/status.h"

static inline uint64_t random_next(uint64_t *s)
{
	uint64_t z = *s += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}
static inline float random_float(uint64_t *s) // -1 to 1
{
	return (float)(int32_t)(random_next(s) >> 32) / 2147483648.0f;
}
static inline void put_half(uint8_t *p, float f)
{
	uint16_t h = half_from_float(f);
	memcpy(p, &h, 2);
}

// rows x cols of type t; any bits are valid quants, scales are made sane. free() it.
static inline uint8_t *random_weight(enum dtype t, int64_t rows, int64_t cols, uint64_t seed)
{
	const struct dtype_info *info = dtype_info(t);
	int64_t bytes = rows * dtype_row_bytes(t, cols), n = rows * cols;
	uint8_t *w = xmalloc((unsigned long)bytes);
	if (info->block_elements == 1) {
		for (int64_t i = 0; i < n; i++) {
			float f = random_float(&seed);
			uint32_t u;
			memcpy(&u, &f, 4);
			uint16_t b = (uint16_t)(u >> 16);
			if (t == DTYPE_F32)
				memcpy(w + 4 * i, &f, 4);
			else if (t == DTYPE_BF16)
				memcpy(w + 2 * i, &b, 2);
			else
				put_half(w + 2 * i, f);
		}
		return w;
	}
	for (int64_t i = 0; i < bytes; i++)
		w[i] = (uint8_t)(random_next(&seed) >> 56);
	for (uint8_t *p = w; p < w + bytes; p += info->block_bytes) {
		float d = 0.01f + 0.02f * random_float(&seed), m = 0.1f * random_float(&seed);
		put_half(t == DTYPE_Q6_K ? p + 208 : p, t == DTYPE_Q6_K ? d / 30 : d);
		if (t == DTYPE_Q4_1 || t == DTYPE_Q5_1)
			put_half(p + 2, m);
		else if (t == DTYPE_Q4_K || t == DTYPE_Q5_K)
			put_half(p + 2, m / 20);
	}
	return w;
}

#endif
