// `bench --url`: measures a running server over HTTP, ours or another with the same API.
#ifndef STAGECOACH_COORDINATOR_BENCH_URL_H
#define STAGECOACH_COORDINATOR_BENCH_URL_H

#include <stdint.h>

#include "common/options.h"
#include "common/status.h"

// Prints a table, or JSON under --json. STATUS_UNAVAILABLE if nothing answers, STATUS_FATAL if an answer is not a whole
// stream (its text is quoted).
enum status bench_url_run(const struct options *, struct error *);

#endif
