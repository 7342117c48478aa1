#include <criterion/criterion.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/api_answer.h"

#include "fake_tokenizer.c"

static struct model_generation generation = {.temperature = 1, .top_p = 1, .min_p = -1, .repetition_penalty = 1};

struct fixture {
	struct api_request request;
	struct api_answer answer;
};

static void begin(struct fixture *f, enum api_endpoint endpoint, const char *body)
{
	struct api_error e = {0};
	struct api_limits limits = {.vocab_size = FAKE_VOCABULARY, .generation = &generation};
	cr_assert_eq(api_request_parse(&f->request, endpoint, body, strlen(body), &limits, &e), STATUS_OK, "%s",
		     e.message);
	struct api_prompt_tokens *prompt = calloc(1, sizeof *prompt);
	prompt->ids = calloc(1, sizeof *prompt->ids);
	prompt->count = 1;
	api_answer_init(&f->answer, &f->request, &fake_tokenizer, "m", "cmpl-1", 5, prompt, 1);
}

static void end(struct fixture *f)
{
	api_answer_free(&f->answer);
	api_request_free(&f->request);
}

static bool push(struct fixture *f, uint32_t token, enum finish_reason finish)
{
	struct scheduler_event ev = {.has_token = true, .token = token, .finish = finish};
	return api_answer_push(&f->answer, 0, &ev, finish == FINISH_STOP);
}

static uint32_t fake_word(const char *word)
{
	uint32_t id = 256;
	while (strcmp(fake_words[id - 256], word) != 0)
		id++;
	return id;
}

static void expect_text(struct fixture *f, const char *text, const char *finish)
{
	struct json_buf out = {0};
	api_answer_whole(&f->answer, &out);
	json_t *root = json_loadb(out.data, out.len, JSON_REJECT_DUPLICATES, NULL);
	cr_assert(root, "not JSON: %.*s", (int)out.len, out.data);
	json_t *choice = json_array_get(json_object_get(root, "choices"), 0);
	cr_expect_str_eq(json_string_value(json_object_get(choice, "text")), text, "'%s', expected '%s'",
			 json_string_value(json_object_get(choice, "text")), text);
	cr_expect_str_eq(json_string_value(json_object_get(choice, "finish_reason")), finish);
	json_decref(root);
	json_buf_free(&out);
}

// The text of the next chunk; "" if there is none.
static const char *next_chunk(struct fixture *f, struct json_buf *out)
{
	out->len = 0;
	api_answer_chunk(&f->answer, 0, out);
	json_add(out, "", 1);
	if (!out->data[0])
		return "";
	char *text = strstr(out->data, "\"text\":\"") + 8;
	*strstr(text, "\",\"logprobs\"") = 0;
	return text;
}

#define PROMPT(fields) "{\"prompt\":\"x\"" fields "}"

Test(api_answer, never_gives_out_part_of_a_character)
{
	struct fixture f;
	struct json_buf out = {0};
	begin(&f, API_COMPLETIONS, PROMPT());
	push(&f, fake_word("\xf0\x9f\x98"), FINISH_NONE); // f0 9f 98
	cr_expect_str_eq(next_chunk(&f, &out), "");
	push(&f, fake_word("\x80!"), FINISH_NONE); // 80 !
	cr_expect_str_eq(next_chunk(&f, &out), "\xf0\x9f\x98\x80!");
	push(&f, 0xe4, FINISH_LENGTH); // the answer ends inside a character
	cr_expect_str_eq(next_chunk(&f, &out), "\xef\xbf\xbd");
	end(&f);
	json_buf_free(&out);
}

Test(api_answer, holds_back_what_may_become_a_stop_string)
{
	struct fixture f;
	struct json_buf out = {0};
	begin(&f, API_COMPLETIONS, PROMPT(",\"stop\":\"o wor\""));
	cr_expect_not(push(&f, fake_word("hello"), FINISH_NONE));
	cr_expect_str_eq(next_chunk(&f, &out), "hell");
	cr_expect(push(&f, fake_word(" world"), FINISH_NONE), "the engine has to be told");
	cr_expect_str_eq(next_chunk(&f, &out), "");
	expect_text(&f, "", "stop");
	end(&f);
	json_buf_free(&out);
}

Test(api_answer, does_not_look_for_stop_strings_below_min_tokens)
{
	struct fixture f;
	begin(&f, API_COMPLETIONS, PROMPT(",\"stop\":\"a\",\"min_tokens\":2"));
	cr_expect_not(push(&f, 'a', FINISH_NONE));
	cr_expect_not(push(&f, 'a', FINISH_NONE));
	cr_expect_not(push(&f, 'b', FINISH_NONE));
	cr_expect(push(&f, 'a', FINISH_NONE));
	expect_text(&f, "aab", "stop");
	end(&f);
}

Test(api_answer, keeps_stop_strings_and_end_tokens_if_asked_to)
{
	struct fixture f;
	begin(&f, API_COMPLETIONS, PROMPT(",\"stop\":\"bc\",\"include_stop_str_in_output\":true"));
	push(&f, 'a', FINISH_NONE);
	push(&f, 'b', FINISH_NONE);
	cr_expect(push(&f, 'c', FINISH_NONE));
	expect_text(&f, "abc", "stop");
	end(&f);
	begin(&f, API_COMPLETIONS, PROMPT(",\"stop_token_ids\":[98],\"include_stop_str_in_output\":true"));
	push(&f, 'a', FINISH_NONE);
	push(&f, 'b', FINISH_STOP);
	expect_text(&f, "ab", "stop");
	end(&f);
	begin(&f, API_COMPLETIONS, PROMPT(",\"stop_token_ids\":[98]"));
	push(&f, 'a', FINISH_NONE);
	push(&f, 'b', FINISH_STOP);
	expect_text(&f, "a", "stop");
	cr_expect_eq(f.answer.choices[0].stop_token, 98);
	cr_expect_eq(f.answer.choices[0].n_tokens, 2, "an end token counts");
	end(&f);
}

Test(api_answer, shows_control_tokens_only_if_asked_to)
{
	struct fixture f;
	begin(&f, API_COMPLETIONS, PROMPT(",\"ignore_eos\":true"));
	push(&f, 'a', FINISH_NONE);
	push(&f, FAKE_END, FINISH_NONE);
	push(&f, 'b', FINISH_LENGTH);
	expect_text(&f, "ab", "length");
	end(&f);
	begin(&f, API_COMPLETIONS, PROMPT(",\"ignore_eos\":true,\"skip_special_tokens\":false"));
	push(&f, FAKE_END, FINISH_NONE);
	push(&f, 'b', FINISH_LENGTH);
	expect_text(&f, "<|im_end|>b", "length");
	end(&f);
}

Test(api_answer, finishes_once_and_says_nothing_afterwards)
{
	struct fixture f;
	struct json_buf out = {0};
	begin(&f, API_COMPLETIONS, PROMPT());
	push(&f, 'a', FINISH_LENGTH);
	cr_expect_str_eq(next_chunk(&f, &out), "a");
	out.len = 0;
	api_answer_chunk(&f.answer, 0, &out);
	cr_expect_eq(out.len, 0);
	end(&f);
	json_buf_free(&out);
}

Test(api_answer, writes_keys_of_tokens_that_are_no_text_as_bytes)
{
	struct fixture f;
	struct json_buf out = {0};
	begin(&f, API_COMPLETIONS, PROMPT(",\"logprobs\":1"));
	struct scheduler_event ev = {.has_token = true,
				     .token = fake_word("\xf0\x9f\x98"),
				     .logprob = -0.1f,
				     .n_top = 1,
				     .top_ids = {0xe4},
				     .top_logprobs = {-2.5f},
				     .finish = FINISH_LENGTH};
	api_answer_push(&f.answer, 0, &ev, false);
	api_answer_whole(&f.answer, &out);
	json_add(&out, "", 1);
	cr_expect(strstr(out.data, "\"tokens\":[\"bytes:\\\\xf0\\\\x9f\\\\x98\"]"), "%s", out.data);
	cr_expect(strstr(out.data,
			 "\"top_logprobs\":[{\"bytes:\\\\xf0\\\\x9f\\\\x98\":-0.100000001,\"bytes:\\\\xe4\":-2.5}]"),
		  "%s", out.data);
	end(&f);
	json_buf_free(&out);
}
