// RMS norm: splits the rows over the threads. The surprising decision: small batches stay on the calling thread, since a
// row of 576 costs 60 ns and a parallel region some 500.
#include "kernels/cpu/rms_norm.h"

enum { SERIAL_ELEMENTS = 16384 };

struct job {
	const struct rms_norm_args *args;
	void (*rows)(const struct rms_norm_args *, int from, int to);
};

static void run(void *arg, int thread, int threads)
{
	const struct job *j = arg;
	int64_t n = j->args->n_rows;
	j->rows(j->args, (int)(n * thread / threads), (int)(n * (thread + 1) / threads));
}

void cpu_rms_norm(struct ops_context *c, const struct rms_norm_args *a)
{
	struct job j = {.args = a, .rows = rms_norm_rows_portable};
#if defined(__x86_64__)
	if (c->isa >= ISA_AVX512)
		j.rows = rms_norm_rows_avx512;
	else if (c->isa >= ISA_AVX2)
		j.rows = rms_norm_rows_avx2;
#endif
	// Row r reads row row_index[r], which another thread may be overwriting if out is x.
	bool moves_in_place = a->row_index && a->x == a->out;
	if ((int64_t)a->n_rows * a->cols <= SERIAL_ELEMENTS || moves_in_place)
		run(&j, 0, 1);
	else
		cpu_parallel(c, run, &j);
}
