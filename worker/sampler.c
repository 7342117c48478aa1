// See sampler.h. Buffers of a slot are kept for its next owner, so that decoding allocates nothing.
#include "worker/sampler.h"

#include <stdlib.h>
#include <string.h>

struct sampler_slot {
	struct sampling_params params;      // its pointers are into the arrays below
	uint32_t n_prompt;
	bool counts;                        // a penalty is on
	int32_t *history;                   // [max_context], allocated when first needed
	int32_t *bias_id; float *bias_value; uint32_t bias_capacity;
	int32_t *stop_id; uint32_t stop_capacity;
};

struct sampler {
	uint32_t max_seqs, max_context;
	struct sampler_slot *slots;
};

void sampler_create(struct sampler **out, uint32_t max_seqs, uint32_t max_context)
{
	struct sampler *s = xcalloc(1, sizeof *s);
	s->max_seqs = max_seqs;
	s->max_context = max_context;
	s->slots = xcalloc(max_seqs, sizeof *s->slots);
	*out = s;
}

void sampler_destroy(struct sampler **sampler)
{
	struct sampler *s = *sampler;
	if (!s)
		return;
	for (uint32_t i = 0; i < s->max_seqs; i++) {
		free(s->slots[i].history);
		free(s->slots[i].bias_id);
		free(s->slots[i].bias_value);
		free(s->slots[i].stop_id);
	}
	free(s->slots);
	free(s);
	*sampler = NULL;
}

enum status sampler_begin(struct sampler *s, const struct step_new *n, struct error *e)
{
	if (n->slot >= s->max_seqs)
		return error_set(e, STATUS_INVALID, "new slot %u, but there are %u", n->slot, s->max_seqs);
	if (n->n_history > s->max_context)
		return error_set(e, STATUS_INVALID, "slot %u: %u tokens of history, the context is %u", n->slot,
		                 n->n_history, s->max_context);
	struct sampler_slot *slot = &s->slots[n->slot];
	const struct sampling_params *p = &n->sampling;
	slot->params = *p;
	slot->n_prompt = n->n_prompt;
	slot->counts = p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f;
	if (slot->counts) {
		if (!slot->history)
			slot->history = xcalloc(s->max_context + 1ul, sizeof *slot->history);
		for (uint32_t i = 0; i < n->n_history; i++)
			slot->history[i] = (int32_t)n->history[i];
	}
	if (p->n_bias > slot->bias_capacity) {
		slot->bias_id = xrealloc(slot->bias_id, p->n_bias * sizeof *slot->bias_id);
		slot->bias_value = xrealloc(slot->bias_value, p->n_bias * sizeof *slot->bias_value);
		slot->bias_capacity = p->n_bias;
	}
	for (uint32_t i = 0; i < p->n_bias; i++) {
		slot->bias_id[i] = (int32_t)p->bias_ids[i];
		slot->bias_value[i] = p->bias_values[i];
	}
	if (p->n_stop_ids > slot->stop_capacity) {
		slot->stop_id = xrealloc(slot->stop_id, p->n_stop_ids * sizeof *slot->stop_id);
		slot->stop_capacity = p->n_stop_ids;
	}
	for (uint32_t i = 0; i < p->n_stop_ids; i++)
		slot->stop_id[i] = (int32_t)p->stop_ids[i];
	slot->params.bias_ids = NULL;
	slot->params.bias_values = NULL;
	slot->params.stop_ids = NULL;
	return STATUS_OK;
}

void sampler_end(struct sampler *s, uint32_t slot)
{
	s->slots[slot].counts = false;
}

void sampler_record(struct sampler *s, uint32_t slot, uint32_t position, int32_t id)
{
	if (s->slots[slot].counts && position < s->max_context)
		s->slots[slot].history[position] = id;
}

bool sampler_counts(const struct sampler *s, uint32_t slot)
{
	return s->slots[slot].counts;
}

void sampler_fill(const struct sampler *s, uint32_t slot_id, uint32_t position, struct sample_row *row)
{
	const struct sampler_slot *slot = &s->slots[slot_id];
	const struct sampling_params *p = &slot->params;
	uint32_t n_prompt = slot->n_prompt < position ? slot->n_prompt : position;
	uint32_t n_output = position - n_prompt;
	*row = (struct sample_row){
		.temperature = p->temperature,
		.top_k = p->top_k,
		.top_p = p->top_p,
		.min_p = p->min_p,
		.repetition_penalty = p->repetition_penalty,
		.presence_penalty = p->presence_penalty,
		.frequency_penalty = p->frequency_penalty,
		.history = slot->counts ? slot->history : NULL,
		.n_prompt = (int32_t)n_prompt,
		.n_output = (int32_t)n_output,
		.bias_id = slot->bias_id,
		.bias_value = slot->bias_value,
		.n_bias = (int32_t)p->n_bias,
		.banned = slot->stop_id,
		.n_banned = n_output < p->min_tokens ? (int32_t)p->n_stop_ids : 0,
		.seed = p->seed,
		.choice = p->choice,
		.position = position,
		.n_top = p->n_logprobs > 0 ? p->n_logprobs : 0,
		.want_logprob = p->n_logprobs >= 0,
		.id = -1,
	};
}
