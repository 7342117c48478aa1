// What both forms of `bench` share: the grid of cells to measure, the clock and percentiles.
#ifndef STAGECOACH_COORDINATOR_BENCH_COMMON_H
#define STAGECOACH_COORDINATOR_BENCH_COMMON_H

#include <stddef.h>
#include <stdint.h>

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

double bench_now_s(void);                             // CLOCK_MONOTONIC, seconds
int bench_by_value(const void *a, const void *b);     // of doubles, ascending, for qsort
double bench_percentile(const double *sorted, size_t n, double p); // p from 0 to 1; 0 of nothing

#endif
