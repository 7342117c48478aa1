// Owns the compute threads: start, pinning, fork and join of one parallel region, a barrier and a shared counter inside
// it. The surprising decision: a waiting thread spins for 50 us before it sleeps, but only where the coordinator has said
// that there are cores enough; a decode step is some 240 regions of a few microseconds each, and a futex wake costs as
// much as the region itself.
#define _GNU_SOURCE // cores
#include "kernels/cpu/threads.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/cpu.h"

enum { SPIN_NS = 50000, SPIN_CHECKS = 64, LINE = 64 };

typedef void parallel_fn(void *arg, int thread, int threads);

struct pool_thread {
	struct cpu_pool *pool;
	pthread_t thread;
	int index;
	bool started;
};

// Each word that threads write by turns has a cache line of its own.
struct cpu_pool {
	// Set by the caller before `region` changes, read by the others after.
	parallel_fn *fn;
	void *arg;
	int threads;
	bool may_spin;
	bool stop;
	const int *cores; // [threads] or NULL, owned
	bool caller_known;
	pthread_t caller;
	cpu_set_t caller_cores; // what the caller had before it was pinned
	struct pool_thread *thread; // [threads - 1]
	_Alignas(LINE) _Atomic uint32_t region;    // number of the region; others wait for it to change
	_Alignas(LINE) _Atomic uint32_t sleepers;  // threads asleep on `region`
	_Alignas(LINE) _Atomic uint32_t running;   // threads that have not finished the region, without the caller
	_Atomic uint32_t caller_sleeps;
	_Alignas(LINE) _Atomic int next_piece;
	_Alignas(LINE) _Atomic uint32_t barrier_arrived;
	_Alignas(LINE) _Atomic uint32_t barrier_round;
	_Atomic uint32_t barrier_sleepers;
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static inline void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// Returns the first value of *word that differs from `old`. Whoever changes the word looks at *sleepers afterwards; all
// four accesses are sequentially consistent, so that either the changer sees the sleeper or the sleeper the change.
static uint32_t wait_change(const struct cpu_pool *p, _Atomic uint32_t *word, uint32_t old, _Atomic uint32_t *sleepers)
{
	uint32_t v = atomic_load_explicit(word, memory_order_acquire);
	if (v != old)
		return v;
	if (p->may_spin) {
		int64_t end = 0;
		do {
			for (int i = 0; i < SPIN_CHECKS; i++) {
				relax();
				v = atomic_load_explicit(word, memory_order_acquire);
				if (v != old)
					return v;
			}
			int64_t t = now_ns();
			if (!end)
				end = t + SPIN_NS;
			else if (t > end)
				break;
			sched_yield(); // the thread waited for may want this very core
		} while (true);
	}
	atomic_fetch_add(sleepers, 1);
	while ((v = atomic_load(word)) == old)
		futex_wait(word, old);
	atomic_fetch_sub(sleepers, 1);
	return v;
}

static void *thread_main(void *arg)
{
	struct pool_thread *t = arg;
	struct cpu_pool *p = t->pool;
	uint32_t region = 0;
	for (;;) {
		region = wait_change(p, &p->region, region, &p->sleepers);
		if (p->stop)
			return NULL;
		p->fn(p->arg, t->index, p->threads);
		if (atomic_fetch_sub(&p->running, 1) == 1 && atomic_load(&p->caller_sleeps))
			futex_wake_all(&p->running);
	}
}

static enum status pin(pthread_t thread, int index, int core, struct error *e)
{
	cpu_set_t set;
	CPU_ZERO(&set);
	if (core < 0 || core >= CPU_SETSIZE)
		return error_set(e, STATUS_UNAVAILABLE, "compute thread %d: there is no core %d", index, core);
	CPU_SET(core, &set);
	int rc = pthread_setaffinity_np(thread, sizeof(set), &set);
	if (rc)
		return error_set(e, STATUS_UNAVAILABLE, "compute thread %d may not run on core %d: %s", index, core, strerror(rc));
	return STATUS_OK;
}

enum status cpu_pool_create(struct cpu_pool **out, int threads, const int *cores, bool may_spin, struct error *e)
{
	enum status status = STATUS_OK;
	struct cpu_pool *p = aligned_alloc(LINE, sizeof(*p));
	if (!p)
		return error_set(e, STATUS_UNAVAILABLE, "no memory for %d compute threads", threads);
	memset(p, 0, sizeof(*p));
	p->threads = threads;
	p->may_spin = may_spin;
	p->thread = xcalloc((unsigned long)threads, sizeof(*p->thread));
	if (cores) {
		int *copy = xmalloc((unsigned long)threads * sizeof(int));
		memcpy(copy, cores, (size_t)threads * sizeof(int));
		p->cores = copy;
		// Thread 0 is pinned later, by the thread that turns out to be the caller; whether it can be is known now.
		cpu_set_t before;
		if (!pthread_getaffinity_np(pthread_self(), sizeof(before), &before)) {
			TRY_GOTO(pin(pthread_self(), 0, cores[0], e), out);
			pthread_setaffinity_np(pthread_self(), sizeof(before), &before);
		}
	}
	for (int i = 1; i < threads; i++) {
		struct pool_thread *t = &p->thread[i - 1];
		*t = (struct pool_thread){.pool = p, .index = i};
		int rc = pthread_create(&t->thread, NULL, thread_main, t);
		if (rc) {
			status = error_set(e, STATUS_UNAVAILABLE, "cannot start compute thread %d of %d: %s", i, threads, strerror(rc));
			goto out;
		}
		t->started = true;
		if (cores)
			TRY_GOTO(pin(t->thread, i, cores[i], e), out);
	}
out:
	if (status != STATUS_OK)
		cpu_pool_destroy(&p);
	*out = p;
	return status;
}

void cpu_pool_destroy(struct cpu_pool **pool)
{
	struct cpu_pool *p = *pool;
	*pool = NULL;
	if (!p)
		return;
	p->stop = true;
	atomic_fetch_add(&p->region, 1);
	futex_wake_all(&p->region);
	for (int i = 0; i < p->threads - 1; i++)
		if (p->thread[i].started)
			pthread_join(p->thread[i].thread, NULL);
	if (p->cores && p->caller_known && pthread_equal(p->caller, pthread_self()))
		pthread_setaffinity_np(pthread_self(), sizeof(p->caller_cores), &p->caller_cores);
	free(p->thread);
	free((void *)p->cores);
	free(p);
}

static void pin_caller(struct cpu_pool *p)
{
	if (!p->cores || (p->caller_known && pthread_equal(p->caller, pthread_self())))
		return;
	p->caller = pthread_self();
	p->caller_known = true;
	pthread_getaffinity_np(p->caller, sizeof(p->caller_cores), &p->caller_cores);
	pin(p->caller, 0, p->cores[0], NULL);
}

void cpu_parallel(struct ops_context *c, parallel_fn *fn, void *arg)
{
	struct cpu_pool *p = c->pool;
	pin_caller(p);
	atomic_store_explicit(&p->next_piece, 0, memory_order_relaxed);
	if (p->threads == 1) {
		fn(arg, 0, 1);
		return;
	}
	p->fn = fn;
	p->arg = arg;
	atomic_store_explicit(&p->running, (uint32_t)p->threads - 1, memory_order_relaxed);
	atomic_fetch_add(&p->region, 1);
	if (atomic_load(&p->sleepers))
		futex_wake_all(&p->region);
	fn(arg, 0, p->threads);
	for (uint32_t v; (v = atomic_load_explicit(&p->running, memory_order_acquire)) != 0;)
		wait_change(p, &p->running, v, &p->caller_sleeps);
}

void cpu_barrier(struct ops_context *c)
{
	struct cpu_pool *p = c->pool;
	if (p->threads == 1)
		return;
	uint32_t round = atomic_load_explicit(&p->barrier_round, memory_order_relaxed);
	if (atomic_fetch_add(&p->barrier_arrived, 1) == (uint32_t)p->threads - 1) {
		atomic_store_explicit(&p->barrier_arrived, 0, memory_order_relaxed);
		atomic_fetch_add(&p->barrier_round, 1);
		if (atomic_load(&p->barrier_sleepers))
			futex_wake_all(&p->barrier_round);
	} else {
		wait_change(p, &p->barrier_round, round, &p->barrier_sleepers);
	}
}

int cpu_next_piece(struct ops_context *c)
{
	struct cpu_pool *p = c->pool;
	if (p->threads > 1)
		return atomic_fetch_add_explicit(&p->next_piece, 1, memory_order_relaxed);
	int n = atomic_load_explicit(&p->next_piece, memory_order_relaxed);
	atomic_store_explicit(&p->next_piece, n + 1, memory_order_relaxed);
	return n;
}
