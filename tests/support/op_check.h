// What the tests of operations share: contexts for each instruction set present, random and poisoned arrays, and a
// comparison that names the first bad index with both values.
#ifndef STAGECOACH_TESTS_OP_CHECK_H
#define STAGECOACH_TESTS_OP_CHECK_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/half.h"
#include "kernels/cpu/cpu.h"

static const char *const op_isa_name[] = {"auto", "portable", "avx2", "avx512", "avx512-bf16"};

// for each instruction set of this processor; AVX512_BF16 shares these operations with AVX512.
#define FOR_EACH_ISA(isa) for (enum ops_isa isa = ISA_PORTABLE; isa <= cpu_best_isa() && isa <= ISA_AVX512; isa++)

static inline struct ops_context *op_context(enum ops_isa isa, int threads)
{
	struct ops_context *c;
	struct error e = {""};
	struct ops_options o = {.threads = threads, .isa = isa, .max_rows = 64};
	cr_assert_eq(ops_cpu()->create(&c, &o, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(c->isa, isa);
	return c;
}

struct op_random {
	uint64_t state;
};

static inline uint32_t op_random_bits(struct op_random *r)
{
	uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return (uint32_t)(z >> 32);
}

static inline int op_random_below(struct op_random *r, int n)
{
	return (int)(op_random_bits(r) % (uint32_t)n);
}

// About normal, with the deviation given.
static inline float op_random_normal(struct op_random *r, float deviation)
{
	float sum = 0;
	for (int i = 0; i < 6; i++)
		sum += (float)op_random_bits(r) * 0x1p-32f - 0.5f;
	return sum * 1.41421356f * deviation;
}

static inline float *op_random_floats(struct op_random *r, size_t n, float deviation)
{
	float *p = malloc(n * sizeof(float) + 1);
	for (size_t i = 0; i < n; i++)
		p[i] = op_random_normal(r, deviation);
	return p;
}

// An output that nothing has written: NaN.
static inline float *op_poisoned(size_t n)
{
	float *p = malloc(n * sizeof(float) + 1);
	memset(p, 0xff, n * sizeof(float));
	return p;
}

// |found - expected| <= tolerance * max(|expected|, scale)
#define op_assert_close(found, expected, n, tolerance, scale, ...)                                                     \
	do {                                                                                                           \
		char what_[256];                                                                                       \
		snprintf(what_, sizeof(what_), __VA_ARGS__);                                                           \
		for (size_t i_ = 0; i_ < (size_t)(n); i_++) {                                                          \
			double f_ = (double)(found)[i_], e_ = (double)(expected)[i_];                                  \
			double limit_ = (tolerance) * fmax(fabs(e_), (scale));                                         \
			cr_assert(fabs(f_ - e_) <= limit_, "%s: [%zu] is %.9g, expected %.9g", what_, i_, f_, e_);     \
		}                                                                                                      \
	} while (0)

#define op_assert_same_bits(found, expected, n, ...)                                                                   \
	do {                                                                                                           \
		char what_[256];                                                                                       \
		snprintf(what_, sizeof(what_), __VA_ARGS__);                                                           \
		for (size_t i_ = 0; i_ < (size_t)(n); i_++)                                                            \
			cr_assert(!memcmp(&(found)[i_], &(expected)[i_], sizeof((found)[i_])),                         \
			          "%s: [%zu] is %.9g, expected the same bits as %.9g", what_, i_, (double)(found)[i_], \
			          (double)(expected)[i_]);                                                             \
	} while (0)

// Round to nearest even, bit by bit, as a reference for the conversions under test.
static inline uint16_t op_half(float x)
{
	return half_from_float(x);
}

static inline uint16_t op_bfloat(float x)
{
	uint32_t u;
	memcpy(&u, &x, sizeof(u));
	uint32_t down = u & 0xffff0000u, up = down + 0x10000u;
	uint32_t rest = u & 0xffffu;
	uint32_t chosen = rest > 0x8000u ? up : rest < 0x8000u ? down : (down >> 16 & 1) ? up : down;
	return (uint16_t)(chosen >> 16);
}

static inline size_t op_type_bytes(enum dtype t)
{
	return t == DTYPE_F32 ? 4 : 2;
}

static inline void op_put(void *p, size_t i, enum dtype t, float x)
{
	if (t == DTYPE_F32)
		((float *)p)[i] = x;
	else
		((uint16_t *)p)[i] = t == DTYPE_F16 ? op_half(x) : op_bfloat(x);
}

static inline float op_get(const void *p, size_t i, enum dtype t)
{
	if (t == DTYPE_F32)
		return ((const float *)p)[i];
	uint16_t h = ((const uint16_t *)p)[i];
	return t == DTYPE_F16 ? cpu_half_to_float(h) : cpu_bfloat_to_float(h);
}

#endif
