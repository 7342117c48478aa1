// What memory a CPU worker may use: the machine's and its cgroup's, v2 or v1, whichever is less. The surprising decision:
// pages of cached files that the cgroup counts as used are taken as available, since the kernel gives them up first;
// otherwise a model in the page cache would seem to leave no room for itself.
#ifndef STAGECOACH_WORKER_MEMORY_H
#define STAGECOACH_WORKER_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "common/options.h"

struct memory_state {
	uint64_t total_bytes;      // of the machine, or the cgroup's limit
	uint64_t available_bytes;
	bool in_cgroup;            // the cgroup is what limits
};

// root: "" for the real system, or a folder that stands for / (tests).
void memory_read(struct memory_state *out, const char *root);

// What --memory leaves one worker. `own` is its value (NULL: 0.5 of what is available); n_sharing workers share what the
// value names, 1 if it is this worker's alone.
uint64_t memory_limit(const struct memory_state *, const struct option_memory *own, uint32_t n_sharing);

struct memory_usage { uint64_t rss_bytes, private_bytes; }; // private: without pages of mapped files
void memory_of_self(struct memory_usage *out);

#endif
