// The thread pool behind cpu_parallel(); private to threads.c and cpu.c.
#ifndef STAGECOACH_KERNELS_CPU_THREADS_H
#define STAGECOACH_KERNELS_CPU_THREADS_H

#include <stdbool.h>

#include "common/status.h"

struct cpu_pool;

// Starts threads - 1 threads. cores [threads] or NULL; STATUS_UNAVAILABLE names a core that may not be used.
// The caller of cpu_parallel() is thread 0 and is pinned to cores[0] when it first calls.
enum status cpu_pool_create(struct cpu_pool **out, int threads, const int *cores, bool may_spin, struct error *);
void cpu_pool_destroy(struct cpu_pool **);

#endif
