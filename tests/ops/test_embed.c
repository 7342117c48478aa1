// Looked-up rows are the dequantised rows, from the file's bytes and from the panels of a tied head alike.
#include <criterion/criterion.h>

#include "cpu_context.h"
#include "kernels/cpu/dequant.h"
#include "random_weight.h"

Test(embed, gives_the_dequantised_rows_in_both_forms)
{
	enum { ROWS = 53, COLS = 512, N = 40 };
	static float out[N * COLS], row[COLS];
	for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
		if (!cpu_weight_supported(t))
			continue;
		uint8_t *data = random_weight(t, ROWS, COLS, 21);
		struct weight_source s = {.dtype = t, .rows = ROWS, .cols = COLS, .data = data};
		for (int tied = 0; tied < 2; tied++) {
			struct ops_context *c = context_new(ISA_PORTABLE, 2);
			struct weight *w;
			cr_assert_eq(cpu_weight_create(c, &w, &s, true, tied, NULL), STATUS_OK);
			cr_assert_eq(cpu_weight_borrows(w), !tied);
			cr_assert_eq(cpu_weight_bytes(w), cpu_weight_bytes_predicted(&s, true, tied));
			int32_t ids[N];
			for (int i = 0; i < N; i++)
				ids[i] = i * 7 % ROWS;
			for (int n = 1; n <= N; n += N - 1) {
				memset(out, 0xff, sizeof out);
				cpu_embed(c, &(struct embed_args){.table = w, .n_rows = n, .ids = ids, .out = out});
				for (int i = 0; i < n; i++) {
					dequant_row(t, data + ids[i] * dtype_row_bytes(t, COLS), COLS, row);
					for (int k = 0; k < COLS; k++)
						cr_assert_eq(out[i * COLS + k], row[k], "%s, tied %d: id %d, column %d: expected %.9g, found %.9g",
						             dtype_info(t)->name, tied, ids[i], k, row[k], out[i * COLS + k]);
				}
			}
			cpu_weight_destroy(c, &w);
			context_free(c);
		}
		free(data);
	}
}
