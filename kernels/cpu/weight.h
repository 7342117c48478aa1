// How a matrix lies in memory once loaded; private to kernels/cpu. Rows are grouped into panels of 16, so that a vector
// lane is an output row and no horizontal sum is needed. The surprising decision: the layout is the same for all
// instruction sets, and 4-bit weights keep the bytes of the file (a word of 8 weights of one row becomes a lane).
//
// Float types: panel[k][row], in the file's element type.
// Quantised types: all blocks of 32 k, then all scales.
//   A "quad" j (0..7) of a block is k = 4j..4j+3; a vector of quads is uint8 [row][4].
//   4 bits: vectors 0..3, byte = quad j | quad j+4 << 4
//   5 bits: the same, then one vector whose byte has the fifth bit of quad j at bit j
//   6 bits: the same, then two vectors whose bytes have the bits 4..5 of quad j (j+4 in the second) at bits 2j..2j+1
//   8 bits: vectors 0..7, byte = quad j
#ifndef STAGECOACH_KERNELS_WEIGHT_H
#define STAGECOACH_KERNELS_WEIGHT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/cpu.h"

enum { PANEL_ROWS = 16, BLOCK_K = 32 };

enum weight_scales {
	SCALES_NONE,     // float types
	SCALES_HALF,     // per block: float16 d[row]
	SCALES_HALF_MIN, // per block: float16 d[row], m[row]
	SCALES_K,        // per 8 blocks: float16 d[row], dmin[row]; uint8 scale[block][row], minimum[block][row]
	SCALES_6K,       // per 8 blocks: float16 d[row]; int8 scale[half block][row]
};

struct weight_format {
	int bits;               // of a stored weight; 16 or 32 for float types
	int offset;             // weight = scale * (stored - offset) + minimum
	enum weight_scales scales;
	int block_bytes;        // of 32 k x 16 rows, without scales
	int scale_blocks;       // blocks that share a scale record
	int scale_bytes;        // of a scale record
};

struct weight {
	enum dtype dtype;
	const struct weight_format *format;
	int64_t rows, cols;
	int64_t n_panels, n_blocks; // n_blocks: of 32 along k; 0 for float types
	size_t panel_bytes;     // from one panel to the next
	uint8_t *panels;        // a piece of `pages`, 64-byte aligned; NULL if only rows are looked up
	struct cpu_pages *pages;
	const uint8_t *file;    // borrowed; NULL once repacked
};

// One block of a panel as integers, the way the portable kernels see it.
struct panel_block {
	int16_t w[PANEL_ROWS][BLOCK_K]; // offset taken off
	float scale[2][PANEL_ROWS];     // of k 0..15 and 16..31
	float minimum[PANEL_ROWS];
};

const struct weight_format *weight_format(enum dtype); // NULL if the type cannot be a weight
void panel_block_read(const struct weight *, int64_t panel, int64_t block, struct panel_block *out);
// Row of the matrix to float32 [cols], from whichever form is kept.
void weight_row(const struct weight *, int64_t row, float *out);

static inline const uint8_t *weight_panel(const struct weight *w, int64_t panel)
{
	return w->panels + (size_t)panel * w->panel_bytes;
}
static inline const uint8_t *panel_scales(const struct weight *w, const uint8_t *panel)
{
	return panel + (size_t)w->n_blocks * (size_t)w->format->block_bytes;
}

#endif
