// Body of rope_kv_portable.c, rope_kv_avx2.c and rope_kv_avx512.c. The rotation is plain C without fused multiply-adds,
// which the compiler vectorises; all instruction sets give the same bits.
#include "kernels/cpu/rms_norm_kernel.h"
#include "kernels/cpu/rope_kv.h"

VEC_INLINE void rotate_halves(float *restrict lower, float *restrict upper, const float *restrict cos_sin, int half)
{
	for (int i = 0; i < half; i++) {
		float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
		float a = lower[i], b = upper[i];
		lower[i] = a * c - b * s;
		upper[i] = b * c + a * s;
	}
}

#if VEC_ISA
// Spelled out, because GCC 12 makes a fused multiply-add of the plain loop in spite of -ffp-contract=off (vfmaddsub).
VEC_INLINE vf rotated_pairs(vf x, vf cos_sin)
{
#if VEC_ISA == 512
	__m512 c = _mm512_moveldup_ps(cos_sin), s = _mm512_movehdup_ps(cos_sin);
	__m512i sign = _mm512_set1_epi64(0x80000000);
	s = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(s), sign));
	return x * c + _mm512_permute_ps(x, 0xb1) * s;
#else
	__m256 c = _mm256_moveldup_ps(cos_sin), s = _mm256_movehdup_ps(cos_sin);
	s = _mm256_xor_ps(s, _mm256_castsi256_ps(_mm256_set1_epi64x(0x80000000)));
	return x * c + _mm256_permute_ps(x, 0xb1) * s;
#endif
}

VEC_INLINE void rotate_pairs(float *x, const float *cos_sin, int half)
{
	int i = 0;
	for (; i + VL <= 2 * half; i += VL)
		v_store(x + i, rotated_pairs(v_load(x + i), v_load(cos_sin + i)));
	if (i < 2 * half) {
		float rest[VL] = {0}, rest_cos_sin[VL] = {0};
		size_t bytes = (size_t)(2 * half - i) * sizeof(float);
		memcpy(rest, x + i, bytes);
		memcpy(rest_cos_sin, cos_sin + i, bytes);
		v_store(rest, rotated_pairs(v_load(rest), v_load(rest_cos_sin)));
		memcpy(x + i, rest, bytes);
	}
}
#else
VEC_INLINE void rotate_pairs(float *restrict x, const float *restrict cos_sin, int half)
{
	for (int i = 0; i < half; i++) {
		float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
		float a = x[2 * i], b = x[2 * i + 1];
		x[2 * i] = a * c - b * s;
		x[2 * i + 1] = b * c + a * s;
	}
}
#endif

static void rope_heads(const struct rope_kv_args *a, float *x, int n_heads, const float *norm, const float *cos_sin)
{
	int d = a->kv.head_dim, half = a->rope_dim / 2;
	for (int h = 0; h < n_heads; h++, x += d) {
		if (norm)
			rms_norm_row(x, x, norm, d, a->norm_eps);
		if (a->interleaved)
			rotate_pairs(x, cos_sin, half);
		else
			rotate_halves(x, x + half, cos_sin, half);
	}
}

static void store_head(void *cache, int64_t offset, enum dtype t, const float *x, int d)
{
	if (t == DTYPE_F32) {
		memcpy((float *)cache + offset, x, (size_t)d * sizeof(float));
	} else if (t == DTYPE_BF16) {
		uint16_t *to = (uint16_t *)cache + offset;
		for (int i = 0; i < d; i++)
			to[i] = v_bfloat1(x[i]);
	} else {
		uint16_t *to = (uint16_t *)cache + offset;
		uint16_t half[VL];
		float rest[VL] = {0};
		int i = 0;
		for (; i + VL <= d; i += VL)
			v_store_half(to + i, v_load(x + i));
		if (i < d) {
			memcpy(rest, x + i, (size_t)(d - i) * sizeof(float));
			v_store_half(half, v_load(rest));
			memcpy(to + i, half, (size_t)(d - i) * sizeof(uint16_t));
		}
	}
}

void VEC_FN(rope_kv_rows)(const struct rope_kv_args *a, int from, int to)
{
	const struct kv_view *kv = &a->kv;
	int64_t d = kv->head_dim;
	for (int64_t r = from; r < to; r++) {
		const float *cos_sin = a->cos_sin + (int64_t)a->position[r] * a->rope_dim;
		float *k = (float *)a->k + r * kv->n_kv_heads * d;
		const float *v = (const float *)a->v + r * kv->n_kv_heads * d;
		rope_heads(a, (float *)a->q + r * a->n_heads * d, a->n_heads, a->q_norm, cos_sin);
		rope_heads(a, k, kv->n_kv_heads, a->k_norm, cos_sin);
		int64_t block = a->slot[r] / kv->block_size, in_block = a->slot[r] % kv->block_size;
		for (int h = 0; h < kv->n_kv_heads; h++) {
			int64_t offset = ((block * kv->n_kv_heads + h) * kv->block_size + in_block) * d;
			store_head(kv->k, offset, kv->dtype, k + h * d, (int)d);
			store_head(kv->v, offset, kv->dtype, v + h * d, (int)d);
		}
	}
}
