#define VEC_ISA 0
#include "kernels/cpu/rope_kv_rows.h"
