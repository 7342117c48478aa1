// Owns what happens to one sequence: queue, admission, publishing its blocks, preemption, its end. The surprising
// decision: a sequence is let in only if it fits together with the growth expected of those that run, and that
// expectation is learned from sequences that ended, so that preemption is rare without reserving max_tokens for each.
#include <stdlib.h>
#include <string.h>

#include "coordinator/scheduler_internal.h"

enum { LEAST_GROWTH_BLOCKS = 2 };

uint32_t scheduler_blocks_for(const struct scheduler *s, uint32_t n_tokens)
{
	return (uint32_t)(((uint64_t)n_tokens + s->o.block_size - 1) / s->o.block_size);
}

bool scheduler_older(const struct sequence *a, const struct sequence *b)
{
	if (a->request != b->request)
		return a->request->serial < b->request->serial;
	return a->choice < b->choice;
}

// ---- queue

void scheduler_queue_insert(struct scheduler *s, struct sequence *q)
{
	struct sequence *before = NULL, *after = s->queue_head;
	if (s->queue_tail != NULL && scheduler_older(s->queue_tail, q)) {
		before = s->queue_tail;
		after = NULL;
	}
	while (after != NULL && scheduler_older(after, q)) {
		before = after;
		after = after->next;
	}
	q->prev = before;
	q->next = after;
	*(before != NULL ? &before->next : &s->queue_head) = q;
	*(after != NULL ? &after->prev : &s->queue_tail) = q;
	q->state = SEQ_WAITING;
	q->tried_at = 0;
	s->n_waiting++;
}

void scheduler_queue_remove(struct scheduler *s, struct sequence *q)
{
	*(q->prev != NULL ? &q->prev->next : &s->queue_head) = q->next;
	*(q->next != NULL ? &q->next->prev : &s->queue_tail) = q->prev;
	q->prev = q->next = NULL;
	s->n_waiting--;
}

// ---- blocks that can be found by others

static struct block_key key_of(const struct scheduler *s, const struct sequence *q, uint32_t g, uint32_t block,
                               uint64_t parent)
{
	const uint32_t *tokens = q->tokens != NULL ? q->tokens : q->request->prompt;
	return (struct block_key){
		.parent = block == 0 || PLANTED(PARENT_IGNORED) ? 0 : parent,
		.salt = PLANTED(SALT_IGNORED) ? 0 : q->request->cache_salt,
		// Without the prefix cache only the choices of one request find each other's blocks.
		.scope = s->o.prefix_cache || PLANTED(SCOPE_IGNORED) ? 0 : q->request->serial + 1,
		.tokens = tokens + (size_t)block * s->o.block_size,
	};
}

void scheduler_publish(struct scheduler *s, struct sequence *q)
{
	uint32_t valid = q->n_tokens < q->n_computed || PLANTED(PUBLISHED_UNCOMPUTED) ? q->n_tokens : q->n_computed;
	for (; (uint64_t)(q->n_published + 1) * s->o.block_size <= valid; q->n_published++) {
		for (uint32_t g = 0; g < s->o.n_groups; g++) {
			struct block_key key = key_of(s, q, g, q->n_published, q->content[g]);
			q->content[g] = block_pool_publish(s->pools[g], q->blocks[g][q->n_published], &key);
		}
	}
}

// Leading blocks of the sequence that every group has; at least its last known token stays to be computed.
static uint32_t find_prefix(struct scheduler *s, const struct sequence *q)
{
	uint32_t hits = (q->n_tokens - !PLANTED(WHOLE_PROMPT_CACHED)) / s->o.block_size;
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		uint64_t parent = 0;
		for (uint32_t i = 0; i < hits; i++) {
			struct block_key key = key_of(s, q, g, i, parent);
			uint32_t b = block_pool_find(s->pools[g], &key);
			if (b == BLOCK_NONE) {
				hits = i;
				break;
			}
			s->found[g][i] = b;
			parent = block_pool_content(s->pools[g], b);
		}
	}
	return hits;
}

// ---- admission

// Blocks that this sequence will probably still take, at the length that sequences had lately.
static uint64_t expected_growth(const struct scheduler *s, const struct sequence *q, uint32_t n_blocks)
{
	double left = q->max_len - q->n_tokens, made = q->n_tokens - q->request->n_prompt;
	double more = s->mean_output - made;
	if (more < s->mean_output / 4)
		more = s->mean_output / 4;
	if (more < (double)LEAST_GROWTH_BLOCKS * s->o.block_size)
		more = (double)LEAST_GROWTH_BLOCKS * s->o.block_size;
	if (more > left)
		more = left;
	uint32_t at_end = scheduler_blocks_for(s, q->n_tokens + (uint32_t)more);
	return at_end > n_blocks ? at_end - n_blocks : 0;
}

bool scheduler_may_admit(const struct scheduler *s)
{
	// A preempted sequence is older than whatever would be let in while it drains.
	return s->queue_head != NULL && s->n_free_slots > 0 && s->n_draining == 0;
}

struct sequence *scheduler_next_waiting(struct scheduler *s)
{
	if (!scheduler_may_admit(s))
		return NULL;
	// Choices whose prompt is being computed by a sibling wait for its blocks, which are published when a step is
	// complete; those behind them need not.
	for (struct sequence *q = s->queue_head; q != NULL; q = q->next)
		if (q->request->n_prefilling == 0 && q->request->prefilled_step != s->next_step)
			return q->tried_at == s->releases ? NULL : q;
	return NULL;
}

static void insert_running(struct scheduler *s, struct sequence *q)
{
	uint32_t at = s->n_running++;
	for (; at > 0 && scheduler_older(q, s->running[at - 1]); at--)
		s->running[at] = s->running[at - 1];
	s->running[at] = q;
}

static void allocate_tables(struct scheduler *s, struct sequence *q)
{
	if (q->tokens != NULL)
		return;
	uint32_t n_prompt = q->request->n_prompt;
	q->tokens = xmalloc(q->max_len * sizeof *q->tokens);
	memcpy(q->tokens, q->request->prompt, n_prompt * sizeof *q->tokens);
	for (uint32_t g = 0; g < s->o.n_groups; g++)
		q->blocks[g] = xmalloc(scheduler_blocks_for(s, q->max_len) * sizeof *q->blocks[g]);
}

enum status scheduler_admit(struct scheduler *s, struct sequence *q)
{
	uint32_t need = scheduler_blocks_for(s, q->n_tokens);
	uint64_t reserve = 0;
	if (s->n_running > 0) {
		reserve = expected_growth(s, q, need);
		for (uint32_t i = 0; i < s->n_running; i++)
			reserve += expected_growth(s, s->running[i], s->running[i]->n_blocks);
	}
	uint32_t hits = find_prefix(s, q);
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		uint64_t take = need - hits;
		for (uint32_t i = 0; i < hits; i++)
			take += block_pool_holders(s->pools[g], s->found[g][i]) == 0 && !PLANTED(CACHED_COUNTED_FREE);
		if (take + reserve > block_pool_free_count(s->pools[g])) {
			q->tried_at = s->releases;
			return STATUS_BUSY;
		}
	}
	allocate_tables(s, q);
	for (uint32_t g = 0; g < s->o.n_groups; g++) {
		for (uint32_t i = 0; i < hits; i++) {
			q->blocks[g][i] = s->found[g][i];
			if (!PLANTED(SHARED_NOT_HELD) || block_pool_holders(s->pools[g], s->found[g][i]) == 0)
				block_pool_hold(s->pools[g], s->found[g][i]);
		}
		if (hits > 0)
			q->content[g] = block_pool_content(s->pools[g], s->found[g][hits - 1]);
		for (uint32_t i = hits; i < need; i++) {
			q->blocks[g][i] = block_pool_take(s->pools[g]);
			ASSERT(q->blocks[g][i] != BLOCK_NONE);
		}
	}
	struct request *r = q->request;
	uint32_t cached = hits * s->o.block_size;
	if (!r->started) {
		r->started = true;
		r->n_cached = s->o.prefix_cache ? cached : 0;
		s->n_queued_requests--;
		s->prompt_tokens += r->n_prompt;
		s->prefix_queries += s->o.prefix_cache ? r->n_prompt : 0;
		s->prefix_hits += r->n_cached;
	}
	s->recomputed_tokens += q->lost > cached ? q->lost - cached : 0;
	q->lost = 0;
	scheduler_queue_remove(s, q);
	q->state = SEQ_RUNNING;
	q->slot = s->free_slots[--s->n_free_slots];
	q->decoding = q->truncate = false;
	q->n_blocks = need;
	q->n_sent = 0;
	q->n_published = hits;
	q->n_computed = cached;
	r->n_prefilling++;
	insert_running(s, q);
	return STATUS_OK;
}

// ---- ends

void scheduler_stop_running(struct scheduler *s, struct sequence *q)
{
	ASSERT(q->state == SEQ_RUNNING);
	uint32_t at = 0;
	while (s->running[at] != q)
		at++;
	memmove(&s->running[at], &s->running[at + 1], (--s->n_running - at) * sizeof *s->running);
	for (uint32_t g = 0; g < s->o.n_groups; g++)
		for (uint32_t i = q->n_blocks - PLANTED(BLOCK_LOST);
		     i-- > 0;) // children before parents, so that they are evicted first
			block_pool_release(s->pools[g], q->blocks[g][i]);
	s->releases++;
	if (!PLANTED(END_NOT_TOLD) || q->in_flight == 0)
		s->ends[s->n_ends++] = q->slot;
	s->free_slots[s->n_free_slots++] = q->slot;
	if (q->decoding)
		s->lane_seqs[q->lane]--;
	else
		q->request->n_prefilling--;
	q->decoding = false;
	q->n_blocks = q->n_sent = q->n_published = q->n_computed = 0;
}

void scheduler_preempt(struct scheduler *s, struct sequence *q)
{
	q->lost = q->n_computed < q->n_tokens ? q->n_computed : q->n_tokens;
	scheduler_stop_running(s, q);
	s->preemptions++;
	s->mean_output = s->mean_output * 1.125 + 1;
	q->state = SEQ_DRAINING;
	s->n_draining++;
	if (q->in_flight == 0)
		scheduler_drained(s, q);
}

void scheduler_drained(struct scheduler *s, struct sequence *q)
{
	ASSERT(q->state == SEQ_DRAINING && q->in_flight == 0 && q->n_refs == 0);
	s->n_draining--;
	scheduler_queue_insert(s, q);
}

struct scheduler_event *scheduler_push_event(struct scheduler *s, const struct sequence *q)
{
	if (s->n_events == s->event_capacity) {
		uint32_t capacity = s->event_capacity * 2;
		struct scheduler_event *events = xmalloc(capacity * sizeof *events);
		for (uint32_t i = 0; i < s->n_events; i++)
			events[i] = s->events[(s->event_first + i) % s->event_capacity];
		free(s->events);
		s->events = events;
		s->event_capacity = capacity;
		s->event_first = 0;
	}
	struct scheduler_event *e = &s->events[(s->event_first + s->n_events++) % s->event_capacity];
	e->request_id = q->request->id;
	e->choice = q->choice;
	e->has_token = false;
	e->token = 0;
	e->logprob = 0;
	e->n_top = 0;
	e->finish = FINISH_NONE;
	e->n_cached = q->request->n_cached;
	return e;
}

void scheduler_finish(struct scheduler *s, struct sequence *q, enum finish_reason reason, struct scheduler_event *e)
{
	ASSERT(q->state != SEQ_FINISHED);
	if (e == NULL)
		e = scheduler_push_event(s, q);
	e->finish = reason;
	if (reason == FINISH_STOP || reason == FINISH_LENGTH)
		s->mean_output += (q->n_tokens - q->request->n_prompt - s->mean_output) / 16;
	if (q->state == SEQ_RUNNING)
		scheduler_stop_running(s, q);
	else if (q->state == SEQ_WAITING)
		scheduler_queue_remove(s, q);
	else
		s->n_draining--;
	s->releases++; // the queue's head may be another one now
	q->state = SEQ_FINISHED;
	q->n_refs = 0;
	q->request->n_live--;
}

void scheduler_release_request(struct scheduler *s, struct request *r)
{
	if (r->n_live > 0 || r->in_flight > 0)
		return;
	struct request **link = &s->buckets[r->id & s->bucket_mask];
	while (*link != r)
		link = &(*link)->bucket_next;
	*link = r->bucket_next;
	*(r->prev != NULL ? &r->prev->next : &s->oldest) = r->next;
	*(r->next != NULL ? &r->next->prev : &s->newest) = r->prev;
	if (!r->started)
		s->n_queued_requests--;
	for (uint32_t i = 0; i < r->n_choices; i++) {
		free(r->choices[i].tokens);
		for (uint32_t g = 0; g < MAX_KV_GROUPS; g++)
			free(r->choices[i].blocks[g]);
	}
	free(r->choices);
	free(r->prompt);
	free(r->end_ids);
	free((void *)r->sampling.bias_ids);
	free((void *)r->sampling.bias_values);
	free((void *)r->sampling.stop_ids);
	free(r);
}
