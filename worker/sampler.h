// What sampling needs per slot: its parameters, and its tokens where a penalty counts them. The surprising decision: the
// last stage keeps the tokens itself, by position, from the steps and from what it sampled, so that a decode step sent
// before its token is known carries nothing but a reference.
#ifndef STAGECOACH_WORKER_SAMPLER_H
#define STAGECOACH_WORKER_SAMPLER_H

#include "kernels/ops.h"
#include "proto/message.h"

struct sampler;

// max_seqs slots of at most max_context tokens.
void sampler_create(struct sampler **out, uint32_t max_seqs, uint32_t max_context);
void sampler_destroy(struct sampler **);
// Copies everything of the new sequence. STATUS_INVALID: a history longer than the context.
enum status sampler_begin(struct sampler *, const struct step_new *, struct error *);
void sampler_end(struct sampler *, uint32_t slot);
// The slot's token at `position`, if it counts them (sampler_counts); out of order after a truncation is fine.
void sampler_record(struct sampler *, uint32_t slot, uint32_t position, int32_t id);
bool sampler_counts(const struct sampler *, uint32_t slot);
// Fills the inputs of `row` for the token at `position` (tokens before it are known). Borrowed until sampler_end().
void sampler_fill(const struct sampler *, uint32_t slot, uint32_t position, struct sample_row *row);

#endif
