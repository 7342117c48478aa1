// A CPU context of a given instruction set, not pinned and not spinning, since tests share the machine.
#ifndef STAGECOACH_TESTS_CPU_CONTEXT_H
#define STAGECOACH_TESTS_CPU_CONTEXT_H

#include <stdlib.h>

#include "common/status.h"
#include "kernels/cpu/cpu.h"

static inline struct ops_context *context_new_spinning(enum ops_isa isa, int threads, bool may_spin)
{
	struct ops_context *c;
	struct error e;
	ASSERT(ops_cpu()->create(&c, &(struct ops_options){.threads = threads, .isa = isa, .may_spin = may_spin, .max_rows = 512}, &e) == STATUS_OK);
	return c;
}
static inline struct ops_context *context_new(enum ops_isa isa, int threads)
{
	return context_new_spinning(isa, threads, false);
}
static inline void context_free(struct ops_context *c)
{
	ops_cpu()->destroy(&c);
}

#endif
