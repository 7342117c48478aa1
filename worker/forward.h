// The forward pass of one stage over a mixed batch of prefill and decode rows, and its workspace. Llama, Qwen2 and Qwen3
// differ only by which weights are present. The surprising decision: hidden states live in two buffers that take turns,
// so that the next step's can be received into one while this step is computed in the other.
#ifndef STAGECOACH_WORKER_FORWARD_H
#define STAGECOACH_WORKER_FORWARD_H

#include "worker/batch.h"
#include "worker/stage_weights.h"

enum { FORWARD_LOGIT_ROWS = 64 }; // rows whose logits are held at once

struct forward;

struct forward_options {
	const struct ops *ops;
	struct ops_context *context;
	const struct model_config *config;    // copied
	const struct stage_weights *weights;  // borrowed
	bool has_head;
	uint32_t max_rows, max_seqs, max_context;
};

// STATUS_REFUSED: no memory for the workspace (with the bytes).
enum status forward_create(struct forward **out, const struct forward_options *, struct error *);
void forward_destroy(struct forward **);
uint64_t forward_workspace_bytes(const struct forward *);
float *forward_hidden(struct forward *, int which); // [max_rows, hidden], which = 0 or 1

void forward_embed(struct forward *, const struct batch *, float *x); // x [n_rows, hidden]
// Runs the first n_layers of this stage's layers on x in place. between (may be NULL) is called before each layer.
void forward_layers(struct forward *, const struct batch *, const struct kv_cache *, int n_layers, float *x,
                    void (*between)(void *user), void *user);
// Final norm, head and sampling of `n_samples` rows of x, named by batch->sample_row. rows [n_samples] come filled by
// sampler_fill() and hold the results afterwards.
void forward_sample(struct forward *, const struct batch *, const float *x, struct sample_row *rows);
// Logits [vocab_rows] of one row of x, for tests; borrowed until the next call.
const float *forward_logits(struct forward *, const float *x, int row);

#endif
