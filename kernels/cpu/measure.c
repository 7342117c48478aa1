// Measures what the planner needs, with the kernels that will run: how fast a matrix streams past one row, and how fast
// many rows are multiplied. The matrix is Q8_0, the type that costs the fewest instructions per byte, so that memory and
// not unpacking is seen; it is larger than any private cache.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/status.h"
#include "kernels/cpu/weight.h"

enum { ROWS = 8192, COLS = 4096, BATCH = 48, BATCH_WEIGHT_ROWS = 1024, PORTABLE_ROWS = 128, PORTABLE_BATCH = 4 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void touch(void *arg, int thread, int threads)
{
	struct weight *w = arg;
	int64_t begin = w->n_panels * thread / threads, end = w->n_panels * (thread + 1) / threads;
	memset(w->panels + (size_t)begin * w->panel_bytes, 0, (size_t)(end - begin) * w->panel_bytes);
}

// Seconds of the fastest run; runs until `deadline`, at least once.
static double fastest(struct ops_context *c, const struct matmul_args *a, double deadline)
{
	double best = 1e30;
	do {
		double start = now(), t;
		cpu_matmul(c, a);
		t = now() - start;
		best = t < best ? t : best;
	} while (now() < deadline);
	return best;
}

void cpu_measure(struct ops_context *c, int budget_ms, struct ops_speed *out)
{
	double start = now();
	// Plain C is some 50 times slower: less of it, to stay within the time.
	bool portable = c->isa == ISA_PORTABLE;
	int rows = portable ? PORTABLE_ROWS : ROWS, batch = portable ? PORTABLE_BATCH : BATCH;
	int batch_rows = portable ? PORTABLE_ROWS : BATCH_WEIGHT_ROWS;
	struct weight_source s = {.dtype = DTYPE_Q8_0, .rows = rows, .cols = COLS};
	struct weight w = {.dtype = s.dtype, .format = weight_format(s.dtype), .rows = rows, .cols = COLS,
	                   .n_panels = rows / PANEL_ROWS, .n_blocks = COLS / BLOCK_K};
	size_t bytes = cpu_weight_bytes_predicted(&s, false, true);
	w.panel_bytes = bytes / (size_t)w.n_panels;
	w.panels = aligned_alloc(64, bytes);
	float *x = xcalloc((unsigned long)batch * COLS, sizeof *x);
	float *y = xcalloc((unsigned long)(batch * batch_rows > rows ? batch * batch_rows : rows), sizeof *y);
	ASSERT(w.panels);
	cpu_parallel(c, touch, &w);
	struct matmul_args a = {.n_rows = 1, .x = x, .n_parts = 1, .part[0] = {.w = &w, .y = y}};
	double begin = now(), end = start + 1e-3 * budget_ms;
	out->bandwidth_bytes_per_s = (double)bytes / fastest(c, &a, begin + (end - begin) * 0.35);
	w.rows = batch_rows;
	w.n_panels = batch_rows / PANEL_ROWS;
	a.n_rows = batch;
	double flops = 2.0 * batch * batch_rows * COLS;
	out->matmul_flops = flops / fastest(c, &a, start + 0.75e-3 * budget_ms);
	free(w.panels);
	free(x);
	free(y);
}
