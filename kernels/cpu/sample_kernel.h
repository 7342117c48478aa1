// Body of sample_portable.c, sample_avx2.c and sample_avx512.c.
#include "kernels/cpu/sample.h"
#include "kernels/cpu/vec.h"

#include <math.h>

VEC_INLINE bool any_at_least(vf x, float least)
{
#if VEC_ISA == 512
	return _mm512_cmp_ps_mask(x, v_set1(least), _CMP_GE_OQ) != 0;
#elif VEC_ISA == 256
	return _mm256_movemask_ps(_mm256_cmp_ps(x, v_set1(least), _CMP_GE_OQ)) != 0;
#else
	return x[0] >= least || x[1] >= least || x[2] >= least || x[3] >= least;
#endif
}

// x[i..], padded with `fill` behind n.
VEC_INLINE vf load_to(const float *x, int i, int n, float fill)
{
	float rest[VL];
	if (i + VL <= n)
		return v_load(x + i);
	for (int k = 0; k < VL; k++)
		rest[k] = i + k < n ? x[i + k] : fill;
	return v_load(rest);
}

static int chunk_end(int from, int n)
{
	return n - from < SAMPLE_CHUNK ? n : from + SAMPLE_CHUNK;
}

static void chunk_max(float *max, const float *x, int n)
{
	for (int from = 0; from < n; from += SAMPLE_CHUNK) {
		int end = chunk_end(from, n), i = from;
		vf m[4];
		for (int k = 0; k < 4; k++)
			m[k] = v_set1(-INFINITY);
		for (; i + 4 * VL <= end; i += 4 * VL)
			for (int k = 0; k < 4; k++)
				m[k] = v_max(v_load(x + i + k * VL), m[k]);
		for (; i < end; i += VL)
			m[0] = v_max(load_to(x, i, end, -INFINITY), m[0]);
		*max++ = v_hmax(v_max(v_max(m[0], m[1]), v_max(m[2], m[3])));
	}
}

static void chunk_sum_exp(float *sum, const float *x, int n, float shift)
{
	vf s = v_set1(shift), none = v_set1(-INFINITY);
	for (int from = 0; from < n; from += SAMPLE_CHUNK) {
		int end = chunk_end(from, n);
		vf total = v_set1(0);
		for (int i = from; i < end; i += VL)
			total = total + v_exp(v_max(load_to(x, i, end, -INFINITY) - s, none));
		*sum++ = v_sum(total);
	}
}

static void weigh(float *w, float *sum, const float *x, int n, float max, float temperature, float least)
{
	vf m = v_set1(max), t = v_set1(temperature), none = v_set1(-INFINITY);
	for (int from = 0; from < n; from += SAMPLE_CHUNK) {
		int end = chunk_end(from, n);
		vf total = v_set1(0);
		for (int i = from; i < end; i += VL) {
			vf e = v_exp(v_max((load_to(x, i, end, -INFINITY) - m) / t, none));
			e = v_zero_below(e, least, e);
			total = total + e;
			if (i + VL <= end) {
				v_store(w + i, e);
			} else {
				float rest[VL];
				v_store(rest, e);
				memcpy(w + i, rest, (size_t)(end - i) * sizeof(float));
			}
		}
		*sum++ = v_sum(total);
	}
}

static int collect(int32_t *list, const float *w, int n, float least)
{
	int count = 0, i = 0;
	for (; i + VL <= n; i += VL)
		if (any_at_least(v_load(w + i), least))
			for (int k = 0; k < VL; k++)
				if (w[i + k] >= least)
					list[count++] = i + k;
	for (; i < n; i++)
		if (w[i] >= least)
			list[count++] = i;
	return count;
}

const struct sample_kernel VEC_FN(sample_kernel) = {chunk_max, chunk_sum_exp, weigh, collect};
