// Request bodies of the API as plain structs. See api_request.h.
#include "coordinator/api_request.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"

enum { C = API_COMPLETIONS, M = API_CHAT, T = API_TOKENIZE, D = API_DETOKENIZE };

// Every numeric field: where it goes, its range, and where it exists.
static const struct number_field {
	const char *name;
	int endpoints;
	bool is_integer;
	size_t offset; // in struct api_numbers
	double min, max;
	bool above_min; // the minimum itself is out of range
} number_fields[] = {
#define NUMBER(f) #f, C | M, false, offsetof(struct api_numbers, f)
#define INTEGER(f, where) #f, where, true, offsetof(struct api_numbers, f)
    {NUMBER(temperature), 0, 100, false},
    {NUMBER(top_p), 0, 1, true},
    {NUMBER(min_p), 0, 1, false},
    {NUMBER(presence_penalty), -2, 2, false},
    {NUMBER(frequency_penalty), -2, 2, false},
    {NUMBER(repetition_penalty), 0, 100, true},
    {INTEGER(top_k, C | M), -1, INT32_MAX, false},
    {INTEGER(seed, C | M), -0x1p63, 0x1p63, false},
    {INTEGER(n, C | M), 1, API_MAX_CHOICES, false},
    {INTEGER(best_of, C), 1, API_MAX_CHOICES, false},
    {INTEGER(max_tokens, C | M), 1, INT32_MAX, false},
    {INTEGER(max_completion_tokens, C | M), 1, INT32_MAX, false},
    {INTEGER(min_tokens, C | M), 0, INT32_MAX, false},
    {INTEGER(logprobs, C), 0, MAX_TOP_LOGPROBS, false},
    {INTEGER(top_logprobs, M), 0, MAX_TOP_LOGPROBS, false},
};

static const struct flag_field {
	const char *name;
	int endpoints;
	size_t offset; // in struct api_flags
} flag_fields[] = {
#define FLAG(name, where, f)                                                                                           \
	{                                                                                                              \
		name, where, offsetof(struct api_flags, f)                                                             \
	}
    FLAG("stream", C | M, stream),
    FLAG("logprobs", M, want_logprobs),
    FLAG("ignore_eos", C | M, ignore_eos),
    FLAG("skip_special_tokens", C | M, skip_special_tokens),
    FLAG("include_stop_str_in_output", C | M, include_stop),
    FLAG("return_token_ids", C | M, return_token_ids),
    FLAG("return_tokens_as_token_ids", C | M, tokens_as_ids),
    FLAG("add_special_tokens", C | M | T, add_special_tokens),
    FLAG("add_special", T, add_special_tokens),
    FLAG("parse_special", T, parse_special),
    FLAG("with_pieces", T, with_pieces),
    FLAG("return_token_strs", T, with_pieces),
    FLAG("add_generation_prompt", M | T, add_generation_prompt),
};

// What other servers know and this one does not do: refused by name when it would change the answer.
static const struct refused_field {
	const char *name;
	int endpoints;
	enum { IF_TRUE, IF_FILLED, IF_GIVEN } when; // true; neither null, false, "" , [] nor {}; anything but null
} refused_fields[] = {
    {"echo", C | M, IF_TRUE},
    {"suffix", C, IF_FILLED},
    {"tools", M | T, IF_FILLED},
    {"functions", M, IF_FILLED},
    {"function_call", M, IF_FILLED},
    {"audio", M, IF_FILLED},
    {"prediction", M, IF_FILLED},
    {"web_search_options", M, IF_GIVEN},
    {"guided_json", C | M, IF_GIVEN},
    {"guided_regex", C | M, IF_GIVEN},
    {"guided_choice", C | M, IF_GIVEN},
    {"guided_grammar", C | M, IF_GIVEN},
    {"guided_decoding_backend", C | M, IF_GIVEN},
    {"guided_whitespace_pattern", C | M, IF_GIVEN},
    {"structural_tag", C | M, IF_GIVEN},
    {"structured_outputs", C | M, IF_FILLED},
    {"grammar", C | M, IF_FILLED},
    {"json_schema", C | M, IF_FILLED},
    {"prompt_logprobs", C | M, IF_GIVEN},
    {"prompt_embeds", C, IF_GIVEN},
    {"use_beam_search", C | M, IF_TRUE},
    {"bad_words", C | M, IF_FILLED},
    {"allowed_token_ids", C | M, IF_GIVEN},
    {"truncate_prompt_tokens", C | M, IF_GIVEN},
    {"logits_processors", C | M, IF_FILLED},
    {"kv_transfer_params", C | M, IF_FILLED},
    {"vllm_xargs", C | M, IF_FILLED},
    {"continue_final_message", M | T, IF_TRUE},
    {"chat_template", M | T, IF_GIVEN},
    {"mm_processor_kwargs", M | T, IF_FILLED},
};

// The field's value, NULL if absent or null.
static const json_t *field(const struct api_request *r, const char *name)
{
	const json_t *v = json_object_get(r->root, name);
	return json_is_null(v) ? NULL : v;
}

// An integer, also when written as 5.0.
static bool integer_value(const json_t *v, int64_t *out)
{
	if (json_is_integer(v)) {
		*out = json_integer_value(v);
		return true;
	}
	if (!json_is_real(v))
		return false;
	double d = json_real_value(v);
	if (d != floor(d) || fabs(d) > 0x1p53)
		return false;
	*out = (int64_t)d;
	return true;
}

static enum status parse_numbers(struct api_request *r, struct api_error *e)
{
	for (size_t i = 0; i < sizeof number_fields / sizeof number_fields[0]; i++) {
		const struct number_field *f = &number_fields[i];
		const json_t *v = field(r, f->name);
		if (!(f->endpoints & (int)r->endpoint) || !v)
			continue;
		char *place = (char *)&r->number + f->offset;
		int64_t integer = 0;
		double d;
		if (f->is_integer) {
			if (!integer_value(v, &integer) && json_is_real(v) && fabs(json_real_value(v)) > 0x1p53)
				return api_error_invalid(e, f->name, "%s is %.10g, which is too large", f->name,
							 json_real_value(v));
			if (!integer_value(v, &integer))
				return api_error_invalid(e, f->name, "%s must be an integer", f->name);
			d = (double)integer;
		} else {
			if (!json_is_number(v))
				return api_error_invalid(e, f->name, "%s must be a number", f->name);
			d = json_number_value(v);
		}
		if (!(d >= f->min && d <= f->max) || (f->above_min && d == f->min))
			return api_error_invalid(e, f->name, "%s is %.10g, must be %s %.10g and at most %.10g", f->name, d,
						 f->above_min ? "above" : "at least", f->min, f->max);
		if (f->is_integer)
			memcpy(place, &integer, sizeof integer);
		else
			memcpy(place, &d, sizeof d);
	}
	return STATUS_OK;
}

static enum status parse_flags(struct api_request *r, struct api_error *e)
{
	for (size_t i = 0; i < sizeof flag_fields / sizeof flag_fields[0]; i++) {
		const struct flag_field *f = &flag_fields[i];
		const json_t *v = field(r, f->name);
		if (!(f->endpoints & (int)r->endpoint) || !v)
			continue;
		if (!json_is_boolean(v))
			return api_error_invalid(e, f->name, "%s must be true or false", f->name);
		*(bool *)((char *)&r->flag + f->offset) = json_is_true(v);
	}
	return STATUS_OK;
}

static bool is_filled(const json_t *v)
{
	if (json_is_false(v))
		return false;
	if (json_is_string(v))
		return json_string_length(v) > 0;
	if (json_is_array(v))
		return json_array_size(v) > 0;
	if (json_is_object(v))
		return json_object_size(v) > 0;
	return true;
}

static enum status check_refused(const struct api_request *r, struct api_error *e)
{
	for (size_t i = 0; i < sizeof refused_fields / sizeof refused_fields[0]; i++) {
		const struct refused_field *f = &refused_fields[i];
		const json_t *v = field(r, f->name);
		if (!(f->endpoints & (int)r->endpoint) || !v)
			continue;
		if (f->when == IF_TRUE && !json_is_boolean(v))
			return api_error_invalid(e, f->name, "%s must be true or false", f->name);
		if (f->when == IF_TRUE ? json_is_true(v) : f->when == IF_GIVEN || is_filled(v))
			return api_error_invalid(e, f->name, "%s is not supported", f->name);
	}
	if (!(r->endpoint & (C | M)))
		return STATUS_OK;
	const json_t *v = field(r, "tool_choice");
	if (v && is_filled(v) && !(json_is_string(v) && !strcmp(json_string_value(v), "none")))
		return api_error_invalid(e, "tool_choice", "tool_choice is not supported, only \"none\"");
	v = field(r, "response_format");
	if (v) {
		const char *type = json_string_value(json_object_get(v, "type"));
		if (!type)
			return api_error_invalid(e, "response_format", "response_format must be an object with a type");
		if (strcmp(type, "text") != 0)
			return api_error_invalid(e, "response_format",
						 "response_format of type '%.64s' is not supported, only text", type);
	}
	v = field(r, "modalities");
	size_t index;
	const json_t *item;
	json_array_foreach(v, index, item)
	{
		if (!json_is_string(item) || strcmp(json_string_value(item), "text") != 0)
			return api_error_invalid(e, "modalities", "modalities other than text are not supported");
	}
	return STATUS_OK;
}

static enum status parse_stream_options(struct api_request *r, struct api_error *e)
{
	const json_t *v = field(r, "stream_options");
	if (!v)
		return STATUS_OK;
	if (!json_is_object(v))
		return api_error_invalid(e, "stream_options", "stream_options must be an object");
	if (!r->flag.stream)
		return api_error_invalid(e, "stream_options", "stream_options is only allowed when stream is true");
	const json_t *usage = json_object_get(v, "include_usage");
	if (usage && !json_is_null(usage) && !json_is_boolean(usage))
		return api_error_invalid(e, "stream_options", "stream_options.include_usage must be true or false");
	r->flag.include_usage = json_is_true(usage);
	const json_t *continuous = json_object_get(v, "continuous_usage_stats");
	if (continuous && !json_is_null(continuous) && !json_is_false(continuous))
		return api_error_invalid(e, "stream_options", "stream_options.continuous_usage_stats is not supported");
	return STATUS_OK;
}

static enum status parse_stop(struct api_request *r, struct api_error *e)
{
	const json_t *v = field(r, "stop");
	size_t count = json_is_string(v) ? 1 : json_array_size(v);
	if (v && !json_is_string(v) && !json_is_array(v))
		return api_error_invalid(e, "stop", "stop must be a string or an array of strings");
	if (count > STOP_MAX_STRINGS)
		return api_error_invalid(e, "stop", "stop has %zu strings, at most %d are allowed", count,
					 STOP_MAX_STRINGS);
	if (!count)
		return STATUS_OK;
	r->stop_strings = xcalloc(count, sizeof *r->stop_strings);
	size_t lens[STOP_MAX_STRINGS];
	for (size_t i = 0; i < count; i++) {
		const json_t *s = json_is_string(v) ? v : json_array_get(v, i);
		if (!json_is_string(s))
			return api_error_invalid(e, "stop", "stop must be a string or an array of strings");
		lens[i] = json_string_length(s);
		if (lens[i] < 1 || lens[i] > STOP_MAX_BYTES)
			return api_error_invalid(e, "stop", "stop[%zu] has %zu bytes, must have 1 to %d", i, lens[i],
						 STOP_MAX_BYTES);
		r->stop_strings[i] = json_string_value(s);
	}
	r->n_stop_strings = (unsigned)count;
	r->stop = stop_set_create(r->stop_strings, lens, (unsigned)count);
	return STATUS_OK;
}

// An array of token ids; name is the field's for errors.
static enum status parse_ids(const json_t *v, const char *name, uint32_t vocab_size, uint32_t **ids, size_t *count,
			     struct api_error *e)
{
	size_t n = json_array_size(v), i;
	const json_t *item;
	*ids = xcalloc(n, sizeof **ids);
	json_array_foreach(v, i, item)
	{
		if (!json_is_integer(item))
			return api_error_invalid(e, name, "%s[%zu] must be a token id", name, i);
		json_int_t id = json_integer_value(item);
		if (id < 0 || id >= (json_int_t)vocab_size)
			return api_error_invalid(e, name, "%s[%zu] is %lld, must be a token id from 0 to %u", name, i,
						 (long long)id, vocab_size - 1);
		(*ids)[i] = (uint32_t)id;
	}
	*count = n;
	return STATUS_OK;
}

static enum status parse_stop_ids(struct api_request *r, const struct api_limits *limits, struct api_error *e)
{
	const json_t *v = field(r, "stop_token_ids");
	if (!v)
		return STATUS_OK;
	if (!json_is_array(v) || json_array_size(v) > API_MAX_STOP_TOKENS)
		return api_error_invalid(e, "stop_token_ids", "stop_token_ids must be an array of at most %d token ids",
					 API_MAX_STOP_TOKENS);
	size_t count = 0;
	TRY(parse_ids(v, "stop_token_ids", limits->vocab_size, &r->stop_ids, &count, e));
	r->n_stop_ids = (uint32_t)count;
	return STATUS_OK;
}

static enum status parse_bias(struct api_request *r, const struct api_limits *limits, struct api_error *e)
{
	const json_t *v = field(r, "logit_bias");
	if (!v)
		return STATUS_OK;
	if (!json_is_object(v) || json_object_size(v) > MAX_BIAS)
		return api_error_invalid(e, "logit_bias", "logit_bias must be an object of at most %d token ids",
					 MAX_BIAS);
	size_t n = json_object_size(v);
	r->bias_ids = xcalloc(n, sizeof *r->bias_ids);
	r->bias_values = xcalloc(n, sizeof *r->bias_values);
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)v, key, value)
	{
		char *end;
		errno = 0;
		unsigned long long id = strtoull(key, &end, 10);
		if (key[0] < '0' || key[0] > '9' || *end || errno || id >= limits->vocab_size)
			return api_error_invalid(e, "logit_bias", "logit_bias: '%.32s' is not a token id from 0 to %u",
						 key, limits->vocab_size - 1);
		double d = json_number_value(value);
		if (!json_is_number(value) || !(d >= -100 && d <= 100))
			return api_error_invalid(e, "logit_bias", "logit_bias[%.32s] must be a number from -100 to 100",
						 key);
		for (uint32_t i = 0; i < r->n_bias; i++)
			if (r->bias_ids[i] == (uint32_t)id)
				return api_error_invalid(e, "logit_bias", "logit_bias names token %llu twice", id);
		r->bias_ids[r->n_bias] = (uint32_t)id;
		r->bias_values[r->n_bias++] = (float)d;
	}
	return STATUS_OK;
}

static enum status parse_salt(struct api_request *r, struct api_error *e)
{
	const json_t *v = field(r, "cache_salt");
	if (!v)
		return STATUS_OK;
	if (!json_is_string(v) || !json_string_length(v))
		return api_error_invalid(e, "cache_salt", "cache_salt must be a string that is not empty");
	const unsigned char *s = (const unsigned char *)json_string_value(v);
	uint64_t h = 0xcbf29ce484222325; // FNV-1a, then mixed
	for (size_t i = 0; i < json_string_length(v); i++)
		h = (h ^ s[i]) * 0x100000001b3;
	h = (h ^ h >> 33) * 0xff51afd7ed558ccd;
	h ^= h >> 33;
	r->cache_salt = h ? h : 1;
	return STATUS_OK;
}

static enum status parse_one_prompt(const json_t *v, struct api_prompt *p, const struct api_limits *limits,
				    struct api_error *e)
{
	if (json_is_string(v)) {
		*p = (struct api_prompt){.text = json_string_value(v), .len = json_string_length(v)};
		return STATUS_OK;
	}
	if (!json_array_size(v))
		return api_error_invalid(e, "prompt", "prompt must not be empty");
	return parse_ids(v, "prompt", limits->vocab_size, &p->ids, &p->n_ids, e);
}

static enum status parse_prompt(struct api_request *r, const struct api_limits *limits, struct api_error *e)
{
	const json_t *v = field(r, "prompt");
	if (!v)
		return api_error_invalid(e, "prompt", "prompt is required");
	if (!json_is_string(v) && !json_is_array(v))
		return api_error_invalid(e, "prompt",
					 "prompt must be a string, an array of strings, an array of token ids or "
					 "an array of such arrays");
	const json_t *first = json_array_get(v, 0);
	bool single = json_is_string(v) || json_is_integer(first);
	size_t n = single ? 1 : json_array_size(v);
	if (!n)
		return api_error_invalid(e, "prompt", "prompt must not be empty");
	if (n > API_MAX_PROMPTS)
		return api_error_invalid(e, "prompt", "prompt has %zu entries, at most %d are allowed", n,
					 API_MAX_PROMPTS);
	r->prompts = xcalloc(n, sizeof *r->prompts);
	r->n_prompts = (uint32_t)n;
	if (single)
		return parse_one_prompt(v, &r->prompts[0], limits, e);
	for (size_t i = 0; i < n; i++) {
		const json_t *item = json_array_get(v, i);
		if (json_typeof(item) != json_typeof(first) || !(json_is_string(item) || json_is_array(item)))
			return api_error_invalid(
			    e, "prompt", "prompt[%zu] must be a string or an array of token ids, as all others", i);
		TRY(parse_one_prompt(item, &r->prompts[i], limits, e));
	}
	return STATUS_OK;
}

static enum status parse_chat(struct api_request *r, struct api_error *e)
{
	json_t *messages;
	TRY(api_messages_normalize(&messages, field(r, "messages"), e));
	r->messages_json = json_dumps(messages, JSON_COMPACT);
	json_decref(messages);
	json_t *extra = json_object();
	const json_t *kwargs = field(r, "chat_template_kwargs");
	enum status status = STATUS_OK;
	const char *key;
	json_t *value;
	if (kwargs && !json_is_object(kwargs)) {
		status = api_error_invalid(e, "chat_template_kwargs", "chat_template_kwargs must be an object");
		goto out;
	}
	json_object_foreach((json_t *)kwargs, key, value)
	{
		if (!strcmp(key, "messages") || !strcmp(key, "tools") || !strcmp(key, "chat_template") ||
		    !strcmp(key, "tokenize") || !strcmp(key, "add_generation_prompt") ||
		    !strcmp(key, "continue_final_message")) {
			status = api_error_invalid(e, "chat_template_kwargs", "chat_template_kwargs must not hold '%s'",
						   key);
			goto out;
		}
		json_object_set(extra, key, value);
	}
	const json_t *documents = field(r, "documents");
	if (documents && !json_is_array(documents)) {
		status = api_error_invalid(e, "documents", "documents must be an array");
		goto out;
	}
	if (documents)
		json_object_set(extra, "documents", (json_t *)documents);
	json_object_set_new(extra, "add_generation_prompt", json_boolean(r->flag.add_generation_prompt));
	r->extra_json = json_dumps(extra, JSON_COMPACT);
out:
	json_decref(extra);
	return status;
}

static enum status parse_tokenize(struct api_request *r, const struct api_limits *limits, struct api_error *e)
{
	const json_t *prompt = field(r, "prompt"), *content = field(r, "content");
	if (field(r, "messages")) {
		r->flag.add_special_tokens = json_is_true(field(r, "add_special_tokens"));
		return parse_chat(r, e);
	}
	if (content && !prompt) // llama.cpp's form, whose default is the other way round
		r->flag.add_special_tokens =
		    json_is_true(field(r, "add_special")) || json_is_true(field(r, "add_special_tokens"));
	const char *name = prompt ? "prompt" : "content";
	const json_t *v = prompt ? prompt : content;
	if (!v)
		return api_error_invalid(e, "prompt", "prompt, messages or content is required");
	if (!json_is_string(v))
		return api_error_invalid(e, name, "%s must be a string", name);
	r->prompts = xcalloc(1, sizeof *r->prompts);
	r->n_prompts = 1;
	return parse_one_prompt(v, &r->prompts[0], limits, e);
}

static enum status parse_detokenize(struct api_request *r, const struct api_limits *limits, struct api_error *e)
{
	const json_t *v = field(r, "tokens");
	if (!v || !json_is_array(v))
		return api_error_invalid(e, "tokens",
					 v ? "tokens must be an array of token ids" : "tokens is required");
	r->prompts = xcalloc(1, sizeof *r->prompts);
	r->n_prompts = 1;
	return parse_ids(v, "tokens", limits->vocab_size, &r->prompts[0].ids, &r->prompts[0].n_ids, e);
}

static enum status check_together(struct api_request *r, struct api_error *e)
{
	struct api_numbers *n = &r->number;
	if (n->max_completion_tokens)
		r->max_tokens = (uint32_t)n->max_completion_tokens;
	else if (n->max_tokens)
		r->max_tokens = (uint32_t)n->max_tokens;
	else if (r->endpoint == API_COMPLETIONS)
		r->max_tokens = 16; // as OpenAI
	if (r->max_tokens && n->min_tokens > r->max_tokens)
		return api_error_invalid(e, "min_tokens", "min_tokens is %lld, must be at most max_tokens, which is %u",
					 (long long)n->min_tokens, r->max_tokens);
	if (n->best_of && n->best_of < n->n)
		return api_error_invalid(e, "best_of", "best_of is %lld, must be at least n, which is %lld",
					 (long long)n->best_of, (long long)n->n);
	if (n->best_of > n->n)
		return api_error_invalid(e, "best_of", "best_of above n is not supported");
	if (r->endpoint == API_COMPLETIONS)
		r->n_logprobs = (int32_t)n->logprobs;
	else if (r->flag.want_logprobs)
		r->n_logprobs = (int32_t)(n->top_logprobs > 0 ? n->top_logprobs : 0);
	else if (n->top_logprobs > 0)
		return api_error_invalid(e, "top_logprobs", "top_logprobs needs logprobs to be true");
	if (r->n_prompts * (uint64_t)n->n > API_MAX_TOTAL_CHOICES)
		return api_error_invalid(e, "n", "n is %lld for %u prompts, at most %d choices are allowed",
					 (long long)n->n, r->n_prompts, API_MAX_TOTAL_CHOICES);
	return STATUS_OK;
}

static float or_default(float model, float openai)
{
	return isnan(model) || model < 0 ? openai : model;
}

static void set_defaults(struct api_request *r, const struct model_generation *g)
{
	r->number = (struct api_numbers){
	    .temperature = or_default(g->temperature, 1),
	    .top_p = or_default(g->top_p == 0 ? NAN : g->top_p, 1),
	    .min_p = or_default(g->min_p, 0),
	    .repetition_penalty = or_default(g->repetition_penalty == 0 ? NAN : g->repetition_penalty, 1),
	    .top_k = g->top_k > 0 ? g->top_k : -1,
	    .n = 1,
	    .logprobs = -1,
	    .top_logprobs = -1,
	};
	r->flag = (struct api_flags){
	    .skip_special_tokens = true,
	    .add_special_tokens = r->endpoint != API_CHAT,
	    .parse_special = true,
	    .add_generation_prompt = true,
	};
	r->n_logprobs = -1;
}

enum status api_request_parse(struct api_request *r, enum api_endpoint endpoint, const char *body, size_t len,
			      const struct api_limits *limits, struct api_error *e)
{
	*r = (struct api_request){.endpoint = endpoint};
	set_defaults(r, limits->generation);
	TRY(api_json_parse(&r->root, body, len, e));
	const json_t *model = field(r, "model");
	if (model && !json_is_string(model))
		return api_error_invalid(e, "model", "model must be a string");
	TRY(parse_numbers(r, e));
	TRY(parse_flags(r, e));
	TRY(check_refused(r, e));
	if (endpoint == API_TOKENIZE)
		return parse_tokenize(r, limits, e);
	if (endpoint == API_DETOKENIZE)
		return parse_detokenize(r, limits, e);
	r->has_seed = field(r, "seed") != NULL;
	TRY(parse_stream_options(r, e));
	TRY(parse_stop(r, e));
	TRY(parse_stop_ids(r, limits, e));
	TRY(parse_bias(r, limits, e));
	TRY(parse_salt(r, e));
	if (endpoint == API_COMPLETIONS)
		TRY(parse_prompt(r, limits, e));
	else
		TRY(parse_chat(r, e));
	return check_together(r, e);
}

void api_request_free(struct api_request *r)
{
	for (uint32_t i = 0; i < r->n_prompts; i++)
		free(r->prompts[i].ids);
	free(r->prompts);
	free(r->messages_json);
	free(r->extra_json);
	free(r->stop_ids);
	free(r->stop_strings);
	free(r->bias_ids);
	free(r->bias_values);
	stop_set_destroy(&r->stop);
	json_decref(r->root);
	*r = (struct api_request){0};
}
