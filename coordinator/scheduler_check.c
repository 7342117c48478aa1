// Test support: every invariant that can be seen from inside. The surprising decision: it aborts through the same
// ASSERT as the program itself, so a simulation needs no way to carry failures.
#include <stdlib.h>

#include "coordinator/scheduler_internal.h"

static void check_sequence(const struct scheduler *s, const struct sequence *q)
{
	const struct request *r = q->request;
	ASSERT(q->n_tokens >= r->n_prompt && q->n_refs <= AHEAD && q->n_refs <= q->in_flight);
	if (q->state == SEQ_FINISHED) {
		ASSERT(q->n_blocks == 0 && q->n_refs == 0);
		return;
	}
	ASSERT(q->n_tokens + q->n_refs <= q->max_len && q->n_tokens < q->max_len && q->max_len <= r->max_len);
	if (q->state != SEQ_RUNNING) {
		ASSERT(q->n_blocks == 0 && q->n_computed == 0 && q->n_sent == 0 && q->n_published == 0);
		ASSERT(q->state == SEQ_DRAINING ? q->in_flight > 0 : q->in_flight == 0);
		return;
	}
	ASSERT(q->slot < s->o.max_seqs && q->n_sent <= q->n_blocks);
	ASSERT(scheduler_blocks_for(s, q->n_computed) == q->n_sent || q->truncate);
	ASSERT(q->n_blocks <= scheduler_blocks_for(s, q->n_tokens + q->n_refs));
	ASSERT(q->n_published * s->o.block_size <= q->n_computed && q->n_published * s->o.block_size <= q->n_tokens);
	if (q->decoding)
		ASSERT(q->n_computed + 1 == q->n_tokens + q->n_refs && q->lane < s->micro_batches);
	else
		ASSERT(q->n_computed < q->n_tokens && q->n_refs == 0 &&
		       q->n_blocks == scheduler_blocks_for(s, q->n_tokens));
}

static void check_blocks(const struct scheduler *s)
{
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		const struct block_pool *p = s->pools[g];
		uint32_t n = block_pool_count(p), *holders = xcalloc(n + 1, sizeof *holders);
		block_pool_check(p);
		for (uint32_t i = 0; i < s->n_running; i++)
			for (uint32_t b = 0; b < s->running[i]->n_blocks; b++)
				holders[s->running[i]->blocks[g][b]]++;
		for (uint32_t b = 0; b < n; b++)
			ASSERT(holders[b] == block_pool_holders(p, b));
		// A block that is not full of known tokens belongs to one sequence.
		for (uint32_t i = 0; i < s->n_running; i++)
			for (uint32_t b = s->running[i]->n_published; b < s->running[i]->n_blocks; b++)
				ASSERT(holders[s->running[i]->blocks[g][b]] == 1);
		free(holders);
	}
}

static void check_slots(const struct scheduler *s)
{
	uint8_t *seen = xcalloc(s->o.max_seqs, 1);
	for (uint32_t i = 0; i < s->n_running; i++)
		ASSERT(seen[s->running[i]->slot]++ == 0);
	for (uint32_t i = 0; i < s->n_free_slots; i++)
		ASSERT(seen[s->free_slots[i]]++ == 0);
	ASSERT(s->n_running + s->n_free_slots == s->o.max_seqs && s->n_ends <= s->o.max_seqs);
	for (uint32_t i = 0; i < s->n_ends; i++) {
		ASSERT((seen[s->ends[i]] & 2) == 0);
		seen[s->ends[i]] |= 2;
	}
	free(seen);
}

void scheduler_check(const struct scheduler *s)
{
	uint32_t waiting = 0, running = 0, draining = 0, queued = 0, in_flight = 0, rows = 0, lanes[MAX_STAGES] = {0};
	for (const struct request *r = s->oldest, *prev = NULL; r != NULL; prev = r, r = r->next) {
		ASSERT(r->prev == prev && (prev == NULL || prev->serial < r->serial));
		uint32_t live = 0, prefilling = 0, flying = 0;
		for (uint32_t i = 0; i < r->n_choices; i++) {
			const struct sequence *q = &r->choices[i];
			ASSERT(q->request == r && q->choice == i);
			check_sequence(s, q);
			live += q->state != SEQ_FINISHED;
			waiting += q->state == SEQ_WAITING;
			running += q->state == SEQ_RUNNING;
			draining += q->state == SEQ_DRAINING;
			prefilling += q->state == SEQ_RUNNING && !q->decoding;
			flying += q->in_flight;
		}
		ASSERT(live == r->n_live && prefilling == r->n_prefilling && flying == r->in_flight);
		ASSERT(live > 0 || flying > 0);
		queued += !r->started;
		in_flight += flying;
	}
	ASSERT(waiting == s->n_waiting && running == s->n_running && draining == s->n_draining);
	ASSERT(queued == s->n_queued_requests);
	for (const struct sequence *q = s->queue_head, *prev = NULL; q != NULL; prev = q, q = q->next) {
		ASSERT(q->state == SEQ_WAITING && q->prev == prev && (prev == NULL || scheduler_older(prev, q)));
		waiting--;
	}
	ASSERT(waiting == 0);
	for (uint32_t i = 0; i < s->n_running; i++) {
		ASSERT(s->running[i]->state == SEQ_RUNNING);
		ASSERT(i == 0 || scheduler_older(s->running[i - 1], s->running[i]));
		if (s->running[i]->decoding)
			lanes[s->running[i]->lane]++;
	}
	for (uint32_t l = 0; l < MAX_STAGES; l++) {
		ASSERT(lanes[l] == s->lane_seqs[l] && s->lane_in_flight[l] <= AHEAD);
		lanes[l] = 0;
	}
	for (uint32_t i = 0; i < s->n_flights; i++) {
		const struct flight *f = &s->flights[(s->flight_first + i) % s->flight_capacity];
		ASSERT(f->step == s->next_step - s->n_flights + i);
		lanes[f->lane]++;
		rows += f->n_rows;
	}
	ASSERT(rows == in_flight);
	for (uint32_t l = 0; l < MAX_STAGES; l++)
		ASSERT(lanes[l] == s->lane_in_flight[l]);
	if (s->epoch != 0) {
		check_slots(s);
		check_blocks(s);
	}
}
