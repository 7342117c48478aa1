// The table of options as parsing (options.c) and printing (options_print.c) see it; nobody else includes this.
#ifndef STAGECOACH_COMMON_OPTIONS_TABLE_H
#define STAGECOACH_COMMON_OPTIONS_TABLE_H

#include <stdbool.h>
#include <stddef.h>

enum {
	SERVE = 1, PLAN = 2, BENCH = 4, CHAT = 8, WORKER = 16, STATUS = 32, STOP = 64,
	MODEL_VERBS = SERVE | PLAN | BENCH, ALL = 127,
};

struct verb {
	const char *name;
	unsigned bit;
	bool takes_model;
	const char *help;
};

enum kind { KIND_U32, KIND_TEXT, KIND_FLAG, KIND_ON_OFF, KIND_CHOICE, KIND_DEVICES, KIND_LAYERS, KIND_MEMORY,
           KIND_PLAN_FOR, KIND_INT };

struct row {
	const char *name;        // without the dashes
	const char *value;       // what --help prints for the value
	unsigned verbs;          // where it makes sense
	enum kind kind;
	size_t offset, size;     // of the field
	double low, high;        // range of numbers
	const char *preset;      // default as text, NULL = all zero
	const char *choices;     // KIND_CHOICE: "a|b|c"
	const char *help;
	bool internal;           // set by the launcher, not shown
	const char *sample;      // an example for the sample config
};

extern const struct verb option_verbs[];
extern const int option_verb_count;
extern const struct row option_rows[];
extern const int option_row_count;

const struct verb *option_verb(const char *name); // NULL: there is none

#endif
