// The worker's link to its coordinator, on a thread of its own: control messages both ways, steps in, heartbeats every 200
// ms from the hello on, and signs of life for the launcher. The surprising decision: the thread also ends the
// process if the coordinator is gone and the compute thread does not come back to notice.
#ifndef STAGECOACH_WORKER_LINK_H
#define STAGECOACH_WORKER_LINK_H

#include "proto/message.h"
#include "worker/keys.h"
#include "worker/ring.h"

enum { LINK_QUEUE_STEPS = 256 }; // a worker that has more waiting does not follow and fails

struct worker_link;

struct worker_link_options {
	const char *endpoint;      // "ipc://..." or "tcp://..."
	const struct worker_keys *keys; // for both channels; copied; NULL = none
	unsigned gone_after_ms;    // how long a lost coordinator is waited for
	unsigned first_after_ms;   // and one that was never reached; 0 = for ever, since a launcher watches the start
	int watch_fd;              // a byte every 250 ms; -1 = none
	struct ring *ring;         // for heartbeats; borrowed
	// Called on the link thread when something came that the compute thread should not be kept from by waiting for data:
	// a newer epoch, or the end.
	void (*interrupt)(void *user);
	void *user;
};

enum worker_link_event {
	LINK_NONE,     // the time is over
	LINK_CONTROL,  // *out is ASSIGN, CONFIGURE, DRAIN or ERROR
	LINK_STEP,     // *out is the next step of the epoch
	LINK_BROKEN,   // a gap, an overflow or a step that does not decode; see error
	LINK_BACK,     // the coordinator was lost and something answers there again: say hello
	LINK_GONE,     // the coordinator is gone
};

enum status worker_link_create(struct worker_link **out, const struct worker_link_options *, struct error *);
// Sends what is queued, waiting at most a second.
void worker_link_destroy(struct worker_link **);
// Any thread. STATUS_INVALID: the message does not pass its own checks. STATUS_BUSY: the queue is full.
enum status worker_link_send(struct worker_link *, const struct message *, struct error *);
// Takes steps of `epoch` from `endpoint` from now on and answers its probes with READY; drops all older steps.
void worker_link_subscribe(struct worker_link *, const char *endpoint, uint32_t epoch, const struct message_limits *);
// Whether a control message (or the end) waits; for breaking off something long.
bool worker_link_control_waits(struct worker_link *);
// Forgets the steps of the current epoch and takes no more (its pipeline is broken).
void worker_link_unsubscribe(struct worker_link *);
// Compute thread only: waits for the next thing to do; control messages first. *out is the caller's to free with
// message_free().
enum worker_link_event worker_link_wait(struct worker_link *, unsigned timeout_ms, struct message *out, struct error *);
// Compute thread only: the step that worker_link_wait() would give next, or NULL; borrowed until worker_link_wait().
const struct message *worker_link_peek_step(struct worker_link *);

#endif
