// Owns matrices: repacks them into panels at load, or borrows the file's bytes where only rows are looked up. A tied
// embedding is kept once, in panels, and its rows are gathered from there.
#include "kernels/cpu/weight.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/dequant.h"
#include "kernels/cpu/pages.h"

static const struct weight_format formats[DTYPE_COUNT] = {
	[DTYPE_F32] = {32, 0, SCALES_NONE, 0, 0, 0},
	[DTYPE_F16] = {16, 0, SCALES_NONE, 0, 0, 0},
	[DTYPE_BF16] = {16, 0, SCALES_NONE, 0, 0, 0},
	[DTYPE_Q4_0] = {4, 8, SCALES_HALF, 256, 1, 32},
	[DTYPE_Q4_1] = {4, 0, SCALES_HALF_MIN, 256, 1, 64},
	[DTYPE_Q5_0] = {5, 16, SCALES_HALF, 320, 1, 32},
	[DTYPE_Q5_1] = {5, 0, SCALES_HALF_MIN, 320, 1, 64},
	[DTYPE_Q8_0] = {8, 128, SCALES_HALF, 512, 1, 32},
	[DTYPE_Q4_K] = {4, 0, SCALES_K, 256, 8, 320},
	[DTYPE_Q5_K] = {5, 0, SCALES_K, 320, 8, 320},
	[DTYPE_Q6_K] = {6, 32, SCALES_6K, 384, 8, 288},
};

const struct weight_format *weight_format(enum dtype t)
{
	return (unsigned)t < DTYPE_COUNT && formats[t].bits ? &formats[t] : NULL;
}

bool cpu_weight_supported(enum dtype t)
{
	return weight_format(t) != NULL;
}

static int64_t panel_count(int64_t rows)
{
	return (rows + PANEL_ROWS - 1) / PANEL_ROWS;
}

static size_t panel_size(enum dtype t, int64_t cols)
{
	const struct weight_format *f = weight_format(t);
	size_t bytes;
	if (f->scales == SCALES_NONE)
		bytes = (size_t)cols * PANEL_ROWS * (size_t)f->bits / 8;
	else
		bytes = (size_t)(cols / BLOCK_K) * (size_t)f->block_bytes +
		        (size_t)(cols / BLOCK_K / f->scale_blocks) * (size_t)f->scale_bytes;
	return (bytes + 63) / 64 * 64;
}

size_t cpu_weight_bytes_predicted(const struct weight_source *s, bool as_embedding, bool as_matrix)
{
	if (!as_matrix || !weight_format(s->dtype))
		return 0;
	return (size_t)panel_count(s->rows) * panel_size(s->dtype, s->cols);
}

// Lane `row` of the vectors of one block; see the layout in weight.h. Words are quads.
static void put_block(const struct weight_format *f, const struct quant_block *b, int row, uint8_t *block)
{
	uint32_t quad[8], word[10] = {0};
	int n = 4;
	memcpy(quad, b->q, sizeof quad);
	if (f->bits == 8) {
		memcpy(word, quad, sizeof quad);
		n = 8;
	} else {
		for (int j = 0; j < 4; j++)
			word[j] = (quad[j] & 0x0f0f0f0f) | (quad[j + 4] & 0x0f0f0f0f) << 4;
		for (int j = 0; j < 8; j++)
			if (f->bits == 5)
				word[4] |= (quad[j] >> 4 & 0x01010101) << j;
			else if (f->bits == 6)
				word[4 + j / 4] |= (quad[j] >> 4 & 0x03030303) << 2 * (j % 4);
		n = f->bits;
	}
	for (int j = 0; j < n; j++)
		memcpy(block + 64 * j + 4 * row, &word[j], 4);
}

static void put_scale(const struct weight_format *f, const struct quant_block *b, int row, int64_t index,
                      uint8_t *scales)
{
	int sub = (int)(index % f->scale_blocks);
	uint8_t *p = scales + (size_t)(index / f->scale_blocks) * (size_t)f->scale_bytes;
	memcpy(p + 2 * row, &b->raw_d, 2);
	switch (f->scales) {
	case SCALES_HALF_MIN:
		memcpy(p + 32 + 2 * row, &b->raw_m, 2);
		break;
	case SCALES_K:
		memcpy(p + 32 + 2 * row, &b->raw_m, 2);
		p[64 + 16 * sub + row] = b->raw_scale[0];
		p[192 + 16 * sub + row] = b->raw_minimum;
		break;
	case SCALES_6K:
		p[32 + 32 * sub + row] = b->raw_scale[0];
		p[32 + 32 * sub + 16 + row] = b->raw_scale[1];
		break;
	default:
		break;
	}
}

struct repack {
	struct weight *w;
	const uint8_t *data;
	size_t row_bytes;
};

static void repack_floats(const struct repack *r, int64_t first, int rows, uint8_t *panel)
{
	const struct weight *w = r->w;
	for (int i = 0; i < rows; i++) {
		const uint8_t *row = r->data + (size_t)(first + i) * r->row_bytes;
		if (w->format->bits == 32)
			for (int64_t k = 0; k < w->cols; k++)
				memcpy(panel + 4 * (k * PANEL_ROWS + i), row + 4 * k, 4);
		else
			for (int64_t k = 0; k < w->cols; k++)
				memcpy(panel + 2 * (k * PANEL_ROWS + i), row + 2 * k, 2);
	}
}

// A full panel of a type whose words of the file are lanes as they are: `words` of them after `head` bytes of scales.
static inline __attribute__((always_inline)) void repack_words(const struct repack *r, const uint8_t *data, int head,
                                                               int words, uint32_t flip, uint8_t *panel)
{
	const struct weight *w = r->w;
	uint8_t *scales = panel + (size_t)w->n_blocks * (size_t)w->format->block_bytes;
	for (int64_t i = 0; i < w->n_blocks; i++, panel += 64 * words, scales += 16 * head, data += head + 4 * words)
		for (int row = 0; row < PANEL_ROWS; row++) {
			const uint8_t *p = data + (size_t)row * r->row_bytes;
			for (int h = 0; h < head; h += 2)
				memcpy(scales + 16 * h + 2 * row, p + h, 2);
			for (int j = 0; j < words; j++) {
				uint32_t v;
				memcpy(&v, p + head + 4 * j, 4);
				v ^= flip;
				memcpy(panel + 64 * j + 4 * row, &v, 4);
			}
		}
}

static bool repack_fast(const struct repack *r, int64_t first, uint8_t *panel)
{
	const uint8_t *data = r->data + (size_t)first * r->row_bytes;
	switch (r->w->dtype) {
	case DTYPE_Q4_0: repack_words(r, data, 2, 4, 0, panel); return true;
	case DTYPE_Q4_1: repack_words(r, data, 4, 4, 0, panel); return true;
	case DTYPE_Q8_0: repack_words(r, data, 2, 8, 0x80808080, panel); return true;
	default: return false;
	}
}

static void repack_panels(void *arg, int thread, int threads)
{
	const struct repack *r = arg;
	struct weight *w = r->w;
	int64_t begin = w->n_panels * thread / threads, end = w->n_panels * (thread + 1) / threads;
	struct quant_block b;
	for (int64_t p = begin; p < end; p++) {
		uint8_t *panel = w->panels + (size_t)p * w->panel_bytes;
		uint8_t *scales = panel + (size_t)w->n_blocks * (size_t)w->format->block_bytes;
		int64_t first = p * PANEL_ROWS;
		int rows = (int)(w->rows - first < PANEL_ROWS ? w->rows - first : PANEL_ROWS);
		if (rows < PANEL_ROWS)
			memset(panel, 0, w->panel_bytes); // rows beyond the last have scale 0
		if (rows == PANEL_ROWS && repack_fast(r, first, panel))
			continue;
		if (w->format->scales == SCALES_NONE) {
			repack_floats(r, first, rows, panel);
			continue;
		}
		for (int64_t i = 0; i < w->n_blocks; i++)
			for (int row = 0; row < rows; row++) {
				quant_read(w->dtype, r->data + (size_t)(first + row) * r->row_bytes, i, &b);
				put_block(w->format, &b, row, panel + (size_t)i * (size_t)w->format->block_bytes);
				put_scale(w->format, &b, row, i, scales);
			}
	}
}

enum status cpu_weight_create(struct ops_context *c, struct weight **out, const struct weight_source *s,
                              bool as_embedding, bool as_matrix, struct error *e)
{
	*out = NULL;
	if (!weight_format(s->dtype))
		return error_set(e, STATUS_REFUSED, "weights of type %s are not supported on a CPU",
		                 dtype_info(s->dtype)->name);
	int64_t row_bytes = dtype_row_bytes(s->dtype, s->cols);
	if (s->rows < 1 || s->cols < 1 || row_bytes < 0)
		return error_set(e, STATUS_REFUSED, "a %s matrix of %lld x %lld: columns must be a multiple of %d",
		                 dtype_info(s->dtype)->name, (long long)s->rows, (long long)s->cols,
		                 dtype_info(s->dtype)->block_elements);
	struct weight *w = xcalloc(1, sizeof *w);
	*w = (struct weight){.dtype = s->dtype, .format = weight_format(s->dtype), .rows = s->rows, .cols = s->cols,
	                     .n_panels = panel_count(s->rows), .panel_bytes = panel_size(s->dtype, s->cols)};
	if (w->format->scales != SCALES_NONE)
		w->n_blocks = s->cols / BLOCK_K;
	if (!as_matrix) {
		w->file = s->data;
		*out = w;
		return STATUS_OK;
	}
	size_t bytes = cpu_weight_bytes(&(struct weight){.panels = (void *)1, .n_panels = w->n_panels,
	                                                 .panel_bytes = w->panel_bytes});
	w->panels = cpu_pages_take(&c->weight_pages, &w->pages, bytes);
	if (!w->panels) {
		free(w);
		return error_set(e, STATUS_FATAL, "no memory for a matrix of %zu bytes", bytes);
	}
	struct repack r = {.w = w, .data = s->data, .row_bytes = (size_t)row_bytes};
	cpu_parallel(c, repack_panels, &r);
	*out = w;
	return STATUS_OK;
}

void cpu_weight_destroy(struct ops_context *c, struct weight **w)
{
	if (!*w)
		return;
	if ((*w)->panels)
		cpu_pages_give(&c->weight_pages, (*w)->pages);
	free(*w);
	*w = NULL;
}

size_t cpu_weight_bytes(const struct weight *w)
{
	return w->panels ? (size_t)w->n_panels * w->panel_bytes : 0;
}

bool cpu_weight_borrows(const struct weight *w)
{
	return w->file != NULL;
}

static uint8_t stored(const struct weight_format *f, const uint8_t *block, int row, int k)
{
	int j = k / 4;
	const uint8_t *lane = block + 4 * row + k % 4;
	if (f->bits == 8)
		return lane[64 * j];
	uint8_t q = lane[64 * (j % 4)] >> 4 * (j / 4) & 15;
	if (f->bits == 5)
		q |= (lane[256] >> j & 1) << 4;
	else if (f->bits == 6)
		q |= (lane[256 + 64 * (j / 4)] >> 2 * (j % 4) & 3) << 4;
	return q;
}

static float half_at(const uint8_t *p)
{
	uint16_t h;
	memcpy(&h, p, 2);
	return cpu_half_to_float(h);
}

static void scales_of(const struct weight *w, const uint8_t *panel, int64_t block, int row, float scale[2],
                      float *minimum)
{
	const struct weight_format *f = w->format;
	const uint8_t *p = panel_scales(w, panel) + (size_t)(block / f->scale_blocks) * (size_t)f->scale_bytes;
	int sub = (int)(block % f->scale_blocks);
	scale[0] = scale[1] = half_at(p + 2 * row);
	*minimum = 0;
	switch (f->scales) {
	case SCALES_HALF_MIN:
		*minimum = half_at(p + 32 + 2 * row);
		break;
	case SCALES_K:
		scale[0] *= (float)p[64 + 16 * sub + row];
		scale[1] = scale[0];
		*minimum = -(half_at(p + 32 + 2 * row) * (float)p[192 + 16 * sub + row]);
		break;
	case SCALES_6K:
		scale[0] *= (float)(int8_t)p[32 + 32 * sub + row];
		scale[1] *= (float)(int8_t)p[32 + 32 * sub + 16 + row];
		break;
	default:
		break;
	}
}

void panel_block_read(const struct weight *w, int64_t p, int64_t block, struct panel_block *out)
{
	const uint8_t *panel = weight_panel(w, p), *q = panel + (size_t)block * (size_t)w->format->block_bytes;
	float scale[2];
	for (int row = 0; row < PANEL_ROWS; row++) {
		for (int k = 0; k < BLOCK_K; k++)
			out->w[row][k] = (int16_t)(stored(w->format, q, row, k) - w->format->offset);
		scales_of(w, panel, block, row, scale, &out->minimum[row]);
		out->scale[0][row] = scale[0];
		out->scale[1][row] = scale[1];
	}
}

void weight_row(const struct weight *w, int64_t row, float *out)
{
	if (w->file) {
		dequant_row(w->dtype, w->file + (size_t)row * (size_t)dtype_row_bytes(w->dtype, w->cols), w->cols, out);
		return;
	}
	const uint8_t *panel = weight_panel(w, row / PANEL_ROWS);
	int lane = (int)(row % PANEL_ROWS);
	if (w->format->scales == SCALES_NONE) {
		size_t size = (size_t)w->format->bits / 8;
		for (int64_t k = 0; k < w->cols; k++)
			dequant_row(w->dtype, panel + ((size_t)k * PANEL_ROWS + (size_t)lane) * size, 1, out + k);
		return;
	}
	for (int64_t b = 0; b < w->n_blocks; b++) {
		float scale[2], minimum;
		scales_of(w, panel, b, lane, scale, &minimum);
		for (int k = 0; k < BLOCK_K; k++, out++)
			*out = scale[k / 16] * (float)(stored(w->format, panel + (size_t)b * (size_t)w->format->block_bytes,
			                                      lane, k) - w->format->offset) + minimum;
	}
}
