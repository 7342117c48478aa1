// Body of attention_portable.c, attention_avx2.c and attention_avx512.c. Orders that results depend on, the same for a
// single query and for a full tile: a score sums over the head's elements in ascending order, the weighted sum of V over
// positions in ascending order, the sum of probabilities in VL lanes. K is transposed once per tile, so that no sum runs
// across a vector.
#include "kernels/cpu/attention.h"
#include "kernels/cpu/vec.h"

#include <math.h>

// Query vectors times vectors of keys (or of head elements) in registers: 6 x 4 of AVX-512's 32, else of 16.
#if VEC_ISA == 512
enum { REG_QUERIES = 6, REG_VECTORS = 4 };
#elif VEC_ISA == 256
enum { REG_QUERIES = 3, REG_VECTORS = 4 };
#else
enum { REG_QUERIES = 2, REG_VECTORS = 4 };
#endif

// to[i][j] = from[j][i]
VEC_INLINE void transpose(vf to[VL], const vf from[VL])
{
#if VEC_ISA == 512
	__m512 a[16], b[16];
#pragma GCC unroll 16
	for (int i = 0; i < 16; i += 2) {
		a[i] = _mm512_unpacklo_ps(from[i], from[i + 1]);
		a[i + 1] = _mm512_unpackhi_ps(from[i], from[i + 1]);
	}
#pragma GCC unroll 16
	for (int i = 0; i < 16; i += 4) { // b[i + c], 128-bit lane l: column 4 l + c of rows i .. i + 3
		b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
		b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
		b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
		b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
	}
#pragma GCC unroll 16
	for (int c = 0; c < 4; c++) {
		__m512 even_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);     // lanes 0, 2 of rows 0-3, then of rows 4-7
		__m512 odd_low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
		__m512 even_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
		__m512 odd_high = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
		to[c] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
		to[8 + c] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
		to[4 + c] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
		to[12 + c] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
	}
#elif VEC_ISA == 256
	__m256 a[8], b[8];
#pragma GCC unroll 8
	for (int i = 0; i < 8; i += 2) {
		a[i] = _mm256_unpacklo_ps(from[i], from[i + 1]);
		a[i + 1] = _mm256_unpackhi_ps(from[i], from[i + 1]);
	}
#pragma GCC unroll 8
	for (int i = 0; i < 8; i += 4) {
		b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
		b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
		b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
		b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
	}
#pragma GCC unroll 8
	for (int c = 0; c < 4; c++) {
		to[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
		to[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
	}
#else
	for (int i = 0; i < VL; i++)
		to[i] = (vf){from[0][i], from[1][i], from[2][i], from[3][i]};
#endif
}

#if VEC_ISA
enum { PAIR_STEP = 8 };

// Transposes 8 elements of VL keys: k[i][VL] = element i of each row, for 16-bit types. Two neighbours travel as one
// 32-bit unit, and rows are put into lanes by loads, which halves the shuffles: 12 cycles a key of 64 instead of 20.
VEC_INLINE void transpose_pairs(float *k, const char *const row[VL], int offset, enum dtype type)
{
#if VEC_ISA == 512
	__m512i r[4];
#pragma GCC unroll 4
	for (int i = 0; i < 4; i++) {
		r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(row[i] + offset)));
		r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(row[4 + i] + offset)), 1);
		r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(row[8 + i] + offset)), 2);
		r[i] = _mm512_inserti32x4(r[i], _mm_loadu_si128((const __m128i *)(row[12 + i] + offset)), 3);
	}
	__m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
	__m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
	r[0] = _mm512_unpacklo_epi64(a, c);
	r[1] = _mm512_unpackhi_epi64(a, c);
	r[2] = _mm512_unpacklo_epi64(b, d);
	r[3] = _mm512_unpackhi_epi64(b, d);
	const __m512i even_odd = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
	                                          20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
#pragma GCC unroll 4
	for (int i = 0; i < 4; i++) {
		vf even, odd;
		if (type == DTYPE_F16) {
			__m512i w = _mm512_permutexvar_epi16(even_odd, r[i]);
			even = _mm512_cvtph_ps(_mm512_castsi512_si256(w));
			odd = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1));
		} else {
			even = _mm512_castsi512_ps(_mm512_slli_epi32(r[i], 16));
			odd = _mm512_castsi512_ps(_mm512_and_si512(r[i], _mm512_set1_epi32(-65536)));
		}
		v_store(k + (2 * i) * ATTENTION_BLOCK, even);
		v_store(k + (2 * i + 1) * ATTENTION_BLOCK, odd);
	}
#else
	__m256i r[4];
#pragma GCC unroll 4
	for (int i = 0; i < 4; i++) {
		r[i] = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(row[i] + offset)));
		r[i] = _mm256_inserti128_si256(r[i], _mm_loadu_si128((const __m128i *)(row[4 + i] + offset)), 1);
	}
	__m256i a = _mm256_unpacklo_epi32(r[0], r[1]), b = _mm256_unpackhi_epi32(r[0], r[1]);
	__m256i c = _mm256_unpacklo_epi32(r[2], r[3]), d = _mm256_unpackhi_epi32(r[2], r[3]);
	r[0] = _mm256_unpacklo_epi64(a, c);
	r[1] = _mm256_unpackhi_epi64(a, c);
	r[2] = _mm256_unpacklo_epi64(b, d);
	r[3] = _mm256_unpackhi_epi64(b, d);
	const __m256i even_odd = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
	                                          2, 3, 6, 7, 10, 11, 14, 15);
#pragma GCC unroll 4
	for (int i = 0; i < 4; i++) {
		vf even, odd;
		if (type == DTYPE_F16) {
			__m256i w = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(r[i], even_odd), 0xd8);
			even = _mm256_cvtph_ps(_mm256_castsi256_si128(w));
			odd = _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1));
		} else {
			even = _mm256_castsi256_ps(_mm256_slli_epi32(r[i], 16));
			odd = _mm256_castsi256_ps(_mm256_and_si256(r[i], _mm256_set1_epi32(-65536)));
		}
		v_store(k + (2 * i) * ATTENTION_BLOCK, even);
		v_store(k + (2 * i + 1) * ATTENTION_BLOCK, odd);
	}
#endif
}
#endif

VEC_INLINE void load_as(struct attention_tile *t, enum dtype type, bool with_v)
{
	const int step = REG_VECTORS * VL, size = type == DTYPE_F32 ? 4 : 2;
	// Scores are computed for whole steps. Those outside [begin, end) are never used; zeros and repeated keys stand there
	// so that no stale bytes are read as numbers.
	for (int j = t->begin / step * step; j < (t->end + step - 1) / step * step; j += VL) {
		if (j + VL <= t->begin || j >= t->end) {
			for (int e = 0; e < t->padded; e++)
				v_store(t->k + e * ATTENTION_BLOCK + j, v_set1(0));
			continue;
		}
		const char *row[VL];
		for (int i = 0; i < VL; i++)
			row[i] = t->k_row[j + i < t->begin ? t->begin : j + i < t->end ? j + i : t->end - 1];
		int e = 0;
#if VEC_ISA
		if (type != DTYPE_F32)
			for (; e + PAIR_STEP <= t->dim; e += PAIR_STEP)
				transpose_pairs(t->k + e * ATTENTION_BLOCK + j, row, e * size, type);
#endif
		for (; e + VL <= t->dim; e += VL) {
			vf in[VL], out[VL];
#pragma GCC unroll 16
			for (int i = 0; i < VL; i++)
				in[i] = v_load_as(row[i] + e * size, type, VL);
			transpose(out, in);
#pragma GCC unroll 16
			for (int i = 0; i < VL; i++)
				v_store(t->k + (e + i) * ATTENTION_BLOCK + j, out[i]);
		}
		if (e < t->dim) {
			vf in[VL], out[VL];
			for (int i = 0; i < VL; i++)
				in[i] = v_load_as(row[i] + e * size, type, t->dim - e);
			transpose(out, in);
			for (int i = 0; i < VL && e < t->padded; i++, e++)
				v_store(t->k + e * ATTENTION_BLOCK + j, out[i]);
		}
		for (; e < t->padded; e++)
			v_store(t->k + e * ATTENTION_BLOCK + j, v_set1(0));
	}
	for (int j = t->begin; with_v && j < t->end; j++) {
		const char *row = t->v_row[j];
		float *v = t->v + j * t->padded;
		int e = 0;
		for (; e + VL <= t->dim; e += VL)
			v_store(v + e, v_load_as(row + e * size, type, VL));
		if (e < t->dim) {
			v_store(v + e, v_load_as(row + e * size, type, t->dim - e));
			e += VL;
		}
		for (; e < t->padded; e += VL)
			v_store(v + e, v_set1(0));
	}
}

// A few queries read V where it lies; more of them share one unpacked copy. The numbers are the same.
static bool reads_v_in_place(const struct attention_tile *t, int n)
{
	return n <= REG_QUERIES && t->dim % (REG_VECTORS * VL) == 0;
}

static void load(struct attention_tile *t, enum dtype type, int n)
{
	bool with_v = !reads_v_in_place(t, n);
	if (type == DTYPE_F16)
		load_as(t, DTYPE_F16, with_v);
	else if (type == DTYPE_BF16)
		load_as(t, DTYPE_BF16, with_v);
	else
		load_as(t, DTYPE_F32, with_v);
}

// p[n][vectors * VL] = q k for n queries and keys from j on.
VEC_INLINE void score_registers(const struct attention_tile *t, int first, int j, const int n, const int vectors)
{
	vf s[REG_QUERIES][REG_VECTORS];
	const float *q = t->q + first * t->padded, *k = t->k + j;
	float *p = t->p + first * ATTENTION_BLOCK + j;
#pragma GCC unroll 6
	for (int i = 0; i < n; i++)
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++)
			s[i][c] = v_set1(0);
	for (int e = 0; e < t->padded; e++, k += ATTENTION_BLOCK) {
		vf kv[REG_VECTORS];
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++)
			kv[c] = v_load(k + c * VL);
#pragma GCC unroll 6
		for (int i = 0; i < n; i++) {
			vf x = v_set1(q[i * t->padded + e]);
#pragma GCC unroll 4
			for (int c = 0; c < vectors; c++)
				s[i][c] = v_fma(x, kv[c], s[i][c]);
		}
	}
#pragma GCC unroll 6
	for (int i = 0; i < n; i++)
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++)
			v_store(p + i * ATTENTION_BLOCK + c * VL, s[i][c]);
}

// acc[n][vectors * VL] = acc * scale + p v for n queries and head elements from e on. type says what V is read from:
// DTYPE_COUNT stands for the unpacked copy, else it is read in place.
VEC_INLINE void weigh_registers(const struct attention_tile *t, const float *scale, int first, int e, const int n,
                                const int vectors, const enum dtype type)
{
	vf a[REG_QUERIES][REG_VECTORS];
	const float *p = t->p + first * ATTENTION_BLOCK;
	float *acc = t->acc + first * t->padded + e;
#pragma GCC unroll 6
	for (int i = 0; i < n; i++)
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++)
			a[i][c] = v_load(acc + i * t->padded + c * VL) * v_set1(scale[first + i]);
	for (int j = t->begin; j < t->end; j++) {
		vf vv[REG_VECTORS];
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++) {
			if (type == DTYPE_COUNT)
				vv[c] = v_load(t->v + j * t->padded + e + c * VL);
			else
				vv[c] = v_load_as((const char *)t->v_row[j] + (e + c * VL) * (type == DTYPE_F32 ? 4 : 2), type, VL);
		}
#pragma GCC unroll 6
		for (int i = 0; i < n; i++) {
			vf x = v_set1(p[i * ATTENTION_BLOCK + j]);
#pragma GCC unroll 4
			for (int c = 0; c < vectors; c++)
				a[i][c] = v_fma(x, vv[c], a[i][c]);
		}
	}
#pragma GCC unroll 6
	for (int i = 0; i < n; i++)
#pragma GCC unroll 4
		for (int c = 0; c < vectors; c++)
			v_store(acc + i * t->padded + c * VL, a[i][c]);
}

#define CASES(call)                                                                                                    \
	switch (n) {                                                                                                   \
	case 1: call(1); break;                                                                                        \
	case 2: call(2); break;                                                                                        \
	case 3: call(REG_QUERIES < 3 ? REG_QUERIES : 3); break;                                                        \
	case 4: call(REG_QUERIES < 4 ? REG_QUERIES : 4); break;                                                        \
	case 5: call(REG_QUERIES < 5 ? REG_QUERIES : 5); break;                                                        \
	case 6: call(REG_QUERIES < 6 ? REG_QUERIES : 6); break;                                                        \
	}

static void score(const struct attention_tile *t, int first, int n)
{
	const int step = REG_VECTORS * VL;
	for (int j = t->begin / step * step; j < t->end; j += step) {
#define CALL(count) score_registers(t, first, j, count, REG_VECTORS)
		CASES(CALL)
#undef CALL
	}
}

static void weigh(const struct attention_tile *t, const float *scale, int first, int n, enum dtype type)
{
	const int step = REG_VECTORS * VL;
	int e = 0;
	for (; e + step <= t->padded; e += step) {
#define CALL(count) weigh_registers(t, scale, first, e, count, REG_VECTORS, DTYPE_COUNT)
#define CALL_F32(count) weigh_registers(t, scale, first, e, count, REG_VECTORS, DTYPE_F32)
#define CALL_F16(count) weigh_registers(t, scale, first, e, count, REG_VECTORS, DTYPE_F16)
#define CALL_BF16(count) weigh_registers(t, scale, first, e, count, REG_VECTORS, DTYPE_BF16)
		if (type == DTYPE_COUNT)
			CASES(CALL)
		else if (type == DTYPE_F16)
			CASES(CALL_F16)
		else if (type == DTYPE_BF16)
			CASES(CALL_BF16)
		else
			CASES(CALL_F32)
#undef CALL
#undef CALL_F32
#undef CALL_F16
#undef CALL_BF16
	}
	for (; e < t->padded; e += VL) {
#define CALL(count) weigh_registers(t, scale, first, e, count, 1, DTYPE_COUNT)
		CASES(CALL)
#undef CALL
	}
}

// Turns the scores of query i into probabilities relative to its new maximum; returns what acc has to be scaled by.
VEC_INLINE float soften(struct attention_tile *t, int i)
{
	float *p = t->p + i * ATTENTION_BLOCK;
	int from = t->from[i], to = t->to[i];
	for (int j = 0; j < from; j++)
		p[j] = -INFINITY;
	for (int j = to; j < ATTENTION_BLOCK; j++)
		p[j] = -INFINITY;
	vf m = v_load(p);
#pragma GCC unroll 16
	for (int j = VL; j < ATTENTION_BLOCK; j += VL)
		m = v_max(m, v_load(p + j));
	float block_max = v_hmax(m);
	float max = t->max[i] > block_max ? t->max[i] : block_max;
	vf sum = v_set1(0), shift = v_set1(max);
#pragma GCC unroll 16
	for (int j = 0; j < ATTENTION_BLOCK; j += VL) {
		vf x = v_exp(v_load(p + j) - shift);
		v_store(p + j, x);
		sum = sum + x;
	}
	float scale = t->max[i] == max ? 1.0f : v_exp1(t->max[i] - max);
	t->sum[i] = t->sum[i] * scale + v_sum(sum);
	t->max[i] = max;
	return scale;
}

static void fold(struct attention_tile *t, enum dtype type, int first, int n)
{
	enum dtype v_type = reads_v_in_place(t, n) ? type : DTYPE_COUNT;
	float scale[ATTENTION_QUERIES];
	int groups = (n + REG_QUERIES - 1) / REG_QUERIES;
	for (int g = 0; g < groups; g++) {
		int from = first + n * g / groups;
		score(t, from, first + n * (g + 1) / groups - from);
	}
	for (int i = first; i < first + n; i++)
		scale[i] = soften(t, i);
	for (int g = 0; g < groups; g++) {
		int from = first + n * g / groups;
		weigh(t, scale, from, first + n * (g + 1) / groups - from, v_type);
	}
}

static void merge(float *total_max, float *total_sum, float *total_acc, const float *max, const float *sum,
                  const float *acc, int padded, bool first)
{
	if (first) {
		*total_max = *max;
		*total_sum = *sum;
		memcpy(total_acc, acc, (size_t)padded * sizeof(float));
		return;
	}
	float m = *total_max > *max ? *total_max : *max;
	float old_scale = *total_max == m ? 1.0f : v_exp1(*total_max - m), scale = *max == m ? 1.0f : v_exp1(*max - m);
	*total_max = m;
	*total_sum = *total_sum * old_scale + *sum * scale;
	vf a = v_set1(old_scale), b = v_set1(scale);
	for (int e = 0; e < padded; e += VL)
		v_store(total_acc + e, v_load(total_acc + e) * a + v_load(acc + e) * b);
}

static void finish(float *out, const float *acc, float sum, int dim)
{
	for (int e = 0; e < dim; e++)
		out[e] = acc[e] / sum;
}

const struct attention_kernel VEC_FN(attention_kernel) = {load, fold, merge, finish};
