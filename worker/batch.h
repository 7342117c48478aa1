// One step as the arrays that operations take. The surprising decision: building a batch is also what applies the step to
// the slots (ends, new sequences, truncations, new blocks), in one pass, so that a step is either wholly in the cache's
// tables or the worker stops with what was wrong.
#ifndef STAGECOACH_WORKER_BATCH_H
#define STAGECOACH_WORKER_BATCH_H

#include "proto/message.h"
#include "worker/kv_cache.h"
#include "worker/sampler.h"

enum { IDS_RING_STEPS = 512 }; // how many steps back a row may name its token

// Ids that recent steps sampled, by step.
struct ids_ring {
	uint32_t max_ids;             // per step
	struct { uint64_t step; uint32_t n; bool present; } frame[IDS_RING_STEPS];
	int32_t *ids;                 // [IDS_RING_STEPS][max_ids]
};

void ids_ring_create(struct ids_ring *, uint32_t max_ids);
void ids_ring_destroy(struct ids_ring *);
void ids_ring_clear(struct ids_ring *);
// Room for the `n` ids that `step` samples; present is false until ids_ring_arrived().
int32_t *ids_ring_expect(struct ids_ring *, uint64_t step, uint32_t n);
void ids_ring_arrived(struct ids_ring *, uint64_t step);
// STATUS_ABSENT: expected but not here yet. STATUS_INVALID: too old, never expected, or no such row.
enum status ids_ring_get(const struct ids_ring *, uint64_t step, uint32_t row, int32_t *id, struct error *);

struct batch {
	uint64_t step;
	uint32_t micro_batch;
	int n_rows, n_seqs, n_samples;
	int32_t *ids;                 // [n_rows] tokens; -1 where by reference, until batch_resolve()
	int32_t *position;            // [n_rows]
	int32_t *first_row;           // [n_seqs + 1]
	int32_t *kv_len;              // [n_seqs]
	int32_t *seq_slot;            // [n_seqs] the sequence's slot
	int32_t *sample_row;          // [n_samples] row whose logits are wanted
	int32_t *sample_seq;          // [n_samples] index of its sequence
	struct {
		int32_t *slot;            // [n_rows] block_id * block_size + offset
		int32_t *block_table;     // [n_seqs, max_blocks]
		int max_blocks;           // of this batch
		size_t capacity;          // ids that block_table holds
	} group[MAX_KV_GROUPS];
	int n_groups;
};

struct batch_options {
	uint32_t max_rows, max_seqs, max_context, block_size, n_groups;
	int32_t vocab_rows;           // tokens must be below
};

void batch_create(struct batch *, const struct batch_options *);
void batch_destroy(struct batch *);
size_t batch_bytes(const struct batch_options *);
// Applies the step to the cache (and the sampler, on the last stage; else NULL) and fills the arrays.
// STATUS_INVALID: what does not hold, with numbers.
enum status batch_build(struct batch *, const struct batch_options *, const struct message *step, struct kv_cache *,
                        struct sampler *, struct error *);
// Puts the referenced tokens into ids. STATUS_ABSENT with *wanted set: that step's ids have to arrive first.
enum status batch_resolve(struct batch *, const struct batch_options *, const struct message_step *, const struct ids_ring *,
                          uint64_t *wanted, struct error *);
// Rows and sampling sequences of a step, before anything of it is checked; saturate at UINT32_MAX.
void batch_count(const struct message_step *, uint32_t *n_rows, uint32_t *n_samples);

#endif
