#define VEC_ISA 0
#include "kernels/cpu/rms_norm_rows.h"
