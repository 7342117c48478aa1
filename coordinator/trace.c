// See trace.h. Times are CLOCK_MONOTONIC microseconds of each stage's host; stages of one host share it.
#include "coordinator/trace.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>


struct trace {
	FILE *file;
	uint32_t n_stages;
	bool any;
};

static const char *const kind_names[] = {
	[TRACE_WAIT_STEP] = "wait for step", [TRACE_WAIT_DATA] = "wait for data", [TRACE_COMPUTE] = "compute",
	[TRACE_SEND] = "send", [TRACE_SAMPLE] = "sample",
};

enum status trace_open(struct trace **out, const char *path, struct error *e)
{
	FILE *f = fopen(path, "w");
	if (!f)
		return error_set(e, STATUS_UNAVAILABLE, "--trace %s: %s", path, strerror(errno));
	*out = xcalloc(1, sizeof **out);
	(*out)->file = f;
	fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[", f);
	return STATUS_OK;
}

static FILE *next(struct trace *t)
{
	fputs(t->any ? ",\n" : "\n", t->file);
	t->any = true;
	return t->file;
}

static void put_text(FILE *f, const char *s)
{
	fputc('"', f);
	for (; *s; s++)
		if (*s == '"' || *s == '\\')
			fprintf(f, "\\%c", *s);
		else if ((unsigned char)*s < 32)
			fputc(' ', f);
		else
			fputc(*s, f);
	fputc('"', f);
}

void trace_stage(struct trace *t, uint32_t stage, const char *label)
{
	FILE *f = next(t);
	if (stage >= t->n_stages)
		t->n_stages = stage + 1;
	fprintf(f, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":1,\"tid\":0,\"args\":{\"name\":\"stagecoach\"}}");
	f = next(t);
	fprintf(f, "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":1,\"tid\":%u,\"args\":{\"name\":", stage + 1);
	put_text(f, label);
	fputs("}}", f);
	f = next(t);
	fprintf(f, "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":1,\"tid\":%u,\"args\":{\"sort_index\":%u}}", stage + 1, stage);
}

void trace_add(struct trace *t, uint32_t stage, uint32_t epoch, const struct trace_event *events, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		const struct trace_event *v = &events[i];
		FILE *f = next(t);
		fprintf(f, "{\"ph\":\"X\",\"name\":\"%s\",\"cat\":\"step\",\"pid\":1,\"tid\":%u,\"ts\":%llu,\"dur\":%llu,"
		           "\"args\":{\"step\":%llu,\"micro_batch\":%u,\"rows\":%u,\"epoch\":%u}}",
		        kind_names[v->kind], stage + 1, (unsigned long long)v->begin_us,
		        (unsigned long long)(v->end_us - v->begin_us), (unsigned long long)v->step, v->micro_batch, v->n_rows, epoch);
		if (v->kind != TRACE_COMPUTE)
			continue;
		if (t->n_stages < 2)
			continue;
		// One flow per step, from the first stage to the last.
		const char *phase = stage == 0 ? "s" : stage + 1 < t->n_stages ? "t" : "f";
		f = next(t);
		fprintf(f, "{\"ph\":\"%s\",\"bp\":\"e\",\"name\":\"step\",\"cat\":\"flow\",\"id\":\"%u.%llu\",\"pid\":1,\"tid\":%u,\"ts\":%llu}",
		        phase, epoch, (unsigned long long)v->step, stage + 1, (unsigned long long)v->begin_us);
	}
}

void trace_mark(struct trace *t, const char *what, uint64_t now_us)
{
	FILE *f = next(t);
	fprintf(f, "{\"ph\":\"i\",\"s\":\"g\",\"pid\":1,\"tid\":0,\"ts\":%llu,\"name\":", (unsigned long long)now_us);
	put_text(f, what);
	fputc('}', f);
}

void trace_close(struct trace **t)
{
	if (!*t)
		return;
	fputs("\n]}\n", (*t)->file);
	fclose((*t)->file);
	free(*t);
	*t = NULL;
}
