// Typed access to the fields of a JSON object out of a foreign file, with messages that name file, field, expected and
// found.
#ifndef STAGECOACH_COMMON_JSON_FIELDS_H
#define STAGECOACH_COMMON_JSON_FIELDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct json_fields {
	const json_t *object; // borrowed
	const char *label;    // the file
	const char *path;     // "" or "rope_scaling.": put before field names in messages
	struct error *error;
};

// Parses an object; a key that stands there twice is refused. The caller owns *out (json_decref). flags are jansson's,
// e.g. JSON_DECODE_INT_AS_REAL for files with integers beyond 64 bits (tokenizer_config.json says 10^30 for "no limit").
enum status json_fields_parse(json_t **out, const char *text, size_t len, size_t flags, const char *label,
                              struct error *);
const char *json_kind(const json_t *); // "an object", "null", ...

// All of these: STATUS_ABSENT where the field is missing or null (*out is left alone), STATUS_REFUSED where it has
// another type or does not fit.
enum status json_fields_int(const struct json_fields *, const char *key, int32_t *out);
enum status json_fields_float(const struct json_fields *, const char *key, float *out); // any finite number
enum status json_fields_bool(const struct json_fields *, const char *key, bool *out);
enum status json_fields_string(const struct json_fields *, const char *key, const char **out);
enum status json_fields_object(const struct json_fields *, const char *key, const json_t **out);

#endif
