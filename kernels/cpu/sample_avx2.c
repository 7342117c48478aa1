#if defined(__x86_64__)
#define VEC_ISA 256
#include "kernels/cpu/sample_kernel.h"
#endif
