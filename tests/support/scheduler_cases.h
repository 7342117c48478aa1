// What scheduler tests share over a simulated pipeline (pipeline_model.h): options, prompts and requests of few words, and a
// step that runs through all stages at once.
#ifndef STAGECOACH_TESTS_SCHEDULER_CASES_H
#define STAGECOACH_TESTS_SCHEDULER_CASES_H

#include <criterion/criterion.h>

#include "pipeline_model.h"

static inline struct scheduler_options options_of(uint32_t n_stages)
{
	return (struct scheduler_options){.max_seqs = 16,
	                                  .max_batch_tokens = 64,
	                                  .max_queue = 64,
	                                  .max_context = 512,
	                                  .block_size = 4,
	                                  .n_groups = 1,
	                                  .n_stages = n_stages,
	                                  .prefix_cache = true};
}

static inline uint32_t *prompt_of(uint32_t n, uint64_t seed)
{
	static uint32_t tokens[4096];
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (uint32_t)(model_mix(seed, i) % MODEL_VOCAB);
	return tokens;
}

static inline struct scheduler_request request_of(uint32_t n_prompt, uint32_t max_tokens, uint64_t seed)
{
	return (struct scheduler_request){
		.prompt = prompt_of(n_prompt, seed), .n_prompt = n_prompt, .n_choices = 1, .max_tokens = max_tokens};
}

static inline uint64_t add(struct world *w, struct scheduler_request r)
{
	struct error e = {{0}};
	uint64_t id = world_add(w, r, &e);
	cr_assert_neq(id, 0, "%s", e.text);
	return id;
}

static inline uint32_t delivered(const struct world *w, uint64_t id)
{
	return w->orders[id - 1]->choices[0].n_delivered;
}

static inline struct scheduler_stats stats_of(const struct world *w)
{
	struct scheduler_stats s;
	scheduler_get_stats(w->scheduler, &s);
	return s;
}

static inline uint32_t step_all(struct world *w)
{
	uint32_t n = 0;
	while (world_step(w))
		n++;
	return n;
}

#endif
