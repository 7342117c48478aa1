// Attention for any types and shapes, the tensor cores' fallback and yardstick: one warp per row and head walks the
// tokens one after the other with a running maximum. Also the last step of split attention.
#include "kernels/cuda/attention.cuh"

enum { WARPS = 4, MAX_PER_LANE = 16 }; // head sizes up to 512

template <typename T, typename K> __global__ void attention_any_kernel(struct attention_args a)
{
	int lane = threadIdx.x % 32, row = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / 32, d = a.kv.head_dim;
	if (head >= a.n_heads)
		return;
	int seq = attention_sequence(a, row);
	int position = a.kv_len[seq] - (a.first_row[seq + 1] - row);
	int from = a.window && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
	int kv_head = head / (a.n_heads / a.kv.n_kv_heads), bs = a.kv.block_size;
	const int32_t *table = a.block_table + (int64_t)seq * a.max_blocks;
	const T *q = (const T *)a.q + ((int64_t)row * a.n_heads + head) * d;
	float query[MAX_PER_LANE], out[MAX_PER_LANE], max = -INFINITY, sum = 0;
#pragma unroll
	for (int i = 0; i < MAX_PER_LANE; i++) {
		query[i] = lane + 32 * i < d ? to_float(q[lane + 32 * i]) * a.scale : 0;
		out[i] = 0;
	}
	for (int t = from; t <= position; t++) {
		int64_t at = (((int64_t)table[t / bs] * a.kv.n_kv_heads + kv_head) * bs + t % bs) * d;
		float score = 0;
#pragma unroll
		for (int i = 0; i < MAX_PER_LANE; i++)
			if (lane + 32 * i < d)
				score += query[i] * to_float(((const K *)a.kv.k)[at + lane + 32 * i]);
		score = warp_sum(score);
		float new_max = fmaxf(max, score), keep = expf(max - new_max), p = expf(score - new_max);
		sum = sum * keep + p;
		max = new_max;
#pragma unroll
		for (int i = 0; i < MAX_PER_LANE; i++)
			if (lane + 32 * i < d)
				out[i] = out[i] * keep + p * to_float(((const K *)a.kv.v)[at + lane + 32 * i]);
	}
	T *to = (T *)a.out + ((int64_t)row * a.n_heads + head) * d;
#pragma unroll
	for (int i = 0; i < MAX_PER_LANE; i++)
		if (lane + 32 * i < d)
			to[lane + 32 * i] = from_float<T>(out[i] / sum);
}

void cuda_attention_any(struct ops_context *c, const struct attention_args *a)
{
	ASSERT(a->kv.head_dim <= 32 * MAX_PER_LANE);
	dim3 grid((unsigned)a->n_rows, (unsigned)((a->n_heads + WARPS - 1) / WARPS));
	with_act(c, [&](auto t) {
		with_kv(a->kv.dtype, [&](auto k) {
			attention_any_kernel<decltype(t), decltype(k)><<<grid, 32 * WARPS, 0, c->stream>>>(*a);
		});
	});
	CUDA_LAUNCHED();
}
