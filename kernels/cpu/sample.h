// The passes over a vocabulary that sampling is made of. Private to sample*.c; sample.c says what they are for,
// sample_kernel.h computes them for each instruction set.
#ifndef STAGECOACH_KERNELS_CPU_SAMPLE_H
#define STAGECOACH_KERNELS_CPU_SAMPLE_H

#include "kernels/cpu/cpu.h"

enum { SAMPLE_CHUNK = 1024 }; // sums run per chunk, so that their order is fixed

struct sample_kernel {
	// max[chunk] of x[n]; NaN is passed over, -infinity where nothing is left.
	void (*chunk_max)(float *max, const float *x, int n);
	// sum[chunk] = sum of exp(x - shift); NaN counts as -infinity.
	void (*chunk_sum_exp)(float *sum, const float *x, int n, float shift);
	// w = exp((x - max) / temperature), 0 where that is below `least` or x is NaN; sum[chunk] of w.
	void (*weigh)(float *w, float *sum, const float *x, int n, float max, float temperature, float least);
	// Writes the ids, ascending, with w >= least to list[n] and returns their number.
	int (*collect)(int32_t *list, const float *w, int n, float least);
};

extern const struct sample_kernel sample_kernel_portable, sample_kernel_avx2, sample_kernel_avx512;

#endif
