// A pipeline of workers as far as the scheduler can tell them from real ones, and a world around it that knows every
// answer beforehand. Tokens are a pure function of their prefix, so replays can be checked; a page remembers, per
// position, the hash of the whole prefix it was written for, and each row reads its context back through its block
// table. So a block that is lost, given away too early or shared wrongly is seen by the first row that reads it.
// The surprising decision: one model runs a step as soon as it is broadcast, because stages run steps in order; only
// results travel late.
#ifndef STAGECOACH_TESTS_PIPELINE_MODEL_H
#define STAGECOACH_TESTS_PIPELINE_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"
#include "coordinator/scheduler.h"
#include "proto/message.h"

#define WANT(cond, ...)                                                                                                \
	do {                                                                                                           \
		if (!(cond)) {                                                                                         \
			fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #cond);                             \
			fprintf(stderr, __VA_ARGS__);                                                                  \
			fputc('\n', stderr);                                                                           \
			abort();                                                                                       \
		}                                                                                                      \
	} while (0)

enum { MODEL_VOCAB = 97, WORLD_FLIGHTS = 2 * MAX_STAGES + 2 };

static inline uint64_t model_mix(uint64_t h, uint64_t v)
{
	h = (h ^ v) * 0xd6e8feb86659fd93ull;
	h ^= h >> 32;
	return h * 0xd6e8feb86659fd93ull;
}

static inline uint32_t model_next_token(uint64_t prefix, uint64_t seed, uint32_t choice)
{
	return (uint32_t)(model_mix(model_mix(prefix, seed), choice + 1) >> 20) % MODEL_VOCAB;
}

// One choice, with all it will ever say.
struct truth {
	uint32_t *tokens;                                // [max_len], as if no token ended it
	uint64_t *hash;                                  // [max_len] of tokens[0..i]
	uint32_t n_prompt, max_len, n_delivered, end_at; // end_at: tokens when an end token or max_len ends it
	enum finish_reason finish;                       // NONE while it runs
	bool finished_without_token;
};

struct order { // a request that was accepted
	struct scheduler_request request;
	uint32_t *prompt, *end_ids;
	struct truth *choices;
	bool cancelled, *stopped;
};

struct model_slot {
	bool known;
	struct order *order;
	uint32_t choice, length, n_table[MAX_KV_GROUPS];
	uint32_t *table[MAX_KV_GROUPS];
};

struct page { // one position of one block
	uint64_t prefix_hash, scope;
};

struct model_ids {
	uint64_t step;
	uint32_t n;
	uint32_t *ids;
};

struct model {
	uint32_t block_size, n_groups, max_seqs, max_context, n_stages, n_blocks[MAX_KV_GROUPS];
	bool prefix_cache;
	uint64_t last_step;
	struct page *pages[MAX_KV_GROUPS];
	struct model_slot *slots;
	struct model_ids ids[WORLD_FLIGHTS]; // by step number
	uint64_t rows_run, rows_read;
};

struct world {
	struct scheduler_options options;
	struct scheduler *scheduler;
	struct model model;
	uint32_t epoch, n_blocks[MAX_KV_GROUPS], min_blocks_ever;
	uint64_t now_us, steps, max_encoded_bytes, tokens_delivered;
	uint32_t prefill_rows, decode_rows, last_decode_rows;
	struct message flights[WORLD_FLIGHTS]; // results under way, oldest first, with tokens allocated
	uint32_t n_flights, most_flights;
	struct order **orders; // [n_orders], id = index + 1
	uint32_t n_orders, orders_capacity;
	uint8_t *buffer;
	size_t buffer_capacity;
	struct message last_step; // decoded; what was broadcast last
};

// ---- workers

static inline void model_reset(struct model *m, const struct scheduler_options *o, const uint32_t *n_blocks)
{
	for (uint32_t i = 0; m->slots != NULL && i < m->max_seqs; i++)
		for (uint32_t g = 0; g < m->n_groups; g++)
			free(m->slots[i].table[g]);
	free(m->slots);
	for (uint32_t g = 0; g < MAX_KV_GROUPS; g++)
		free(m->pages[g]);
	for (uint32_t i = 0; i < WORLD_FLIGHTS; i++)
		free(m->ids[i].ids);
	uint64_t rows_run = m->rows_run, rows_read = m->rows_read;
	*m = (struct model){.block_size = o->block_size,
	                    .n_groups = o->n_groups,
	                    .max_seqs = o->max_seqs,
	                    .max_context = o->max_context,
	                    .n_stages = o->n_stages,
	                    .prefix_cache = o->prefix_cache,
	                    .rows_run = rows_run,
	                    .rows_read = rows_read};
	if (n_blocks == NULL)
		return;
	m->slots = xcalloc(o->max_seqs, sizeof *m->slots);
	for (uint32_t i = 0; i < o->max_seqs; i++)
		for (uint32_t g = 0; g < o->n_groups; g++)
			m->slots[i].table[g] = xcalloc(o->max_context, sizeof(uint32_t));
	for (uint32_t g = 0; g < o->n_groups; g++) {
		m->n_blocks[g] = n_blocks[g];
		m->pages[g] = xcalloc((uint64_t)n_blocks[g] * o->block_size + 1, sizeof(struct page));
	}
}

static inline struct page *model_page(struct model *m, struct model_slot *s, uint32_t g, uint32_t position)
{
	return &m->pages[g][(uint64_t)s->table[g][position / m->block_size] * m->block_size + position % m->block_size];
}

static inline void model_begin(struct world *w, const struct step_new *n)
{
	struct model_slot *s = &w->model.slots[n->slot];
	WANT(!s->known, "slot %u begins twice", n->slot);
	WANT(n->sampling.seed >= 1 && n->sampling.seed <= w->n_orders, "seed %llu",
	     (unsigned long long)n->sampling.seed);
	struct order *o = w->orders[n->sampling.seed - 1];
	WANT(n->sampling.choice < o->request.n_choices && n->n_prompt == o->request.n_prompt, "choice %u, prompt %u",
	     n->sampling.choice, n->n_prompt);
	bool bans = o->request.sampling.min_tokens > 0;
	WANT(n->sampling.n_stop_ids == (bans ? o->request.n_end_ids : 0), "%u stop ids", n->sampling.n_stop_ids);
	s->known = true;
	s->order = o;
	s->choice = n->sampling.choice;
	s->length = 0;
	memset(s->n_table, 0, sizeof s->n_table);
}

static inline void model_history(struct world *w, const struct step_new *n, uint32_t start)
{
	const struct model_slot *s = &w->model.slots[n->slot];
	const struct truth *t = &s->order->choices[s->choice];
	bool penalties = n->sampling.repetition_penalty != 1 || n->sampling.presence_penalty != 0 ||
	                 n->sampling.frequency_penalty != 0;
	WANT(n->n_history == (penalties ? start : 0), "history of %u tokens, start %u", n->n_history, start);
	for (uint32_t i = 0; i < n->n_history; i++)
		WANT(n->history[i] == t->tokens[i], "history token %u", i);
}

// Appends new blocks and runs rows of one sequence; returns the token that its last row samples.
static inline uint32_t model_rows(struct world *w, const struct message_step *m, const struct step_seq *q)
{
	struct model *x = &w->model;
	struct model_slot *s = &x->slots[q->slot];
	WANT(s->known, "slot %u is not known", q->slot);
	const struct truth *t = &s->order->choices[s->choice];
	if (q->truncate) {
		WANT(q->start <= s->length, "cut to %u of %u", q->start, s->length);
		s->length = q->start;
		for (uint32_t g = 0; g < x->n_groups; g++) {
			uint32_t keep = (q->start + x->block_size - 1) / x->block_size;
			if (s->n_table[g] > keep)
				s->n_table[g] = keep;
		}
	}
	WANT(q->not_ahead == s->order->request.not_ahead && !(q->not_ahead && q->by_reference), "slot %u is ahead",
	     q->slot);
	WANT(s->length == q->start, "start %u, length %u", q->start, s->length);
	uint64_t scope = x->prefix_cache ? s->order->request.cache_salt : s->order->request.id << 20;
	for (uint32_t g = 0; g < x->n_groups; g++) {
		for (uint32_t i = 0; i < q->n_blocks[g]; i++)
			s->table[g][s->n_table[g]++] = m->blocks[q->first_block[g] + i];
		uint32_t need = (q->start + q->n_tokens + x->block_size - 1) / x->block_size;
		WANT(s->n_table[g] == need, "group %u has %u blocks, %u tokens", g, s->n_table[g],
		     q->start + q->n_tokens);
	}
	uint32_t next = 0;
	for (uint32_t i = 0; i < q->n_tokens; i++) {
		uint32_t p = q->start + i, token;
		if (q->by_reference) {
			const struct model_ids *ids = &x->ids[q->ref_step % WORLD_FLIGHTS];
			WANT(ids->step == q->ref_step && q->ref_step + 2 * x->n_stages >= x->last_step,
			     "step %llu names step %llu", (unsigned long long)x->last_step,
			     (unsigned long long)q->ref_step);
			WANT(q->ref_row < ids->n, "row %u of %u", q->ref_row, ids->n);
			token = ids->ids[q->ref_row];
		} else {
			token = m->tokens[q->first_token + i];
		}
		WANT(p < t->max_len && token == t->tokens[p],
		     "request %llu choice %u position %u of %u: token %u, expected %u",
		     (unsigned long long)s->order->request.id, s->choice, p, t->max_len, token,
		     p < t->max_len ? t->tokens[p] : 0);
		for (uint32_t g = 0; g < x->n_groups; g++) {
			*model_page(x, s, g, p) = (struct page){.prefix_hash = t->hash[p], .scope = scope};
			for (uint32_t k = 0; k <= p; k++) {
				const struct page *page = model_page(x, s, g, k);
				WANT(page->prefix_hash == t->hash[k] && page->scope == scope,
				     "request %llu choice %u row %u reads a wrong page at position %u (group %u, block "
				     "%u)",
				     (unsigned long long)s->order->request.id, s->choice, p, k, g,
				     s->table[g][k / x->block_size]);
				x->rows_read++;
			}
		}
		x->rows_run++;
		next = model_next_token(model_page(x, s, 0, p)->prefix_hash, s->order->request.sampling.seed,
		                        s->choice);
	}
	s->length += q->n_tokens;
	return next;
}

// Runs a step and makes its result (tokens allocated).
static inline struct message model_run(struct world *w, const struct message *m)
{
	struct model *x = &w->model;
	const struct message_step *step = &m->step_;
	WANT(m->step == x->last_step + 1, "step %llu after %llu", (unsigned long long)m->step,
	     (unsigned long long)x->last_step);
	x->last_step = m->step;
	for (uint32_t i = 0; i < step->n_ends; i++) {
		WANT(x->slots[step->ends[i]].known, "slot %u ends but is not known", step->ends[i]);
		x->slots[step->ends[i]].known = false;
	}
	for (uint32_t i = 0; i < step->n_new; i++)
		model_begin(w, &step->news[i]);
	// A sequence that is new may begin behind blocks that it shares.
	for (uint32_t i = 0; i < step->n_new; i++) {
		uint32_t k = 0;
		while (k < step->n_seqs && step->seqs[k].slot != step->news[i].slot)
			k++;
		WANT(k < step->n_seqs, "slot %u begins without rows", step->news[i].slot);
		x->slots[step->news[i].slot].length = step->seqs[k].start;
		model_history(w, &step->news[i], step->seqs[k].start);
	}
	struct message r = {.type = MESSAGE_STEP_RESULT, .epoch = m->epoch, .step = m->step};
	struct sampled_token *tokens = xcalloc(step->n_seqs + 1, sizeof *tokens);
	struct model_ids *ids = &x->ids[m->step % WORLD_FLIGHTS];
	ids->step = m->step;
	ids->n = 0;
	ids->ids = xrealloc(ids->ids, (step->n_seqs + 1) * sizeof *ids->ids);
	uint32_t *sampled = xcalloc(step->n_seqs + 1, sizeof *sampled); // later rows must not see this step's ids
	w->last_decode_rows = 0;
	for (uint32_t i = 0; i < step->n_seqs; i++) {
		const struct step_seq *q = &step->seqs[i];
		uint32_t token = model_rows(w, step, q);
		bool decode = q->n_tokens == 1 && q->start >= x->slots[q->slot].order->request.n_prompt;
		*(decode ? &w->decode_rows : &w->prefill_rows) += q->n_tokens;
		w->last_decode_rows += decode;
		if (!q->sample)
			continue;
		sampled[r.result.n_tokens] = token;
		tokens[r.result.n_tokens++] = (struct sampled_token){.slot = q->slot, .id = token, .logprob = -1};
	}
	memcpy(ids->ids, sampled, r.result.n_tokens * sizeof *sampled);
	ids->n = r.result.n_tokens;
	free(sampled);
	r.result.micro_batch = step->micro_batch;
	r.result.tokens = tokens;
	return r;
}

// ---- world

static inline void world_create(struct world *w, const struct scheduler_options *o, uint32_t n_blocks)
{
	*w = (struct world){.options = *o, .epoch = 1, .min_blocks_ever = n_blocks};
	struct error e;
	WANT(scheduler_create(&w->scheduler, o, &e) == STATUS_OK, "%s", e.text);
	for (uint32_t g = 0; g < MAX_KV_GROUPS; g++)
		w->n_blocks[g] = n_blocks;
	model_reset(&w->model, o, w->n_blocks);
	scheduler_begin_epoch(w->scheduler, w->epoch, w->n_blocks);
}

static inline void world_destroy(struct world *w)
{
	scheduler_destroy(&w->scheduler);
	for (uint32_t i = 0; i < w->n_flights; i++)
		free((void *)w->flights[i].result.tokens);
	for (uint32_t i = 0; i < w->n_orders; i++) {
		struct order *o = w->orders[i];
		for (uint32_t c = 0; c < o->request.n_choices; c++) {
			free(o->choices[c].tokens);
			free(o->choices[c].hash);
		}
		free(o->choices);
		free(o->stopped);
		free(o->prompt);
		free(o->end_ids);
		free(o);
	}
	model_reset(&w->model, &w->options, NULL);
	message_free(&w->last_step);
	free(w->orders);
	free(w->buffer);
}

static inline void world_foresee(const struct scheduler_request *r, uint32_t choice, struct truth *t)
{
	t->n_prompt = r->n_prompt;
	t->max_len = r->n_prompt + r->max_tokens;
	t->tokens = xcalloc(t->max_len, sizeof *t->tokens);
	t->hash = xcalloc(t->max_len, sizeof *t->hash);
	t->end_at = t->max_len;
	uint64_t h = 1;
	for (uint32_t i = 0; i < t->max_len; i++) {
		uint32_t token = i < r->n_prompt ? r->prompt[i] : model_next_token(h, r->sampling.seed, choice);
		t->tokens[i] = token;
		t->hash[i] = h = model_mix(h, token + 1);
		for (uint32_t k = 0; k < r->n_end_ids && i >= r->n_prompt && t->end_at == t->max_len; k++)
			if (r->end_ids[k] == token)
				t->end_at = i + 1;
	}
}

// Adds a request; its id and seed are its number, from 1. Returns 0 if it is refused (with *e).
static inline uint64_t world_add(struct world *w, struct scheduler_request r, struct error *e)
{
	r.id = r.sampling.seed = w->n_orders + 1;
	if (r.sampling.repetition_penalty == 0)
		r.sampling.repetition_penalty = 1;
	r.sampling.n_logprobs = -1;
	if (scheduler_add(w->scheduler, &r, w->now_us, e) != STATUS_OK)
		return 0;
	struct order *o = xcalloc(1, sizeof *o);
	o->prompt = xcalloc(r.n_prompt, sizeof *o->prompt);
	memcpy(o->prompt, r.prompt, r.n_prompt * sizeof *o->prompt);
	o->end_ids = xcalloc(r.n_end_ids + 1, sizeof *o->end_ids);
	if (r.n_end_ids > 0)
		memcpy(o->end_ids, r.end_ids, r.n_end_ids * sizeof *o->end_ids);
	r.prompt = o->prompt;
	r.end_ids = o->end_ids;
	if (r.n_prompt + r.max_tokens > w->options.max_context)
		r.max_tokens = w->options.max_context - r.n_prompt;
	o->request = r;
	o->choices = xcalloc(r.n_choices, sizeof *o->choices);
	o->stopped = xcalloc(r.n_choices, sizeof *o->stopped);
	for (uint32_t c = 0; c < r.n_choices; c++)
		world_foresee(&r, c, &o->choices[c]);
	if (w->n_orders == w->orders_capacity) {
		w->orders_capacity = w->orders_capacity * 2 + 16;
		w->orders = xrealloc(w->orders, w->orders_capacity * sizeof *w->orders);
	}
	w->orders[w->n_orders++] = o;
	return r.id;
}

static inline void world_check_finish(struct world *w, struct order *o, uint32_t choice, struct truth *t)
{
	uint32_t total = t->n_prompt + t->n_delivered;
	uint64_t room = (uint64_t)w->min_blocks_ever * w->options.block_size;
	switch (t->finish) {
	case FINISH_STOP:
		WANT(t->finished_without_token ? o->stopped[choice] : total == t->end_at,
		     "request %llu stops at %u of %u", (unsigned long long)o->request.id, total, t->end_at);
		break;
	case FINISH_LENGTH: // or as much as the pool holds
		WANT((total == t->end_at && total == t->max_len) || total >= room, "request %llu ends at %u of %u",
		     (unsigned long long)o->request.id, total, t->end_at);
		break;
	case FINISH_CANCELLED:
		WANT(o->cancelled, "request %llu was not cancelled", (unsigned long long)o->request.id);
		break;
	case FINISH_FAILED:
		WANT(total > room, "request %llu fails with %u tokens", (unsigned long long)o->request.id, total);
		break;
	case FINISH_NONE:
		break;
	}
}

static inline void world_drain_events(struct world *w)
{
	struct scheduler_event e;
	while (scheduler_pop_event(w->scheduler, &e)) {
		WANT(e.request_id >= 1 && e.request_id <= w->n_orders, "event of request %llu",
		     (unsigned long long)e.request_id);
		struct order *o = w->orders[e.request_id - 1];
		WANT(e.choice < o->request.n_choices, "choice %u", e.choice);
		struct truth *t = &o->choices[e.choice];
		WANT(t->finish == FINISH_NONE, "request %llu choice %u: event after its end",
		     (unsigned long long)e.request_id, e.choice);
		WANT(e.has_token || e.finish != FINISH_NONE, "an empty event");
		if (e.has_token) {
			uint32_t at = t->n_prompt + t->n_delivered++;
			WANT(at < t->end_at && e.token == t->tokens[at], "request %llu choice %u: token %u is %u",
			     (unsigned long long)e.request_id, e.choice, at, e.token);
			WANT(at + 1 < t->end_at || e.finish != FINISH_NONE, "request %llu choice %u does not end at %u",
			     (unsigned long long)e.request_id, e.choice, at);
			w->tokens_delivered++;
		}
		t->finish = e.finish;
		t->finished_without_token = !e.has_token;
		world_check_finish(w, o, e.choice, t);
	}
}

// Broadcasts the next step, through the codec, to the model. False: none now.
static inline bool world_step(struct world *w)
{
	struct message m;
	bool some = scheduler_next_step(w->scheduler, w->now_us, &m);
	world_drain_events(w);
	scheduler_check(w->scheduler);
	if (!some)
		return false;
	struct error e;
	size_t len;
	WANT(message_encode(&m, &w->buffer, &len, &w->buffer_capacity, &e) == STATUS_OK, "%s", e.text);
	if (len > w->max_encoded_bytes)
		w->max_encoded_bytes = len;
	struct message_limits limits = {.max_seqs = w->options.max_seqs,
	                                .max_batch_tokens = w->options.max_batch_tokens,
	                                .max_context = w->options.max_context,
	                                .vocab_size = MODEL_VOCAB,
	                                .n_groups = w->options.n_groups};
	memcpy(limits.n_blocks, w->n_blocks, sizeof limits.n_blocks);
	message_free(&w->last_step);
	WANT(message_decode(&w->last_step, w->buffer, len, &limits, &e) == STATUS_OK, "%s", e.text);
	WANT(w->n_flights < 2 * w->options.n_stages, "%u steps in flight", w->n_flights);
	w->flights[w->n_flights++] = model_run(w, &w->last_step);
	if (w->n_flights > w->most_flights)
		w->most_flights = w->n_flights;
	w->steps++;
	return true;
}

// The oldest result arrives, through the codec. False: none under way.
static inline bool world_report(struct world *w)
{
	if (w->n_flights == 0)
		return false;
	struct message r = w->flights[0], copy;
	memmove(w->flights, w->flights + 1, --w->n_flights * sizeof r);
	struct error e;
	size_t len;
	WANT(message_encode(&r, &w->buffer, &len, &w->buffer_capacity, &e) == STATUS_OK, "%s", e.text);
	WANT(message_decode(&copy, w->buffer, len, NULL, &e) == STATUS_OK, "%s", e.text);
	WANT(scheduler_apply_result(w->scheduler, &copy, w->now_us, &e) == STATUS_OK, "%s", e.text);
	message_free(&copy);
	free((void *)r.result.tokens);
	world_drain_events(w);
	scheduler_check(w->scheduler);
	return true;
}

static inline void world_cancel(struct world *w, uint64_t id)
{
	w->orders[id - 1]->cancelled = true;
	scheduler_cancel(w->scheduler, id);
	world_drain_events(w);
	scheduler_check(w->scheduler);
}

static inline void world_stop_choice(struct world *w, uint64_t id, uint32_t choice)
{
	if (choice < w->orders[id - 1]->request.n_choices)
		w->orders[id - 1]->stopped[choice] = true;
	scheduler_stop_choice(w->scheduler, id, choice);
	world_drain_events(w);
	scheduler_check(w->scheduler);
}

// A worker died: nothing of the old epoch is left on any worker. Results that were under way may come later.
static inline void world_new_epoch(struct world *w, uint32_t n_blocks, bool deliver_stale)
{
	w->epoch++;
	if (n_blocks < w->min_blocks_ever)
		w->min_blocks_ever = n_blocks;
	for (uint32_t g = 0; g < MAX_KV_GROUPS; g++)
		w->n_blocks[g] = n_blocks;
	model_reset(&w->model, &w->options, w->n_blocks);
	scheduler_begin_epoch(w->scheduler, w->epoch, w->n_blocks);
	world_drain_events(w);
	scheduler_check(w->scheduler);
	for (uint32_t i = 0; i < w->n_flights; i++) {
		struct error e;
		if (deliver_stale)
			WANT(scheduler_apply_result(w->scheduler, &w->flights[i], w->now_us, &e) == STATUS_OK, "%s",
			     e.text);
		free((void *)w->flights[i].result.tokens);
	}
	w->n_flights = 0;
	world_drain_events(w);
}

static inline bool world_done(const struct world *w, uint64_t id)
{
	const struct order *o = w->orders[id - 1];
	for (uint32_t c = 0; c < o->request.n_choices; c++)
		if (o->choices[c].finish == FINISH_NONE)
			return false;
	return true;
}

// Broadcasts whatever can be, then takes one result, until all is done; at most so many rounds.
static inline void world_finish(struct world *w, uint64_t most_rounds)
{
	for (uint64_t round = 0; !scheduler_idle(w->scheduler); round++) {
		WANT(round < most_rounds, "not done after %llu rounds", (unsigned long long)round);
		while (world_step(w))
			;
		w->now_us += 1000;
		WANT(world_report(w) || scheduler_idle(w->scheduler), "nothing in flight, nothing to do, not idle");
	}
	for (uint32_t i = 0; i < w->n_orders; i++)
		WANT(world_done(w, i + 1), "request %u has not ended", i + 1);
	struct scheduler_stats stats;
	scheduler_get_stats(w->scheduler, &stats);
	WANT(stats.blocks_free == stats.blocks_total, "%llu of %llu blocks are free",
	     (unsigned long long)stats.blocks_free, (unsigned long long)stats.blocks_total);
}

#endif
