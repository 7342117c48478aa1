// What the CUDA operations share: the context, its stream and scratch, matrices, and the launchers that the table names.
// Private to kernels/cuda. Host code is C; only kernels and their launchers are CUDA C++.
#ifndef STAGECOACH_KERNELS_CUDA_H
#define STAGECOACH_KERNELS_CUDA_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "common/log.h"
#include "kernels/ops.h"

enum {
	CUDA_MATVEC_ROWS = 8,          // up to so many rows a matrix is read by our own kernels
	CUDA_QUANT_ROWS = 64,          // and quantised ones so many, 8 at a time; making one plain costs as much as 12 times 8
	CUDA_TILE_ROWS = 16,           // a tile of a quantised matrix: rows
	CUDA_TILE_COLS = 64,           // and columns
	CUDA_LT_WORKSPACE = 32 << 20,  // bytes, NVIDIA's advice for Hopper
	CUDA_DEQUANT_ELEMENTS = 32 << 20, // of a matrix that are made plain at a time, for large batches
	CUDA_PLANS = 64,
};

// One product that cuBLASLt has been asked about.
struct cuda_plan {
	int64_t rows, cols, n, stride;
	int in, out;                   // cudaDataType_t
	bool add;
	cublasLtMatmulDesc_t operation;
	cublasLtMatrixLayout_t w, x, y;
	cublasLtMatmulAlgo_t algorithm;
};

struct ops_context {
	int device, multiprocessors;
	enum dtype act;
	cudaStream_t stream;
	int max_rows;
	char description[160];
	void *scratch[4];              // grown between operations only (cuda_scratch)
	size_t scratch_bytes[4];
	void *pinned;                  // staging of the sampler's rows
	size_t pinned_bytes;
	int32_t *counts;               // the sampler's counts of history tokens, always left zero
	size_t counts_bytes;
	cublasLtHandle_t lt;
	void *lt_workspace;
	struct cuda_plan plans[CUDA_PLANS];
	int n_plans;
};

enum cuda_scratch_use { SCRATCH_ATTENTION, SCRATCH_MATMUL, SCRATCH_DEQUANT, SCRATCH_SAMPLE };

// Quantised matrices lie in tiles of 16 rows by 64 columns, rows and columns padded with zero scales; see quant.cuh.
struct cuda_planes {
	const uint4 *low;              // [row_tiles][k_tiles][1 or 2][32 lanes]: nibbles, or bytes of Q8_0
	const uint32_t *high;          // [row_tiles][k_tiles][32 lanes][1 or 2]: fifth and sixth bits, or NULL
	const uint8_t *scale;          // [row_tiles][k_tiles][8]...: per 32 or 16 columns
	const uint8_t *super;          // [row_tiles][super blocks][8]...: per 256 columns, or NULL
};

struct weight {
	enum dtype dtype;
	int64_t rows, cols;
	int64_t row_tiles, k_tiles;    // 0 for plain types
	void *memory;                  // plain: [rows, cols]; else what the planes point into
	size_t bytes;
	struct cuda_planes planes;
};

// Any failure of the device is fatal to this worker, and to no other.
#define CUDA_MUST(call)                                                                                                \
	do {                                                                                                           \
		cudaError_t cuda_error_ = (call);                                                                      \
		if (cuda_error_ != cudaSuccess)                                                                        \
			cuda_failed(#call, __FILE__, __LINE__, cudaGetErrorString(cuda_error_));                       \
	} while (0)
void cuda_failed(const char *call, const char *file, int line, const char *text) __attribute__((noreturn, cold));

// Device memory of at least `bytes`, contents undefined. Growing waits for the device; after the first step at the
// largest batch it never happens again.
void *cuda_scratch(struct ops_context *, enum cuda_scratch_use, size_t bytes);
void *cuda_pinned(struct ops_context *, size_t bytes);
int32_t *cuda_counts(struct ops_context *, size_t elements);

static inline size_t cuda_dtype_bytes(enum dtype t)
{
	return t == DTYPE_F32 ? 4 : t == DTYPE_FP8 ? 1 : 2;
}

// weight.c
bool cuda_weight_supported(enum dtype);
enum status cuda_weight_create(struct ops_context *, struct weight **, const struct weight_source *, bool as_embedding,
                               bool as_matrix, struct error *);
void cuda_weight_destroy(struct ops_context *, struct weight **);
size_t cuda_weight_bytes(const struct weight *);
bool cuda_weight_borrows(const struct weight *);
size_t cuda_weight_bytes_predicted(const struct weight_source *, bool as_embedding, bool as_matrix);

// quant.cu. Packs `row_tiles` tiles of rows from the file's layout at `raw` (device) into the planes, from row tile
// `first`; rows at and beyond n_rows (counted from the first of raw) are zero.
void cuda_quant_pack(struct ops_context *, struct weight *, const void *raw, int64_t first, int64_t row_tiles,
                     int64_t n_rows);
// Rows first .. first+n-1 of any matrix as act [n, cols].
void cuda_weight_expand(struct ops_context *, const struct weight *, int64_t first, int64_t n, void *out);

// matvec.cu, matvec_quant_*.cu: what one launch computes. Parts share x and the type of their matrices.
struct cuda_matvec_part {
	const void *plain;
	struct cuda_planes planes;
	const float *bias;
	void *y;
	int64_t rows;
};
struct cuda_matvec {
	int n_rows, n_parts;
	int64_t cols, k_tiles;
	const void *x;
	struct cuda_matvec_part part[3];
	bool swiglu, add, y_float32;
};
// False if there is no kernel for the type with this type of activations (or for these columns).
bool cuda_matvec_plain(struct ops_context *, enum dtype weights, const struct cuda_matvec *);
bool cuda_matvec_quant_f16(struct ops_context *, enum dtype weights, const struct cuda_matvec *);
bool cuda_matvec_quant_bf16(struct ops_context *, enum dtype weights, const struct cuda_matvec *);

// elementwise.cu: y = silu(gate) * up, all of the activations' type; y = bias or y += bias in every row of [n_rows, cols].
void cuda_silu_mul(struct ops_context *, void *y, const void *gate, const void *up, int64_t elements);
void cuda_fill_bias(struct ops_context *, void *y, bool y_float32, const float *bias, int n_rows, int64_t cols);
void cuda_fill_random(struct ops_context *, void *p, int64_t elements, uint64_t seed); // about normal, deviation 1
void cuda_add_bias(struct ops_context *, void *y, bool y_float32, const float *bias, int n_rows, int64_t cols);

// attention.cu (any types), attention_*.cu (tensor cores; false if there is no kernel for these)
void cuda_attention_any(struct ops_context *, const struct attention_args *);
bool cuda_attention_f16(struct ops_context *, const struct attention_args *);
bool cuda_attention_bf16(struct ops_context *, const struct attention_args *);

void cuda_embed(struct ops_context *, const struct embed_args *);
void cuda_rms_norm(struct ops_context *, const struct rms_norm_args *);
void cuda_matmul(struct ops_context *, const struct matmul_args *);
void cuda_rope_kv(struct ops_context *, const struct rope_kv_args *);
void cuda_attention(struct ops_context *, const struct attention_args *);
void cuda_sample(struct ops_context *, const struct sample_args *);
void cuda_measure(struct ops_context *, int budget_ms, struct ops_speed *);

#ifdef __cplusplus
}
#endif
#endif
