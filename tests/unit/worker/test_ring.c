// What a worker tells about itself: totals, the step in hand, and trace events that are bounded and never block.
#include <criterion/criterion.h>

#include "worker/ring.h"

static struct trace_event events[MAX_TRACE_EVENTS];

Test(ring, busy_and_waiting_time_are_told_apart)
{
	struct ring *r;
	struct message_heartbeat h;
	ring_create(&r);
	ring_add(r, TRACE_WAIT_STEP, 1, 0, 100, 150, 0);
	ring_add(r, TRACE_WAIT_DATA, 1, 0, 150, 170, 0);
	ring_add(r, TRACE_COMPUTE, 1, 0, 170, 270, 4);
	ring_add(r, TRACE_SAMPLE, 1, 0, 270, 275, 4);
	ring_report(r, &h, events);
	cr_expect_eq(h.wait_us, 70);
	cr_expect_eq(h.busy_us, 105);
	cr_expect_eq(h.n_events, 0, "nothing is traced unless asked for");
	ring_destroy(&r);
}

Test(ring, a_step_in_hand_is_seen_until_it_is_done)
{
	struct ring *r;
	struct message_heartbeat h;
	ring_create(&r);
	ring_step_taken(r, 7);
	ring_report(r, &h, events);
	cr_expect_eq(h.last_step_taken, 7);
	cr_expect_eq(h.last_step_done, 0);
	ring_step_done(r, 7, 12);
	ring_report(r, &h, events);
	cr_expect_eq(h.last_step_done, 7);
	cr_expect_eq(h.holding_us, 0);
	cr_expect_eq(h.rows, 12);
	ring_begin_epoch(r);
	ring_report(r, &h, events);
	cr_expect_eq(h.last_step_taken, 0);
	cr_expect_eq(h.rows, 12, "totals outlive an epoch");
	ring_destroy(&r);
}

Test(ring, events_are_taken_once_and_the_oldest_make_room)
{
	struct ring *r;
	struct message_heartbeat h;
	ring_create(&r);
	ring_set_trace(r, true);
	for (uint64_t i = 0; i < MAX_TRACE_EVENTS + 10; i++)
		ring_add(r, TRACE_COMPUTE, i, 0, i, i + 1, 1);
	ring_report(r, &h, events);
	cr_expect_eq(h.n_events, MAX_TRACE_EVENTS);
	cr_expect_eq(h.events[0].step, 10);
	cr_expect_eq(h.events[MAX_TRACE_EVENTS - 1].step, MAX_TRACE_EVENTS + 9);
	ring_report(r, &h, events);
	cr_expect_eq(h.n_events, 0);
	ring_destroy(&r);
}
