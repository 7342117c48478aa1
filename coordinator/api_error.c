// Errors of the API as JSON. See api_error.h.
#include "coordinator/api_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void fill(struct api_error *e, int http_status, const char *param, const char *code, const char *fmt, va_list ap)
{
	e->http_status = http_status;
	e->code = code;
	e->retry_after_s = http_status == 429 ? 1 : http_status == 503 ? 5 : 0;
	snprintf(e->param, sizeof e->param, "%s", param);
	vsnprintf(e->message, sizeof e->message, fmt, ap);
}

enum status api_error_invalid(struct api_error *e, const char *param, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	fill(e, 400, param ? param : "", NULL, fmt, ap);
	va_end(ap);
	return STATUS_INVALID;
}

void api_error_set(struct api_error *e, int http_status, const char *code, const char *fmt, ...)
{
	va_list ap;
	va_start(ap, fmt);
	fill(e, http_status, "", code, fmt, ap);
	va_end(ap);
}

static const char *type_of(int http_status)
{
	switch (http_status) {
	case 401:
		return "authentication_error";
	case 404:
		return "not_found_error";
	case 429:
		return "rate_limit_error";
	case 500:
		return "server_error";
	case 503:
		return "service_unavailable_error";
	default:
		return "invalid_request_error";
	}
}

void api_error_write(const struct api_error *e, struct json_buf *out)
{
	json_adds(out, "{\"error\":{\"message\":");
	json_add_string(out, e->message, strlen(e->message));
	json_addf(out, ",\"type\":\"%s\",\"param\":", type_of(e->http_status));
	if (e->param[0])
		json_add_string(out, e->param, strlen(e->param));
	else
		json_adds(out, "null");
	json_adds(out, ",\"code\":");
	if (e->code)
		json_add_string(out, e->code, strlen(e->code));
	else
		json_adds(out, "null");
	json_adds(out, "}}");
}
