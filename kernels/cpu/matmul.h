// What the matrix kernels of each instruction set fill in for matmul.c; private to kernels/cpu.
//
// Numbers. Quantised weights meet activations of 16 bits, quantised per block of 32: x = dx * q, |q| <= 32639, so that
// q = 256 * high + low with both in int8. Integer sums of a block are exact, hence the same on every instruction set and
// in every kernel shape; then, blocks in order, fused multiply-adds in float32 from acc = 0:
//   acc = fma(float(sum w q), scale * dx, acc)     (twice, k 0..15 and 16..31, where the type has half-block scales)
//   acc = fma(minimum, dx * float(sum q), acc)     (where the type has a minimum)
// Bounds: |w| <= 128, so |sum w q| <= 32 * 128 * 32639 < 2^27. Float types: acc = fma(w, x, acc), k in order.
//
// Packed activations: rows are cut into tiles of at most TILE_ROWS. Of a tile of T rows,
//   quantised: per block of 32 k int16 [T][32], float dx[T], float dx * sum q [T]. Of each four k, the order is 0 2 1 3:
//              even and odd bytes of a quad of weights then widen to the pairs that meet them
//   float:     per 16 k float [T][16] (the last may be shorter in use, not in size)
// Nothing is interleaved further: the kernels broadcast single words, which costs the same from any line in L1.
#ifndef STAGECOACH_KERNELS_MATMUL_H
#define STAGECOACH_KERNELS_MATMUL_H

#include "kernels/cpu/weight.h"

enum { TILE_ROWS = 12, X_LIMIT = 32639, X_BLOCK_BYTES = 72, FLOAT_K = 16 };

struct tile {
	int row, rows;    // first row of the batch, count
	const void *x;    // packed
};

// One or two panels of one type and one width, times some tiles.
struct panel_job {
	const struct weight *w[2];
	int64_t panel[2];
	int n_panels;
	const struct tile *tiles;
	int n_tiles;
	float *acc;       // out [row - tiles[0].row][2][PANEL_ROWS]; lanes of one panel are valid if n_panels is 1
	void *buffer;     // [PANEL_BUFFER_BYTES], 64-byte aligned
};

// acc of one panel to y: bias, then silu(gate) * up, then residual.
struct finish_job {
	const float *acc, *up;  // [n_rows][2][PANEL_ROWS] each; up NULL without swiglu
	const float *bias, *up_bias; // of these lanes, or NULL
	float *y;               // first element of the first row
	int64_t y_stride;       // elements
	int n_rows, lanes;
	bool add;
};

enum { PANEL_BUFFER_BYTES = 64 * 1024 };

struct matmul_kernels {
	void (*pack_blocks)(const float *x, int64_t stride, int rows, int64_t n_blocks, void *out);
	void (*pack_floats)(const float *x, int64_t stride, int rows, int64_t cols, void *out);
	void (*multiply_blocks)(const struct panel_job *);
	void (*multiply_floats)(const struct panel_job *);
	void (*finish)(const struct finish_job *);
	// Batches of at most few_rows rows (0: none), in tiles of at most few_tile_rows, each row in a layout of the kernel's
	// own and rows row_bytes apart.
	int few_rows, few_tile_rows;
	size_t (*row_bytes)(int64_t n_blocks);
	void (*pack_row)(const float *x, int64_t n_blocks, void *out);
	void (*multiply_few)(const struct panel_job *);
};

extern const struct matmul_kernels matmul_portable, matmul_avx2, matmul_avx512;

#endif
