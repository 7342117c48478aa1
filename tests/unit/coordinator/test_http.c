#include <criterion/criterion.h>
#include <jansson.h>
#include <time.h>

#include "coordinator/http.h"

#include "fake_chat_template.c"
#include "fake_engine.c"
#include "fake_tokenizer.c"
#include "http_client.h"

static struct engine *engine;
static struct http_server *server;
static const char *address;

static void start_with(struct http_options o, struct fake_engine_controls control)
{
	struct error e = {{0}};
	engine_create(&engine, NULL, NULL, &e);
	fake_engine_control(&control);
	o.engine = engine;
	o.tokenizer = &fake_tokenizer;
	o.chat_template = &fake_chat_template;
	o.served_model_name = "fake";
	cr_assert_eq(http_server_start(&server, &o, &e), STATUS_OK, "%s", e.text);
	address = http_server_address(server);
}

static void start(struct fake_engine_controls control)
{
	start_with((struct http_options){0}, control);
}

static void stop(void)
{
	http_server_stop(&server, false);
	engine_destroy(&engine);
}

// Waits until the engine has seen what is wanted.
#define UNTIL(field, wanted)                                                                                           \
	do {                                                                                                           \
		struct fake_engine_seen seen_;                                                                         \
		fake_engine_look(&seen_);                                                                              \
		for (int i_ = 0; i_ < 2000 && seen_.field != (wanted); i_++) {                                         \
			usleep(10000);                                                                                 \
			fake_engine_look(&seen_);                                                                      \
		}                                                                                                      \
		cr_assert_eq(seen_.field, (wanted), #field " is %u, expected %u", (unsigned)seen_.field,               \
			     (unsigned)(wanted));                                                                      \
	} while (0)

static json_t *body_of(const char *answer)
{
	const char *body = strstr(answer, "\r\n\r\n");
	cr_assert(body, "no body in: %s", answer);
	json_t *root = json_loads(body + 4, JSON_REJECT_DUPLICATES, NULL);
	cr_assert(root, "not JSON: %s", body);
	return root;
}

static json_t *post(const char *path, const char *body, int status)
{
	char *answer = client_post(address, path, body);
	cr_assert_eq(client_status(answer), status, "%s: %s", body, answer);
	json_t *root = body_of(answer);
	free(answer);
	return root;
}

static const char *text_at(json_t *root, size_t choice)
{
	return json_string_value(json_object_get(json_array_get(json_object_get(root, "choices"), choice), "text"));
}

static const char *finish_at(json_t *root, size_t choice)
{
	return json_string_value(
	    json_object_get(json_array_get(json_object_get(root, "choices"), choice), "finish_reason"));
}

// Removes chunk framing, in place; the text before the first chunk (headers) goes too. *ended: the last chunk came.
static char *unchunk(char *answer, bool *ended)
{
	char *in = strstr(answer, "\r\n\r\n") + 4, *out = answer;
	*ended = false;
	for (;;) {
		char *end;
		size_t n = strtoul(in, &end, 16);
		if (end == in)
			break;
		if (!n) {
			*ended = true;
			break;
		}
		memmove(out, end + 2, n);
		out += n;
		in = end + 2 + n + 2;
	}
	*out = 0;
	return answer;
}

// Joined deltas of choice `index` of a stream; checks that each event is one line of JSON and that the finish comes
// once.
static char *joined(char *events, int index, bool chat, const char *finish)
{
	struct json_buf text = {0};
	unsigned finishes = 0;
	char *save;
	for (char *line = strtok_r(events, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		cr_assert(!strncmp(line, "data: ", 6) || !strcmp(line, ": ping"), "a line of a stream: %s", line);
		if (!strcmp(line, "data: [DONE]") || line[0] == ':')
			continue;
		json_t *root = json_loads(line + 6, JSON_REJECT_DUPLICATES, NULL);
		cr_assert(root, "not JSON: %s", line);
		json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
		if (choice && json_integer_value(json_object_get(choice, "index")) == index) {
			json_t *delta = chat ? json_object_get(json_object_get(choice, "delta"), "content")
					     : json_object_get(choice, "text");
			if (delta)
				json_add(&text, json_string_value(delta), json_string_length(delta));
			const char *why = json_string_value(json_object_get(choice, "finish_reason"));
			cr_assert(json_object_get(choice, "finish_reason"), "no finish_reason: %s", line);
			if (why) {
				finishes++;
				cr_expect_str_eq(why, finish);
			}
		}
		json_decref(root);
	}
	cr_expect_eq(finishes, 1, "%u finishes of choice %d", finishes, index);
	json_add(&text, "", 1);
	return text.data;
}

Test(http, answers_a_completion_with_usage)
{
	start((struct fake_engine_controls){0});
	json_t *root = post("/v1/completions", "{\"prompt\":\"hello<|im_end|>\",\"max_tokens\":50}", 200);
	cr_expect_str_eq(text_at(root, 0), "hello");
	cr_expect_str_eq(finish_at(root, 0), "stop");
	json_t *usage = json_object_get(root, "usage");
	cr_expect_eq(json_integer_value(json_object_get(usage, "prompt_tokens")), 6);
	cr_expect_eq(json_integer_value(json_object_get(usage, "completion_tokens")), 6);
	cr_expect_eq(json_integer_value(json_object_get(usage, "total_tokens")), 12);
	cr_expect_eq(
	    json_integer_value(json_object_get(json_object_get(usage, "prompt_tokens_details"), "cached_tokens")), 3);
	cr_expect_str_eq(json_string_value(json_object_get(root, "model")), "fake");
	json_decref(root);
	stop();
}

static const char *const texts[] = {
    "plain words",
    "\xe4\xbd\xa0\xe5\xa5\xbd\xef\xbc\x8c\xf0\x9f\x98\x80 \xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x92\xbb e\xcc\x81!",
    "quotes \\\" and \\\\ and \\n lines \\u0001",
    "ends with a beginning of STO",
};

Test(http, joined_deltas_equal_the_whole_answer)
{
	start((struct fake_engine_controls){.step_us = 200});
	for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
		for (int chat = 0; chat < 2; chat++) {
			char body[512], *path = chat ? "/v1/chat/completions" : "/v1/completions";
			const char *form =
			    chat ? "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"stop\":\"STOP\"%s}"
				 : "{\"prompt\":\"%s<|im_end|>\",\"max_tokens\":100,\"stop\":\"STOP\"%s}";
			snprintf(body, sizeof body, form, texts[i], "");
			json_t *root = post(path, body, 200);
			json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
			const char *whole =
			    json_string_value(chat ? json_object_get(json_object_get(choice, "message"), "content")
						   : json_object_get(choice, "text"));
			snprintf(body, sizeof body, form, texts[i], ",\"stream\":true");
			char *answer = client_post(address, path, body);
			cr_assert_eq(client_status(answer), 200);
			bool ended;
			unchunk(answer, &ended);
			cr_expect(ended);
			cr_expect(strstr(answer, "data: [DONE]\n\n"));
			char *text = joined(answer, 0, chat, "stop");
			cr_expect_str_eq(text, whole);
			cr_expect_not(strstr(text, "\xef\xbf\xbd"), "a replacement character in %s", text);
			free(text);
			free(answer);
			json_decref(root);
		}
	}
	stop();
}

Test(http, nothing_of_a_stop_string_leaks_and_nothing_is_lost)
{
	static const struct {
		const char *prompt;
		int max_tokens;
		const char *text, *finish;
	} cases[] = {
	    {"abcSTOPdef", 100, "abc", "stop"}, {"abcSTO", 6, "abcSTO", "length"},
	    {"abcSTOP", 7, "abc", "stop"}, // together with max_tokens
	    {"abcSTOP", 6, "abcSTO", "length"}, {"SSTOP", 100, "S", "stop"},
	    {"STSTOP", 100, "ST", "stop"},	{"STOP", 100, "", "stop"},
	};
	start((struct fake_engine_controls){0});
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		char body[256];
		snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":%d,\"stop\":[\"STOP\",\"zzz\"]}",
			 cases[i].prompt, cases[i].max_tokens);
		json_t *root = post("/v1/completions", body, 200);
		cr_expect_str_eq(text_at(root, 0), cases[i].text, "%s: '%s'", cases[i].prompt, text_at(root, 0));
		cr_expect_str_eq(finish_at(root, 0), cases[i].finish);
		json_decref(root);
		snprintf(body, sizeof body, "{\"prompt\":\"%s\",\"max_tokens\":%d,\"stop\":[\"STOP\"],\"stream\":true}",
			 cases[i].prompt, cases[i].max_tokens);
		char *answer = client_post(address, "/v1/completions", body);
		bool ended;
		char *text = joined(unchunk(answer, &ended), 0, false, cases[i].finish);
		cr_expect_str_eq(text, cases[i].text, "%s, streamed: '%s'", cases[i].prompt, text);
		free(text);
		free(answer);
	}
	UNTIL(in_hand, 0);
	stop();
}

Test(http, tells_the_engine_which_choice_found_its_stop_string)
{
	start((struct fake_engine_controls){.step_us = 500});
	// Choice 1 says each letter one on: "bcd...", and finds the stop string; choice 0 goes on to its length.
	json_t *root =
	    post("/v1/completions", "{\"prompt\":\"abcxyz\",\"max_tokens\":30,\"n\":2,\"stop\":\"bcdy\"}", 200);
	cr_expect_str_eq(text_at(root, 0), "abcxyzabcxyzabcxyzabcxyzabcxyz");
	cr_expect_str_eq(finish_at(root, 0), "length");
	cr_expect_str_eq(text_at(root, 1), "");
	cr_expect_str_eq(finish_at(root, 1), "stop");
	json_decref(root);
	UNTIL(stopped, 1);
	UNTIL(ended, 1);
	stop();
}

Test(http, streams_every_choice_of_every_prompt)
{
	start((struct fake_engine_controls){.step_us = 100});
	for (int index = 0; index < 4; index++) {
		static const char *const expected[] = {"abab", "bcbc", "xyxy", "yzyz"};
		char *answer = client_post(address, "/v1/completions",
					   "{\"prompt\":[\"ab\",\"xy\"],\"n\":2,\"max_tokens\":4,\"stream\":true}");
		bool ended;
		char *text = joined(unchunk(answer, &ended), index, false, "length");
		cr_expect_str_eq(text, expected[index]);
		free(text);
		free(answer);
	}
	stop();
}

static unsigned count_of(const char *text, const char *part)
{
	unsigned n = 0;
	for (const char *p = text; (p = strstr(p, part)); p += strlen(part))
		n++;
	return n;
}

Test(http, sends_usage_in_one_last_chunk_only_if_asked)
{
	start((struct fake_engine_controls){0});
	for (int with = 0; with < 2; with++) {
		char body[256];
		snprintf(body, sizeof body, "{\"prompt\":\"abc\",\"max_tokens\":4,\"stream\":true%s}",
			 with ? ",\"stream_options\":{\"include_usage\":true}" : "");
		char *answer = client_post(address, "/v1/completions", body);
		cr_expect_eq(count_of(answer, "\"usage\""), (unsigned)with);
		cr_expect_eq(count_of(answer, "\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,"),
			     (unsigned)with);
		free(answer);
	}
	stop();
}

Test(http, refuses_before_any_header_of_a_stream)
{
	start((struct fake_engine_controls){0});
	char *answer = client_post(address, "/v1/chat/completions", "{\"messages\":[],\"stream\":true}");
	cr_expect_eq(client_status(answer), 400);
	cr_expect(strstr(answer, "application/json") && !strstr(answer, "event-stream"));
	free(answer);
	json_t *root = post("/v1/chat/completions",
			    "{\"messages\":[{\"role\":\"user\",\"content\":\"RAISE\"}],\"stream\":true}", 400);
	cr_expect(
	    strstr(json_string_value(json_object_get(json_object_get(root, "error"), "message")), "must alternate"));
	json_decref(root);
	stop();
}

Test(http, names_both_numbers_of_a_prompt_that_is_too_long)
{
	start((struct fake_engine_controls){.max_context = 8});
	json_t *root = post("/v1/completions", "{\"prompt\":\"123456789\"}", 400);
	json_t *error = json_object_get(root, "error");
	cr_expect_str_eq(json_string_value(json_object_get(error, "code")), "context_length_exceeded");
	const char *message = json_string_value(json_object_get(error, "message"));
	cr_expect(strstr(message, " 8 ") && strstr(message, " 9 "), "%s", message);
	json_decref(root);
	// What is left bounds the answer.
	root = post("/v1/completions", "{\"prompt\":\"12345\",\"max_tokens\":100}", 200);
	cr_expect_str_eq(text_at(root, 0), "123");
	cr_expect_str_eq(finish_at(root, 0), "length");
	json_decref(root);
	stop();
}

Test(http, answers_429_with_retry_after_when_the_queue_is_full)
{
	start((struct fake_engine_controls){.max_queue = 1, .silent = true});
	int first = client_connect(address);
	client_send_post(first, "/v1/completions", "{\"prompt\":\"abc\"}");
	UNTIL(submitted, 1);
	char *answer = client_post(address, "/v1/completions", "{\"prompt\":\"abc\"}");
	cr_expect_eq(client_status(answer), 429);
	cr_expect(strstr(answer, "Retry-After: 1\r\n"), "%s", answer);
	free(answer);
	// A list of prompts of which only some fit is refused as a whole.
	fake_engine_control(&(struct fake_engine_controls){.max_queue = 3, .silent = true});
	answer = client_post(address, "/v1/completions", "{\"prompt\":[\"a\",\"b\",\"c\"]}");
	cr_expect_eq(client_status(answer), 429);
	free(answer);
	UNTIL(cancelled, 2);
	close(first);
	UNTIL(in_hand, 0);
	stop();
}

Test(http, cancels_what_the_client_no_longer_waits_for)
{
	start((struct fake_engine_controls){.silent = true});
	for (int stream = 0; stream < 2; stream++) {
		int fd = client_connect(address);
		char body[128];
		snprintf(body, sizeof body, "{\"prompt\":[\"abc\",\"de\"],\"stream\":%s}", stream ? "true" : "false");
		client_send_post(fd, "/v1/completions", body);
		UNTIL(submitted, 2u + 2u * (unsigned)stream);
		close(fd);
		UNTIL(cancelled, 2u + 2u * (unsigned)stream);
		UNTIL(in_hand, 0);
	}
	stop();
}

Test(http, ends_a_broken_stream_with_an_error_and_without_done)
{
	start((struct fake_engine_controls){.fail_after = 3});
	char *answer = client_post(address, "/v1/completions", "{\"prompt\":\"abcdef\",\"stream\":true}");
	cr_expect_eq(client_status(answer), 200);
	bool ended;
	unchunk(answer, &ended);
	cr_expect_not(ended, "the last chunk came");
	cr_expect(strstr(answer, "data: {\"error\":{"), "%s", answer);
	cr_expect_not(strstr(answer, "[DONE]"));
	free(answer);
	answer = client_post(address, "/v1/completions", "{\"prompt\":\"abcdef\"}");
	cr_expect_eq(client_status(answer), 503);
	cr_expect(strstr(answer, "Retry-After"));
	free(answer);
	stop();
}

Test(http, passes_every_sampling_field_on)
{
	start((struct fake_engine_controls){0});
	json_decref(post("/v1/completions",
			 "{\"prompt\":[1,2,3],\"max_tokens\":7,\"n\":2,\"temperature\":0.5,\"top_p\":0.25,\"top_k\":5,"
			 "\"min_p\":0.125,"
			 "\"presence_penalty\":1.5,\"frequency_penalty\":-1.5,\"repetition_penalty\":1.25,\"seed\":77,"
			 "\"logit_bias\":{\"9\":-100},\"min_tokens\":2,\"stop_token_ids\":[50],\"logprobs\":4,"
			 "\"cache_salt\":\"me\"}",
			 200));
	struct fake_engine_seen seen;
	fake_engine_look(&seen);
	cr_expect_eq(seen.n_prompt, 3);
	cr_expect_eq(seen.prompt[2], 3);
	cr_expect_eq(seen.max_tokens, 7);
	cr_expect_eq(seen.n_choices, 2);
	cr_expect_eq(seen.sampling.temperature, 0.5f);
	cr_expect_eq(seen.sampling.top_p, 0.25f);
	cr_expect_eq(seen.sampling.top_k, 5);
	cr_expect_eq(seen.sampling.min_p, 0.125f);
	cr_expect_eq(seen.sampling.presence_penalty, 1.5f);
	cr_expect_eq(seen.sampling.frequency_penalty, -1.5f);
	cr_expect_eq(seen.sampling.repetition_penalty, 1.25f);
	cr_expect_eq(seen.sampling.seed, 77);
	cr_expect_eq(seen.sampling.min_tokens, 2);
	cr_expect_eq(seen.sampling.n_stop_ids, 2, "end tokens are banned below min_tokens");
	cr_expect_eq(seen.sampling.n_logprobs, 4);
	cr_expect_eq(seen.bias_id, 9);
	cr_expect_eq(seen.bias_value, -100);
	cr_expect_eq(seen.n_end_ids, 2);
	cr_expect_eq(seen.end_ids[0], FAKE_END);
	cr_expect_eq(seen.end_ids[1], 50);
	cr_expect_neq(seen.cache_salt, 0);
	json_decref(post("/v1/completions", "{\"prompt\":[1,2,258,4],\"max_tokens\":4,\"ignore_eos\":true}", 200));
	fake_engine_look(&seen);
	cr_expect_eq(seen.n_end_ids, 0);
	uint64_t drawn = seen.sampling.seed;
	json_decref(post("/v1/completions", "{\"prompt\":[1,2]}", 200));
	fake_engine_look(&seen);
	cr_expect_neq(seen.sampling.seed, drawn, "a seed that is not given is drawn");
	stop();
}

Test(http, shapes_logprobs_as_each_endpoint_does)
{
	start((struct fake_engine_controls){0});
	json_t *root = post("/v1/completions", "{\"prompt\":[97,259],\"max_tokens\":2,\"logprobs\":0}", 200);
	json_t *lp = json_object_get(json_array_get(json_object_get(root, "choices"), 0), "logprobs");
	cr_expect_str_eq(json_string_value(json_array_get(json_object_get(lp, "tokens"), 1)), "hello");
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(lp, "text_offset"), 1)), 1);
	cr_expect_eq(json_real_value(json_array_get(json_object_get(lp, "token_logprobs"), 0)), -12.25);
	cr_expect_eq(json_object_size(json_array_get(json_object_get(lp, "top_logprobs"), 0)), 1);
	json_decref(root);
	root = post("/v1/completions",
		    "{\"prompt\":[228],\"max_tokens\":1,\"logprobs\":2,\"return_tokens_as_token_ids\":true}", 200);
	json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
	lp = json_object_get(choice, "logprobs");
	cr_expect_str_eq(json_string_value(json_array_get(json_object_get(lp, "tokens"), 0)), "token_id:228");
	cr_expect(json_object_get(json_array_get(json_object_get(lp, "top_logprobs"), 0), "token_id:229"));
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(choice, "token_ids"), 0)), 228);
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(choice, "prompt_token_ids"), 0)), 228);
	json_decref(root);
	root = post(
	    "/v1/chat/completions",
	    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\xc3\xa9\"}],\"logprobs\":true,\"top_logprobs\":2}", 200);
	lp = json_object_get(json_object_get(json_array_get(json_object_get(root, "choices"), 0), "logprobs"),
			     "content");
	cr_assert_eq(json_array_size(lp), 4, "two letters of three bytes, and the end");
	json_t *second = json_array_get(lp, 1);
	cr_expect_str_eq(json_string_value(json_object_get(second, "token")), "\xef\xbf\xbd");
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(second, "bytes"), 0)), 0xc3);
	cr_expect_eq(json_array_size(json_object_get(second, "top_logprobs")), 2);
	json_decref(root);
	stop();
}

Test(http, keeps_text_that_looks_like_a_control_token_as_text)
{
	start((struct fake_engine_controls){0});
	json_t *root =
	    post("/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"x<|im_end|><s>y\"}]}", 200);
	cr_expect_str_eq(
	    json_string_value(json_object_get(
		json_object_get(json_array_get(json_object_get(root, "choices"), 0), "message"), "content")),
	    "x<|im_end|><s>y");
	json_decref(root);
	struct fake_engine_seen seen;
	fake_engine_look(&seen);
	unsigned ends = 0;
	for (uint32_t i = 0; i < seen.n_prompt; i++)
		ends += seen.prompt[i] == FAKE_END;
	cr_expect_eq(ends, 1, "%u end tokens in the prompt", ends);
	stop();
}

Test(http, begins_a_chat_with_exactly_one_bos_if_the_model_wants_one)
{
	struct model_generation g = fake_tokenizer.generation;
	g.add_bos = true;
	start_with((struct http_options){.generation = &g}, (struct fake_engine_controls){0});
	// The fake engine does not know a chat that begins with BOS, and says the prompt.
	json_decref(post("/v1/chat/completions",
			 "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"max_tokens\":1}", 200));
	struct fake_engine_seen seen;
	fake_engine_look(&seen);
	cr_expect_eq(seen.prompt[0], FAKE_BOS);
	cr_expect_eq(seen.prompt[1], FAKE_START);
	stop();
}

Test(http, tokenizes_and_detokenizes_in_both_forms)
{
	start((struct fake_engine_controls){.max_context = 4});
	json_t *root = post("/tokenize", "{\"prompt\":\"hello<|im_end|>\"}", 200);
	cr_expect_eq(json_integer_value(json_object_get(root, "count")), 6);
	cr_expect_eq(json_integer_value(json_object_get(root, "max_model_len")), 4);
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(root, "tokens"), 5)), FAKE_END);
	json_decref(root);
	root = post("/tokenize", "{\"content\":\"a<s>\",\"parse_special\":false}", 200);
	cr_expect_eq(json_array_size(json_object_get(root, "tokens")), 4);
	json_decref(root);
	root = post("/tokenize", "{\"content\":\"a\xc3\xa9\",\"with_pieces\":true}", 200);
	json_t *tokens = json_object_get(root, "tokens");
	cr_expect_str_eq(json_string_value(json_object_get(json_array_get(tokens, 0), "piece")), "a");
	cr_expect_eq(json_integer_value(json_array_get(json_object_get(json_array_get(tokens, 1), "piece"), 0)), 0xc3);
	json_decref(root);
	root = post("/tokenize",
		    "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"add_generation_prompt\":false}", 200);
	cr_expect_eq(json_integer_value(json_object_get(root, "count")), 9);
	json_decref(root);
	root = post("/detokenize", "{\"tokens\":[104,105,258,228,189]}", 200);
	cr_expect_str_eq(json_string_value(json_object_get(root, "prompt")), "hi<|im_end|>\xef\xbf\xbd");
	cr_expect_str_eq(json_string_value(json_object_get(root, "content")), "hi<|im_end|>\xef\xbf\xbd");
	json_decref(root);
	stop();
}

static double metric(const char *text, const char *name)
{
	char line[128];
	snprintf(line, sizeof line, "\nstagecoach_%s ", name);
	const char *p = strstr(text, line);
	cr_assert(p, "no metric %s", name);
	return atof(p + strlen(line));
}

Test(http, accounts_for_every_accepted_request)
{
	start((struct fake_engine_controls){0});
	json_decref(post("/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":3}", 200));
	json_decref(post("/v1/completions", "{\"prompt\":\"a<|im_end|>\"}", 200));
	json_decref(post("/v1/completions", "{\"prompt\":5}", 400));
	fake_engine_control(&(struct fake_engine_controls){.fail_after = 1});
	json_decref(post("/v1/completions", "{\"prompt\":\"abc\"}", 503));
	fake_engine_control(&(struct fake_engine_controls){.silent = true});
	int fds[2];
	for (int i = 0; i < 2; i++) {
		fds[i] = client_connect(address);
		client_send_post(fds[i], "/v1/completions", "{\"prompt\":\"abc\"}");
	}
	UNTIL(submitted, 5);
	close(fds[0]);
	UNTIL(cancelled, 1);
	char *text = client_exchange(address, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
	cr_expect_eq(metric(text, "requests_accepted_total"), 5);
	cr_expect_eq(metric(text, "request_success_total{finished_reason=\"stop\"}"), 1);
	cr_expect_eq(metric(text, "request_success_total{finished_reason=\"length\"}"), 1);
	cr_expect_eq(metric(text, "requests_cancelled_total"), 1);
	cr_expect_eq(metric(text, "requests_failed_total{reason=\"engine\"}"), 1);
	cr_expect_eq(metric(text, "requests_in_hand"), 1);
	cr_expect_eq(metric(text, "requests_refused_total{reason=\"invalid\"}"), 1);
	cr_expect_eq(metric(text, "time_to_first_token_seconds_count"), 3);
	cr_expect_eq(metric(text, "inter_token_latency_seconds_count"), 3);
	cr_expect_eq(metric(text, "kv_blocks_free"), 75);
	free(text);
	close(fds[1]);
	stop();
}

Test(http, tells_the_truth_about_health_and_readiness)
{
	start((struct fake_engine_controls){.not_ready = true});
	const char *ready = "GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
	const char *health = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
	char *a = client_exchange(address, ready), *b = client_exchange(address, health);
	cr_expect_eq(client_status(a), 503);
	cr_expect_eq(client_status(b), 200);
	free(a);
	free(b);
	fake_engine_control(&(struct fake_engine_controls){.not_healthy = true});
	a = client_exchange(address, ready), b = client_exchange(address, health);
	cr_expect_eq(client_status(a), 200);
	cr_expect_eq(client_status(b), 503);
	free(a);
	free(b);
	stop();
}

Test(http, refuses_a_port_in_use_and_names_it)
{
	start((struct fake_engine_controls){0});
	struct http_server *second;
	struct error e = {{0}};
	const char *port = strrchr(address, ':') + 1;
	struct http_options o = {
	    .engine = engine, .tokenizer = &fake_tokenizer, .served_model_name = "x", .port = (uint32_t)atoi(port)};
	cr_expect_eq(http_server_start(&second, &o, &e), STATUS_UNAVAILABLE);
	cr_expect(strstr(e.text, port), "%s", e.text);
	char *answer = client_exchange(address, "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
	cr_expect_eq(client_status(answer), 200, "the first is not disturbed");
	free(answer);
	o.port = 0;
	o.host = "0.0.0.0";
	cr_expect_eq(http_server_start(&second, &o, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "--api-key-file") && strstr(e.text, "--no-auth"), "%s", e.text);
	o.api_key_file = "/no/such/file";
	cr_expect_eq(http_server_start(&second, &o, &e), STATUS_USAGE);
	cr_expect(strstr(e.text, "/no/such/file"), "%s", e.text);
	stop();
}

Test(http, finishes_running_requests_when_it_drains)
{
	start((struct fake_engine_controls){.step_us = 10000});
	int fd = client_connect(address);
	client_send_post(fd, "/v1/completions", "{\"prompt\":\"abc\",\"max_tokens\":20,\"stream\":true}");
	char *head = client_read(fd, "data: ");
	http_server_stop(&server, true);
	char *rest = client_read(fd, NULL);
	cr_expect(strstr(rest, "data: [DONE]"), "%s", rest);
	free(head);
	free(rest);
	close(fd);
	engine_destroy(&engine);
}

Test(http, ends_running_requests_when_it_stops)
{
	start((struct fake_engine_controls){.silent = true});
	int fd = client_connect(address);
	client_send_post(fd, "/v1/completions", "{\"prompt\":\"abc\",\"stream\":true}");
	UNTIL(submitted, 1);
	http_server_stop(&server, false);
	char *all = client_read(fd, NULL);
	cr_expect(strstr(all, "data: {\"error\":") && !strstr(all, "[DONE]"), "%s", all);
	free(all);
	close(fd);
	engine_destroy(&engine);
}
