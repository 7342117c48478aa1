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

template <typename T, typename Q>
__global__ __launch_bounds__(32 * MATVEC_WARPS) void matvec_quant_kernel(const __grid_constant__ struct cuda_matvec m)
{
	const int unroll = 2;
	struct matvec_place p = matvec_find(m);
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	float acc[2][4] = {};
	const T *x = (const T *)m.x + g * m.cols;
	bool has_x = g < m.n_rows;
#pragma unroll
	for (int i = 0; i < 2; i++) {
		if (i > 0 && !m.swiglu)
			break;
		const struct cuda_planes &planes = m.part[p.part + i].planes;
		for (int64_t tile = warp * unroll; tile < m.k_tiles; tile += MATVEC_WARPS * unroll) {
			quant_lane<Q> l[unroll];
			uint2 b[unroll][4];
#pragma unroll
			for (int u = 0; u < unroll; u++) {
				if (tile + u < m.k_tiles)
					quant_load<Q>(l[u], planes, p.tile, m.k_tiles, tile + u, lane);
#pragma unroll
				for (int j = 0; j < 4; j++) {
					int64_t k = (tile + u) * CUDA_TILE_COLS + 16 * j + 4 * c;
					b[u][j] = has_x && k < m.cols ? *(const uint2 *)(x + k) : make_uint2(0, 0);
				}
			}
#pragma unroll
			for (int u = 0; u < unroll; u++)
				if (tile + u < m.k_tiles)
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
