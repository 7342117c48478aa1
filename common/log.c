// See log.h. The level is checked before formatting, so that debug lines cost nothing when off.
#include "common/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char log_prefix[32] = "stagecoach";
static _Atomic int log_limit = LOG_INFO;
static const char *const level_names[] = {"error", "warn", "info", "debug"};

void log_set_prefix(const char *prefix)
{
	snprintf(log_prefix, sizeof log_prefix, "%s", prefix);
}

void log_set_level(enum log_level level)
{
	log_limit = level;
}

bool log_level_parse(const char *text, enum log_level *out)
{
	for (int i = 0; i < 4; i++)
		if (!strcmp(text, level_names[i])) {
			*out = (enum log_level)i;
			return true;
		}
	return false;
}

void log_write(enum log_level level, const char *fmt, ...)
{
	if ((int)level > log_limit)
		return;
	char line[2048];
	int n = snprintf(line, sizeof line, "[%s] %s%s", log_prefix, level == LOG_INFO ? "" : level_names[level],
	                 level == LOG_INFO ? "" : ": ");
	va_list ap;
	va_start(ap, fmt);
	int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
	va_end(ap);
	size_t len = (size_t)n + (m < 0 ? 0 : (size_t)m);
	if (len > sizeof line - 2)
		len = sizeof line - 2;
	line[len] = '\n';
	ssize_t w = write(STDERR_FILENO, line, len + 1);
	(void)w;
}
