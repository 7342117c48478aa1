// Where rows, heads and splits lie; shared by the attention kernels.
//
// The query heads that share a KV head, and neighbouring rows of a sequence, are packed as rows of tensor-core tiles of
// 16: packed row i of a sequence and KV head is row i / group, head kv_head * group + i % group. A sequence is "short" if
// its packed rows fit one tile (decode), or it has one row only; short ones are split over KV, the others over rows.
#ifndef STAGECOACH_KERNELS_ATTENTION_CUH
#define STAGECOACH_KERNELS_ATTENTION_CUH

#include "kernels/cuda/device.cuh"

static const int attention_tile = 16; // rows, and tokens

// The sequence that owns a row.
static __device__ inline int attention_sequence(const struct attention_args &a, int row)
{
	int low = 0, high = a.n_seqs; // first_row[low] <= row < first_row[high]
	while (high - low > 1) {
		int middle = (low + high) / 2;
		if (a.first_row[middle] <= row)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static __device__ inline bool attention_is_short(int n, int group)
{
	return n == 1 || n * group <= attention_tile;
}

// First token that any row of a sequence sees.
static __device__ inline int attention_from(const struct attention_args &a, int seq, int n)
{
	int from = a.kv_len[seq] - n - a.window + 1;
	return a.window && from > 0 ? from : 0;
}

// Tokens per split, whole steps of a block of 4 warps.
static __device__ inline int attention_chunk(int tokens, int n_splits)
{
	int step = 4 * attention_tile;
	return ((tokens + n_splits - 1) / n_splits + step - 1) / step * step;
}

#endif
