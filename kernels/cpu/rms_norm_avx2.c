#if defined(__x86_64__)
#define VEC_ISA 256
#include "kernels/cpu/rms_norm_rows.h"
#endif
