// Matrices of the activations' own 16-bit type times up to 8 rows. A lane reads 16 bytes of row g and of row g+8 at the
// same columns, and of row g of x: two steps of m16n8k16, whose columns are taken in the order in which they lie.
#include "kernels/cuda/matvec.cuh"

// 8 loads of 16 bytes in flight per lane, 24 warps per multiprocessor. On an H200, gate and up of 14336 x 4096 each in
// 72 us; loading a step ahead with 16 warps took 71, blocks of 4 warps with 16 loads 70, and both were slower on others.
enum { UNROLL = 4, STRIDE = 32 * UNROLL };

struct step {
	uint4 a0[UNROLL], a1[UNROLL], b[UNROLL];
};

template <typename T>
__device__ inline void load_step(struct step &s, const T *w0, const T *w1, const T *x, bool has_x, int k, int cols)
{
#pragma unroll
	for (int u = 0; u < UNROLL; u++) {
		bool inside = k + 32 * u < cols;
		s.a0[u] = inside ? load_stream(w0 + k + 32 * u) : zero4();
		s.a1[u] = inside ? load_stream(w1 + k + 32 * u) : zero4();
		s.b[u] = inside && has_x ? *(const uint4 *)(x + k + 32 * u) : zero4();
	}
}

template <typename T> __device__ inline void multiply_step(float (&acc)[4], const struct step &s)
{
#pragma unroll
	for (int u = 0; u < UNROLL; u++) {
		mma<T>(acc, s.a0[u].x, s.a1[u].x, s.a0[u].y, s.a1[u].y, s.b[u].x, s.b[u].y);
		mma<T>(acc, s.a0[u].z, s.a1[u].z, s.a0[u].w, s.a1[u].w, s.b[u].z, s.b[u].w);
	}
}

template <typename T>
__global__ __launch_bounds__(32 * MATVEC_WARPS, MATVEC_BLOCKS) void matvec_kernel(const __grid_constant__ struct cuda_matvec m)
{
	struct matvec_place p = matvec_find(m);
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	int cols = (int)m.cols;
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
		// The warp stays together, whatever its lanes have to read.
		for (int k = warp * STRIDE; k < cols; k += MATVEC_WARPS * STRIDE) {
			struct step s;
			load_step(s, w0, w1, x, has_x, k + 8 * c, cols);
			multiply_step<T>(acc[i], s);
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
