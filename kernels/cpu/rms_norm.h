// RMS norm of rows [from, to) for each instruction set; private to rms_norm*.c.
#ifndef STAGECOACH_KERNELS_CPU_RMS_NORM_H
#define STAGECOACH_KERNELS_CPU_RMS_NORM_H

#include "kernels/cpu/cpu.h"

void rms_norm_rows_portable(const struct rms_norm_args *, int from, int to);
void rms_norm_rows_avx2(const struct rms_norm_args *, int from, int to);
void rms_norm_rows_avx512(const struct rms_norm_args *, int from, int to);

#endif
