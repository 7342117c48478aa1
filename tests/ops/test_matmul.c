// Matrix products against double precision on the dequantised weights, and the rule that a result does not depend on
// the batch around it.
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

#include "cpu_context.h"
#include "kernels/cpu/dequant.h"
#include "random_weight.h"

static const enum dtype types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0,
                                   DTYPE_Q5_1, DTYPE_Q8_0, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
enum { N_TYPES = sizeof types / sizeof *types };

static const enum ops_isa isas[] = {ISA_PORTABLE, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16};
static const char *const isa_names[] = {[ISA_PORTABLE] = "portable", [ISA_AVX2] = "avx2", [ISA_AVX512] = "avx512",
                                        [ISA_AVX512_BF16] = "avx512-bf16"};

static bool have(enum ops_isa isa)
{
	if (isa <= cpu_best_isa())
		return true;
	fprintf(stderr, "SKIPPED: this machine lacks %s\n", isa_names[isa]);
	return false;
}

static float *random_x(int64_t n, uint64_t seed)
{
	float *x = xmalloc((unsigned long)n * sizeof *x);
	for (int64_t i = 0; i < n; i++) // some outliers, as activations have
		x[i] = random_float(&seed) * (random_next(&seed) % 61 ? 1.0f : 30.0f);
	return x;
}

static float *poisoned(int64_t n)
{
	float *y = xmalloc((unsigned long)n * sizeof *y);
	memset(y, 0xff, (size_t)n * sizeof *y); // NaN
	return y;
}

static struct weight *load(struct ops_context *c, enum dtype t, int64_t rows, int64_t cols, const void *data)
{
	struct weight *w;
	struct error e;
	struct weight_source s = {.dtype = t, .rows = rows, .cols = cols, .data = data};
	cr_assert_eq(cpu_weight_create(c, &w, &s, false, true, &e), STATUS_OK);
	cr_assert_eq(cpu_weight_bytes(w), cpu_weight_bytes_predicted(&s, false, true));
	return w;
}

// Error bound: float32 rounding relative to sum |w x|, and with quantised weights half a step of each block of 32
// activations, whose largest is 32639 steps.
static void compare(const char *what, enum dtype t, int64_t rows, int64_t cols, int n, const void *data, const float *x,
                    const float *y)
{
	float *w = xmalloc((unsigned long)cols * sizeof *w);
	bool quantised = dtype_info(t)->block_elements > 1;
	for (int64_t r = 0; r < rows; r++) {
		dequant_row(t, (const uint8_t *)data + r * dtype_row_bytes(t, cols), cols, w);
		for (int i = 0; i < n; i++) {
			double sum = 0, bound = 1e-30;
			for (int64_t k = 0; k < cols; k++) {
				double largest = 0;
				for (int64_t j = k / 32 * 32; quantised && j < k / 32 * 32 + 32; j++)
					largest = fmax(largest, fabsf(x[i * cols + j]));
				sum += (double)w[k] * x[i * cols + k];
				bound += 2e-6 * fabs((double)w[k] * x[i * cols + k]) + fabs(w[k]) * largest / 32639 / 2;
			}
			double error = fabs(sum - y[i * rows + r]);
			cr_assert(error <= bound, "%s %s %lldx%lld: row %d of %d, output %lld: expected %.9g, found %.9g",
			          what, dtype_info(t)->name, (long long)rows, (long long)cols, i, n, (long long)r, sum,
			          y[i * rows + r]);
		}
	}
	free(w);
}

struct shape { int64_t rows, cols; int n; };
static const struct shape shapes[] = {
	{1, 256, 1}, {1, 256, 3}, {17, 256, 13}, {192, 768, 1}, {40, 512, 25}, {33, 1536, 12}, {16, 256, 131}, {576, 256, 2},
	{100, 512, 1}, {1000, 256, 5},
};
static const struct shape float_shapes[] = {{1, 1, 1}, {3, 5, 7}, {16, 31, 12}, {50, 577, 14}, {31, 129, 1}};

static void check_shape(enum ops_isa isa, enum dtype t, const struct shape *s)
{
	struct ops_context *c = context_new(isa, 2);
	uint8_t *data = random_weight(t, s->rows, s->cols, 7);
	float *x = random_x(s->n * s->cols, 8), *y = poisoned(s->n * s->rows);
	struct weight *w = load(c, t, s->rows, s->cols, data);
	cpu_matmul(c, &(struct matmul_args){.n_rows = s->n, .x = x, .n_parts = 1, .part[0] = {.w = w, .y = y}});
	compare(isa_names[isa], t, s->rows, s->cols, s->n, data, x, y);
	cpu_weight_destroy(c, &w);
	cr_assert_null(w);
	free(data);
	free(x);
	free(y);
	context_free(c);
}

Test(matmul, equals_double_precision_on_the_dequantised_weights)
{
	for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
		if (!have(isas[i]))
			continue;
		for (int t = 0; t < N_TYPES; t++) {
			for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
				check_shape(isas[i], types[t], &shapes[s]);
			for (size_t s = 0; s < sizeof float_shapes / sizeof *float_shapes; s++)
				if (dtype_info(types[t])->block_elements == 1)
					check_shape(isas[i], types[t], &float_shapes[s]);
		}
	}
}

enum { MANY = 130 };

static void check_batches(enum ops_isa isa, enum dtype t, int64_t rows, int64_t cols)
{
	uint8_t *data = random_weight(t, rows, cols, 9);
	float *x = random_x(MANY * cols, 10), *whole = poisoned(MANY * rows), *y = poisoned(MANY * rows);
	const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 25, 121};
	for (int threads = 1; threads <= 3; threads += 2) {
		struct ops_context *c = context_new(isa, threads);
		struct weight *w = load(c, t, rows, cols, data);
		if (threads == 1)
			cpu_matmul(c, &(struct matmul_args){.n_rows = MANY, .x = x, .n_parts = 1, .part[0] = {.w = w, .y = whole}});
		for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
			int n = counts[i], first = (int)(i * 5 % (size_t)(MANY - n + 1));
			memset(y, 0xff, (size_t)(MANY * rows) * sizeof *y);
			cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x + first * cols, .n_parts = 1, .part[0] = {.w = w, .y = y}});
			for (int64_t j = 0; j < n * rows; j++)
				cr_assert(!memcmp(&y[j], &whole[first * rows + j], 4), "%s %s, %d rows from %d, %d threads, at %lld: %.9g, not %.9g",
				          isa_names[isa], dtype_info(t)->name, n, first, threads, (long long)j, y[j], whole[first * rows + j]);
			uint32_t after;
			memcpy(&after, &y[n * rows < MANY * rows ? n * rows : 0], 4);
			cr_assert(n == MANY || after == 0xffffffff, "%s: written beyond the last row", dtype_info(t)->name);
		}
		cpu_weight_destroy(c, &w);
		context_free(c);
	}
	free(data);
	free(x);
	free(whole);
	free(y);
}

Test(matmul, gives_the_same_bits_whatever_the_batch_and_the_threads)
{
	for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
		if (have(isas[i]))
			for (int t = 0; t < N_TYPES; t++)
				check_batches(isas[i], types[t], 43, 256);
}

Test(matmul, gives_the_same_bits_on_every_instruction_set)
{
	enum { ROWS = 45, COLS = 768, N = 14 };
	for (int t = 0; t < N_TYPES; t++) {
		uint8_t *data = random_weight(types[t], ROWS, COLS, 11);
		float *x = random_x(N * COLS, 12), *expected = poisoned(N * ROWS), *y = poisoned(N * ROWS);
		for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
			if (isas[i] > cpu_best_isa())
				continue;
			struct ops_context *c = context_new(isas[i], 2);
			struct weight *w = load(c, types[t], ROWS, COLS, data);
			cpu_matmul(c, &(struct matmul_args){.n_rows = N, .x = x, .n_parts = 1,
			                                    .part[0] = {.w = w, .y = isas[i] == ISA_PORTABLE ? expected : y}});
			for (int j = 0; j < N * ROWS && isas[i] != ISA_PORTABLE; j++)
				cr_assert(!memcmp(&y[j], &expected[j], 4), "%s %s at %d: %.9g, portable %.9g", isa_names[isas[i]],
				          dtype_info(types[t])->name, j, y[j], expected[j]);
			cpu_weight_destroy(c, &w);
			context_free(c);
		}
		free(data);
		free(x);
		free(expected);
		free(y);
	}
}

static float silu(float x)
{
	return (float)(x / (1 + exp(-(double)x)));
}

static void check_fused(enum ops_isa isa, enum dtype t, enum dtype t2, int n, int64_t rows)
{
	enum { COLS = 256 };
	struct ops_context *c = context_new(isa, 3);
	uint8_t *a = random_weight(t, rows, COLS, 1), *b = random_weight(t2, rows, COLS, 2), *d = random_weight(t, 19, COLS, 3);
	struct weight *wa = load(c, t, rows, COLS, a), *wb = load(c, t2, rows, COLS, b), *wd = load(c, t, 19, COLS, d);
	float *x = random_x(n * COLS, 4), *bias = random_x(rows, 5), *bias2 = random_x(rows, 6);
	float *ya = poisoned(n * rows), *yb = poisoned(n * rows), *yd = poisoned(n * 19), *y = poisoned(n * rows);
	struct matmul_args three = {.n_rows = n, .x = x, .n_parts = 3, .part = {{wa, NULL, ya}, {wb, NULL, yb}, {wd, NULL, yd}}};
	cpu_matmul(c, &three);
	compare("first of three", t, rows, COLS, n, a, x, ya);
	compare("second of three", t2, rows, COLS, n, b, x, yb);
	compare("third of three", t, 19, COLS, n, d, x, yd);
	cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 1, .part = {{wa, bias, y}}});
	for (int64_t i = 0; i < n * rows; i++)
		cr_assert_eq(y[i], ya[i] + bias[i % rows], "bias at %lld", (long long)i);
	cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 1, .part = {{wb, NULL, y}}, .add = true});
	for (int64_t i = 0; i < n * rows; i++)
		cr_assert_eq(y[i], (ya[i] + bias[i % rows]) + yb[i], "residual at %lld", (long long)i);
	for (int with_bias = 0; with_bias < 2; with_bias++) {
		cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 2, .swiglu = true,
		                                    .part = {{wa, with_bias ? bias : NULL, y}, {wb, with_bias ? bias2 : NULL, NULL}}});
		for (int64_t i = 0; i < n * rows; i++) {
			float g = with_bias ? ya[i] + bias[i % rows] : ya[i], u = with_bias ? yb[i] + bias2[i % rows] : yb[i];
			double expected = (double)silu(g) * u;
			cr_assert(fabs(y[i] - expected) <= 1e-6 * fabs(expected) + 1e-30, "swiglu %s %s at %lld: %.9g, expected %.9g",
			          isa_names[isa], dtype_info(t)->name, (long long)i, y[i], expected);
		}
	}
	cpu_weight_destroy(c, &wa);
	cpu_weight_destroy(c, &wb);
	cpu_weight_destroy(c, &wd);
	void *all[] = {a, b, d, x, bias, bias2, ya, yb, yd, y};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		free(all[i]);
	context_free(c);
}

Test(matmul, fuses_parts_bias_residual_and_gated_activation)
{
	const enum dtype pairs[][2] = {{DTYPE_F32, DTYPE_F32},   {DTYPE_Q4_1, DTYPE_Q4_1}, {DTYPE_Q8_0, DTYPE_Q8_0},
	                               {DTYPE_Q4_K, DTYPE_Q6_K}, {DTYPE_F16, DTYPE_Q4_0},  {DTYPE_BF16, DTYPE_F32},
	                               {DTYPE_Q6_K, DTYPE_Q6_K}};
	for (size_t i = 0; i < sizeof isas / sizeof *isas; i++)
		if (have(isas[i]))
			for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
				for (int n = 1; n <= 27; n += 13) {
					check_fused(isas[i], pairs[p][0], pairs[p][1], n, 70);
					check_fused(isas[i], pairs[p][0], pairs[p][1], n, 5);
				}
}

Test(matmul, of_zeros_and_of_tiny_and_huge_activations_stays_finite)
{
	for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
		if (!have(isas[i]))
			continue;
		for (int t = 0; t < N_TYPES; t++) {
			struct ops_context *c = context_new(isas[i], 1);
			uint8_t *data = random_weight(types[t], 16, 256, 3);
			struct weight *w = load(c, types[t], 16, 256, data);
			float x[3 * 256], y[3 * 16];
			for (int k = 0; k < 256; k++) {
				x[k] = 0;
				x[256 + k] = k % 2 ? 1e-38f : -1e-42f;
				x[512 + k] = k % 3 ? 1e30f : -1e-30f;
			}
			for (int n = 1; n <= 3; n += 2) {
				memset(y, 0xff, sizeof y);
				cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 1, .part[0] = {.w = w, .y = y}});
				for (int r = 0; r < 16 * n; r++)
					cr_assert(isfinite(y[r]) && (r >= 16 || y[r] == 0), "%s at %d: %g", dtype_info(types[t])->name, r, y[r]);
			}
			cpu_weight_destroy(c, &w);
			free(data);
			context_free(c);
		}
	}
}
