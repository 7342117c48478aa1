// Owns matrices on the device: plain types as they are in the file, quantised ones in tiles (quant.cuh). Nothing points
// into the file afterwards. The file's bytes pass through a staging buffer of bounded size, so that a matrix needs no
// second copy on the device while it is packed.
#include "kernels/cuda/cuda.h"

#include <stdlib.h>

enum { STAGING_BYTES = 32 << 20, ALIGNMENT = 256 };

struct tile_bytes { // of one tile of 16 x 64, and per 256 columns of 16 rows
	int low, high, scale, super;
};

static const struct tile_bytes tile_bytes[DTYPE_COUNT] = {
	[DTYPE_Q4_0] = {512, 0, 64, 0},
	[DTYPE_Q4_1] = {512, 0, 128, 0},
	[DTYPE_Q5_0] = {512, 128, 64, 0},
	[DTYPE_Q5_1] = {512, 128, 128, 0},
	[DTYPE_Q8_0] = {1024, 0, 64, 0},
	[DTYPE_Q4_K] = {512, 0, 64, 64},
	[DTYPE_Q5_K] = {512, 128, 64, 64},
	[DTYPE_Q6_K] = {512, 256, 64, 32},
};

static bool is_plain(enum dtype t)
{
	return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
}

bool cuda_weight_supported(enum dtype t)
{
	return (unsigned)t < DTYPE_COUNT && (is_plain(t) || tile_bytes[t].low);
}

static size_t aligned(size_t bytes)
{
	return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

// Sets tiles, planes (as offsets) and bytes.
static void lay_out(struct weight *w)
{
	const struct tile_bytes *b = &tile_bytes[w->dtype];
	if (is_plain(w->dtype)) {
		w->bytes = (size_t)w->rows * (size_t)w->cols * cuda_dtype_bytes(w->dtype);
		return;
	}
	w->row_tiles = (w->rows + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS;
	w->k_tiles = (w->cols + CUDA_TILE_COLS - 1) / CUDA_TILE_COLS;
	size_t tiles = (size_t)(w->row_tiles * w->k_tiles), at = 0;
	w->planes.low = (const void *)at;
	at += aligned(tiles * (size_t)b->low);
	w->planes.high = (const void *)at;
	at += aligned(tiles * (size_t)b->high);
	w->planes.scale = (const void *)at;
	at += aligned(tiles * (size_t)b->scale);
	w->planes.super = (const void *)at;
	at += aligned(tiles / 4 * (size_t)b->super);
	w->bytes = at;
}

static void move_planes(struct weight *w)
{
	const char *base = w->memory;
	w->planes.low = (const void *)(base + (size_t)w->planes.low);
	w->planes.high = (const void *)(base + (size_t)w->planes.high);
	w->planes.scale = (const void *)(base + (size_t)w->planes.scale);
	w->planes.super = (const void *)(base + (size_t)w->planes.super);
}

static void upload_tiles(struct ops_context *c, struct weight *w, const char *data)
{
	size_t row_bytes = (size_t)dtype_row_bytes(w->dtype, w->cols);
	int64_t tiles = STAGING_BYTES / (int64_t)(row_bytes * CUDA_TILE_ROWS);
	if (tiles < 1)
		tiles = 1;
	char *staging = cuda_scratch(c, SCRATCH_DEQUANT, (size_t)tiles * CUDA_TILE_ROWS * row_bytes);
	for (int64_t first = 0; first < w->row_tiles; first += tiles) {
		int64_t n = w->row_tiles - first < tiles ? w->row_tiles - first : tiles, row = first * CUDA_TILE_ROWS;
		int64_t rows = w->rows - row < n * CUDA_TILE_ROWS ? w->rows - row : n * CUDA_TILE_ROWS;
		CUDA_MUST(cudaMemcpyAsync(staging, data + (size_t)row * row_bytes, (size_t)rows * row_bytes,
		                          cudaMemcpyHostToDevice, c->stream));
		cuda_quant_pack(c, w, staging, first, n, rows);
	}
}

enum status cuda_weight_create(struct ops_context *c, struct weight **out, const struct weight_source *s,
                               bool as_embedding, bool as_matrix, struct error *e)
{
	*out = NULL;
	if (!cuda_weight_supported(s->dtype))
		return error_set(e, STATUS_REFUSED, "weights of type %s are not supported on a GPU", dtype_info(s->dtype)->name);
	if (s->rows < 1 || s->cols < 1 || dtype_row_bytes(s->dtype, s->cols) < 0)
		return error_set(e, STATUS_REFUSED, "a %s matrix of %lld x %lld: columns must be a multiple of %d",
		                 dtype_info(s->dtype)->name, (long long)s->rows, (long long)s->cols,
		                 dtype_info(s->dtype)->block_elements);
	struct weight *w = xcalloc(1, sizeof *w);
	*w = (struct weight){.dtype = s->dtype, .rows = s->rows, .cols = s->cols};
	lay_out(w);
	if (cudaMalloc(&w->memory, w->bytes) != cudaSuccess) {
		cudaGetLastError();
		size_t bytes = w->bytes;
		free(w);
		return error_set(e, STATUS_FATAL, "no memory on the device for a matrix of %zu bytes", bytes);
	}
	if (is_plain(s->dtype)) {
		CUDA_MUST(cudaMemcpyAsync(w->memory, s->data, w->bytes, cudaMemcpyHostToDevice, c->stream));
	} else {
		move_planes(w);
		upload_tiles(c, w, s->data);
	}
	CUDA_MUST(cudaStreamSynchronize(c->stream)); // the source may go
	*out = w;
	return STATUS_OK;
}

void cuda_weight_destroy(struct ops_context *c, struct weight **w)
{
	if (!*w)
		return;
	CUDA_MUST(cudaStreamSynchronize(c->stream));
	CUDA_MUST(cudaFree((*w)->memory));
	free(*w);
	*w = NULL;
}

size_t cuda_weight_bytes(const struct weight *w)
{
	return w->bytes;
}

bool cuda_weight_borrows(const struct weight *w)
{
	return false;
}

size_t cuda_weight_bytes_predicted(const struct weight_source *s, bool as_embedding, bool as_matrix)
{
	struct weight w = {.dtype = s->dtype, .rows = s->rows, .cols = s->cols};
	lay_out(&w);
	return w.bytes;
}
