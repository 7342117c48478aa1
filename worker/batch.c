// See batch.h. Arrays are allocated once for the largest step; block tables of a batch are packed to the longest table
// in it, so that a short batch reads a short array.
#include "worker/batch.h"

#include <stdlib.h>
#include <string.h>

void ids_ring_create(struct ids_ring *r, uint32_t max_ids)
{
	memset(r, 0, sizeof *r);
	r->max_ids = max_ids;
	r->ids = xcalloc((unsigned long)IDS_RING_STEPS * max_ids, sizeof *r->ids);
}

void ids_ring_destroy(struct ids_ring *r)
{
	free(r->ids);
	memset(r, 0, sizeof *r);
}

void ids_ring_clear(struct ids_ring *r)
{
	memset(r->frame, 0, sizeof r->frame);
}

int32_t *ids_ring_expect(struct ids_ring *r, uint64_t step, uint32_t n)
{
	ASSERT(n <= r->max_ids);
	size_t i = step % IDS_RING_STEPS;
	r->frame[i].step = step;
	r->frame[i].n = n;
	r->frame[i].present = false;
	return r->ids + i * r->max_ids;
}

void ids_ring_arrived(struct ids_ring *r, uint64_t step)
{
	ASSERT(r->frame[step % IDS_RING_STEPS].step == step);
	r->frame[step % IDS_RING_STEPS].present = true;
}

enum status ids_ring_get(const struct ids_ring *r, uint64_t step, uint32_t row, int32_t *id, struct error *e)
{
	size_t i = step % IDS_RING_STEPS;
	if (step == 0 || r->frame[i].step != step)
		return error_set(e, STATUS_INVALID, "a row names step %llu, whose tokens are not kept",
		                 (unsigned long long)step);
	if (row >= r->frame[i].n)
		return error_set(e, STATUS_INVALID, "a row names token %u of step %llu, which samples %u", row,
		                 (unsigned long long)step, r->frame[i].n);
	if (!r->frame[i].present)
		return STATUS_ABSENT;
	*id = r->ids[i * r->max_ids + row];
	return STATUS_OK;
}

void batch_create(struct batch *b, const struct batch_options *o)
{
	memset(b, 0, sizeof *b);
	b->n_groups = (int)o->n_groups;
	b->ids = xcalloc(o->max_rows, sizeof *b->ids);
	b->position = xcalloc(o->max_rows, sizeof *b->position);
	b->first_row = xcalloc(o->max_seqs + 1ul, sizeof *b->first_row);
	b->kv_len = xcalloc(o->max_seqs, sizeof *b->kv_len);
	b->seq_slot = xcalloc(o->max_seqs, sizeof *b->seq_slot);
	b->sample_row = xcalloc(o->max_seqs, sizeof *b->sample_row);
	b->sample_seq = xcalloc(o->max_seqs, sizeof *b->sample_seq);
	for (uint32_t g = 0; g < o->n_groups; g++)
		b->group[g].slot = xcalloc(o->max_rows, sizeof *b->group[g].slot);
}

void batch_destroy(struct batch *b)
{
	free(b->ids);
	free(b->position);
	free(b->first_row);
	free(b->kv_len);
	free(b->seq_slot);
	free(b->sample_row);
	free(b->sample_seq);
	for (int g = 0; g < MAX_KV_GROUPS; g++) {
		free(b->group[g].slot);
		free(b->group[g].block_table);
	}
	memset(b, 0, sizeof *b);
}

size_t batch_bytes(const struct batch_options *o)
{
	size_t rows = o->max_rows, seqs = o->max_seqs;
	return (rows * (2 + o->n_groups) + seqs * 5 + 1) * sizeof(int32_t);
}

void batch_count(const struct message_step *s, uint32_t *n_rows, uint32_t *n_samples)
{
	uint64_t rows = 0, samples = 0;
	for (uint32_t i = 0; i < s->n_seqs; i++) {
		rows += s->seqs[i].n_tokens;
		samples += s->seqs[i].sample;
	}
	*n_rows = rows > UINT32_MAX ? UINT32_MAX : (uint32_t)rows;
	*n_samples = (uint32_t)samples;
}

// Tokens of one sequence's rows: into ids, and into the sampler's history where it counts.
static enum status add_tokens(struct batch *b, const struct batch_options *o, const struct message_step *s,
                              const struct step_seq *q, struct sampler *sampler, struct error *e)
{
	if (q->by_reference) {
		if (q->n_tokens != 1)
			return error_set(e, STATUS_INVALID, "slot %u: %u tokens by reference", q->slot, q->n_tokens);
		b->ids[b->n_rows] = -1;
		return STATUS_OK;
	}
	if (q->first_token > s->n_tokens || q->n_tokens > s->n_tokens - q->first_token)
		return error_set(e, STATUS_INVALID, "slot %u: tokens %u and %u more of %u", q->slot, q->first_token,
		                 q->n_tokens, s->n_tokens);
	bool record = sampler && sampler_counts(sampler, q->slot);
	for (uint32_t t = 0; t < q->n_tokens; t++) {
		uint32_t id = s->tokens[q->first_token + t];
		if (id >= (uint32_t)o->vocab_rows)
			return error_set(e, STATUS_INVALID, "slot %u: token %u of a vocabulary of %d", q->slot, id,
			                 o->vocab_rows);
		b->ids[b->n_rows + (int)t] = (int32_t)id;
		if (record)
			sampler_record(sampler, q->slot, q->start + t, (int32_t)id);
	}
	return STATUS_OK;
}

static enum status add_sequence(struct batch *b, const struct batch_options *o, const struct message_step *s,
                                const struct step_seq *q, struct kv_cache *kv, struct sampler *sampler,
                                struct error *e)
{
	if (q->n_tokens == 0 || q->n_tokens > o->max_rows - (uint32_t)b->n_rows)
		return error_set(e, STATUS_INVALID, "slot %u: %u rows after %d, a step has at most %u", q->slot,
		                 q->n_tokens, b->n_rows, o->max_rows);
	if (q->truncate)
		TRY(kv_cache_truncate(kv, q->slot, q->start, e));
	for (uint32_t g = 0; g < o->n_groups; g++) {
		if (q->first_block[g] > s->n_blocks || q->n_blocks[g] > s->n_blocks - q->first_block[g])
			return error_set(e, STATUS_INVALID, "slot %u: blocks %u and %u more of %u", q->slot,
			                 q->first_block[g], q->n_blocks[g], s->n_blocks);
		if (q->n_blocks[g])
			TRY(kv_cache_append_blocks(kv, q->slot, g, s->blocks + q->first_block[g], q->n_blocks[g], e));
	}
	TRY(kv_cache_extend(kv, q->slot, q->start, q->n_tokens, e));
	TRY(add_tokens(b, o, s, q, sampler, e));

	int row = b->n_rows, seq = b->n_seqs;
	b->first_row[seq] = row;
	b->kv_len[seq] = (int32_t)(q->start + q->n_tokens);
	b->seq_slot[seq] = (int32_t)q->slot;
	for (uint32_t t = 0; t < q->n_tokens; t++)
		b->position[row + (int)t] = (int32_t)(q->start + t);
	for (uint32_t g = 0; g < o->n_groups; g++) {
		uint32_t n_blocks;
		const int32_t *table = kv_cache_table(kv, q->slot, g, &n_blocks);
		for (uint32_t t = 0; t < q->n_tokens; t++) {
			uint32_t p = q->start + t;
			b->group[g].slot[row + (int)t] =
				table[p / o->block_size] * (int32_t)o->block_size + (int32_t)(p % o->block_size);
		}
		uint32_t used = (q->start + q->n_tokens + o->block_size - 1) / o->block_size;
		if ((int)used > b->group[g].max_blocks)
			b->group[g].max_blocks = (int)used;
	}
	b->n_rows += (int)q->n_tokens;
	b->n_seqs++;
	if (q->sample) {
		b->sample_row[b->n_samples] = b->n_rows - 1;
		b->sample_seq[b->n_samples++] = seq;
	}
	return STATUS_OK;
}

static void pack_tables(struct batch *b, int g, const struct kv_cache *kv)
{
	size_t max_blocks = (size_t)b->group[g].max_blocks, need = max_blocks * (size_t)b->n_seqs;
	if (need > b->group[g].capacity) {
		b->group[g].capacity = need + need / 2;
		b->group[g].block_table = xrealloc(b->group[g].block_table, b->group[g].capacity * sizeof(int32_t));
	}
	for (int i = 0; i < b->n_seqs; i++) {
		uint32_t n_blocks;
		const int32_t *table = kv_cache_table(kv, (uint32_t)b->seq_slot[i], (uint32_t)g, &n_blocks);
		size_t n = n_blocks < max_blocks ? n_blocks : max_blocks;
		int32_t *to = b->group[g].block_table + (size_t)i * max_blocks;
		memcpy(to, table, n * sizeof *to);
		memset(to + n, 0, (max_blocks - n) * sizeof *to);
	}
}

enum status batch_build(struct batch *b, const struct batch_options *o, const struct message *step, struct kv_cache *kv,
                        struct sampler *sampler, struct error *e)
{
	const struct message_step *s = &step->step_;
	b->step = step->step;
	b->micro_batch = s->micro_batch;
	b->n_rows = b->n_seqs = b->n_samples = 0;
	for (uint32_t g = 0; g < o->n_groups; g++)
		b->group[g].max_blocks = 0;
	for (uint32_t i = 0; i < s->n_ends; i++) {
		TRY(kv_cache_end(kv, s->ends[i], e));
		if (sampler)
			sampler_end(sampler, s->ends[i]);
	}
	for (uint32_t i = 0; i < s->n_new; i++) {
		TRY(kv_cache_begin(kv, s->news[i].slot, e));
		if (sampler)
			TRY(sampler_begin(sampler, &s->news[i], e));
	}
	if (s->n_seqs > o->max_seqs)
		return error_set(e, STATUS_INVALID, "%u sequences in a step, slots are %u", s->n_seqs, o->max_seqs);
	for (uint32_t i = 0; i < s->n_seqs; i++)
		TRY(add_sequence(b, o, s, &s->seqs[i], kv, sampler, e));
	b->first_row[b->n_seqs] = b->n_rows;
	for (uint32_t g = 0; g < o->n_groups; g++)
		pack_tables(b, (int)g, kv);
	return STATUS_OK;
}

enum status batch_resolve(struct batch *b, const struct batch_options *o, const struct message_step *s,
                          const struct ids_ring *ring, uint64_t *wanted, struct error *e)
{
	for (int i = 0; i < b->n_seqs; i++) {
		const struct step_seq *q = &s->seqs[i];
		int32_t *id = &b->ids[b->first_row[i]];
		if (!q->by_reference || *id >= 0)
			continue;
		*wanted = q->ref_step;
		TRY(ids_ring_get(ring, q->ref_step, q->ref_row, id, e));
		if (*id < 0 || *id >= o->vocab_rows) {
			int32_t bad = *id;
			*id = -1;
			return error_set(e, STATUS_INVALID, "slot %u: sampled token %d of a vocabulary of %d", q->slot, bad,
			                 o->vocab_rows);
		}
	}
	return STATUS_OK;
}
