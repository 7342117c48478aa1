#define VEC_ISA 0
#include "kernels/cpu/sample_kernel.h"
