// Owns the search over contiguous splits: dynamic programming under bounds, then single moves judged exactly. The
// surprising decision: the programme minimises the time through all stages under a bound on the busiest, for a few
// bounds, because few sequences want the first and many want the second; the exact judge then picks.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/planner_internal.h"

static const double GOOD_ENOUGH = 0.98; // of the best tokens per second; among those, most blocks win

struct bounds {
	double stage_us; // longest that a stage may take for one micro-batch
	uint64_t blocks; // least that each stage must hold
	double seqs, context;
	bool alone; // as if nobody shared a device; the judge knows better, but bounds cannot add stages up
};

struct search {
	const struct planner *p;
	double *value;   // [n_stages + 1][n_layers + 1]: least time through the stages so far
	uint16_t *taken; // layers of the stage that reached it
	double floor;    // 0: the fastest split is wanted; else, of those at least as fast as this, the one with most
	                 // blocks
	uint32_t best[MAX_STAGES];
	struct verdict verdict;
};

static uint32_t least_layers(const struct planner *p, uint32_t stage)
{
	return p->o->n_stages > 1 && (stage == 0 || stage + 1 == p->o->n_stages) ? 0 : 1;
}

// cost(): of stage over [first, first + n), INFINITY where out of bounds. `longest` replaces the sum by the maximum.
typedef double (*cost_fn)(const struct planner *, uint32_t stage, uint32_t first, uint32_t n, const struct bounds *);

static double time_cost(const struct planner *p, uint32_t stage, uint32_t first, uint32_t n, const struct bounds *b)
{
	if (planner_need_bytes(p, stage, first, n, b->blocks) > p->devices[stage].memory_limit_bytes)
		return INFINITY;
	double us = planner_stage_us(p, stage, first, n, b->seqs, b->context);
	return us * (b->alone ? 1 : p->sharers[stage]) > b->stage_us ? INFINITY : us;
}

static double deficit_cost(const struct planner *p, uint32_t stage, uint32_t first, uint32_t n, const struct bounds *b)
{
	uint64_t need = planner_need_bytes(p, stage, first, n, b->blocks), limit = p->devices[stage].memory_limit_bytes;
	return need > limit ? (double)(need - limit) : 0;
}

static bool solve(struct search *x, const struct bounds *b, cost_fn cost, bool longest, uint32_t *layers)
{
	const struct planner *p = x->p;
	uint32_t n_layers = p->model->n_layers, width = n_layers + 1, n_stages = p->o->n_stages;
	for (uint32_t j = 0; j <= n_layers; j++)
		x->value[j] = j == 0 ? 0 : INFINITY;
	for (uint32_t s = 0; s < n_stages; s++) {
		double *from = x->value + (size_t)s * width, *to = from + width;
		uint16_t *taken = x->taken + (size_t)(s + 1) * width;
		for (uint32_t j = 0; j <= n_layers; j++)
			to[j] = INFINITY;
		for (uint32_t j = 0; j <= n_layers; j++) {
			if (from[j] == INFINITY)
				continue;
			for (uint32_t n = least_layers(p, s); j + n <= n_layers; n++) {
				double c = cost(p, s, j, n, b);
				if (c == INFINITY)
					break; // more layers only cost more
				double total = longest ? fmax(from[j], c) : from[j] + c;
				if (total < to[j + n]) {
					to[j + n] = total;
					taken[j + n] = (uint16_t)n;
				}
			}
		}
	}
	if (x->value[(size_t)n_stages * width + n_layers] == INFINITY)
		return false;
	for (uint32_t s = n_stages, j = n_layers; s > 0; s--) {
		layers[s - 1] = x->taken[(size_t)s * width + j];
		j -= layers[s - 1];
	}
	return true;
}

static bool propose(struct search *x, const uint32_t *layers)
{
	struct verdict v = planner_judge(x->p, layers), *old = &x->verdict;
	bool faster = v.tokens_per_s > old->tokens_per_s, more = v.blocks > old->blocks;
	bool better = x->floor > 0 ? v.tokens_per_s >= x->floor && (more || (v.blocks == old->blocks && faster))
	                           : faster || (v.tokens_per_s > 0 && v.tokens_per_s == old->tokens_per_s && more);
	if (better) {
		x->verdict = v;
		memcpy(x->best, layers, x->p->o->n_stages * sizeof *layers);
	}
	return better;
}

// All splits worth a look for `running` sequences in m micro-batches.
static void propose_for(struct search *x, uint32_t running, uint32_t m)
{
	const struct planner *p = x->p;
	uint32_t layers[MAX_STAGES];
	uint64_t blocks = (uint64_t)running * ((p->o->plan_tokens + p->o->block_size - 1) / p->o->block_size);
	struct bounds b = {.stage_us = INFINITY,
	                   .seqs = (double)running / m,
	                   .context = p->o->plan_tokens,
	                   .blocks = blocks > p->least_blocks ? blocks : p->least_blocks};
	if (!solve(x, &b, time_cost, false, layers)) {
		b.blocks = p->least_blocks; // then at least what fits
		if (running > 1 || !solve(x, &b, time_cost, false, layers))
			return;
	}
	propose(x, layers);
	double low = 0, high = 0;
	for (uint32_t s = 0; s < p->o->n_stages; s++)
		high += planner_stage_us(p, s, 0, p->model->n_layers, b.seqs, b.context) * p->sharers[s];
	for (int i = 0; i < 30 && high - low > 1e-3 * high; i++) {
		b.stage_us = (low + high) / 2;
		*(solve(x, &b, time_cost, false, layers) ? &high : &low) = b.stage_us;
	}
	static const double slack[] = {1, 1.02, 1.1, 1.3, 2};
	for (size_t i = 0; i < sizeof slack / sizeof *slack; i++) {
		b.stage_us = high * slack[i];
		if (solve(x, &b, time_cost, false, layers))
			propose(x, layers);
	}
}

// Moves a few layers' worth from one stage to another, everything between shifting along, while it helps.
static void climb(struct search *x)
{
	const struct planner *p = x->p;
	uint32_t n = p->o->n_stages, reach = n <= 16 ? n : 2;
	for (int round = 0; round < 64; round++) {
		double before = x->verdict.tokens_per_s;
		uint64_t blocks = x->verdict.blocks;
		for (uint32_t from = 0; from < n; from++) {
			for (uint32_t to = 0; to < n; to++) {
				uint32_t apart = from > to ? from - to : to - from;
				if (apart == 0 || apart > reach)
					continue;
				for (uint32_t k = 1; k <= 4; k *= 2) {
					uint32_t layers[MAX_STAGES];
					memcpy(layers, x->best, n * sizeof *layers);
					if (layers[from] < k + least_layers(p, from))
						break;
					layers[from] -= k;
					layers[to] += k;
					propose(x, layers);
				}
			}
		}
		if (x->verdict.tokens_per_s == before && x->verdict.blocks == blocks)
			return;
	}
}

static void bisect_blocks(struct search *x, uint32_t running, uint32_t m, bool alone)
{
	uint64_t low = x->verdict.blocks, high = low * 2 + 1024;
	for (int i = 0; i < 24 && low + 1 < high; i++) {
		uint32_t layers[MAX_STAGES];
		struct bounds b = {.seqs = (double)running / m,
		                   .context = x->p->o->plan_tokens,
		                   .alone = alone,
		                   .blocks = low + (high - low) / 2,
		                   .stage_us = running / x->floor * 1e6 / m};
		if (solve(x, &b, time_cost, false, layers) && propose(x, layers))
			low = x->verdict.blocks;
		else
			high = b.blocks;
	}
}

static bool any_shared(const struct planner *p)
{
	for (uint32_t s = 0; s < p->o->n_stages; s++)
		if (p->sharers[s] > 1)
			return true;
	return false;
}

// Among splits nearly as fast, the one with the most blocks: bisects on blocks, for so many running sequences as may
// pay with them, under the round that they may take.
static void prefer_blocks(struct search *x)
{
	const struct planner *p = x->p;
	x->floor = x->verdict.tokens_per_s * GOOD_ENOUGH;
	for (uint32_t running = x->verdict.running;; running += running / 4 + 1) {
		running = running < p->sequences ? running : p->sequences;
		for (uint32_t m = 1; m <= p->o->n_stages && m <= running; m++) {
			bisect_blocks(x, running, m, false);
			if (any_shared(p))
				bisect_blocks(x, running, m, true);
		}
		if (running == p->sequences)
			break;
	}
	climb(x);
}

bool planner_search(const struct planner *p, uint32_t *layers)
{
	struct search x = {.p = p};
	size_t cells = (size_t)(p->o->n_stages + 1) * (p->model->n_layers + 1);
	x.value = xcalloc(cells, sizeof *x.value);
	x.taken = xcalloc(cells, sizeof *x.taken);
	for (uint32_t running = p->sequences;; running = running * 3 / 4) {
		uint32_t most = p->o->n_stages < running ? p->o->n_stages : running;
		for (uint32_t m = most; m >= 1; m = m / 2)
			propose_for(&x, running, m);
		if (running == 1)
			break;
	}
	bool found = x.verdict.tokens_per_s > 0;
	if (found) {
		climb(&x);
		prefer_blocks(&x);
		memcpy(layers, x.best, p->o->n_stages * sizeof *layers);
	} else {
		struct bounds b = {.blocks = p->least_blocks};
		ASSERT(solve(&x, &b, deficit_cost, true, layers));
	}
	free(x.value);
	free(x.taken);
	return found;
}
