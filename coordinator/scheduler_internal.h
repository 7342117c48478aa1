// What the scheduler's files share: requests, sequences, steps in flight. Only scheduler*.c include this. The
// surprising decision: a sequence is described by two counts, tokens known and positions given to steps; prefill,
// decoding ahead, replay and truncation are all the same rule applied to them.
//
//   n_tokens    tokens known: prompt, then what results delivered
//   n_refs      samples in flight: tokens n_tokens and n_tokens + 1 exist but are known only as (step, row)
//   n_computed  positions given to steps; the next row starts here
//   A row that ends at position n_tokens + n_refs - 1 samples the next token; rows before it were sampled already.
#ifndef STAGECOACH_COORDINATOR_SCHEDULER_INTERNAL_H
#define STAGECOACH_COORDINATOR_SCHEDULER_INTERNAL_H

#include "coordinator/block_pool.h"
#include "coordinator/planted.h"
#include "coordinator/scheduler.h"

enum { AHEAD = 2 }; // steps in flight of one lane, and samples in flight of one sequence

enum sequence_state {
	SEQ_WAITING,  // in the queue
	SEQ_RUNNING,  // has a slot and blocks
	SEQ_DRAINING, // preempted; queued again once its steps in flight have reported
	SEQ_FINISHED, // its end event is out; kept while steps in flight name it
};

struct sample_ref {
	uint64_t step;
	uint32_t row;
};

struct sequence {
	struct request *request;
	uint32_t choice;
	enum sequence_state state;
	bool decoding; // its last prompt row was given; it belongs to a lane
	bool truncate; // its next row says so
	uint32_t slot, lane;
	uint32_t *tokens; // [max_len], from its first admission on
	uint32_t n_tokens, n_computed, max_len;
	uint32_t in_flight; // steps in flight with rows of it
	uint32_t n_refs;
	struct sample_ref refs[AHEAD];
	uint32_t lost;                   // positions computed before a preemption
	uint32_t *blocks[MAX_KV_GROUPS]; // [max_len / block_size, rounded up]
	uint32_t n_blocks, n_sent;       // in each group: held; told to workers
	uint32_t n_published;            // full blocks made findable
	uint64_t content[MAX_KV_GROUPS]; // content id of the last published block
	uint64_t tried_at;               // releases of the pools when admission last failed
	struct sequence *prev, *next;    // queue, by age
};

struct request {
	uint64_t id, serial; // serial: order of arrival
	uint32_t n_prompt, n_choices, max_len, n_end_ids;
	uint32_t *prompt, *end_ids;
	uint64_t cache_salt;
	struct sampling_params sampling;
	bool not_ahead;
	bool started; // a choice was admitted
	uint32_t n_cached;
	uint32_t n_live;             // choices without an end event
	uint32_t n_prefilling;       // running choices that have not given their last prompt row
	uint64_t prefilled_step;     // the last step in which one gave it
	uint32_t in_flight;          // steps in flight, summed over choices
	struct sequence *choices;    // [n_choices]
	struct request *prev, *next; // by age
	struct request *bucket_next;
};

struct flight_row {
	struct sequence *seq;
	uint32_t slot;
	bool sample;
};

struct flight {
	uint64_t step;
	uint32_t lane, n_rows, n_samples;
	struct flight_row *rows; // [rows_max]
};

struct scheduler {
	struct scheduler_options o;
	uint32_t epoch; // 0 before the first
	bool suspended;
	uint64_t next_step;
	struct block_pool *pools[MAX_KV_GROUPS];
	uint64_t releases; // counts what may let the head of the queue in

	struct request *oldest, *newest; // all requests
	struct request **buckets;        // by id
	uint32_t bucket_mask;
	uint64_t next_serial;
	struct sequence *queue_head, *queue_tail;
	uint32_t n_waiting, n_draining, n_queued_requests;

	struct sequence **running; // [max_seqs], oldest first
	uint32_t n_running;
	uint32_t *free_slots; // [max_seqs], a stack
	uint32_t n_free_slots;

	// Lanes 0 to micro_batches - 1 are the micro-batches of decoding sequences. The rest, up to n_stages, carry
	// prompt chunks alone, so that chunks of one prompt run in several stages at once.
	uint32_t micro_batches, lanes_in_use, next_lane;
	uint32_t lane_in_flight[MAX_STAGES], lane_seqs[MAX_STAGES];
	bool lane_prefill_turn[MAX_STAGES];
	uint64_t lane_cursor[MAX_STAGES];
	uint32_t judged_seqs, judged_context;
	uint64_t changed_us;
	double mean_output; // tokens that sequences generate, learned from those that ended

	struct flight *flights; // ring
	uint32_t flight_capacity, flight_first, n_flights, rows_max;

	// The step being built.
	uint32_t *ends, n_ends; // slots to end, pending until a step is broadcast
	struct step_new *news;
	struct step_seq *seqs;
	uint32_t *tokens, *step_blocks;
	uint32_t n_new, n_seqs, n_step_tokens, n_step_blocks, step_blocks_capacity, n_step_history;
	struct sequence **candidates;   // [max_seqs]
	uint32_t *found[MAX_KV_GROUPS]; // [blocks of max_context] scratch of prefix look-ups

	struct scheduler_event *events; // ring
	uint32_t event_capacity, event_first, n_events;

	uint64_t preemptions, recomputed_tokens, prefix_queries, prefix_hits, prompt_tokens, generation_tokens;
};

// scheduler_sequence.c
uint32_t scheduler_blocks_for(const struct scheduler *, uint32_t n_tokens);
void scheduler_queue_insert(struct scheduler *, struct sequence *); // by age
void scheduler_queue_remove(struct scheduler *, struct sequence *);
void scheduler_publish(struct scheduler *, struct sequence *);      // full blocks whose tokens are known
void scheduler_stop_running(struct scheduler *, struct sequence *); // gives up slot, lane and blocks
void scheduler_preempt(struct scheduler *, struct sequence *);
void scheduler_drained(struct scheduler *, struct sequence *); // a preempted one has no step in flight any more
// Ends a choice: an event, its own or the one just appended for its last token.
void scheduler_finish(struct scheduler *, struct sequence *, enum finish_reason, struct scheduler_event *);
void scheduler_release_request(struct scheduler *, struct request *); // frees it if nothing needs it
struct scheduler_event *scheduler_push_event(struct scheduler *, const struct sequence *);
bool scheduler_older(const struct sequence *, const struct sequence *);
enum status scheduler_admit(struct scheduler *, struct sequence *); // STATUS_BUSY: not now
bool scheduler_may_admit(const struct scheduler *);
struct sequence *scheduler_next_waiting(struct scheduler *); // first in the queue that may be admitted now

// scheduler_lanes.c
void scheduler_choose_lanes(struct scheduler *, uint64_t now_us);
uint32_t scheduler_lightest_lane(const struct scheduler *);

#endif
