// --trace FILE: what each stage did when, as a Chrome trace that Perfetto opens: one track per stage, one flow per step.
// The surprising decision: the file is valid JSON only once it is closed, but Perfetto also opens one that was cut off,
// so a crash still leaves something to look at.
#ifndef STAGECOACH_COORDINATOR_TRACE_H
#define STAGECOACH_COORDINATOR_TRACE_H

#include "common/status.h"
#include "proto/message.h"

struct trace;

enum status trace_open(struct trace **out, const char *path, struct error *); // STATUS_UNAVAILABLE: cannot be written
void trace_stage(struct trace *, uint32_t stage, const char *label);
void trace_add(struct trace *, uint32_t stage, uint32_t epoch, const struct trace_event *events, uint32_t count);
// Something that happened to the pipeline as a whole.
void trace_mark(struct trace *, const char *what, uint64_t now_us);
void trace_close(struct trace **);

#endif
