// Prints GFLOP/s and GB/s of the matrix kernels, for the shapes of a small model, per type, rows and threads. Times are
// the least over repetitions, and with one thread processor time, since machines are shared. Not run by ctest.
//   bench_matmul [TYPE | portable | avx2 | model ...]        for example: bench_matmul model q4_1 float32
#include <stdio.h>
#include <time.h>

#include "cpu_context.h"
#include "random_weight.h"

static bool cpu_time; // of one thread: what preemption by others does not disturb

static enum ops_isa isa = ISA_AUTO;

static double now(void)
{
	struct timespec t;
	clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

struct shape { const char *name; int64_t rows, cols; bool gated; };
static const struct shape shapes[] = {
	{"q", 576, 576, false}, {"kv", 192, 576, false}, {"gate-up", 1536, 576, true}, {"down", 576, 1536, false},
	{"head", 49152, 576, false}, {"square", 2048, 2048, false},
};

static void bench(enum dtype t, const struct shape *s, int n, int threads)
{
	struct ops_context *c = context_new_spinning(isa, threads, true);
	if (s->cols % dtype_info(t)->block_elements) {
		context_free(c);
		return;
	}
	uint8_t *data = random_weight(t, s->rows, s->cols, 1);
	struct weight_source src = {.dtype = t, .rows = s->rows, .cols = s->cols, .data = data};
	// Copies enough to exceed 64 MB where one row is multiplied, so that memory is seen and not caches.
	size_t bytes = cpu_weight_bytes_predicted(&src, false, true);
	int copies = n == 1 ? (int)((64u << 20) / bytes / (s->gated ? 2 : 1)) : 1, parts = s->gated ? 2 : 1;
	copies = copies < 1 ? 1 : copies > 400 ? 400 : copies;
	struct weight *w[800];
	double load = now();
	for (int i = 0; i < copies * parts; i++)
		cpu_weight_create(c, &w[i], &src, false, true, NULL);
	load = now() - load;
	float *x = xmalloc((size_t)(n * s->cols) * sizeof *x), *y = xmalloc((size_t)(n * s->rows) * sizeof *y);
	uint64_t seed = 3;
	for (int64_t i = 0; i < n * s->cols; i++)
		x[i] = random_float(&seed);
	double best = 1e9, until = now() + 0.4;
	while (now() < until) {
		double start = now();
		for (int i = 0; i < copies; i++) {
			struct matmul_args a = {.n_rows = n, .x = x, .n_parts = parts, .swiglu = s->gated,
			                        .part = {{w[i * parts], NULL, y}, {w[i * parts + parts - 1], NULL, y}}};
			cpu_matmul(c, &a);
		}
		double one = (now() - start) / copies;
		best = one < best ? one : best;
	}
	printf("%-9s %-8s rows %4d threads %d: %9.1f us %8.1f GFLOP/s %6.2f GB/s   load %5.2f GB/s\n", dtype_info(t)->name, s->name,
	       n, threads, 1e6 * best, 2e-9 * (double)(parts * n * s->rows * s->cols) / best,
	       1e-9 * (double)bytes * parts / best, 1e-9 * (double)bytes * parts * copies / load);
	for (int i = 0; i < copies * parts; i++)
		cpu_weight_destroy(c, &w[i]);
	free(data);
	free(x);
	free(y);
	context_free(c);
}

// All matrices of a model of the shape of SmolLM2-135M (30 layers, hidden 576, a head of type `head`), once per token:
// the speed that a model would have if nothing else took time.
enum { LAYERS = 30, HIDDEN = 576, FFN = 1536, KV = 192, VOCAB = 49152 };

static struct weight *load(struct ops_context *c, enum dtype t, int64_t rows, int64_t cols)
{
	uint8_t *data = random_weight(t, rows, cols, 1);
	struct weight *w;
	cpu_weight_create(c, &w, &(struct weight_source){.dtype = t, .rows = rows, .cols = cols, .data = data}, false, true, NULL);
	free(data);
	return w;
}

static void run_model(struct ops_context *c, struct weight *w[][7], struct weight *head, int n, float *x, float *y)
{
	for (int l = 0; l < LAYERS; l++) {
		cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 3, .part = {{w[l][0], NULL, y}, {w[l][1], NULL, y + n * HIDDEN}, {w[l][2], NULL, y + n * (HIDDEN + KV)}}});
		cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 1, .part = {{w[l][3], NULL, y}}, .add = true});
		cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 2, .part = {{w[l][4], NULL, y}, {w[l][5], NULL, NULL}}, .swiglu = true});
		cpu_matmul(c, &(struct matmul_args){.n_rows = n, .x = x, .n_parts = 1, .part = {{w[l][6], NULL, y}}, .add = true});
	}
	cpu_matmul(c, &(struct matmul_args){.n_rows = n < 16 ? n : 1, .x = x, .n_parts = 1, .part = {{head, NULL, y}}});
}

static void bench_model(enum dtype t, enum dtype head_type)
{
	for (int threads = 1; threads <= 2; threads++) {
		struct ops_context *c = context_new_spinning(isa, threads, true);
		struct weight *w[LAYERS][7], *head = load(c, head_type, VOCAB, HIDDEN);
		const int shape[7][2] = {{HIDDEN, HIDDEN}, {KV, HIDDEN}, {KV, HIDDEN}, {HIDDEN, HIDDEN}, {FFN, HIDDEN}, {FFN, HIDDEN}, {HIDDEN, FFN}};
		for (int i = 0; i < LAYERS * 7; i++)
			w[i / 7][i % 7] = load(c, t, shape[i % 7][0], shape[i % 7][1]);
		float *x = xcalloc(512 * FFN, sizeof *x), *y = xcalloc(512 * FFN, sizeof *y);
		uint64_t seed = 3;
		for (int64_t i = 0; i < 512 * FFN; i++)
			x[i] = random_float(&seed);
		const int rows[] = {1, 2, 4, 8, 16, 64, 512};
		for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
			double wall = 1e9, total = 0, cpu = 1e9;
			for (int i = 0; (total < 1 || i < 3) && i < 200; i++) {
				cpu_time = false;
				double start = now();
				cpu_time = true;
				double cpu_start = now();
				run_model(c, w, head, rows[r], x, y);
				double used = now() - cpu_start;
				cpu_time = false;
				double took = now() - start;
				total += took;
				wall = took < wall ? took : wall;
				cpu = used < cpu ? used : cpu;
			}
			printf("%-9s model, threads %d, rows %3d: %8.1f tokens/s by the clock, %8.1f by processor time\n", dtype_info(t)->name,
			       threads, rows[r], rows[r] / wall, rows[r] / cpu * threads);
		}
		for (int i = 0; i < LAYERS * 7; i++)
			cpu_weight_destroy(c, &w[i / 7][i % 7]);
		cpu_weight_destroy(c, &head);
		free(x);
		free(y);
		context_free(c);
	}
}

int main(int argc, char **argv)
{
	const int rows[] = {1, 4, 16, 512};
	int types = 0;
	bool model = false;
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "portable") || !strcmp(argv[i], "avx2"))
			isa = strcmp(argv[i], "avx2") ? ISA_PORTABLE : ISA_AVX2;
		else if (!strcmp(argv[i], "model"))
			model = true;
		else
			types++;
	}
	for (enum dtype t = 0; t < DTYPE_COUNT; t++) {
		bool wanted = !types;
		for (int i = 1; i < argc; i++)
			wanted |= !strcmp(argv[i], dtype_info(t)->name);
		if (!wanted || !cpu_weight_supported(t))
			continue;
		if (model) {
			if (HIDDEN % dtype_info(t)->block_elements == 0)
				bench_model(t, dtype_info(t)->block_elements > 1 ? DTYPE_Q8_0 : t);
			continue;
		}
		for (int threads = 1; threads <= 2; threads++) {
			cpu_time = threads == 1;
			for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
				for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
					if (rows[r] <= 16 || shapes[s].rows < 10000)
						bench(t, &shapes[s], rows[r], threads);
		}
	}
	return 0;
}
