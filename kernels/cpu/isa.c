// Which instruction set this processor has. A set counts only if all of the extensions that its files are built with are
// present: see CMakeLists.txt.
#include "kernels/cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_f16c(void)
{
	unsigned a, b, c, d;
	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512_bf16(void)
{
	unsigned a, b, c, d;
	return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

enum ops_isa cpu_best_isa(void)
{
	__builtin_cpu_init();
	if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi2") || !has_f16c())
		return ISA_PORTABLE;
	if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
	    !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni"))
		return ISA_AVX2;
	return has_avx512_bf16() ? ISA_AVX512_BF16 : ISA_AVX512;
}
#else
enum ops_isa cpu_best_isa(void)
{
	return ISA_PORTABLE;
}
#endif
