// KV pages of this stage's layers, and what each slot (sequence) holds: its length and its block table per KV group.
// The surprising decision: block ids come from the coordinator and are valid on every stage, so nothing is allocated
// or freed here after creation; a table that a message would overflow is an error of the message, told by name.
#ifndef STAGECOACH_WORKER_KV_CACHE_H
#define STAGECOACH_WORKER_KV_CACHE_H

#include "kernels/ops.h"
#include "proto/message.h"

struct kv_cache;

struct kv_cache_options {
	const struct ops *ops;
	struct ops_context *context;
	int n_layers;                       // of this stage
	const uint8_t *layer_group;         // [n_layers] KV group of each; NULL = all in group 0
	uint32_t n_groups;                  // 1 to MAX_KV_GROUPS
	uint32_t n_blocks[MAX_KV_GROUPS];
	enum dtype dtype;                   // F32, F16, BF16
	int block_size, n_kv_heads, head_dim;
	uint32_t max_seqs;                  // slots
	uint32_t max_context;               // tokens of one sequence
};

// Bytes of one block's K and V over `n_layers` layers; 0 on overflow or a type that KV cannot have.
uint64_t kv_cache_block_bytes(enum dtype, int block_size, int n_kv_heads, int head_dim, int n_layers);

// STATUS_REFUSED: a type or size that cannot be, or no memory (with the bytes).
enum status kv_cache_create(struct kv_cache **out, const struct kv_cache_options *, struct error *);
void kv_cache_destroy(struct kv_cache **);
struct kv_view kv_cache_view(const struct kv_cache *, int layer); // layer of this stage, from 0
int kv_cache_layer_group(const struct kv_cache *, int layer);
uint32_t kv_cache_group_count(const struct kv_cache *);
uint64_t kv_cache_bytes(const struct kv_cache *);

// Slots. All return STATUS_INVALID with slot and numbers when the message's bounds do not hold.
enum status kv_cache_begin(struct kv_cache *, uint32_t slot, struct error *);
enum status kv_cache_end(struct kv_cache *, uint32_t slot, struct error *);
enum status kv_cache_append_blocks(struct kv_cache *, uint32_t slot, uint32_t group, const uint32_t *ids, uint32_t n,
                                   struct error *);
// Cuts the sequence to `length` tokens and its tables to the blocks that these need.
enum status kv_cache_truncate(struct kv_cache *, uint32_t slot, uint32_t length, struct error *);
// Adds n_tokens at `start`, which must be the length (a slot's first rows may start anywhere its blocks reach, behind
// shared prefix blocks).
enum status kv_cache_extend(struct kv_cache *, uint32_t slot, uint32_t start, uint32_t n_tokens, struct error *);
bool kv_cache_active(const struct kv_cache *, uint32_t slot);
uint32_t kv_cache_length(const struct kv_cache *, uint32_t slot);
const int32_t *kv_cache_table(const struct kv_cache *, uint32_t slot, uint32_t group, uint32_t *n_blocks);

#endif
