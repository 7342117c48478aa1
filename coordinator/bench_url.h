// `bench --url`: measures a running server over HTTP, ours or another with the same API.
#ifndef STAGECOACH_COORDINATOR_BENCH_URL_H
#define STAGECOACH_COORDINATOR_BENCH_URL_H

#include <stdint.h>

#include "common/options.h"
#include "common/status.h"

enum { BENCH_GRID_MAX = 16 };

// "batch=1,4 prompt=128 output=64 repeat=3": sequences at once, tokens of a prompt, tokens of an answer, repetitions.
struct bench_grid {
	uint32_t batch[BENCH_GRID_MAX], prompt[BENCH_GRID_MAX], output[BENCH_GRID_MAX];
	int n_batch, n_prompt, n_output;
	uint32_t repeat;
};
// STATUS_USAGE names the part that is wrong.
enum status bench_grid_parse(struct bench_grid *out, const char *text, struct error *);

// Prints a table, or JSON under --json. STATUS_UNAVAILABLE if nothing answers, STATUS_FATAL if an answer is not a whole
// stream (its text is quoted).
enum status bench_url_run(const struct options *, struct error *);

#endif
