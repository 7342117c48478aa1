// Body of rms_norm_portable.c, rms_norm_avx2.c and rms_norm_avx512.c.
#include "kernels/cpu/rms_norm.h"
#include "kernels/cpu/rms_norm_kernel.h"

void VEC_FN(rms_norm_rows)(const struct rms_norm_args *a, int from, int to)
{
	const float *x = a->x;
	float *out = a->out;
	for (int r = from; r < to; r++) {
		int64_t source = a->row_index ? a->row_index[r] : r;
		rms_norm_row(out + (int64_t)r * a->cols, x + source * a->cols, a->weight, a->cols, a->eps);
	}
}
