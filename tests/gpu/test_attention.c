// Paged attention on a GPU against the CPU: decode, chunks and both together, pages in random order, and NaN in every slot
// that no token was written to.
#include "gpu_check.h"

struct shape {
	int heads, kv_heads, dim, block_size, window;
};

enum { MAX_SEQS = 40, MAX_LEN = 3000 };

static void check(struct ops_context *cpu, enum dtype act, enum dtype kv, const struct shape *s, int n_seqs,
                  const int32_t *rows, const int32_t *kv_len)
{
	struct ops_context *c = gpu_context(act);
	struct op_random r = {(uint64_t)(s->dim * 1000 + n_seqs)};
	int32_t first_row[MAX_SEQS + 1] = {0};
	int longest = 0;
	for (int i = 0; i < n_seqs; i++) {
		first_row[i + 1] = first_row[i] + rows[i];
		longest = kv_len[i] > longest ? kv_len[i] : longest;
	}
	int max_blocks = (longest + s->block_size - 1) / s->block_size + 2, blocks = n_seqs * max_blocks;
	int32_t *table = malloc((size_t)blocks * sizeof *table);
	for (int i = 0; i < blocks; i++) {
		int at = op_random_below(&r, i + 1);
		table[i] = table[at];
		table[at] = i;
	}
	size_t width = (size_t)(s->heads * s->dim), n = (size_t)first_row[n_seqs] * width;
	size_t slots = (size_t)(blocks * s->block_size), cache = slots * (size_t)(s->kv_heads * s->dim);
	float *q = op_random_floats(&r, n, 1.5f), *out = op_poisoned(n), *k = op_random_floats(&r, cache, 1);
	float *v = op_random_floats(&r, cache, 1);
	for (int i = 0; i < n_seqs; i++) // slots beyond the end
		for (int t = kv_len[i]; t < max_blocks * s->block_size; t++)
			for (int h = 0; h < s->kv_heads; h++) {
				size_t at = ((size_t)(table[i * max_blocks + t / s->block_size] * s->kv_heads + h) *
				                 (size_t)s->block_size + (size_t)(t % s->block_size)) * (size_t)s->dim;
				memset(k + at, 0xff, (size_t)s->dim * sizeof *k);
				memset(v + at, 0xff, (size_t)s->dim * sizeof *v);
			}
	struct attention_args args = {
		.n_seqs = n_seqs, .n_rows = first_row[n_seqs], .n_heads = s->heads, .max_blocks = max_blocks,
		.scale = 1 / sqrtf((float)s->dim), .window = s->window, .q = gpu_floats(q, n, act),
		.out = gpu_poisoned(n * op_type_bytes(act)), .block_table = gpu_copy(table, (size_t)blocks * sizeof *table),
		.first_row = gpu_copy(first_row, sizeof first_row), .kv_len = gpu_copy(kv_len, (size_t)n_seqs * sizeof *kv_len),
		.kv = {gpu_floats(k, cache, kv), gpu_floats(v, cache, kv), kv, s->block_size, s->kv_heads, s->dim}};
	const void *owned[] = {args.q, args.out, args.block_table, args.first_row, args.kv_len, args.kv.k, args.kv.v};
	ops_cuda()->attention(c, &args);
	float *found = gpu_read(args.out, n, act);
	for (size_t i = 0; i < cache; i++) { // the CPU may multiply them by zero
		k[i] = isnan(k[i]) ? 0 : k[i];
		v[i] = isnan(v[i]) ? 0 : v[i];
	}
	args.q = q, args.out = out, args.block_table = table, args.first_row = first_row, args.kv_len = kv_len;
	args.kv.k = k, args.kv.v = v, args.kv.dtype = DTYPE_F32;
	ops_cpu()->attention(cpu, &args);
	char what[160];
	snprintf(what, sizeof what, "%s, KV %s, %d/%d heads of %d, pages of %d, window %d, %d sequences, %d rows",
	         dtype_info(act)->name, dtype_info(kv)->name, s->heads, s->kv_heads, s->dim, s->block_size, s->window, n_seqs,
	         first_row[n_seqs]);
	// Weights are rounded to the type once more before they meet V.
	gpu_compare(found, out, n, 1.5 * gpu_tolerance[act], what);
	for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
		cudaFree((void *)owned[i]);
	free(found);
	free(q);
	free(out);
	free(k);
	free(v);
	free(table);
	ops_cuda()->destroy(&c);
}

static const struct shape shapes[] = {
	{9, 3, 64, 16, 0}, {32, 8, 128, 16, 0}, {32, 8, 128, 32, 100}, {4, 4, 80, 16, 0}, {8, 1, 96, 32, 0},
	{6, 2, 256, 16, 0}, {20, 1, 64, 16, 0}, {14, 2, 64, 16, 33},
	{4, 2, 7, 5, 0}, {9, 3, 64, 1, 0}, {3, 1, 50, 64, 20}, // for the kernel that takes any
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void every_shape(int n_seqs, const int32_t *rows, const int32_t *kv_len)
{
	struct ops_context *cpu = gpu_reference();
	for (int i = 0; i < SHAPES; i++) {
		check(cpu, DTYPE_BF16, DTYPE_BF16, &shapes[i], n_seqs, rows, kv_len);
		check(cpu, DTYPE_F16, DTYPE_F16, &shapes[i], n_seqs, rows, kv_len);
	}
	check(cpu, DTYPE_F32, DTYPE_F32, &shapes[0], n_seqs, rows, kv_len);
	check(cpu, DTYPE_F32, DTYPE_F16, &shapes[1], n_seqs, rows, kv_len);
	check(cpu, DTYPE_BF16, DTYPE_F16, &shapes[0], n_seqs, rows, kv_len);
	ops_cpu()->destroy(&cpu);
}

Test(gpu_attention, decode_of_one_long_sequence_equals_the_cpus)
{
	every_shape(1, (int32_t[]){1}, (int32_t[]){2777});
}

Test(gpu_attention, decode_of_many_lengths_equals_the_cpus)
{
	int32_t rows[MAX_SEQS], kv_len[MAX_SEQS];
	for (int i = 0; i < MAX_SEQS; i++) {
		rows[i] = 1;
		kv_len[i] = i < 5 ? i + 1 : 15 + 13 * i;
	}
	every_shape(MAX_SEQS, rows, kv_len);
}

Test(gpu_attention, a_prompt_and_a_chunk_behind_a_prefix_equal_the_cpus)
{
	every_shape(1, (int32_t[]){193}, (int32_t[]){193});
	every_shape(1, (int32_t[]){70}, (int32_t[]){400});
}

Test(gpu_attention, a_mixed_batch_equals_the_cpus)
{
	every_shape(9, (int32_t[]){1, 1, 17, 2, 1, 33, 4, 1, 128}, (int32_t[]){1, 64, 17, 65, 290, 256, 600, 1000, 200});
}
