// The frame of all matrix-vector kernels for 1 to 8 rows of x: a block of 8 warps owns 16 rows of the matrix, the warps
// take turns along the columns, and their sums meet in shared memory in one fixed order. The matrix is the A operand of
// m16n8k16 and x, up to 8 rows of it, is B: a matrix is read once for all rows, straight into registers.
//
// The order of a sum does not depend on n_rows or on other rows.
#ifndef STAGECOACH_KERNELS_MATVEC_CUH
#define STAGECOACH_KERNELS_MATVEC_CUH

#include "kernels/cuda/device.cuh"

enum { MATVEC_WARPS = 8, MATVEC_BLOCKS = 3 }; // per multiprocessor, a limit on registers

// Rows of which part and tile this block computes.
struct matvec_place {
	int part;
	int64_t tile;
};

static __device__ inline struct matvec_place matvec_find(const struct cuda_matvec &m)
{
	struct matvec_place p = {0, blockIdx.x};
	while (p.part + 1 < m.n_parts && !m.swiglu) {
		int64_t tiles = (m.part[p.part].rows + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS;
		if (p.tile < tiles)
			break;
		p.tile -= tiles;
		p.part++;
	}
	return p;
}

static inline unsigned matvec_blocks(const struct cuda_matvec *m)
{
	int64_t n = 0;
	for (int i = 0; i < (m->swiglu ? 1 : m->n_parts); i++)
		n += (m->part[i].rows + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS;
	return (unsigned)n;
}

// Adds the warps' sums and writes y. acc[1] is the up half of a gated pair.
template <typename T>
__device__ inline void matvec_finish(const struct cuda_matvec &m, struct matvec_place p, float (&acc)[2][4])
{
	__shared__ float sums[2][MATVEC_WARPS][CUDA_TILE_ROWS * 8];
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	int mats = m.swiglu ? 2 : 1;
#pragma unroll
	for (int i = 0; i < 2; i++)
		if (i < mats)
#pragma unroll
			for (int e = 0; e < 4; e++)
				sums[i][warp][(2 * c + e % 2) * CUDA_TILE_ROWS + g + 8 * (e / 2)] = acc[i][e];
	__syncthreads();
	int row = threadIdx.x % CUDA_TILE_ROWS, col = threadIdx.x / CUDA_TILE_ROWS;
	const struct cuda_matvec_part &part = m.part[p.part];
	int64_t out = p.tile * CUDA_TILE_ROWS + row;
	if (col >= m.n_rows || out >= part.rows)
		return;
	float v[2] = {0, 0};
	for (int i = 0; i < mats; i++) {
		for (int w = 0; w < MATVEC_WARPS; w++)
			v[i] += sums[i][w][threadIdx.x];
		const float *bias = m.part[p.part + i].bias;
		if (bias)
			v[i] += bias[out];
	}
	float y = m.swiglu ? v[0] / (1.0f + __expf(-v[0])) * v[1] : v[0];
	int64_t at = col * part.rows + out;
	if (m.y_float32) {
		float *to = (float *)part.y + at;
		*to = m.add ? *to + y : y;
	} else {
		T *to = (T *)part.y + at;
		*to = from_float<T>(m.add ? to_float(*to) + y : y);
	}
}

#endif
