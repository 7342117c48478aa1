// Which layers go to which stage. Pure: memory and speed of each worker are arguments. See the .c for the cost model.
// The surprising decision: the split maximises predicted tokens per second for a stated load, and memory enters only
// through the number of sequences that then fit, so memory and speed are weighed by one measure.
#ifndef STAGECOACH_COORDINATOR_PLANNER_H
#define STAGECOACH_COORDINATOR_PLANNER_H

#include "common/model.h"
#include "common/status.h"
#include "proto/message.h"

struct plan_device {
	char label[96];              // "stage 0 (cpu/1 on host)"
	uint64_t memory_limit_bytes; // what --memory leaves this worker
	double bandwidth_bytes_per_s, matmul_flops;
	uint32_t share_group; // devices with equal non-zero number share one physical device (and its memory limit is
	                      // its share already)
	double hop_us;        // cost of a hop to the next stage
};

struct plan_model { // everything the planner needs, from struct model and ops
	uint32_t n_layers, vocab_rows, hidden;
	uint64_t layer_weight_bytes[MODEL_MAX_LAYERS]; // in memory, as the backend lays them out
	uint64_t embedding_bytes, head_bytes;          // head counted only once when tied and both lie on one stage
	bool tied_head;
	double layer_flops_per_token; // matrix products; attention comes from context
	double head_flops_per_token;
	uint64_t kv_bytes_per_token_layer; // K and V of one layer
	uint32_t n_groups;                 // KV groups; 1 today
	uint32_t layer_group[MODEL_MAX_LAYERS];
	uint64_t workspace_bytes_per_row, workspace_bytes_fixed;
};

struct plan_options {
	uint32_t n_stages;
	uint32_t plan_sequences, plan_tokens;                         // --plan-for
	uint32_t block_size, max_seqs, max_batch_tokens, max_context; // max_context 0 = as fits, up to the model's
	uint32_t model_max_context;
	const uint32_t *layers; // [n_stages] from --layers, or NULL for auto
	uint32_t n_layers_given;
};

struct plan_stage {
	uint32_t first_layer, n_layers;
	bool has_embedding, has_head;
	uint64_t weight_bytes, workspace_bytes, kv_bytes; // kv: what is left of the limit
	uint64_t bytes_per_block;                         // of its own layers
	uint64_t blocks_possible;                         // kv_bytes / bytes_per_block; UINT64_MAX without layers
	double decode_us, prefill_us_per_token;           // predicted: a decode round of the planned load; prefill
};

struct plan {
	uint32_t n_stages;
	struct plan_stage stage[MAX_STAGES];
	uint32_t bottleneck_memory, bottleneck_speed; // stages
	uint64_t n_blocks;
	uint32_t max_context;   // as asked for, or what fits up to the model's own
	uint32_t micro_batches; // predicted best for the planned load
	double tokens_per_s;
	char why[512]; // one line: bottleneck and why, what is wasted
};

// STATUS_REFUSED: does not fit (deficit per stage in bytes); --layers that does not add up or has a zero; more stages
// than layers: with both numbers. Only the first and the last stage may get no layers, for their embedding and head.
enum status planner_plan(struct plan *out, const struct plan_model *, const struct plan_device *devices,
                         const struct plan_options *, struct error *);
// Predicted time of one round (every sequence gets one token) with m micro-batches; the scheduler chooses m by it.
double planner_round_us(const struct plan *, const struct plan_model *, const struct plan_device *,
                        uint32_t micro_batches, uint32_t sequences, uint32_t context_tokens);
// Prompt rows of one step that keep it well below a second on every stage; 1 to max_batch_tokens.
uint32_t planner_chunk_tokens(const struct plan *, uint32_t max_batch_tokens);

#endif
