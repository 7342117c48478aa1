// Which sequence computes what in which step. A pure state machine: time, results and arrivals are arguments; no
// sockets, no clock, no randomness of its own. The surprising decision: decode steps are planned before the tokens they
// continue are known (rows name their token as (step, row)), so a sequence that turns out to have ended may have up to
// two steps in flight whose tokens are thrown away.
//
// Owns: the queue, running sequences, their block tables (through block_pool.h), slots, micro-batches, replay after a
// new epoch. Oldest first; when blocks run out the newest is preempted and recomputed later; the oldest always
// progresses.
#ifndef STAGECOACH_COORDINATOR_SCHEDULER_H
#define STAGECOACH_COORDINATOR_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "proto/message.h"

struct scheduler;

struct scheduler_options {
	uint32_t max_seqs;         // running sequences = slots
	uint32_t max_batch_tokens; // rows of one step
	uint32_t max_queue;        // waiting requests
	uint32_t max_context;      // tokens of one sequence
	uint32_t block_size;
	uint32_t n_groups;
	uint32_t n_stages;
	bool prefix_cache;
	uint32_t max_prefill_tokens; // prompt rows of one step, so that a step stays short; 0 = max_batch_tokens
	uint32_t expected_output;    // tokens of an answer, until enough have ended to know; 0 = 1024
	// Predicted microseconds of a round with m micro-batches over n sequences at mean context c (planner_round_us);
	// NULL: m = 1.
	double (*round_us)(void *user, uint32_t micro_batches, uint32_t sequences, uint32_t context);
	void *user;
};

struct scheduler_request {
	uint64_t id;            // chosen by the caller, unique
	const uint32_t *prompt; // copied
	uint32_t n_prompt;
	uint32_t n_choices;      // n: prompt computed once, its full blocks shared
	uint32_t max_tokens;     // per choice, >= 1; cut so that n_prompt + max_tokens <= max_context
	const uint32_t *end_ids; // tokens that end a choice (eos and stop_token_ids); copied
	uint32_t n_end_ids;
	uint64_t cache_salt; // prefix reuse only among equal salts
	// Deep-copied. choice is set per choice; stop_ids are set from end_ids where min_tokens > 0; the seed is the
	// request's.
	struct sampling_params sampling;
	bool not_ahead; // its next row depends on the token itself: never scheduled ahead
};

enum finish_reason { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_CANCELLED, FINISH_FAILED };

// One token, or the end, of one choice. In order per choice; exactly one event with finish != NONE per choice.
struct scheduler_event {
	uint64_t request_id;
	uint32_t choice;
	bool has_token; // an end token that stopped the choice is delivered with finish STOP
	uint32_t token;
	float logprob;
	uint32_t n_top;
	uint32_t top_ids[MAX_TOP_LOGPROBS];
	float top_logprobs[MAX_TOP_LOGPROBS];
	enum finish_reason finish;
	uint32_t n_cached; // prompt tokens taken from the prefix cache; valid with the first token
};

struct scheduler_stats {
	uint32_t n_running, n_waiting, n_queued_requests;
	uint64_t blocks_total, blocks_free; // free: held by no sequence; cached ones count as free
	uint64_t preemptions, recomputed_tokens, prefix_queries, prefix_hits, prompt_tokens, generation_tokens;
	uint32_t steps_in_flight, micro_batches;
};

enum status scheduler_create(struct scheduler **out, const struct scheduler_options *, struct error *);
void scheduler_destroy(struct scheduler **);

// A new epoch (also the first): all blocks, tables, slots and steps in flight are forgotten; every unfinished sequence
// goes back to waiting, in order of age, and will be replayed from its tokens. A request that can no longer fit
// n_blocks ends with FINISH_FAILED. Events may be appended.
void scheduler_begin_epoch(struct scheduler *, uint32_t epoch, const uint32_t n_blocks[MAX_KV_GROUPS]);
// The pipeline is down: no step is given until the next begin_epoch; add and cancel still work.
void scheduler_suspend(struct scheduler *);

// STATUS_BUSY: queue full. STATUS_INVALID: larger than the whole pool or max_context (both numbers). A sequence that
// alone fills the whole pool ends with FINISH_LENGTH.
enum status scheduler_add(struct scheduler *, const struct scheduler_request *, uint64_t now_us, struct error *);
// Client gone: all choices end with FINISH_CANCELLED; their blocks are free at once, since whatever is in flight runs
// before any later owner's steps. Unknown id: no-op.
void scheduler_cancel(struct scheduler *, uint64_t request_id);
// A stop string was found: this choice ends now (its end event is FINISH_STOP); later tokens are thrown away.
void scheduler_stop_choice(struct scheduler *, uint64_t request_id, uint32_t choice);

// Cuts what workers keep of a choice to its first n_tokens tokens, whose KV stays; known tokens after them are computed
// again. For speculation: the choice must be running, without steps in flight (STATUS_BUSY). STATUS_ABSENT: no such
// running choice. STATUS_INVALID: more than is computed. A cut inside a block that others may share drops that block.
enum status scheduler_truncate(struct scheduler *, uint64_t request_id, uint32_t choice, uint32_t n_tokens,
                               struct error *);

// Builds the next step to broadcast if one can be given now (free places in flight, work to do). `out` borrows the
// scheduler's memory until the next call. Returns false if there is nothing to broadcast.
bool scheduler_next_step(struct scheduler *, uint64_t now_us, struct message *out);
// A result of the last stage; every step gets one, also one that samples nothing. Another epoch: ignored. A gap in step
// numbers, or rows that do not fit the step: STATUS_INVALID (the pipeline has to be rebuilt).
enum status scheduler_apply_result(struct scheduler *, const struct message *result, uint64_t now_us, struct error *);
// Takes the next event; false if none. Events are bounded by results: drain after each call that may produce some.
bool scheduler_pop_event(struct scheduler *, struct scheduler_event *out);

void scheduler_get_stats(const struct scheduler *, struct scheduler_stats *);
bool scheduler_idle(const struct scheduler *); // nothing waiting, running or in flight
// Test support: checks every invariant (block ownership, counts, tables, bounds); aborts with what is wrong.
void scheduler_check(const struct scheduler *);

#endif
