// From tokens to the JSON of an answer: text, stop strings, log-probabilities and finish of each choice, whole answers
// and the chunks of a stream. Knows no connection and no engine. The surprising decision: each choice keeps what was
// not yet given out as finished JSON pieces, so that a chunk is three copies between precomputed texts.
#ifndef STAGECOACH_COORDINATOR_API_ANSWER_H
#define STAGECOACH_COORDINATOR_API_ANSWER_H

#include <stdbool.h>
#include <stdint.h>

#include "coordinator/api_request.h"
#include "coordinator/json_write.h"
#include "coordinator/scheduler.h"
#include "coordinator/stop_match.h"
#include "coordinator/tokenizer.h"

struct api_choice {
	uint32_t index; // in the answer
	struct detokenizer detokenizer;
	struct stop_matcher matcher;
	struct json_buf decoded;		      // scratch: text of the token at hand
	struct json_buf text;			      // certain text, not given out yet (raw UTF-8)
	struct json_buf token_ids;		      // "1,2,3", only if asked for
	struct json_buf lp_content;		      // chat: entries; completions: tokens
	struct json_buf lp_values, lp_top, lp_offset; // completions only
	uint32_t text_offset;			      // completions: characters of token texts so far
	uint32_t n_tokens;
	enum finish_reason finish;   // NONE, STOP, LENGTH
	int stop_string;	     // index of the stop string that ended it, -1
	int64_t stop_token;	     // or the id among stop_token_ids, -1
	bool role_sent, finish_sent; // in a stream
};

// One request's answer. All strings in it are owned.
struct api_answer {
	const struct api_request *request; // borrowed for the answer's life
	const struct tokenizer *tokenizer;
	uint32_t n_choices; // prompts * n
	struct api_choice *choices;
	struct json_buf prefix; // of every chunk, up to the choice's index
	char id[48];
	int64_t created;
	char *model;
	uint32_t n_prompts;
	struct api_prompt_tokens {
		uint32_t *ids;
		uint32_t count, n_cached;
	} * prompts;  // ids owned
	bool started; // first chunk was written
};

// Takes over prompts[0..n_prompts) and their ids. id is like "cmpl-...".
void api_answer_init(struct api_answer *, const struct api_request *, const struct tokenizer *, const char *model,
		     const char *id, int64_t created, struct api_prompt_tokens *prompts, uint32_t n_prompts);
void api_answer_free(struct api_answer *);

// One event of a choice that has not finished. Returns true if the choice ended by it through a stop string, so that
// the engine has to be told. is_end: the event's token is one that ends the choice and is not part of its text.
bool api_answer_push(struct api_answer *, uint32_t choice, const struct scheduler_event *, bool is_end);

// Appends "data: ...\n\n" for all that this choice has to give out now; nothing if there is nothing.
void api_answer_chunk(struct api_answer *, uint32_t choice, struct json_buf *out);
// The first chunks: the role (chat) and prompt token ids (if asked for).
void api_answer_first_chunks(struct api_answer *, struct json_buf *out);
// The usage chunk, if asked for, and [DONE].
void api_answer_end_chunks(struct api_answer *, struct json_buf *out);
// The whole answer on one line.
void api_answer_whole(struct api_answer *, struct json_buf *out);

#endif
