// Shared by engine*.c only. Everything but the part under `lock` belongs to the engine thread. engine.c: life, threads,
// the loop; engine_pipeline.c: workers, from hello to steps; engine_requests.c: inbox, callbacks;
// engine_info.c: what others see.
#ifndef STAGECOACH_COORDINATOR_ENGINE_INTERNAL_H
#define STAGECOACH_COORDINATOR_ENGINE_INTERNAL_H

#include <pthread.h>

#include "coordinator/engine.h"
#include "coordinator/hub.h"
#include "coordinator/launcher.h"
#include "coordinator/plan_inputs.h"
#include "coordinator/recovery.h"
#include "coordinator/registry.h"
#include "coordinator/trace.h"

enum {
	TICK_MS = 50,             // longest sleep of the loop
	PROBE_US = 5000,          // between probes of a new epoch
	TRACE_FLUSH_US = 500000,  // two heartbeats
	BEAT_US = 1000000,        // between heartbeats to workers
	FRESH_US = 2000000,       // older heartbeats mean that a step would not pass now
	PUBLISH_US = 20000,       // between updates of engine_info while steps flow
	STALL_US = 15000000,      // no result, and no stage that computes
	STEPS_BEHIND = 512,       // a follower so far behind has failed
	PROGRESS_US = 1000000,    // between lines about one stage that loads
	EVENT_BATCH = 256,
	MESSAGES_PER_TURN = 64,
};

enum command_kind { COMMAND_SUBMIT, COMMAND_CANCEL, COMMAND_STOP_CHOICE };

struct command {
	enum command_kind kind;
	uint64_t id;
	uint32_t choice;
	struct scheduler_request *request; // SUBMIT: one allocation with what it points to
	engine_events_fn on_events;
	void *user;
};

// A request whose choices have not all ended.
struct request_entry {
	uint64_t id;            // 0: free place
	engine_events_fn on_events;
	void *user;
	uint32_t n_choices, n_open;
	uint8_t *ended;         // [n_choices]
};

struct engine {
	struct options o;
	const struct model *model;
	struct hub *hub;
	pthread_t thread;
	bool started;
	int wake_fd;
	_Atomic uint64_t next_id;

	// ---- under lock
	pthread_mutex_t lock;
	pthread_cond_t changed;     // info.state
	struct engine_info info;
	enum status failure_status;
	struct command *inbox;
	uint32_t n_inbox, inbox_capacity;
	uint32_t submits_pending;   // submitted, but not in info.stats yet
	uint64_t pool_tokens;       // that the KV cache holds
	uint32_t max_queue, max_context;
	bool stop, drain;

	// ---- engine thread
	struct registry registry;
	struct launcher launcher;
	struct recovery *recovery;
	struct scheduler *scheduler; // NULL until the first blocks are known
	struct trace *trace;         // NULL without --trace
	uint64_t flush_until_us;     // under --trace: when the end of a drain may be said
	struct plan_settings settings;
	struct plan plan;
	struct plan_model plan_model;
	struct plan_device plan_devices[MAX_STAGES];
	bool planned, plan_only, failed, ended;
	uint32_t epoch, n_groups, n_blocks[MAX_KV_GROUPS];
	struct message_limits limits; // what results may name
	uint64_t first_ready_us, suspended_us, recoveries;
	uint64_t next_probe_us, next_beat_us, next_publish_us, next_tick_us;
	bool probing, publish_now;
	uint64_t last_step;         // broadcast in this epoch
	uint64_t last_result, result_us, step_us; // step and time of the last result; longest step lately
	uint8_t *buffer;            // encoded message
	size_t buffer_len, buffer_capacity;
	struct command *commands;   // taken from the inbox
	uint32_t commands_capacity;
	struct request_entry *entries; // hash table by id
	uint32_t entry_mask, n_entries;
	struct scheduler_event *events; // [EVENT_BATCH]
	struct error load_error;    // of a worker, before the first ready
};

uint64_t engine_now_us(void);

// engine_pipeline.c
void engine_pipeline_init(struct engine *);
void engine_receive(struct engine *);      // all that workers and launcher sent
void engine_supervise(struct engine *);    // deadlines, then what recovery wants done
void engine_send_steps(struct engine *);   // broadcasts what the scheduler gives
void engine_say_drain(struct engine *);    // to all workers
void engine_fail(struct engine *, enum status, const char *text);

// engine_info.c
void engine_publish(struct engine *);      // engine_info

// engine_requests.c
void engine_requests_init(struct engine *);
void engine_requests_free(struct engine *);
void engine_take_commands(struct engine *);
void engine_deliver(struct engine *);      // events of the scheduler to their callbacks
void engine_end_all(struct engine *, enum finish_reason); // every choice that has not ended

#endif
