// See json_fields.h. null counts as absent throughout, because config files write null for what they leave open.
#include "common/json_fields.h"

#include <math.h>

#include "common/quote.h"

enum status json_fields_parse(json_t **out, const char *text, size_t len, size_t flags, const char *label,
                              struct error *e)
{
	json_error_t why;
	char q[160];
	*out = json_loadb(len ? text : "", len, JSON_REJECT_DUPLICATES | flags, &why);
	if (!*out)
		return error_set(e, STATUS_REFUSED, "%s: not valid JSON: line %d, column %d: %s", label, why.line, why.column,
		                 quote_bytes(q, sizeof q, why.text, __builtin_strlen(why.text)));
	if (json_is_object(*out))
		return STATUS_OK;
	enum status status = error_set(e, STATUS_REFUSED, "%s: expected a JSON object, found %s", label, json_kind(*out));
	json_decref(*out);
	*out = NULL;
	return status;
}

const char *json_kind(const json_t *v)
{
	if (!v)
		return "nothing";
	switch (json_typeof(v)) {
	case JSON_OBJECT: return "an object";
	case JSON_ARRAY: return "an array";
	case JSON_STRING: return "a string";
	case JSON_INTEGER: return "an integer";
	case JSON_REAL: return "a number with a fraction";
	case JSON_TRUE: return "true";
	case JSON_FALSE: return "false";
	case JSON_NULL: return "null";
	}
	return "something else";
}

static enum status get(const struct json_fields *f, const char *key, const json_t **out)
{
	*out = json_object_get(f->object, key);
	if (!*out || json_is_null(*out))
		return error_set(f->error, STATUS_ABSENT, "%s: field \"%s%s\" is missing", f->label, f->path, key);
	return STATUS_OK;
}

static enum status wrong(const struct json_fields *f, const char *key, const char *expected, const json_t *found)
{
	return error_set(f->error, STATUS_REFUSED, "%s: field \"%s%s\": expected %s, found %s", f->label, f->path, key,
	                 expected, json_kind(found));
}

enum status json_fields_int(const struct json_fields *f, const char *key, int32_t *out)
{
	const json_t *v = NULL;
	TRY(get(f, key, &v));
	if (!json_is_integer(v))
		return wrong(f, key, "an integer", v);
	json_int_t n = json_integer_value(v);
	if (n < INT32_MIN || n > INT32_MAX)
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%s%s\": %lld does not fit 32 bits", f->label, f->path,
		                 key, (long long)n);
	*out = (int32_t)n;
	return STATUS_OK;
}

enum status json_fields_float(const struct json_fields *f, const char *key, float *out)
{
	const json_t *v = NULL;
	TRY(get(f, key, &v));
	if (!json_is_number(v))
		return wrong(f, key, "a number", v);
	double d = json_number_value(v);
	if (!(fabs(d) <= 3.4e38))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%s%s\": %g does not fit float32", f->label, f->path, key,
		                 d);
	*out = (float)d;
	return STATUS_OK;
}

enum status json_fields_bool(const struct json_fields *f, const char *key, bool *out)
{
	const json_t *v = NULL;
	TRY(get(f, key, &v));
	if (!json_is_boolean(v))
		return wrong(f, key, "true or false", v);
	*out = json_is_true(v);
	return STATUS_OK;
}

enum status json_fields_string(const struct json_fields *f, const char *key, const char **out)
{
	const json_t *v = NULL;
	TRY(get(f, key, &v));
	if (!json_is_string(v))
		return wrong(f, key, "a string", v);
	*out = json_string_value(v);
	return STATUS_OK;
}

enum status json_fields_object(const struct json_fields *f, const char *key, const json_t **out)
{
	const json_t *v = NULL;
	TRY(get(f, key, &v));
	if (!json_is_object(v))
		return wrong(f, key, "an object", v);
	*out = v;
	return STATUS_OK;
}
