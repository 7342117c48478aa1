// The pipeline as HTTP and bench see it: submit token ids, get tokens back. One engine thread owns links, registry,
// recovery and the scheduler; everything else talks to it through a bounded inbox. The surprising decision: tokens are
// handed over in batches (one callback per request and step), and the callback must only enqueue, since it runs on the
// engine thread.
#ifndef STAGECOACH_COORDINATOR_ENGINE_H
#define STAGECOACH_COORDINATOR_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/model.h"
#include "common/options.h"
#include "coordinator/planner.h"
#include "coordinator/scheduler.h"

struct engine;

enum engine_state { ENGINE_STARTING, ENGINE_READY, ENGINE_RECOVERING, ENGINE_DRAINING, ENGINE_FAILED, ENGINE_ENDED };

struct engine_stage_info {
	char label[96];
	char device_name[96];
	uint32_t pid;
	uint32_t first_layer, n_layers;
	uint64_t weight_bytes, kv_bytes, workspace_bytes, rss_bytes;
	double busy_s, wait_s;
	uint64_t last_step;
	bool alive;
	double load_fraction;          // 0..1 while loading
};

struct engine_info {
	enum engine_state state;
	bool healthy;                  // recovery is possible or not needed
	bool ready;                    // a step passed every stage lately or would now
	uint32_t epoch, n_stages;
	uint32_t max_context;          // in force, after the plan
	uint64_t n_blocks;
	uint64_t recoveries;
	struct scheduler_stats stats;
	struct plan plan;
	struct engine_stage_info stage[MAX_STAGES];
	char failure[512];
};

enum status engine_create(struct engine **out, const struct options *, const struct model *, struct error *);
// Starts the engine thread: waits for workers, plans, loads, becomes ready. Returns at once.
enum status engine_start(struct engine *, struct error *);
// Blocks until READY, FAILED or the deadline. Status of the failure (REFUSED, FATAL, ...) with its text.
enum status engine_wait_ready(struct engine *, unsigned timeout_ms, struct error *);
void engine_get_info(struct engine *, struct engine_info *out); // any thread; a consistent copy
enum engine_state engine_get_state(struct engine *);            // the same without the copy, which has some 20 KB

// Any thread. on_events runs on the engine thread with the events of one step for this request (count >= 1); it is
// never called again after each choice has had its finish. `user` stays the caller's.
typedef void (*engine_events_fn)(void *user, const struct scheduler_event *events, uint32_t count);
// STATUS_BUSY: queue full (429). STATUS_UNAVAILABLE: draining or failed (503). STATUS_INVALID: too long (400).
// These checks are made here, synchronously, so that a refusal needs no callback.
enum status engine_submit(struct engine *, const struct scheduler_request *, engine_events_fn, void *user,
                          struct error *); // request.id comes from engine_new_id()
uint64_t engine_new_id(struct engine *);
void engine_cancel(struct engine *, uint64_t request_id);                  // the end event still comes (CANCELLED)
void engine_stop_choice(struct engine *, uint64_t request_id, uint32_t choice);

void engine_drain(struct engine *);     // refuse new, finish running; then state ENDED
void engine_destroy(struct engine **);  // ends workers, joins the thread

#endif
