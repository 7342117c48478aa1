// Paged attention against double precision, and the promise that a row's bits depend neither on its neighbours, nor on
// how its sequence was cut into chunks, nor on threads, nor on how the pages are laid out.
#include "op_check.h"

struct shape {
	int heads, kv_heads, dim, block_size, window;
	enum dtype kv;
};

// A cache with room for several sequences whose pages are dealt out in random order.
struct cache {
	struct shape shape;
	int n_seqs, max_blocks;
	int32_t *table; // [n_seqs, max_blocks]
	char *k, *v;
};

struct batch {
	int n_seqs, n_rows;
	int32_t first_row[17], kv_len[16], *table;
	float *q, *out;
};

static struct cache make_cache(struct op_random *r, struct shape s, int n_seqs, int max_len)
{
	struct cache c = {.shape = s, .n_seqs = n_seqs, .max_blocks = (max_len + s.block_size - 1) / s.block_size};
	int blocks = n_seqs * c.max_blocks;
	size_t n = (size_t)(blocks * s.block_size * s.kv_heads * s.dim);
	c.table = malloc(sizeof(int32_t) * (size_t)blocks);
	for (int i = 0; i < blocks; i++) {
		int at = op_random_below(r, i + 1);
		c.table[i] = c.table[at];
		c.table[at] = i;
	}
	c.k = malloc(n * op_type_bytes(s.kv));
	c.v = malloc(n * op_type_bytes(s.kv));
	for (size_t i = 0; i < n; i++) {
		op_put(c.k, i, s.kv, op_random_normal(r, 1));
		op_put(c.v, i, s.kv, op_random_normal(r, 1));
	}
	return c;
}

static void free_cache(struct cache *c)
{
	free(c->table);
	free(c->k);
	free(c->v);
}

static size_t cache_at(const struct cache *c, int seq, int position, int kv_head)
{
	const struct shape *s = &c->shape;
	int block = c->table[seq * c->max_blocks + position / s->block_size];
	return (size_t)(((block * s->kv_heads + kv_head) * s->block_size + position % s->block_size) * s->dim);
}

static void attend(struct ops_context *x, const struct cache *c, int n_seqs, const int32_t *first_row,
                   const int32_t *kv_len, const int32_t *table, const float *q, float *out)
{
	const struct shape *s = &c->shape;
	cpu_attention(x, &(struct attention_args){
	                         .n_seqs = n_seqs, .n_rows = first_row[n_seqs], .n_heads = s->heads, .first_row = first_row,
	                         .kv_len = kv_len, .block_table = table, .max_blocks = c->max_blocks,
	                         .scale = 1 / sqrtf((float)s->dim), .window = s->window, .q = q, .out = out,
	                         .kv = {c->k, c->v, s->kv, s->block_size, s->kv_heads, s->dim}});
}

static void reference(const struct cache *c, int seq, int position, const float *q, double *out)
{
	const struct shape *s = &c->shape;
	int from = s->window && position - s->window + 1 > 0 ? position - s->window + 1 : 0;
	double *p = malloc(sizeof(double) * (size_t)(position + 1));
	for (int h = 0; h < s->heads; h++) {
		int kv_head = h / (s->heads / s->kv_heads);
		double max = -INFINITY, sum = 0;
		for (int j = from; j <= position; j++) {
			size_t at = cache_at(c, seq, j, kv_head);
			p[j] = 0;
			for (int e = 0; e < s->dim; e++)
				p[j] += (double)q[h * s->dim + e] * (double)op_get(c->k, at + (size_t)e, s->kv);
			p[j] /= sqrt(s->dim);
			max = fmax(max, p[j]);
		}
		for (int j = from; j <= position; j++)
			sum += p[j] = exp(p[j] - max);
		for (int e = 0; e < s->dim; e++) {
			double o = 0;
			for (int j = from; j <= position; j++)
				o += p[j] / sum * (double)op_get(c->v, cache_at(c, seq, j, kv_head) + (size_t)e, s->kv);
			out[h * s->dim + e] = o;
		}
	}
	free(p);
}

static const struct shape shapes[] = {
	{9, 3, 64, 16, 0, DTYPE_F16},   {9, 3, 64, 16, 100, DTYPE_F16}, {4, 4, 80, 1, 0, DTYPE_BF16},
	{8, 1, 96, 7, 0, DTYPE_F32},    {14, 2, 128, 256, 0, DTYPE_F16}, {2, 2, 256, 33, 64, DTYPE_BF16},
	{4, 2, 7, 5, 0, DTYPE_F16},     {3, 1, 1, 16, 0, DTYPE_F32},    {2, 1, 50, 64, 1, DTYPE_BF16},
	{50, 1, 16, 16, 0, DTYPE_F16},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

Test(attention, a_mixed_batch_equals_double_precision)
{
	// Decode rows and prefill chunks, empty sequences, lengths around the blocks of 64 and the splits of 256.
	static const int32_t first_row[] = {0, 1, 2, 2, 19, 20, 53, 54, 55};
	static const int32_t kv_len[] = {1, 64, 30, 17, 65, 290, 256, 600};
	enum { SEQS = 8, ROWS = 55 };
	for (int c = 0; c < SHAPES; c++) {
		struct op_random random = {(uint64_t)c + 100};
		const struct shape *s = &shapes[c];
		size_t width = (size_t)(s->heads * s->dim), n = ROWS * width;
		struct cache cache = make_cache(&random, *s, SEQS, 600);
		float *q = op_random_floats(&random, n, 1.5f);
		double *expected = malloc(n * sizeof(double));
		for (int i = 0; i < SEQS; i++)
			for (int r = first_row[i]; r < first_row[i + 1]; r++)
				reference(&cache, i, kv_len[i] - (first_row[i + 1] - r), q + (size_t)r * width,
				          expected + (size_t)r * width);
		FOR_EACH_ISA(isa) for (int threads = 1; threads <= 3; threads++) {
			struct ops_context *x = op_context(isa, threads);
			float *out = op_poisoned(n);
			attend(x, &cache, SEQS, first_row, kv_len, cache.table, q, out);
			op_assert_close(out, expected, n, 1e-5, 0.5, "%s, %d threads, shape %d", op_isa_name[isa], threads, c);
			free(out);
			ops_cpu()->destroy(&x);
		}
		free(q);
		free(expected);
		free_cache(&cache);
	}
}

Test(attention, a_row_has_the_same_bits_alone_in_chunks_in_company_and_on_any_number_of_threads)
{
	enum { LEN = 560 };
	for (int c = 0; c < SHAPES; c++) {
		struct op_random random = {(uint64_t)c + 200};
		const struct shape *s = &shapes[c];
		// Rows begin..LEN-1 are computed; from 0 once, else across the boundary of a split only, to save time.
		int begin = c == 0 ? 0 : 470, n_rows = LEN - begin;
		size_t width = (size_t)(s->heads * s->dim);
		struct cache cache = make_cache(&random, *s, 2, LEN);
		float *q = op_random_floats(&random, LEN * width, 1.5f);
		FOR_EACH_ISA(isa) {
			struct ops_context *one = op_context(isa, 1), *many = op_context(isa, 4);
			float *whole = op_poisoned(LEN * width);
			attend(one, &cache, 1, (int32_t[]){0, n_rows}, (int32_t[]){LEN}, cache.table, q + (size_t)begin * width,
			       whole + (size_t)begin * width);
			float *out = op_poisoned(LEN * width);
			attend(many, &cache, 1, (int32_t[]){0, n_rows}, (int32_t[]){LEN}, cache.table, q + (size_t)begin * width,
			       out + (size_t)begin * width);
			op_assert_same_bits(out, whole, LEN * width, "%s shape %d, 4 threads", op_isa_name[isa], c);
			// In chunks of random size.
			memset(out, 0xff, LEN * width * 4);
			for (int from = begin, n; from < LEN; from += n) {
				n = 1 + op_random_below(&random, 90);
				n = n < LEN - from ? n : LEN - from;
				attend(many, &cache, 1, (int32_t[]){0, n}, (int32_t[]){from + n}, cache.table, q + (size_t)from * width,
				       out + (size_t)from * width);
			}
			op_assert_same_bits(out, whole, LEN * width, "%s shape %d, in chunks", op_isa_name[isa], c);
			// Single rows as decoding does it, alone and next to a chunk of another sequence.
			for (int p = LEN - 1; p >= begin; p -= 1 + op_random_below(&random, 60)) {
				float *row = out + (size_t)p * width;
				memset(row, 0xff, width * 4);
				attend(many, &cache, 1, (int32_t[]){0, 1}, (int32_t[]){p + 1}, cache.table, q + (size_t)p * width, row);
				op_assert_same_bits(row, whole + (size_t)p * width, width, "%s shape %d, row %d alone",
				                    op_isa_name[isa], c, p);
				float *q2 = op_random_floats(&random, 31 * width, 1), *out2 = op_poisoned(31 * width);
				memcpy(q2 + 30 * width, q + (size_t)p * width, width * 4);
				int32_t *table = malloc(sizeof(int32_t) * (size_t)(2 * cache.max_blocks));
				memcpy(table, cache.table + cache.max_blocks, sizeof(int32_t) * (size_t)cache.max_blocks);
				memcpy(table + cache.max_blocks, cache.table, sizeof(int32_t) * (size_t)cache.max_blocks);
				attend(p % 2 ? one : many, &cache, 2, (int32_t[]){0, 30, 31}, (int32_t[]){300, p + 1}, table, q2, out2);
				op_assert_same_bits(out2 + 30 * width, whole + (size_t)p * width, width, "%s shape %d, row %d in company",
				                    op_isa_name[isa], c, p);
				free(table);
				free(q2);
				free(out2);
			}
			free(whole);
			free(out);
			ops_cpu()->destroy(&one);
			ops_cpu()->destroy(&many);
		}
		free(q);
		free_cache(&cache);
	}
}

Test(attention, the_block_size_does_not_change_a_bit)
{
	enum { LEN = 333 };
	const struct shape a = {6, 2, 64, 16, 0, DTYPE_F16};
	struct op_random random = {300};
	struct cache first = make_cache(&random, a, 1, LEN);
	size_t width = (size_t)(a.heads * a.dim);
	float *q = op_random_floats(&random, LEN * width, 1);
	for (int size = 1; size <= 256; size = size * 3 + 1) {
		struct shape b = a;
		b.block_size = size;
		struct cache second = make_cache(&random, b, 1, LEN);
		for (int p = 0; p < LEN; p++)
			for (int h = 0; h < a.kv_heads; h++) {
				memcpy(second.k + 2 * cache_at(&second, 0, p, h), first.k + 2 * cache_at(&first, 0, p, h), (size_t)a.dim * 2);
				memcpy(second.v + 2 * cache_at(&second, 0, p, h), first.v + 2 * cache_at(&first, 0, p, h), (size_t)a.dim * 2);
			}
		FOR_EACH_ISA(isa) {
			struct ops_context *x = op_context(isa, 2);
			float *out1 = op_poisoned(LEN * width), *out2 = op_poisoned(LEN * width);
			attend(x, &first, 1, (int32_t[]){0, LEN}, (int32_t[]){LEN}, first.table, q, out1);
			attend(x, &second, 1, (int32_t[]){0, LEN}, (int32_t[]){LEN}, second.table, q, out2);
			op_assert_same_bits(out2, out1, LEN * width, "%s block size %d", op_isa_name[isa], size);
			free(out1);
			free(out2);
			ops_cpu()->destroy(&x);
		}
		free_cache(&second);
	}
	free(q);
	free_cache(&first);
}

Test(attention, what_stands_behind_a_row_or_before_its_window_is_not_looked_at)
{
	const struct shape s = {4, 2, 64, 16, 40, DTYPE_F16};
	struct op_random random = {400};
	struct cache cache = make_cache(&random, s, 1, 320);
	size_t width = (size_t)(s.heads * s.dim);
	float *q = op_random_floats(&random, width, 1), *expected = op_poisoned(width), *out = op_poisoned(width);
	FOR_EACH_ISA(isa) {
		struct ops_context *x = op_context(isa, 2);
		attend(x, &cache, 1, (int32_t[]){0, 1}, (int32_t[]){280}, cache.table, q, expected);
		struct cache other = cache;
		size_t bytes = (size_t)(cache.max_blocks * s.block_size * s.kv_heads * s.dim) * 2;
		other.k = memcpy(malloc(bytes), cache.k, bytes);
		other.v = memcpy(malloc(bytes), cache.v, bytes);
		other.table = malloc(sizeof(int32_t) * (size_t)cache.max_blocks);
		for (int p = 0; p < 320; p++)
			if (p < 240 || p >= 280)
				for (int h = 0; h < s.kv_heads; h++) {
					memset(other.k + 2 * cache_at(&cache, 0, p, h), 0xff, (size_t)s.dim * 2);
					memset(other.v + 2 * cache_at(&cache, 0, p, h), 0xff, (size_t)s.dim * 2);
				}
		for (int i = 0; i < cache.max_blocks; i++)
			other.table[i] = i >= 240 / s.block_size && i <= 279 / s.block_size ? cache.table[i] : 0x7fffffff;
		attend(x, &other, 1, (int32_t[]){0, 1}, (int32_t[]){280}, other.table, q, out);
		op_assert_same_bits(out, expected, width, "%s", op_isa_name[isa]);
		free(other.k);
		free(other.v);
		free(other.table);
		ops_cpu()->destroy(&x);
	}
	free(q);
	free(expected);
	free(out);
	free_cache(&cache);
}

Test(attention, large_scores_neither_overflow_nor_lose_the_maximum)
{
	const struct shape s = {2, 1, 64, 16, 0, DTYPE_F32};
	struct op_random random = {500};
	struct cache cache = make_cache(&random, s, 1, 400);
	size_t width = (size_t)(s.heads * s.dim);
	float *q = op_random_floats(&random, width, 300);
	double *expected = malloc(width * sizeof(double));
	reference(&cache, 0, 399, q, expected);
	FOR_EACH_ISA(isa) {
		struct ops_context *x = op_context(isa, 2);
		float *out = op_poisoned(width);
		attend(x, &cache, 1, (int32_t[]){0, 1}, (int32_t[]){400}, cache.table, q, out);
		op_assert_close(out, expected, width, 1e-3, 0.1, "%s", op_isa_name[isa]);
		free(out);
		ops_cpu()->destroy(&x);
	}
	free(q);
	free(expected);
	free_cache(&cache);
}
