// An error as OpenAI's clients expect it: HTTP status plus {"error":{"message","type","param","code"}}.
#ifndef STAGECOACH_COORDINATOR_API_ERROR_H
#define STAGECOACH_COORDINATOR_API_ERROR_H

#include "common/status.h"
#include "coordinator/json_write.h"

struct api_error {
	int http_status; // 400, 401, 404, 405, 413, 415, 429, 503
	char message[640];
	char param[96];		// field's name; "" becomes null
	const char *code;	// literal; NULL becomes null
	unsigned retry_after_s; // > 0: goes into Retry-After
};

// Fills e with a 400 about `param` and returns STATUS_INVALID.
enum status api_error_invalid(struct api_error *e, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void api_error_set(struct api_error *e, int http_status, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
// Appends {"error":{...}} on one line.
void api_error_write(const struct api_error *, struct json_buf *out);

#endif
