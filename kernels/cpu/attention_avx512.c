#if defined(__x86_64__)
#define VEC_ISA 512
#include "kernels/cpu/attention_kernel.h"
#endif
