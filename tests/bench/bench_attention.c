// Times attention, norm, rope, sampling and an empty parallel region in the shapes of the demo model (9 query heads, 3
// kv heads of 64, hidden 576, float16 KV) and prints microseconds; the best of several rounds, and with one thread
// processor time, since machines are shared.
// bench_attention [threads [portable|avx2|avx512]]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/half.h"
#include "kernels/cpu/cpu.h"

enum { HEADS = 9, KV_HEADS = 3, DIM = 64, LAYERS = 30, BLOCK = 16, HIDDEN = 576, VOCAB = 49152, MAX_LEN = 8192 };

static int threads;

static double now_us(void)
{
	struct timespec t;
	clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static struct ops_context *context;

static double best_us(void (*fn)(void *), void *arg)
{
	double best = 1e30, start = now_us();
	for (int i = 0; i < 2000 && (i < 5 || now_us() - start < 3e5); i++) {
		double t = now_us();
		fn(arg);
		t = now_us() - t;
		best = t < best ? t : best;
	}
	return best;
}

static void nothing(void *arg, int thread, int n)
{
}

static void region(void *arg)
{
	cpu_parallel(context, nothing, NULL);
}

// The next layer's pages each time, so that they come from where a real step finds them and not from the L2 cache.
static void attention(void *arg)
{
	static int layer;
	struct attention_args a = *(const struct attention_args *)arg;
	int64_t elements = (int64_t)KV_HEADS * MAX_LEN * DIM;
	layer = (layer + 1) % LAYERS;
	a.kv.k = (uint16_t *)a.kv.k + layer * elements;
	a.kv.v = (uint16_t *)a.kv.v + layer * elements;
	cpu_attention(context, &a);
}

static void norm(void *arg)
{
	cpu_rms_norm(context, arg);
}

static void rope(void *arg)
{
	cpu_rope_kv(context, arg);
}

static void sample(void *arg)
{
	cpu_sample(context, arg);
}

static float *floats(size_t n)
{
	float *p = malloc(n * sizeof(float));
	uint32_t x = 12345;
	for (size_t i = 0; i < n; i++) {
		x = x * 1664525 + 1013904223;
		p[i] = (float)(x >> 8) * 0x1p-23f - 1;
	}
	return p;
}

int main(int argc, char **argv)
{
	threads = argc > 1 ? atoi(argv[1]) : 2;
	struct ops_options o = {.threads = threads, .may_spin = true, .max_rows = 512};
	int cores[256];
	for (int i = 0; i < 256; i++)
		cores[i] = i;
	o.cores = cores;
	struct error e;
	if (argc > 2)
		o.isa = !strcmp(argv[2], "portable") ? ISA_PORTABLE : !strcmp(argv[2], "avx2") ? ISA_AVX2 : ISA_AVX512;
	if (ops_cpu()->create(&context, &o, &e) != STATUS_OK) {
		fprintf(stderr, "%s\n", e.text);
		return 1;
	}
	printf("%s\n", ops_cpu()->describe(context));
	printf("%-44s %9.2f us\n", "empty region", best_us(region, NULL));

	size_t cache = (size_t)LAYERS * KV_HEADS * MAX_LEN * DIM;
	uint16_t *k = malloc(cache * 2), *v = malloc(cache * 2);
	for (size_t i = 0; i < cache; i++) {
		uint16_t x = half_from_float((float)(i % 97) / 97 - 0.5f);
		memcpy(k + i, &x, 2);
		memcpy(v + cache - 1 - i, &x, 2);
	}
	int32_t table[MAX_LEN / BLOCK], first_row[2] = {0, 1}, kv_len[1];
	for (int i = 0; i < MAX_LEN / BLOCK; i++)
		table[i] = (i * 37) % (MAX_LEN / BLOCK);
	float *q = floats(512 * HEADS * DIM), *out = floats(512 * HEADS * DIM);
	struct kv_view kv = {k, v, DTYPE_F16, BLOCK, KV_HEADS, DIM};
	struct attention_args a = {.n_seqs = 1, .n_rows = 1, .n_heads = HEADS, .first_row = first_row, .kv_len = kv_len,
	                           .block_table = table, .max_blocks = MAX_LEN / BLOCK, .scale = 0.125f, .q = q, .out = out,
	                           .kv = kv};
	const int lens[] = {16, 128, 512, 1024, 4096, 8192}, chunk_lens[] = {512, 2048, 8192};
	for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
		kv_len[0] = lens[i];
		double us = best_us(attention, &a);
		printf("attention, 1 row at %-5d                     %9.2f us   %8.3f ms for %d layers\n", lens[i], us,
		       us * LAYERS / 1e3, LAYERS);
	}
	first_row[1] = a.n_rows = 512;
	for (size_t i = 0; i < sizeof(chunk_lens) / sizeof(chunk_lens[0]); i++) {
		kv_len[0] = chunk_lens[i];
		double us = best_us(attention, &a);
		double visible = 512.0 * (chunk_lens[i] - 512) + 512.0 * 513 / 2;
		printf("attention, 512 rows up to %-5d               %9.2f us   %8.3f ms for %d layers, %.1f GFLOP/s\n",
		       chunk_lens[i], us, us * LAYERS / 1e3, LAYERS, visible * HEADS * DIM * 4 / us * 1e-3);
	}
	enum { SEQS = 32 };
	int32_t many_first[SEQS + 1], many_len[SEQS], *many_table = malloc(sizeof(table) * SEQS);
	for (int s = 0; s <= SEQS; s++)
		many_first[s] = s;
	for (int s = 0; s < SEQS; s++) {
		many_len[s] = 256;
		memcpy(many_table + s * (MAX_LEN / BLOCK), table + (s * 16) % (MAX_LEN / BLOCK - 16), 16 * sizeof(int32_t));
	}
	a.n_seqs = a.n_rows = SEQS;
	a.first_row = many_first;
	a.kv_len = many_len;
	a.block_table = many_table;
	double us = best_us(attention, &a);
	printf("attention, 32 sequences at 256               %9.2f us   %8.3f ms for %d layers\n", us, us * LAYERS / 1e3, LAYERS);

	struct rms_norm_args n = {.n_rows = 1, .cols = HIDDEN, .eps = 1e-5f, .x = q, .weight = q, .out = out};
	printf("rms_norm, 1 row                              %9.2f us\n", best_us(norm, &n));
	n.n_rows = 512;
	printf("rms_norm, 512 rows                           %9.2f us\n", best_us(norm, &n));

	int32_t position[512], slot[512];
	for (int i = 0; i < 512; i++)
		position[i] = slot[i] = i;
	float *cos_sin = floats(512 * DIM);
	for (int i = 0; i < 512 * DIM; i++) // no rotation, so that repeated ones do not grow
		cos_sin[i] = i % 2 ? 0 : 1;
	struct rope_kv_args r = {.n_rows = 1, .n_heads = HEADS, .q = q, .k = out, .v = out, .interleaved = true,
	                         .rope_dim = DIM, .cos_sin = cos_sin, .position = position, .slot = slot, .kv = kv};
	printf("rope_kv, 1 row                               %9.2f us\n", best_us(rope, &r));
	r.n_rows = 512;
	printf("rope_kv, 512 rows                            %9.2f us\n", best_us(rope, &r));

	const int vocabs[] = {VOCAB, 262144};
	for (int i = 0; i < 2; i++) {
		int vocab = vocabs[i];
		float *logits = floats((size_t)vocab * 8);
		for (size_t c = 0; c + 3 < (size_t)vocab * 8; c++) // about normal, deviation 3
			logits[c] = (logits[c] + logits[c + 1] + logits[c + 2] + logits[c + 3]) * 2.6f;
		struct sample_row rows[8];
		const struct sample_row plain = {.temperature = 0, .top_p = 1, .repetition_penalty = 1};
		struct sample_args s = {.n_rows = 1, .vocab_size = vocab, .stride = vocab, .logits = logits, .rows = rows};
		rows[0] = plain;
		printf("sample %-6d greedy                          %9.2f us\n", vocab, best_us(sample, &s));
		rows[0].want_logprob = true;
		printf("sample %-6d greedy, log-probability         %9.2f us\n", vocab, best_us(sample, &s));
		rows[0].n_top = 20;
		printf("sample %-6d greedy, top 20                  %9.2f us\n", vocab, best_us(sample, &s));
		rows[0] = plain;
		rows[0].temperature = 1;
		printf("sample %-6d temperature 1                   %9.2f us\n", vocab, best_us(sample, &s));
		rows[0].top_p = 0.9f;
		printf("sample %-6d top-p 0.9                       %9.2f us\n", vocab, best_us(sample, &s));
		rows[0].top_k = 50;
		printf("sample %-6d top-k 50, top-p 0.9             %9.2f us\n", vocab, best_us(sample, &s));
		for (int j = 0; j < 8; j++)
			rows[j] = plain;
		s.n_rows = 8;
		printf("sample %-6d greedy, 8 rows                  %9.2f us\n", vocab, best_us(sample, &s));
		free(logits);
	}
	ops_cpu()->destroy(&context);
	free(k);
	free(v);
	free(q);
	free(out);
	free(cos_sin);
	free(many_table);
	return 0;
}
