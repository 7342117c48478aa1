// One valid message of each type with every field away from its default, for round trips, tables of violations and the
// seeds of the fuzz corpus.
#ifndef STAGECOACH_TESTS_SAMPLE_MESSAGES_H
#define STAGECOACH_TESTS_SAMPLE_MESSAGES_H

#include <stdio.h>
#include <string.h>

#include "proto/message.h"

static const uint32_t sample_ends[] = {3, 9};
static const uint32_t sample_bias_ids[] = {7, 8};
static const float sample_bias_values[] = {-100.0f, 2.5f};
static const uint32_t sample_stop_ids[] = {2};
static const uint32_t sample_history[] = {1, 2, 3};
static const uint32_t sample_tokens[] = {10, 11, 12, 13, 14};
static const uint32_t sample_blocks[] = {5, 6, 99};
static const uint32_t sample_top_ids[] = {40, 41};
static const float sample_top_logprobs[] = {-0.5f, -1.25f};
static const struct trace_event sample_events[] = {
	{.step = 70, .micro_batch = 1, .begin_us = 1000, .end_us = 1500, .kind = TRACE_COMPUTE, .n_rows = 16},
	{.step = 71, .micro_batch = 0, .begin_us = 1500, .end_us = 1500, .kind = TRACE_SEND, .n_rows = 1},
};
static const struct step_new sample_news[] = {
	{
		.slot = 3, .n_prompt = 5,
		.sampling = {
			.temperature = 0.7f, .top_p = 0.9f, .min_p = 0.05f, .repetition_penalty = 1.1f,
			.presence_penalty = -0.5f, .frequency_penalty = 0.25f, .top_k = 40, .seed = 0xfedcba9876543210u,
			.choice = 2, .n_logprobs = 5, .min_tokens = 4, .n_bias = 2, .bias_ids = sample_bias_ids,
			.bias_values = sample_bias_values, .n_stop_ids = 1, .stop_ids = sample_stop_ids,
		},
		.n_history = 3, .history = sample_history,
	},
	{.slot = 4, .n_prompt = 1, .sampling = {.top_p = 1, .repetition_penalty = 1, .top_k = -1, .n_logprobs = -1}},
};
static const struct step_seq sample_seqs[] = {
	{.slot = 3, .start = 3, .n_tokens = 5, .sample = true, .first_token = 0, .first_block = {0, 2}, .n_blocks = {2, 1}},
	{.slot = 1, .start = 64, .n_tokens = 1, .truncate = true, .sample = true, .not_ahead = true, .by_reference = true,
	 .ref_step = 41, .ref_row = 7},
};
static const struct sampled_token sample_results[] = {
	{.slot = 3, .id = 40, .logprob = -0.5f, .n_top = 2, .top_ids = sample_top_ids, .top_logprobs = sample_top_logprobs},
	{.slot = 1, .id = 0, .logprob = 0},
};

static inline struct message sample_message(enum message_type type)
{
	struct message m;
	memset(&m, 0, sizeof m);
	m.type = type;
	m.epoch = 7;
	switch (type) {
	case MESSAGE_HELLO:
		m.hello = (struct message_hello){
			.protocol_version = PROTOCOL_VERSION, .version = "0.1.0", .host = "node-1", .pid = 1234, .worker_index = 1,
			.incarnation = 0x8000000000000001u, .device_kind = DEVICE_CUDA, .device_index = 3, .device_name = "a device",
			.threads = 8, .isa = 2, .memory_total_bytes = 1ull << 40, .memory_free_bytes = 1ull << 39,
			.memory_limit_bytes = 1ull << 38, .bandwidth_bytes_per_s = 2.5e10, .matmul_flops = 1e12, .base_bytes = 1 << 20,
		};
		for (int i = 0; i < DTYPE_COUNT; i++)
			m.hello.weight_ratio[i] = 1 + i / 16.0;
		break;
	case MESSAGE_ASSIGN:
		m.assign = (struct message_assign){
			.stage = 1, .rank = 0, .n_stages = 2, .n_ranks = 1, .first_layer = 15, .n_layers = 15, .has_head = true,
			.model_path = "/models/a.gguf", .load_dummy = true, .act_dtype = DTYPE_F32, .kv_dtype = DTYPE_F16,
			.block_size = 16, .max_seqs = 256, .max_batch_tokens = 512, .max_context = 8192, .isa = 1, .n_cores = 2,
			.cores = {0, 3}, .may_spin = true, .trace = true,
		};
		break;
	case MESSAGE_PROGRESS:
		m.progress = (struct message_progress){.done_bytes = 10, .total_bytes = 100, .what = "load"};
		break;
	case MESSAGE_BUDGET:
		m.budget = (struct message_budget){
			.stage = 1, .weight_bytes = 1, .workspace_bytes = 2, .other_bytes = 3, .kv_bytes = 1ull << 33, .n_groups = 2,
			.bytes_per_block = {4096, 0}, .data_address = "unix:/run/x/data-1",
		};
		break;
	case MESSAGE_CONFIGURE:
		m.configure = (struct message_configure){
			.steps_endpoint = "ipc:///run/x/steps-7", .n_groups = 2, .n_blocks = {100, 50},
			.next_address = "unix:/run/x/data-1", .first_address = "tcp:127.0.0.1:9000",
		};
		break;
	case MESSAGE_STEP:
		m.step = 42;
		m.step_ = (struct message_step){
			.micro_batch = 1, .n_ends = 2, .ends = sample_ends, .n_new = 2, .news = sample_news, .n_seqs = 2,
			.seqs = sample_seqs, .n_tokens = 5, .tokens = sample_tokens, .n_blocks = 3, .blocks = sample_blocks,
		};
		break;
	case MESSAGE_STEP_RESULT:
		m.step = 42;
		m.result = (struct message_step_result){.micro_batch = 1, .n_tokens = 2, .tokens = sample_results, .stage_us = 900};
		break;
	case MESSAGE_HEARTBEAT:
		m.heartbeat = (struct message_heartbeat){
			.last_step_taken = 71, .last_step_done = 70, .holding_us = 12, .queue_length = 1, .busy_us = 5, .wait_us = 6,
			.rows = 7, .rss_bytes = 8, .n_events = 2, .events = sample_events,
		};
		break;
	case MESSAGE_ERROR:
		m.error = (struct message_error){.status = STATUS_REFUSED, .text = "no such file"};
		break;
	default:
		break;
	}
	return m;
}

#endif
