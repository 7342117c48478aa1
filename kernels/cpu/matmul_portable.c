// The specification of the matrix kernels, in plain C: what every instruction set has to equal, bit for bit.
#include <math.h>
#include <string.h>

#include "kernels/cpu/matmul.h"

// Where k of a block stands among the packed activations of a row.
static int place(int k)
{
	return k / 4 * 4 + k % 2 * 2 + k / 2 % 2;
}

static void pack_block(const float *x, int t, int rows, uint8_t *record)
{
	int16_t *words = (int16_t *)record;
	float largest = 0, *dx = (float *)(record + 64 * rows);
	int sum = 0;
	for (int k = 0; k < BLOCK_K; k++)
		largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
	// Below 1e-30 the inverse would overflow; such a block counts as zero.
	float inverse = largest > 1e-30f ? X_LIMIT / largest : 0;
	for (int k = 0; k < BLOCK_K; k++) {
		float v = rintf(x[k] * inverse);
		int q = v <= X_LIMIT ? v >= -X_LIMIT ? (int)v : -X_LIMIT : X_LIMIT;
		sum += q;
		words[t * BLOCK_K + place(k)] = (int16_t)q;
	}
	dx[t] = largest > 1e-30f ? largest * (1.0f / X_LIMIT) : 0;
	dx[rows + t] = dx[t] * (float)sum;
}

static void pack_blocks(const float *x, int64_t stride, int rows, int64_t n_blocks, void *out)
{
	for (int64_t b = 0; b < n_blocks; b++)
		for (int t = 0; t < rows; t++)
			pack_block(x + t * stride + b * BLOCK_K, t, rows, (uint8_t *)out + b * rows * X_BLOCK_BYTES);
}

static void pack_floats(const float *x, int64_t stride, int rows, int64_t cols, void *out)
{
	for (int64_t k = 0; k < cols; k += FLOAT_K)
		for (int t = 0; t < rows; t++)
			for (int i = 0; i < FLOAT_K; i++)
				((float *)out)[k * rows + t * FLOAT_K + i] = k + i < cols ? x[t * stride + k + i] : 0;
}

static int dot(const int16_t *w, const int16_t *x, int begin, int end)
{
	int sum = 0;
	for (int k = begin; k < end; k++)
		sum += w[k] * x[place(k)];
	return sum;
}

static void add_block(const struct panel_block *w, const struct weight_format *f, const uint8_t *record, int t,
                      int rows, float *acc)
{
	const int16_t *x = (const int16_t *)record + t * BLOCK_K;
	const float *dx = (const float *)(record + 64 * rows);
	for (int i = 0; i < PANEL_ROWS; i++) {
		if (f->scales == SCALES_6K) {
			acc[i] = fmaf((float)dot(w->w[i], x, 0, 16), w->scale[0][i] * dx[t], acc[i]);
			acc[i] = fmaf((float)dot(w->w[i], x, 16, 32), w->scale[1][i] * dx[t], acc[i]);
			continue;
		}
		acc[i] = fmaf((float)dot(w->w[i], x, 0, 32), w->scale[0][i] * dx[t], acc[i]);
		if (f->scales == SCALES_HALF_MIN || f->scales == SCALES_K)
			acc[i] = fmaf(w->minimum[i], dx[rows + t], acc[i]);
	}
}

static float *acc_of(const struct panel_job *j, const struct tile *tile, int t, int p)
{
	return j->acc + ((tile->row - j->tiles[0].row + t) * 2 + p) * PANEL_ROWS;
}

static void clear(const struct panel_job *j, int p)
{
	for (const struct tile *tile = j->tiles; tile < j->tiles + j->n_tiles; tile++)
		for (int t = 0; t < tile->rows; t++)
			memset(acc_of(j, tile, t, p), 0, PANEL_ROWS * sizeof(float));
}

static void multiply_blocks(const struct panel_job *j)
{
	struct panel_block block;
	for (int p = 0; p < j->n_panels; p++) {
		clear(j, p);
		for (int64_t b = 0; b < j->w[p]->n_blocks; b++) {
			panel_block_read(j->w[p], j->panel[p], b, &block);
			for (const struct tile *tile = j->tiles; tile < j->tiles + j->n_tiles; tile++)
				for (int t = 0; t < tile->rows; t++)
					add_block(&block, j->w[p]->format, (const uint8_t *)tile->x + b * tile->rows * X_BLOCK_BYTES,
					          t, tile->rows, acc_of(j, tile, t, p));
		}
	}
}

static float element(enum dtype type, const uint8_t *panel, int64_t i)
{
	float f;
	uint16_t h;
	if (type == DTYPE_F32) {
		memcpy(&f, panel + 4 * i, 4);
		return f;
	}
	memcpy(&h, panel + 2 * i, 2);
	return type == DTYPE_F16 ? cpu_half_to_float(h) : cpu_bfloat_to_float(h);
}

static void multiply_floats(const struct panel_job *j)
{
	for (int p = 0; p < j->n_panels; p++) {
		const uint8_t *panel = weight_panel(j->w[p], j->panel[p]);
		clear(j, p);
		for (int64_t k = 0; k < j->w[p]->cols; k++) {
			float w[PANEL_ROWS];
			for (int i = 0; i < PANEL_ROWS; i++)
				w[i] = element(j->w[p]->dtype, panel, k * PANEL_ROWS + i);
			for (const struct tile *tile = j->tiles; tile < j->tiles + j->n_tiles; tile++)
				for (int t = 0; t < tile->rows; t++) {
					float *acc = acc_of(j, tile, t, p);
					float x = ((const float *)tile->x)[(k / FLOAT_K * tile->rows + t) * FLOAT_K + k % FLOAT_K];
					for (int i = 0; i < PANEL_ROWS; i++)
						acc[i] = fmaf(w[i], x, acc[i]);
				}
		}
	}
}

// x / (1 + exp(-x)). exp by Cody-Waite reduction and its Taylor polynomial (|r| <= ln 2 / 2, so 1e-8 relative).
static float silu(float x)
{
	float z = -x;
	z = z < 88.0f ? z : 88.0f;
	z = z > -87.0f ? z : -87.0f;
	float n = rintf(z * 1.44269504f);
	float r = fmaf(n, -0.693359375f, z);
	r = fmaf(n, 2.12194440e-4f, r);
	float e = fmaf(1.0f / 5040, r, 1.0f / 720);
	e = fmaf(e, r, 1.0f / 120);
	e = fmaf(e, r, 1.0f / 24);
	e = fmaf(e, r, 1.0f / 6);
	e = fmaf(e, r, 0.5f);
	e = fmaf(e, r, 1.0f);
	e = fmaf(e, r, 1.0f);
	uint32_t bits = (uint32_t)((int)n + 127) << 23;
	float power;
	memcpy(&power, &bits, 4);
	return x / fmaf(e, power, 1.0f);
}

static void finish(const struct finish_job *j)
{
	for (int t = 0; t < j->n_rows; t++)
		for (int i = 0; i < j->lanes; i++) {
			float v = j->acc[t * 2 * PANEL_ROWS + i], *y = j->y + t * j->y_stride + i;
			if (j->bias)
				v += j->bias[i];
			if (j->up) {
				float up = j->up[t * 2 * PANEL_ROWS + i];
				v = silu(v) * (j->up_bias ? up + j->up_bias[i] : up);
			}
			*y = j->add ? *y + v : v;
		}
}

const struct matmul_kernels matmul_portable = {
	.pack_blocks = pack_blocks,
	.pack_floats = pack_floats,
	.multiply_blocks = multiply_blocks,
	.multiply_floats = multiply_floats,
	.finish = finish,
};
