// The "messages" of a chat as templates expect them: content is one string. The surprising decision: the arguments of
// tool calls become objects, because templates of the Hugging Face world print them with tojson and OpenAI's are
// strings.
#include <string.h>

#include "coordinator/api_request.h"

static const char *const known_roles[] = {"system", "developer", "user", "assistant", "tool", "function"};

static enum status part_text(const json_t *part, const char *where, struct json_buf *text, struct api_error *e)
{
	if (json_is_string(part)) {
		json_add(text, json_string_value(part), json_string_length(part));
		return STATUS_OK;
	}
	if (!json_is_object(part))
		return api_error_invalid(e, where, "%s must be an object with a type", where);
	const char *type = json_string_value(json_object_get(part, "type"));
	if (!type)
		return api_error_invalid(e, where, "%s.type must be a string", where);
	if (strcmp(type, "text") != 0 && strcmp(type, "input_text") != 0 && strcmp(type, "output_text") != 0)
		return api_error_invalid(e, where, "%s: content of type '%.64s' is not supported, only text", where,
					 type);
	const json_t *value = json_object_get(part, "text");
	if (!json_is_string(value))
		return api_error_invalid(e, where, "%s.text must be a string", where);
	json_add(text, json_string_value(value), json_string_length(value));
	return STATUS_OK;
}

static enum status content_text(const json_t *content, const char *role, bool has_tool_calls, size_t index,
				struct json_buf *text, struct api_error *e)
{
	char where[64];
	snprintf(where, sizeof where, "messages[%zu].content", index);
	if (json_is_string(content)) {
		json_add(text, json_string_value(content), json_string_length(content));
		return STATUS_OK;
	}
	if (!content || json_is_null(content)) {
		if (has_tool_calls || !strcmp(role, "assistant"))
			return STATUS_OK;
		return api_error_invalid(e, where, "%s must be a string or an array of parts for role '%s'", where,
					 role);
	}
	if (!json_is_array(content))
		return api_error_invalid(e, where, "%s must be a string, an array of parts or null", where);
	size_t i;
	const json_t *part;
	json_array_foreach(content, i, part)
	{
		char place[96];
		snprintf(place, sizeof place, "%s[%zu]", where, i);
		if (i)
			json_adds(text, "\n");
		TRY(part_text(part, place, text, e));
	}
	return STATUS_OK;
}

static enum status normalize_tool_calls(json_t *message, size_t index, struct api_error *e)
{
	json_t *calls = json_object_get(message, "tool_calls");
	char where[96];
	snprintf(where, sizeof where, "messages[%zu].tool_calls", index);
	if (!json_is_array(calls))
		return api_error_invalid(e, where, "%s must be an array", where);
	size_t i;
	json_t *call;
	json_array_foreach(calls, i, call)
	{
		json_t *function = json_object_get(call, "function");
		json_t *arguments = json_object_get(function, "arguments");
		snprintf(where, sizeof where, "messages[%zu].tool_calls[%zu].function", index, i);
		if (!json_is_string(json_object_get(function, "name")))
			return api_error_invalid(e, where, "%s.name must be a string", where);
		if (json_is_object(arguments))
			continue;
		if (arguments && !json_is_null(arguments) && !json_is_string(arguments))
			return api_error_invalid(e, where, "%s.arguments must be a string with a JSON object", where);
		json_t *object = json_string_length(arguments) == 0
				     ? json_object()
				     : json_loadb(json_string_value(arguments), json_string_length(arguments),
						  JSON_REJECT_DUPLICATES, NULL);
		if (!json_is_object(object)) {
			json_decref(object);
			return api_error_invalid(e, where, "%s.arguments must be a string with a JSON object", where);
		}
		json_object_set_new(function, "arguments", object);
	}
	return STATUS_OK;
}

static enum status normalize_message(const json_t *message, size_t index, json_t *list, struct api_error *e)
{
	char where[64];
	snprintf(where, sizeof where, "messages[%zu]", index);
	if (!json_is_object(message))
		return api_error_invalid(e, where, "%s must be an object", where);
	snprintf(where, sizeof where, "messages[%zu].role", index);
	const char *role = json_string_value(json_object_get(message, "role"));
	if (!role)
		return api_error_invalid(e, where, "%s must be a string", where);
	bool known = false;
	for (size_t i = 0; i < sizeof known_roles / sizeof known_roles[0]; i++)
		known |= !strcmp(role, known_roles[i]);
	if (!known)
		return api_error_invalid(
		    e, where, "%s: unknown role '%.64s', expected system, developer, user, assistant or tool", where,
		    role);
	json_t *copy = json_deep_copy(message);
	struct json_buf text = {0};
	enum status status;
	json_t *calls = json_object_get(copy, "tool_calls");
	if (json_is_null(calls) || (json_is_array(calls) && !json_array_size(calls))) {
		json_object_del(copy, "tool_calls");
		calls = NULL;
	}
	if (calls)
		TRY_GOTO(normalize_tool_calls(copy, index, e), out);
	TRY_GOTO(content_text(json_object_get(message, "content"), role, calls != NULL, index, &text, e), out);
	json_object_set_new(copy, "content", json_stringn(text.data ? text.data : "", text.len));
	if (!strcmp(role, "developer"))
		json_object_set_new(copy, "role", json_string("system"));
	json_array_append(list, copy);
out:
	json_decref(copy);
	json_buf_free(&text);
	return status;
}

enum status api_messages_normalize(json_t **out, const json_t *messages, struct api_error *e)
{
	*out = NULL;
	if (!messages || json_is_null(messages))
		return api_error_invalid(e, "messages", "messages is required");
	if (!json_is_array(messages))
		return api_error_invalid(e, "messages", "messages must be an array");
	if (!json_array_size(messages))
		return api_error_invalid(e, "messages", "messages must not be empty");
	json_t *list = json_array();
	size_t i;
	const json_t *message;
	json_array_foreach(messages, i, message)
	{
		enum status status = normalize_message(message, i, list, e);
		if (status != STATUS_OK) {
			json_decref(list);
			return status;
		}
	}
	*out = list;
	return STATUS_OK;
}
