// Bodies as JSON values. The surprising decision: depth is bounded by a scan of the text before the parser sees it,
// since the parser's own bound is far beyond what the code that walks its values should recurse into.
#include "coordinator/api_request.h"

static enum status check_depth(const char *body, size_t len, struct api_error *e)
{
	unsigned depth = 0;
	bool in_string = false;
	for (size_t i = 0; i < len; i++) {
		char c = body[i];
		if (in_string) {
			if (c == '\\')
				i++;
			else if (c == '"')
				in_string = false;
		} else if (c == '"') {
			in_string = true;
		} else if (c == '[' || c == '{') {
			if (++depth > API_MAX_DEPTH)
				return api_error_invalid(e, NULL, "the body is nested deeper than %d levels",
							 API_MAX_DEPTH);
		} else if ((c == ']' || c == '}') && depth) {
			depth--;
		}
	}
	return STATUS_OK;
}

enum status api_json_parse(json_t **out, const char *body, size_t len, struct api_error *e)
{
	*out = NULL;
	if (!len)
		return api_error_invalid(e, NULL, "the body is empty, expected a JSON object");
	TRY(check_depth(body, len, e));
	json_error_t why;
	json_t *root = json_loadb(body, len, JSON_REJECT_DUPLICATES, &why);
	if (!root && json_error_code(&why) == json_error_numeric_overflow) // an integer beyond 64 bits: its field is named later
		root = json_loadb(body, len, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &why);
	if (!root)
		return api_error_invalid(e, NULL, "the body is not valid JSON: %s (line %d, column %d)", why.text,
					 why.line, why.column);
	if (!json_is_object(root)) {
		json_decref(root);
		return api_error_invalid(e, NULL, "the body must be a JSON object");
	}
	*out = root;
	return STATUS_OK;
}
