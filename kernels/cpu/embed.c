// Looks rows of the embedding up, in the file's bytes or in the panels of a tied head.
#include "common/status.h"
#include "kernels/cpu/weight.h"


static void look_up(void *arg, int thread, int threads)
{
	const struct embed_args *a = arg;
	for (int r = thread; r < a->n_rows; r += threads) {
		ASSERT(a->ids[r] >= 0 && a->ids[r] < a->table->rows);
		weight_row(a->table, a->ids[r], (float *)a->out + (int64_t)r * a->table->cols);
	}
}

void cpu_embed(struct ops_context *c, const struct embed_args *a)
{
	// Below 16 rows waking the threads costs more than the rows.
	if (a->n_rows < 16)
		look_up((void *)a, 0, 1);
	else
		cpu_parallel(c, look_up, (void *)a);
}
