// Status codes and error text shared by everything. The surprising decision: the first codes ARE the exit statuses that
// users rely on, so that main() can return a status as it is.
#ifndef STAGECOACH_COMMON_STATUS_H
#define STAGECOACH_COMMON_STATUS_H

enum status {
	STATUS_OK = 0,
	STATUS_USAGE = 2,       // a wrong option or argument
	STATUS_REFUSED = 3,     // the model or the plan is refused
	STATUS_UNAVAILABLE = 4, // a port or a device is not to be had
	STATUS_FATAL = 5,       // unrecoverable at run time
	STATUS_INVALID = 64,    // malformed input (message, request, file)
	STATUS_BUSY = 65,       // a bounded queue or pool is full
	STATUS_CLOSED = 66,     // the peer is gone
	STATUS_TIMEOUT = 67,    // a deadline passed
	STATUS_ABSENT = 68,     // what was looked for does not exist
};

// Says what failed: file, tensor or field, what was expected and what was found. One line, no newline.
struct error {
	char text[512];
};

// Formats into e (may be NULL) and returns s, so that a failing place is one statement.
enum status error_set(struct error *e, enum status s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
// Puts "prefix: " before the text that e holds.
void error_prefix(struct error *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
const char *status_name(enum status s);

#define TRY(expr)                                                                                                      \
	do {                                                                                                           \
		enum status try_status_ = (expr);                                                                      \
		if (try_status_ != STATUS_OK)                                                                          \
			return try_status_;                                                                            \
	} while (0)
// Needs a local `enum status status`.
#define TRY_GOTO(expr, label)                                                                                          \
	do {                                                                                                           \
		status = (expr);                                                                                       \
		if (status != STATUS_OK)                                                                               \
			goto label;                                                                                    \
	} while (0)

// A broken invariant of our own: always on, prints the place and aborts.
#define ASSERT(cond) ((cond) ? (void)0 : assert_failed(#cond, __FILE__, __LINE__))
void assert_failed(const char *cond, const char *file, int line) __attribute__((noreturn, cold));

// Allocation that logs and exits with STATUS_FATAL when there is no memory; for start-up and bounded sizes only.
void *xmalloc(unsigned long bytes) __attribute__((malloc));
void *xcalloc(unsigned long count, unsigned long bytes) __attribute__((malloc));
void *xrealloc(void *p, unsigned long bytes);
char *xstrdup(const char *s) __attribute__((malloc));

#endif
