// The program that tokenizer_regex_compile.c writes and tokenizer_regex.c runs. Jumps are relative, so that a part of a
// program can be moved and repeated.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_REGEX_INTERNAL_H
#define STAGECOACH_COORDINATOR_TOKENIZER_REGEX_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "coordinator/tokenizer_regex.h"

enum regex_op {
	REGEX_CHAR,   // value: code point
	REGEX_FOLD,   // value: ASCII small letter, matched in any case
	REGEX_CLASS,  // value: class
	REGEX_ANY,    // anything but a line feed
	REGEX_RUN,    // min to max times the one-character instruction that follows; goes on at +2
	REGEX_SPLIT,  // try x, then y
	REGEX_JUMP,   // x
	REGEX_AHEAD,  // what follows up to REGEX_DONE at +x must (negated: must not) match here; goes on at +x + 1
	REGEX_BEHIND, // the one-character instruction that follows must (not) match the character before; goes on at +2
	REGEX_ATOMIC, // what follows up to REGEX_DONE at +x, its first way only
	REGEX_LINE_END,
	REGEX_DONE,
};

enum regex_greed { REGEX_GREEDY, REGEX_LAZY, REGEX_POSSESSIVE };

struct regex_instruction {
	uint8_t op;
	uint8_t greed;   // of RUN
	bool negated;    // of AHEAD and BEHIND
	int32_t x, y;
	uint32_t value;
	uint32_t min, max; // of RUN; UINT32_MAX: no limit
};

struct regex_range { uint32_t from, to; };

struct regex_class {
	uint64_t ascii[2];   // members below 0x80, negation applied
	uint64_t records[4]; // members by unicode_record_index(), negation not applied
	struct regex_range *ranges;
	uint32_t range_count;
	bool negated;
};

struct regex {
	struct regex_instruction *code;
	uint32_t code_count;
	struct regex_class *classes;
	uint32_t class_count;
	bool first_bytes[256]; // with which a match can begin; all if it can be empty
};

struct regex_frame {
	uint32_t pc;
	bool run;          // give back one character and try again, while from < pos
	size_t from, pos;
};

bool regex_class_has(const struct regex_class *, uint32_t cp);

#endif
