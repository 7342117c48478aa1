// One vector type for three instruction sets, so that a kernel is written once and compiled three times. The including
// file says which: `#define VEC_ISA 512`, 256 or 0 before the include; functions are named through VEC_FN(name).
//
// vf is a vector of VL float32. Sums across lanes always fold the upper half onto the lower, and v_exp() is our own, so
// that a result does not depend on the lane or on the tail it was computed in. Portable code has no fused multiply-add:
// v_fma() rounds twice there.
#include <stdint.h>
#include <string.h>

#include "common/half.h"
#include "kernels/cpu/cpu.h"

#define VEC_PASTE_(a, b) a##b
#define VEC_PASTE(a, b) VEC_PASTE_(a, b)
#define VEC_FN(name) VEC_PASTE(name, VEC_SUFFIX)
#define VEC_INLINE static inline __attribute__((always_inline, unused))

#if VEC_ISA == 512
#include <immintrin.h>
#define VEC_SUFFIX _avx512
enum { VL = 16 };
typedef __m512 vf;
#elif VEC_ISA == 256
#include <immintrin.h>
#define VEC_SUFFIX _avx2
enum { VL = 8 };
typedef __m256 vf;
#else
#define VEC_SUFFIX _portable
enum { VL = 4 };
typedef float vf __attribute__((vector_size(16)));
#endif
typedef int32_t vi __attribute__((vector_size(sizeof(vf))));

VEC_INLINE vf v_load(const float *p)
{
	vf v;
	memcpy(&v, p, sizeof(v));
	return v;
}

VEC_INLINE void v_store(float *p, vf v)
{
	memcpy(p, &v, sizeof(v));
}

VEC_INLINE vf v_set1(float x)
{
#if VEC_ISA == 512
	return _mm512_set1_ps(x);
#elif VEC_ISA == 256
	return _mm256_set1_ps(x);
#else
	return (vf){x, x, x, x};
#endif
}

VEC_INLINE vf v_fma(vf a, vf b, vf c)
{
#if VEC_ISA == 512
	return _mm512_fmadd_ps(a, b, c);
#elif VEC_ISA == 256
	return _mm256_fmadd_ps(a, b, c);
#else
	return a * b + c;
#endif
}

// a > b ? a : b; so b wherever one of the two is NaN.
VEC_INLINE vf v_max(vf a, vf b)
{
#if VEC_ISA == 512
	return _mm512_max_ps(a, b);
#elif VEC_ISA == 256
	return _mm256_max_ps(a, b);
#else
	vi m = a > b;
	return (vf)(((vi)a & m) | ((vi)b & ~m));
#endif
}

// x < limit ? 0 : y; y where x is NaN.
VEC_INLINE vf v_zero_below(vf x, float limit, vf y)
{
#if VEC_ISA == 512
	return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, v_set1(limit), _CMP_NLT_UQ), y);
#elif VEC_ISA == 256
	return _mm256_and_ps(_mm256_cmp_ps(x, v_set1(limit), _CMP_NLT_UQ), y);
#else
	vi m = x < v_set1(limit);
	return (vf)((vi)y & ~m);
#endif
}

VEC_INLINE float v_sum(vf v)
{
	float f[VL];
#if VEC_ISA == 512
	__m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
	__m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
	_mm_storeu_ps(f, q);
#elif VEC_ISA == 256
	__m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
	_mm_storeu_ps(f, q);
#else
	v_store(f, v);
#endif
	return (f[0] + f[2]) + (f[1] + f[3]);
}

VEC_INLINE float v_hmax(vf v)
{
	float f[VL], m;
	v_store(f, v);
	m = f[0];
	for (int i = 1; i < VL; i++)
		m = f[i] > m ? f[i] : m;
	return m;
}

// e^x for x <= 88, relative error below 2e-7; 0 below -87; NaN stays NaN. x = n ln 2 + r, and a polynomial of degree 6
// in r with the coefficients of Cephes' expf.
VEC_INLINE vf v_exp(vf x)
{
	const float lowest = -87.0f;
	vf y = v_max(v_set1(lowest), x);
	vf magic = v_set1(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
	vf z = v_fma(y, v_set1(1.44269504088896341f), magic);
	vf n = z - magic;
	vf r = v_fma(n, v_set1(-0.693359375f), y);
	r = v_fma(n, v_set1(2.12194440e-4f), r);
	vf p = v_set1(1.9875691500e-4f);
	p = v_fma(p, r, v_set1(1.3981999507e-3f));
	p = v_fma(p, r, v_set1(8.3334519073e-3f));
	p = v_fma(p, r, v_set1(4.1665795894e-2f));
	p = v_fma(p, r, v_set1(1.6666665459e-1f));
	p = v_fma(p, r, v_set1(5.0000001201e-1f));
	p = v_fma(p, r * r, r) + v_set1(1.0f);
#if VEC_ISA == 512
	vf e = _mm512_castsi512_ps(
		_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(z), 23)));
#elif VEC_ISA == 256
	vf e = _mm256_castsi256_ps(
		_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(z), 23)));
#else
	typedef uint32_t vu __attribute__((vector_size(16)));
	vf e = (vf)((vu)p + ((vu)z << 23));
#endif
	return v_zero_below(x, lowest, e);
}

VEC_INLINE float v_exp1(float x)
{
	float f[VL];
	v_store(f, v_exp(v_set1(x)));
	return f[0];
}

VEC_INLINE vf v_load_half(const uint16_t *p)
{
#if VEC_ISA == 512
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VEC_ISA == 256
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
	// Exponent and mantissa move up, 2^112 makes up for the difference of the biases; infinities and NaNs get all ones.
	typedef uint32_t vu __attribute__((vector_size(16)));
	vu u = {p[0], p[1], p[2], p[3]};
	vu magnitude = (u & 0x7fff) << 13;
	vf f = (vf)magnitude * v_set1(0x1p112f);
	return (vf)((vu)f | ((u & 0x8000) << 16) | ((vu)((u & 0x7c00) == 0x7c00) & 0x7f800000));
#endif
}

VEC_INLINE vf v_load_bfloat(const uint16_t *p)
{
#if VEC_ISA == 512
	return _mm512_castsi512_ps(
		_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
#elif VEC_ISA == 256
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
#else
	return (vf){cpu_bfloat_to_float(p[0]), cpu_bfloat_to_float(p[1]), cpu_bfloat_to_float(p[2]),
	            cpu_bfloat_to_float(p[3])};
#endif
}

// The first n of VL elements of type t, the rest zero. VL elements are read only if n is VL.
VEC_INLINE vf v_load_as(const void *p, enum dtype t, int n)
{
	uint16_t half[VL];
	float full[VL];
	if (n < VL) {
		if (t == DTYPE_F32) {
			memset(full, 0, sizeof(full));
			memcpy(full, p, (size_t)n * sizeof(float));
			p = full;
		} else {
			memset(half, 0, sizeof(half));
			memcpy(half, p, (size_t)n * sizeof(uint16_t));
			p = half;
		}
	}
	return t == DTYPE_F32 ? v_load(p) : t == DTYPE_F16 ? v_load_half(p) : v_load_bfloat(p);
}

// Rounds to the nearest float16, ties to even; too large becomes infinite.
VEC_INLINE void v_store_half(uint16_t *p, vf v)
{
#if VEC_ISA == 512
	_mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif VEC_ISA == 256
	_mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
	for (int i = 0; i < VL; i++) {
		uint16_t h = half_from_float(v[i]);
		memcpy(p + i, &h, sizeof(h));
	}
#endif
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays one.
VEC_INLINE uint16_t v_bfloat1(float x)
{
	uint32_t u;
	memcpy(&u, &x, sizeof(u));
	if (x != x)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
