// The weights of one stage: its layers, and the embedding and the head where it holds them, bound once to named fields
// with every shape checked. The surprising decision: norms and biases are always float32 copies, since they are small
// and every backend reads them so; only matrices go through the backend's own layout.
#ifndef STAGECOACH_WORKER_STAGE_WEIGHTS_H
#define STAGECOACH_WORKER_STAGE_WEIGHTS_H

#include "common/model.h"
#include "kernels/ops.h"

struct layer_weights {
	float *attn_norm;            // [hidden]
	struct weight *wq;           // [n_heads * head_dim, hidden]
	struct weight *wk;           // [n_kv_heads * head_dim, hidden]
	struct weight *wv;           // [n_kv_heads * head_dim, hidden]
	float *bq, *bk, *bv;         // [rows of the matrix] or NULL
	float *q_norm, *k_norm;      // [head_dim] or NULL
	struct weight *wo;           // [hidden, n_heads * head_dim]
	float *bo;                   // [hidden] or NULL
	float *ffn_norm;             // [hidden]
	struct weight *w_gate, *w_up; // [ffn, hidden]
	struct weight *w_down;       // [hidden, ffn]
};

struct stage_weights {
	const struct ops *ops;
	struct ops_context *context;
	struct weight *embedding;    // [vocab_rows, hidden], with has_embedding
	struct weight *head;         // [vocab_rows, hidden], with has_head; equals embedding where one matrix serves both
	float *output_norm;          // [hidden], with has_head
	float *rope_factors;         // [rope_dim / 2] or NULL
	int n_layers;
	struct layer_weights *layers; // [n_layers]
	uint64_t own_bytes;          // memory of its own
	uint64_t borrowed_bytes;     // read in place from the mapped file
	bool borrows;                // the model has to stay open
	void **dummy; int n_dummy;   // made-up matrices that the backend reads in place
};

struct stage_weights_options {
	const struct ops *ops;
	struct ops_context *context;
	const struct model *model;
	uint32_t first_layer, n_layers;
	bool has_embedding, has_head;
	// Called after each tensor; may be NULL.
	void (*progress)(void *user, uint64_t done_bytes, uint64_t total_bytes);
	void *user;
};

// STATUS_REFUSED with tensor, expected and found.
enum status stage_weights_load(struct stage_weights **out, const struct stage_weights_options *, struct error *);
void stage_weights_destroy(struct stage_weights **);

#endif
