// RMS norm against double precision, and the same bits on every instruction set.
#include "op_check.h"

static const struct {
	int rows, cols;
} cases[] = {{1, 1}, {1, 3}, {2, 15}, {3, 16}, {1, 17}, {5, 64}, {7, 100}, {1, 576}, {33, 576}, {64, 2048}, {3, 4099}};

static void reference(double *out, const float *x, const float *w, int cols, float eps)
{
	double sum = 0;
	for (int i = 0; i < cols; i++)
		sum += (double)x[i] * (double)x[i];
	double s = 1 / sqrt(sum / cols + (double)eps);
	for (int i = 0; i < cols; i++)
		out[i] = (double)x[i] * s * (double)w[i];
}

Test(rms_norm, equals_double_precision_and_is_the_same_on_all_instruction_sets_and_threads)
{
	struct op_random random = {1};
	for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
		int rows = cases[c].rows, cols = cases[c].cols;
		size_t n = (size_t)rows * (size_t)cols;
		float *x = op_random_floats(&random, n, 3), *w = op_random_floats(&random, (size_t)cols, 1);
		double *expected = malloc(n * sizeof(double));
		float *first = NULL;
		for (int r = 0; r < rows; r++)
			reference(expected + r * cols, x + r * cols, w, cols, 1e-5f);
		FOR_EACH_ISA(isa) for (int threads = 1; threads <= 3; threads += 2) {
			struct ops_context *k = op_context(isa, threads);
			float *out = op_poisoned(n);
			cpu_rms_norm(k, &(struct rms_norm_args){.n_rows = rows, .cols = cols, .eps = 1e-5f, .x = x, .weight = w,
			                                        .out = out});
			op_assert_close(out, expected, n, 2e-6, 1e-3, "%s %d x %d", op_isa_name[isa], rows, cols);
			if (first)
				op_assert_same_bits(out, first, n, "%s %d x %d", op_isa_name[isa], rows, cols);
			else
				first = memcpy(malloc(n * sizeof(float)), out, n * sizeof(float));
			// In place.
			memcpy(out, x, n * sizeof(float));
			cpu_rms_norm(k, &(struct rms_norm_args){.n_rows = rows, .cols = cols, .eps = 1e-5f, .x = out, .weight = w,
			                                        .out = out});
			op_assert_same_bits(out, first, n, "in place, %s %d x %d", op_isa_name[isa], rows, cols);
			free(out);
			ops_cpu()->destroy(&k);
		}
		free(x);
		free(w);
		free(expected);
		free(first);
	}
}

Test(rms_norm, gathers_the_rows_it_is_told_to)
{
	struct op_random random = {2};
	enum { ROWS = 40, COLS = 700, PICKED = 30 };
	float *x = op_random_floats(&random, ROWS * COLS, 1), *w = op_random_floats(&random, COLS, 1);
	int32_t index[PICKED];
	for (int i = 0; i < PICKED; i++)
		index[i] = i == 0 ? 0 : index[i - 1] + 1 + (i % 4 == 0);
	FOR_EACH_ISA(isa) {
		struct ops_context *k = op_context(isa, 2);
		float *all = op_poisoned(ROWS * COLS), *some = op_poisoned(PICKED * COLS);
		struct rms_norm_args a = {.n_rows = ROWS, .cols = COLS, .eps = 1e-6f, .x = x, .weight = w, .out = all};
		cpu_rms_norm(k, &a);
		a.n_rows = PICKED;
		a.row_index = index;
		a.out = some;
		cpu_rms_norm(k, &a);
		for (int i = 0; i < PICKED; i++)
			op_assert_same_bits(some + i * COLS, all + index[i] * COLS, COLS, "%s row %d", op_isa_name[isa], i);
		free(all);
		free(some);
		ops_cpu()->destroy(&k);
	}
	free(x);
	free(w);
}
