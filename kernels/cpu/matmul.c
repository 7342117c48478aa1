// Matrix products: packs the activations once, then shares panels of weights times tiles of rows among the threads.
// The surprising decision: threads never split k, and which thread or tile computes an element never changes its sum.
#include "kernels/cpu/matmul.h"

#include <string.h>

#include "common/status.h"

enum {
	CHUNK_TILES = 10,      // 120 rows: their packed x at 1,536 columns is 415 kB, a fifth of an L2 cache of 2 MB
	PIECE_WORK = 1 << 20,  // multiply-adds that are worth one atomic operation: some 15 microseconds
	ROW_PIECE_WORK = 1 << 17, // the same with one row, where weights come from memory
};

struct product {
	const struct matmul_args *a;
	const struct matmul_kernels *k;
	struct ops_context *c;
	int64_t cols;
	bool blocks, floats; // which packed forms of x are needed
	bool few;            // rows few enough for multiply_few
	int n_tiles, chunk_tiles, n_chunks, n_pieces; // pieces per chunk
	struct tile *tiles, *float_tiles; // [n_tiles] each
	int64_t units[3], n_units; // a unit is two panels of a part, or one of gate and one of up
};

static const struct matmul_kernels *kernels_of(const struct ops_context *c)
{
	switch (c->isa) {
	case ISA_AVX2: return &matmul_avx2;
	case ISA_AVX512:
	case ISA_AVX512_BF16: return &matmul_avx512;
	default: return &matmul_portable;
	}
}

static bool quantised(const struct weight *w)
{
	return w->n_blocks > 0;
}

static void pack_few(const struct product *p, int thread, int threads)
{
	size_t bytes = p->k->row_bytes(p->cols / BLOCK_K);
	for (int r = thread; r < p->a->n_rows; r += threads)
		p->k->pack_row((const float *)p->a->x + (int64_t)r * p->cols, p->cols / BLOCK_K,
		               (uint8_t *)p->tiles[0].x + (size_t)r * bytes);
}

static void pack_tiles(const struct product *p, int thread, int threads)
{
	for (int i = thread; i < p->n_tiles; i += threads) {
		struct tile *t = &p->tiles[i], *f = &p->float_tiles[i];
		const float *x = (const float *)p->a->x + (int64_t)t->row * p->cols;
		if (p->blocks)
			p->k->pack_blocks(x, p->cols, t->rows, p->cols / BLOCK_K, (void *)t->x);
		if (p->floats)
			p->k->pack_floats(x, p->cols, f->rows, p->cols, (void *)f->x);
	}
}

static void multiply(const struct product *p, struct panel_job *j, int tile)
{
	bool blocks = quantised(j->w[0]);
	j->tiles = (blocks ? p->tiles : p->float_tiles) + tile;
	if (!blocks)
		p->k->multiply_floats(j);
	else if (p->few)
		p->k->multiply_few(j);
	else
		p->k->multiply_blocks(j);
}

// Lanes of the panel that are rows of the matrix.
static int lanes_of(const struct weight *w, int64_t panel)
{
	int64_t left = w->rows - panel * PANEL_ROWS;
	return (int)(left < PANEL_ROWS ? left : PANEL_ROWS);
}

static void run_gated(const struct product *p, struct panel_job *j, int64_t panel, int tile, struct finish_job f)
{
	const struct weight *gate = p->a->part[0].w, *up = p->a->part[1].w;
	if (gate->dtype == up->dtype) {
		*j = (struct panel_job){.w = {gate, up}, .panel = {panel, panel}, .n_panels = 2, .n_tiles = j->n_tiles,
		                        .acc = j->acc, .buffer = j->buffer};
		multiply(p, j, tile);
	} else {
		float *acc = j->acc;
		*j = (struct panel_job){.w = {gate}, .panel = {panel}, .n_panels = 1, .n_tiles = j->n_tiles, .acc = acc,
		                        .buffer = j->buffer};
		multiply(p, j, tile);
		j->w[0] = up;
		j->acc = acc + (size_t)p->chunk_tiles * TILE_ROWS * 2 * PANEL_ROWS;
		multiply(p, j, tile);
		f.up = j->acc;
		j->acc = acc;
	}
	if (!f.up)
		f.up = j->acc + PANEL_ROWS;
	f.acc = j->acc;
	f.lanes = lanes_of(gate, panel);
	f.bias = p->a->part[0].bias ? p->a->part[0].bias + panel * PANEL_ROWS : NULL;
	f.up_bias = p->a->part[1].bias ? p->a->part[1].bias + panel * PANEL_ROWS : NULL;
	f.y = (float *)p->a->part[0].y + (int64_t)j->tiles[0].row * gate->rows + panel * PANEL_ROWS;
	f.y_stride = gate->rows;
	p->k->finish(&f);
}

static void run_plain(const struct product *p, struct panel_job *j, int part, int64_t unit, int tile,
                      struct finish_job f)
{
	const struct weight *w = p->a->part[part].w;
	int64_t panel = 2 * unit;
	int n = panel + 1 < w->n_panels ? 2 : 1;
	*j = (struct panel_job){.w = {w, w}, .panel = {panel, panel + 1}, .n_panels = n, .n_tiles = j->n_tiles,
	                        .acc = j->acc, .buffer = j->buffer};
	multiply(p, j, tile);
	f.y_stride = w->rows;
	for (int i = 0; i < n; i++, panel++) {
		f.acc = j->acc + i * PANEL_ROWS;
		f.lanes = lanes_of(w, panel);
		f.bias = p->a->part[part].bias ? p->a->part[part].bias + panel * PANEL_ROWS : NULL;
		f.y = (float *)p->a->part[part].y + (int64_t)j->tiles[0].row * w->rows + panel * PANEL_ROWS;
		p->k->finish(&f);
	}
}

static void run_piece(const struct product *p, int piece, struct panel_job *j)
{
	int chunk = piece / p->n_pieces, slice = piece % p->n_pieces;
	int64_t begin = p->n_units * slice / p->n_pieces, end = p->n_units * (slice + 1) / p->n_pieces;
	int tile = chunk * p->chunk_tiles;
	int n_tiles = p->n_tiles - tile < p->chunk_tiles ? p->n_tiles - tile : p->chunk_tiles;
	const struct tile *last = &p->tiles[tile + n_tiles - 1];
	struct finish_job f = {.n_rows = last->row + last->rows - p->tiles[tile].row, .add = p->a->add};
	for (int64_t u = begin; u < end; u++) {
		int64_t unit = u;
		int part = 0;
		while (unit >= p->units[part])
			unit -= p->units[part++];
		j->n_tiles = n_tiles;
		if (p->a->swiglu)
			run_gated(p, j, unit, tile, f);
		else
			run_plain(p, j, part, unit, tile, f);
	}
}

static size_t acc_bytes(const struct product *p)
{
	return (size_t)p->chunk_tiles * TILE_ROWS * 2 * PANEL_ROWS * sizeof(float);
}

static void run(void *arg, int thread, int threads)
{
	struct product local = *(struct product *)arg, *p = &local;
	struct tile own;
	bool one = p->few && p->a->n_rows == 1;
	size_t row = one ? (p->k->row_bytes(p->cols / BLOCK_K) + 63) / 64 * 64 : 0;
	uint8_t *scratch = cpu_thread_scratch(p->c, thread, 2 * acc_bytes(p) + PANEL_BUFFER_BYTES + row);
	struct panel_job j = {.acc = (float *)scratch, .buffer = scratch + 2 * acc_bytes(p)};
	if (one) {
		// Packing one row takes less time than a barrier, so every thread does it for itself.
		own = (struct tile){.rows = 1, .x = (uint8_t *)j.buffer + PANEL_BUFFER_BYTES};
		p->tiles = &own;
		p->k->pack_row(p->a->x, p->cols / BLOCK_K, (void *)own.x);
	} else {
		if (p->few)
			pack_few(p, thread, threads);
		else
			pack_tiles(p, thread, threads);
		cpu_barrier(p->c);
	}
	int n = p->n_chunks * p->n_pieces;
	if (n <= threads) {
		if (thread < n)
			run_piece(p, thread, &j);
		return;
	}
	for (int i = cpu_next_piece(p->c); i < n; i = cpu_next_piece(p->c))
		run_piece(p, i, &j);
}

static void set_pieces(struct product *p)
{
	int64_t rows = 0, work, most;
	for (int i = 0; i < p->a->n_parts; i++)
		rows += p->a->part[i].w->rows;
	work = rows * p->cols * p->a->n_rows / (p->a->n_rows == 1 ? ROW_PIECE_WORK : PIECE_WORK);
	most = 8 * p->c->threads;
	work = work > most ? most : work;
	work = work < p->c->threads ? p->c->threads : work;
	work = (work + p->n_chunks - 1) / p->n_chunks;
	p->n_pieces = (int)(work > p->n_units ? p->n_units : work);
	if (p->c->threads == 1)
		p->n_pieces = 1;
}

static void set_tiles(struct product *p)
{
	int n = p->a->n_rows;
	size_t x_bytes = p->few ? p->k->row_bytes(p->cols / BLOCK_K) : (size_t)(p->cols / BLOCK_K) * X_BLOCK_BYTES;
	size_t block_bytes = p->blocks ? (size_t)n * x_bytes : 0;
	size_t float_row = (size_t)((p->cols + FLOAT_K - 1) / FLOAT_K * FLOAT_K) * sizeof(float);
	size_t float_bytes = p->floats ? (size_t)n * float_row : 0;
	size_t tile_bytes = ((size_t)p->n_tiles * sizeof(struct tile) + 63) / 64 * 64;
	uint8_t *scratch = cpu_scratch(p->c, 2 * tile_bytes + block_bytes + 64 + float_bytes);
	p->tiles = (struct tile *)scratch;
	p->float_tiles = (struct tile *)(scratch + tile_bytes);
	uint8_t *x = scratch + 2 * tile_bytes, *xf = x + (block_bytes + 63) / 64 * 64;
	for (int i = 0; i < p->n_tiles; i++) {
		int row = (int)((int64_t)n * i / p->n_tiles), end = (int)((int64_t)n * (i + 1) / p->n_tiles);
		p->tiles[i] = (struct tile){row, end - row, x + (size_t)row * x_bytes};
		p->float_tiles[i] = (struct tile){row, end - row, xf + (size_t)row * float_row};
	}
}

void cpu_matmul(struct ops_context *c, const struct matmul_args *a)
{
	struct product p = {.a = a, .k = kernels_of(c), .c = c, .cols = a->part[0].w->cols};
	if (a->n_rows < 1)
		return;
	ASSERT(a->n_parts >= 1 && a->n_parts <= 3);
	ASSERT(!a->swiglu || (a->n_parts == 2 && a->part[0].w->rows == a->part[1].w->rows));
	ASSERT(!a->add || (a->n_parts == 1 && !a->swiglu));
	for (int i = 0; i < a->n_parts; i++) {
		const struct weight *w = a->part[i].w;
		ASSERT(w->panels && w->cols == p.cols);
		p.blocks |= quantised(w);
		p.floats |= !quantised(w);
		p.units[i] = a->swiglu ? (i == 0 ? w->n_panels : 0) : (w->n_panels + 1) / 2;
		p.n_units += p.units[i];
	}
	p.few = !p.floats && a->n_rows <= p.k->few_rows;
	int tile_rows = p.few ? p.k->few_tile_rows : TILE_ROWS;
	p.n_tiles = (a->n_rows + tile_rows - 1) / tile_rows;
	p.chunk_tiles = p.n_tiles < CHUNK_TILES ? p.n_tiles : CHUNK_TILES;
	p.n_chunks = (p.n_tiles + p.chunk_tiles - 1) / p.chunk_tiles;
	set_pieces(&p);
	set_tiles(&p);
	cpu_parallel(c, run, &p);
}
