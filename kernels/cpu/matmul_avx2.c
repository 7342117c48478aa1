// Matrix kernels for AVX2: as in matmul_avx512.c, but a vector holds half a panel, and vpmaddwd and vpaddd stand for
// vpdpwssd. Twelve accumulators of one half panel, a weight and an activation fill the 16 registers.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/matmul.h"

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT_STEP = 64, HALF_ROWS = PANEL_ROWS / 2 };

INLINE __m256i quantise_8(__m256 x, float inverse)
{
	return _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse)));
}

INLINE __m256 absolute(const float *x)
{
	return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x));
}

INLINE float largest_of(__m256 v)
{
	__m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
	a = _mm_max_ps(a, _mm_movehl_ps(a, a));
	return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

INLINE int sum_of(__m256i v)
{
	__m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
	a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
	return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

static void pack_blocks(const float *x, int64_t stride, int rows, int64_t n_blocks, void *out)
{
	uint8_t *record = out;
	for (int64_t b = 0; b < n_blocks; b++, record += rows * X_BLOCK_BYTES) {
		float *dx = (float *)(record + 64 * rows);
		for (int t = 0; t < rows; t++) {
			const float *v = x + t * stride + b * BLOCK_K;
			float largest = largest_of(_mm256_max_ps(_mm256_max_ps(absolute(v), absolute(v + 8)),
			                                         _mm256_max_ps(absolute(v + 16), absolute(v + 24))));
			float inverse = largest > 1e-30f ? X_LIMIT / largest : 0;
			__m256i sum = _mm256_setzero_si256();
			for (int i = 0; i < 2; i++) {
				__m256i q0 = quantise_8(_mm256_loadu_ps(v + 16 * i), inverse);
				__m256i q1 = quantise_8(_mm256_loadu_ps(v + 16 * i + 8), inverse);
				sum = _mm256_add_epi32(sum, _mm256_add_epi32(q0, q1));
				__m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(q0, q1), 0xd8);
				w = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(w, 0xd8), 0xd8);
				_mm256_storeu_si256((__m256i *)(record + 64 * t + 32 * i), w);
			}
			dx[t] = largest > 1e-30f ? largest * (1.0f / X_LIMIT) : 0;
			dx[rows + t] = dx[t] * (float)sum_of(sum);
		}
	}
}

static void pack_floats(const float *x, int64_t stride, int rows, int64_t cols, void *out)
{
	float *o = out;
	for (int64_t k = 0; k < cols; k += FLOAT_K) {
		int n = (int)(cols - k < FLOAT_K ? cols - k : FLOAT_K);
		for (int t = 0; t < rows; t++, o += FLOAT_K) {
			memset(o, 0, FLOAT_K * sizeof *o);
			memcpy(o, x + t * stride + k, (size_t)n * sizeof *o);
		}
	}
}

// Scales of a block of half a panel.
struct scales { __m256 d0, d1, m; };

INLINE __m256 halfs(const uint8_t *p)
{
	return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

INLINE __m256 bytes(const uint8_t *p, bool is_signed)
{
	__m128i v = _mm_loadl_epi64((const __m128i *)p);
	return _mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v));
}

static struct scales load_scales(const struct weight *w, const uint8_t *scales, int64_t b, int half)
{
	const struct weight_format *f = w->format;
	const uint8_t *p = scales + b / f->scale_blocks * f->scale_bytes, *q = p + 8 * half;
	struct scales s = {halfs(p + 16 * half), _mm256_setzero_ps(), _mm256_setzero_ps()};
	if (f->scales == SCALES_HALF_MIN) {
		s.m = halfs(p + 32 + 16 * half);
	} else if (f->scales == SCALES_K) {
		q += b % 8 * 16;
		s.d0 = _mm256_mul_ps(s.d0, bytes(q + 64, false));
		s.m = _mm256_mul_ps(halfs(p + 32 + 16 * half), bytes(q + 192, false));
		s.m = _mm256_xor_ps(s.m, _mm256_set1_ps(-0.0f));
	} else if (f->scales == SCALES_6K) {
		q += b % 8 * 32;
		s.d1 = _mm256_mul_ps(s.d0, bytes(q + 48, true));
		s.d0 = _mm256_mul_ps(s.d0, bytes(q + 32, true));
	}
	return s;
}

// Quad j of half a panel: uint8 [8 rows][4]. `block` points to the half.
INLINE __m256i load_quad(int bits, const uint8_t *block, int j)
{
	if (bits == 8)
		return _mm256_load_si256((const __m256i *)(block + 64 * j));
	__m256i v = _mm256_load_si256((const __m256i *)(block + 64 * (j % 4)));
	const __m256i low = _mm256_set1_epi8(15);
	v = j < 4 ? _mm256_and_si256(v, low) : _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
	if (bits == 4)
		return v;
	__m256i h = _mm256_load_si256((const __m256i *)(block + 256 + (bits == 6 ? 64 * (j / 4) : 0)));
	int shift = bits == 5 ? 4 - j : 4 - 2 * (j % 4);
	h = shift >= 0 ? _mm256_slli_epi16(h, shift) : _mm256_srli_epi16(h, -shift);
	return _mm256_or_si256(v, _mm256_and_si256(h, _mm256_set1_epi8(bits == 5 ? 0x10 : 0x30)));
}

INLINE __m256i widen_even(__m256i v, int offset)
{
	return _mm256_sub_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_set1_epi16((short)offset));
}

INLINE __m256i widen_odd(__m256i v, int offset)
{
	return _mm256_sub_epi16(_mm256_srli_epi16(v, 8), _mm256_set1_epi16((short)offset));
}

// A block of half a panel, widened, in L1.
struct wide_block {
	__m256i w[16];
	struct scales scales;
};

INLINE void widen(int bits, int offset, const uint8_t *block, __m256i *w)
{
#pragma GCC unroll 8
	for (int j = 0; j < 8; j++) {
		__m256i v = load_quad(bits, block, j);
		w[2 * j] = widen_even(v, offset);
		w[2 * j + 1] = widen_odd(v, offset);
	}
}

static void widen_block(const struct weight *w, const uint8_t *panel, int64_t b, int half, struct wide_block *out)
{
	const uint8_t *block = panel + (size_t)b * (size_t)w->format->block_bytes + 32 * half;
	switch (w->format->bits) {
	case 4: widen(4, w->format->offset, block, out->w); break;
	case 5: widen(5, w->format->offset, block, out->w); break;
	case 6: widen(6, w->format->offset, block, out->w); break;
	default: widen(8, w->format->offset, block, out->w); break;
	}
	out->scales = load_scales(w, panel_scales(w, panel), b, half);
}

enum kind { PLAIN, WITH_MINIMUM, TWO_HALVES };

static enum kind kind_of(const struct weight *w)
{
	switch (w->format->scales) {
	case SCALES_HALF: return PLAIN;
	case SCALES_6K: return TWO_HALVES;
	default: return WITH_MINIMUM;
	}
}

INLINE __m256i spread(const void *p)
{
	int v;
	memcpy(&v, p, 4);
	return _mm256_set1_epi32(v);
}

#define EACH_ROW(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11)
#define EACH_T(M) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(10) M(11) M(12)

INLINE void tile_sums(int T, int first, int end, __m256 scale, bool minimum, const struct wide_block *w,
                      const uint8_t *x, float *acc)
{
	const float *dx = (const float *)(x + 64 * T);
#define DECLARE(t) __m256i a##t = _mm256_setzero_si256();
	EACH_ROW(DECLARE)
	for (int i = first; i < end; i++) {
		__m256i v = w->w[i];
#define MULTIPLY(t)                                                                                                    \
	if (t < T)                                                                                                     \
		a##t = _mm256_add_epi32(a##t, _mm256_madd_epi16(v, spread(x + 64 * t + 4 * i)));
		EACH_ROW(MULTIPLY)
	}
#define ADD(t)                                                                                                         \
	if (t < T) {                                                                                                   \
		float *o = acc + t * 2 * PANEL_ROWS;                                                                   \
		__m256 s = _mm256_mul_ps(scale, _mm256_set1_ps(dx[t]));                                                \
		s = _mm256_fmadd_ps(_mm256_cvtepi32_ps(a##t), s, _mm256_load_ps(o));                                   \
		if (minimum)                                                                                           \
			s = _mm256_fmadd_ps(w->scales.m, _mm256_set1_ps(dx[T + t]), s);                                \
		_mm256_store_ps(o, s);                                                                                 \
	}
	EACH_ROW(ADD)
}

#define BLOCK_KERNELS(T)                                                                                               \
	static void block_##T(enum kind kind, const struct wide_block *w, const uint8_t *x, float *acc)                \
	{                                                                                                              \
		if (kind == PLAIN) {                                                                                   \
			tile_sums(T, 0, 16, w->scales.d0, false, w, x, acc);                                           \
		} else if (kind == WITH_MINIMUM) {                                                                     \
			tile_sums(T, 0, 16, w->scales.d0, true, w, x, acc);                                            \
		} else {                                                                                               \
			tile_sums(T, 0, 8, w->scales.d0, false, w, x, acc);                                            \
			tile_sums(T, 8, 16, w->scales.d1, false, w, x, acc);                                           \
		}                                                                                                      \
	}
EACH_T(BLOCK_KERNELS)
#define BLOCK_KERNEL_NAME(T) block_##T,
static void (*const block_kernel[])(enum kind, const struct wide_block *, const uint8_t *, float *) = {
	NULL, EACH_T(BLOCK_KERNEL_NAME)};

static float *first_acc(const struct panel_job *j, const struct tile *t)
{
	return j->acc + (t->row - j->tiles[0].row) * 2 * PANEL_ROWS;
}

static void clear(const struct panel_job *j)
{
	const struct tile *last = &j->tiles[j->n_tiles - 1];
	memset(j->acc, 0, (size_t)(last->row + last->rows - j->tiles[0].row) * 2 * PANEL_ROWS * sizeof(float));
}

static void multiply_blocks(const struct panel_job *j)
{
	struct wide_block wide;
	enum kind kind = kind_of(j->w[0]);
	clear(j);
	for (int i = 0; i < 2 * j->n_panels; i++) {
		const struct weight *w = j->w[i / 2];
		const uint8_t *panel = weight_panel(w, j->panel[i / 2]);
		for (int64_t b = 0; b < w->n_blocks; b++) {
			widen_block(w, panel, b, i % 2, &wide);
			for (const struct tile *t = j->tiles; t < j->tiles + j->n_tiles; t++)
				block_kernel[t->rows](kind, &wide, (const uint8_t *)t->x + b * t->rows * X_BLOCK_BYTES,
				                      first_acc(j, t) + i * HALF_ROWS);
		}
	}
}

// w: float [n][16], of which the first 8 are used.
INLINE void tile_floats(int T, const float *w, int n, const float *x, float *acc)
{
#define LOAD(t) __m256 a##t = t < T ? _mm256_load_ps(acc + (t < T ? t : 0) * 2 * PANEL_ROWS) : _mm256_setzero_ps();
	EACH_ROW(LOAD)
	for (int k = 0; k < n; k += FLOAT_K, x += (T - 1) * FLOAT_K) {
		int end = n - k < FLOAT_K ? n - k : FLOAT_K;
		for (int i = 0; i < end; i++, x++, w += PANEL_ROWS) {
			__m256 v = _mm256_load_ps(w);
#define MULTIPLY_FLOATS(t)                                                                                             \
	if (t < T)                                                                                                     \
		a##t = _mm256_fmadd_ps(v, _mm256_set1_ps(x[t * FLOAT_K]), a##t);
			EACH_ROW(MULTIPLY_FLOATS)
		}
	}
#define STORE(t)                                                                                                       \
	if (t < T)                                                                                                     \
		_mm256_store_ps(acc + t * 2 * PANEL_ROWS, a##t);
	EACH_ROW(STORE)
}

#define FLOAT_KERNELS(T)                                                                                               \
	static void floats_##T(const float *w, int n, const float *x, float *acc)                                      \
	{                                                                                                              \
		tile_floats(T, w, n, x, acc);                                                                          \
	}
EACH_T(FLOAT_KERNELS)
#define FLOAT_KERNEL_NAME(T) floats_##T,
static void (*const float_kernel[])(const float *, int, const float *, float *) = {NULL, EACH_T(FLOAT_KERNEL_NAME)};

// Weights of n k from k on, as float32: where they lie, or widened into the buffer.
static const float *float_weights(const struct panel_job *j, int p, int64_t k, int n)
{
	const struct weight *w = j->w[p];
	const uint8_t *panel = weight_panel(w, j->panel[p]);
	float *out = j->buffer;
	if (w->dtype == DTYPE_F32)
		return (const float *)panel + k * PANEL_ROWS;
	panel += k * PANEL_ROWS * 2;
	for (int i = 0; i < 2 * n; i++, panel += 16)
		if (w->dtype == DTYPE_F16)
			_mm256_store_ps(out + i * 8, halfs(panel));
		else
			_mm256_store_si256((__m256i *)(out + i * 8),
			                   _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)panel)), 16));
	return out;
}

static void multiply_floats(const struct panel_job *j)
{
	clear(j);
	for (int p = 0; p < j->n_panels; p++)
		for (int64_t k = 0; k < j->w[p]->cols; k += FLOAT_STEP) {
			int n = (int)(j->w[p]->cols - k < FLOAT_STEP ? j->w[p]->cols - k : FLOAT_STEP);
			const float *w = float_weights(j, p, k, n);
			for (const struct tile *t = j->tiles; t < j->tiles + j->n_tiles; t++)
				for (int half = 0; half < 2; half++)
					float_kernel[t->rows](w + half * HALF_ROWS, n, (const float *)t->x + k * t->rows,
					                      first_acc(j, t) + p * PANEL_ROWS + half * HALF_ROWS);
		}
}

static size_t row_bytes(int64_t n_blocks)
{
	return (size_t)n_blocks * X_BLOCK_BYTES;
}

static void pack_row(const float *x, int64_t n_blocks, void *out)
{
	pack_blocks(x, 0, 1, n_blocks, out);
}

INLINE __m256 row_block(int bits, const struct weight *w, const uint8_t *block, const uint8_t *x, const struct scales *s,
                        enum kind kind, __m256 acc)
{
	const float *dx = (const float *)(x + 64);
	__m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 8
	for (int j = 0; j < 8; j++) {
		__m256i v = load_quad(bits, block, j);
		__m256i even = _mm256_madd_epi16(widen_even(v, w->format->offset), spread(x + 8 * j));
		__m256i odd = _mm256_madd_epi16(widen_odd(v, w->format->offset), spread(x + 8 * j + 4));
		sum[j / 4] = _mm256_add_epi32(sum[j / 4], _mm256_add_epi32(even, odd));
	}
	__m256 d = _mm256_set1_ps(dx[0]);
	if (kind == TWO_HALVES) {
		acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[0]), _mm256_mul_ps(s->d0, d), acc);
		return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[1]), _mm256_mul_ps(s->d1, d), acc);
	}
	acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sum[0], sum[1])), _mm256_mul_ps(s->d0, d), acc);
	return kind == WITH_MINIMUM ? _mm256_fmadd_ps(s->m, _mm256_set1_ps(dx[1]), acc) : acc;
}

INLINE void row_panel(int bits, const struct weight *w, const uint8_t *panel, const uint8_t *x, float *acc)
{
	enum kind kind = kind_of(w);
	__m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
	for (int64_t b = 0; b < w->n_blocks; b++)
#pragma GCC unroll 2
		for (int half = 0; half < 2; half++) {
			struct scales s = load_scales(w, panel_scales(w, panel), b, half);
			sum[half] = row_block(bits, w, panel + b * w->format->block_bytes + 32 * half, x + b * X_BLOCK_BYTES, &s,
			                      kind, sum[half]);
		}
	_mm256_store_ps(acc, sum[0]);
	_mm256_store_ps(acc + HALF_ROWS, sum[1]);
}

static void multiply_row(const struct panel_job *j)
{
	for (int p = 0; p < j->n_panels; p++) {
		const struct weight *w = j->w[p];
		const uint8_t *panel = weight_panel(w, j->panel[p]), *x = j->tiles[0].x;
		float *acc = j->acc + p * PANEL_ROWS;
		switch (w->format->bits) {
		case 4: row_panel(4, w, panel, x, acc); break;
		case 5: row_panel(5, w, panel, x, acc); break;
		case 6: row_panel(6, w, panel, x, acc); break;
		default: row_panel(8, w, panel, x, acc); break;
		}
	}
}

// See silu() in matmul_portable.c: the same operations in the same order.
INLINE __m256 silu(__m256 x)
{
	__m256 z = _mm256_xor_ps(x, _mm256_set1_ps(-0.0f));
	z = _mm256_max_ps(_mm256_min_ps(z, _mm256_set1_ps(88.0f)), _mm256_set1_ps(-87.0f));
	__m256 n = _mm256_round_ps(_mm256_mul_ps(z, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
	__m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), z);
	r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
	__m256 e = _mm256_fmadd_ps(_mm256_set1_ps(1.0f / 5040), r, _mm256_set1_ps(1.0f / 720));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 120));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 24));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 6));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(0.5f));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
	e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
	__m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
	return _mm256_div_ps(x, _mm256_fmadd_ps(e, _mm256_castsi256_ps(bits), _mm256_set1_ps(1.0f)));
}

static void finish(const struct finish_job *j)
{
	for (int half = 0; half < 2; half++) {
		int i = half * HALF_ROWS;
		const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
		__m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(j->lanes - i), index);
		for (int t = 0; t < j->n_rows && j->lanes > i; t++) {
			__m256 v = _mm256_load_ps(j->acc + t * 2 * PANEL_ROWS + i);
			float *y = j->y + t * j->y_stride + i;
			if (j->bias)
				v = _mm256_add_ps(v, _mm256_maskload_ps(j->bias + i, mask));
			if (j->up) {
				__m256 up = _mm256_load_ps(j->up + t * 2 * PANEL_ROWS + i);
				if (j->up_bias)
					up = _mm256_add_ps(up, _mm256_maskload_ps(j->up_bias + i, mask));
				v = _mm256_mul_ps(silu(v), up);
			}
			if (j->add)
				v = _mm256_add_ps(_mm256_maskload_ps(y, mask), v);
			_mm256_maskstore_ps(y, mask, v);
		}
	}
}

const struct matmul_kernels matmul_avx2 = {
	.pack_blocks = pack_blocks,
	.pack_floats = pack_floats,
	.multiply_blocks = multiply_blocks,
	.multiply_floats = multiply_floats,
	.finish = finish,
	.few_rows = 1,
	.few_tile_rows = 1,
	.row_bytes = row_bytes,
	.pack_row = pack_row,
	.multiply_few = multiply_row,
};
