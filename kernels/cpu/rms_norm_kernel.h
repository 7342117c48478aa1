// The RMS norm of one row, for each instruction set; see vec.h. The sum of squares runs in 16 lanes, element i in lane
// i % 16, without fused multiply-adds, and the lanes are folded by halves: all instruction sets give the same bits.
#ifndef STAGECOACH_KERNELS_CPU_RMS_NORM_KERNEL_H
#define STAGECOACH_KERNELS_CPU_RMS_NORM_KERNEL_H

#include <math.h>

#include "kernels/cpu/vec.h"

enum { NORM_VECTORS = 16 / VL };

// out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
VEC_INLINE void rms_norm_row(float *out, const float *x, const float *weight, int cols, float eps)
{
	vf a[NORM_VECTORS];
	float rest[16] = {0};
	int i = 0;
	for (int k = 0; k < NORM_VECTORS; k++)
		a[k] = v_set1(0);
	for (; i + 16 <= cols; i += 16)
		for (int k = 0; k < NORM_VECTORS; k++) {
			vf v = v_load(x + i + k * VL);
			a[k] = a[k] + v * v;
		}
	memcpy(rest, x + i, (size_t)(cols - i) * sizeof(float));
	for (int k = 0; k < NORM_VECTORS; k++) {
		vf v = v_load(rest + k * VL);
		a[k] = a[k] + v * v;
	}
	for (int n = NORM_VECTORS / 2; n; n /= 2)
		for (int k = 0; k < n; k++)
			a[k] = a[k] + a[k + n];
	float scale = 1.0f / sqrtf(v_sum(a[0]) / (float)cols + eps);
	vf s = v_set1(scale);
	i = 0;
	for (; i + VL <= cols; i += VL)
		v_store(out + i, v_load(x + i) * s * v_load(weight + i));
	for (; i < cols; i++)
		out[i] = x[i] * scale * weight[i];
}

#endif
