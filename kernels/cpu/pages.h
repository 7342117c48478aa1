// Memory in pages of 2 MiB for what is read as a stream; private to kernels/cpu.
#ifndef STAGECOACH_KERNELS_CPU_PAGES_H
#define STAGECOACH_KERNELS_CPU_PAGES_H

#include <stddef.h>

struct cpu_pages; // a mapping that several pieces share

// A piece of `bytes`, 64-byte aligned, zero. *open is the mapping that pieces are cut from, NULL at first; *owner the one
// that this piece has to be given back to. NULL without memory.
void *cpu_pages_take(struct cpu_pages **open, struct cpu_pages **owner, size_t bytes);
// Gives one piece back; the last one of a mapping unmaps it, and *open becomes NULL if it was that.
void cpu_pages_give(struct cpu_pages **open, struct cpu_pages *owner);

#endif
