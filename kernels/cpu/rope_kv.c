// Q and K norm, RoPE and the write of K and V into the cache: splits the rows over the threads. Like the RMS norm, small
// batches stay on the calling thread.
#include "kernels/cpu/rope_kv.h"

enum { SERIAL_ELEMENTS = 8192 };

struct job {
	const struct rope_kv_args *args;
	void (*rows)(const struct rope_kv_args *, int from, int to);
};

static void run(void *arg, int thread, int threads)
{
	const struct job *j = arg;
	int64_t n = j->args->n_rows;
	j->rows(j->args, (int)(n * thread / threads), (int)(n * (thread + 1) / threads));
}

void cpu_rope_kv(struct ops_context *c, const struct rope_kv_args *a)
{
	ASSERT(a->kv.dtype == DTYPE_F32 || a->kv.dtype == DTYPE_F16 || a->kv.dtype == DTYPE_BF16);
	struct job j = {.args = a, .rows = rope_kv_rows_portable};
#if defined(__x86_64__)
	if (c->isa >= ISA_AVX512)
		j.rows = rope_kv_rows_avx512;
	else if (c->isa >= ISA_AVX2)
		j.rows = rope_kv_rows_avx2;
#endif
	if ((int64_t)a->n_rows * (a->n_heads + 2 * a->kv.n_kv_heads) * a->kv.head_dim <= SERIAL_ELEMENTS)
		run(&j, 0, 1);
	else
		cpu_parallel(c, run, &j);
}
