// Matrices of the activations' own 16-bit type times up to 8 rows. A lane reads 16 bytes of row g and of row g+8 at the
// same columns, and of row g of x: two steps of m16n8k16, whose columns are taken in the order in which they lie.
#include "kernels/cuda/matvec.cuh"

enum { UNROLL = 4, STRIDE = 32 * UNROLL }; // 8 loads of 16 bytes in flight per lane

template <typename T> __global__ __launch_bounds__(32 * MATVEC_WARPS) void matvec_kernel(const __grid_constant__ struct cuda_matvec m)
{
	struct matvec_place p = matvec_find(m);
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	float acc[2][4] = {};
	const T *x = (const T *)m.x + g * m.cols;
	bool has_x = g < m.n_rows;
#pragma unroll
	for (int i = 0; i < 2; i++) {
		if (i > 0 && !m.swiglu)
			break;
		const struct cuda_matvec_part &part = m.part[p.part + i];
		int64_t row = p.tile * CUDA_TILE_ROWS + g, last = part.rows - 1;
		const T *w0 = (const T *)part.plain + (row < last ? row : last) * m.cols;
		const T *w1 = (const T *)part.plain + (row + 8 < last ? row + 8 : last) * m.cols;
		for (int64_t k = warp * STRIDE + 8 * c; k < m.cols; k += MATVEC_WARPS * STRIDE) {
			uint4 a0[UNROLL], a1[UNROLL], b[UNROLL];
#pragma unroll
			for (int u = 0; u < UNROLL; u++) {
				bool inside = k + 32 * u < m.cols;
				a0[u] = inside ? load_stream(w0 + k + 32 * u) : zero4();
				a1[u] = inside ? load_stream(w1 + k + 32 * u) : zero4();
				b[u] = inside && has_x ? *(const uint4 *)(x + k + 32 * u) : zero4();
			}
#pragma unroll
			for (int u = 0; u < UNROLL; u++) {
				mma<T>(acc[i], a0[u].x, a1[u].x, a0[u].y, a1[u].y, b[u].x, b[u].y);
				mma<T>(acc[i], a0[u].z, a1[u].z, a0[u].w, a1[u].w, b[u].z, b[u].w);
			}
		}
	}
	matvec_finish<T>(m, p, acc);
}

bool cuda_matvec_plain(struct ops_context *c, enum dtype weights, const struct cuda_matvec *m)
{
	if (weights != c->act || c->act == DTYPE_F32 || m->cols % 8)
		return false;
	unsigned blocks = matvec_blocks(m);
	if (c->act == DTYPE_F16)
		matvec_kernel<half><<<blocks, 32 * MATVEC_WARPS, 0, c->stream>>>(*m);
	else
		matvec_kernel<bfloat><<<blocks, 32 * MATVEC_WARPS, 0, c->stream>>>(*m);
	CUDA_LAUNCHED();
	return true;
}
