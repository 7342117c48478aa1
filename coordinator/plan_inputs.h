// From a model and what workers said at their hello to what the planner wants. The surprising decision: where backends lay
// a type out differently the larger ratio counts for all, since one plan_model serves every device.
#ifndef STAGECOACH_COORDINATOR_PLAN_INPUTS_H
#define STAGECOACH_COORDINATOR_PLAN_INPUTS_H

#include "common/model.h"
#include "common/options.h"
#include "coordinator/planner.h"
#include "coordinator/registry.h"

// What options, model and devices decide together.
struct plan_settings {
	enum dtype act_dtype, kv_dtype;
	uint32_t block_size, max_seqs, max_batch_tokens, max_queue;
	uint32_t max_context; // as asked for; 0: as fits
	uint32_t isa;         // the lowest of all
};

// STATUS_REFUSED: a type that a backend lacks, a context beyond the model's, by name and numbers.
enum status plan_inputs_settings(struct plan_settings *out, const struct options *, const struct model *,
                                 const struct registry *, struct error *);
// STATUS_REFUSED: a weight type that a worker's backend cannot multiply, with the tensor's name.
enum status plan_inputs_model(struct plan_model *out, const struct model *, const struct registry *,
                              const struct plan_settings *, struct error *);
void plan_inputs_devices(struct plan_device *out, const struct registry *);

#endif
