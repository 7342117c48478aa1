// From tokens to the JSON of an answer. See api_answer.h.
#include "coordinator/api_answer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_chat(const struct api_answer *a)
{
	return a->request->endpoint == API_CHAT;
}

static bool wants_token_ids(const struct api_answer *a)
{
	return a->request->flag.return_token_ids || a->request->flag.tokens_as_ids;
}

void api_answer_init(struct api_answer *a, const struct api_request *r, const struct tokenizer *tokenizer,
		     const char *model, const char *id, int64_t created, struct api_prompt_tokens *prompts,
		     uint32_t n_prompts)
{
	*a = (struct api_answer){
	    .request = r,
	    .tokenizer = tokenizer,
	    .model = xstrdup(model),
	    .created = created,
	    .prompts = prompts,
	    .n_prompts = n_prompts,
	    .n_choices = n_prompts * (uint32_t)r->number.n,
	};
	snprintf(a->id, sizeof a->id, "%s", id);
	a->choices = xcalloc(a->n_choices, sizeof *a->choices);
	for (uint32_t i = 0; i < a->n_choices; i++) {
		struct api_choice *c = &a->choices[i];
		c->index = i;
		c->stop_string = -1;
		c->stop_token = -1;
		detokenizer_init(&c->detokenizer, tokenizer, r->flag.skip_special_tokens);
		stop_matcher_init(&c->matcher, r->stop);
	}
	json_addf(&a->prefix, "data: {\"id\":\"%s\",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", a->id,
		  is_chat(a) ? "chat.completion.chunk" : "text_completion", created);
	json_add_string(&a->prefix, model, strlen(model));
	json_adds(&a->prefix, ",\"choices\":[");
}

void api_answer_free(struct api_answer *a)
{
	for (uint32_t i = 0; i < a->n_choices; i++) {
		struct api_choice *c = &a->choices[i];
		stop_matcher_free(&c->matcher);
		json_buf_free(&c->decoded);
		json_buf_free(&c->text);
		json_buf_free(&c->token_ids);
		json_buf_free(&c->lp_content);
		json_buf_free(&c->lp_values);
		json_buf_free(&c->lp_top);
		json_buf_free(&c->lp_offset);
	}
	free(a->choices);
	for (uint32_t i = 0; i < a->n_prompts; i++)
		free(a->prompts[i].ids);
	free(a->prompts);
	free(a->model);
	json_buf_free(&a->prefix);
	*a = (struct api_answer){0};
}

static void add_comma(struct json_buf *b)
{
	if (b->len)
		json_add(b, ",", 1);
}

// A token as the key of a log-probability. Completions have nothing but the key, so bytes that are no character are
// written as OpenAI does, "bytes:\xf0\x9f"; chat has a list of bytes beside it.
static void add_token_name(const struct api_answer *a, struct json_buf *b, uint32_t id)
{
	if (a->request->flag.tokens_as_ids) {
		json_addf(b, "\"token_id:%u\"", id);
		return;
	}
	size_t len;
	const char *bytes = tokenizer_token_bytes(a->tokenizer, id, false, &len);
	if (is_chat(a) || utf8_valid(bytes, len)) {
		json_add_string(b, bytes, len);
		return;
	}
	json_adds(b, "\"bytes:");
	for (size_t i = 0; i < len; i++)
		json_addf(b, "\\\\x%02x", (unsigned char)bytes[i]);
	json_adds(b, "\"");
}

static void add_chat_token(const struct api_answer *a, struct json_buf *b, uint32_t id, float logprob)
{
	size_t len;
	const char *bytes = tokenizer_token_bytes(a->tokenizer, id, false, &len);
	json_adds(b, "{\"token\":");
	add_token_name(a, b, id);
	json_adds(b, ",\"logprob\":");
	json_add_float(b, logprob);
	json_adds(b, ",\"bytes\":[");
	for (size_t i = 0; i < len; i++) {
		if (i)
			json_add(b, ",", 1);
		json_add_u64(b, (unsigned char)bytes[i]);
	}
	json_adds(b, "]");
}

static void push_chat_logprob(struct api_answer *a, struct api_choice *c, const struct scheduler_event *ev)
{
	struct json_buf *b = &c->lp_content;
	add_comma(b);
	add_chat_token(a, b, ev->token, ev->logprob);
	json_adds(b, ",\"top_logprobs\":[");
	for (uint32_t i = 0; i < ev->n_top && (int32_t)i < a->request->n_logprobs; i++) {
		if (i)
			json_add(b, ",", 1);
		add_chat_token(a, b, ev->top_ids[i], ev->top_logprobs[i]);
		json_add(b, "}", 1);
	}
	json_adds(b, "]}");
}

static uint32_t count_characters(const char *bytes, size_t len)
{
	uint32_t count = 0;
	for (size_t i = 0; i < len; count++) {
		size_t bad = 0, n = utf8_char_len(bytes + i, len - i, &bad);
		i += n ? n : bad;
	}
	return count;
}

// As vLLM: the token itself first, then the best ones that are not it.
static void push_completion_logprob(struct api_answer *a, struct api_choice *c, const struct scheduler_event *ev)
{
	add_comma(&c->lp_content);
	add_token_name(a, &c->lp_content, ev->token);
	add_comma(&c->lp_values);
	json_add_float(&c->lp_values, ev->logprob);
	add_comma(&c->lp_offset);
	json_add_u64(&c->lp_offset, c->text_offset);
	add_comma(&c->lp_top);
	json_adds(&c->lp_top, "{");
	add_token_name(a, &c->lp_top, ev->token);
	json_adds(&c->lp_top, ":");
	json_add_float(&c->lp_top, ev->logprob);
	for (uint32_t i = 0; i < ev->n_top && (int32_t)i < a->request->n_logprobs; i++) {
		if (ev->top_ids[i] == ev->token)
			continue;
		json_adds(&c->lp_top, ",");
		add_token_name(a, &c->lp_top, ev->top_ids[i]);
		json_adds(&c->lp_top, ":");
		json_add_float(&c->lp_top, ev->top_logprobs[i]);
	}
	json_adds(&c->lp_top, "}");
	size_t len;
	const char *bytes = tokenizer_token_bytes(a->tokenizer, ev->token, false, &len);
	c->text_offset += count_characters(bytes, len);
}

static void finish_text(struct api_choice *c)
{
	stop_matcher_finish(&c->matcher, &c->text);
}

// Sends what was decoded through the stop matcher. Returns true if a stop string was found.
static bool match_decoded(struct api_answer *a, struct api_choice *c)
{
	int64_t min_tokens = a->request->number.min_tokens;
	if (c->n_tokens <= min_tokens && min_tokens > 0) { // stop strings do not count yet, as in vLLM
		json_add(&c->text, c->decoded.data, c->decoded.len);
		return false;
	}
	c->stop_string =
	    stop_matcher_push(&c->matcher, c->decoded.data, c->decoded.len, a->request->flag.include_stop, &c->text);
	return c->stop_string >= 0;
}

bool api_answer_push(struct api_answer *a, uint32_t choice, const struct scheduler_event *ev, bool is_end)
{
	struct api_choice *c = &a->choices[choice];
	ASSERT(c->finish == FINISH_NONE);
	c->decoded.len = 0;
	if (ev->has_token) {
		c->n_tokens++;
		if (wants_token_ids(a)) {
			add_comma(&c->token_ids);
			json_add_u64(&c->token_ids, ev->token);
		}
		if (a->request->n_logprobs >= 0) {
			if (is_chat(a))
				push_chat_logprob(a, c, ev);
			else
				push_completion_logprob(a, c, ev);
		}
		if (!is_end || a->request->flag.include_stop)
			detokenizer_push(&c->detokenizer, ev->token, &c->decoded.data, &c->decoded.len,
					 &c->decoded.capacity);
	}
	if (ev->finish != FINISH_NONE)
		detokenizer_finish(&c->detokenizer, &c->decoded.data, &c->decoded.len, &c->decoded.capacity);
	if (c->decoded.len && match_decoded(a, c)) {
		c->finish = FINISH_STOP;
		return ev->finish == FINISH_NONE;
	}
	if (ev->finish == FINISH_NONE)
		return false;
	finish_text(c);
	c->finish = ev->finish;
	if (is_end)
		for (uint32_t i = 0; i < a->request->n_stop_ids; i++)
			if (a->request->stop_ids[i] == ev->token)
				c->stop_token = ev->token;
	return false;
}

static void add_logprobs(const struct api_answer *a, const struct api_choice *c, struct json_buf *out)
{
	if (a->request->n_logprobs < 0 || !c->lp_content.len) {
		json_adds(out, "null");
		return;
	}
	if (is_chat(a)) {
		json_adds(out, "{\"content\":[");
		json_add(out, c->lp_content.data, c->lp_content.len);
		json_adds(out, "]}");
		return;
	}
	json_adds(out, "{\"text_offset\":[");
	json_add(out, c->lp_offset.data, c->lp_offset.len);
	json_adds(out, "],\"token_logprobs\":[");
	json_add(out, c->lp_values.data, c->lp_values.len);
	json_adds(out, "],\"tokens\":[");
	json_add(out, c->lp_content.data, c->lp_content.len);
	json_adds(out, "],\"top_logprobs\":[");
	json_add(out, c->lp_top.data, c->lp_top.len);
	json_adds(out, "]}");
}

// finish_reason, stop_reason and token ids: what all forms of a choice end with.
static void add_finish(const struct api_answer *a, const struct api_choice *c, struct json_buf *out)
{
	if (c->finish == FINISH_NONE)
		json_adds(out, ",\"finish_reason\":null");
	else
		json_addf(out,
			  ",\"finish_reason\":\"%s\",\"stop_reason\":", c->finish == FINISH_LENGTH ? "length" : "stop");
	if (c->finish != FINISH_NONE) {
		const struct api_request *r = a->request;
		if (c->stop_string >= 0)
			json_add_string(out, r->stop_strings[c->stop_string], strlen(r->stop_strings[c->stop_string]));
		else if (c->stop_token >= 0)
			json_add_u64(out, (uint64_t)c->stop_token);
		else
			json_adds(out, "null");
	}
	if (wants_token_ids(a)) {
		json_adds(out, ",\"token_ids\":[");
		json_add(out, c->token_ids.data, c->token_ids.len);
		json_adds(out, "]");
	}
}

static void add_prompt_ids(const struct api_answer *a, uint32_t prompt, struct json_buf *out)
{
	json_adds(out, ",\"prompt_token_ids\":[");
	for (uint32_t i = 0; i < a->prompts[prompt].count; i++) {
		if (i)
			json_add(out, ",", 1);
		json_add_u64(out, a->prompts[prompt].ids[i]);
	}
	json_adds(out, "]");
}

// Prompt ids stand in the first choice of their prompt.
static void add_prompt_ids_of_choice(const struct api_answer *a, const struct api_choice *c, struct json_buf *out)
{
	uint32_t n = (uint32_t)a->request->number.n;
	if (wants_token_ids(a) && c->index % n == 0)
		add_prompt_ids(a, c->index / n, out);
}

void api_answer_first_chunks(struct api_answer *a, struct json_buf *out)
{
	a->started = true;
	if (!is_chat(a))
		return;
	for (uint32_t i = 0; i < a->n_choices; i++) {
		struct api_choice *c = &a->choices[i];
		json_add(out, a->prefix.data, a->prefix.len);
		json_addf(out,
			  "{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
			  "\"finish_reason\":null",
			  i);
		add_prompt_ids_of_choice(a, c, out);
		json_adds(out, "}]");
		if (wants_token_ids(a) && i == 0)
			add_prompt_ids(a, 0, out);
		json_adds(out, "}\n\n");
		c->role_sent = true;
	}
}

void api_answer_chunk(struct api_answer *a, uint32_t choice, struct json_buf *out)
{
	struct api_choice *c = &a->choices[choice];
	bool finishes = c->finish != FINISH_NONE && !c->finish_sent;
	if (!c->text.len && !c->token_ids.len && !c->lp_content.len && !finishes)
		return;
	json_reserve(out, a->prefix.len + c->text.len + 160);
	json_add(out, a->prefix.data, a->prefix.len);
	json_adds(out, "{\"index\":");
	json_add_u64(out, c->index);
	if (is_chat(a)) {
		if (c->text.len) {
			json_adds(out, ",\"delta\":{\"content\":\"");
			json_add_escaped(out, c->text.data, c->text.len);
			json_adds(out, "\"},\"logprobs\":");
		} else {
			json_adds(out, ",\"delta\":{},\"logprobs\":");
		}
	} else {
		json_adds(out, ",\"text\":\"");
		json_add_escaped(out, c->text.data, c->text.len);
		json_adds(out, "\",\"logprobs\":");
	}
	add_logprobs(a, c, out);
	add_finish(a, c, out);
	if (!is_chat(a) && !c->role_sent)
		add_prompt_ids_of_choice(a, c, out);
	json_adds(out, "}]}\n\n");
	c->role_sent = true;
	c->finish_sent = finishes || c->finish_sent;
	c->text.len = c->token_ids.len = c->lp_content.len = c->lp_values.len = c->lp_top.len = c->lp_offset.len = 0;
}

static void add_usage(const struct api_answer *a, struct json_buf *out)
{
	uint64_t prompt = 0, cached = 0, completion = 0;
	for (uint32_t i = 0; i < a->n_prompts; i++) {
		prompt += a->prompts[i].count;
		cached += a->prompts[i].n_cached;
	}
	for (uint32_t i = 0; i < a->n_choices; i++)
		completion += a->choices[i].n_tokens;
	json_addf(out,
		  "\"usage\":{\"prompt_tokens\":%" PRIu64 ",\"completion_tokens\":%" PRIu64 ",\"total_tokens\":%" PRIu64
		  ",\"prompt_tokens_details\":{\"cached_tokens\":%" PRIu64 "}}",
		  prompt, completion, prompt + completion, cached);
}

void api_answer_end_chunks(struct api_answer *a, struct json_buf *out)
{
	if (a->request->flag.include_usage) {
		json_add(out, a->prefix.data, a->prefix.len);
		json_adds(out, "],");
		add_usage(a, out);
		json_adds(out, "}\n\n");
	}
	json_adds(out, "data: [DONE]\n\n");
}

void api_answer_whole(struct api_answer *a, struct json_buf *out)
{
	json_addf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", a->id,
		  is_chat(a) ? "chat.completion" : "text_completion", a->created);
	json_add_string(out, a->model, strlen(a->model));
	json_adds(out, ",\"choices\":[");
	for (uint32_t i = 0; i < a->n_choices; i++) {
		struct api_choice *c = &a->choices[i];
		json_addf(out, "%s{\"index\":%u,%s", i ? "," : "", i,
			  is_chat(a) ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
		json_add_string(out, c->text.data, c->text.len);
		json_addf(out, "%s,\"logprobs\":", is_chat(a) ? "}" : "");
		add_logprobs(a, c, out);
		add_finish(a, c, out);
		add_prompt_ids_of_choice(a, c, out);
		json_adds(out, "}");
	}
	json_adds(out, "],");
	add_usage(a, out);
	if (is_chat(a) && wants_token_ids(a))
		add_prompt_ids(a, 0, out);
	json_adds(out, "}");
}
