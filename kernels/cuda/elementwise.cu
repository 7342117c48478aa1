// What stands between matrix products of large batches. Small batches have these inside matvec.
#include "kernels/cuda/device.cuh"

template <typename T> __global__ void silu_mul_kernel(T *y, const T *gate, const T *up, int64_t n)
{
	int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) {
		float g = to_float(gate[i]);
		y[i] = from_float<T>(g / (1.0f + __expf(-g)) * to_float(up[i]));
	}
}

// Rows lie along x: a grid has room for 2^31 blocks there and for 65,535 along y.
template <typename T> __global__ void bias_kernel(T *y, const float *bias, int64_t cols, bool add)
{
	int64_t i = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
	T *to = y + blockIdx.x * cols + i;
	if (i < cols)
		*to = from_float<T>(add ? to_float(*to) + bias[i] : bias[i]);
}

// About normal, a pure function of seed and place.
template <typename T> __global__ void random_kernel(T *p, int64_t n, uint64_t seed)
{
	int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
	if (i >= n)
		return;
	uint64_t z = (uint64_t)i + (seed << 40) + UINT64_C(0x9e3779b97f4a7c15);
	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	z ^= z >> 31;
	float sum = 0;
	for (int k = 0; k < 4; k++)
		sum += (float)(z >> 16 * k & 0xffff) * 0x1p-16f - 0.5f;
	p[i] = from_float<T>(sum * 1.7320508f);
}

static unsigned blocks_of(int64_t n)
{
	return (unsigned)((n + 255) / 256);
}

void cuda_silu_mul(struct ops_context *c, void *y, const void *gate, const void *up, int64_t n)
{
	with_act(c, [&](auto t) {
		using T = decltype(t);
		silu_mul_kernel<T><<<blocks_of(n), 256, 0, c->stream>>>((T *)y, (const T *)gate, (const T *)up, n);
	});
	CUDA_LAUNCHED();
}

static void apply_bias(struct ops_context *c, void *y, bool y_float32, const float *bias, int n_rows, int64_t cols,
                       bool add)
{
	dim3 grid((unsigned)n_rows, blocks_of(cols));
	if (y_float32)
		bias_kernel<float><<<grid, 256, 0, c->stream>>>((float *)y, bias, cols, add);
	else
		with_act(c, [&](auto t) {
			using T = decltype(t);
			bias_kernel<T><<<grid, 256, 0, c->stream>>>((T *)y, bias, cols, add);
		});
	CUDA_LAUNCHED();
}

void cuda_fill_bias(struct ops_context *c, void *y, bool y_float32, const float *bias, int n_rows, int64_t cols)
{
	apply_bias(c, y, y_float32, bias, n_rows, cols, false);
}

void cuda_add_bias(struct ops_context *c, void *y, bool y_float32, const float *bias, int n_rows, int64_t cols)
{
	apply_bias(c, y, y_float32, bias, n_rows, cols, true);
}

void cuda_fill_random(struct ops_context *c, void *p, int64_t n, uint64_t seed)
{
	with_act(c, [&](auto t) {
		using T = decltype(t);
		random_kernel<T><<<blocks_of(n), 256, 0, c->stream>>>((T *)p, n, seed);
	});
	CUDA_LAUNCHED();
}
