// Regular expressions of pre-tokenizers, with the meaning that Oniguruma gives them in `tokenizers`. The surprising
// decision: this is our own backtracking matcher and not PCRE2. Character classes then use the generated Unicode table
// at one lookup per character, a run of one class costs one stack entry however long it is, and what Oniguruma means
// differently (case folding, possessive intervals, $) is either meant alike or refused by name.
//
// Understood: alternation, groups (capturing ones do not capture), (?i:) on ASCII letters, look-ahead, look-behind of one
// character, atomic groups, greedy, lazy and possessive ? * +, intervals, classes, \s \d \w \p{..} and their negations.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_REGEX_H
#define STAGECOACH_COORDINATOR_TOKENIZER_REGEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct regex; // immutable after creation

// STATUS_REFUSED names what is not understood.
enum status regex_create(struct regex **out, const char *pattern, size_t len, struct error *);
void regex_destroy(struct regex **);

// One walk over one text. Not shared between threads.
struct regex_walk {
	const struct regex *regex;
	const uint8_t *text; // valid UTF-8, borrowed
	size_t len;
	size_t next;         // where the next search begins
	size_t last_end;     // end of the last match, SIZE_MAX before the first
	uint64_t steps;      // spent so far
	uint64_t step_limit; // 0: none
	bool gave_up;        // the limit was passed
	struct regex_frame *stack;
	size_t stack_count, stack_capacity;
};

// A walk may be begun again with another text; its stack is kept until regex_walk_end().
void regex_walk_begin(struct regex_walk *, const struct regex *, const uint8_t *text, size_t len);
// The next match, leftmost first. An empty match right behind the last match is not one.
bool regex_walk_next(struct regex_walk *, size_t *start, size_t *end);
void regex_walk_end(struct regex_walk *);

#endif
