// When the pipeline is up, when it is not, and what to do about it. Pure: what happened goes in with its time, what to do
// comes out; no sockets, clocks or processes. The surprising decision: the first start and every later rebuild are one
// state machine, which differs only in that nothing is restarted before the pipeline has run once.
#ifndef STAGECOACH_COORDINATOR_RECOVERY_H
#define STAGECOACH_COORDINATOR_RECOVERY_H

#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"
#include "proto/message.h"

struct recovery;

enum { RECOVERY_MAX_WORKERS = MAX_STAGES };

struct recovery_options {
	uint32_t n_workers;                        // one per stage
	bool has_launcher[RECOVERY_MAX_WORKERS];   // a launcher reports its exits, kills and restarts it
	uint64_t hello_limit_us;                   // from start, or from a restart, to its hello
	uint64_t rejoin_limit_us;                  // the same for a worker without launcher
	uint64_t silent_limit_us;                  // without any message: hung (5 s)
	uint64_t lost_limit_us;                    // without any message after some connection was closed: dead (0.9 s)
	uint64_t load_limit_us;                    // without progress while loading
	uint64_t join_limit_us;                    // from configure to ready
	uint64_t exit_limit_us;                    // from a kill to the report of its exit
	const char (*labels)[96];                  // [n_workers], borrowed; how texts call a worker
};

enum recovery_event_kind {
	EVENT_HELLO,        // a new process of `worker`
	EVENT_PLANNED,      // answer to ACTION_PLAN
	EVENT_SIGN,         // any message of `worker`
	EVENT_PROGRESS,     // it loads
	EVENT_BUDGET,       // it has loaded
	EVENT_READY,        // it takes steps of the current epoch
	EVENT_HOLDING,      // heartbeat: took step `step` `held_us` ago (0: holds none), expected `expected_us`
	EVENT_EXIT,         // its launcher saw it end; text says how
	EVENT_ERROR,        // it says that it cannot go on: status, text
	EVENT_BROKEN,       // what it sends, or does not take, makes no sense: text
	EVENT_DISCONNECT,   // some connection was closed; whose is not known
	EVENT_TOKEN,        // a new token was delivered
	EVENT_TICK,
};

struct recovery_event {
	enum recovery_event_kind kind;
	uint32_t worker;
	enum status status;
	const char *text;
	uint64_t step, held_us, expected_us;
};

enum recovery_action_kind {
	ACTION_PLAN,        // all have said hello: make the plan, then EVENT_PLANNED
	ACTION_ASSIGN,      // tell `worker` its stage
	ACTION_CONFIGURE,   // all have loaded: a new epoch for all; probe until all are ready
	ACTION_RUN,         // all are ready: steps may flow
	ACTION_SUSPEND,     // the pipeline is down; text says why
	ACTION_KILL,        // by its launcher; one of another host is told to end, and its own launcher starts the next
	ACTION_RESTART,     // by its launcher
	ACTION_FAIL,        // for good: status, text. Nothing follows
};

struct recovery_action {
	enum recovery_action_kind kind;
	uint32_t worker;
	enum status status;
	char text[512];
};

struct recovery *recovery_create(const struct recovery_options *, uint64_t now_us);
void recovery_destroy(struct recovery **);
void recovery_event(struct recovery *, const struct recovery_event *, uint64_t now_us);
bool recovery_next_action(struct recovery *, struct recovery_action *out);

bool recovery_running(const struct recovery *);                  // between ACTION_RUN and what ends it
bool recovery_alive(const struct recovery *, uint32_t worker);   // has said hello and is not known to be dead
uint32_t recovery_attempts(const struct recovery *, uint32_t worker);

#endif
