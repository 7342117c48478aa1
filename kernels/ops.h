// The table of operations. A backend fills every row (or leaves NULL what it lacks, and is then refused by name at
// start). The portable CPU version of each is the specification; the others are tested against it.
//
// Numbers: on CPUs all activations are float32. For one instruction set, one output element is always the same sum in
// the same order, whatever n_rows, the threads or the neighbours in the batch are: results do not depend on batching,
// chunking, replay or the number of stages, bit for bit. That rule rules out split-K by thread, kernels that change the
// order for small n_rows, and attention that starts its KV blocks anywhere but at multiples from position 0.
//
// "act" below is the context's activation type: float32 on CPUs.
//
// On GPUs every pointer in an argument struct, indices and positions included, is device memory (alloc), work is queued
// on the context's stream, and nothing waits, but for sample(), whose rows are the host's and complete when it returns.
#ifndef STAGECOACH_KERNELS_OPS_H
#define STAGECOACH_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

struct ops;
struct ops_context; // one per worker: thread pool and scratch, or CUDA streams and workspaces. One caller at a time.
struct weight;      // a matrix in the backend's own layout

enum ops_isa { ISA_AUTO, ISA_PORTABLE, ISA_AVX2, ISA_AVX512, ISA_AVX512_BF16 };

struct ops_options {
	int threads;          // CPU: compute threads including the caller; 0 = one per given core
	const int *cores;     // CPU: OS core numbers to pin to, [threads]; NULL = do not pin
	bool may_spin;        // CPU: waiting threads may spin (forbidden where cores < threads of all workers on the host)
	enum ops_isa isa;     // CPU: upper limit; AUTO = best present
	int max_rows;         // the largest batch, in rows; scratch is sized by it
	enum dtype act;       // type of activations: F32 on CPUs; F32, F16 or BF16 on GPUs
	int device;           // GPU: its number; 0 on CPUs
};

struct weight_source {
	enum dtype dtype;
	int64_t rows, cols;   // y[rows] = W[rows, cols] x[cols]
	const void *data;     // borrowed; if the backend keeps pointing into it, weight_borrows() says so
};

struct embed_args {
	const struct weight *table; // [vocab_rows, cols]
	int n_rows;
	const int32_t *ids;         // [n_rows]
	void *out;                  // act [n_rows, cols]
};

struct rms_norm_args {
	int n_rows, cols;
	float eps;
	const void *x;              // act [n_rows, cols]
	const float *weight;        // [cols]
	void *out;                  // act [n_rows, cols]; may equal x
	const int32_t *row_index;   // optional [n_rows]: row r of out is norm(x[row_index[r]])
};

// y_p = x W_p^T (+ bias_p) for up to 3 matrices that share x, so that x is quantised and read once.
struct matmul_args {
	int n_rows;
	const void *x;              // act [n_rows, cols]
	int n_parts;                // 1 to 3
	struct {
		const struct weight *w; // [rows_p, cols]
		const float *bias;      // [rows_p] or NULL
		void *y;                // act [n_rows, rows_p]; float32 on every backend if y_float32
	} part[3];
	bool swiglu;                // n_parts == 2: part[0].y = silu(x W_0^T) * (x W_1^T); part[1].y is not used
	bool add;                   // n_parts == 1: y += x W^T (residual in place)
	bool y_float32;             // logits
};

struct kv_view {                // one layer's pages
	void *k, *v;                // [n_blocks][n_kv_heads][block_size][head_dim] of dtype
	enum dtype dtype;           // F32, F16, BF16 (FP8 on GPUs)
	int block_size, n_kv_heads, head_dim;
};

// Optional RMS norm of each q and k head, then RoPE on both, then K and V of each row into the cache.
struct rope_kv_args {
	int n_rows, n_heads;        // query heads; kv heads and head_dim stand in kv
	void *q;                    // act [n_rows, n_heads, head_dim], in place
	void *k;                    // act [n_rows, n_kv_heads, head_dim], scratch afterwards
	const void *v;              // act [n_rows, n_kv_heads, head_dim]
	const float *q_norm, *k_norm; // [head_dim] or NULL
	float norm_eps;
	bool interleaved;           // pairs (2i, 2i+1), else (i, i + rope_dim/2)
	int rope_dim;
	const float *cos_sin;       // [max_position][rope_dim / 2][2] float32, made once by rope_table()
	const int32_t *position;    // [n_rows]
	const int32_t *slot;        // [n_rows] block_id * block_size + offset
	struct kv_view kv;
};

// Causal attention of a mixed batch: sequence s owns rows first_row[s] .. first_row[s+1]-1, which are its positions
// kv_len[s] - n_s .. kv_len[s] - 1; row at position p sees positions 0..p (or the last `window` of them).
struct attention_args {
	int n_seqs, n_rows, n_heads;
	const int32_t *first_row;   // [n_seqs + 1]; on GPUs no sequence is empty
	const int32_t *kv_len;      // [n_seqs] tokens in the cache including this step's rows
	const int32_t *block_table; // [n_seqs, max_blocks] block ids
	int max_blocks;
	float scale;
	int window;                 // 0 = all
	const void *q;              // act [n_rows, n_heads, head_dim]
	void *out;                  // act [n_rows, n_heads * head_dim]
	struct kv_view kv;
};

enum { SAMPLE_MAX_TOP = 20 };

// One row to sample. Order, as vLLM: log-probabilities are taken from the raw logits; then logit_bias and banned tokens,
// repetition / presence / frequency penalties, temperature, top-k, top-p, min-p.
struct sample_row {
	float temperature;          // 0 = greedy: smallest id among equals
	int32_t top_k;              // <= 0 = all
	float top_p, min_p;         // 1 and 0 = off
	float repetition_penalty, presence_penalty, frequency_penalty; // 1, 0, 0 = off
	const int32_t *history;     // prompt then output tokens; [n_prompt + n_output]; NULL unless a penalty is on
	int32_t n_prompt, n_output;
	const int32_t *bias_id; const float *bias_value; int32_t n_bias; // logit_bias
	const int32_t *banned; int32_t n_banned;                         // e.g. end tokens below min_tokens
	uint64_t seed; uint32_t choice; uint32_t position; // the random number is a pure function of these three
	int32_t n_top;              // top log-probabilities wanted, 0..SAMPLE_MAX_TOP
	bool want_logprob;
	// results
	int32_t id;
	float logprob;              // natural log, of the raw distribution
	int32_t top_id[SAMPLE_MAX_TOP]; float top_logprob[SAMPLE_MAX_TOP]; // descending; equal ones by id
};

struct sample_args {
	int n_rows;
	int vocab_size;             // ids >= vocab_size are padding and never sampled
	int64_t stride;             // elements between rows of logits
	float *logits;              // [n_rows, stride] float32; may be changed
	struct sample_row *rows;    // [n_rows]
};

struct ops_speed { double bandwidth_bytes_per_s; double matmul_flops; }; // measured with the real kernels

struct ops {
	const char *name;           // "cpu", "cuda"
	enum status (*create)(struct ops_context **out, const struct ops_options *, struct error *);
	void (*destroy)(struct ops_context **);
	const char *(*describe)(const struct ops_context *); // e.g. "avx512-vnni, 2 threads"
	enum ops_isa (*isa)(const struct ops_context *);     // the one in use, never AUTO on a CPU
	// Measures in at most budget_ms.
	void (*measure)(struct ops_context *, int budget_ms, struct ops_speed *out);

	void *(*alloc)(struct ops_context *, size_t bytes);  // zeroed, 64-byte aligned; NULL if there is no room
	void (*free)(struct ops_context *, void *);

	bool (*weight_supported)(enum dtype);
	// May repack (as_embedding: only rows are looked up; as_matrix: only multiplied; both for tied heads).
	enum status (*weight_create)(struct ops_context *, struct weight **out, const struct weight_source *,
	                             bool as_embedding, bool as_matrix, struct error *);
	void (*weight_destroy)(struct ops_context *, struct weight **);
	size_t (*weight_bytes)(const struct weight *);   // memory of its own, without what it borrows
	bool (*weight_borrows)(const struct weight *);   // still points into weight_source.data
	size_t (*weight_bytes_predicted)(const struct weight_source *, bool as_embedding, bool as_matrix); // for plan

	void (*embed)(struct ops_context *, const struct embed_args *);
	void (*rms_norm)(struct ops_context *, const struct rms_norm_args *);
	void (*matmul)(struct ops_context *, const struct matmul_args *);
	void (*rope_kv)(struct ops_context *, const struct rope_kv_args *);
	void (*attention)(struct ops_context *, const struct attention_args *);
	void (*sample)(struct ops_context *, const struct sample_args *);
};

const struct ops *ops_cpu(void);
const struct ops *ops_cuda(void); // in stagecoach_kernels_cuda, where the CUDA Toolkit is found

#endif
