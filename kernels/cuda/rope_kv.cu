// Q and K norm, RoPE and the write of K and V into the cache, in one launch: one warp per head of a row. A head lies in
// shared memory as float32 between the steps, so that it is rounded once.
#include "kernels/cuda/device.cuh"

enum { WARPS = 4, MAX_DIM = 512 };

template <typename T, typename K> __global__ void rope_kv_kernel(struct rope_kv_args a)
{
	__shared__ float heads[WARPS][MAX_DIM];
	int lane = threadIdx.x % 32, row = blockIdx.x, d = a.kv.head_dim, n_kv = a.kv.n_kv_heads;
	int head = blockIdx.y * WARPS + threadIdx.x / 32;
	if (head >= a.n_heads + 2 * n_kv)
		return;
	float *x = heads[threadIdx.x / 32];
	bool is_q = head < a.n_heads, is_k = !is_q && head < a.n_heads + n_kv;
	int kv_head = (head - a.n_heads) % n_kv;
	T *q = (T *)a.q + ((int64_t)row * a.n_heads + head) * d;
	const T *from = is_q ? q : (is_k ? (const T *)a.k : (const T *)a.v) + ((int64_t)row * n_kv + kv_head) * d;
	const float *norm = is_q ? a.q_norm : is_k ? a.k_norm : NULL;
	float sum = 0;
	for (int i = lane; i < d; i += 32) {
		x[i] = to_float(from[i]);
		sum += x[i] * x[i];
	}
	if (norm) {
		float scale = rsqrtf(warp_sum(sum) / (float)d + a.norm_eps);
		for (int i = lane; i < d; i += 32)
			x[i] *= scale * norm[i];
	}
	__syncwarp();
	if (is_q || is_k) {
		int half_dim = a.rope_dim / 2;
		const float2 *cos_sin = (const float2 *)a.cos_sin + (int64_t)a.position[row] * half_dim;
		for (int i = lane; i < half_dim; i += 32) {
			int lower = a.interleaved ? 2 * i : i, upper = a.interleaved ? 2 * i + 1 : i + half_dim;
			float2 cs = cos_sin[i];
			float u = x[lower], v = x[upper];
			x[lower] = u * cs.x - v * cs.y;
			x[upper] = v * cs.x + u * cs.y;
		}
		__syncwarp();
	}
	if (is_q) {
		for (int i = lane; i < d; i += 32)
			q[i] = from_float<T>(x[i]);
		return;
	}
	int64_t slot = a.slot[row], block = slot / a.kv.block_size;
	int64_t at = ((block * n_kv + kv_head) * a.kv.block_size + slot % a.kv.block_size) * d;
	K *to = (K *)(is_k ? a.kv.k : a.kv.v) + at;
	for (int i = lane; i < d; i += 32)
		to[i] = from_float<K>(x[i]);
}

void cuda_rope_kv(struct ops_context *c, const struct rope_kv_args *a)
{
	if (a->n_rows < 1)
		return;
	ASSERT(a->kv.head_dim <= MAX_DIM && a->rope_dim <= a->kv.head_dim && a->rope_dim % 2 == 0);
	int heads = a->n_heads + 2 * a->kv.n_kv_heads;
	dim3 grid((unsigned)a->n_rows, (unsigned)((heads + WARPS - 1) / WARPS));
	with_act(c, [&](auto t) {
		with_kv(a->kv.dtype, [&](auto k) {
			rope_kv_kernel<decltype(t), decltype(k)><<<grid, 32 * WARPS, 0, c->stream>>>(*a);
		});
	});
	CUDA_LAUNCHED();
}
