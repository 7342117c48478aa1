// See bench.h. Requests are random token ids, greedy, without end tokens, different in each repetition (so that no
// prefix is reused). The surprising decision: the decode rate counts only tokens after every request had its first, so
// that prefill of one does not hide in the decode rate of another.
#include "coordinator/bench.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coordinator/bench_common.h"

struct run;

struct lane {              // one request
	struct run *run;
	uint32_t n;
	double *at_s;      // [output] when each token came
};

struct run {
	pthread_mutex_t lock;
	pthread_cond_t done;
	uint32_t open;
	bool failed;
	uint32_t output;
	struct lane *lanes;
};

struct cell {
	uint32_t batch, prompt, output;
	double wall_s, first_s[2], gap_s[3]; // median and 95th; 50th, 95th, 99th
	double prefill_per_s, decode_per_s, output_per_s;
};

// On the engine thread.
static void on_events(void *user, const struct scheduler_event *events, uint32_t count)
{
	struct lane *l = user;
	double now = bench_now_s();
	for (uint32_t i = 0; i < count; i++) {
		if (events[i].has_token && l->n < l->run->output)
			l->at_s[l->n++] = now;
		if (events[i].finish == FINISH_NONE)
			continue;
		pthread_mutex_lock(&l->run->lock);
		l->run->failed |= events[i].finish != FINISH_LENGTH;
		if (--l->run->open == 0)
			pthread_cond_signal(&l->run->done);
		pthread_mutex_unlock(&l->run->lock);
	}
}

static uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static void summarise(struct cell *c, struct run *run, double start_s)
{
	size_t n_gaps = 0;
	double *firsts = xcalloc(c->batch, sizeof *firsts), *gaps = xcalloc((size_t)c->batch * c->output, sizeof *gaps);
	double last_first = 0, end = 0;
	for (uint32_t i = 0; i < c->batch; i++) {
		const struct lane *l = &run->lanes[i];
		firsts[i] = l->at_s[0] - start_s;
		last_first = l->at_s[0] > last_first ? l->at_s[0] : last_first;
		end = l->at_s[l->n - 1] > end ? l->at_s[l->n - 1] : end;
		for (uint32_t k = 1; k < l->n; k++)
			gaps[n_gaps++] = l->at_s[k] - l->at_s[k - 1];
	}
	uint64_t later = 0;
	for (uint32_t i = 0; i < c->batch; i++)
		for (uint32_t k = 0; k < run->lanes[i].n; k++)
			later += run->lanes[i].at_s[k] > last_first;
	qsort(firsts, c->batch, sizeof *firsts, bench_by_value);
	qsort(gaps, n_gaps, sizeof *gaps, bench_by_value);
	c->wall_s = end - start_s;
	c->first_s[0] = bench_percentile(firsts, c->batch, 0.5);
	c->first_s[1] = bench_percentile(firsts, c->batch, 0.95);
	c->gap_s[0] = bench_percentile(gaps, n_gaps, 0.5);
	c->gap_s[1] = bench_percentile(gaps, n_gaps, 0.95);
	c->gap_s[2] = bench_percentile(gaps, n_gaps, 0.99);
	c->prefill_per_s = (double)c->batch * c->prompt / (last_first - start_s);
	c->decode_per_s = later ? (double)later / (end - last_first) : 0;
	c->output_per_s = (double)c->batch * c->output / c->wall_s;
	free(firsts);
	free(gaps);
}

static enum status measure(struct engine *e, uint32_t vocab, uint64_t seed, struct cell *c, struct error *error)
{
	struct run run = {.open = c->batch, .output = c->output, .lanes = xcalloc(c->batch, sizeof *run.lanes)};
	uint32_t *prompts = xcalloc((size_t)c->batch * c->prompt, 4);
	double *times = xcalloc((size_t)c->batch * c->output, sizeof *times);
	enum status status = STATUS_OK;
	pthread_mutex_init(&run.lock, NULL);
	pthread_cond_init(&run.done, NULL);
	for (size_t i = 0; i < (size_t)c->batch * c->prompt; i++)
		prompts[i] = (uint32_t)(next_random(&seed) % vocab);
	double start = bench_now_s();
	uint32_t submitted = 0;
	for (; submitted < c->batch && status == STATUS_OK; submitted++) {
		run.lanes[submitted] = (struct lane){.run = &run, .at_s = times + (size_t)submitted * c->output};
		struct scheduler_request q = {
			.id = engine_new_id(e), .prompt = prompts + (size_t)submitted * c->prompt, .n_prompt = c->prompt, .n_choices = 1,
			.max_tokens = c->output, .sampling = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1},
		};
		status = engine_submit(e, &q, on_events, &run.lanes[submitted], error);
		if (status != STATUS_OK) {
			error_prefix(error, "batch %u, prompt %u, output %u", c->batch, c->prompt, c->output);
			break;
		}
	}
	pthread_mutex_lock(&run.lock);
	run.open -= c->batch - submitted;
	while (run.open)
		pthread_cond_wait(&run.done, &run.lock);
	pthread_mutex_unlock(&run.lock);
	if (status == STATUS_BUSY || status == STATUS_INVALID)
		status = STATUS_REFUSED;
	else if (status == STATUS_OK && run.failed)
		status = error_set(error, STATUS_FATAL, "batch %u, prompt %u, output %u: a request failed", c->batch, c->prompt, c->output);
	if (status == STATUS_OK)
		summarise(c, &run, start);
	pthread_cond_destroy(&run.done);
	pthread_mutex_destroy(&run.lock);
	free(run.lanes);
	free(prompts);
	free(times);
	return status;
}

static int by_wall(const void *a, const void *b)
{
	return bench_by_value(&((const struct cell *)a)->wall_s, &((const struct cell *)b)->wall_s);
}

static void print_cell(const struct cell *c)
{
	printf("%6u %7u %7u  %9.1f  %9.1f %9.1f  %8.2f %8.2f  %8.3f %8.3f %8.3f\n", c->batch, c->prompt, c->output, c->prefill_per_s,
	       c->decode_per_s, c->output_per_s, c->first_s[0] * 1e3, c->first_s[1] * 1e3, c->gap_s[0] * 1e3, c->gap_s[1] * 1e3,
	       c->gap_s[2] * 1e3);
	fflush(stdout);
}

static json_t *cell_json(const struct cell *c)
{
	return json_pack("{s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "batch", (int)c->batch, "prompt",
	                 (int)c->prompt, "output", (int)c->output, "wall_s", c->wall_s, "prefill_tokens_per_s", c->prefill_per_s,
	                 "decode_tokens_per_s", c->decode_per_s, "output_tokens_per_s", c->output_per_s, "first_token_p50_s",
	                 c->first_s[0], "first_token_p95_s", c->first_s[1], "inter_token_p50_s", c->gap_s[0], "inter_token_p95_s",
	                 c->gap_s[1], "inter_token_p99_s", c->gap_s[2]);
}

static enum status run_cell(struct engine *e, uint32_t vocab, uint32_t repeat, struct cell *c, struct error *error)
{
	static uint64_t seed = 1;
	struct cell *all = xcalloc(repeat, sizeof *all);
	enum status status = STATUS_OK;
	for (uint32_t r = 0; r < repeat && status == STATUS_OK; r++) {
		all[r] = *c;
		status = measure(e, vocab, seed++ << 32, &all[r], error);
	}
	if (status == STATUS_OK) {
		qsort(all, repeat, sizeof *all, by_wall);
		*c = all[repeat / 2];
	}
	free(all);
	return status;
}

enum status bench_run(struct engine *e, const struct model *model, const struct options *o, struct error *error)
{
	struct bench_grid g;
	TRY(bench_grid_parse(&g, o->bench_grid, error));
	uint32_t vocab = (uint32_t)model_config(model)->vocab_size;
	json_t *cells = json_array();
	if (!o->json)
		printf("median of %u runs each; rates in tokens per second, times in milliseconds\n"
		       " batch  prompt  output    prefill     decode    output  first50  first95    next50   next95   next99\n",
		       g.repeat);
	struct cell warm = {.batch = 1, .prompt = 16, .output = 4};
	enum status status = measure(e, vocab, 1, &warm, error);
	for (int p = 0; p < g.n_prompt && status == STATUS_OK; p++)
		for (int n = 0; n < g.n_output && status == STATUS_OK; n++)
			for (int b = 0; b < g.n_batch && status == STATUS_OK; b++) {
				struct cell c = {.batch = g.batch[b], .prompt = g.prompt[p], .output = g.output[n]};
				status = run_cell(e, vocab, g.repeat, &c, error);
				if (status == STATUS_OK && !o->json)
					print_cell(&c);
				if (status == STATUS_OK)
					json_array_append_new(cells, cell_json(&c));
			}
	if (o->json && status == STATUS_OK) {
		json_dumpf(cells, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(7));
		putchar('\n');
	}
	json_decref(cells);
	return status;
}
