// What this worker did, per step: totals for heartbeats and, under --trace, events. Written by the compute thread, read by
// the link thread. The surprising decision: when nobody takes events in time the oldest are dropped and counted, so that
// tracing never slows a step.
#ifndef STAGECOACH_WORKER_RING_H
#define STAGECOACH_WORKER_RING_H

#include "proto/message.h"

struct ring;

void ring_create(struct ring **out);
void ring_destroy(struct ring **);
void ring_set_trace(struct ring *, bool on);
uint64_t ring_now_us(void); // CLOCK_MONOTONIC

void ring_begin_epoch(struct ring *);                         // steps count from 1 again
void ring_step_taken(struct ring *, uint64_t step);           // from here on a step is in hand
void ring_step_done(struct ring *, uint64_t step, uint32_t n_rows);
// One stretch of work or waiting; kind is TRACE_*. TRACE_WAIT_* adds to waiting, the others to busy time.
void ring_add(struct ring *, uint32_t kind, uint64_t step, uint32_t micro_batch, uint64_t begin_us, uint64_t end_us,
              uint32_t n_rows);
// Fills everything but queue_length and rss_bytes. Events go to `events` [MAX_TRACE_EVENTS] and are taken out.
void ring_report(struct ring *, struct message_heartbeat *out, struct trace_event *events);

#endif
