// Looks rows of the embedding up, one block per row. A row of a quantised table is gathered from the tiles it shares
// with fifteen others: a lane takes its words and throws the other row's half away.
#include "kernels/cuda/quant.cuh"

template <typename A, typename W>
__global__ void embed_plain_kernel(A *out, const W *table, const int32_t *ids, int64_t cols)
{
	const W *from = table + (int64_t)ids[blockIdx.x] * cols;
	A *to = out + (int64_t)blockIdx.x * cols;
	for (int64_t i = threadIdx.x; i < cols; i += blockDim.x)
		to[i] = from_float<A>(to_float(from[i]));
}

template <typename A, typename Q>
__global__ void embed_quant_kernel(A *out, struct cuda_planes p, const int32_t *ids, int64_t cols, int64_t k_tiles)
{
	int id = ids[blockIdx.x], row = id % CUDA_TILE_ROWS, r = row / 8;
	int c = threadIdx.x % 4, lane = 4 * (row % 8) + c;
	const quant_row<Q> row_tile(p, id / CUDA_TILE_ROWS, k_tiles, lane);
	A *to = out + (int64_t)blockIdx.x * cols;
	for (int64_t tile = threadIdx.x / 4; tile < k_tiles; tile += blockDim.x / 4) {
		quant_lane<Q> l;
		row_tile.load(l, (int)tile);
#pragma unroll
		for (int j = 0; j < 4; j++) {
			uint32_t a[4];
			float scale[2], minimum[2];
			quant_operands<half, Q>(l, j, a);
			quant_scale<Q>(l, j, scale, minimum);
			float s = r ? scale[1] : scale[0], m = r ? minimum[1] : minimum[0];
			int64_t k = tile * CUDA_TILE_COLS + 16 * j + 4 * c;
			for (int i = 0; i < 4 && k < cols; i++)
				to[k + i] = from_float<A>(s * half_of(i < 2 ? (r ? a[1] : a[0]) : (r ? a[3] : a[2]), i % 2) + m);
		}
	}
}

void cuda_embed(struct ops_context *c, const struct embed_args *a)
{
	const struct weight *w = a->table;
	if (a->n_rows < 1)
		return;
	with_act(c, [&](auto t) {
		using A = decltype(t);
		bool quantised = with_quant(w->dtype, [&](auto q) {
			embed_quant_kernel<A, decltype(q)><<<a->n_rows, 128, 0, c->stream>>>((A *)a->out, w->planes, a->ids, w->cols,
			                                                                     w->k_tiles);
		});
		if (!quantised)
			with_kv(w->dtype, [&](auto k) {
				using W = decltype(k);
				embed_plain_kernel<A, W><<<a->n_rows, 256, 0, c->stream>>>((A *)a->out, (const W *)w->memory, a->ids,
				                                                           w->cols);
			});
	});
	CUDA_LAUNCHED();
}
