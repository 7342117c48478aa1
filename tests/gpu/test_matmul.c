// Matrix products on a GPU against the CPU: every type of weights, one row to many, parts, bias, gate and residual.
#include "gpu_check.h"

static const enum dtype weights[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0,
                                     DTYPE_Q5_1, DTYPE_Q8_0, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K};
enum { WEIGHTS = sizeof weights / sizeof *weights };

struct shape {
	enum dtype types[3];
	int64_t rows[3], cols;
	int n, n_parts;
	bool bias, swiglu, add, y_float32;
};

static void check(enum dtype act, const struct shape *s)
{
	struct ops_context *cpu = gpu_reference(), *c = gpu_context(act);
	struct op_random r = {(uint64_t)s->n * 1000 + (uint64_t)s->cols};
	float *x = op_random_floats(&r, (size_t)(s->n * s->cols), 1);
	struct matmul_args on_gpu = {.n_rows = s->n, .n_parts = s->n_parts, .swiglu = s->swiglu, .add = s->add,
	                             .y_float32 = s->y_float32};
	on_gpu.x = gpu_floats(x, (size_t)(s->n * s->cols), act);
	struct matmul_args on_cpu = on_gpu;
	on_cpu.x = x;
	enum dtype out = s->y_float32 ? DTYPE_F32 : act;
	struct weight *wg[3] = {0}, *wc[3] = {0};
	for (int p = 0; p < s->n_parts; p++) {
		struct error e = {""};
		void *data = random_weight(s->types[p], s->rows[p], s->cols, (uint64_t)p + 11);
		struct weight_source source = {.dtype = s->types[p], .rows = s->rows[p], .cols = s->cols, .data = data};
		size_t n = (size_t)(s->n * s->rows[p]);
		float *y = s->add ? op_random_floats(&r, n, 20) : op_poisoned(n), *bias = op_random_floats(&r, (size_t)s->rows[p], 9);
		cr_assert_eq(ops_cpu()->weight_create(cpu, &wc[p], &source, false, true, &e), STATUS_OK, "%s", e.text);
		cr_assert_eq(ops_cuda()->weight_create(c, &wg[p], &source, false, true, &e), STATUS_OK, "%s", e.text);
		cr_assert_eq(ops_cuda()->weight_bytes(wg[p]), ops_cuda()->weight_bytes_predicted(&source, false, true));
		free(data);
		// cuBLASLt adds to a bias that is rounded first.
		void *device_bias = NULL;
		if (s->bias) {
			cudaFree(gpu_floats(bias, (size_t)s->rows[p], out));
			device_bias = gpu_copy(bias, (size_t)s->rows[p] * sizeof *bias);
		}
		on_cpu.part[p].w = wc[p];
		on_cpu.part[p].bias = s->bias ? bias : NULL;
		on_cpu.part[p].y = y;
		on_gpu.part[p].w = wg[p];
		on_gpu.part[p].bias = device_bias;
		on_gpu.part[p].y = s->add ? gpu_floats(y, n, out) : gpu_poisoned(n * op_type_bytes(out));
	}
	ops_cuda()->matmul(c, &on_gpu);
	ops_cpu()->matmul(cpu, &on_cpu);
	for (int p = 0; p < (s->swiglu ? 1 : s->n_parts); p++) {
		size_t n = (size_t)(s->n * s->rows[p]);
		float *found = gpu_read(on_gpu.part[p].y, n, out);
		char what[160];
		snprintf(what, sizeof what, "%s x %s, %lld x %lld, %d rows, part %d%s%s%s%s", dtype_info(s->types[p])->name,
		         dtype_info(act)->name, (long long)s->rows[p], (long long)s->cols, s->n, p, s->bias ? ", bias" : "",
		         s->swiglu ? ", gated" : "", s->add ? ", added" : "", s->y_float32 ? ", to float32" : "");
		// Weights that are made plain are rounded to the activations' type; the CPU rounds activations to 16 bits.
		double tolerance = gpu_tolerance[act] + (act == DTYPE_F32 ? 2e-4 : 0);
		bool rounded = s->n > 8 || dtype_info(s->types[p])->block_elements == 1;
		if (s->types[p] != act && rounded)
			tolerance *= 2;
		if (s->swiglu && s->n > 8)
			tolerance *= 2; // gate and up are rounded too
		if (n < 8)
			tolerance *= 4; // few outputs may all be small beside their terms
		gpu_compare(found, on_cpu.part[p].y, n, tolerance, what);
		free(found);
	}
	for (int p = 0; p < s->n_parts; p++) {
		cudaFree(on_gpu.part[p].y);
		cudaFree((void *)on_gpu.part[p].bias);
		free(on_cpu.part[p].y);
		ops_cuda()->weight_destroy(c, &wg[p]);
		ops_cpu()->weight_destroy(cpu, &wc[p]);
	}
	cudaFree((void *)on_gpu.x);
	free(x);
	ops_cuda()->destroy(&c);
	ops_cpu()->destroy(&cpu);
}

#define EVERY_TYPE(name, act)                                                                                          \
	Test(gpu_matmul, name)                                                                                         \
	{                                                                                                              \
		for (int w = 0; w < WEIGHTS; w++)                                                                      \
			every_shape(act, weights[w]);                                                                  \
	}

static void every_shape(enum dtype act, enum dtype t)
{
	static const struct { int64_t rows, cols; int n; } shapes[] = {
		{1, 256, 1}, {17, 256, 3}, {576, 1536, 1}, {100, 512, 8}, {1000, 768, 5}, {33, 4096, 2},
		{48, 256, 9}, {200, 1024, 40}, {512, 768, 129}};
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
		check(act, &(struct shape){.types = {t}, .rows = {shapes[i].rows}, .cols = shapes[i].cols, .n = shapes[i].n,
		                           .n_parts = 1});
}

EVERY_TYPE(every_type_times_float32_equals_the_cpus, DTYPE_F32)
EVERY_TYPE(every_type_times_float16_equals_the_cpus, DTYPE_F16)
EVERY_TYPE(every_type_times_bfloat16_equals_the_cpus, DTYPE_BF16)

Test(gpu_matmul, columns_that_are_no_whole_tile_equal_the_cpus)
{
	static const enum dtype types[] = {DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1, DTYPE_Q8_0};
	static const int n[] = {1, 8, 20};
	for (int t = 0; t < 5; t++)
		for (int i = 0; i < 3; i++)
			check(DTYPE_BF16, &(struct shape){.types = {types[t]}, .rows = {50}, .cols = 96 + 512 * t, .n = n[i],
			                                  .n_parts = 1});
	for (int i = 0; i < 3; i++) {
		check(DTYPE_BF16, &(struct shape){.types = {DTYPE_BF16}, .rows = {50}, .cols = 200, .n = n[i], .n_parts = 1});
		check(DTYPE_F16, &(struct shape){.types = {DTYPE_F16}, .rows = {16}, .cols = 8, .n = n[i], .n_parts = 1});
	}
}

Test(gpu_matmul, parts_bias_gate_residual_and_float32_output_equal_the_cpus)
{
	static const int n[] = {1, 7, 8, 9, 70};
	static const enum dtype types[] = {DTYPE_BF16, DTYPE_F16, DTYPE_Q8_0, DTYPE_Q4_K};
	for (int a = 0; a < GPU_ACTS; a++)
		for (int t = 0; t < 4; t++)
			for (int i = 0; i < 5; i++) {
				enum dtype w = types[t], other = w == DTYPE_Q4_K ? DTYPE_Q6_K : w;
				check(gpu_acts[a], &(struct shape){.types = {w, w, other}, .rows = {64, 33, 16}, .cols = 512, .n = n[i],
				                                   .n_parts = 3, .bias = true});
				check(gpu_acts[a], &(struct shape){.types = {w, other}, .rows = {80, 80}, .cols = 256, .n = n[i],
				                                   .n_parts = 2, .swiglu = true});
				check(gpu_acts[a], &(struct shape){.types = {w}, .rows = {90}, .cols = 256, .n = n[i], .n_parts = 1,
				                                   .add = true, .bias = t % 2 == 0});
				check(gpu_acts[a], &(struct shape){.types = {w}, .rows = {700}, .cols = 256, .n = n[i], .n_parts = 1,
				                                   .y_float32 = true});
			}
}

Test(gpu_matmul, speed_is_measured)
{
	struct ops_context *c = gpu_context(DTYPE_BF16);
	struct ops_speed s;
	ops_cuda()->measure(c, 100, &s);
	cr_assert(s.bandwidth_bytes_per_s > 1e10 && s.matmul_flops > 1e11, "%g B/s, %g FLOP/s", s.bandwidth_bytes_per_s,
	          s.matmul_flops);
	ops_cuda()->destroy(&c);
}
