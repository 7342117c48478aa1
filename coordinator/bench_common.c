// See bench_common.h.
#include "coordinator/bench_common.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static enum status parse_list(const char *s, size_t len, uint32_t *out, int max, int *count, struct error *e)
{
	*count = 0;
	for (const char *end = s + len; s < end;) {
		char *stop;
		unsigned long v = strtoul(s, &stop, 10);
		if (stop == s || stop > end || v < 1 || v > 1u << 20 || *count == max)
			return error_set(e, STATUS_USAGE, "--grid: '%.*s' is not a list of at most %d numbers from 1 to %u", (int)len, s, max, 1u << 20);
		out[(*count)++] = (uint32_t)v;
		s = stop;
		if (s < end && *s != ',')
			return error_set(e, STATUS_USAGE, "--grid: unexpected '%c' in a list of numbers", *s);
		s++;
	}
	return *count ? STATUS_OK : error_set(e, STATUS_USAGE, "--grid: an empty list");
}

enum status bench_grid_parse(struct bench_grid *g, const char *text, struct error *e)
{
	*g = (struct bench_grid){.batch = {1}, .prompt = {128}, .output = {64}, .n_batch = 1, .n_prompt = 1, .n_output = 1, .repeat = 3};
	for (const char *s = text; *s;) {
		size_t n = strcspn(s, " ");
		int one;
		if (n == 0) {
			s++;
			continue;
		}
		if (!strncmp(s, "batch=", 6))
			TRY(parse_list(s + 6, n - 6, g->batch, BENCH_GRID_MAX, &g->n_batch, e));
		else if (!strncmp(s, "prompt=", 7))
			TRY(parse_list(s + 7, n - 7, g->prompt, BENCH_GRID_MAX, &g->n_prompt, e));
		else if (!strncmp(s, "output=", 7))
			TRY(parse_list(s + 7, n - 7, g->output, BENCH_GRID_MAX, &g->n_output, e));
		else if (!strncmp(s, "repeat=", 7))
			TRY(parse_list(s + 7, n - 7, &g->repeat, 1, &one, e));
		else
			return error_set(e, STATUS_USAGE, "--grid: '%.*s' is not batch=, prompt=, output= or repeat=", (int)n, s);
		s += n;
	}
	return STATUS_OK;
}

double bench_now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int bench_by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

double bench_percentile(const double *sorted, size_t n, double p)
{
	return n ? sorted[(size_t)((double)(n - 1) * p + 0.5)] : 0;
}
