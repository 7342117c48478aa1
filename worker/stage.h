// One stage of the pipeline: weights of its layers, KV pages, forward pass, sampler, and its two edges. Runs steps in the
// order given. The surprising decision: edges form a ring (each stage receives from one and sends to one, the last to
// the first), so a stage of any place in the pipeline has the same two ends, and one stage alone has none.
#ifndef STAGECOACH_WORKER_STAGE_H
#define STAGECOACH_WORKER_STAGE_H

#include "common/model.h"
#include "kernels/ops.h"
#include "proto/message.h"
#include "worker/forward.h"
#include "worker/ring.h"
#include "worker/transport.h"

struct stage;

struct stage_options {
	const struct ops *ops;
	struct ops_context *context;            // borrowed; created for max_batch_tokens rows
	const struct message_assign *assign;    // copied
	const struct model *model;              // borrowed; may be closed after create unless stage_borrows_model()
	struct ring *ring;                      // may be NULL
	void (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes); // may be NULL
	// The step after the one in hand, if it is here already (so that its data is received while this one is computed);
	// may be NULL. Borrowed until the caller takes it.
	const struct message *(*peek_next)(void *user);
	void *user;
};

// Loads. STATUS_REFUSED: what does not fit the model or the backend, by name.
enum status stage_create(struct stage **out, const struct stage_options *, struct error *);
void stage_destroy(struct stage **);
bool stage_borrows_model(const struct stage *);
const struct model_config *stage_config(const struct stage *);

uint64_t stage_weight_bytes(const struct stage *);    // with what it reads in place from the file
uint64_t stage_own_weight_bytes(const struct stage *); // without
uint64_t stage_workspace_bytes(const struct stage *); // its own and the batch's arrays; not the backend's scratch
uint64_t stage_block_bytes(const struct stage *);     // of one KV block over its own layers; 0 without layers
// Runs the largest batch once, so that every page of workspace and scratch is in use. Needs no KV cache.
enum status stage_profile(struct stage *, struct error *);

// A new epoch: empty KV of n_blocks, all slots free, no edges. STATUS_REFUSED: no memory.
enum status stage_configure(struct stage *, uint32_t epoch, uint32_t n_groups, const uint32_t *n_blocks, struct error *);
// in: hidden states, or ids on stage 0. Borrowed until the next stage_configure(). Both NULL with one stage.
void stage_set_edges(struct stage *, const struct transport *, struct edge *in, struct edge *out);
// What this stage receives; kinds of the two edges.
enum frame_kind stage_in_kind(const struct stage *);
enum frame_kind stage_out_kind(const struct stage *);
struct message_limits stage_limits(const struct stage *); // what steps may name

// Runs one step. On the last stage *result is filled (borrowed until the next call). STATUS_INVALID: the step's bounds do
// not hold. STATUS_CLOSED: a neighbour is gone. Nothing else.
enum status stage_run(struct stage *, const struct message *step, struct message *result, struct error *);
bool stage_is_last(const struct stage *);

// For tests: logits [vocab_rows] of every row of the last step; needs the last stage. Borrowed until the next call.
const float *stage_logits(struct stage *, int row);

#endif
