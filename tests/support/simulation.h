// Random histories of arrivals, ends, cancels, stops, workers that die, hang and go on, and late results: how one is
// made from a seed and run. The surprising decision: a history is a list of operations that any sublist of is a history
// too, so that a failing one is shrunk by leaving operations out, each attempt in a process of its own.
#ifndef STAGECOACH_TESTS_SIMULATION_H
#define STAGECOACH_TESTS_SIMULATION_H

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster_model.h"

enum { OPS_MAX = 400 };

enum op_kind { OP_ADD, OP_STEP, OP_REPORT, OP_CANCEL, OP_STOP, OP_KILL, OP_HANG, OP_CONTINUE, OP_TIME, OP_KINDS };
static const char *const op_names[OP_KINDS] = {"add",  "step", "report",   "cancel", "stop choice",
                                               "kill", "hang", "continue", "time"};

struct op {
	enum op_kind kind;
	uint64_t r;
};

struct history {
	uint64_t seed;
	struct op ops[OPS_MAX];
	uint32_t n_ops;
};

// What the histories went through, so that one sees that they are not idle. In memory shared with the child.
struct totals {
	uint64_t seed, steps, tokens, requests, recoveries, given_up, preemptions, prefix_hits, rows, refused;
};
static struct totals *totals;

static inline uint64_t draw(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15ull;
	uint64_t z = *state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static inline uint32_t between(uint64_t *state, uint32_t low, uint32_t high)
{
	return low + (uint32_t)(draw(state) % (high - low + 1));
}

// A round is worth so many micro-batches; only that it varies with load matters here.
static inline double round_us(void *user, uint32_t m, uint32_t n, uint32_t context)
{
	uint32_t best = 1 + (n + context / 16 + *(uint32_t *)user) % 4;
	return 100 + (m > best ? m - best : best - m) * 20;
}

static inline struct scheduler_options choose_options(uint64_t *s, uint32_t *wish)
{
	*wish = between(s, 0, 3);
	struct scheduler_options o = {
		.max_seqs = between(s, 1, 12),
		.max_batch_tokens = between(s, 0, 3) == 0 ? between(s, 1, 4) : between(s, 4, 64),
		.max_queue = between(s, 2, 40),
		.max_context = between(s, 16, 96),
		.block_size = between(s, 0, 4) == 0 ? 1 : between(s, 2, 8),
		.n_groups = between(s, 0, 3) == 0 ? 2 : 1,
		.n_stages = between(s, 1, 4),
		.prefix_cache = between(s, 0, 3) > 0,
		.max_prefill_tokens = between(s, 0, 1) ? 0 : between(s, 1, 32),
		.expected_output = between(s, 0, 2) ? 1 : 0,
		.round_us = between(s, 0, 3) ? round_us : NULL,
		.user = wish,
	};
	return o;
}

static inline void generate(struct history *h, uint64_t seed)
{
	uint64_t s = seed * 77 + 5;
	h->seed = seed;
	h->n_ops = between(&s, 20, OPS_MAX);
	// Parts of a thousand; a third of the histories have faults.
	uint32_t faults = between(&s, 0, 2) == 0 ? between(&s, 5, 40) : 0, cancels = between(&s, 0, 50);
	for (uint32_t i = 0; i < h->n_ops; i++) {
		uint32_t x = between(&s, 0, 999);
		enum op_kind k = x < 150 ? OP_ADD : x < 580 ? OP_STEP : OP_REPORT;
		if (x >= 1000 - faults)
			k = between(&s, 0, 1) ? OP_KILL : OP_HANG;
		else if (x >= 1000 - 3 * faults)
			k = between(&s, 0, 3) ? OP_TIME : OP_CONTINUE;
		else if (x >= 1000 - 3 * faults - cancels)
			k = between(&s, 0, 2) ? OP_CANCEL : OP_STOP;
		h->ops[i] = (struct op){.kind = k, .r = draw(&s)};
	}
}

static inline void add(struct world *w, uint64_t s)
{
	uint32_t prompt[128], end_ids[4];
	uint32_t longest = w->options.max_context + 2;
	uint32_t shared = between(&s, 0, 3) == 0 ? 0 : between(&s, 1, longest);
	uint32_t n = between(&s, 1, 2) == 1 ? between(&s, 1, 12) : between(&s, 1, longest);
	uint64_t family = between(&s, 1, 3); // prompts of a family begin alike
	for (uint32_t i = 0; i < n; i++)
		prompt[i] =
			i < shared ? (uint32_t)(model_mix(family, i) % MODEL_VOCAB) : between(&s, 0, MODEL_VOCAB - 1);
	uint32_t n_end = between(&s, 0, 4);
	for (uint32_t i = 0; i < n_end; i++)
		end_ids[i] = between(&s, 0, MODEL_VOCAB - 1);
	struct scheduler_request r = {
		.prompt = prompt,
		.n_prompt = n,
		.n_choices = between(&s, 0, 3) == 0 ? between(&s, 2, 5) : 1,
		.max_tokens = between(&s, 0, 2) == 0 ? between(&s, 1, longest) : between(&s, 1, 16),
		.end_ids = end_ids,
		.n_end_ids = n_end,
		.cache_salt = between(&s, 0, 4) == 0,
		.not_ahead = between(&s, 0, 7) == 0,
		.sampling = {.presence_penalty = between(&s, 0, 3) == 0 ? 0.5f : 0, .min_tokens = between(&s, 0, 1)},
	};
	struct error e;
	totals->refused += world_add(w, r, &e) == 0;
	scheduler_check(w->scheduler);
}

static inline void apply(struct cluster *c, const struct op *op, uint32_t base_blocks)
{
	struct world *w = c->w;
	uint64_t s = op->r;
	uint32_t worker = (uint32_t)(s >> 40) % w->options.n_stages;
	switch (op->kind) {
	case OP_ADD:
		add(w, s);
		break;
	case OP_STEP:
		cluster_advance(c, s % 30000);
		for (uint32_t n = 1 + s % 3; n > 0 && cluster_step(c); n--)
			;
		break;
	case OP_REPORT:
		for (uint32_t n = 1 + s % 3; n > 0 && cluster_report(c); n--)
			;
		break;
	case OP_CANCEL:
		if (w->n_orders > 0 && !world_done(w, 1 + s % w->n_orders))
			world_cancel(w, 1 + s % w->n_orders);
		break;
	case OP_STOP:
		if (w->n_orders > 0) {
			uint64_t id = 1 + s % w->n_orders;
			world_stop_choice(w, id, (uint32_t)(s >> 32) % w->orders[id - 1]->request.n_choices);
		}
		break;
	case OP_KILL:
		c->next_blocks = s % 3 == 0 ? 1 + base_blocks / 2 : base_blocks;
		cluster_end_process(c, worker);
		break;
	case OP_HANG:
		cluster_hang(c, worker);
		break;
	case OP_CONTINUE:
		cluster_continue(c, worker);
		break;
	case OP_TIME:
		cluster_advance(c, s % 4000000);
		break;
	case OP_KINDS:
		break;
	}
}

// Whatever state it is in, a pipeline that has no more faults finishes everything.
static inline void finish(struct cluster *c)
{
	struct world *w = c->w;
	uint64_t most = 2000;
	for (uint32_t i = 0; i < w->n_orders; i++)
		most += (uint64_t)w->orders[i]->request.n_choices * w->orders[i]->choices[0].max_len * 8;
	for (uint32_t i = 0; i < w->options.n_stages; i++)
		cluster_continue(c, i);
	for (uint64_t round = 0; !scheduler_idle(w->scheduler) && !c->failed; round++) {
		WANT(round < most, "not done after %llu rounds", (unsigned long long)round);
		while (cluster_step(c))
			;
		if (!cluster_report(c)) {
			WANT(c->broken || !recovery_running(c->recovery) || scheduler_idle(w->scheduler),
			     "nothing to do, not idle");
			cluster_advance(c, 200000);
		}
	}
	if (!c->failed)
		world_finish(w, 1);
}

static inline void run(const struct history *h)
{
	uint64_t s = h->seed;
	uint32_t wish;
	struct scheduler_options o = choose_options(&s, &wish);
	uint32_t n_blocks = between(&s, 0, 2) == 0 ? between(&s, 1, 8) : between(&s, 8, 120);
	struct world w;
	struct cluster c;
	world_create(&w, &o, n_blocks);
	cluster_create(&c, &w, h->seed);
	for (uint32_t i = 0; i < h->n_ops && !c.failed; i++)
		apply(&c, &h->ops[i], n_blocks);
	finish(&c);
	// Given up only after a stage was lost time and again without a token in between.
	WANT(!c.failed || c.faults >= 6, "given up after %u faults: %s", c.faults, c.failure);
	struct scheduler_stats stats;
	scheduler_get_stats(w.scheduler, &stats);
	totals->steps += w.steps;
	totals->tokens += w.tokens_delivered;
	totals->requests += w.n_orders;
	totals->recoveries += c.runs - 1;
	totals->given_up += c.failed;
	totals->preemptions += stats.preemptions;
	totals->prefix_hits += stats.prefix_hits;
	totals->rows += w.model.rows_run;
	cluster_destroy(&c);
	world_destroy(&w);
}

// True: the history runs without complaint. Its complaint is shown if `loud`.
static inline bool survives(const struct history *h, bool loud)
{
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		if (!loud && freopen("/dev/null", "w", stderr) == NULL)
			_exit(3);
		alarm(20);
		run(h);
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
