// Which cores each worker of this host gets. Pure but for cores_of_host(). The surprising decision: a worker that did not
// say how many threads it wants gets an equal share of what the others leave, and where there are not enough cores for
// all nobody is pinned, since two pinned threads on one core are worse than what the kernel does.
#ifndef STAGECOACH_COORDINATOR_CORES_H
#define STAGECOACH_COORDINATOR_CORES_H

#include <stdbool.h>
#include <stdint.h>

enum { CORES_MAX = 1024 };

// Cores that this process may use, one thread of each physical core before the second ones. Returns their number.
uint32_t cores_of_host(uint32_t cores[CORES_MAX]);

struct cores_share {
	uint32_t wanted;  // threads asked for; 0: as many as there are
	uint32_t first, count; // result: cores[first .. first + count)
};
// Hands out n cores. Returns whether there are enough for all (then no core is given twice); if not, counts are still
// what each should use as threads, and first is 0.
bool cores_hand_out(uint32_t n_cores, struct cores_share *shares, uint32_t n_shares);

#endif
