// Quantised matrices times up to 8 rows: body of matvec_quant_*.cu. Whole numbers go through the tensor core, and the
// float32 sum of each 16 or 32 columns is scaled, so weights are as exact as in the file. A minimum multiplies the sum of
// x over its columns, which comes from a product with ones: it arrives in the very lanes that need it.
#include "kernels/cuda/matvec.cuh"
#include "kernels/cuda/quant.cuh"

template <typename T, typename Q>
__device__ inline void multiply_tile(float (&acc)[4], const quant_lane<Q> &l, const uint2 (&x)[4])
{
	const uint32_t ones = pack2<T>(1, 1);
	const int steps = Q::scales == SCALES_6K ? 1 : 2; // under one scale
#pragma unroll
	for (int j = 0; j < 4; j += steps) {
		float part[4] = {0, 0, 0, 0}, sum[4] = {0, 0, 0, 0}, scale[2], minimum[2];
#pragma unroll
		for (int i = j; i < j + steps; i++) {
			uint32_t a[4];
			quant_operands<T, Q>(l, i, a);
			mma<T>(part, a[0], a[1], a[2], a[3], x[i].x, x[i].y);
			if (Q::minimum)
				mma<T>(sum, ones, ones, ones, ones, x[i].x, x[i].y);
		}
		quant_scale<Q>(l, j, scale, minimum);
#pragma unroll
		for (int e = 0; e < 4; e++) {
			acc[e] = fmaf(scale[e / 2], part[e], acc[e]);
			if (Q::minimum)
				acc[e] = fmaf(minimum[e / 2], sum[e], acc[e]);
		}
	}
}

// Tiles in flight per warp. On an H200 1 and 4, and loading a step ahead, were slower by 5 to 50 %.
enum { QUANT_UNROLL = 2 };

template <typename T, typename Q>
__global__ __launch_bounds__(32 * MATVEC_WARPS, MATVEC_BLOCKS) void matvec_quant_kernel(const __grid_constant__ struct cuda_matvec m)
{
	struct matvec_place p = matvec_find(m);
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, k_tiles = (int)m.k_tiles;
	float acc[2][4] = {};
	const T *x = (const T *)m.x + g * m.cols + 4 * (lane % 4);
	int x_cols = g < m.n_rows ? (int)m.cols - 4 * (lane % 4) : 0; // columns of x from there on
#pragma unroll
	for (int i = 0; i < 2; i++) {
		if (i > 0 && !m.swiglu)
			break;
		const quant_row<Q> row(m.part[p.part + i].planes, p.tile, k_tiles, lane);
		for (int tile = warp * QUANT_UNROLL; tile < k_tiles; tile += MATVEC_WARPS * QUANT_UNROLL) {
			quant_lane<Q> l[QUANT_UNROLL];
			uint2 b[QUANT_UNROLL][4];
#pragma unroll
			for (int u = 0; u < QUANT_UNROLL; u++) {
				if (tile + u < k_tiles)
					row.load(l[u], tile + u);
#pragma unroll
				for (int j = 0; j < 4; j++) {
					int k = (tile + u) * CUDA_TILE_COLS + 16 * j;
					b[u][j] = k < x_cols ? *(const uint2 *)(x + k) : make_uint2(0, 0);
				}
			}
#pragma unroll
			for (int u = 0; u < QUANT_UNROLL; u++)
				if (tile + u < k_tiles)
					multiply_tile<T, Q>(acc[i], l[u], b[u]);
		}
	}
	matvec_finish<T>(m, p, acc);
}

template <typename T> static bool matvec_quant(struct ops_context *c, enum dtype weights, const struct cuda_matvec *m)
{
	bool found = with_quant(weights, [&](auto q) {
		matvec_quant_kernel<T, decltype(q)><<<matvec_blocks(m), 32 * MATVEC_WARPS, 0, c->stream>>>(*m);
	});
	CUDA_LAUNCHED();
	return found;
}
