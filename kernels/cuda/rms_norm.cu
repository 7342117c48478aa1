// RMS norm, one block per row. The row is read twice, the second time from a cache.
#include "kernels/cuda/device.cuh"

template <typename T>
__global__ void rms_norm_kernel(T *out, const T *x, const float *weight, const int32_t *row_index, int cols, float eps)
{
	const T *from = x + (int64_t)(row_index ? row_index[blockIdx.x] : blockIdx.x) * cols;
	T *to = out + (int64_t)blockIdx.x * cols;
	float sum = 0;
	for (int i = threadIdx.x; i < cols; i += blockDim.x) {
		float v = to_float(from[i]);
		sum += v * v;
	}
	float scale = rsqrtf(block_sum(sum) / (float)cols + eps);
	for (int i = threadIdx.x; i < cols; i += blockDim.x)
		to[i] = from_float<T>(to_float(from[i]) * scale * weight[i]);
}

void cuda_rms_norm(struct ops_context *c, const struct rms_norm_args *a)
{
	if (a->n_rows < 1)
		return;
	int threads = a->cols >= 4096 ? 512 : 256;
	with_act(c, [&](auto t) {
		using T = decltype(t);
		rms_norm_kernel<T><<<a->n_rows, threads, 0, c->stream>>>((T *)a->out, (const T *)a->x, a->weight, a->row_index,
		                                                         a->cols, a->eps);
	});
	CUDA_LAUNCHED();
}
