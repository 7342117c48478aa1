#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/api_request.h"

static const struct model_generation generation = {
    .temperature = 0.25f, .top_p = NAN, .min_p = -1, .repetition_penalty = 1.125f, .top_k = 40, .bos = -1};
static const struct api_limits limits = {.vocab_size = 1000, .generation = &generation};

static enum status parse(struct api_request *r, enum api_endpoint endpoint, const char *body, struct api_error *e)
{
	*e = (struct api_error){0};
	return api_request_parse(r, endpoint, body, strlen(body), &limits, e);
}

#define C API_COMPLETIONS
#define M API_CHAT
#define T API_TOKENIZE
#define D API_DETOKENIZE
#define CHAT(fields) "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]," fields "}"
#define TEXT(fields) "{\"prompt\":\"hi\"," fields "}"
#define MESSAGES(list) "{\"messages\":" list "}"

// Bodies that are refused, and the field that the error names ("" = none).
static const struct {
	enum api_endpoint endpoint;
	const char *body, *param, *words;
} refused[] = {
    {M, CHAT("\"n\":0"), "n", "at least 1"},
    {M, CHAT("\"n\":129"), "n", "at most 128"},
    {M, CHAT("\"max_tokens\":0"), "max_tokens", "at least 1"},
    {M, CHAT("\"max_tokens\":-5"), "max_tokens", ""},
    {M, CHAT("\"max_completion_tokens\":0"), "max_completion_tokens", ""},
    {M, CHAT("\"temperature\":-1"), "temperature", "-1"},
    {M, CHAT("\"temperature\":NaN"), "", "JSON"},
    {M, CHAT("\"temperature\":\"1\""), "temperature", "must be a number"},
    {M, CHAT("\"temperature\":true"), "temperature", ""},
    {M, CHAT("\"top_p\":0"), "top_p", "above 0"},
    {M, CHAT("\"top_p\":1.5"), "top_p", ""},
    {M, CHAT("\"min_p\":-0.1"), "min_p", ""},
    {M, CHAT("\"top_k\":-2"), "top_k", ""},
    {M, CHAT("\"top_k\":1.5"), "top_k", "integer"},
    {M, CHAT("\"presence_penalty\":2.5"), "presence_penalty", ""},
    {M, CHAT("\"frequency_penalty\":-2.5"), "frequency_penalty", ""},
    {M, CHAT("\"repetition_penalty\":0"), "repetition_penalty", ""},
    {M, CHAT("\"seed\":\"7\""), "seed", ""},
    {M, CHAT("\"seed\":99999999999999999999999"), "seed", "too large"},
    {C, TEXT("\"max_tokens\":9223372036854775808"), "max_tokens", "too large"},
    {C, TEXT("\"max_tokens\":2147483648"), "max_tokens", "is 2147483648, must be at least 1 and at most 2147483647"},
    {M, CHAT("\"stream\":\"yes\""), "stream", ""},
    {M, CHAT("\"stream\":1"), "stream", ""},
    {M, CHAT("\"n\":0,\"stream\":true"), "n", ""},
    {M, CHAT("\"logprobs\":true,\"top_logprobs\":21"), "top_logprobs", ""},
    {M, CHAT("\"top_logprobs\":3"), "top_logprobs", "logprobs"},
    {M, CHAT("\"logprobs\":5"), "logprobs", ""},
    {C, TEXT("\"logprobs\":21"), "logprobs", ""},
    {C, TEXT("\"logprobs\":-1"), "logprobs", ""},
    {C, TEXT("\"logprobs\":true"), "logprobs", ""},
    {C, TEXT("\"best_of\":2"), "best_of", "not supported"},
    {C, TEXT("\"n\":3,\"best_of\":2"), "best_of", "at least n"},
    {C, TEXT("\"min_tokens\":5,\"max_tokens\":4"), "min_tokens", "4"},
    {C, TEXT("\"stop\":[\"a\",5]"), "stop", ""},
    {C, TEXT("\"stop\":\"\""), "stop", ""},
    {C, TEXT("\"stop\":{}"), "stop", ""},
    {C, TEXT("\"stop_token_ids\":[1000]"), "stop_token_ids", "999"},
    {C, TEXT("\"stop_token_ids\":\"5\""), "stop_token_ids", ""},
    {C, TEXT("\"logit_bias\":{\"1000\":1}"), "logit_bias", "1000"},
    {C, TEXT("\"logit_bias\":{\"x\":1}"), "logit_bias", ""},
    {C, TEXT("\"logit_bias\":{\"5\":101}"), "logit_bias", ""},
    {C, TEXT("\"logit_bias\":{\"5\":1,\"05\":1}"), "logit_bias", "twice"},
    {C, TEXT("\"logit_bias\":[1]"), "logit_bias", ""},
    {C, TEXT("\"cache_salt\":\"\""), "cache_salt", ""},
    {C, TEXT("\"cache_salt\":7"), "cache_salt", ""},
    {C, TEXT("\"stream_options\":{\"include_usage\":true}"), "stream_options", "stream is true"},
    {C, TEXT("\"stream\":true,\"stream_options\":5"), "stream_options", ""},
    {C, TEXT("\"stream\":true,\"stream_options\":{\"include_usage\":5}"), "stream_options", ""},
    {C, TEXT("\"stream\":true,\"stream_options\":{\"continuous_usage_stats\":true}"), "stream_options", ""},
    {C, TEXT("\"model\":5"), "model", ""},
    // not built
    {C, TEXT("\"echo\":true"), "echo", "not supported"},
    {C, TEXT("\"suffix\":\"x\""), "suffix", ""},
    {C, TEXT("\"prompt_logprobs\":0"), "prompt_logprobs", ""},
    {C, TEXT("\"guided_regex\":\"a*\""), "guided_regex", ""},
    {C, TEXT("\"structured_outputs\":{\"regex\":\"a\"}"), "structured_outputs", ""},
    {C, TEXT("\"grammar\":\"root ::= x\""), "grammar", ""},
    {C, TEXT("\"use_beam_search\":true"), "use_beam_search", ""},
    {M, CHAT("\"tools\":[{\"type\":\"function\"}]"), "tools", ""},
    {M, CHAT("\"tool_choice\":\"auto\""), "tool_choice", ""},
    {M, CHAT("\"functions\":[{}]"), "functions", ""},
    {M, CHAT("\"response_format\":{\"type\":\"json_object\"}"), "response_format", "json_object"},
    {M, CHAT("\"response_format\":5"), "response_format", ""},
    {M, CHAT("\"modalities\":[\"audio\"]"), "modalities", ""},
    {M, CHAT("\"continue_final_message\":true"), "continue_final_message", ""},
    {M, CHAT("\"chat_template\":\"x\""), "chat_template", ""},
    {M, CHAT("\"chat_template_kwargs\":{\"messages\":[]}"), "chat_template_kwargs", ""},
    // prompts and messages
    {C, "{}", "prompt", "required"},
    {C, "{\"prompt\":null}", "prompt", "required"},
    {C, "{\"prompt\":[]}", "prompt", "empty"},
    {C, "{\"prompt\":[[]]}", "prompt", "empty"},
    {C, "{\"prompt\":5}", "prompt", ""},
    {C, "{\"prompt\":[1,\"a\"]}", "prompt", ""},
    {C, "{\"prompt\":[\"a\",[1]]}", "prompt", ""},
    {C, "{\"prompt\":[1000]}", "prompt", "999"},
    {C, "{\"prompt\":[-1]}", "prompt", ""},
    {C, "{\"prompt\":[1.5]}", "prompt", ""},
    {M, "{}", "messages", "required"},
    {M, MESSAGES("[]"), "messages", "empty"},
    {M, MESSAGES("{}"), "messages", "array"},
    {M, MESSAGES("[5]"), "messages[0]", ""},
    {M, MESSAGES("[{\"role\":\"king\",\"content\":\"x\"}]"), "messages[0].role", "king"},
    {M, MESSAGES("[{\"content\":\"x\"}]"), "messages[0].role", ""},
    {M, MESSAGES("[{\"role\":\"user\"}]"), "messages[0].content", ""},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":null}]"), "messages[0].content", ""},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":5}]"), "messages[0].content", ""},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}]"),
     "messages[0].content[0]", "image_url"},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":[{\"type\":\"input_audio\"}]}]"), "messages[0].content[0]",
     "input_audio"},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]"), "messages[0].content[0]", ""},
    {M, MESSAGES("[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"[1\"}}]}]"),
     "messages[0].tool_calls[0].function", "arguments"},
    // JSON itself
    {C, "", "", "empty"},
    {C, "[]", "", "object"},
    {C, "{\"prompt\":\"a\",\"prompt\":\"b\"}", "", "JSON"},
    {C, "{\"prompt\":\"\\ud800\"}", "", "JSON"},
    {C, "{\"prompt\":\"a\\u0000b\"}", "", "JSON"},
    {C, "{\"prompt\":\"\xff\"}", "", "JSON"},
    {C, "{\"prompt\":\"\xc0\x80\"}", "", "JSON"},
    {C, "{\"prompt\":\"a\"} x", "", "JSON"},
    {C, "{\"prompt\":Infinity}", "", "JSON"},
    {C, "{\"prompt\":\"a\",\"temperature\":1e999}", "", "JSON"},
    {T, "{}", "prompt", "required"},
    {T, "{\"prompt\":5}", "prompt", ""},
    {T, "{\"content\":[1]}", "content", ""},
    {D, "{}", "tokens", "required"},
    {D, "{\"tokens\":[1000]}", "tokens", ""},
    {D, "{\"tokens\":\"x\"}", "tokens", ""},
};

Test(api_request, refuses_what_is_wrong_and_names_the_field)
{
	for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
		struct api_request r;
		struct api_error e;
		enum status status = parse(&r, refused[i].endpoint, refused[i].body, &e);
		cr_expect_eq(status, STATUS_INVALID, "%s was accepted", refused[i].body);
		cr_expect_eq(e.http_status, 400, "%s: status %d", refused[i].body, e.http_status);
		cr_expect_str_eq(e.param, refused[i].param, "%s: names '%s', expected '%s' (%s)", refused[i].body,
				 e.param, refused[i].param, e.message);
		cr_expect(strstr(e.message, refused[i].words), "%s: '%s' lacks '%s'", refused[i].body, e.message,
			  refused[i].words);
		api_request_free(&r);
	}
}

static const struct {
	enum api_endpoint endpoint;
	const char *body;
} accepted[] = {
    {M, CHAT("\"unknown_field\":{\"a\":[1]},\"user\":\"me\",\"store\":false")},
    {M, CHAT("\"temperature\":null,\"n\":null,\"stop\":null,\"tools\":null,\"logprobs\":null,\"stream\":null")},
    {M, CHAT("\"tools\":[],\"tool_choice\":\"none\",\"functions\":[],\"response_format\":{\"type\":\"text\"}")},
    {M, CHAT("\"logprobs\":true")},
    {M, CHAT("\"logprobs\":false,\"top_logprobs\":0")},
    {M, CHAT("\"max_tokens\":5.0,\"top_k\":-1,\"seed\":-9223372036854775808")},
    {C, TEXT("\"echo\":false,\"suffix\":\"\",\"best_of\":1,\"logprobs\":0,\"stop\":[]")},
    {C, "{\"prompt\":[\"a\",\"b\"]}"},
    {C, "{\"prompt\":[1,2,999]}"},
    {C, "{\"prompt\":[[1],[2,3]]}"},
    {C, "{\"prompt\":\"\\ud83d\\ude00\"}"},
    {M, MESSAGES("[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]")},
    {M, MESSAGES("[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}]")},
    {M, MESSAGES("[{\"role\":\"user\",\"content\":[]}]")},
    {M, MESSAGES("[{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":\"5\"}]")},
    {T, "{\"content\":\"x\",\"add_special\":true,\"parse_special\":false}"},
    {T, MESSAGES("[{\"role\":\"user\",\"content\":\"x\"}]")},
    {D, "{\"tokens\":[]}"},
};

Test(api_request, accepts_what_real_clients_send)
{
	for (size_t i = 0; i < sizeof accepted / sizeof accepted[0]; i++) {
		struct api_request r;
		struct api_error e;
		enum status status = parse(&r, accepted[i].endpoint, accepted[i].body, &e);
		cr_expect_eq(status, STATUS_OK, "%s: %s", accepted[i].body, e.message);
		api_request_free(&r);
	}
}

Test(api_request, takes_missing_sampling_fields_from_the_model_then_from_openai)
{
	struct api_request r;
	struct api_error e;
	cr_assert_eq(parse(&r, M, CHAT("\"x\":1"), &e), STATUS_OK);
	cr_expect_eq(r.number.temperature, 0.25);
	cr_expect_eq(r.number.repetition_penalty, 1.125);
	cr_expect_eq(r.number.top_k, 40);
	cr_expect_eq(r.number.top_p, 1);
	cr_expect_eq(r.number.min_p, 0);
	cr_expect_eq(r.max_tokens, 0, "a chat has no limit of its own");
	cr_expect_eq(r.n_logprobs, -1);
	cr_expect_not(r.has_seed);
	api_request_free(&r);
	cr_assert_eq(parse(&r, C, TEXT("\"temperature\":0"), &e), STATUS_OK);
	cr_expect_eq(r.number.temperature, 0);
	cr_expect_eq(r.max_tokens, 16, "as OpenAI's completions");
	api_request_free(&r);
}

Test(api_request, lets_max_completion_tokens_beat_max_tokens)
{
	struct api_request r;
	struct api_error e;
	cr_assert_eq(parse(&r, M, CHAT("\"max_tokens\":5,\"max_completion_tokens\":9"), &e), STATUS_OK);
	cr_expect_eq(r.max_tokens, 9);
	api_request_free(&r);
}

Test(api_request, reads_every_list)
{
	struct api_request r;
	struct api_error e;
	cr_assert_eq(parse(&r, C,
			   "{\"prompt\":[[1],[2,3]],\"stop\":[\"a\",\"bc\"],\"stop_token_ids\":[7,8],"
			   "\"logit_bias\":{\"5\":-100,\"6\":2.5},\"seed\":-1,\"n\":2,\"logprobs\":0}",
			   &e),
		     STATUS_OK);
	cr_expect_eq(r.n_prompts, 2);
	cr_expect_eq(r.prompts[1].n_ids, 2);
	cr_expect_eq(r.prompts[1].ids[1], 3);
	cr_expect_eq(r.n_stop_strings, 2);
	cr_expect_str_eq(r.stop_strings[1], "bc");
	cr_expect_eq(r.n_stop_ids, 2);
	cr_expect_eq(r.stop_ids[1], 8);
	cr_expect_eq(r.n_bias, 2);
	cr_expect(r.has_seed && r.number.seed == -1);
	cr_expect_eq(r.n_logprobs, 0);
	api_request_free(&r);
}

static const char *first_message(struct api_request *r, const char *list, json_t **root)
{
	struct api_error e;
	char body[1024];
	snprintf(body, sizeof body, "{\"messages\":%s}", list);
	cr_assert_eq(parse(r, M, body, &e), STATUS_OK, "%s", e.message);
	*root = json_loads(r->messages_json, 0, NULL);
	return json_string_value(json_object_get(json_array_get(*root, 0), "content"));
}

Test(api_request, makes_one_text_of_content_in_every_form)
{
	static const struct {
		const char *list, *text;
	} forms[] = {
	    {"[{\"role\":\"user\",\"content\":\"hi\"}]", "hi"},
	    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"hi\"}]}]", "hi"},
	    {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}"
	     "]",
	     "a\nb"},
	    {"[{\"role\":\"user\",\"content\":[]}]", ""},
	    {"[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]", ""},
	    {"[{\"role\":\"assistant\"}]", ""},
	};
	for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
		struct api_request r;
		json_t *root;
		const char *text = first_message(&r, forms[i].list, &root);
		cr_expect_str_eq(text, forms[i].text, "%s gave '%s'", forms[i].list, text);
		json_decref(root);
		api_request_free(&r);
	}
}

Test(api_request, calls_a_developer_system_and_makes_arguments_objects)
{
	struct api_request r;
	json_t *root;
	first_message(&r, "[{\"role\":\"developer\",\"content\":\"x\"}]", &root);
	cr_expect_str_eq(json_string_value(json_object_get(json_array_get(root, 0), "role")), "system");
	json_decref(root);
	api_request_free(&r);
	first_message(&r,
		      "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{"
		      "\\\"a\\\":1}\"}}]}]",
		      &root);
	json_t *call = json_array_get(json_object_get(json_array_get(root, 0), "tool_calls"), 0);
	cr_expect(json_is_object(json_object_get(json_object_get(call, "function"), "arguments")));
	json_decref(root);
	api_request_free(&r);
}

Test(api_request, refuses_bodies_nested_beyond_the_limit_without_running_out_of_stack)
{
	static char body[200000];
	strcpy(body, "{\"prompt\":");
	memset(body + strlen(body), '[', 150000);
	struct api_request r;
	struct api_error e;
	cr_expect_eq(parse(&r, C, body, &e), STATUS_INVALID);
	cr_expect(strstr(e.message, "64"), "%s", e.message);
	api_request_free(&r);
	// Brackets in strings do not count.
	strcpy(body, "{\"prompt\":\"\\\"");
	size_t n = strlen(body);
	memset(body + n, '[', 1000);
	strcpy(body + n + 1000, "\"}");
	cr_expect_eq(parse(&r, C, body, &e), STATUS_OK, "%s", e.message);
	api_request_free(&r);
}

Test(api_request, gives_equal_salts_equal_numbers_and_none_zero)
{
	struct api_request a, b, c;
	struct api_error e;
	parse(&a, C, TEXT("\"cache_salt\":\"x\""), &e);
	parse(&b, C, TEXT("\"cache_salt\":\"x\""), &e);
	parse(&c, C, TEXT("\"cache_salt\":\"y\""), &e);
	cr_expect(a.cache_salt && a.cache_salt == b.cache_salt && a.cache_salt != c.cache_salt);
	api_request_free(&a);
	api_request_free(&b);
	api_request_free(&c);
	parse(&a, C, TEXT("\"x\":1"), &e);
	cr_expect_eq(a.cache_salt, 0);
	api_request_free(&a);
}

Test(api_request, uses_llama_cpps_defaults_in_its_form_of_tokenize)
{
	struct api_request r;
	struct api_error e;
	parse(&r, T, "{\"prompt\":\"x\"}", &e);
	cr_expect(r.flag.add_special_tokens);
	api_request_free(&r);
	parse(&r, T, "{\"content\":\"x\"}", &e);
	cr_expect(!r.flag.add_special_tokens && r.flag.parse_special);
	api_request_free(&r);
	parse(&r, T, "{\"content\":\"x\",\"add_special\":true,\"parse_special\":false}", &e);
	cr_expect(r.flag.add_special_tokens && !r.flag.parse_special);
	api_request_free(&r);
}
