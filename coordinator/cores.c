// See cores.h.
#define _GNU_SOURCE
#include "coordinator/cores.h"

#include <sched.h>
#include <stdio.h>

// Whether `core` is the first thread of its physical core.
static bool is_first_thread(uint32_t core)
{
	char path[96];
	unsigned first = core;
	snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/topology/thread_siblings_list", core);
	FILE *f = fopen(path, "r");
	if (f) {
		if (fscanf(f, "%u", &first) != 1)
			first = core;
		fclose(f);
	}
	return first == core;
}

uint32_t cores_of_host(uint32_t cores[CORES_MAX])
{
	cpu_set_t set;
	uint32_t n = 0;
	if (sched_getaffinity(0, sizeof set, &set))
		return 0;
	for (int second = 0; second < 2; second++)
		for (uint32_t i = 0; i < CPU_SETSIZE && n < CORES_MAX; i++)
			if (CPU_ISSET(i, &set) && is_first_thread(i) != second)
				cores[n++] = i;
	return n;
}

bool cores_hand_out(uint32_t n_cores, struct cores_share *shares, uint32_t n_shares)
{
	uint32_t wanted = 0, open = 0;
	for (uint32_t i = 0; i < n_shares; i++) {
		wanted += shares[i].wanted;
		open += shares[i].wanted == 0;
	}
	uint32_t left = n_cores > wanted ? n_cores - wanted : 0, at = 0;
	for (uint32_t i = 0; i < n_shares; i++) {
		struct cores_share *s = &shares[i];
		s->count = s->wanted;
		if (!s->count) {
			s->count = left / open > 0 ? left / open : 1;
			left -= s->count < left ? s->count : left;
			open--;
		}
		s->first = at;
		at += s->count;
	}
	if (at <= n_cores)
		return true;
	for (uint32_t i = 0; i < n_shares; i++)
		shares[i].first = 0;
	return false;
}
