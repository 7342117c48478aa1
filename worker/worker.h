// The life of one worker process: hello, load, profile, budget, configure, steps. The surprising decision: a neighbour
// that disappears is no reason to end; the worker drops its steps, keeps its weights and waits to be configured anew.
#ifndef STAGECOACH_WORKER_WORKER_H
#define STAGECOACH_WORKER_WORKER_H

#include "common/options.h"
#include "common/status.h"

// Runs until it is told to drain (STATUS_OK), cannot go on, or the coordinator is gone (STATUS_FATAL).
enum status worker_run(const struct options *);

#endif
