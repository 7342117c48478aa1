#define VEC_ISA 0
#include "kernels/cpu/attention_kernel.h"
