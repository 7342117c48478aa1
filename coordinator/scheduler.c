// Owns the scheduler's life: creation, requests coming and going, epochs, events, statistics. The surprising decision:
// a new epoch keeps nothing but tokens; every unfinished sequence goes back to the queue and is admitted like a new one
// whose prompt is all that it knows, so replay has no code of its own.
#include "coordinator/scheduler.h"

#include <stdlib.h>
#include <string.h>

#include "coordinator/scheduler_internal.h"

// As many tokens as long answers have.
enum { EXPECTED_OUTPUT = 1024 };

enum status scheduler_create(struct scheduler **out, const struct scheduler_options *o, struct error *e)
{
	if (o->max_seqs < 1 || o->max_seqs > MAX_STEP_SEQS)
		return error_set(e, STATUS_INVALID, "max_seqs is %u, must be 1 to %d", o->max_seqs, MAX_STEP_SEQS);
	if (o->max_batch_tokens < 1 || o->max_batch_tokens > MAX_STEP_TOKENS)
		return error_set(e, STATUS_INVALID, "max_batch_tokens is %u, must be 1 to %d", o->max_batch_tokens,
		                 MAX_STEP_TOKENS);
	if (o->max_context < 2 || o->block_size < 1)
		return error_set(e, STATUS_INVALID, "max_context is %u and block_size is %u, must be at least 2 and 1",
		                 o->max_context, o->block_size);
	if (o->n_groups < 1 || o->n_groups > MAX_KV_GROUPS || o->n_stages < 1 || o->n_stages > MAX_STAGES)
		return error_set(e, STATUS_INVALID, "%u KV groups and %u stages, must be 1 to %d and 1 to %d",
		                 o->n_groups, o->n_stages, MAX_KV_GROUPS, MAX_STAGES);
	struct scheduler *s = xcalloc(1, sizeof *s);
	s->o = *o;
	if (o->max_prefill_tokens == 0 || o->max_prefill_tokens > o->max_batch_tokens)
		s->o.max_prefill_tokens = o->max_batch_tokens;
	uint32_t buckets = 64;
	while (buckets < 1u << 20 && buckets < (uint64_t)o->max_queue + o->max_seqs)
		buckets *= 2;
	s->bucket_mask = buckets - 1;
	s->buckets = xcalloc(buckets, sizeof *s->buckets);
	s->running = xcalloc(o->max_seqs, sizeof *s->running);
	s->candidates = xcalloc(o->max_seqs, sizeof *s->candidates);
	s->free_slots = xcalloc(o->max_seqs, sizeof *s->free_slots);
	s->ends = xcalloc(o->max_seqs, sizeof *s->ends);
	s->rows_max = o->max_seqs < o->max_batch_tokens ? o->max_seqs : o->max_batch_tokens;
	s->news = xcalloc(s->rows_max, sizeof *s->news);
	s->seqs = xcalloc(s->rows_max, sizeof *s->seqs);
	s->tokens = xcalloc(o->max_batch_tokens, sizeof *s->tokens);
	s->step_blocks_capacity = 1024;
	s->step_blocks = xcalloc(s->step_blocks_capacity, sizeof *s->step_blocks);
	for (uint32_t g = 0; g < o->n_groups; g++)
		s->found[g] = xcalloc(scheduler_blocks_for(s, o->max_context), sizeof *s->found[g]);
	s->flight_capacity = o->n_stages * AHEAD;
	s->flights = xcalloc(s->flight_capacity, sizeof *s->flights);
	for (uint32_t i = 0; i < s->flight_capacity; i++)
		s->flights[i].rows = xcalloc(s->rows_max, sizeof *s->flights[i].rows);
	s->event_capacity = 64;
	while (s->event_capacity < 4 * o->max_seqs)
		s->event_capacity *= 2;
	s->events = xcalloc(s->event_capacity, sizeof *s->events);
	s->micro_batches = 1;
	s->suspended = true;
	s->next_step = 1;
	s->releases = 1;
	s->mean_output = o->expected_output > 0 ? o->expected_output : EXPECTED_OUTPUT;
	*out = s;
	return STATUS_OK;
}

void scheduler_destroy(struct scheduler **scheduler)
{
	struct scheduler *s = *scheduler;
	if (s == NULL)
		return;
	while (s->oldest != NULL) {
		s->oldest->n_live = s->oldest->in_flight = 0;
		scheduler_release_request(s, s->oldest);
	}
	for (uint32_t i = 0; i < s->flight_capacity; i++)
		free(s->flights[i].rows);
	for (uint32_t g = 0; g < MAX_KV_GROUPS; g++) {
		block_pool_destroy(&s->pools[g]);
		free(s->found[g]);
	}
	free(s->flights);
	free(s->events);
	free(s->step_blocks);
	free(s->tokens);
	free(s->seqs);
	free(s->news);
	free(s->ends);
	free(s->free_slots);
	free(s->candidates);
	free(s->running);
	free(s->buckets);
	free(s);
	*scheduler = NULL;
}

// ---- requests

static void *copy(const void *from, size_t count, size_t size)
{
	if (count == 0)
		return NULL;
	return memcpy(xmalloc(count * size), from, count * size);
}

static struct request *find_request(struct scheduler *s, uint64_t id)
{
	struct request *r = s->buckets[id & s->bucket_mask];
	while (r != NULL && r->id != id)
		r = r->bucket_next;
	return r;
}

static enum status check_request(struct scheduler *s, const struct scheduler_request *q, struct error *e)
{
	if (find_request(s, q->id) != NULL)
		return error_set(e, STATUS_INVALID, "request id %llu is in use", (unsigned long long)q->id);
	if (q->n_prompt < 1 || q->n_choices < 1 || q->max_tokens < 1)
		return error_set(e, STATUS_INVALID,
		                 "%u prompt tokens, %u choices, max_tokens %u: each must be at least 1", q->n_prompt,
		                 q->n_choices, q->max_tokens);
	if (q->n_prompt >= s->o.max_context)
		return error_set(e, STATUS_INVALID,
		                 "the prompt has %u tokens, the longest possible is %u (a context of %u)", q->n_prompt,
		                 s->o.max_context - 1, s->o.max_context);
	for (uint32_t g = 0; g < s->o.n_groups && s->epoch != 0; g++) {
		uint64_t room = (uint64_t)block_pool_count(s->pools[g]) * s->o.block_size;
		if (q->n_prompt > room)
			return error_set(e, STATUS_INVALID, "the prompt has %u tokens, the whole KV cache holds %llu",
			                 q->n_prompt, (unsigned long long)room);
	}
	if (s->n_queued_requests >= s->o.max_queue)
		return error_set(e, STATUS_BUSY, "%u requests are waiting, the limit is %u", s->n_queued_requests,
		                 s->o.max_queue);
	return STATUS_OK;
}

enum status scheduler_add(struct scheduler *s, const struct scheduler_request *q, uint64_t now_us, struct error *e)
{
	(void)now_us;
	TRY(check_request(s, q, e));
	struct request *r = xcalloc(1, sizeof *r);
	r->id = q->id;
	r->serial = s->next_serial++;
	r->n_prompt = q->n_prompt;
	r->prompt = copy(q->prompt, q->n_prompt, sizeof *q->prompt);
	r->n_end_ids = q->n_end_ids;
	r->end_ids = copy(q->end_ids, q->n_end_ids, sizeof *q->end_ids);
	r->n_choices = r->n_live = q->n_choices;
	r->max_len = q->max_tokens < s->o.max_context - q->n_prompt ? q->n_prompt + q->max_tokens : s->o.max_context;
	r->cache_salt = q->cache_salt;
	r->not_ahead = q->not_ahead;
	r->sampling = q->sampling;
	r->sampling.bias_ids = copy(q->sampling.bias_ids, q->sampling.n_bias, sizeof *q->sampling.bias_ids);
	r->sampling.bias_values = copy(q->sampling.bias_values, q->sampling.n_bias, sizeof *q->sampling.bias_values);
	r->sampling.n_stop_ids = q->sampling.min_tokens > 0 ? q->n_end_ids : 0;
	r->sampling.stop_ids = copy(q->end_ids, r->sampling.n_stop_ids, sizeof *q->end_ids);
	r->choices = xcalloc(q->n_choices, sizeof *r->choices);
	r->prev = s->newest;
	*(s->newest != NULL ? &s->newest->next : &s->oldest) = r;
	s->newest = r;
	r->bucket_next = s->buckets[r->id & s->bucket_mask];
	s->buckets[r->id & s->bucket_mask] = r;
	s->n_queued_requests++;
	for (uint32_t i = 0; i < r->n_choices; i++) {
		struct sequence *seq = &r->choices[i];
		seq->request = r;
		seq->choice = i;
		seq->n_tokens = r->n_prompt;
		seq->max_len = r->max_len;
		scheduler_queue_insert(s, seq);
	}
	return STATUS_OK;
}

void scheduler_cancel(struct scheduler *s, uint64_t request_id)
{
	struct request *r = find_request(s, request_id);
	if (r == NULL)
		return;
	for (uint32_t i = 0; i < r->n_choices; i++)
		if (r->choices[i].state != SEQ_FINISHED)
			scheduler_finish(s, &r->choices[i], FINISH_CANCELLED, NULL);
	scheduler_release_request(s, r);
}

void scheduler_stop_choice(struct scheduler *s, uint64_t request_id, uint32_t choice)
{
	struct request *r = find_request(s, request_id);
	if (r == NULL || choice >= r->n_choices || r->choices[choice].state == SEQ_FINISHED)
		return;
	scheduler_finish(s, &r->choices[choice], FINISH_STOP, NULL);
	scheduler_release_request(s, r);
}

enum status scheduler_truncate(struct scheduler *s, uint64_t request_id, uint32_t choice, uint32_t n_tokens,
                               struct error *e)
{
	struct request *r = find_request(s, request_id);
	struct sequence *q = r != NULL && choice < r->n_choices ? &r->choices[choice] : NULL;
	if (q == NULL || q->state != SEQ_RUNNING)
		return error_set(e, STATUS_ABSENT, "no running choice %u of request %llu", choice,
		                 (unsigned long long)request_id);
	if (q->in_flight > 0)
		return error_set(e, STATUS_BUSY, "choice %u has %u steps in flight", choice, q->in_flight);
	if (n_tokens > q->n_computed)
		return error_set(e, STATUS_INVALID, "cut to %u tokens, %u are computed", n_tokens, q->n_computed);
	// A published block may serve others, so it is never written again: cut before it, and put another in its
	// place.
	if (n_tokens < q->n_published * s->o.block_size)
		n_tokens -= n_tokens % s->o.block_size;
	uint32_t full = n_tokens / s->o.block_size, keep = scheduler_blocks_for(s, q->n_tokens);
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		uint32_t take = 0;
		for (uint32_t i = full; i < q->n_published; i++)
			take += block_pool_holders(s->pools[g], q->blocks[g][i]) > 1;
		if (take > block_pool_free_count(s->pools[g]))
			return error_set(e, STATUS_BUSY, "%u blocks are shared, %u are free", take,
			                 block_pool_free_count(s->pools[g]));
	}
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		for (uint32_t i = q->n_blocks; i-- > full;)
			if (i >= keep || i < q->n_published)
				block_pool_release(s->pools[g], q->blocks[g][i]);
		for (uint32_t i = full; i < q->n_published; i++)
			q->blocks[g][i] = block_pool_take(s->pools[g]);
		if (full > 0 && full < q->n_published)
			q->content[g] = block_pool_content(s->pools[g], q->blocks[g][full - 1]);
	}
	s->releases++;
	if (q->n_blocks > keep)
		q->n_blocks = keep;
	if (q->n_published > full)
		q->n_published = full;
	if (q->n_sent > scheduler_blocks_for(s, n_tokens))
		q->n_sent = scheduler_blocks_for(s, n_tokens);
	q->n_computed = n_tokens;
	q->truncate = true;
	if (q->decoding && n_tokens + 1 < q->n_tokens) {
		q->decoding = false;
		s->lane_seqs[q->lane]--;
		r->n_prefilling++;
	}
	return STATUS_OK;
}

// ---- epochs

void scheduler_suspend(struct scheduler *s)
{
	s->suspended = true;
}

static bool fits(const struct scheduler *s, uint32_t n_tokens)
{
	for (uint32_t g = 0; g < s->o.n_groups; g++)
		if (scheduler_blocks_for(s, n_tokens) > block_pool_count(s->pools[g]))
			return false;
	return true;
}

void scheduler_begin_epoch(struct scheduler *s, uint32_t epoch, const uint32_t n_blocks[MAX_KV_GROUPS])
{
	ASSERT(epoch != 0);
	s->epoch = epoch;
	s->suspended = false;
	s->next_step = 1;
	s->flight_first = s->n_flights = 0;
	if (!PLANTED(ENDS_KEPT_OVER_EPOCH))
		s->n_ends = 0;
	s->next_lane = 0;
	memset(s->lane_in_flight, 0, sizeof s->lane_in_flight);
	memset(s->lane_seqs, 0, sizeof s->lane_seqs);
	s->n_running = s->n_draining = s->n_waiting = 0;
	s->queue_head = s->queue_tail = NULL;
	s->releases++;
	s->n_free_slots = s->o.max_seqs;
	for (uint32_t i = 0; i < s->o.max_seqs; i++)
		s->free_slots[i] = s->o.max_seqs - 1 - i;
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		block_pool_destroy(&s->pools[g]);
		s->pools[g] = block_pool_create(
			&(struct block_pool_options){.n_blocks = n_blocks[g], .block_size = s->o.block_size});
	}
	for (struct request *r = s->oldest, *next; r != NULL; r = next) {
		next = r->next;
		r->in_flight = r->n_prefilling = 0;
		r->prefilled_step = 0;
		for (uint32_t i = 0; i < r->n_choices; i++) {
			struct sequence *q = &r->choices[i];
			q->in_flight = q->n_refs = 0;
			q->decoding = q->truncate = false;
			q->n_blocks = q->n_sent = q->n_published = q->n_computed = q->lost = 0;
			if (q->state == SEQ_FINISHED)
				continue;
			if (PLANTED(REPLAY_FORGETS))
				q->n_tokens = r->n_prompt;
			scheduler_queue_insert(s, q);
			if (!fits(s, q->n_tokens))
				scheduler_finish(s, q, FINISH_FAILED, NULL);
		}
		scheduler_release_request(s, r);
	}
}

// ---- events and statistics

bool scheduler_pop_event(struct scheduler *s, struct scheduler_event *out)
{
	if (s->n_events == 0)
		return false;
	const struct scheduler_event *e = &s->events[s->event_first];
	// Without the unused alternatives: most tokens have none, and they are nine tenths of the struct.
	memcpy(out, e, offsetof(struct scheduler_event, top_ids));
	memcpy(out->top_ids, e->top_ids, e->n_top * sizeof *e->top_ids);
	memcpy(out->top_logprobs, e->top_logprobs, e->n_top * sizeof *e->top_logprobs);
	out->finish = e->finish;
	out->n_cached = e->n_cached;
	s->event_first = (s->event_first + 1) % s->event_capacity;
	s->n_events--;
	return true;
}

void scheduler_get_stats(const struct scheduler *s, struct scheduler_stats *out)
{
	*out = (struct scheduler_stats){
		.n_running = s->n_running,
		.n_waiting = s->n_waiting + s->n_draining,
		.n_queued_requests = s->n_queued_requests,
		.preemptions = s->preemptions,
		.recomputed_tokens = s->recomputed_tokens,
		.prefix_queries = s->prefix_queries,
		.prefix_hits = s->prefix_hits,
		.prompt_tokens = s->prompt_tokens,
		.generation_tokens = s->generation_tokens,
		.steps_in_flight = s->n_flights,
		.micro_batches = s->micro_batches,
	};
	for (uint32_t g = 0; g < s->o.n_groups && s->epoch != 0; g++) {
		out->blocks_total += block_pool_count(s->pools[g]);
		out->blocks_free += block_pool_free_count(s->pools[g]);
	}
}

bool scheduler_idle(const struct scheduler *s)
{
	return s->n_waiting == 0 && s->n_running == 0 && s->n_draining == 0 && s->n_flights == 0;
}
