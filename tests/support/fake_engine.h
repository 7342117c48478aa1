// engine.h without workers, for tests of what stands before it. It says the prompt back, token by token: a test chooses
// the answer by its prompt. Of a chat (a prompt that begins with FAKE_START) it says the last message back. Choice c >
// 0 has each lower-case letter moved c places on. The log-probability of token t is -(t + 1) / 8, the i-th best beside
// it is token (t + i) % 256 at one less each.
#ifndef STAGECOACH_TESTS_FAKE_ENGINE_H
#define STAGECOACH_TESTS_FAKE_ENGINE_H

#include "coordinator/engine.h"

struct fake_engine_controls {
	uint32_t max_context; // default 512
	uint32_t max_queue;   // requests in hand; default 64
	uint32_t step_us;     // pause between tokens; default 0
	uint32_t fail_after;  // tokens of a request after which the pipeline fails; 0: never
	bool silent;	      // requests are taken, tokens never come
	bool not_ready, not_healthy;
	enum status refuse; // what engine_submit() says; STATUS_OK: it works
};
struct fake_engine_seen {
	uint32_t submitted, cancelled, stopped, ended; // requests; stopped counts choices
	uint32_t in_hand;
	uint32_t n_prompt, prompt[1024], n_choices, max_tokens, n_end_ids, end_ids[64];
	struct sampling_params sampling; // of the last request, pointers cleared
	uint32_t bias_id;
	float bias_value; // its first
	uint64_t cache_salt;
};
void fake_engine_control(const struct fake_engine_controls *);
void fake_engine_look(struct fake_engine_seen *);

#endif
