// Paged causal attention of a mixed batch: cuts the work into pieces and walks the pages; attention_kernel.h computes.
//
// A row at position p always folds blocks of 64 positions, counted from position 0, into partial results of 256
// positions, and merges those in ascending order. Whether it comes alone or in a prefill chunk, with which neighbours,
// and on how many threads, changes who computes a partial result but not one bit of it. The surprising decision: where
// pieces are few (decoding one long sequence), each partial result is a piece of its own, and the thread that happens to
// finish a row's last one merges them all, so that no barrier is needed.
#include "kernels/cpu/attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { PIECES_PER_THREAD = 8, PREFETCH_QUERIES = 16, MAX_PARTIAL_BYTES = 64 << 20 };

// Rows x heads of one sequence that share a kv head.
struct tile {
	int seq, row, n_rows;     // rows of the batch
	int position;             // of the first row
	int kv_head, head, n_heads;
	int split_from, split_to; // partial results that some row needs
	int first_piece;
	int64_t partial;          // offset in floats of this tile's partial results; -1: one piece does it all
	_Atomic int left;         // partial results still to come
};

struct plan {
	const struct attention_args *args;
	const struct attention_kernel *kernel;
	struct ops_context *context;
	struct tile *tiles;
	int n_tiles, n_pieces;
	int padded;
	float *partial;           // per tile and split: max[n], sum[n], acc[n][padded], n = n_rows * n_heads
};

static int min_int(int a, int b)
{
	return a < b ? a : b;
}

static int max_int(int a, int b)
{
	return a > b ? a : b;
}

static int first_visible(const struct attention_args *a, int position)
{
	return a->window > 0 ? max_int(0, position - a->window + 1) : 0;
}

static int64_t partial_floats(const struct plan *p, const struct tile *t)
{
	return (int64_t)t->n_rows * t->n_heads * (p->padded + 2);
}

static struct attention_tile *tile_scratch(struct plan *p, int thread, float **total)
{
	size_t d = (size_t)p->padded, n = ATTENTION_QUERIES, b = ATTENTION_BLOCK;
	size_t floats = 3 * n * d + 2 * b * d + n * b;
	struct attention_tile *t;
	size_t head = (sizeof(*t) + 63) / 64 * 64;
	char *s = cpu_thread_scratch(p->context, thread, head + floats * sizeof(float));
	t = (struct attention_tile *)s;
	t->dim = p->args->kv.head_dim;
	t->padded = p->padded;
	t->q = (float *)(s + head);
	t->k = t->q + n * d;
	t->v = t->k + b * d;
	t->p = t->v + b * d;
	t->acc = t->p + n * b;
	*total = t->acc + n * d;
	return t;
}

static void load_queries(const struct plan *p, const struct tile *t, struct attention_tile *out)
{
	const struct attention_args *a = p->args;
	int d = a->kv.head_dim;
	for (int r = 0; r < t->n_rows; r++)
		for (int h = 0; h < t->n_heads; h++) {
			const float *q = (const float *)a->q + ((int64_t)(t->row + r) * a->n_heads + t->head + h) * d;
			float *to = out->q + (r * t->n_heads + h) * p->padded;
			for (int e = 0; e < d; e++)
				to[e] = q[e] * a->scale;
			memset(to + d, 0, (size_t)(p->padded - d) * sizeof(float));
		}
}

// Sets the pointers for positions [from, to) of the block at `base`.
static void find_rows(const struct plan *p, const struct tile *t, struct attention_tile *out, int base, int from, int to)
{
	const struct kv_view *kv = &p->args->kv;
	const int32_t *table = p->args->block_table + (int64_t)t->seq * p->args->max_blocks;
	int64_t row_bytes = kv->head_dim * (kv->dtype == DTYPE_F32 ? 4 : 2);
	for (int j = from; j < to;) {
		int page = (base + j) / kv->block_size, slot = (base + j) % kv->block_size;
		int64_t row = ((int64_t)table[page] * kv->n_kv_heads + t->kv_head) * kv->block_size + slot;
		const char *k = (const char *)kv->k + row * row_bytes, *v = (const char *)kv->v + row * row_bytes;
		for (; slot < kv->block_size && j < to; slot++, j++, k += row_bytes, v += row_bytes) {
			out->k_row[j] = k;
			out->v_row[j] = v;
		}
	}
	out->begin = from;
	out->end = to;
}

// Asks for the pages of positions [base, base + 64) ahead of their use. Runs of a page are short (2 KiB for 16 positions
// of 64 float16), and the hardware does not follow from one page to the next.
static void prefetch_rows(const struct plan *p, const struct tile *t, int base, int end)
{
	const struct kv_view *kv = &p->args->kv;
	const int32_t *table = p->args->block_table + (int64_t)t->seq * p->args->max_blocks;
	int64_t row_bytes = kv->head_dim * (kv->dtype == DTYPE_F32 ? 4 : 2);
	end = min_int(end, base + ATTENTION_BLOCK);
	while (base < end) {
		int page = base / kv->block_size, slot = base % kv->block_size, n = min_int(kv->block_size - slot, end - base);
		int64_t row = ((int64_t)table[page] * kv->n_kv_heads + t->kv_head) * kv->block_size + slot;
		const char *k = (const char *)kv->k + row * row_bytes, *v = (const char *)kv->v + row * row_bytes;
		for (int64_t i = 0; i < n * row_bytes; i += 64) {
			__builtin_prefetch(k + i);
			__builtin_prefetch(v + i);
		}
		base += n;
	}
}

// Leaves partial result number `split` of all rows that see it in out; the others keep sum 0.
static void compute_split(const struct plan *p, const struct tile *t, struct attention_tile *out, int split)
{
	const struct attention_args *a = p->args;
	int n = t->n_rows * t->n_heads;
	for (int i = 0; i < n; i++) {
		out->max[i] = -INFINITY;
		out->sum[i] = 0;
	}
	memset(out->acc, 0, (size_t)n * (size_t)p->padded * sizeof(float));
	int last = t->position + t->n_rows - 1;
	int prefetch_end = t->partial < 0 ? last + 1 : min_int(last + 1, (split + 1) * ATTENTION_SPLIT);
	if (n <= PREFETCH_QUERIES && (t->partial >= 0 || split == t->split_from))
		prefetch_rows(p, t, max_int(split * ATTENTION_SPLIT, first_visible(a, t->position)), prefetch_end);
	for (int base = split * ATTENTION_SPLIT; base < (split + 1) * ATTENTION_SPLIT && base <= last;
	     base += ATTENTION_BLOCK) {
		int first_row = max_int(0, base - t->position); // the first that reaches this block
		int end_row = first_row;
		int from = ATTENTION_BLOCK, to = 0;
		for (; end_row < t->n_rows; end_row++) {
			int position = t->position + end_row;
			int row_from = max_int(0, first_visible(a, position) - base);
			int row_to = min_int(ATTENTION_BLOCK, position + 1 - base);
			if (row_from >= row_to)
				break; // the window of this row, and so of all later ones, begins behind this block
			from = min_int(from, row_from);
			to = max_int(to, row_to);
			for (int h = 0; h < t->n_heads; h++) {
				out->from[end_row * t->n_heads + h] = (int16_t)row_from;
				out->to[end_row * t->n_heads + h] = (int16_t)row_to;
			}
		}
		if (end_row == first_row)
			continue;
		find_rows(p, t, out, base, from, to);
		if (n <= PREFETCH_QUERIES)
			prefetch_rows(p, t, base + ATTENTION_BLOCK, prefetch_end);
		int n_seeing = (end_row - first_row) * t->n_heads;
		p->kernel->load(out, a->kv.dtype, n_seeing);
		p->kernel->fold(out, a->kv.dtype, first_row * t->n_heads, n_seeing);
	}
}

static bool sees(const struct attention_args *a, int position, int split)
{
	return first_visible(a, position) < (split + 1) * ATTENTION_SPLIT && position >= split * ATTENTION_SPLIT;
}

static float *out_row(const struct attention_args *a, const struct tile *t, int query)
{
	int row = t->row + query / t->n_heads, head = t->head + query % t->n_heads;
	return (float *)a->out + ((int64_t)row * a->n_heads + head) * a->kv.head_dim;
}

static void run_whole(const struct plan *p, const struct tile *t, struct attention_tile *s, float *total)
{
	const struct attention_args *a = p->args;
	int n = t->n_rows * t->n_heads;
	float max[ATTENTION_QUERIES] = {0}, sum[ATTENTION_QUERIES] = {0};
	bool seen[ATTENTION_QUERIES] = {false};
	load_queries(p, t, s);
	for (int split = t->split_from; split < t->split_to; split++) {
		compute_split(p, t, s, split);
		for (int i = 0; i < n; i++)
			if (sees(a, t->position + i / t->n_heads, split)) {
				p->kernel->merge(&max[i], &sum[i], total + i * p->padded, &s->max[i], &s->sum[i],
				                 s->acc + i * p->padded, p->padded, !seen[i]);
				seen[i] = true;
			}
	}
	for (int i = 0; i < n; i++)
		p->kernel->finish(out_row(a, t, i), total + i * p->padded, sum[i], a->kv.head_dim);
}

static void run_partial(const struct plan *p, struct tile *t, int split, struct attention_tile *s, float *total)
{
	const struct attention_args *a = p->args;
	int n = t->n_rows * t->n_heads;
	int64_t floats = partial_floats(p, t);
	float *partial = p->partial + t->partial + (split - t->split_from) * floats;
	load_queries(p, t, s);
	compute_split(p, t, s, split);
	memcpy(partial, s->max, (size_t)n * sizeof(float));
	memcpy(partial + n, s->sum, (size_t)n * sizeof(float));
	memcpy(partial + 2 * n, s->acc, (size_t)n * (size_t)p->padded * sizeof(float));
	if (atomic_fetch_sub_explicit(&t->left, 1, memory_order_acq_rel) != 1)
		return;
	for (int i = 0; i < n; i++) {
		float max = 0, sum = 0;
		bool seen = false;
		for (int k = t->split_from; k < t->split_to; k++) {
			const float *from = p->partial + t->partial + (k - t->split_from) * floats;
			if (!sees(a, t->position + i / t->n_heads, k))
				continue;
			p->kernel->merge(&max, &sum, total, from + i, from + n + i, from + 2 * n + i * p->padded, p->padded, !seen);
			seen = true;
		}
		p->kernel->finish(out_row(a, t, i), total, sum, a->kv.head_dim);
	}
}

static void run(void *arg, int thread, int threads)
{
	struct plan *p = arg;
	float *total;
	struct attention_tile *s = tile_scratch(p, thread, &total);
	int tile = 0;
	for (int piece; (piece = cpu_next_piece(p->context)) < p->n_pieces;) {
		// Pieces come in ascending order, so the tile is looked for from where the last one stood.
		while (tile + 1 < p->n_tiles && p->tiles[tile + 1].first_piece <= piece)
			tile++;
		struct tile *t = &p->tiles[tile];
		if (t->partial < 0)
			run_whole(p, t, s, total);
		else
			run_partial(p, t, t->split_from + piece - t->first_piece, s, total);
	}
}

// Fills tiles (NULL: counts them only), longest first within a sequence.
static int cut_tiles(const struct attention_args *a, struct tile *tiles)
{
	int group = a->n_heads / a->kv.n_kv_heads, count = 0;
	int heads = min_int(group, ATTENTION_QUERIES);
	int rows = ATTENTION_QUERIES / heads;
	for (int s = 0; s < a->n_seqs; s++) {
		int n = a->first_row[s + 1] - a->first_row[s];
		for (int end = n; end > 0; end -= rows)
			for (int kv_head = 0; kv_head < a->kv.n_kv_heads; kv_head++)
				for (int h = 0; h < group; h += heads, count++) {
					if (!tiles)
						continue;
					int from = max_int(0, end - rows);
					struct tile *t = &tiles[count];
					t->seq = s;
					t->row = a->first_row[s] + from;
					t->n_rows = end - from;
					t->position = a->kv_len[s] - n + from;
					t->kv_head = kv_head;
					t->head = kv_head * group + h;
					t->n_heads = min_int(heads, group - h);
					t->split_from = first_visible(a, t->position) / ATTENTION_SPLIT;
					t->split_to = (t->position + t->n_rows - 1) / ATTENTION_SPLIT + 1;
				}
	}
	return count;
}

void cpu_attention(struct ops_context *c, const struct attention_args *a)
{
	ASSERT(a->kv.dtype == DTYPE_F32 || a->kv.dtype == DTYPE_F16 || a->kv.dtype == DTYPE_BF16);
	ASSERT(a->n_heads % a->kv.n_kv_heads == 0);
	struct plan p = {.args = a, .context = c, .padded = (a->kv.head_dim + 15) / 16 * 16};
	p.kernel = &attention_kernel_portable;
#if defined(__x86_64__)
	if (c->isa >= ISA_AVX512)
		p.kernel = &attention_kernel_avx512;
	else if (c->isa >= ISA_AVX2)
		p.kernel = &attention_kernel_avx2;
#endif
	p.n_tiles = cut_tiles(a, NULL);
	if (!p.n_tiles)
		return;
	size_t tile_bytes = ((size_t)p.n_tiles * sizeof(struct tile) + 63) / 64 * 64;
	p.tiles = cpu_scratch(c, tile_bytes);
	cut_tiles(a, p.tiles);
	int64_t floats = 0;
	if (c->threads > 1 && p.n_tiles < PIECES_PER_THREAD * c->threads)
		for (int i = 0; i < p.n_tiles; i++)
			if (p.tiles[i].split_to - p.tiles[i].split_from > 1)
				floats += partial_floats(&p, &p.tiles[i]) * (p.tiles[i].split_to - p.tiles[i].split_from);
	bool split = floats && floats * (int64_t)sizeof(float) <= MAX_PARTIAL_BYTES;
	if (split) {
		char *s = cpu_scratch(c, tile_bytes + (size_t)floats * sizeof(float));
		p.tiles = (struct tile *)s;
		p.partial = (float *)(s + tile_bytes);
		cut_tiles(a, p.tiles);
	}
	floats = 0;
	for (int i = 0; i < p.n_tiles; i++) {
		struct tile *t = &p.tiles[i];
		int splits = t->split_to - t->split_from;
		t->first_piece = p.n_pieces;
		t->partial = -1;
		p.n_pieces++;
		if (split && splits > 1) {
			t->partial = floats;
			atomic_init(&t->left, splits);
			floats += partial_floats(&p, t) * splits;
			p.n_pieces += splits - 1;
		}
	}
	cpu_parallel(c, run, &p);
}
