// Every message between coordinator and workers as plain C. Encoding, decoding and all checks of sizes, ranges and shapes
// live in message_*.c; the generated protobuf structs never leave this folder. The surprising decision: a decoded message
// owns everything in one allocation whose size is capped before decoding, so a hostile message can cost at most that.
//
// Life of a worker on the control channel (worker DEALER, coordinator ROUTER) and the step channel (XPUB/SUB, one
// endpoint per epoch):
//   worker HELLO -> coordinator ASSIGN -> worker PROGRESS* BUDGET -> coordinator CONFIGURE -> worker subscribes, joins
//   the data plane -> coordinator broadcasts PROBE on the step channel -> worker READY -> STEPs are broadcast, the last
//   stage answers STEP_RESULT, every worker sends HEARTBEAT all along (from before loading). After a failure the
//   survivors get CONFIGURE with the next epoch and keep their weights; a restarted worker begins with HELLO.
#ifndef STAGECOACH_PROTO_MESSAGE_H
#define STAGECOACH_PROTO_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

enum {
	PROTOCOL_VERSION = 1,
	MAX_STAGES = 64,
	MAX_RANKS = 8,
	MAX_KV_GROUPS = 4,
	MAX_STEP_SEQS = 4096,      // slots
	MAX_STEP_TOKENS = 65536,
	MAX_BIAS = 1024,
	MAX_STOP_IDS = 1024,
	MAX_TOP_LOGPROBS = 20,
	MAX_CORES = 256,
	MAX_TRACE_EVENTS = 4096,
	MESSAGE_CAP_BYTES = 16 << 20, // hard cap of any message; step and control messages are far below
};

enum message_type {
	MESSAGE_HELLO = 1,
	MESSAGE_ASSIGN,
	MESSAGE_PROGRESS,
	MESSAGE_BUDGET,
	MESSAGE_CONFIGURE,
	MESSAGE_PROBE,
	MESSAGE_READY,
	MESSAGE_STEP,
	MESSAGE_STEP_RESULT,
	MESSAGE_HEARTBEAT,
	MESSAGE_DRAIN,     // coordinator to worker: finish what was broadcast, then exit 0
	MESSAGE_ERROR,     // from a worker: it cannot go on (status, text); to one of another host: it has to exit
	MESSAGE_TYPE_COUNT,
};

enum device_kind { DEVICE_CPU = 0, DEVICE_CUDA = 1 };

struct message_hello {
	uint32_t protocol_version;
	char version[32];          // of Stagecoach
	char host[64];
	uint32_t pid;
	uint32_t worker_index;     // place in --devices order, from the launcher
	uint64_t incarnation;      // random per process, so that a replaced process is told from its successor
	enum device_kind device_kind;
	uint32_t device_index;
	char device_name[96];
	uint32_t threads;          // CPU compute threads it means to use
	uint32_t isa;              // enum ops_isa
	uint64_t memory_total_bytes, memory_free_bytes, memory_limit_bytes; // limit = what --memory leaves it
	double bandwidth_bytes_per_s, matmul_flops; // measured with the real kernels
	double weight_ratio[DTYPE_COUNT]; // memory of a matrix of that type as this backend lays it out / bytes in the file; 0 = unsupported
	uint64_t base_bytes;       // what a worker holds besides weights, KV and workspace
};

struct message_assign {
	uint32_t stage, rank, n_stages, n_ranks;
	uint32_t first_layer, n_layers;
	bool has_embedding, has_head;
	char model_path[4096];
	bool load_dummy;
	enum dtype act_dtype, kv_dtype;
	uint32_t block_size;
	uint32_t max_seqs;         // slots: sequences known to workers at once
	uint32_t max_batch_tokens; // rows of the largest step
	uint32_t max_context;
	uint32_t isa;              // the lowest common one
	uint32_t n_cores; uint32_t cores[MAX_CORES]; // OS core numbers to pin to; none = do not pin
	bool may_spin;
	bool trace;
};

struct message_progress { uint64_t done_bytes, total_bytes; char what[32]; }; // "load", "repack", "profile"

struct message_budget {
	uint32_t stage, rank;
	uint64_t weight_bytes, workspace_bytes, other_bytes;
	uint64_t kv_bytes;         // left under its limit for KV
	uint32_t n_groups; uint64_t bytes_per_block[MAX_KV_GROUPS]; // of this stage's own layers; 0 = no layer of the group
	char data_address[256];    // where this worker takes hidden states and ids: "unix:/dir/name" or "tcp:host:port"
};

struct message_configure {
	char steps_endpoint[256];  // to subscribe to, new in each epoch
	uint32_t n_groups; uint32_t n_blocks[MAX_KV_GROUPS];
	char next_address[256];    // data address of stage + 1, "" on the last stage
	char first_address[256];   // data address of stage 0, for the last stage's ids
};

struct sampling_params {
	float temperature, top_p, min_p;
	float repetition_penalty, presence_penalty, frequency_penalty;
	int32_t top_k;
	uint64_t seed;
	uint32_t choice;
	int32_t n_logprobs;        // -1 none, 0 the token's own, up to MAX_TOP_LOGPROBS more
	uint32_t min_tokens;       // stop_ids are banned until so many were sampled
	uint32_t n_bias; const uint32_t *bias_ids; const float *bias_values;
	uint32_t n_stop_ids; const uint32_t *stop_ids; // end tokens banned below min_tokens (empty unless min_tokens > 0)
};

// A sequence that workers do not know yet. It takes a slot until the step that ends it.
struct step_new {
	uint32_t slot;
	uint32_t n_prompt;         // tokens before this position are prompt, from it on output
	struct sampling_params sampling;
	uint32_t n_history; const uint32_t *history; // tokens before the first row's start; only if a penalty is on, else 0
};

// One sequence's rows of a step.
struct step_seq {
	uint32_t slot;
	uint32_t start;            // position of the first token = tokens in the cache before it
	uint32_t n_tokens;
	// The sequence is first cut to `start` tokens, and its table to the blocks that hold them; without it start must equal
	// its length. The first rows of a new sequence may start behind shared blocks, which are then among its new ones.
	bool truncate;
	bool sample;               // sample after the last row; results come in the order of the step's sampling sequences
	bool not_ahead;            // next row depends on the token itself: not scheduled ahead (speculation, constraints)
	bool by_reference;         // n_tokens == 1: the token is what step ref_step sampled as its ref_row-th result
	uint64_t ref_step; uint32_t ref_row;
	uint32_t first_token;      // else: index into message_step.tokens
	uint32_t first_block[MAX_KV_GROUPS], n_blocks[MAX_KV_GROUPS]; // new block ids appended to its table: range of blocks
};

struct message_step {
	uint32_t micro_batch;
	uint32_t n_ends; const uint32_t *ends;       // slots that end before this step's new ones
	uint32_t n_new; const struct step_new *news;
	uint32_t n_seqs; const struct step_seq *seqs;
	uint32_t n_tokens; const uint32_t *tokens;
	uint32_t n_blocks; const uint32_t *blocks;   // ids, < n_blocks[group]
};

struct sampled_token {
	uint32_t slot;
	uint32_t id;
	float logprob;             // natural log; 0 if not asked for
	uint32_t n_top; const uint32_t *top_ids; const float *top_logprobs;
};

struct message_step_result {
	uint32_t micro_batch;
	uint32_t n_tokens; const struct sampled_token *tokens;
	uint64_t stage_us;         // time from taking the step to its end on the last stage
};

struct trace_event { uint64_t step; uint32_t micro_batch; uint64_t begin_us, end_us; uint32_t kind; uint32_t n_rows; }; // clock: CLOCK_MONOTONIC
enum { TRACE_WAIT_STEP, TRACE_WAIT_DATA, TRACE_COMPUTE, TRACE_SEND, TRACE_SAMPLE };

struct message_heartbeat {
	uint64_t last_step_taken, last_step_done;
	uint64_t holding_us;       // how long ago the step in hand was taken, waiting for its data included; 0 if none
	uint32_t queue_length;
	uint64_t busy_us, wait_us, rows; // totals since start
	uint64_t rss_bytes;
	uint32_t n_events; const struct trace_event *events; // only under --trace
};

struct message_error { enum status status; char text[512]; };

struct message {
	enum message_type type;
	uint32_t epoch;
	uint64_t step;             // STEP, STEP_RESULT: its number, consecutive from 1 in each epoch; else 0
	union {
		struct message_hello hello;
		struct message_assign assign;
		struct message_progress progress;
		struct message_budget budget;
		struct message_configure configure;
		struct message_step step_;
		struct message_step_result result;
		struct message_heartbeat heartbeat;
		struct message_error error;
	};
	void *storage;             // of a decoded message; freed by message_free()
};

// What indices in a message may be; a receiver fills in what it knows, 0 = only the MAX_ above.
struct message_limits {
	uint32_t max_seqs, max_batch_tokens, max_context, vocab_size, n_groups;
	uint32_t n_blocks[MAX_KV_GROUPS];
};

// Encodes into *buf (grown by realloc, *capacity); *len is set. The message is checked by the same rules first.
enum status message_encode(const struct message *, uint8_t **buf, size_t *len, size_t *capacity, struct error *);
// STATUS_INVALID: too large, not a message, another protocol version, or a field out of range (named).
enum status message_decode(struct message *out, const uint8_t *data, size_t len, const struct message_limits *,
                           struct error *);
void message_free(struct message *);
const char *message_type_name(enum message_type);

#endif
