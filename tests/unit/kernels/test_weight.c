// What a matrix costs, what it borrows, what is refused; and that the first look at a machine's speed ends.
#include <criterion/criterion.h>
#include <math.h>

#include "cpu_context.h"
#include "kernels/cpu/dequant.h"
#include "kernels/cpu/weight.h"
#include "random_weight.h"

Test(weight, has_exactly_the_predicted_size_in_every_role)
{
	struct ops_context *c = context_new(ISA_AUTO, 2);
	for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
		if (!ops_cpu()->weight_supported(t))
			continue;
		for (int64_t rows = 1; rows <= 49; rows += 16)
			for (int role = 0; role < 4; role++) {
				uint8_t *data = random_weight(t, rows, 256, 1);
				struct weight_source s = {.dtype = t, .rows = rows, .cols = 256, .data = data};
				struct weight *w;
				bool embedding = role & 1, matrix = role & 2;
				cr_assert_eq(ops_cpu()->weight_create(c, &w, &s, embedding, matrix, NULL), STATUS_OK);
				cr_assert_eq(ops_cpu()->weight_bytes(w), ops_cpu()->weight_bytes_predicted(&s, embedding, matrix), "%s, %lld rows",
				             dtype_info(t)->name, (long long)rows);
				cr_assert_eq(ops_cpu()->weight_borrows(w), !matrix);
				ops_cpu()->weight_destroy(c, &w);
				cr_assert_null(w);
				ops_cpu()->weight_destroy(c, &w);
				free(data);
			}
	}
	context_free(c);
}

Test(weight, of_quantised_types_stays_within_3_percent_of_the_file)
{
	for (enum dtype t = 0; t < DTYPE_COUNT; t++)
		if (ops_cpu()->weight_supported(t)) {
			struct weight_source s = {.dtype = t, .rows = 576, .cols = 1536};
			double file = 576.0 * (double)dtype_row_bytes(t, 1536);
			cr_assert_leq((double)ops_cpu()->weight_bytes_predicted(&s, false, true), 1.03 * file, "%s", dtype_info(t)->name);
		}
}

Test(weight, of_an_unsupported_type_or_a_broken_row_is_refused_by_name)
{
	struct ops_context *c = context_new(ISA_AUTO, 1);
	struct error e;
	struct weight *w;
	char data[64] = {0};
	cr_assert_eq(ops_cpu()->weight_create(c, &w, &(struct weight_source){.dtype = DTYPE_FP8, .rows = 1, .cols = 32, .data = data},
	                                      false, true, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "fp8"), "%s", e.text);
	cr_assert_null(w);
	cr_assert_eq(ops_cpu()->weight_create(c, &w, &(struct weight_source){.dtype = DTYPE_Q4_K, .rows = 1, .cols = 96, .data = data},
	                                      false, true, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "q4_k") && strstr(e.text, "256"), "%s", e.text);
	context_free(c);
}

Test(weight, block_of_a_panel_holds_the_weights_of_the_file)
{
	enum { ROWS = 21, COLS = 512 };
	struct ops_context *c = context_new(ISA_AUTO, 2);
	float row[COLS];
	for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
		if (!ops_cpu()->weight_supported(t) || dtype_info(t)->block_elements == 1)
			continue;
		uint8_t *data = random_weight(t, ROWS, COLS, 5);
		struct weight *w;
		struct panel_block b;
		cr_assert_eq(ops_cpu()->weight_create(c, &w, &(struct weight_source){.dtype = t, .rows = ROWS, .cols = COLS, .data = data},
		                                      false, true, NULL), STATUS_OK);
		for (int r = 0; r < ROWS; r++) {
			dequant_row(t, data + r * dtype_row_bytes(t, COLS), COLS, row);
			for (int k = 0; k < COLS; k++) {
				if (k % BLOCK_K == 0)
					panel_block_read(w, r / PANEL_ROWS, k / BLOCK_K, &b);
				float v = b.scale[k % 32 / 16][r % 16] * (float)b.w[r % 16][k % 32] + b.minimum[r % 16];
				cr_assert_eq(v, row[k], "%s, row %d, k %d: expected %.9g, found %.9g", dtype_info(t)->name, r, k, row[k], v);
			}
		}
		panel_block_read(w, 1, 3, &b);
		for (int r = ROWS - 16; r < PANEL_ROWS; r++)
			cr_assert(b.scale[0][r] == 0 && b.minimum[r] == 0, "%s: a row beyond the last is not zero", dtype_info(t)->name);
		ops_cpu()->weight_destroy(c, &w);
		free(data);
	}
	context_free(c);
}

Test(measure, reports_a_bandwidth_and_a_speed)
{
	struct ops_context *c = context_new(ISA_AUTO, 2);
	struct ops_speed s = {0};
	ops_cpu()->measure(c, 20, &s);
	cr_assert(isfinite(s.bandwidth_bytes_per_s) && s.bandwidth_bytes_per_s > 1e7, "%g", s.bandwidth_bytes_per_s);
	cr_assert(isfinite(s.matmul_flops) && s.matmul_flops > 1e7, "%g", s.matmul_flops);
	context_free(c);
}
