// Requests on their way in and events on their way out. See engine.h. The surprising decision: whether a request can be
// taken is decided where it is submitted, from a copy of the queue's length that counts what is still in the inbox, so
// that a refusal is an answer and not a callback.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/engine_internal.h"

enum { FIRST_ENTRIES = 1024 };

void engine_requests_init(struct engine *e)
{
	e->entry_mask = FIRST_ENTRIES - 1;
	e->entries = xcalloc(FIRST_ENTRIES, sizeof *e->entries);
	e->events = xcalloc(EVENT_BATCH, sizeof *e->events);
}

void engine_requests_free(struct engine *e)
{
	for (uint32_t i = 0; e->entries && i <= e->entry_mask; i++)
		if (e->entries[i].id)
			free(e->entries[i].ended);
	for (uint32_t i = 0; i < e->n_inbox; i++)
		free(e->inbox[i].request);
	free(e->entries);
	free(e->events);
	free(e->inbox);
	free(e->commands);
}

// ---- table of requests by id: open addressing, linear probing, at most half full ------------------------------------

static uint32_t slot_of(const struct engine *e, uint64_t id)
{
	return (uint32_t)(id * 0x9e3779b97f4a7c15u >> 32) & e->entry_mask;
}

static struct request_entry *find(struct engine *e, uint64_t id)
{
	for (uint32_t i = slot_of(e, id); e->entries[i].id; i = (i + 1) & e->entry_mask)
		if (e->entries[i].id == id)
			return &e->entries[i];
	return NULL;
}

static void place(struct engine *e, const struct request_entry *r)
{
	uint32_t i = slot_of(e, r->id);
	while (e->entries[i].id)
		i = (i + 1) & e->entry_mask;
	e->entries[i] = *r;
}

static void insert(struct engine *e, const struct request_entry *r)
{
	if ((e->n_entries + 1) * 2 > e->entry_mask) {
		struct request_entry *old = e->entries;
		uint32_t n = e->entry_mask + 1;
		e->entry_mask = 2 * n - 1;
		e->entries = xcalloc(2ul * n, sizeof *e->entries);
		for (uint32_t i = 0; i < n; i++)
			if (old[i].id)
				place(e, &old[i]);
		free(old);
	}
	place(e, r);
	e->n_entries++;
}

// Takes an entry out and moves those after it that would no longer be found.
static void take_out(struct engine *e, struct request_entry *r)
{
	uint32_t hole = (uint32_t)(r - e->entries);
	free(r->ended);
	e->entries[hole].id = 0;
	e->n_entries--;
	for (uint32_t i = (hole + 1) & e->entry_mask; e->entries[i].id; i = (i + 1) & e->entry_mask) {
		struct request_entry moved = e->entries[i];
		e->entries[i].id = 0;
		place(e, &moved);
	}
}

// ---- events --------------------------------------------------------------------------------------------------------

// A run of events of one request.
static void hand_over(struct engine *e, const struct scheduler_event *events, uint32_t n)
{
	struct request_entry *r = find(e, events[0].request_id);
	if (!r)
		return;
	for (uint32_t i = 0; i < n; i++)
		if (events[i].finish != FINISH_NONE && events[i].choice < r->n_choices && !r->ended[events[i].choice]) {
			r->ended[events[i].choice] = 1;
			r->n_open--;
		}
	engine_events_fn fn = r->on_events;
	void *user = r->user;
	if (r->n_open == 0)
		take_out(e, r);
	fn(user, events, n);
}

void engine_deliver(struct engine *e)
{
	if (!e->scheduler)
		return;
	for (;;) {
		uint32_t n = 0;
		bool token = false;
		while (n < EVENT_BATCH && scheduler_pop_event(e->scheduler, &e->events[n])) {
			token |= e->events[n].has_token;
			n++;
		}
		if (!n)
			return;
		if (token)
			recovery_event(e->recovery, &(struct recovery_event){.kind = EVENT_TOKEN}, engine_now_us());
		for (uint32_t i = 0, k; i < n; i = k) {
			for (k = i + 1; k < n && e->events[k].request_id == e->events[i].request_id; k++)
				;
			hand_over(e, &e->events[i], k - i);
		}
	}
}

static void end_request(struct engine *e, uint64_t id, enum finish_reason finish)
{
	struct request_entry *r = find(e, id);
	uint32_t n = r ? r->n_choices : 0;
	for (uint32_t c = 0; c < n && (r = find(e, id)); c++)
		if (!r->ended[c])
			hand_over(e, &(struct scheduler_event){.request_id = id, .choice = c, .finish = finish}, 1);
}

void engine_end_all(struct engine *e, enum finish_reason finish)
{
	uint32_t n = 0;
	uint64_t *ids = xcalloc(e->n_entries, sizeof *ids);
	for (uint32_t i = 0; i <= e->entry_mask; i++)
		if (e->entries[i].id)
			ids[n++] = e->entries[i].id;
	for (uint32_t i = 0; i < n; i++)
		end_request(e, ids[i], finish);
	free(ids);
}

// ---- inbox ---------------------------------------------------------------------------------------------------------

static void take_submit(struct engine *e, struct command *c)
{
	struct error error;
	struct request_entry r = {
		.id = c->id, .on_events = c->on_events, .user = c->user, .n_choices = c->request->n_choices,
		.n_open = c->request->n_choices, .ended = xcalloc(c->request->n_choices, 1),
	};
	insert(e, &r);
	if (e->failed || e->ended) {
		end_request(e, c->id, FINISH_FAILED);
	} else if (scheduler_add(e->scheduler, c->request, engine_now_us(), &error) != STATUS_OK) {
		log_warn("a request was taken that cannot be run: %s", error.text);
		end_request(e, c->id, FINISH_FAILED);
	}
	free(c->request);
}

void engine_take_commands(struct engine *e)
{
	uint64_t count;
	ssize_t got = read(e->wake_fd, &count, sizeof count);
	(void)got;
	pthread_mutex_lock(&e->lock);
	struct command *commands = e->inbox;
	uint32_t n = e->n_inbox, capacity = e->inbox_capacity, submits = 0;
	e->inbox = e->commands;
	e->inbox_capacity = e->commands_capacity;
	e->n_inbox = 0;
	pthread_mutex_unlock(&e->lock);
	e->commands = commands;
	e->commands_capacity = capacity;
	for (uint32_t i = 0; i < n; i++) {
		struct command *c = &commands[i];
		switch (c->kind) {
		case COMMAND_SUBMIT:
			take_submit(e, c);
			submits++;
			break;
		case COMMAND_CANCEL:
			if (e->scheduler && !e->failed)
				scheduler_cancel(e->scheduler, c->id);
			break;
		case COMMAND_STOP_CHOICE:
			if (e->scheduler && !e->failed)
				scheduler_stop_choice(e->scheduler, c->id, c->choice);
			break;
		}
	}
	if (!n)
		return;
	struct scheduler_stats stats;
	pthread_mutex_lock(&e->lock);
	e->submits_pending -= submits;
	if (e->scheduler) {
		scheduler_get_stats(e->scheduler, &stats);
		e->info.stats = stats;
	}
	pthread_mutex_unlock(&e->lock);
}

// ---- any thread ----------------------------------------------------------------------------------------------------

static void post(struct engine *e, const struct command *c) // under lock
{
	if (e->n_inbox == e->inbox_capacity) {
		e->inbox_capacity = e->inbox_capacity ? 2 * e->inbox_capacity : 64;
		e->inbox = xrealloc(e->inbox, e->inbox_capacity * sizeof *e->inbox);
	}
	e->inbox[e->n_inbox++] = *c;
	if (e->n_inbox == 1) {
		uint64_t one = 1;
		ssize_t n = write(e->wake_fd, &one, sizeof one);
		(void)n;
	}
}

// Copies an array to *at and moves it on.
static const void *copy_array(uint8_t **at, const void *from, size_t count, size_t size)
{
	if (!count)
		return NULL;
	void *p = memcpy(*at, from, count * size);
	*at += (count * size + 7) & ~(size_t)7;
	return p;
}

static struct scheduler_request *copy_request(const struct scheduler_request *q)
{
	const struct sampling_params *s = &q->sampling;
	size_t words = (size_t)q->n_prompt + q->n_end_ids + 2ul * s->n_bias + s->n_stop_ids + 10;
	struct scheduler_request *r = xmalloc(sizeof *r + words * 4 + 64);
	uint8_t *at = (uint8_t *)(r + 1);
	*r = *q;
	r->prompt = copy_array(&at, q->prompt, q->n_prompt, 4);
	r->end_ids = copy_array(&at, q->end_ids, q->n_end_ids, 4);
	r->sampling.bias_ids = copy_array(&at, s->bias_ids, s->n_bias, 4);
	r->sampling.bias_values = copy_array(&at, s->bias_values, s->n_bias, 4);
	r->sampling.stop_ids = copy_array(&at, s->stop_ids, s->n_stop_ids, 4);
	return r;
}

static enum status may_submit(const struct engine *e, const struct scheduler_request *q, struct error *error)
{
	switch (e->info.state) {
	case ENGINE_READY: case ENGINE_RECOVERING:
		break;
	case ENGINE_STARTING: return error_set(error, STATUS_UNAVAILABLE, "the pipeline is still starting");
	case ENGINE_DRAINING: return error_set(error, STATUS_UNAVAILABLE, "the server is shutting down");
	case ENGINE_FAILED: case ENGINE_ENDED: return error_set(error, STATUS_UNAVAILABLE, "the pipeline has ended");
	}
	if (e->drain || e->stop)
		return error_set(error, STATUS_UNAVAILABLE, "the server is shutting down");
	if (q->n_prompt < 1 || q->n_choices < 1 || q->max_tokens < 1)
		return error_set(error, STATUS_INVALID, "%u prompt tokens, %u choices, %u tokens to generate: expected 1 of each at least",
		                 q->n_prompt, q->n_choices, q->max_tokens);
	if (q->n_prompt >= e->max_context || q->max_tokens > e->max_context - q->n_prompt)
		return error_set(error, STATUS_INVALID, "%u prompt tokens and %u to generate are more than the context of %u", q->n_prompt,
		                 q->max_tokens, e->max_context);
	if (q->n_prompt > e->pool_tokens)
		return error_set(error, STATUS_INVALID, "the prompt has %u tokens, the whole KV cache holds %llu", q->n_prompt,
		                 (unsigned long long)e->pool_tokens);
	if (e->info.stats.n_queued_requests + e->submits_pending >= e->max_queue)
		return error_set(error, STATUS_BUSY, "%u requests are waiting, the most is %u",
		                 e->info.stats.n_queued_requests + e->submits_pending, e->max_queue);
	return STATUS_OK;
}

enum status engine_submit(struct engine *e, const struct scheduler_request *q, engine_events_fn on_events, void *user,
                          struct error *error)
{
	pthread_mutex_lock(&e->lock);
	enum status status = may_submit(e, q, error);
	if (status == STATUS_OK)
		e->submits_pending++;
	pthread_mutex_unlock(&e->lock);
	if (status != STATUS_OK)
		return status;
	struct command c = {.kind = COMMAND_SUBMIT, .id = q->id, .request = copy_request(q), .on_events = on_events, .user = user};
	pthread_mutex_lock(&e->lock);
	post(e, &c);
	pthread_mutex_unlock(&e->lock);
	return STATUS_OK;
}

uint64_t engine_new_id(struct engine *e)
{
	return ++e->next_id;
}

void engine_cancel(struct engine *e, uint64_t request_id)
{
	pthread_mutex_lock(&e->lock);
	post(e, &(struct command){.kind = COMMAND_CANCEL, .id = request_id});
	pthread_mutex_unlock(&e->lock);
}

void engine_stop_choice(struct engine *e, uint64_t request_id, uint32_t choice)
{
	pthread_mutex_lock(&e->lock);
	post(e, &(struct command){.kind = COMMAND_STOP_CHOICE, .id = request_id, .choice = choice});
	pthread_mutex_unlock(&e->lock);
}
