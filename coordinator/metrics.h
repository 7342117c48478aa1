// Counters and histograms of the HTTP side, and everything as Prometheus text. The surprising decision: the identity
// accepted = succeeded + cancelled + failed + in hand holds at every moment that a reader can see, because all five
// change under one lock.
#ifndef STAGECOACH_COORDINATOR_METRICS_H
#define STAGECOACH_COORDINATOR_METRICS_H

#include <stdint.h>

#include "coordinator/json_write.h"

struct engine_info;
struct metrics;

enum metrics_refusal { // why a request was not accepted
	REFUSED_INVALID,
	REFUSED_CONTEXT_LENGTH,
	REFUSED_QUEUE_FULL,
	REFUSED_UNAVAILABLE,
	REFUSED_UNAUTHORIZED,
	REFUSED_COUNT
};
enum metrics_outcome { // how an accepted one ended
	OUTCOME_STOP,
	OUTCOME_LENGTH,
	OUTCOME_CANCELLED,
	OUTCOME_FAILED_ENGINE,
	OUTCOME_FAILED_SLOW_CLIENT,
	OUTCOME_COUNT
};
enum metrics_histogram { METRICS_FIRST_TOKEN, METRICS_INTER_TOKEN, METRICS_END_TO_END, METRICS_HISTOGRAM_COUNT };

struct metrics *metrics_create(void);
void metrics_destroy(struct metrics **);
void metrics_refused(struct metrics *, enum metrics_refusal);
void metrics_accepted(struct metrics *);
void metrics_ended(struct metrics *, enum metrics_outcome);
// count observations of the same value, in seconds.
void metrics_observe(struct metrics *, enum metrics_histogram, double seconds, uint64_t count);
// Appends the exposition (text format 0.0.4): each family with HELP and TYPE.
void metrics_write(struct metrics *, const struct engine_info *, struct json_buf *out);

#endif
