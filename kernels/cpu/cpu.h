// What the CPU operations share: the context, its threads, and the choice of instruction set. Private to kernels/cpu.
#ifndef STAGECOACH_KERNELS_CPU_H
#define STAGECOACH_KERNELS_CPU_H

#include "common/half.h"
#include "kernels/ops.h"

struct cpu_pool;  // threads.c
struct cpu_pages; // pages.c

struct ops_context {
	int threads;
	enum ops_isa isa;      // the one in use, never AUTO
	struct cpu_pool *pool;
	int max_rows;
	char description[96];
	void *scratch;         // shared by one operation at a time; grown between operations only (cpu_scratch)
	size_t scratch_bytes;
	void *thread_scratch[256]; // one per thread, 64-byte aligned
	size_t thread_scratch_bytes[256];
	struct cpu_pages *weight_pages; // what the next weight is cut from, or NULL
};

// Runs fn(arg, thread, threads) once on every thread, the caller being thread 0, and returns when all have finished.
void cpu_parallel(struct ops_context *, void (*fn)(void *arg, int thread, int threads), void *arg);
// Waits until every thread of the running cpu_parallel has come here (for operations of two phases).
void cpu_barrier(struct ops_context *);
// Next piece of dynamically shared work inside cpu_parallel: returns 0, 1, 2, ... across all threads; the counter is
// zero at the start of each cpu_parallel.
int cpu_next_piece(struct ops_context *);
// Scratch of at least `bytes`, 64-byte aligned, contents undefined; call before cpu_parallel.
void *cpu_scratch(struct ops_context *, size_t bytes);
// The same per thread, called by that thread.
void *cpu_thread_scratch(struct ops_context *, int thread, size_t bytes);
enum ops_isa cpu_best_isa(void);

static inline float cpu_half_to_float(uint16_t h)
{
	return half_to_float(h);
}
static inline float cpu_bfloat_to_float(uint16_t h)
{
	uint32_t u = (uint32_t)h << 16;
	float f;
	__builtin_memcpy(&f, &u, 4);
	return f;
}

// weight.c, matmul.c
bool cpu_weight_supported(enum dtype);
enum status cpu_weight_create(struct ops_context *, struct weight **, const struct weight_source *, bool as_embedding,
                              bool as_matrix, struct error *);
void cpu_weight_destroy(struct ops_context *, struct weight **);
size_t cpu_weight_bytes(const struct weight *);
bool cpu_weight_borrows(const struct weight *);
size_t cpu_weight_bytes_predicted(const struct weight_source *, bool as_embedding, bool as_matrix);
void cpu_embed(struct ops_context *, const struct embed_args *);
void cpu_matmul(struct ops_context *, const struct matmul_args *);
void cpu_measure(struct ops_context *, int budget_ms, struct ops_speed *);
// rms_norm.c, rope_kv.c, attention.c, sample.c
void cpu_rms_norm(struct ops_context *, const struct rms_norm_args *);
void cpu_rope_kv(struct ops_context *, const struct rope_kv_args *);
void cpu_attention(struct ops_context *, const struct attention_args *);
void cpu_sample(struct ops_context *, const struct sample_args *);

#endif
