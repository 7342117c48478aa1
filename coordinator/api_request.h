// Request bodies of the API as plain structs. Pure over (ptr, len): no engine, no tokenizer, no connection. The
// surprising decision: one table holds every numeric field with its range and one every field that is refused until it
// is built, so that nothing is accepted and then ignored.
#ifndef STAGECOACH_COORDINATOR_API_REQUEST_H
#define STAGECOACH_COORDINATOR_API_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/model.h"
#include "coordinator/api_error.h"
#include "coordinator/stop_match.h"
#include "proto/message.h"

enum {
	API_MAX_DEPTH = 64,	      // of nested arrays and objects in a body
	API_MAX_PROMPTS = 1024,	      // of one completions request
	API_MAX_CHOICES = 128,	      // n
	API_MAX_TOTAL_CHOICES = 4096, // prompts * n
	API_MAX_STOP_TOKENS = 256,
};

enum api_endpoint { API_COMPLETIONS = 1, API_CHAT = 2, API_TOKENIZE = 4, API_DETOKENIZE = 8 };

struct api_prompt {
	const char *text;
	size_t len; // a text, borrowed from the request ...
	uint32_t *ids;
	size_t n_ids; // ... or ids (text == NULL), owned
};

// Values of the numeric fields; what was not given has the model's or OpenAI's default.
struct api_numbers {
	double temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty;
	int64_t top_k, seed, n, best_of, max_tokens, max_completion_tokens, min_tokens, logprobs, top_logprobs;
};

struct api_flags {
	bool stream, include_usage, want_logprobs, ignore_eos, skip_special_tokens, include_stop, return_token_ids,
	    tokens_as_ids, add_special_tokens, parse_special, add_generation_prompt, with_pieces;
};

struct api_request {
	enum api_endpoint endpoint;
	struct api_numbers number;
	struct api_flags flag;
	bool has_seed;
	uint32_t max_tokens; // 0: not given
	uint32_t n_prompts;
	struct api_prompt *prompts;	  // completions, tokenize with a text, detokenize: one of ids
	char *messages_json, *extra_json; // chat, tokenize with messages: for chat_template_render()
	struct stop_set *stop;		  // NULL: none
	uint32_t n_stop_ids;
	uint32_t *stop_ids;
	const char **stop_strings;
	unsigned n_stop_strings; // borrowed from root
	uint32_t n_bias;
	uint32_t *bias_ids;
	float *bias_values;
	int32_t n_logprobs;  // -1: none; else that many best ones besides the token's own
	uint64_t cache_salt; // 0: none
	json_t *root;
};

struct api_limits {
	uint32_t vocab_size;
	const struct model_generation *generation;
};

// STATUS_INVALID with the field's name in e. out is to be freed in either case.
enum status api_request_parse(struct api_request *out, enum api_endpoint, const char *body, size_t len,
			      const struct api_limits *, struct api_error *e);
void api_request_free(struct api_request *);

// Parses any JSON object under the rules for bodies: valid UTF-8, no NUL, no key twice, no lone surrogate, bounded
// depth.
enum status api_json_parse(json_t **out, const char *body, size_t len, struct api_error *e);

// api_messages.c: checks and normalises "messages" (text parts joined by newlines, developer is system, null and [] are
// "", arguments of tool calls become objects). *out is a new array.
enum status api_messages_normalize(json_t **out, const json_t *messages, struct api_error *e);

#endif
