// Cosines and sines for RoPE, made once at load.
#ifndef STAGECOACH_KERNELS_ROPE_TABLE_H
#define STAGECOACH_KERNELS_ROPE_TABLE_H

#include <stdint.h>

#include "common/model.h"

struct rope_table_options {
	int rope_dim;          // rotated elements of a head, even
	int64_t max_position;  // positions 0 .. max_position - 1
	float theta;
	enum rope_scaling scaling;
	float factor;                             // LINEAR and LLAMA3
	float low_freq_factor, high_freq_factor;  // LLAMA3
	int original_context;                     // LLAMA3
	const float *factors;  // [rope_dim / 2] divisors of the frequencies (GGUF rope_freqs), or NULL
};

// Writes out[rope_dim / 2]: the angle per position of each pair, in radians. Source: transformers,
// modeling_rope_utils.py; every step in float32 and in its order, because at position 8,000 one unit in the last place
// of a frequency is 5e-4 radians.
void rope_frequencies(float *out, const struct rope_table_options *);
// Writes out[max_position][rope_dim / 2][2]: cosine and sine of float32(position * frequency).
void rope_table(float *out, const struct rope_table_options *);

#endif
