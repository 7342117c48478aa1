// Random histories of arrivals, ends, cancels, stops, deaths and late results against the real scheduler, block pool and
// codec, each from one printed seed. The surprising decision: a history is a list of operations that any sublist of is
// a history too, so that a failing one is shrunk by leaving operations out, each attempt in a process of its own.
//
// STAGECOACH_SIM_COUNT histories (2000), from STAGECOACH_SIM_SEED (1) on.
#include <criterion/criterion.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pipeline_model.h"

enum { OPS_MAX = 400, SHRINK_TRIES = 400 };

enum op_kind { OP_ADD, OP_STEP, OP_REPORT, OP_CANCEL, OP_STOP, OP_SUSPEND, OP_EPOCH, OP_KINDS };
static const char *const op_names[OP_KINDS] = {"add", "step", "report", "cancel", "stop choice", "suspend", "new epoch"};

struct op {
	enum op_kind kind;
	uint64_t r;
};

struct history {
	uint64_t seed;
	struct op ops[OPS_MAX];
	uint32_t n_ops;
};

static uint64_t draw(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15ull;
	uint64_t z = *state;
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

static uint32_t between(uint64_t *state, uint32_t low, uint32_t high)
{
	return low + (uint32_t)(draw(state) % (high - low + 1));
}

// A round is worth so many micro-batches; only that it varies with load matters here.
static double round_us(void *user, uint32_t m, uint32_t n, uint32_t context)
{
	uint32_t best = 1 + (n + context / 16 + *(uint32_t *)user) % 4;
	return 100 + (m > best ? m - best : best - m) * 20;
}

static struct scheduler_options choose_options(uint64_t *s, uint32_t *wish)
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
		.round_us = between(s, 0, 3) ? round_us : NULL,
		.user = wish,
	};
	return o;
}

static void generate(struct history *h, uint64_t seed)
{
	uint64_t s = seed * 77 + 5;
	h->seed = seed;
	h->n_ops = between(&s, 20, OPS_MAX);
	uint32_t deaths = between(&s, 0, 2) == 0 ? 2 : 0, cancels = between(&s, 0, 5);
	for (uint32_t i = 0; i < h->n_ops; i++) {
		uint32_t x = between(&s, 0, 99);
		enum op_kind k = x < 20 ? OP_ADD : x < 58 ? OP_STEP : OP_REPORT;
		if (x >= 100 - deaths)
			k = between(&s, 0, 1) ? OP_SUSPEND : OP_EPOCH;
		else if (x >= 100 - deaths - cancels)
			k = between(&s, 0, 2) ? OP_CANCEL : OP_STOP;
		h->ops[i] = (struct op){.kind = k, .r = draw(&s)};
	}
}

static void add(struct world *w, uint64_t s)
{
	uint32_t prompt[128], end_ids[4];
	uint32_t longest = w->options.max_context + 2;
	uint32_t shared = between(&s, 0, 3) == 0 ? 0 : between(&s, 1, longest);
	uint32_t n = between(&s, 1, 2) == 1 ? between(&s, 1, 12) : between(&s, 1, longest);
	uint64_t family = between(&s, 1, 3); // prompts of a family begin alike
	for (uint32_t i = 0; i < n; i++)
		prompt[i] = i < shared ? (uint32_t)(model_mix(family, i) % MODEL_VOCAB) : between(&s, 0, MODEL_VOCAB - 1);
	uint32_t n_end = between(&s, 0, 4);
	for (uint32_t i = 0; i < n_end; i++)
		end_ids[i] = between(&s, 0, MODEL_VOCAB - 1);
	struct scheduler_request r = {
		.prompt = prompt,
		.n_prompt = n,
		.n_choices = between(&s, 0, 3) == 0 ? between(&s, 2, 5) : 1,
		.max_tokens = between(&s, 0, 3) == 0 ? between(&s, 1, longest) : between(&s, 1, 16),
		.end_ids = end_ids,
		.n_end_ids = n_end,
		.cache_salt = between(&s, 0, 4) == 0,
		.not_ahead = between(&s, 0, 7) == 0,
		.sampling = {.presence_penalty = between(&s, 0, 3) == 0 ? 0.5f : 0, .min_tokens = between(&s, 0, 1)},
	};
	struct error e;
	world_add(w, r, &e);
	scheduler_check(w->scheduler);
}

static void apply(struct world *w, const struct op *op, uint32_t base_blocks)
{
	uint64_t s = op->r;
	switch (op->kind) {
	case OP_ADD:
		add(w, s);
		break;
	case OP_STEP:
		w->now_us += s % 30000;
		for (uint32_t n = 1 + s % 3; n > 0 && world_step(w); n--)
			;
		break;
	case OP_REPORT:
		for (uint32_t n = 1 + s % 3; n > 0 && world_report(w); n--)
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
	case OP_SUSPEND:
		scheduler_suspend(w->scheduler);
		break;
	case OP_EPOCH:
		world_new_epoch(w, s % 3 == 0 ? 1 + base_blocks / 2 : base_blocks, s % 2);
		break;
	case OP_KINDS:
		break;
	}
}

static void run(const struct history *h)
{
	uint64_t s = h->seed;
	uint32_t wish;
	struct scheduler_options o = choose_options(&s, &wish);
	uint32_t n_blocks = between(&s, 0, 2) == 0 ? between(&s, 1, 8) : between(&s, 8, 120);
	struct world w;
	world_create(&w, &o, n_blocks);
	for (uint32_t i = 0; i < h->n_ops; i++)
		apply(&w, &h->ops[i], n_blocks);
	// Whatever state it is in, a pipeline that comes back finishes all of it.
	if (h->seed % 2 == 0)
		world_new_epoch(&w, w.n_blocks[0], false);
	else if (w.epoch > 1)
		world_new_epoch(&w, w.n_blocks[0], true);
	bool suspended = false;
	for (uint32_t i = 0; i < h->n_ops; i++)
		suspended = h->ops[i].kind == OP_SUSPEND || (suspended && h->ops[i].kind != OP_EPOCH);
	if (suspended)
		world_new_epoch(&w, w.n_blocks[0], true);
	uint64_t work = 1000;
	for (uint32_t i = 0; i < w.n_orders; i++)
		work += (uint64_t)w.orders[i]->request.n_choices * w.orders[i]->choices[0].max_len * 8;
	world_finish(&w, work);
	world_destroy(&w);
}

// True: the history runs without complaint. Its complaint is shown if `loud`.
static bool survives(const struct history *h, bool loud)
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

static void shrink(struct history *h)
{
	uint32_t tries = 0;
	for (uint32_t part = h->n_ops / 2; part >= 1 && tries < SHRINK_TRIES; part /= 2) {
		for (uint32_t at = 0; at < h->n_ops && tries < SHRINK_TRIES; tries++) {
			struct history less = *h;
			uint32_t n = part < h->n_ops - at ? part : h->n_ops - at;
			memmove(&less.ops[at], &less.ops[at + n], (h->n_ops - at - n) * sizeof less.ops[0]);
			less.n_ops -= n;
			if (survives(&less, false))
				at += part;
			else
				*h = less;
		}
	}
}

static void report(struct history *h)
{
	fprintf(stderr, "history of seed %llu fails:\n", (unsigned long long)h->seed);
	survives(h, true);
	shrink(h);
	fprintf(stderr, "shrunk to %u operations:", h->n_ops);
	for (uint32_t i = 0; i < h->n_ops; i++)
		fprintf(stderr, " %s(%llu)", op_names[h->ops[i].kind], (unsigned long long)h->ops[i].r);
	fprintf(stderr, "\n");
	survives(h, true);
}

static uint64_t setting(const char *name, uint64_t otherwise)
{
	const char *text = getenv(name);
	return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

Test(simulation, every_request_ends_once_with_its_own_tokens_whatever_happens, .timeout = 230)
{
	uint64_t first = setting("STAGECOACH_SIM_SEED", 1), count = setting("STAGECOACH_SIM_COUNT", 2000);
	struct history h;
	uint64_t *at = mmap(NULL, sizeof *at, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cr_assert(at != MAP_FAILED);
	fprintf(stderr, "%llu histories from seed %llu\n", (unsigned long long)count, (unsigned long long)first);
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		if (freopen("/dev/null", "w", stderr) == NULL)
			_exit(3);
		for (*at = first; *at < first + count; ++*at) {
			alarm(20);
			generate(&h, *at);
			run(&h);
		}
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
	if (!fine) {
		generate(&h, *at);
		report(&h);
	}
	cr_assert(fine, "seed %llu fails", (unsigned long long)*at);
	munmap(at, sizeof *at);
}
