// One tile of attention: some query vectors that share a kv head, against one block of 64 positions. Private to
// attention*.c; attention.c says how the work is cut, attention_kernel.h does the arithmetic for each instruction set.
#ifndef STAGECOACH_KERNELS_CPU_ATTENTION_H
#define STAGECOACH_KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/cpu.h"

enum {
	ATTENTION_BLOCK = 64,  // positions per step of the online softmax, counted from position 0
	ATTENTION_SPLIT = 256, // positions per partial result
	ATTENTION_QUERIES = 48, // query vectors of a tile: rows x heads
};

// The running softmax of one query: sum and acc are relative to exp(max).
struct attention_tile {
	int dim;                // head_dim
	int padded;             // head_dim rounded up to 16; the padding of q is zero
	float *q;               // [ATTENTION_QUERIES][padded], scaled
	float *k;               // [padded][ATTENTION_BLOCK], transposed
	float *v;               // [ATTENTION_BLOCK][padded]
	float *p;               // [ATTENTION_QUERIES][ATTENTION_BLOCK]
	float *acc;             // [ATTENTION_QUERIES][padded]
	float max[ATTENTION_QUERIES], sum[ATTENTION_QUERIES];
	int16_t from[ATTENTION_QUERIES], to[ATTENTION_QUERIES]; // positions of the block that each query sees
	const void *k_row[ATTENTION_BLOCK], *v_row[ATTENTION_BLOCK]; // [dim] of the cache's type; valid within [begin, end)
	int begin, end;         // positions of the block that some query sees
};

struct attention_kernel {
	// Unpacks k_row and v_row [begin, end) into k and v, for n queries.
	void (*load)(struct attention_tile *, enum dtype, int n);
	// Queries [first, first + n), each of which sees a position of the block: folds the block into max, sum and acc.
	void (*fold)(struct attention_tile *, enum dtype, int first, int n);
	// Adds the partial result (max, sum, acc[padded]) to a total; the first one is copied.
	void (*merge)(float *total_max, float *total_sum, float *total_acc, const float *max, const float *sum,
	              const float *acc, int padded, bool first);
	// out[dim] = acc / sum
	void (*finish)(float *out, const float *acc, float sum, int dim);
};

extern const struct attention_kernel attention_kernel_portable, attention_kernel_avx2, attention_kernel_avx512;

#endif
