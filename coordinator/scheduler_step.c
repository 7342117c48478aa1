// Owns the building of steps. Lanes take turns; a step has the decode rows of its lane first, then prompt chunks,
// oldest first, then newly admitted sequences. The surprising decision: prompt chunks belong to no lane. Whatever step
// comes next carries the next chunk, so that chunks of one prompt run in several stages at once however few
// micro-batches there are.
#include <string.h>

#include "coordinator/scheduler_internal.h"

enum {
	LEAST_CHUNK = 128,
	CHUNK_MULTIPLE = 32,
	LOOK_AHEAD = 16,        // waiting sequences whose prompts count as work to do
	STEP_HISTORY = 1 << 20, // tokens of histories after which a step admits nobody; a message holds four times that
};

// ---- rows

static void append_blocks(struct scheduler *s, struct sequence *q, struct step_seq *row)
{
	uint32_t need = scheduler_blocks_for(s, row->start + row->n_tokens);
	ASSERT(need <= q->n_blocks);
	if (need < q->n_sent)
		need = q->n_sent;
	uint32_t n = need - q->n_sent;
	uint64_t total = s->n_step_blocks + (uint64_t)n * s->o.n_groups;
	if (total > s->step_blocks_capacity) {
		while (s->step_blocks_capacity < total)
			s->step_blocks_capacity *= 2;
		s->step_blocks = xrealloc(s->step_blocks, s->step_blocks_capacity * sizeof *s->step_blocks);
	}
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		row->first_block[g] = n > 0 ? s->n_step_blocks : 0;
		row->n_blocks[g] = n;
		memcpy(s->step_blocks + s->n_step_blocks, q->blocks[g] + q->n_sent, n * sizeof *s->step_blocks);
		s->n_step_blocks += n;
	}
	q->n_sent = need;
}

static void append_new(struct scheduler *s, struct sequence *q)
{
	const struct request *r = q->request;
	const struct sampling_params *p = &r->sampling;
	struct step_new *x = &s->news[s->n_new++];
	*x = (struct step_new){.slot = q->slot, .n_prompt = r->n_prompt, .sampling = *p};
	x->sampling.choice = PLANTED(CHOICES_ALIKE) ? 0 : q->choice;
	if (p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0) {
		x->n_history = PLANTED(SHORT_HISTORY) && q->n_computed > r->n_prompt ? r->n_prompt : q->n_computed;
		x->history = q->tokens;
		s->n_step_history += x->n_history;
	}
}

static void append_rows(struct scheduler *s, struct flight *f, struct sequence *q, uint32_t n)
{
	struct step_seq *row = &s->seqs[s->n_seqs++];
	*row = (struct step_seq){
		.slot = q->slot,
		.start = q->n_computed,
		.n_tokens = n,
		.truncate = q->truncate,
		.sample = q->n_computed + n == q->n_tokens + q->n_refs,
		.not_ahead = q->request->not_ahead,
	};
	q->truncate = false;
	if (q->n_computed >= q->n_tokens) {
		row->by_reference = true;
		row->ref_step = q->refs[q->n_refs - 1].step;
		row->ref_row = q->refs[q->n_refs - 1].row;
	} else {
		row->first_token = s->n_step_tokens;
		memcpy(s->tokens + s->n_step_tokens, q->tokens + q->n_computed, n * sizeof *s->tokens);
		s->n_step_tokens += n;
	}
	append_blocks(s, q, row);
	f->rows[f->n_rows++] = (struct flight_row){.seq = q, .slot = q->slot, .sample = row->sample};
	if (row->sample)
		q->refs[q->n_refs++] = (struct sample_ref){.step = s->next_step, .row = f->n_samples++};
	q->n_computed += n;
	q->in_flight++;
	q->request->in_flight++;
}

// ---- decode

static bool may_decode(const struct scheduler *s, const struct sequence *q)
{
	if (!q->decoding || q->n_tokens + q->n_refs >= q->max_len + PLANTED(BEYOND_MAX_TOKENS))
		return false;
	if (q->n_refs == 0)
		return true;
	// Stages run in order, so a row whose token is still being computed holds up what is behind it: it has to be at
	// least a round of the lanes in use away.
	return (!q->request->not_ahead || PLANTED(AHEAD_ANYWAY)) && q->n_refs < AHEAD &&
	       s->next_step - q->refs[q->n_refs - 1].step >= s->lanes_in_use;
}

// A block for the next row. Takes from the newest if need be; false: this sequence gets no row now.
static bool ensure_block(struct scheduler *s, struct sequence *q)
{
	if (scheduler_blocks_for(s, q->n_computed + 1) <= q->n_blocks)
		return true;
	for (uint32_t g = 0; g < s->o.n_groups;) {
		uint32_t b = block_pool_take(s->pools[g]);
		if (b != BLOCK_NONE) {
			q->blocks[g++][q->n_blocks] = b;
			continue;
		}
		struct sequence *newest = s->running[s->n_running - 1];
		if (newest != q) {
			scheduler_preempt(s, newest);
			continue;
		}
		while (g-- > 0)
			block_pool_release(s->pools[g], q->blocks[g][q->n_blocks]);
		if (s->n_running > 1) {
			scheduler_preempt(s, q);
		} else if (q->n_refs == 0) { // the whole pool is its own, and full
			struct request *r = q->request;
			scheduler_finish(s, q, FINISH_LENGTH, NULL);
			scheduler_release_request(s, r);
		}
		return false;
	}
	q->n_blocks++;
	return true;
}

static uint32_t add_decode(struct scheduler *s, struct flight *f, uint32_t lane, uint32_t budget)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < s->n_running; i++)
		if (s->running[i]->lane == lane && may_decode(s, s->running[i]))
			s->candidates[n++] = s->running[i];
	if (n > budget) {
		// Those that waited longest, in order of age again, since blocks are taken from the newest.
		uint64_t *cursor = &s->lane_cursor[lane];
		uint32_t first = (uint32_t)(*cursor % n), kept = 0;
		for (uint32_t i = 0; i < n; i++)
			if ((i + n - first) % n < budget)
				s->candidates[kept++] = s->candidates[i];
		*cursor = first + budget;
		n = budget;
	}
	uint32_t added = 0;
	for (uint32_t i = 0; i < n; i++) {
		struct sequence *q = s->candidates[i];
		// A candidate that was preempted for an older one has left the end of the running list.
		if (s->n_running == 0 || scheduler_older(s->running[s->n_running - 1], q))
			break;
		if (!ensure_block(s, q))
			continue;
		append_rows(s, f, q, 1);
		added++;
	}
	return added;
}

// ---- prefill

static void add_chunk(struct scheduler *s, struct flight *f, struct sequence *q, uint32_t *left, uint32_t *chunk_left)
{
	uint32_t rest = q->n_tokens - q->n_computed, n = rest < *left ? rest : *left;
	if (n > *chunk_left)
		n = *chunk_left;
	append_rows(s, f, q, n);
	*left -= n;
	*chunk_left -= n;
	if (n == rest) {
		q->decoding = true;
		q->request->n_prefilling--;
		q->request->prefilled_step = s->next_step;
		q->lane = scheduler_lightest_lane(s);
		s->lane_seqs[q->lane]++;
	}
}

struct load {
	uint64_t prefill_tokens; // of running sequences, and of the first of the queue if any may be admitted
	uint32_t n_decoding;
};

static struct load measure(struct scheduler *s)
{
	struct load l = {0};
	const struct sequence *q = scheduler_next_waiting(s);
	for (uint32_t seen = 0; q != NULL && seen < s->n_free_slots && seen < LOOK_AHEAD; q = q->next, seen++)
		l.prefill_tokens += q->n_tokens;
	for (uint32_t i = 0; i < s->n_running; i++) {
		if (s->running[i]->decoding)
			l.n_decoding++;
		else
			l.prefill_tokens += s->running[i]->n_tokens - s->running[i]->n_computed;
	}
	return l;
}

// Rows of one step that may be prompt: all, or an even share of what there is where stages would wait otherwise.
static uint32_t chunk_limit(const struct scheduler *s, const struct load *l)
{
	uint64_t even = (l->prefill_tokens + s->o.n_stages - 1) / s->o.n_stages;
	even = (even + CHUNK_MULTIPLE - 1) / CHUNK_MULTIPLE * CHUNK_MULTIPLE;
	if (even < LEAST_CHUNK)
		even = LEAST_CHUNK;
	return even < s->o.max_prefill_tokens ? (uint32_t)even : s->o.max_prefill_tokens;
}

static void add_prefill(struct scheduler *s, struct flight *f, uint32_t left, uint32_t chunk_left)
{
	for (uint32_t i = 0; i < s->n_running && left > 0 && chunk_left > 0 && s->n_seqs < s->rows_max; i++) {
		struct sequence *q = s->running[i];
		if (!q->decoding)
			add_chunk(s, f, q, &left, &chunk_left);
	}
	while (left > 0 && chunk_left > 0 && s->n_seqs < s->rows_max && s->n_step_history < STEP_HISTORY) {
		struct sequence *q = scheduler_next_waiting(s);
		if (q == NULL || scheduler_admit(s, q) != STATUS_OK)
			return;
		append_new(s, q);
		add_chunk(s, f, q, &left, &chunk_left);
	}
}

// ---- steps

static bool build(struct scheduler *s, uint32_t lane, const struct load *l, struct message *out)
{
	struct flight *f = &s->flights[(s->flight_first + s->n_flights) % s->flight_capacity];
	f->step = s->next_step;
	f->lane = lane;
	f->n_rows = f->n_samples = 0;
	s->n_new = s->n_seqs = s->n_step_tokens = s->n_step_blocks = s->n_step_history = 0;

	uint32_t budget = s->o.max_batch_tokens, decode_budget = budget;
	if (l->prefill_tokens > 0 && lane < s->micro_batches) {
		// Decode rows go first, but never take everything for ever.
		decode_budget = budget > 1 ? budget - (budget + 3) / 4 : s->lane_prefill_turn[lane] ? 0 : 1;
		s->lane_prefill_turn[lane] = !s->lane_prefill_turn[lane];
	}
	uint32_t n_decode = lane < s->micro_batches ? add_decode(s, f, lane, decode_budget) : 0;
	add_prefill(s, f, budget - n_decode, chunk_limit(s, l));
	if (f->n_rows == 0 && decode_budget < budget)
		add_decode(s, f, lane, budget);
	if (f->n_rows == 0)
		return false;

	for (uint32_t i = 0; i < f->n_rows; i++)
		scheduler_publish(s, f->rows[i].seq);
	*out = (struct message){
		.type = MESSAGE_STEP,
		.epoch = s->epoch,
		.step = s->next_step++,
		.step_ =
			{
				.micro_batch = lane,
				.n_ends = s->n_ends,
				.ends = s->ends,
				.n_new = s->n_new,
				.news = s->news,
				.n_seqs = s->n_seqs,
				.seqs = s->seqs,
				.n_tokens = s->n_step_tokens,
				.tokens = s->tokens,
				.n_blocks = s->n_step_blocks,
				.blocks = s->step_blocks,
			},
	};
	s->n_ends = 0; // the array stays as it is until the next call
	s->n_flights++;
	s->lane_in_flight[lane]++;
	return true;
}

bool scheduler_next_step(struct scheduler *s, uint64_t now_us, struct message *out)
{
	if (s->suspended || (s->n_running == 0 && !scheduler_may_admit(s)))
		return false;
	scheduler_choose_lanes(s, now_us);
	struct load l = measure(s);
	// A step of prompt rows alone reads all weights once more: for half a chunk or more, or if nothing else would
	// be computed.
	bool prompts_alone =
		l.prefill_tokens > 0 && (l.n_decoding == 0 || l.prefill_tokens * 2 >= s->o.max_prefill_tokens);
	s->lanes_in_use = prompts_alone ? s->o.n_stages : s->micro_batches;
	for (uint32_t k = 0; k < s->o.n_stages; k++) {
		uint32_t lane = (s->next_lane + k) % s->o.n_stages;
		if (s->lane_in_flight[lane] >= AHEAD)
			continue;
		if (lane >= s->lanes_in_use)
			continue;
		if (build(s, lane, &l, out)) {
			s->next_lane = (lane + 1) % s->o.n_stages;
			return true;
		}
	}
	return false;
}
