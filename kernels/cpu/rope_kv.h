// Rows [from, to) of rope_kv for each instruction set; private to rope_kv*.c.
#ifndef STAGECOACH_KERNELS_CPU_ROPE_KV_H
#define STAGECOACH_KERNELS_CPU_ROPE_KV_H

#include "kernels/cpu/cpu.h"

void rope_kv_rows_portable(const struct rope_kv_args *, int from, int to);
void rope_kv_rows_avx2(const struct rope_kv_args *, int from, int to);
void rope_kv_rows_avx512(const struct rope_kv_args *, int from, int to);

#endif
