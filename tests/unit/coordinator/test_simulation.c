// Thousands of random histories (support/simulation.h) against the real scheduler, block pool, recovery and codec, each
// from one printed seed; a failing one is shrunk and shown. The surprising decision: totals are asserted too, so that
// the histories cannot become idle unnoticed.
//
// STAGECOACH_SIM_COUNT histories (2000), from STAGECOACH_SIM_SEED (1) on.
#include <criterion/criterion.h>

#include "simulation.h"

enum { SHRINK_TRIES = 400 };

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
	totals = mmap(NULL, sizeof *totals, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cr_assert(totals != MAP_FAILED);
	fprintf(stderr, "%llu histories from seed %llu\n", (unsigned long long)count, (unsigned long long)first);
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		if (freopen("/dev/null", "w", stderr) == NULL)
			_exit(3);
		for (totals->seed = first; totals->seed < first + count; totals->seed++) {
			alarm(20);
			generate(&h, totals->seed);
			run(&h);
		}
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
	uint64_t seed = totals->seed;
	if (!fine) {
		generate(&h, seed);
		report(&h);
	}
	cr_assert(fine, "seed %llu fails", (unsigned long long)seed);
	const struct totals *t = totals;
	fprintf(stderr,
	        "%lu requests (%lu refused), %lu steps, %lu rows, %lu tokens, %lu from cache, %lu preemptions, "
	        "%lu recoveries, %lu given up\n",
	        t->requests, t->refused, t->steps, t->rows, t->tokens, t->prefix_hits, t->preemptions, t->recoveries,
	        t->given_up);
	if (count >= 1000) {
		cr_assert(t->requests > count && t->tokens > 10 * count && t->prefix_hits > count);
		cr_assert(t->preemptions > count / 10 && t->recoveries > count / 4 && t->given_up < count / 100);
	}
	munmap(totals, sizeof *totals);
}
