// What the tests on a GPU share: contexts, arrays that go to the device rounded as they will be there, and a comparison by
// relative error. On a machine without a GPU a test program says so and ends with status 77, which ctest counts as skipped.
#ifndef STAGECOACH_TESTS_GPU_CHECK_H
#define STAGECOACH_TESTS_GPU_CHECK_H

#include "op_check.h"

#include <cuda_runtime_api.h>

#include "random_weight.h"

static const enum dtype gpu_acts[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
enum { GPU_ACTS = 3 };
// ||found - expected|| / ||expected||: float32 sums in another order; one rounding to 11 or 8 bits and a little more.
static const double gpu_tolerance[DTYPE_COUNT] = {[DTYPE_F32] = 2e-5, [DTYPE_F16] = 8e-4, [DTYPE_BF16] = 4e-3};

// Programs with a GPU to use start from here: a fork of a process that has used CUDA cannot use it, so this looks at the
// device file only.
__attribute__((constructor)) static void gpu_skip_without_device(void)
{
	if (access("/dev/nvidiactl", F_OK) && access("/dev/dxg", F_OK)) {
		fprintf(stderr, "SKIPPED: this machine has no NVIDIA GPU\n");
		_exit(77);
	}
}

static inline struct ops_context *gpu_context(enum dtype act)
{
	struct ops_context *c;
	struct error e = {""};
	struct ops_options o = {.act = act, .max_rows = 64};
	cr_assert_eq(ops_cuda()->create(&c, &o, &e), STATUS_OK, "%s", e.text);
	return c;
}

static inline struct ops_context *gpu_reference(void)
{
	return op_context(cpu_best_isa() < ISA_AVX512 ? cpu_best_isa() : ISA_AVX512, 8);
}

#define GPU_MUST(call)                                                                                                 \
	do {                                                                                                           \
		cudaError_t gpu_error_ = (call);                                                                       \
		cr_assert_eq(gpu_error_, cudaSuccess, "%s", cudaGetErrorString(gpu_error_));                           \
	} while (0)

static inline void *gpu_copy(const void *host, size_t bytes)
{
	void *p;
	GPU_MUST(cudaMalloc(&p, bytes ? bytes : 1));
	GPU_MUST(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
	return p;
}

static inline void *gpu_poisoned(size_t bytes)
{
	void *p;
	GPU_MUST(cudaMalloc(&p, bytes ? bytes : 1));
	GPU_MUST(cudaMemset(p, 0xff, bytes));
	GPU_MUST(cudaDeviceSynchronize());
	return p;
}

// Rounds x[n] to type t where it stands, and puts it on the device as t.
static inline void *gpu_floats(float *x, size_t n, enum dtype t)
{
	char *host = malloc(n * sizeof(float) + 1);
	for (size_t i = 0; i < n; i++) {
		op_put(host, i, t, x[i]);
		x[i] = op_get(host, i, t);
	}
	void *p = gpu_copy(host, n * op_type_bytes(t));
	free(host);
	return p;
}

static inline float *gpu_read(const void *p, size_t n, enum dtype t)
{
	char *host = malloc(n * sizeof(float) + 1);
	float *x = malloc(n * sizeof(float) + 1);
	GPU_MUST(cudaDeviceSynchronize());
	GPU_MUST(cudaMemcpy(host, p, n * op_type_bytes(t), cudaMemcpyDeviceToHost));
	for (size_t i = 0; i < n; i++)
		x[i] = op_get(host, i, t);
	free(host);
	return x;
}

// The whole by norm, and no element off by 16 times as much (of the larger of its size and the usual one).
static inline void gpu_compare(const float *found, const float *expected, size_t n, double tolerance, const char *what)
{
	double error = 0, size = 0;
	for (size_t i = 0; i < n; i++)
		size += (double)expected[i] * (double)expected[i];
	double usual = sqrt(size / (double)n);
	for (size_t i = 0; i < n; i++) {
		double d = fabs((double)found[i] - (double)expected[i]);
		cr_assert(d <= 16 * tolerance * fmax(fabs((double)expected[i]), usual), "%s: [%zu] is %.9g, expected %.9g", what,
		          i, (double)found[i], (double)expected[i]);
		error += d * d;
	}
	cr_assert(sqrt(error) <= tolerance * sqrt(size), "%s: relative error %.3g, expected at most %.3g", what,
	          sqrt(error / size), tolerance);
}

#endif
