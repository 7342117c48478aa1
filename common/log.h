// One line per event on standard error, prefixed by the process ("coordinator", "stage 1"). Thread safe: each line is one
// write(2), so that lines of several processes on one terminal do not mix.
#ifndef STAGECOACH_COMMON_LOG_H
#define STAGECOACH_COMMON_LOG_H

#include <stdbool.h>

enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };

void log_set_prefix(const char *prefix); // copied, at most 31 bytes
void log_set_level(enum log_level level);
bool log_level_parse(const char *text, enum log_level *out); // "error", "warn", "info", "debug"
void log_write(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_write(LOG_ERROR, __VA_ARGS__)
#define log_warn(...) log_write(LOG_WARN, __VA_ARGS__)
#define log_info(...) log_write(LOG_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_DEBUG, __VA_ARGS__)

#endif
