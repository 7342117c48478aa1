// Measures what the planner needs, with the kernels that will run: how fast matrices stream past one row, and how fast
// many rows are multiplied. The matrix is larger than any second cache and holds no zeros, with which products run
// faster than with data.
#include "kernels/cuda/cuda.h"

#include <stdlib.h>

enum { ROWS = 28672, COLS = 4096, BATCH = 1024, MOST_RUNS = 50 };

// Seconds of the fastest run; runs for about budget_ms, at least twice.
static double fastest(struct ops_context *c, const struct matmul_args *a, double budget_ms)
{
	cudaEvent_t begin, end;
	float best = 1e30f, spent = 0;
	CUDA_MUST(cudaEventCreate(&begin));
	CUDA_MUST(cudaEventCreate(&end));
	for (int i = 0; i < 2 || (i < MOST_RUNS && spent < budget_ms); i++) {
		float ms;
		CUDA_MUST(cudaEventRecord(begin, c->stream));
		cuda_matmul(c, a);
		CUDA_MUST(cudaEventRecord(end, c->stream));
		CUDA_MUST(cudaEventSynchronize(end));
		CUDA_MUST(cudaEventElapsedTime(&ms, begin, end));
		spent += ms;
		best = ms < best ? ms : best;
	}
	cudaEventDestroy(begin);
	cudaEventDestroy(end);
	return 1e-3 * best;
}

void cuda_measure(struct ops_context *c, int budget_ms, struct ops_speed *out)
{
	size_t size = cuda_dtype_bytes(c->act), bytes = (size_t)ROWS * COLS * size;
	struct weight w = {.dtype = c->act, .rows = ROWS, .cols = COLS, .bytes = bytes};
	void *x = NULL, *y = NULL;
	*out = (struct ops_speed){0};
	if (cudaMalloc(&w.memory, bytes) == cudaSuccess && cudaMalloc(&x, (size_t)BATCH * COLS * size) == cudaSuccess &&
	    cudaMalloc(&y, (size_t)BATCH * ROWS * size) == cudaSuccess) {
		cuda_fill_random(c, w.memory, (int64_t)ROWS * COLS, 1);
		cuda_fill_random(c, x, (int64_t)BATCH * COLS, 2);
		struct matmul_args a = {.n_rows = 1, .x = x, .n_parts = 1, .part[0] = {.w = &w, .y = y}};
		out->bandwidth_bytes_per_s = (double)bytes / fastest(c, &a, 0.3 * budget_ms);
		a.n_rows = BATCH;
		out->matmul_flops = 2.0 * BATCH * ROWS * COLS / fastest(c, &a, 0.5 * budget_ms);
	} else {
		cudaGetLastError();
		log_warn("no memory to measure the device's speed with");
	}
	cudaFree(w.memory);
	cudaFree(x);
	cudaFree(y);
}
