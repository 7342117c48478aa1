// Matrix kernels for AVX-512 with VNNI. Many rows: a block of two panels is widened to int16 once per chunk of rows and
// multiplied by vpdpwssd, 24 accumulators in registers. Few rows: the bytes meet the high and the low bytes of the
// activations by vpdpbusd, so that nothing is widened: per 128 weights of 4 bits 3 instructions to unpack and 4 to
// multiply, where the 16-bit form would need 7 and 4.
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/matmul.h"

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT_STEP = 64 }; // k whose weights stay in L1 while the tiles of a chunk pass: 2 panels x 64 x 64 B = 8 kB

// The 32 activations of a block as integers; returns dx.
INLINE float quantise(const float *x, __m512i *q0, __m512i *q1)
{
	__m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
	float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
	float inverse = largest > 1e-30f ? X_LIMIT / largest : 0;
	*q0 = _mm512_cvtps_epi32(_mm512_mul_ps(a, _mm512_set1_ps(inverse)));
	*q1 = _mm512_cvtps_epi32(_mm512_mul_ps(b, _mm512_set1_ps(inverse)));
	return largest > 1e-30f ? largest * (1.0f / X_LIMIT) : 0;
}

static void pack_blocks(const float *x, int64_t stride, int rows, int64_t n_blocks, void *out)
{
	uint8_t *record = out;
	for (int64_t b = 0; b < n_blocks; b++, record += rows * X_BLOCK_BYTES) {
		float *dx = (float *)(record + 64 * rows);
		for (int t = 0; t < rows; t++) {
			__m512i q0, q1;
			dx[t] = quantise(x + t * stride + b * BLOCK_K, &q0, &q1);
			dx[rows + t] = dx[t] * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1));
			__m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(q0)), _mm512_cvtsepi32_epi16(q1), 1);
			w = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(w, 0xd8), 0xd8);
			_mm512_storeu_si512(record + 64 * t, w);
		}
	}
}

static void pack_floats(const float *x, int64_t stride, int rows, int64_t cols, void *out)
{
	float *o = out;
	for (int64_t k = 0; k < cols; k += FLOAT_K) {
		__mmask16 mask = cols - k < FLOAT_K ? (__mmask16)((1u << (cols - k)) - 1) : 0xffff;
		for (int t = 0; t < rows; t++, o += FLOAT_K)
			_mm512_storeu_ps(o, _mm512_maskz_loadu_ps(mask, x + t * stride + k));
	}
}

enum { FEW_TILES = 4, FEW_ROWS = 8, FEW_TILE_ROWS = 8 };
// Of weights prefetched; the panels of a matrix follow each other, and so do matrices, so this runs on. Into L2, since L1
// has 16 places for lines to come, too few for its latency: 4 rows of Q4_1, 336 tokens/s with 4 KiB into L1, 404 so.
enum { AHEAD_BYTES = 16384 };

// What stands AHEAD_BYTES after `offset` of panel p; past its end, in the same panel of the next job. With few rows,
// prefetching it is what lets memory and multiplication overlap.
INLINE const char *ahead_of(const struct panel_job *j, int p, size_t offset)
{
	size_t ahead = offset + AHEAD_BYTES, size = j->w[p]->panel_bytes;
	if (ahead >= size && j->n_panels == 2 && j->w[0] == j->w[1])
		ahead += size;
	return (const char *)weight_panel(j->w[p], j->panel[p]) + ahead;
}

INLINE void prefetch(const char *address, int bytes)
{
	for (int i = 0; i < bytes; i += 64)
		_mm_prefetch(address + i, _MM_HINT_T1);
}

// Scales of a block of a panel.
struct scales { __m512 d0, d1, m; };

INLINE __m512 halfs(const uint8_t *p)
{
	return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

INLINE struct scales load_scales(enum weight_scales kind, const uint8_t *scales, int64_t block)
{
	struct scales s = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
	if (kind == SCALES_HALF) {
		s.d0 = halfs(scales + block * 32);
	} else if (kind == SCALES_HALF_MIN) {
		s.d0 = halfs(scales + block * 64);
		s.m = halfs(scales + block * 64 + 32);
	} else if (kind == SCALES_K) {
		const uint8_t *p = scales + block / 8 * 320, *q = p + 64 + block % 8 * 16;
		__m512 sc = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)q)));
		__m512 mn = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(q + 128))));
		s.d0 = _mm512_mul_ps(halfs(p), sc);
		s.m = _mm512_sub_ps(_mm512_set1_ps(-0.0f), _mm512_mul_ps(halfs(p + 32), mn));
	} else {
		const uint8_t *p = scales + block / 8 * 288, *q = p + 32 + block % 8 * 32;
		__m512 d = halfs(p);
		s.d0 = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)q))));
		s.d1 = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(q + 16)))));
	}
	return s;
}

// Vector of quad j of a block: uint8 [row][4].
INLINE __m512i load_quad(int bits, const uint8_t *block, int j)
{
	if (bits == 8)
		return _mm512_load_si512(block + 64 * j);
	__m512i v = _mm512_load_si512(block + 64 * (j % 4));
	const __m512i low = _mm512_set1_epi8(15);
	v = j < 4 ? _mm512_and_si512(v, low) : _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
	if (bits == 4)
		return v;
	__m512i h = _mm512_load_si512(block + 256 + (bits == 6 ? 64 * (j / 4) : 0));
	int shift = bits == 5 ? 4 - j : 4 - 2 * (j % 4);
	h = shift >= 0 ? _mm512_slli_epi16(h, shift) : _mm512_srli_epi16(h, -shift);
	return _mm512_ternarylogic_epi32(v, h, _mm512_set1_epi8(bits == 5 ? 0x10 : 0x30), 0xf8); // v | (h & mask)
}

// A block of one or two panels, widened, in L1.
struct wide_block {
	__m512i w[16][2];       // [2 * quad + odd][panel], int16 [row][2]
	struct scales scales[2];
};

INLINE void widen(int bits, int offset, const uint8_t *block, __m512i (*w)[2])
{
	const __m512i low = _mm512_set1_epi16(255), off = _mm512_set1_epi16((short)offset);
#pragma GCC unroll 8
	for (int j = 0; j < 8; j++) {
		__m512i v = load_quad(bits, block, j);
		__m512i even = _mm512_and_si512(v, low), odd = _mm512_srli_epi16(v, 8);
		w[2 * j][0] = offset ? _mm512_sub_epi16(even, off) : even;
		w[2 * j + 1][0] = offset ? _mm512_sub_epi16(odd, off) : odd;
	}
}

static void widen_block(const struct panel_job *j, int p, int64_t b, struct wide_block *out)
{
	const struct weight *w = j->w[p];
	const uint8_t *panel = weight_panel(w, j->panel[p]), *scales = panel_scales(w, panel);
	const uint8_t *block = panel + (size_t)b * (size_t)w->format->block_bytes;
	__m512i(*words)[2] = (__m512i(*)[2])&out->w[0][p];
	switch (w->format->bits) {
	case 4:
		if (w->format->offset)
			widen(4, 8, block, words);
		else
			widen(4, 0, block, words);
		break;
	case 5: widen(5, w->format->offset, block, words); break;
	case 6: widen(6, 32, block, words); break;
	default: widen(8, 128, block, words); break;
	}
	switch (w->format->scales) {
	case SCALES_HALF: out->scales[p] = load_scales(SCALES_HALF, scales, b); break;
	case SCALES_HALF_MIN: out->scales[p] = load_scales(SCALES_HALF_MIN, scales, b); break;
	case SCALES_K: out->scales[p] = load_scales(SCALES_K, scales, b); break;
	default: out->scales[p] = load_scales(SCALES_6K, scales, b); break;
	}
}

INLINE __m512i spread(const void *p)
{
	int v;
	memcpy(&v, p, 4);
	return _mm512_set1_epi32(v);
}

INLINE void add_scaled(__m512i sum, const struct scales *c, int half, bool minimum, float dx, float s, float *acc)
{
	__m512 scale = _mm512_mul_ps(half ? c->d1 : c->d0, _mm512_set1_ps(dx));
	__m512 a = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_load_ps(acc));
	if (minimum)
		a = _mm512_fmadd_ps(c->m, _mm512_set1_ps(s), a);
	_mm512_store_ps(acc, a);
}

enum kind { PLAIN, WITH_MINIMUM, TWO_HALVES };

// Accumulators of a tile, row t in a<t> and b<t>, spelled out: GCC 12 keeps an array of them in registers but also stores
// each to the stack at every step, which cost a third of the speed.
#define EACH_ROW(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11)

// Pairs first to end - 1 of a block, added to the accumulators of T rows; half names the scale.
INLINE void tile_sums(int T, int P, int first, int end, int half, bool minimum, const struct wide_block *w,
                      const uint8_t *x, float *acc)
{
	const float *dx = (const float *)(x + 64 * T);
#define DPWSSD(acc, w, v) asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(v))
#define DECLARE(t) __m512i a##t = _mm512_setzero_si512(), b##t = a##t;
	EACH_ROW(DECLARE)
	for (int i = first; i < end; i++) {
		__m512i w0 = w->w[i][0], w1 = P == 2 ? w->w[i][1] : w0;
#define MULTIPLY(t)                                                                                                    \
	if (t < T) {                                                                                                   \
		__m512i v = spread(x + 64 * t + 4 * i);                                                                \
		DPWSSD(a##t, w0, v);                                                               \
		if (P == 2)                                                                                            \
			DPWSSD(b##t, w1, v);                                                       \
	}
		EACH_ROW(MULTIPLY)
	}
#define ADD(t)                                                                                                         \
	if (t < T) {                                                                                                   \
		add_scaled(a##t, &w->scales[0], half, minimum, dx[t], dx[T + t], acc + t * 2 * PANEL_ROWS);            \
		if (P == 2)                                                                                            \
			add_scaled(b##t, &w->scales[1], half, minimum, dx[t], dx[T + t],                               \
			           acc + (t * 2 + 1) * PANEL_ROWS);                                                    \
	}
	EACH_ROW(ADD)
}

INLINE void tile_block(int T, int P, enum kind kind, const struct wide_block *w, const uint8_t *x, float *acc)
{
	if (kind == TWO_HALVES) {
		tile_sums(T, P, 0, 8, 0, false, w, x, acc);
		tile_sums(T, P, 8, 16, 1, false, w, x, acc);
	} else {
		tile_sums(T, P, 0, 16, 0, kind == WITH_MINIMUM, w, x, acc);
	}
}

#define EACH_T(M) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12)
#define BLOCK_KERNELS(T)                                                                                               \
	static void block_##T(int panels, enum kind kind, const struct wide_block *w, const uint8_t *x, float *acc)    \
	{                                                                                                              \
		if (panels == 1)                                                                                       \
			kind == PLAIN          ? tile_block(T, 1, PLAIN, w, x, acc)                                    \
			: kind == WITH_MINIMUM ? tile_block(T, 1, WITH_MINIMUM, w, x, acc)                             \
					       : tile_block(T, 1, TWO_HALVES, w, x, acc);                              \
		else                                                                                                   \
			kind == PLAIN          ? tile_block(T, 2, PLAIN, w, x, acc)                                    \
			: kind == WITH_MINIMUM ? tile_block(T, 2, WITH_MINIMUM, w, x, acc)                             \
					       : tile_block(T, 2, TWO_HALVES, w, x, acc);                              \
	}
EACH_T(BLOCK_KERNELS)
#define BLOCK_KERNEL_NAME(T) block_##T,
static void (*const block_kernel[])(int, enum kind, const struct wide_block *, const uint8_t *, float *) = {
	NULL, EACH_T(BLOCK_KERNEL_NAME)};

static size_t acc_count(const struct panel_job *j)
{
	const struct tile *last = &j->tiles[j->n_tiles - 1];
	return (size_t)(last->row + last->rows - j->tiles[0].row) * 2 * PANEL_ROWS;
}

static enum kind kind_of(const struct weight *w)
{
	switch (w->format->scales) {
	case SCALES_HALF: return PLAIN;
	case SCALES_6K: return TWO_HALVES;
	default: return WITH_MINIMUM;
	}
}

static void multiply_blocks(const struct panel_job *j)
{
	struct wide_block *wide = j->buffer;
	enum kind kind = kind_of(j->w[0]);
	memset(j->acc, 0, acc_count(j) * sizeof(float));
	for (int64_t b = 0; b < j->w[0]->n_blocks; b++) {
		for (int p = 0; p < j->n_panels; p++) {
			int bytes = j->w[p]->format->block_bytes + 64;
			if (j->n_tiles <= FEW_TILES)
				prefetch(ahead_of(j, p, (size_t)b * (size_t)bytes), bytes);
			widen_block(j, p, b, wide);
		}
		for (const struct tile *t = j->tiles; t < j->tiles + j->n_tiles; t++)
			block_kernel[t->rows](j->n_panels, kind, wide, (const uint8_t *)t->x + b * t->rows * X_BLOCK_BYTES,
			                      j->acc + (t->row - j->tiles[0].row) * 2 * PANEL_ROWS);
	}
}

// Weights of n k of one or two panels, float [n][16], and what to prefetch meanwhile, 64 bytes per k.
struct wide_floats {
	const float *w[2];
	const char *ahead[2];
	int n;
};

// x: packed from a multiple of 16 k on.
INLINE void tile_floats(int T, int P, const struct wide_floats *w, const float *x, float *acc)
{
	const float *w0 = w->w[0], *w1 = w->w[P - 1];
	const char *ahead0 = w->ahead[0], *ahead1 = w->ahead[P - 1];
#define LOAD(t)                                                                                                        \
	__m512 a##t = _mm512_setzero_ps(), b##t = a##t;                                                                \
	if (t < T) {                                                                                                   \
		a##t = _mm512_load_ps(acc + t * 2 * PANEL_ROWS);                                                       \
		b##t = _mm512_load_ps(acc + (t * 2 + P - 1) * PANEL_ROWS);                                             \
	}
	EACH_ROW(LOAD)
	for (int k = 0; k < w->n; k += FLOAT_K, x += (T - 1) * FLOAT_K) {
		int end = w->n - k < FLOAT_K ? w->n - k : FLOAT_K;
		for (int i = 0; i < end; i++, x++, w0 += PANEL_ROWS, w1 += PANEL_ROWS, ahead0 += 64, ahead1 += 64) {
			_mm_prefetch(ahead0, _MM_HINT_T1);
			if (P == 2)
				_mm_prefetch(ahead1, _MM_HINT_T1);
			__m512 wa = _mm512_load_ps(w0), wb = P == 2 ? _mm512_load_ps(w1) : wa;
#define MULTIPLY_FLOATS(t)                                                                                             \
	if (t < T) {                                                                                                   \
		__m512 v = _mm512_set1_ps(x[t * FLOAT_K]);                                                             \
		a##t = _mm512_fmadd_ps(wa, v, a##t);                                                                   \
		if (P == 2)                                                                                            \
			b##t = _mm512_fmadd_ps(wb, v, b##t);                                                           \
	}
			EACH_ROW(MULTIPLY_FLOATS)
		}
	}
#define STORE(t)                                                                                                       \
	if (t < T) {                                                                                                   \
		_mm512_store_ps(acc + t * 2 * PANEL_ROWS, a##t);                                                       \
		if (P == 2)                                                                                            \
			_mm512_store_ps(acc + (t * 2 + 1) * PANEL_ROWS, b##t);                                         \
	}
	EACH_ROW(STORE)
}

#define FLOAT_KERNELS(T)                                                                                               \
	static void floats_##T(int panels, const struct wide_floats *w, const float *x, float *acc)                    \
	{                                                                                                              \
		panels == 1 ? tile_floats(T, 1, w, x, acc) : tile_floats(T, 2, w, x, acc);                             \
	}
EACH_T(FLOAT_KERNELS)
#define FLOAT_KERNEL_NAME(T) floats_##T,
static void (*const float_kernel[])(int, const struct wide_floats *, const float *, float *) = {
	NULL, EACH_T(FLOAT_KERNEL_NAME)};

INLINE __m512 load_float(enum dtype type, const uint8_t *panel, int64_t k)
{
	if (type == DTYPE_F32)
		return _mm512_load_ps(panel + k * PANEL_ROWS * 4);
	panel += k * PANEL_ROWS * 2;
	if (type == DTYPE_F16)
		return halfs(panel);
	__m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)panel));
	return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
}

// Weights of panel p from k on, as float32: where they lie, or widened into the buffer.
static void widen_floats(const struct panel_job *j, int p, int64_t k, struct wide_floats *f)
{
	const struct weight *w = j->w[p];
	const uint8_t *panel = weight_panel(w, j->panel[p]);
	float *out = (float *)j->buffer + p * FLOAT_STEP * PANEL_ROWS;
	if (w->dtype == DTYPE_F32) {
		f->w[p] = (const float *)panel + k * PANEL_ROWS;
		f->ahead[p] = ahead_of(j, p, (size_t)k * PANEL_ROWS * 4);
		return;
	}
	f->w[p] = out;
	f->ahead[p] = (const char *)out;
	const char *ahead = ahead_of(j, p, (size_t)k * PANEL_ROWS * 2);
	panel += k * PANEL_ROWS * 2;
	for (int i = 0; i < f->n; i++, panel += 2 * PANEL_ROWS) {
		if (i % 2 == 0)
			_mm_prefetch(ahead + i * PANEL_ROWS * 2, _MM_HINT_T1);
		_mm512_store_ps(out + i * PANEL_ROWS, load_float(w->dtype == DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16, panel, 0));
	}
}

// One row: nothing is widened ahead of its use.
INLINE void float_row(enum dtype type, const struct panel_job *j)
{
	const uint8_t *a = weight_panel(j->w[0], j->panel[0]), *b = weight_panel(j->w[j->n_panels - 1], j->panel[j->n_panels - 1]);
	const float *x = j->tiles[0].x;
	const int64_t step = 64 / (PANEL_ROWS * (type == DTYPE_F32 ? 4 : 2)), cols = j->w[0]->cols;
	__m512 sum_a = _mm512_setzero_ps(), sum_b = sum_a;
	int64_t k = 0, split = j->w[0]->panel_bytes > AHEAD_BYTES ? cols - AHEAD_BYTES / 64 * step : 0;
	for (int part = 0; part < 2; part++) {
		int64_t end = part ? cols : split / step * step;
		const char *ahead_a = ahead_of(j, 0, (size_t)(k / step) * 64);
		const char *ahead_b = ahead_of(j, j->n_panels - 1, (size_t)(k / step) * 64);
		for (; k < end; k++) {
			if (k % step == 0) {
				_mm_prefetch(ahead_a, _MM_HINT_T1);
				_mm_prefetch(ahead_b, _MM_HINT_T1);
				ahead_a += 64;
				ahead_b += 64;
			}
			__m512 v = _mm512_set1_ps(x[k]);
			sum_a = _mm512_fmadd_ps(load_float(type, a, k), v, sum_a);
			sum_b = _mm512_fmadd_ps(load_float(type, b, k), v, sum_b);
		}
	}
	_mm512_store_ps(j->acc, sum_a);
	_mm512_store_ps(j->acc + PANEL_ROWS, sum_b);
}

static void multiply_floats(const struct panel_job *j)
{
	int64_t cols = j->w[0]->cols;
	if (j->n_tiles == 1 && j->tiles[0].rows == 1) {
		switch (j->w[0]->dtype) {
		case DTYPE_F32: float_row(DTYPE_F32, j); break;
		case DTYPE_F16: float_row(DTYPE_F16, j); break;
		default: float_row(DTYPE_BF16, j); break;
		}
		return;
	}
	memset(j->acc, 0, acc_count(j) * sizeof(float));
	for (int64_t k = 0; k < cols; k += FLOAT_STEP) {
		struct wide_floats f = {.n = (int)(cols - k < FLOAT_STEP ? cols - k : FLOAT_STEP)};
		for (int p = 0; p < j->n_panels; p++)
			widen_floats(j, p, k, &f);
		for (const struct tile *t = j->tiles; t < j->tiles + j->n_tiles; t++) {
			float_kernel[t->rows](j->n_panels, &f, (const float *)t->x + k * t->rows,
			                      j->acc + (t->row - j->tiles[0].row) * 2 * PANEL_ROWS);
			// Once is enough: for the tiles that follow, prefetch what is in L1.
			f.ahead[0] = (const char *)f.w[0];
			f.ahead[1] = (const char *)f.w[1];
		}
	}
}

// Few rows: int8 high[32], low[32] of each block, then float dx, dx * sum and int32 sums of both halves, by block.
struct row { const int8_t *bytes; float *dx, *s; int32_t (*sum)[2]; };

static struct row row_of(const void *x, int64_t n_blocks)
{
	const uint8_t *p = x;
	return (struct row){(const int8_t *)p, (float *)(p + 64 * n_blocks), (float *)(p + 68 * n_blocks),
	                    (int32_t(*)[2])(p + 72 * n_blocks)};
}

static size_t row_bytes(int64_t n_blocks)
{
	return (size_t)n_blocks * 80;
}

static void pack_row(const float *x, int64_t n_blocks, void *out)
{
	struct row r = row_of(out, n_blocks);
	const __m512i half = _mm512_set1_epi32(128);
	for (int64_t b = 0; b < n_blocks; b++) {
		__m512i q[2];
		r.dx[b] = quantise(x + b * BLOCK_K, &q[0], &q[1]);
		r.sum[b][0] = _mm512_reduce_add_epi32(q[0]);
		r.sum[b][1] = _mm512_reduce_add_epi32(q[1]);
		r.s[b] = r.dx[b] * (float)(r.sum[b][0] + r.sum[b][1]);
		__m128i *o = (__m128i *)(r.bytes + 64 * b);
		for (int i = 0; i < 2; i++) {
			_mm_storeu_si128(o + i, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(q[i], half), 8)));
			_mm_storeu_si128(o + 2 + i, _mm512_cvtepi32_epi8(q[i]));
		}
	}
}

// Four k of each lane: unsigned bytes of w times the four signed bytes at x.
#define DPBUSD(acc, w, x)                                                                                              \
	asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t(*)[1])(x)))

INLINE __m512 whole(__m512i high, __m512i low)
{
	return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

// Rows of a tile of few rows, row t in h<t>, l<t> (integer sums of the high and the low bytes) and a<t>: spelled out for
// the reason given above.
#define EACH_FEW(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)

// x: the rows of a tile, `stride` bytes apart. out [T][2][PANEL_ROWS].
INLINE void few_rows(const int T, const struct weight_format f, enum kind kind, const uint8_t *panel, const char *ahead,
                     int64_t n, const uint8_t *x, size_t stride, float *out)
{
	const uint8_t *scales = panel + n * f.block_bytes;
	const int bytes = f.block_bytes + f.scale_bytes / f.scale_blocks, parts = kind == TWO_HALVES ? 2 : 1;
	const struct row r = row_of(x, n);
#define AT(field, t) (*(__typeof__(*r.field) *)((const uint8_t *)&r.field[b] + t * stride))
#define BEGIN_FEW(t) __m512 a##t = _mm512_setzero_ps();
	EACH_FEW(BEGIN_FEW)
	for (int64_t b = 0; b < n; b++) {
		if (ahead) {
			prefetch(ahead, bytes);
			ahead += bytes;
		}
		struct scales s = load_scales(f.scales, scales, b);
		const uint8_t *q = x + 64 * b;
#pragma GCC unroll 2
		for (int part = 0; part < parts; part++) {
			const int first = part * 4, end = kind == TWO_HALVES ? first + 4 : 8;
#define ZERO_FEW(t)                                                                                                    \
	__m512i h##t = _mm512_setzero_si512(), l##t = h##t;                                                            \
	if (t < T && f.offset)                                                                                         \
		l##t = _mm512_set1_epi32(-f.offset *                                                                   \
		                         (kind == TWO_HALVES ? AT(sum, t)[part] : AT(sum, t)[0] + AT(sum, t)[1]));
			EACH_FEW(ZERO_FEW)
#pragma GCC unroll 8
			for (int j = first; j < end; j++) {
				__m512i w = load_quad(f.bits, panel + b * f.block_bytes, j);
#define MULTIPLY_FEW(t)                                                                                                \
	if (t < T) {                                                                                                   \
		DPBUSD(h##t, w, q + t * stride + 4 * j);                                                               \
		DPBUSD(l##t, w, q + t * stride + 32 + 4 * j);                                                          \
	}
				EACH_FEW(MULTIPLY_FEW)
			}
#define ADD_FEW(t)                                                                                                     \
	if (t < T) {                                                                                                   \
		__m512 scale = _mm512_mul_ps(part ? s.d1 : s.d0, _mm512_set1_ps(AT(dx, t)));                           \
		a##t = _mm512_fmadd_ps(whole(h##t, l##t), scale, a##t);                                                \
		if (kind == WITH_MINIMUM)                                                                              \
			a##t = _mm512_fmadd_ps(s.m, _mm512_set1_ps(AT(s, t)), a##t);                                   \
	}
			EACH_FEW(ADD_FEW)
		}
	}
#define END_FEW(t)                                                                                                     \
	if (t < T)                                                                                                     \
		_mm512_store_ps(out + t * 2 * PANEL_ROWS, a##t);
	EACH_FEW(END_FEW)
}

// The panels one after the other: each broadcast serves one multiplication, but all sums of 8 rows stay in registers.
INLINE void few_panels(const struct weight_format f, enum kind kind, const struct panel_job *j)
{
	int64_t n = j->w[0]->n_blocks;
	size_t stride = row_bytes(n);
	for (int p = 0; p < j->n_panels; p++) {
		const uint8_t *panel = weight_panel(j->w[p], j->panel[p]);
		const char *ahead = (const char *)panel + AHEAD_BYTES;
		for (const struct tile *t = j->tiles; t < j->tiles + j->n_tiles; t++, ahead = NULL) {
			float *out = j->acc + (size_t)(t->row - j->tiles[0].row) * 2 * PANEL_ROWS + p * PANEL_ROWS;
			switch (t->rows) {
#define CASE_FEW(T)                                                                                                    \
	case T + 1: few_rows(T + 1, f, kind, panel, ahead, n, t->x, stride, out); break;
				EACH_FEW(CASE_FEW)
			}
		}
	}
}

static void multiply_few(const struct panel_job *j)
{
	switch (j->w[0]->dtype) {
	case DTYPE_Q4_0: few_panels((struct weight_format){4, 8, SCALES_HALF, 256, 1, 32}, PLAIN, j); break;
	case DTYPE_Q4_1: few_panels((struct weight_format){4, 0, SCALES_HALF_MIN, 256, 1, 64}, WITH_MINIMUM, j); break;
	case DTYPE_Q5_0: few_panels((struct weight_format){5, 16, SCALES_HALF, 320, 1, 32}, PLAIN, j); break;
	case DTYPE_Q5_1: few_panels((struct weight_format){5, 0, SCALES_HALF_MIN, 320, 1, 64}, WITH_MINIMUM, j); break;
	case DTYPE_Q8_0: few_panels((struct weight_format){8, 128, SCALES_HALF, 512, 1, 32}, PLAIN, j); break;
	case DTYPE_Q4_K: few_panels((struct weight_format){4, 0, SCALES_K, 256, 8, 320}, WITH_MINIMUM, j); break;
	case DTYPE_Q5_K: few_panels((struct weight_format){5, 0, SCALES_K, 320, 8, 320}, WITH_MINIMUM, j); break;
	default: few_panels((struct weight_format){6, 32, SCALES_6K, 384, 8, 288}, TWO_HALVES, j); break;
	}
}

// See silu() in matmul_portable.c: the same operations in the same order.
INLINE __m512 silu(__m512 x)
{
	__m512 z = _mm512_xor_ps(x, _mm512_set1_ps(-0.0f));
	z = _mm512_max_ps(_mm512_min_ps(z, _mm512_set1_ps(88.0f)), _mm512_set1_ps(-87.0f));
	__m512 n = _mm512_roundscale_ps(_mm512_mul_ps(z, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	__m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), z);
	r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
	__m512 e = _mm512_fmadd_ps(_mm512_set1_ps(1.0f / 5040), r, _mm512_set1_ps(1.0f / 720));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 120));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 24));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f / 6));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(0.5f));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f));
	e = _mm512_fmadd_ps(e, r, _mm512_set1_ps(1.0f));
	__m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
	return _mm512_div_ps(x, _mm512_fmadd_ps(e, _mm512_castsi512_ps(bits), _mm512_set1_ps(1.0f)));
}

static void finish(const struct finish_job *j)
{
	__mmask16 mask = (__mmask16)((1u << j->lanes) - 1);
	__m512 bias = _mm512_setzero_ps(), up_bias = bias;
	if (j->bias)
		bias = _mm512_maskz_loadu_ps(mask, j->bias);
	if (j->up_bias)
		up_bias = _mm512_maskz_loadu_ps(mask, j->up_bias);
	for (int t = 0; t < j->n_rows; t++) {
		__m512 v = _mm512_load_ps(j->acc + t * 2 * PANEL_ROWS);
		float *y = j->y + t * j->y_stride;
		if (j->bias)
			v = _mm512_add_ps(v, bias);
		if (j->up) {
			__m512 up = _mm512_load_ps(j->up + t * 2 * PANEL_ROWS);
			v = _mm512_mul_ps(silu(v), j->up_bias ? _mm512_add_ps(up, up_bias) : up);
		}
		if (j->add)
			v = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), v);
		_mm512_mask_storeu_ps(y, mask, v);
	}
}

const struct matmul_kernels matmul_avx512 = {
	.pack_blocks = pack_blocks,
	.pack_floats = pack_floats,
	.multiply_blocks = multiply_blocks,
	.multiply_floats = multiply_floats,
	.finish = finish,
	.few_rows = FEW_ROWS,
	.few_tile_rows = FEW_TILE_ROWS,
	.row_bytes = row_bytes,
	.pack_row = pack_row,
	.multiply_few = multiply_few,
};
