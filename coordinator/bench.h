// `bench MODEL`: throughput and latency of the pipeline itself over a grid of batch, prompt and output lengths; no HTTP.
#ifndef STAGECOACH_COORDINATOR_BENCH_H
#define STAGECOACH_COORDINATOR_BENCH_H

#include "common/model.h"
#include "common/options.h"
#include "coordinator/engine.h"

// Runs --grid against a ready engine and prints a table, or JSON under --json. STATUS_REFUSED: a cell does not fit the
// context or the queue, by numbers. STATUS_FATAL: a request failed.
enum status bench_run(struct engine *, const struct model *, const struct options *, struct error *);

#endif
