// What planner.c (cost, refusals, description) and planner_search.c (the search) share. The surprising decision: the
// search never sees the answer's structs, only counts of layers, so that whatever it proposes is judged by one
// function.
#ifndef STAGECOACH_COORDINATOR_PLANNER_INTERNAL_H
#define STAGECOACH_COORDINATOR_PLANNER_INTERNAL_H

#include <stdbool.h>

#include "coordinator/planner.h"

struct planner {
	const struct plan_model *model;
	const struct plan_device *devices;
	const struct plan_options *o;
	uint64_t layer_bytes[MODEL_MAX_LAYERS + 1]; // of all layers before
	uint64_t block_bytes;                       // of one layer
	uint64_t least_blocks;                      // for max_context, or one
	uint32_t sequences;                         // planned
	uint32_t sharers[MAX_STAGES];               // stages on this one's device
};

struct verdict {
	uint64_t blocks;
	uint32_t running; // of the planned sequences, those with blocks
	uint32_t micro_batches;
	double round_us, tokens_per_s; // 0: does not fit
};

uint64_t planner_weight_bytes(const struct planner *, uint32_t stage, uint32_t first, uint32_t n);
uint64_t planner_need_bytes(const struct planner *, uint32_t stage, uint32_t first, uint32_t n, uint64_t blocks);
uint64_t planner_blocks(const struct planner *, const uint32_t *layers); // 0: weights do not fit
// One micro-batch of so many sequences.
double planner_stage_us(const struct planner *, uint32_t stage, uint32_t first, uint32_t n, double seqs,
                        double context);
struct verdict planner_judge(const struct planner *, const uint32_t *layers);

// The best split. False: none fits; layers is then the split that lacks least on its worst stage.
bool planner_search(const struct planner *, uint32_t *layers);

#endif
