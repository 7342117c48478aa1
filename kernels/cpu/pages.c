// Owns the mappings that weights lie in. Matrices of a small model are smaller than a huge page, so they are cut from
// shared mappings; the rest of a mapping is never touched and costs nothing. One core reads 15 GB/s from pages of 2 MiB
// where it reads 12 from pages of 4 KiB (Xeon of the Sapphire Rapids kind, inside a virtual machine). The surprising
// decision: under AddressSanitizer each piece is an allocation of its own, so that reading beyond it is seen.
#define _GNU_SOURCE // MADV_HUGEPAGE
#include "kernels/cpu/pages.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/status.h"

enum { HUGE_PAGE = 2 << 20, MAPPING = 64 << 20, LINE = 64 };

struct cpu_pages {
	char *base;        // of the mapping; a huge page begins at `from`
	size_t bytes;
	char *from;
	size_t size, used; // from `from` on
	int pieces;
};

static size_t round_up(size_t bytes, size_t to)
{
	return (bytes + to - 1) / to * to;
}

#ifdef __SANITIZE_ADDRESS__
static struct cpu_pages *map(size_t bytes)
{
	char *base = aligned_alloc(LINE, bytes);
	if (!base)
		return NULL;
	memset(base, 0, bytes);
	struct cpu_pages *p = xcalloc(1, sizeof(*p));
	*p = (struct cpu_pages){.base = base, .from = base, .bytes = bytes, .size = bytes};
	return p;
}

static void unmap(struct cpu_pages *p)
{
	free(p->base);
}
#else
static struct cpu_pages *map(size_t bytes)
{
	size_t size = round_up(bytes < MAPPING ? MAPPING : bytes, HUGE_PAGE), all = size + HUGE_PAGE;
	char *base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (base == MAP_FAILED)
		return NULL;
	char *from = (char *)round_up((uintptr_t)base, HUGE_PAGE);
	madvise(from, size, MADV_HUGEPAGE); // where there are none, small pages do
	struct cpu_pages *p = xcalloc(1, sizeof(*p));
	*p = (struct cpu_pages){.base = base, .bytes = all, .from = from, .size = size};
	return p;
}

static void unmap(struct cpu_pages *p)
{
	munmap(p->base, p->bytes);
}
#endif

void *cpu_pages_take(struct cpu_pages **open, struct cpu_pages **owner, size_t bytes)
{
	if (bytes > SIZE_MAX - 2 * HUGE_PAGE)
		return NULL;
	bytes = round_up(bytes, LINE);
	struct cpu_pages *p = *open;
	if (!p || p->size - p->used < bytes) {
		p = map(bytes);
		if (!p)
			return NULL;
		if (bytes < MAPPING / 2) // else a few small pieces behind a large one would keep it mapped
			*open = p;
	}
	char *piece = p->from + p->used;
	p->used += bytes;
	p->pieces++;
	*owner = p;
	return piece;
}

void cpu_pages_give(struct cpu_pages **open, struct cpu_pages *owner)
{
	if (--owner->pieces)
		return;
	if (*open == owner)
		*open = NULL;
	unmap(owner);
	free(owner);
}
