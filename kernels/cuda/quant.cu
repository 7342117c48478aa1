// Quantised matrices: from the file's layout to tiles at load, and from tiles to plain rows for large batches and for
// looked-up embeddings. The file's layouts are those of GGUF; the CPU's dequant.c is the specification.
#include "kernels/cuda/quant.cuh"

static __device__ uint16_t load_u16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static __device__ void read_k_scale(const uint8_t *s, int i, int *scale, int *minimum)
{
	if (i < 4) {
		*scale = s[i] & 63;
		*minimum = s[i + 4] & 63;
	} else {
		*scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
		*minimum = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
	}
}

// The stored quant of column k of a row, for Q8_0 as its byte.
template <enum dtype T> __device__ int read_quant(const uint8_t *row, int64_t k, int block_bytes)
{
	if (T == DTYPE_Q4_K || T == DTYPE_Q5_K) {
		const uint8_t *p = row + k / 256 * block_bytes;
		int sub = (int)(k % 256) / 32, i = (int)(k % 32);
		const uint8_t *high = p + 16, *low = (T == DTYPE_Q5_K ? high + 32 : high) + 32 * (sub / 2);
		int q = low[i] >> 4 * (sub & 1) & 15;
		return T == DTYPE_Q5_K ? q | (high[i] >> sub & 1) << 4 : q;
	}
	if (T == DTYPE_Q6_K) {
		const uint8_t *p = row + k / 256 * block_bytes;
		int part = (int)(k % 256) / 32, i = (int)(k % 32), quarter = part % 4;
		const uint8_t *low = p + 64 * (part / 4) + 32 * (quarter & 1), *high = p + 128 + 32 * (part / 4);
		return (low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4;
	}
	const uint8_t *p = row + k / 32 * block_bytes + (T == DTYPE_Q4_1 || T == DTYPE_Q5_1 ? 4 : 2);
	int i = (int)(k % 32);
	if (T == DTYPE_Q8_0)
		return p[i];
	int fifth = 0;
	if (T == DTYPE_Q5_0 || T == DTYPE_Q5_1) {
		fifth = (p[i / 8] >> i % 8 & 1) << 4;
		p += 4;
	}
	return (p[i % 16] >> (i < 16 ? 0 : 4) & 15) | fifth;
}

struct pack_job {
	const uint8_t *raw;
	int64_t row_bytes, n_rows, cols, first, k_tiles;
	int block_bytes;
	uint32_t *low, *high;
	uint8_t *scale, *super;
};

// One thread per lane of a tile.
template <enum dtype T> __global__ void pack_kernel(struct pack_job j, int64_t tiles)
{
	using Q = quant<T>;
	int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
	int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	if (at >= tiles)
		return;
	int64_t row_tile = at / j.k_tiles, k_tile = at % j.k_tiles, tile = (j.first + row_tile) * j.k_tiles + k_tile;
	uint32_t low[8] = {0}, high[2] = {0};
	for (int step = 0; step < 4; step++)
		for (int i = 0; i < 4; i++)
			for (int n = 0; n < 2; n++) {
				int64_t row = row_tile * CUDA_TILE_ROWS + g + 8 * (i % 2);
				int64_t k = k_tile * CUDA_TILE_COLS + 16 * step + 4 * c + 2 * (i / 2) + n;
				if (row >= j.n_rows || k >= j.cols)
					continue;
				uint32_t q = (uint32_t)read_quant<T>(j.raw + row * j.row_bytes, k, j.block_bytes);
				if (Q::words == 8) {
					low[2 * step + i / 2] |= q << (8 * (i % 2) + 16 * n);
					continue;
				}
				low[step] |= (q & 15) << (4 * i + 16 * n);
				if (Q::high == 1)
					high[0] |= (q >> 4) << (4 * step + i + 16 * n);
				if (Q::high == 2)
					high[step / 2] |= (q >> 4) << (2 * (4 * (step % 2) + i) + 16 * n);
			}
	for (int i = 0; i < Q::words; i++)
		j.low[((tile * (Q::words / 4) + i / 4) * 32 + lane) * 4 + i % 4] = low[i];
	for (int i = 0; i < Q::high; i++)
		j.high[(tile * 32 + lane) * Q::high + i] = high[i];
	if (c != 0)
		return;
	uint8_t *scale = j.scale + (tile * 8 + g) * Q::scale_bytes;
	uint8_t *super = j.super + (((j.first + row_tile) * (j.k_tiles / 4) + k_tile / 4) * 8 + g) * Q::super_bytes;
	for (int r = 0; r < 2; r++) {
		int64_t row = row_tile * CUDA_TILE_ROWS + g + 8 * r;
		const uint8_t *raw = j.raw + row * j.row_bytes;
		bool has_row = row < j.n_rows;
		for (int b = 0; b < 2; b++) {
			int64_t k = k_tile * CUDA_TILE_COLS + 32 * b;
			bool has = has_row && k < j.cols;
			if (Q::scales == SCALES_HALF || Q::scales == SCALES_HALF_MIN) {
				const uint8_t *p = raw + k / 32 * j.block_bytes;
				((uint16_t *)scale)[2 * b + r] = has ? load_u16(p) : 0;
				if (Q::scales == SCALES_HALF_MIN)
					((uint16_t *)scale)[4 + 2 * b + r] = has ? load_u16(p + 2) : 0;
			} else if (Q::scales == SCALES_K) {
				int s = 0, m = 0;
				if (has)
					read_k_scale(raw + k / 256 * j.block_bytes + 4, (int)(k % 256) / 32, &s, &m);
				scale[2 * b + r] = (uint8_t)s;
				scale[4 + 2 * b + r] = (uint8_t)m;
			} else {
				const uint8_t *p = raw + k / 256 * j.block_bytes + 192 + (k % 256) / 16;
				scale[4 * b + r] = has ? p[0] : 0;
				scale[4 * b + 2 + r] = has ? p[1] : 0;
			}
		}
		if (Q::super_bytes && k_tile % 4 == 0) {
			const uint8_t *p = raw + k_tile * CUDA_TILE_COLS / 256 * j.block_bytes + (Q::scales == SCALES_6K ? 208 : 0);
			((uint16_t *)super)[r] = has_row ? load_u16(p) : 0;
			if (Q::scales == SCALES_K)
				((uint16_t *)super)[2 + r] = has_row ? load_u16(p + 2) : 0;
		}
	}
}

template <enum dtype T> static void pack(cudaStream_t stream, const struct pack_job &j, int64_t tiles)
{
	pack_kernel<T><<<(unsigned)((tiles + 3) / 4), 128, 0, stream>>>(j, tiles);
}

void cuda_quant_pack(struct ops_context *c, struct weight *w, const void *raw, int64_t first, int64_t row_tiles,
                     int64_t n_rows)
{
	struct pack_job j = {(const uint8_t *)raw, dtype_row_bytes(w->dtype, w->cols), n_rows, w->cols, first, w->k_tiles,
	                     dtype_info(w->dtype)->block_bytes, (uint32_t *)w->planes.low, (uint32_t *)w->planes.high,
	                     (uint8_t *)w->planes.scale, (uint8_t *)w->planes.super};
	int64_t tiles = row_tiles * w->k_tiles;
	switch (w->dtype) {
	case DTYPE_Q4_0: pack<DTYPE_Q4_0>(c->stream, j, tiles); break;
	case DTYPE_Q4_1: pack<DTYPE_Q4_1>(c->stream, j, tiles); break;
	case DTYPE_Q5_0: pack<DTYPE_Q5_0>(c->stream, j, tiles); break;
	case DTYPE_Q5_1: pack<DTYPE_Q5_1>(c->stream, j, tiles); break;
	case DTYPE_Q8_0: pack<DTYPE_Q8_0>(c->stream, j, tiles); break;
	case DTYPE_Q4_K: pack<DTYPE_Q4_K>(c->stream, j, tiles); break;
	case DTYPE_Q5_K: pack<DTYPE_Q5_K>(c->stream, j, tiles); break;
	case DTYPE_Q6_K: pack<DTYPE_Q6_K>(c->stream, j, tiles); break;
	default: cuda_failed("type of weights", __FILE__, __LINE__, dtype_info(w->dtype)->name);
	}
	CUDA_LAUNCHED();
}

// One warp per tile. Whole numbers come out as half, which holds them all, whatever the activations' type.
template <typename A, typename Q>
__global__ void expand_kernel(A *out, struct cuda_planes p, int64_t first_tile, int64_t tiles, int64_t k_tiles,
                              int64_t n_rows, int64_t cols)
{
	int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
	int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
	if (at >= tiles)
		return;
	int64_t row_tile = at / k_tiles, k_tile = at % k_tiles;
	quant_lane<Q> l;
	quant_row<Q>(p, first_tile + row_tile, k_tiles, lane).load(l, (int)k_tile);
#pragma unroll
	for (int j = 0; j < 4; j++) {
		uint32_t a[4];
		float scale[2], minimum[2];
		quant_operands<half, Q>(l, j, a);
		quant_scale<Q>(l, j, scale, minimum);
#pragma unroll
		for (int i = 0; i < 4; i++) {
			int64_t row = row_tile * CUDA_TILE_ROWS + g + 8 * (i % 2);
			int64_t k = k_tile * CUDA_TILE_COLS + 16 * j + 4 * c + 2 * (i / 2);
			if (row >= n_rows || k >= cols)
				continue;
			for (int n = 0; n < 2; n++)
				out[row * cols + k + n] = from_float<A>(scale[i % 2] * half_of(a[i], n) + minimum[i % 2]);
		}
	}
}

template <typename A, typename W> __global__ void convert_kernel(A *out, const W *in, int64_t n)
{
	int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		out[i] = from_float<A>(to_float(in[i]));
}

// Rows `first`, a multiple of 16 for quantised types, to first + n - 1.
void cuda_weight_expand(struct ops_context *c, const struct weight *w, int64_t first, int64_t n, void *out)
{
	with_act(c, [&](auto t) {
		using A = decltype(t);
		int64_t tiles = (n + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS * w->k_tiles, from = first * w->cols;
		bool quantised = with_quant(w->dtype, [&](auto q) {
			expand_kernel<A, decltype(q)><<<(unsigned)((tiles + 3) / 4), 128, 0, c->stream>>>(
				(A *)out, w->planes, first / CUDA_TILE_ROWS, tiles, w->k_tiles, n, w->cols);
		});
		if (!quantised)
			with_kv(w->dtype, [&](auto k) {
				using W = decltype(k);
				int64_t elements = n * w->cols;
				convert_kernel<A, W><<<(unsigned)((elements + 255) / 256), 256, 0, c->stream>>>(
					(A *)out, (const W *)w->memory + from, elements);
			});
	});
	CUDA_LAUNCHED();
}
