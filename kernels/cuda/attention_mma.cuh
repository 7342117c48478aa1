// Attention on tensor cores; body of attention_bf16.cu and attention_f16.cu. One warp holds 16 packed rows of queries and
// walks the tokens 16 at a time. The surprising decision: neither K nor V passes through shared memory. Both products let
// us choose the order of their inner index and, for V, of their columns, so that every lane reads whole 16-byte words of
// the pages and they are operands as they lie (K) or after one byte permutation per register (V). All loads of a step are
// in flight together. Decode: the 4 warps of a block share a piece of KV. Prefill: each has rows of its own, and the
// first-level cache serves the other three. Measured on an H200 (tests/bench/README.md): decode at 4.1 of 4.27 TB/s
// where contexts are long and many; prefill at 105 TFLOP/s only, since 8 warps per multiprocessor hide too little of what
// they wait for: two tiles of rows per warp, or K and V through shared memory, are the next step there.
#ifndef STAGECOACH_KERNELS_ATTENTION_MMA_CUH
#define STAGECOACH_KERNELS_ATTENTION_MMA_CUH

#include "kernels/cuda/attention.cuh"

enum { ATTENTION_WARPS = 4 };

template <typename T, int D> struct attend_state {
	static const int K_WORDS = (D + 31) / 32;  // 16-byte words of a row of Q or K per lane
	static const int V_WORDS = (D + 63) / 64;
	float o[8 * V_WORDS][4]; // tile 8j+i: rows g, g+8; columns 64j + 8n + i for n = 2c, 2c+1
	float max[2], sum[2];    // of rows g and g+8, in units of log2
};

template <typename T, int D> __device__ inline void attend_clear(attend_state<T, D> &s)
{
#pragma unroll
	for (int i = 0; i < 8 * attend_state<T, D>::V_WORDS; i++)
		s.o[i][0] = s.o[i][1] = s.o[i][2] = s.o[i][3] = 0;
	s.max[0] = s.max[1] = -INFINITY;
	s.sum[0] = s.sum[1] = 0;
}

// 16 bytes at column d of a row, zero beyond the head and for rows that do not exist.
template <int D, typename T> __device__ inline uint4 load_word(const T *row, int d, bool has)
{
	return has && (D % 64 == 0 || d < D) ? *(const uint4 *)(row + d) : zero4();
}

// Rows g and g+8 of this lane see tokens first[i] .. last[i] (none if last < first). Walks tokens begin, begin + step, ...
// below end, 16 at a time; begin is a multiple of 16. kv_len tokens exist.
template <typename T, int D>
__device__ inline void attend(attend_state<T, D> &s, const struct attention_args &a, int kv_head, const int32_t *table,
                              const T *const (&q)[2], const int (&first)[2], const int (&last)[2], int kv_len, int begin,
                              int end, int step)
{
	using S = attend_state<T, D>;
	const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, bs = a.kv.block_size;
	const float scale = a.scale * 1.44269504f;
	uint4 q0[S::K_WORDS], q1[S::K_WORDS];
#pragma unroll
	for (int i = 0; i < S::K_WORDS; i++) {
		q0[i] = load_word<D>(q[0], 32 * i + 8 * c, q[0] != NULL);
		q1[i] = load_word<D>(q[1], 32 * i + 8 * c, q[1] != NULL);
	}
	int next = begin < end ? __ldg(table + begin / bs) : 0;
	for (int t = begin; t < end; t += step) {
		int64_t at = (((int64_t)next * a.kv.n_kv_heads + kv_head) * bs + t % bs) * D;
		if (t + step < end)
			next = __ldg(table + (t + step) / bs);
		const T *k = (const T *)a.kv.k + at, *v = (const T *)a.kv.v + at;
		uint4 k0[S::K_WORDS], k1[S::K_WORDS], vt[4][S::V_WORDS];
#pragma unroll
		for (int i = 0; i < S::K_WORDS; i++) {
			k0[i] = load_word<D>(k + g * D, 32 * i + 8 * c, true);
			k1[i] = load_word<D>(k + (g + 8) * D, 32 * i + 8 * c, true);
		}
#pragma unroll
		for (int n = 0; n < 4; n++) {
			int token = 2 * c + n % 2 + 8 * (n / 2); // what was never written may be NaN, and 0 x NaN counts
#pragma unroll
			for (int j = 0; j < S::V_WORDS; j++)
				vt[n][j] = load_word<D>(v + token * D, 64 * j + 8 * g, t + token < kv_len);
		}
		float p[2][4] = {};
#pragma unroll
		for (int i = 0; i < S::K_WORDS; i++) {
			mma<T>(p[0], q0[i].x, q1[i].x, q0[i].y, q1[i].y, k0[i].x, k0[i].y);
			mma<T>(p[1], q0[i].x, q1[i].x, q0[i].y, q1[i].y, k1[i].x, k1[i].y);
			mma<T>(p[0], q0[i].z, q1[i].z, q0[i].w, q1[i].w, k0[i].z, k0[i].w);
			mma<T>(p[1], q0[i].z, q1[i].z, q0[i].w, q1[i].w, k1[i].z, k1[i].w);
		}
		float keep[2];
#pragma unroll
		for (int r = 0; r < 2; r++) {
			float max = s.max[r];
#pragma unroll
			for (int n = 0; n < 4; n++) {
				int token = t + 8 * (n / 2) + 2 * c + n % 2;
				float &x = p[n / 2][2 * r + n % 2];
				x = token >= first[r] && token <= last[r] ? x * scale : -INFINITY;
				max = fmaxf(max, x);
			}
			max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 1));
			max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 2));
			float base = max == -INFINITY ? 0 : max; // nothing seen yet: all weights are 0
			keep[r] = exp2f(s.max[r] - base);
			s.max[r] = max;
			s.sum[r] *= keep[r];
#pragma unroll
			for (int n = 0; n < 4; n++) {
				float &x = p[n / 2][2 * r + n % 2];
				x = exp2f(x - base);
				s.sum[r] += x; // of this lane's tokens; lanes are added at the end
			}
		}
		if (__any_sync(0xffffffff, keep[0] != 1 || keep[1] != 1))
#pragma unroll
			for (int i = 0; i < 8 * S::V_WORDS; i++) {
				s.o[i][0] *= keep[0];
				s.o[i][1] *= keep[0];
				s.o[i][2] *= keep[1];
				s.o[i][3] *= keep[1];
			}
		uint32_t p0 = pack2<T>(p[0][0], p[0][1]), p1 = pack2<T>(p[0][2], p[0][3]);
		uint32_t p2 = pack2<T>(p[1][0], p[1][1]), p3 = pack2<T>(p[1][2], p[1][3]);
#pragma unroll
		for (int j = 0; j < S::V_WORDS; j++) {
			const uint32_t *v0 = (const uint32_t *)&vt[0][j], *v1 = (const uint32_t *)&vt[1][j];
			const uint32_t *v2 = (const uint32_t *)&vt[2][j], *v3 = (const uint32_t *)&vt[3][j];
#pragma unroll
			for (int w = 0; w < 4; w++) {
				mma<T>(s.o[8 * j + 2 * w], p0, p1, p2, p3, __byte_perm(v0[w], v1[w], 0x5410),
				       __byte_perm(v2[w], v3[w], 0x5410));
				mma<T>(s.o[8 * j + 2 * w + 1], p0, p1, p2, p3, __byte_perm(v0[w], v1[w], 0x7632),
				       __byte_perm(v2[w], v3[w], 0x7632));
			}
		}
	}
#pragma unroll
	for (int r = 0; r < 2; r++) {
		s.sum[r] += __shfl_xor_sync(0xffffffff, s.sum[r], 1);
		s.sum[r] += __shfl_xor_sync(0xffffffff, s.sum[r], 2);
	}
}

// Writes row r (0: g, 1: g+8) times `scale` to `out` [D].
template <typename O, typename T, int D> __device__ inline void attend_store(const attend_state<T, D> &s, int r, float scale, O *out)
{
	const int c = threadIdx.x % 4;
#pragma unroll
	for (int j = 0; j < attend_state<T, D>::V_WORDS; j++)
#pragma unroll
		for (int n = 0; n < 2; n++) {
			int d = 64 * j + 8 * (2 * c + n);
			if (D % 64 && d >= D)
				continue;
			if constexpr (sizeof(O) == 2) {
				uint4 v;
				uint32_t *w = (uint32_t *)&v;
#pragma unroll
				for (int i = 0; i < 4; i++)
					w[i] = pack2<T>(s.o[8 * j + 2 * i][2 * r + n] * scale, s.o[8 * j + 2 * i + 1][2 * r + n] * scale);
				*(uint4 *)(out + d) = v;
			} else {
#pragma unroll
				for (int i = 0; i < 8; i++)
					out[d + i] = s.o[8 * j + i][2 * r + n] * scale;
			}
		}
}

// Adds the state in shared memory (as attend_store with scale 1 left it) to this warp's.
template <typename T, int D>
__device__ inline void attend_merge(attend_state<T, D> &s, const float *o, const float *max, const float *sum)
{
	const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
	for (int r = 0; r < 2; r++) {
		int row = g + 8 * r;
		float m = fmaxf(s.max[r], max[row]), base = m == -INFINITY ? 0 : m;
		float mine = exp2f(s.max[r] - base), other = exp2f(max[row] - base);
		s.max[r] = m;
		s.sum[r] = s.sum[r] * mine + sum[row] * other;
#pragma unroll
		for (int j = 0; j < attend_state<T, D>::V_WORDS; j++)
#pragma unroll
			for (int n = 0; n < 2; n++) {
				int d = 64 * j + 8 * (2 * c + n);
				if (D % 64 && d >= D)
					continue;
#pragma unroll
				for (int i = 0; i < 8; i++) {
					float &x = s.o[8 * j + i][2 * r + n];
					x = x * mine + o[row * D + d + i] * other;
				}
			}
	}
}

// Partial results of a split: o [tile rows][D] float32, unnormalised, then maximum and sum.
struct attention_parts {
	float *o;       // [n_seqs][kv tiles][n_splits][16][D]
	float2 *state;  // [n_seqs][kv tiles][n_splits][16]
	int n_splits, head_tiles;
};

// Short sequences: grid (kv heads x head tiles, sequences, splits).
template <typename T, int D>
__global__ __launch_bounds__(32 * ATTENTION_WARPS) void attention_decode_kernel(const __grid_constant__ struct attention_args a,
                                                                                struct attention_parts parts)
{
	__shared__ __align__(16) float other_o[2][attention_tile * D];
	__shared__ float other_max[2][attention_tile], other_sum[2][attention_tile];
	const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
	int kv_head = blockIdx.x / parts.head_tiles, head_tile = blockIdx.x % parts.head_tiles, seq = blockIdx.y;
	int group = a.n_heads / a.kv.n_kv_heads;
	int first_row = a.first_row[seq], n = a.first_row[seq + 1] - first_row, kv_len = a.kv_len[seq];
	if (n < 1 || !attention_is_short(n, group))
		return;
	int from = attention_from(a, seq, n), chunk = attention_chunk(kv_len - from / 64 * 64, parts.n_splits);
	int begin = from / 64 * 64 + blockIdx.z * chunk, end = begin + chunk < kv_len ? begin + chunk : kv_len;
	if (begin >= end)
		return;
	const T *q[2];
	T *out[2];
	int first[2], last[2];
#pragma unroll
	for (int r = 0; r < 2; r++) {
		int i = head_tile * attention_tile + g + 8 * r, row = first_row + i / group;
		bool has = i < n * group;
		int64_t at = ((int64_t)row * a.n_heads + kv_head * group + i % group) * D;
		q[r] = has ? (const T *)a.q + at : NULL;
		out[r] = has ? (T *)a.out + at : NULL;
		last[r] = has ? kv_len - n + i / group : -1;
		first[r] = a.window && last[r] - a.window + 1 > 0 ? last[r] - a.window + 1 : 0;
	}
	attend_state<T, D> s;
	attend_clear(s);
	attend<T, D>(s, a, kv_head, a.block_table + (int64_t)seq * a.max_blocks, q, first, last, kv_len,
	             begin + warp * attention_tile, end, ATTENTION_WARPS * attention_tile);
	for (int half = ATTENTION_WARPS / 2; half > 0; half /= 2) {
		__syncthreads();
		if (warp >= half && warp < 2 * half) {
#pragma unroll
			for (int r = 0; r < 2; r++) {
				attend_store<float, T, D>(s, r, 1, other_o[warp - half] + (g + 8 * r) * D);
				if (c == 0) {
					other_max[warp - half][g + 8 * r] = s.max[r];
					other_sum[warp - half][g + 8 * r] = s.sum[r];
				}
			}
		}
		__syncthreads();
		if (warp < half)
			attend_merge<T, D>(s, other_o[warp], other_max[warp], other_sum[warp]);
	}
	if (warp != 0)
		return;
	int64_t part = (((int64_t)seq * gridDim.x + blockIdx.x) * parts.n_splits + blockIdx.z) * attention_tile;
#pragma unroll
	for (int r = 0; r < 2; r++) {
		if (!out[r])
			continue;
		if (parts.n_splits == 1) {
			attend_store<T, T, D>(s, r, 1 / s.sum[r], out[r]);
		} else {
			attend_store<float, T, D>(s, r, 1, parts.o + (part + g + 8 * r) * D);
			if (c == 0)
				parts.state[part + g + 8 * r] = make_float2(s.max[r], s.sum[r]);
		}
	}
}

// Grid (heads, sequences x rows of a tile): adds the splits of one row and head.
template <typename T, int D>
__global__ void attention_combine_kernel(const __grid_constant__ struct attention_args a, struct attention_parts parts,
                                         int rows_per_seq)
{
	int head = blockIdx.x, seq = blockIdx.y / rows_per_seq, at = blockIdx.y % rows_per_seq;
	int group = a.n_heads / a.kv.n_kv_heads, kv_head = head / group;
	int first_row = a.first_row[seq], n = a.first_row[seq + 1] - first_row, kv_len = a.kv_len[seq];
	if (at >= n || !attention_is_short(n, group))
		return;
	int begin = attention_from(a, seq, n) / 64 * 64, tokens = kv_len - begin;
	int chunk = attention_chunk(tokens, parts.n_splits), used = (tokens + chunk - 1) / chunk;
	int i = at * group + head % group;
	int64_t part = (((int64_t)seq * a.kv.n_kv_heads + kv_head) * parts.head_tiles + i / attention_tile) *
	               parts.n_splits * attention_tile + i % attention_tile;
	float max = -INFINITY, sum = 0;
	for (int k = 0; k < used; k++)
		max = fmaxf(max, parts.state[part + k * attention_tile].x);
	float o = 0;
	int d = threadIdx.x;
	for (int k = 0; k < used; k++) {
		float2 s = parts.state[part + k * attention_tile];
		float weight = exp2f(s.x - max);
		sum += s.y * weight;
		if (d < D)
			o += parts.o[(part + k * attention_tile) * D + d] * weight;
	}
	if (d < D)
		((T *)a.out)[((int64_t)(first_row + at) * a.n_heads + head) * D + d] = from_float<T>(o / sum);
}

// Long sequences: grid (tiles of 64 packed rows, kv heads). Which sequence and rows a block has it finds from first_row;
// tiles are counted as if every sequence began a new one, so a few blocks at the end have none.
template <typename T, int D>
__global__ __launch_bounds__(32 * ATTENTION_WARPS) void attention_prefill_kernel(const __grid_constant__ struct attention_args a)
{
	const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, kv_head = blockIdx.y, rows = ATTENTION_WARPS * attention_tile;
	int group = a.n_heads / a.kv.n_kv_heads, tile = gridDim.x - 1 - blockIdx.x; // the longest first
	int seq = 0, n = 0, first_row = 0;
	for (; seq < a.n_seqs; seq++) {
		first_row = a.first_row[seq];
		n = a.first_row[seq + 1] - first_row;
		int tiles = n < 1 || attention_is_short(n, group) ? 0 : (n * group + rows - 1) / rows;
		if (tile < tiles)
			break;
		tile -= tiles;
	}
	if (seq == a.n_seqs)
		return;
	int kv_len = a.kv_len[seq], top = tile * rows + warp * attention_tile;
	const T *q[2];
	T *out[2];
	int first[2], last[2];
#pragma unroll
	for (int r = 0; r < 2; r++) {
		int i = top + g + 8 * r;
		bool has = i < n * group;
		int64_t at = ((int64_t)(first_row + i / group) * a.n_heads + kv_head * group + i % group) * D;
		q[r] = has ? (const T *)a.q + at : NULL;
		out[r] = has ? (T *)a.out + at : NULL;
		last[r] = has ? kv_len - n + i / group : -1;
		first[r] = a.window && last[r] - a.window + 1 > 0 ? last[r] - a.window + 1 : 0;
	}
	if (top >= n * group)
		return;
	int bottom = top + attention_tile - 1 < n * group ? top + attention_tile - 1 : n * group - 1;
	int end = kv_len - n + bottom / group + 1, begin = kv_len - n + top / group - a.window + 1;
	begin = a.window && begin > 0 ? begin / attention_tile * attention_tile : 0;
	attend_state<T, D> s;
	attend_clear(s);
	attend<T, D>(s, a, kv_head, a.block_table + (int64_t)seq * a.max_blocks, q, first, last, kv_len, begin, end,
	             attention_tile);
#pragma unroll
	for (int r = 0; r < 2; r++)
		if (out[r])
			attend_store<T, T, D>(s, r, 1 / s.sum[r], out[r]);
}

template <typename T, int D> static void attention_launch(struct ops_context *c, const struct attention_args *a)
{
	int group = a->n_heads / a->kv.n_kv_heads;
	struct attention_parts parts = {NULL, NULL, 1, (group + attention_tile - 1) / attention_tile};
	int kv_tiles = a->kv.n_kv_heads * parts.head_tiles;
	// As many blocks as fill the device four times over, if the longest context has work for them.
	int wanted = (4 * c->multiprocessors + a->n_seqs * kv_tiles - 1) / (a->n_seqs * kv_tiles);
	int most = (int)(((int64_t)a->max_blocks * a->kv.block_size + 127) / 128);
	parts.n_splits = wanted < most ? wanted : most;
	parts.n_splits = parts.n_splits < 1 ? 1 : parts.n_splits > 64 ? 64 : parts.n_splits;
	if (parts.n_splits > 1) {
		size_t rows = (size_t)a->n_seqs * (size_t)kv_tiles * (size_t)parts.n_splits * (size_t)attention_tile;
		parts.o = (float *)cuda_scratch(c, SCRATCH_ATTENTION, rows * (D * sizeof(float) + sizeof(float2)));
		parts.state = (float2 *)(parts.o + rows * D);
	}
	dim3 grid((unsigned)kv_tiles, (unsigned)a->n_seqs, (unsigned)parts.n_splits);
	attention_decode_kernel<T, D><<<grid, 32 * ATTENTION_WARPS, 0, c->stream>>>(*a, parts);
	CUDA_LAUNCHED();
	if (parts.n_splits > 1) {
		int rows_per_seq = group >= attention_tile ? 1 : attention_tile / group;
		rows_per_seq = rows_per_seq < a->n_rows - a->n_seqs + 1 ? rows_per_seq : a->n_rows - a->n_seqs + 1;
		rows_per_seq = rows_per_seq < 1 ? 1 : rows_per_seq;
		attention_combine_kernel<T, D><<<dim3((unsigned)a->n_heads, (unsigned)(a->n_seqs * rows_per_seq)),
		                                 (D + 31) / 32 * 32, 0, c->stream>>>(*a, parts, rows_per_seq);
		CUDA_LAUNCHED();
	}
	if (a->n_rows > a->n_seqs) { // no sequence is empty, so else each has one row
		int rows = ATTENTION_WARPS * attention_tile, tiles = (int)(((int64_t)a->n_rows * group + rows - 1) / rows) + a->n_seqs;
		attention_prefill_kernel<T, D><<<dim3((unsigned)tiles, (unsigned)a->kv.n_kv_heads), 32 * ATTENTION_WARPS, 0,
		                                 c->stream>>>(*a);
		CUDA_LAUNCHED();
	}
}

template <typename T> static bool attention_mma(struct ops_context *c, const struct attention_args *a)
{
	if (a->kv.block_size % attention_tile || a->n_heads % a->kv.n_kv_heads)
		return false;
	switch (a->kv.head_dim) {
	case 64: attention_launch<T, 64>(c, a); return true;
	case 80: attention_launch<T, 80>(c, a); return true;
	case 96: attention_launch<T, 96>(c, a); return true;
	case 128: attention_launch<T, 128>(c, a); return true;
	case 256: attention_launch<T, 256>(c, a); return true;
	default: return false;
	}
}

#endif
