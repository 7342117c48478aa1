// Faults planted in scheduler and block pool (coordinator/planted.h), compiled into this program alone: the simulation
// has to find each of them within as many histories as the ordinary run has. The surprising decision: a fault that is
// not found fails the build's tests, since it means that the simulation has gone blind, not that the scheduler is
// right.
#include <criterion/criterion.h>

#include "coordinator/planted.h"
#include "simulation.h"

enum planted_fault planted_fault;

static const char *const names[PLANTED_COUNT] = {"none",
#define PLANTED_NAME(name) #name,
                                                 PLANTED_FAULTS(PLANTED_NAME)};

// Histories until one fails; 0: none of them.
static uint64_t find(enum planted_fault fault, uint64_t most)
{
	totals->seed = 0;
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		planted_fault = fault;
		if (freopen("/dev/null", "w", stderr) == NULL)
			_exit(3);
		struct history h;
		for (totals->seed = 1; totals->seed <= most; totals->seed++) {
			alarm(20);
			generate(&h, totals->seed);
			run(&h);
		}
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : totals->seed;
}

Test(planted_faults, each_is_found_by_the_ordinary_run_and_nothing_is_found_without_one, .timeout = 230)
{
	totals = mmap(NULL, sizeof *totals, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	cr_assert(totals != MAP_FAILED);
	cr_assert_eq(find(PLANTED_NONE, 100), 0, "a history fails though no fault is planted");
	for (uint32_t i = 1; i < PLANTED_COUNT; i++) {
		uint64_t histories = find((enum planted_fault)i, 2000);
		fprintf(stderr, "%s: history %lu\n", names[i], (unsigned long)histories);
		cr_expect(histories > 0, "%s is not found", names[i]);
	}
	munmap(totals, sizeof *totals);
}
