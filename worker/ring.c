// See ring.h.
#include "worker/ring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct ring {
	pthread_mutex_t lock;
	bool trace;
	uint64_t last_taken, last_done, busy_us, wait_us, rows, taken_at_us;
	struct trace_event events[MAX_TRACE_EVENTS];
	uint32_t head, count;
	uint64_t dropped;
};

uint64_t ring_now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

void ring_create(struct ring **out)
{
	struct ring *r = xcalloc(1, sizeof *r);
	pthread_mutex_init(&r->lock, NULL);
	*out = r;
}

void ring_destroy(struct ring **ring)
{
	if (!*ring)
		return;
	pthread_mutex_destroy(&(*ring)->lock);
	free(*ring);
	*ring = NULL;
}

void ring_set_trace(struct ring *r, bool on)
{
	pthread_mutex_lock(&r->lock);
	r->trace = on;
	pthread_mutex_unlock(&r->lock);
}

void ring_begin_epoch(struct ring *r)
{
	pthread_mutex_lock(&r->lock);
	r->last_taken = r->last_done = r->taken_at_us = 0;
	pthread_mutex_unlock(&r->lock);
}

void ring_step_taken(struct ring *r, uint64_t step)
{
	pthread_mutex_lock(&r->lock);
	r->last_taken = step;
	r->taken_at_us = ring_now_us();
	pthread_mutex_unlock(&r->lock);
}

void ring_step_done(struct ring *r, uint64_t step, uint32_t n_rows)
{
	pthread_mutex_lock(&r->lock);
	r->last_done = step;
	r->taken_at_us = 0;
	r->rows += n_rows;
	pthread_mutex_unlock(&r->lock);
}

void ring_add(struct ring *r, uint32_t kind, uint64_t step, uint32_t micro_batch, uint64_t begin_us, uint64_t end_us,
              uint32_t n_rows)
{
	pthread_mutex_lock(&r->lock);
	if (kind == TRACE_WAIT_STEP || kind == TRACE_WAIT_DATA)
		r->wait_us += end_us - begin_us;
	else
		r->busy_us += end_us - begin_us;
	if (r->trace) {
		if (r->count == MAX_TRACE_EVENTS) {
			r->head = (r->head + 1) % MAX_TRACE_EVENTS;
			r->count--;
			r->dropped++;
		}
		r->events[(r->head + r->count++) % MAX_TRACE_EVENTS] = (struct trace_event){
			.step = step, .micro_batch = micro_batch, .begin_us = begin_us, .end_us = end_us, .kind = kind,
			.n_rows = n_rows};
	}
	pthread_mutex_unlock(&r->lock);
}

void ring_report(struct ring *r, struct message_heartbeat *out, struct trace_event *events)
{
	memset(out, 0, sizeof *out);
	pthread_mutex_lock(&r->lock);
	out->last_step_taken = r->last_taken;
	out->last_step_done = r->last_done;
	uint64_t now = ring_now_us();
	out->holding_us = r->taken_at_us && now > r->taken_at_us ? now - r->taken_at_us : 0;
	out->busy_us = r->busy_us;
	out->wait_us = r->wait_us;
	out->rows = r->rows;
	for (uint32_t i = 0; i < r->count; i++)
		events[i] = r->events[(r->head + i) % MAX_TRACE_EVENTS];
	out->n_events = r->count;
	out->events = r->count ? events : NULL;
	r->head = r->count = 0;
	pthread_mutex_unlock(&r->lock);
}
