// Owns the CPU context (threads, instruction set, scratch) and the table of operations. The surprising decision: scratch
// only ever grows, so that after the first steps at the largest batch an operation allocates nothing.
#define _GNU_SOURCE // cores
#include "kernels/cpu/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/threads.h"

enum { ALIGNMENT = 64, MAX_THREADS = sizeof(((struct ops_context *)0)->thread_scratch) / sizeof(void *) };

static const char *const isa_name[] = {
	[ISA_PORTABLE] = "portable",
	[ISA_AVX2] = "avx2",
	[ISA_AVX512] = "avx512-vnni",
	[ISA_AVX512_BF16] = "avx512-bf16",
};

static size_t round_up(size_t bytes)
{
	return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int usable_cores(void)
{
	cpu_set_t set;
	return sched_getaffinity(0, sizeof(set), &set) ? 1 : CPU_COUNT(&set);
}

static void destroy(struct ops_context **context)
{
	struct ops_context *c = *context;
	*context = NULL;
	if (!c)
		return;
	cpu_pool_destroy(&c->pool);
	free(c->scratch);
	for (int i = 0; i < MAX_THREADS; i++)
		free(c->thread_scratch[i]);
	free(c);
}

static enum status create(struct ops_context **out, const struct ops_options *o, struct error *e)
{
	*out = NULL;
	if (o->threads < 0 || o->threads > MAX_THREADS)
		return error_set(e, STATUS_USAGE, "compute threads: expected 0 to %d, found %d", MAX_THREADS, o->threads);
	if (!o->threads && o->cores)
		return error_set(e, STATUS_USAGE, "compute threads: cores are given, but not how many");
	if (o->act != DTYPE_F32 || o->device != 0)
		return error_set(e, STATUS_USAGE, "a CPU has activations of type f32 and device 0: found %s and %d",
		                 dtype_info(o->act)->name, o->device);
	int threads = o->threads ? o->threads : usable_cores();
	if (threads > MAX_THREADS)
		threads = MAX_THREADS;
	struct ops_context *c = xcalloc(1, sizeof(*c));
	c->threads = threads;
	c->max_rows = o->max_rows;
	c->isa = cpu_best_isa();
	if (o->isa != ISA_AUTO && o->isa < c->isa)
		c->isa = o->isa;
	snprintf(c->description, sizeof(c->description), "%s, %d thread%s", isa_name[c->isa], threads, threads == 1 ? "" : "s");
	enum status status;
	TRY_GOTO(cpu_pool_create(&c->pool, threads, o->cores, o->may_spin, e), out);
out:
	if (status != STATUS_OK)
		destroy(&c);
	*out = c;
	return status;
}

static const char *describe(const struct ops_context *c)
{
	return c->description;
}

static enum ops_isa isa_in_use(const struct ops_context *c)
{
	return c->isa;
}

// calloc() gives large blocks as untouched zero pages, so that a KV pool costs memory only as it fills. The pointer that
// free() wants stands just below the aligned one.
static void *alloc(struct ops_context *c, size_t bytes)
{
	if (bytes > SIZE_MAX - 2 * ALIGNMENT)
		return NULL;
	char *base = calloc(1, bytes + 2 * ALIGNMENT);
	if (!base)
		return NULL;
	void **p = (void **)(((uintptr_t)base + 2 * ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
	p[-1] = base;
	return p;
}

static void release(struct ops_context *c, void *p)
{
	if (p)
		free(((void **)p)[-1]);
}

static void grow(void **p, size_t *have, size_t bytes)
{
	if (bytes <= *have && *p)
		return;
	free(*p);
	*have = round_up(bytes + bytes / 4 + ALIGNMENT);
	*p = aligned_alloc(ALIGNMENT, *have);
	ASSERT(*p != NULL);
}

void *cpu_scratch(struct ops_context *c, size_t bytes)
{
	grow(&c->scratch, &c->scratch_bytes, bytes);
	return c->scratch;
}

void *cpu_thread_scratch(struct ops_context *c, int thread, size_t bytes)
{
	grow(&c->thread_scratch[thread], &c->thread_scratch_bytes[thread], bytes);
	return c->thread_scratch[thread];
}

const struct ops *ops_cpu(void)
{
	static const struct ops table = {
		.name = "cpu",
		.create = create,
		.destroy = destroy,
		.describe = describe,
		.isa = isa_in_use,
		.measure = cpu_measure,
		.alloc = alloc,
		.free = release,
		.weight_supported = cpu_weight_supported,
		.weight_create = cpu_weight_create,
		.weight_destroy = cpu_weight_destroy,
		.weight_bytes = cpu_weight_bytes,
		.weight_borrows = cpu_weight_borrows,
		.weight_bytes_predicted = cpu_weight_bytes_predicted,
		.embed = cpu_embed,
		.rms_norm = cpu_rms_norm,
		.matmul = cpu_matmul,
		.rope_kv = cpu_rope_kv,
		.attention = cpu_attention,
		.sample = cpu_sample,
	};
	return &table;
}
