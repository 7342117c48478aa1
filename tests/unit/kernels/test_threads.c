// The thread pool: every thread runs once, barriers hold, pieces are handed out once, sleeping threads wake.
#define _GNU_SOURCE // cores
#include <criterion/criterion.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/threads.h"

enum { MAX = 8, PIECES = 1000, ROUNDS = 300 };

struct job {
	struct ops_context *context;
	int ran[MAX], threads_seen[MAX];
	_Atomic int piece_count[PIECES];
	int stage[MAX];
	_Atomic int wrong;
};

static struct ops_context context;

static void start(int threads, const int *cores, bool spin)
{
	struct error e = {""};
	context = (struct ops_context){.threads = threads};
	cr_assert_eq(cpu_pool_create(&context.pool, threads, cores, spin, &e), STATUS_OK, "%s", e.text);
}

static void count_runs(void *arg, int thread, int threads)
{
	struct job *j = arg;
	j->ran[thread]++;
	j->threads_seen[thread] = threads;
}

static void take_pieces(void *arg, int thread, int threads)
{
	struct job *j = arg;
	for (int p; (p = cpu_next_piece(j->context)) < PIECES;)
		atomic_fetch_add(&j->piece_count[p], 1);
}

static void pass_barriers(void *arg, int thread, int threads)
{
	struct job *j = arg;
	for (int s = 1; s <= 10; s++) {
		j->stage[thread] = s;
		cpu_barrier(j->context);
		for (int t = 0; t < threads; t++)
			if (j->stage[t] != s)
				atomic_fetch_add(&j->wrong, 1);
		cpu_barrier(j->context);
	}
}

static const struct {
	int threads;
	bool spin;
} cases[] = {{1, false}, {2, false}, {2, true}, {3, false}, {8, false}, {8, true}};
enum { CASES = sizeof(cases) / sizeof(cases[0]) };

Test(threads, every_thread_runs_once_in_each_region)
{
	for (int c = 0; c < CASES; c++) {
		struct job j = {.context = &context};
		start(cases[c].threads, NULL, cases[c].spin);
		for (int i = 0; i < ROUNDS; i++)
			cpu_parallel(&context, count_runs, &j);
		for (int t = 0; t < cases[c].threads; t++) {
			cr_assert_eq(j.ran[t], ROUNDS, "case %d thread %d ran %d times", c, t, j.ran[t]);
			cr_assert_eq(j.threads_seen[t], cases[c].threads);
		}
		cpu_pool_destroy(&context.pool);
		cr_assert_null(context.pool);
	}
}

Test(threads, pieces_are_handed_out_once_and_start_at_zero_in_each_region)
{
	for (int c = 0; c < CASES; c++) {
		struct job j = {.context = &context};
		start(cases[c].threads, NULL, cases[c].spin);
		for (int i = 1; i <= 20; i++) {
			cpu_parallel(&context, take_pieces, &j);
			for (int p = 0; p < PIECES; p++)
				cr_assert_eq(j.piece_count[p], i, "case %d piece %d: %d, expected %d", c, p, j.piece_count[p], i);
		}
		cpu_pool_destroy(&context.pool);
	}
}

Test(threads, no_thread_passes_a_barrier_before_all_have_come)
{
	for (int c = 0; c < CASES; c++) {
		struct job j = {.context = &context};
		start(cases[c].threads, NULL, cases[c].spin);
		for (int i = 0; i < 20; i++)
			cpu_parallel(&context, pass_barriers, &j);
		cr_assert_eq(j.wrong, 0);
		cpu_pool_destroy(&context.pool);
	}
}

Test(threads, threads_that_fell_asleep_wake_for_the_next_region)
{
	struct job j = {.context = &context};
	start(4, NULL, true);
	for (int i = 0; i < 10; i++) {
		cpu_parallel(&context, count_runs, &j);
		nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); // longer than a thread spins
	}
	for (int t = 0; t < 4; t++)
		cr_assert_eq(j.ran[t], 10);
	cpu_pool_destroy(&context.pool);
}

static void note_core(void *arg, int thread, int threads)
{
	struct job *j = arg;
	j->ran[thread] = sched_getcpu();
}

Test(threads, threads_run_on_the_cores_they_are_given_and_the_caller_gets_its_own_back)
{
	cpu_set_t before, after;
	int cores[2], n = 0;
	sched_getaffinity(0, sizeof(before), &before);
	for (int i = 0; i < CPU_SETSIZE && n < 2; i++)
		if (CPU_ISSET(i, &before))
			cores[n++] = i;
	if (n < 2)
		cores[n++] = cores[0];
	struct job j = {.context = &context};
	start(2, cores, false);
	for (int i = 0; i < 5; i++) {
		cpu_parallel(&context, note_core, &j);
		for (int t = 0; t < 2; t++)
			cr_assert_eq(j.ran[t], cores[t], "thread %d on core %d, expected %d", t, j.ran[t], cores[t]);
	}
	cpu_pool_destroy(&context.pool);
	sched_getaffinity(0, sizeof(after), &after);
	cr_assert(CPU_EQUAL(&before, &after));
}

Test(threads, a_core_that_does_not_exist_is_refused_by_its_number)
{
	struct error e = {""};
	int cores[2] = {0, CPU_SETSIZE - 1};
	cpu_set_t set;
	sched_getaffinity(0, sizeof(set), &set);
	while (!CPU_ISSET(cores[0], &set))
		cores[0]++;
	struct cpu_pool *p;
	cr_assert_eq(cpu_pool_create(&p, 2, cores, false, &e), STATUS_UNAVAILABLE);
	cr_assert_null(p);
	cr_assert_not_null(strstr(e.text, "1023"), "%s", e.text);
}

Test(threads, the_table_creates_a_context_and_refuses_impossible_thread_counts)
{
	const struct ops *ops = ops_cpu();
	struct ops_context *c;
	struct error e = {""};
	cr_assert_eq(ops->create(&c, &(struct ops_options){.threads = 2, .max_rows = 4}, &e), STATUS_OK, "%s", e.text);
	cr_assert_not_null(strstr(ops->describe(c), "2 threads"), "%s", ops->describe(c));
	char *p = ops->alloc(c, 1000);
	cr_assert_eq((uintptr_t)p % 64, 0);
	for (int i = 0; i < 1000; i++)
		cr_assert_eq(p[i], 0);
	ops->free(c, p);
	cr_assert_null(ops->alloc(c, SIZE_MAX - 10));
	ops->destroy(&c);
	cr_assert_null(c);
	cr_assert_eq(ops->create(&c, &(struct ops_options){.threads = 1000}, &e), STATUS_USAGE);
	cr_assert_eq(ops->create(&c, &(struct ops_options){.threads = 1, .isa = ISA_PORTABLE}, &e), STATUS_OK);
	cr_assert_eq(c->isa, ISA_PORTABLE);
	ops->destroy(&c);
}
