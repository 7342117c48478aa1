// Cuts text into the pieces within which byte pairs are merged: a list of steps, each applied to every piece that the
// step before left, as a Sequence of `tokenizers` does. The surprising decision: the bytes are never rewritten (the
// reference maps them to printable characters here); only a leading space, where one is asked for, makes a new text.
#ifndef STAGECOACH_COORDINATOR_PRETOKENIZER_H
#define STAGECOACH_COORDINATOR_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "coordinator/tokenizer_regex.h"

enum split_behavior { SPLIT_REMOVED, SPLIT_ISOLATED, SPLIT_MERGED_WITH_PREVIOUS, SPLIT_MERGED_WITH_NEXT,
                      SPLIT_CONTIGUOUS };

struct pretokenizer; // immutable once its steps are added

struct pretokenizer *pretokenizer_create(void);
void pretokenizer_destroy(struct pretokenizer **);
// STATUS_REFUSED names what the pattern has that is not supported.
enum status pretokenizer_add_split(struct pretokenizer *, const char *pattern, size_t len, bool literal,
                                   enum split_behavior, bool invert, struct error *);
void pretokenizer_add_digits(struct pretokenizer *, bool individual);
void pretokenizer_add_leading_space(struct pretokenizer *); // to each piece that does not begin with one

// GPT-2's own pattern, which ByteLevel uses unless told otherwise.
extern const char pretokenizer_gpt2_pattern[];
// Adds the steps that the value of GGUF's tokenizer.ggml.pre stands for. STATUS_REFUSED if it is unknown.
enum status pretokenizer_add_named(struct pretokenizer *, const char *name, size_t len, bool *nfc, bool *ignore_merges,
                                   struct error *);

struct piece { size_t start, len; };
struct pieces { struct piece *at; size_t count, capacity; };

// Of one thread; zero it before first use.
struct pretokenizer_scratch {
	struct pieces pieces[2];
	struct regex_walk walk;
	uint8_t *text; // with leading spaces
};

// Cuts valid UTF-8 of `len` bytes. *base is what the pieces are relative to: text, or memory of the scratch. The pieces
// are the scratch's until the next call. STATUS_INVALID if a pattern takes too long on this text.
enum status pretokenizer_run(const struct pretokenizer *, const uint8_t *text, size_t len,
                             struct pretokenizer_scratch *, const uint8_t **base, const struct pieces **,
                             struct error *);
void pretokenizer_scratch_free(struct pretokenizer_scratch *);

#endif
