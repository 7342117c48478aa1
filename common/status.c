// Status names, error text, always-on assertions and allocation that cannot fail. See status.h.
#include "common/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum status error_set(struct error *e, enum status s, const char *fmt, ...)
{
	if (!e)
		return s;
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof e->text, fmt, ap);
	va_end(ap);
	return s;
}

void error_prefix(struct error *e, const char *fmt, ...)
{
	if (!e)
		return;
	struct error old = *e;
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(e->text, sizeof e->text, fmt, ap);
	va_end(ap);
	size_t n = strlen(e->text);
	snprintf(e->text + n, sizeof e->text - n, ": %s", old.text);
}

const char *status_name(enum status s)
{
	switch (s) {
	case STATUS_OK: return "ok";
	case STATUS_USAGE: return "usage";
	case STATUS_REFUSED: return "refused";
	case STATUS_UNAVAILABLE: return "unavailable";
	case STATUS_FATAL: return "fatal";
	case STATUS_INVALID: return "invalid";
	case STATUS_BUSY: return "busy";
	case STATUS_CLOSED: return "closed";
	case STATUS_TIMEOUT: return "timeout";
	case STATUS_ABSENT: return "absent";
	}
	return "unknown";
}

void assert_failed(const char *cond, const char *file, int line)
{
	fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, cond);
	abort();
}

static void *checked(void *p, unsigned long bytes)
{
	if (p || bytes == 0)
		return p;
	fprintf(stderr, "out of memory: %lu bytes\n", bytes);
	exit(STATUS_FATAL);
}

void *xmalloc(unsigned long bytes)
{
	return checked(malloc(bytes ? bytes : 1), bytes);
}

void *xcalloc(unsigned long count, unsigned long bytes)
{
	return checked(calloc(count ? count : 1, bytes ? bytes : 1), count * bytes);
}

void *xrealloc(void *p, unsigned long bytes)
{
	return checked(realloc(p, bytes ? bytes : 1), bytes);
}

char *xstrdup(const char *s)
{
	size_t n = strlen(s) + 1;
	return memcpy(xmalloc(n), s, n);
}
