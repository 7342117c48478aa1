// Timings of the CUDA operations with the shapes of Llama 3.1 8B, one table; figures to read, not a test. Bytes are those
// that must move (matrices and KV once), so the share of the copy rate says how far each is from its limit.
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

enum { HIDDEN = 4096, FFN = 14336, HEADS = 32, KV_HEADS = 8, DIM = 128, BLOCK = 16, COPIES = 8, RUNS = 11 };

struct work {
	struct matmul_args matmul[COPIES]; // rotated, so that no cache holds a matrix from one run to the next
	struct attention_args attention;
	struct sample_args sample;
	void (*run)(struct ops_context *, const struct work *, int);
};

static void run_matmul(struct ops_context *c, const struct work *w, int i)
{
	cuda_matmul(c, &w->matmul[i % COPIES]);
}

static void run_attention(struct ops_context *c, const struct work *w, int i)
{
	cuda_attention(c, &w->attention);
}

static void run_sample(struct ops_context *c, const struct work *w, int i)
{
	cuda_sample(c, &w->sample);
}

static int by_value(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;
	return (x > y) - (x < y);
}

// Median of runs, in seconds. Launches follow each other, as in a step, so that the time of one is not in the figures.
static double seconds(struct ops_context *c, const struct work *w)
{
	cudaEvent_t begin, end;
	float ms[RUNS];
	cudaEventCreate(&begin);
	cudaEventCreate(&end);
	for (int i = 0; i < 3; i++)
		w->run(c, w, i);
	for (int i = 0; i < RUNS; i++) {
		cudaEventRecord(begin, c->stream);
		for (int k = 0; k < COPIES; k++)
			w->run(c, w, k);
		cudaEventRecord(end, c->stream);
		CUDA_MUST(cudaEventSynchronize(end));
		cudaEventElapsedTime(&ms[i], begin, end);
		ms[i] /= COPIES;
	}
	qsort(ms, RUNS, sizeof *ms, by_value);
	return 1e-3 * ms[RUNS / 2];
}

static void *device(struct ops_context *c, int64_t elements)
{
	void *p;
	CUDA_MUST(cudaMalloc(&p, (size_t)elements * 2));
	cuda_fill_random(c, p, elements, 3);
	return p;
}

static void bench_matmul(struct ops_context *c, enum dtype t, int64_t rows, int64_t cols, int n, bool swiglu)
{
	struct weight_source s = {.dtype = t, .rows = rows, .cols = cols};
	size_t bytes = (size_t)rows * (size_t)dtype_row_bytes(t, cols);
	int parts = swiglu ? 2 : 1;
	uint16_t *data = malloc(bytes);
	for (size_t i = 0; i < bytes / 2; i++)
		data[i] = (uint16_t)(0x3c00 | (i * 2654435761u >> 7 & 0x83ff)); // about one as float16, as a scale too
	s.data = data;
	struct work w = {.run = run_matmul};
	void *x = device(c, n * cols), *y = device(c, n * rows);
	struct error e = {""};
	for (int i = 0; i < COPIES; i++) {
		w.matmul[i] = (struct matmul_args){.n_rows = n, .x = x, .n_parts = parts, .swiglu = swiglu};
		for (int p = 0; p < parts; p++) {
			struct weight *m;
			if (cuda_weight_create(c, &m, &s, false, true, &e) != STATUS_OK)
				abort();
			w.matmul[i].part[p].w = m;
			w.matmul[i].part[p].y = y;
		}
	}
	double moved = (double)cuda_weight_bytes(w.matmul[0].part[0].w) * parts, time = seconds(c, &w);
	printf("matmul %s%s %6lld x %5lld, %4d rows: %8.1f us %6.2f TB/s %7.1f TFLOP/s\n", dtype_info(t)->name,
	       swiglu ? " gated" : "", (long long)rows, (long long)cols, n, 1e6 * time, moved / time * 1e-12,
	       2e-12 * (double)(rows * cols * n * parts) / time);
	for (int i = 0; i < COPIES; i++)
		for (int p = 0; p < parts; p++)
			cuda_weight_destroy(c, (struct weight **)&w.matmul[i].part[p].w);
	cudaFree(x);
	cudaFree(y);
	free(data);
}

static void bench_attention(struct ops_context *c, int n_seqs, int rows, int context)
{
	int max_blocks = (context + BLOCK - 1) / BLOCK, blocks = n_seqs * max_blocks;
	int32_t *host = malloc(sizeof *host * (size_t)(blocks + 2 * n_seqs + 1)), *kv_len = host + blocks;
	int32_t *first_row = kv_len + n_seqs, *to;
	for (int i = 0; i < blocks; i++)
		host[i] = (int32_t)((int64_t)i * 7919 % blocks); // 7919 is prime and divides no block count here
	for (int i = 0; i <= n_seqs; i++) {
		if (i < n_seqs)
			kv_len[i] = context;
		first_row[i] = i * rows;
	}
	size_t bytes = sizeof *host * (size_t)(blocks + 2 * n_seqs + 1);
	CUDA_MUST(cudaMalloc((void **)&to, bytes));
	CUDA_MUST(cudaMemcpy(to, host, bytes, cudaMemcpyHostToDevice));
	int64_t kv = (int64_t)blocks * BLOCK * KV_HEADS * DIM, q = (int64_t)n_seqs * rows * HEADS * DIM;
	struct work w = {.run = run_attention, .attention = {
		.n_seqs = n_seqs, .n_rows = n_seqs * rows, .n_heads = HEADS, .block_table = to, .kv_len = to + blocks,
		.first_row = to + blocks + n_seqs, .max_blocks = max_blocks, .scale = 0.088f, .q = device(c, q),
		.out = device(c, q), .kv = {device(c, kv), device(c, kv), c->act, BLOCK, KV_HEADS, DIM}}};
	double time = seconds(c, &w), seen = rows * (context - (rows - 1) / 2.0);
	printf("attention %3d sequences of %5d, %4d rows each: %8.1f us %6.2f TB/s %7.1f TFLOP/s\n", n_seqs, context, rows,
	       1e6 * time, 4.0 * (double)kv / time * 1e-12, 4e-12 * n_seqs * HEADS * DIM * seen / time);
	cudaFree(to);
	cudaFree((void *)w.attention.q);
	cudaFree(w.attention.out);
	cudaFree(w.attention.kv.k);
	cudaFree(w.attention.kv.v);
	free(host);
}

static void bench_sample(struct ops_context *c, int n, float temperature, int top_k, float top_p)
{
	enum { VOCAB = 128256 };
	struct sample_row *rows = calloc((size_t)n, sizeof *rows);
	float *host = malloc(sizeof *host * (size_t)n * VOCAB), *x;
	for (size_t i = 0; i < (size_t)n * VOCAB; i++)
		host[i] = (float)(i * 2654435761u % 100003) * 2e-4f - 10 + (float)(i * 40503u % 1009) * 1e-2f;
	for (int i = 0; i < n; i++)
		rows[i] = (struct sample_row){.temperature = temperature, .top_k = top_k, .top_p = top_p, .repetition_penalty = 1,
		                              .seed = (uint64_t)i};
	CUDA_MUST(cudaMalloc((void **)&x, sizeof *x * (size_t)n * VOCAB));
	CUDA_MUST(cudaMemcpy(x, host, sizeof *x * (size_t)n * VOCAB, cudaMemcpyHostToDevice));
	struct work w = {.run = run_sample, .sample = {n, VOCAB, VOCAB, x, rows}};
	printf("sample %3d rows of %d, temperature %.1f, top-k %d, top-p %.2f: %8.1f us\n", n, VOCAB, temperature, top_k,
	       top_p, 1e6 * seconds(c, &w));
	cudaFree(x);
	free(host);
	free(rows);
}

static void bench_copy(struct ops_context *c)
{
	size_t bytes = (size_t)2 << 30;
	char *from = device(c, (int64_t)bytes / 2), *to = device(c, (int64_t)bytes / 2);
	cudaEvent_t begin, end;
	float best = 1e9f, ms;
	cudaEventCreate(&begin);
	cudaEventCreate(&end);
	for (int i = 0; i < 6; i++) {
		cudaEventRecord(begin, c->stream);
		cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, c->stream);
		cudaEventRecord(end, c->stream);
		CUDA_MUST(cudaEventSynchronize(end));
		cudaEventElapsedTime(&ms, begin, end);
		best = ms < best ? ms : best;
	}
	printf("copy, read + written: %.2f TB/s\n", 2e-9 * (double)bytes / best);
	cudaFree(from);
	cudaFree(to);
}

// bench_gpu [WORD...]: all, or matvec, matmul, attention, sample.
static bool wanted(int argc, char **argv, const char *word)
{
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], word))
			return true;
	return argc < 2;
}

static void bench_matvecs(struct ops_context *c)
{
	static const enum dtype types[] = {DTYPE_BF16, DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q4_K, DTYPE_Q6_K};
	for (int i = 0; i < 6; i++) {
		bench_matmul(c, types[i], FFN, HIDDEN, 1, true);
		bench_matmul(c, types[i], FFN, HIDDEN, 8, true);
		bench_matmul(c, types[i], HIDDEN, FFN, 1, false);
		bench_matmul(c, types[i], HIDDEN, HIDDEN, 1, false);
	}
	bench_matmul(c, DTYPE_BF16, 6144, HIDDEN, 1, false);
}

static void bench_matmuls(struct ops_context *c)
{
	static const int rows[] = {16, 32, 64, 128, 512};
	for (int i = 0; i < 5; i++)
		bench_matmul(c, DTYPE_BF16, 2 * FFN, HIDDEN, rows[i], false);
	bench_matmul(c, DTYPE_BF16, FFN, HIDDEN, 2048, true);
	bench_matmul(c, DTYPE_Q4_K, FFN, HIDDEN, 16, true);
	bench_matmul(c, DTYPE_Q4_K, FFN, HIDDEN, 2048, true);
}

static void bench_attentions(struct ops_context *c)
{
	static const int sizes[][3] = {{1, 1, 1024}, {1, 1, 16384}, {32, 1, 1024}, {64, 1, 1024}, {128, 1, 4096},
	                               {1, 2048, 2048}, {1, 8192, 8192}, {16, 2048, 2048}};
	for (int i = 0; i < 8; i++)
		bench_attention(c, sizes[i][0], sizes[i][1], sizes[i][2]);
}

int main(int argc, char **argv)
{
	struct ops_context *c;
	struct error e = {""};
	if (ops_cuda()->create(&c, &(struct ops_options){.act = DTYPE_BF16}, &e) != STATUS_OK) {
		fprintf(stderr, "%s\n", e.text);
		return 77;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("%s\n", ops_cuda()->describe(c));
	bench_copy(c);
	if (wanted(argc, argv, "matvec"))
		bench_matvecs(c);
	if (wanted(argc, argv, "matmul"))
		bench_matmuls(c);
	if (wanted(argc, argv, "attention"))
		bench_attentions(c);
	if (wanted(argc, argv, "sample")) {
		bench_sample(c, 1, 0, 0, 1);
		bench_sample(c, 64, 0, 0, 1);
		bench_sample(c, 64, 1, 0, 1);
		bench_sample(c, 64, 0.7f, 40, 0.9f);
	}
	ops_cuda()->destroy(&c);
	return 0;
}
