// What the model itself has to know of tokenizer.json: how many tokens there are, and the ids of tokens that other files
// name by text. The tokenizer proper is the coordinator's.
#ifndef STAGECOACH_COMMON_MODEL_VOCABULARY_H
#define STAGECOACH_COMMON_MODEL_VOCABULARY_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct vocabulary_summary {
	int32_t size;            // largest id + 1 over the vocabulary and the added tokens
	const char *added;       // text of the "added_tokens" array, borrowed; NULL if there is none
	size_t added_len;
};

enum status vocabulary_scan(const char *text, size_t len, const char *label, struct vocabulary_summary *out,
                            struct error *);
// The id of an added token by its text, -1 if there is none.
int32_t vocabulary_find_added(const struct vocabulary_summary *, const char *token);

#endif
