// A thread pool as simple as can be, for tests of single operations.
#ifndef STAGECOACH_TESTS_CPU_STAND_IN_H
#define STAGECOACH_TESTS_CPU_STAND_IN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/status.h"
#include "kernels/cpu/cpu.h"

struct cpu_pool {
	pthread_barrier_t barrier;
	atomic_int next;
	void (*fn)(void *, int, int);
	void *arg;
	int threads;
};
struct stand_in_thread { struct cpu_pool *pool; int index; };

static void *stand_in_main(void *arg)
{
	struct stand_in_thread *t = arg;
	t->pool->fn(t->pool->arg, t->index, t->pool->threads);
	return NULL;
}
void cpu_parallel(struct ops_context *c, void (*fn)(void *, int, int), void *arg)
{
	pthread_t id[16];
	struct stand_in_thread t[16];
	c->pool->fn = fn;
	c->pool->arg = arg;
	atomic_store(&c->pool->next, 0);
	for (int i = 1; i < c->threads; i++) {
		t[i] = (struct stand_in_thread){c->pool, i};
		pthread_create(&id[i], NULL, stand_in_main, &t[i]);
	}
	fn(arg, 0, c->threads);
	for (int i = 1; i < c->threads; i++)
		pthread_join(id[i], NULL);
}
void cpu_barrier(struct ops_context *c) { pthread_barrier_wait(&c->pool->barrier); }
int cpu_next_piece(struct ops_context *c) { return atomic_fetch_add(&c->pool->next, 1); }
static void stand_in_grow(void **p, size_t *have, size_t bytes)
{
	if (*p && bytes <= *have)
		return;
	free(*p);
	*have = (bytes + 64) / 64 * 64;
	*p = aligned_alloc(64, *have);
}
void *cpu_scratch(struct ops_context *c, size_t bytes)
{
	stand_in_grow(&c->scratch, &c->scratch_bytes, bytes);
	return c->scratch;
}
void *cpu_thread_scratch(struct ops_context *c, int t, size_t bytes)
{
	stand_in_grow(&c->thread_scratch[t], &c->thread_scratch_bytes[t], bytes);
	return c->thread_scratch[t];
}
enum ops_isa cpu_best_isa(void)
{
	return __builtin_cpu_supports("avx512vnni") ? ISA_AVX512 : __builtin_cpu_supports("avx2") ? ISA_AVX2 : ISA_PORTABLE;
}
static struct ops_context *context_new(enum ops_isa isa, int threads)
{
	struct ops_context *c = xcalloc(1, sizeof *c);
	c->isa = isa;
	c->threads = threads;
	c->pool = xcalloc(1, sizeof *c->pool);
	c->pool->threads = threads;
	pthread_barrier_init(&c->pool->barrier, NULL, (unsigned)threads);
	return c;
}
static void context_free(struct ops_context *c)
{
	for (int i = 0; i < 256; i++)
		free(c->thread_scratch[i]);
	free(c->scratch);
	pthread_barrier_destroy(&c->pool->barrier);
	free(c->pool);
	free(c);
}

#endif
