// What takes processor time before a request is the engine's: parsing, rendering the chat template, tokenizing. The
// surprising decision: it runs on a few threads of its own, so that a template that loops until its time limit, or a
// body of many megabytes, delays neither streams nor /health.
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "coordinator/chat_template.h"
#include "coordinator/http_internal.h"

void http_job_push(struct http_request *r)
{
	struct http_server *s = r->server;
	pthread_mutex_lock(&s->job_lock);
	r->next_job = NULL;
	if (s->last_job)
		s->last_job->next_job = r;
	else
		s->first_job = r;
	s->last_job = r;
	s->n_jobs++;
	pthread_cond_signal(&s->job_wake);
	pthread_mutex_unlock(&s->job_lock);
}

static uint64_t random_u64(void)
{
	uint64_t v;
	ASSERT(getrandom(&v, sizeof v, 0) == sizeof v);
	return v;
}

static enum status invalid_prompt(struct api_error *e, const char *param, const struct error *why)
{
	return api_error_invalid(e, param, "%s", why->text);
}

static enum status chat_ids(struct http_request *r, struct token_list *ids)
{
	struct http_server *s = r->server;
	if (!s->options.chat_template)
		return api_error_invalid(&r->error, "messages",
					 "this model has no chat template; use /v1/completions or start "
					 "the server with --chat-template");
	struct error why;
	struct chat_rendering rendering;
	if (chat_template_render(s->options.chat_template, r->api.messages_json, r->api.extra_json, &rendering, &why))
		return invalid_prompt(&r->error, "messages", &why);
	enum status status = tokenizer_encode_segments(s->options.tokenizer, rendering.segments, rendering.count,
						       r->api.flag.add_special_tokens, ids, &why);
	chat_rendering_free(&rendering);
	if (status != STATUS_OK)
		return invalid_prompt(&r->error, "messages", &why);
	// A template that leaves BOS out, of a model that wants one.
	const struct model_generation *g = &s->generation;
	if (g->add_bos && g->bos >= 0 && (!ids->count || ids->ids[0] != (uint32_t)g->bos)) {
		ids->ids = xrealloc(ids->ids, (ids->count + 1) * sizeof *ids->ids);
		memmove(ids->ids + 1, ids->ids, ids->count * sizeof *ids->ids);
		ids->ids[0] = (uint32_t)g->bos;
		ids->capacity = ++ids->count;
	}
	return STATUS_OK;
}

static enum status text_ids(struct http_request *r, struct api_prompt *p, struct token_list *ids)
{
	if (!p->text) {
		*ids = (struct token_list){p->ids, p->n_ids, p->n_ids};
		p->ids = NULL;
		p->n_ids = 0;
		return STATUS_OK;
	}
	struct error why;
	struct encode_options options = {
	    .add_special = r->api.flag.add_special_tokens,
	    .parse_special = r->api.flag.parse_special,
	};
	if (tokenizer_encode(r->server->options.tokenizer, p->text, p->len, &options, ids, &why) != STATUS_OK)
		return invalid_prompt(&r->error, "prompt", &why);
	return STATUS_OK;
}

static uint32_t context_in_force(struct http_server *s)
{
	struct engine_info *info = xcalloc(1, sizeof *info);
	engine_get_info(s->options.engine, info);
	uint32_t max_context = info->max_context;
	free(info);
	return max_context;
}

static enum status check_length(struct http_request *r, size_t n_prompt, uint32_t max_context)
{
	const char *param = r->api.endpoint == API_CHAT ? "messages" : "prompt";
	if (!n_prompt)
		return api_error_invalid(&r->error, param, "the prompt has no tokens");
	if (n_prompt < max_context)
		return STATUS_OK;
	api_error_invalid(
	    &r->error, param,
	    "This model's maximum context length is %u tokens, but the prompt alone has %zu tokens; at least "
	    "one more is needed for the answer.",
	    max_context, n_prompt);
	r->error.code = "context_length_exceeded";
	return STATUS_INVALID;
}

// All prompts of the request as ids. The caller owns *out.
static enum status make_prompts(struct http_request *r, uint32_t max_context, struct api_prompt_tokens **out,
				uint32_t *count)
{
	uint32_t n = r->api.endpoint == API_CHAT ? 1 : r->api.n_prompts;
	struct api_prompt_tokens *prompts = xcalloc(n, sizeof *prompts);
	enum status status = STATUS_OK;
	for (uint32_t i = 0; i < n && status == STATUS_OK; i++) {
		struct token_list ids = {0};
		status = r->api.endpoint == API_CHAT ? chat_ids(r, &ids) : text_ids(r, &r->api.prompts[i], &ids);
		prompts[i].ids = ids.ids;
		prompts[i].count = (uint32_t)ids.count;
		if (status == STATUS_OK)
			status = check_length(r, ids.count, max_context);
	}
	*out = prompts;
	*count = n;
	return status;
}

static void free_prompts(struct api_prompt_tokens *prompts, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		free(prompts[i].ids);
	free(prompts);
}

static void refuse_submission(struct http_request *r, enum status status, const struct error *why)
{
	if (status == STATUS_BUSY) {
		api_error_set(&r->error, 429, "queue_full", "%s", why->text);
	} else if (status == STATUS_INVALID) {
		api_error_set(&r->error, 400, "context_length_exceeded", "%s", why->text);
		strcpy(r->error.param, r->api.endpoint == API_CHAT ? "messages" : "prompt");
	} else {
		api_error_set(&r->error, 503, "unavailable", "%s", why->text);
	}
}

static enum status submit_one(struct http_request *r, uint32_t index, uint32_t max_context, const uint32_t *end_ids,
			      uint32_t n_end_ids)
{
	struct http_server *s = r->server;
	struct http_sub *sub = &r->subs[index];
	const struct api_prompt_tokens *prompt = &r->answer.prompts[index];
	const struct api_numbers *n = &r->api.number;
	uint32_t room = max_context - prompt->count;
	bool ban_ends = n->min_tokens > 0;
	struct scheduler_request request = {
	    .id = sub->engine_id,
	    .prompt = prompt->ids,
	    .n_prompt = prompt->count,
	    .n_choices = sub->n_choices,
	    .max_tokens = r->api.max_tokens && r->api.max_tokens < room ? r->api.max_tokens : room,
	    .end_ids = r->api.flag.ignore_eos ? r->api.stop_ids : end_ids,
	    .n_end_ids = r->api.flag.ignore_eos ? r->api.n_stop_ids : n_end_ids,
	    .cache_salt = r->api.cache_salt,
	    .sampling =
		{
		    .temperature = (float)n->temperature,
		    .top_p = (float)n->top_p,
		    .min_p = (float)n->min_p,
		    .repetition_penalty = (float)n->repetition_penalty,
		    .presence_penalty = (float)n->presence_penalty,
		    .frequency_penalty = (float)n->frequency_penalty,
		    .top_k = (int32_t)n->top_k,
		    .seed = r->api.has_seed ? (uint64_t)n->seed : random_u64(),
		    .n_logprobs = r->api.n_logprobs,
		    .min_tokens = (uint32_t)n->min_tokens,
		    .n_bias = r->api.n_bias,
		    .bias_ids = r->api.bias_ids,
		    .bias_values = r->api.bias_values,
		    .n_stop_ids = ban_ends ? n_end_ids : 0,
		    .stop_ids = ban_ends ? end_ids : NULL,
		},
	};
	struct error why = {{0}};
	http_request_ref(r); // the engine's, until the last choice has ended
	http_busy(s, 0, 1);
	enum status status = engine_submit(s->options.engine, &request, http_on_events, sub, &why);
	if (status == STATUS_OK) {
		sub->submitted = true;
		return STATUS_OK;
	}
	http_busy(s, 0, -1);
	http_request_unref(r);
	refuse_submission(r, status, &why);
	return status;
}

static void make_subs(struct http_request *r)
{
	uint32_t n = (uint32_t)r->api.number.n;
	r->n_subs = r->answer.n_prompts;
	r->subs = xcalloc(r->n_subs, sizeof *r->subs);
	for (uint32_t i = 0; i < r->n_subs; i++)
		r->subs[i] = (struct http_sub){
		    .request = r,
		    .engine_id = engine_new_id(r->server->options.engine),
		    .first_choice = i * n,
		    .n_choices = n,
		};
	r->n_unfinished = r->answer.n_choices;
	r->touched = xcalloc(r->answer.n_choices, sizeof *r->touched);
	r->is_touched = xcalloc(r->answer.n_choices, sizeof *r->is_touched);
	r->last_token_us = xcalloc(r->answer.n_choices, sizeof *r->last_token_us);
}

// The model's end tokens, then the request's own.
static uint32_t *make_end_ids(const struct http_request *r, uint32_t *count)
{
	const struct model_generation *g = &r->server->generation;
	uint32_t *ids = xcalloc((size_t)g->n_eos + r->api.n_stop_ids, sizeof *ids);
	for (int32_t i = 0; i < g->n_eos; i++)
		ids[i] = (uint32_t)g->eos[i];
	if (r->api.n_stop_ids)
		memcpy(ids + g->n_eos, r->api.stop_ids, r->api.n_stop_ids * sizeof *ids);
	*count = (uint32_t)g->n_eos + r->api.n_stop_ids;
	return ids;
}

// Returns true if the request is no longer this thread's.
static bool submit_all(struct http_request *r, uint32_t max_context)
{
	struct http_server *s = r->server;
	uint32_t n_end_ids;
	uint32_t *end_ids = make_end_ids(r, &n_end_ids);
	uint32_t i = 0;
	bool stream = r->api.flag.stream; // r may be gone after the last submission is answered
	while (i < r->n_subs && submit_one(r, i, max_context, end_ids, n_end_ids) == STATUS_OK)
		i++;
	free(end_ids);
	if (i < r->n_subs) {
		if (i == 0)
			return false;
		metrics_refused(s->metrics, r->error.http_status == 429 ? REFUSED_QUEUE_FULL : REFUSED_UNAVAILABLE);
		http_answer_error(r);
		http_request_ref(r);
		http_note_post(s, &(struct http_note){.kind = NOTE_ABORT, .request = r});
		return true;
	}
	metrics_accepted(s->metrics);
	if (stream) {
		r->answer_kind = ANSWER_STREAM;
		http_hand_back(r);
	} else {
		http_request_ref(r);
		http_note_post(s, &(struct http_note){.kind = NOTE_READY, .request = r});
	}
	return true;
}

// Completions and chat. Returns true if the request is no longer this thread's; else r->error is set.
static bool generate(struct http_request *r)
{
	struct http_server *s = r->server;
	if (atomic_load(&s->draining)) {
		api_error_set(&r->error, 503, "draining", "the server is ending");
		return false;
	}
	uint32_t max_context = context_in_force(s);
	if (!max_context) {
		api_error_set(&r->error, 503, "unavailable", "the model is not loaded yet");
		return false;
	}
	struct api_prompt_tokens *prompts;
	uint32_t n_prompts;
	if (make_prompts(r, max_context, &prompts, &n_prompts) != STATUS_OK) {
		free_prompts(prompts, n_prompts);
		return false;
	}
	r->fd = dup(MHD_get_connection_info(r->connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
	if (r->fd < 0) {
		free_prompts(prompts, n_prompts);
		api_error_set(&r->error, 503, "overloaded", "too many connections");
		return false;
	}
	char id[48], hex[33];
	http_random_hex(hex, 32);
	snprintf(id, sizeof id, "%s-%s", r->api.endpoint == API_CHAT ? "chatcmpl" : "cmpl", hex);
	api_answer_init(&r->answer, &r->api, s->options.tokenizer, s->options.served_model_name, id,
			(int64_t)time(NULL), prompts, n_prompts);
	make_subs(r);
	return submit_all(r, max_context);
}

static enum status answer_tokenize(struct http_request *r)
{
	struct token_list ids = {0};
	enum status status = r->api.messages_json ? chat_ids(r, &ids) : text_ids(r, &r->api.prompts[0], &ids);
	if (status != STATUS_OK) {
		free(ids.ids);
		return status;
	}
	struct json_buf *out = &r->answer_body;
	struct json_buf pieces = {0};
	bool as_objects = r->api.flag.with_pieces && !json_object_get(r->api.root, "return_token_strs");
	json_addf(out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", ids.count, context_in_force(r->server));
	for (size_t i = 0; i < ids.count; i++) {
		if (i)
			json_add(out, ",", 1);
		size_t len = 0;
		const char *bytes = r->api.flag.with_pieces
					? tokenizer_token_bytes(r->server->options.tokenizer, ids.ids[i], false, &len)
					: NULL;
		if (as_objects) { // llama.cpp: bytes that are no text come as numbers
			json_addf(out, "{\"id\":%u,\"piece\":", ids.ids[i]);
			if (utf8_valid(bytes, len)) {
				json_add_string(out, bytes, len);
			} else {
				for (size_t b = 0; b < len; b++)
					json_addf(out, "%c%u", b ? ',' : '[', (unsigned char)bytes[b]);
				json_adds(out, "]");
			}
			json_adds(out, "}");
		} else {
			json_add_u64(out, ids.ids[i]);
			if (bytes) {
				json_add(&pieces, ",", i ? 1 : 0);
				json_add_string(&pieces, bytes, len);
			}
		}
	}
	json_adds(out, "]");
	if (r->api.flag.with_pieces && !as_objects) {
		json_adds(out, ",\"token_strs\":[");
		json_add(out, pieces.data, pieces.len);
		json_adds(out, "]");
	}
	json_adds(out, "}");
	json_buf_free(&pieces);
	free(ids.ids);
	return STATUS_OK;
}

static enum status answer_detokenize(struct http_request *r)
{
	struct detokenizer d;
	struct json_buf text = {0};
	detokenizer_init(&d, r->server->options.tokenizer, false);
	for (size_t i = 0; i < r->api.prompts[0].n_ids; i++)
		detokenizer_push(&d, r->api.prompts[0].ids[i], &text.data, &text.len, &text.capacity);
	detokenizer_finish(&d, &text.data, &text.len, &text.capacity);
	json_adds(&r->answer_body, "{\"prompt\":");
	json_add_string(&r->answer_body, text.data, text.len);
	json_adds(&r->answer_body, ",\"content\":");
	json_add_string(&r->answer_body, text.data, text.len);
	json_adds(&r->answer_body, "}");
	json_buf_free(&text);
	return STATUS_OK;
}

static void run_job(struct http_request *r)
{
	static const enum api_endpoint endpoints[] = {
	    [ROUTE_CHAT] = API_CHAT,
	    [ROUTE_COMPLETIONS] = API_COMPLETIONS,
	    [ROUTE_TOKENIZE] = API_TOKENIZE,
	    [ROUTE_DETOKENIZE] = API_DETOKENIZE,
	};
	struct http_server *s = r->server;
	enum api_endpoint endpoint = endpoints[r->route];
	struct api_limits limits = {
	    .vocab_size = tokenizer_vocab_size(s->options.tokenizer),
	    .generation = &s->generation,
	};
	enum status status = api_request_parse(&r->api, endpoint, r->body.data, r->body.len, &limits, &r->error);
	atomic_fetch_sub(&s->body_bytes, r->body.capacity);
	json_buf_free(&r->body);
	bool generates = endpoint == API_CHAT || endpoint == API_COMPLETIONS;
	if (status == STATUS_OK && generates) {
		if (generate(r))
			return;
		status = STATUS_INVALID;
	} else if (status == STATUS_OK) {
		status = endpoint == API_TOKENIZE ? answer_tokenize(r) : answer_detokenize(r);
	}
	r->answer_kind = ANSWER_WHOLE;
	r->http_status = 200;
	if (status != STATUS_OK) {
		if (generates)
			metrics_refused(s->metrics, r->error.http_status == 429	  ? REFUSED_QUEUE_FULL
						    : r->error.http_status == 503 ? REFUSED_UNAVAILABLE
						    : r->error.code		  ? REFUSED_CONTEXT_LENGTH
										  : REFUSED_INVALID);
		http_answer_error(r);
	}
	if (r->fd >= 0)
		close(r->fd);
	r->fd = -1;
	http_hand_back(r);
	http_busy(s, -1, 0);
}

// Takes the first job that may run now, NULL if there is none. Chats share one template helper: they leave one thread to
// the others, which so never wait for a template that takes its time. The caller holds job_lock.
static struct http_request *take_job(struct http_server *s)
{
	struct http_request *before = NULL, *r = s->first_job;
	while (r && r->route == ROUTE_CHAT && s->n_chat_jobs_running >= HTTP_API_THREADS - 1) {
		before = r;
		r = r->next_job;
	}
	if (!r)
		return NULL;
	if (before)
		before->next_job = r->next_job;
	else
		s->first_job = r->next_job;
	if (s->last_job == r)
		s->last_job = before;
	s->n_jobs--;
	return r;
}

void *http_api_thread(void *server)
{
	struct http_server *s = server;
	pthread_mutex_lock(&s->job_lock);
	for (;;) {
		struct http_request *r = take_job(s);
		if (!r && s->jobs_stop && !s->first_job)
			break;
		if (!r) {
			pthread_cond_wait(&s->job_wake, &s->job_lock);
			continue;
		}
		bool is_chat = r->route == ROUTE_CHAT; // r is another thread's after it has run
		s->n_chat_jobs_running += is_chat;
		pthread_mutex_unlock(&s->job_lock);
		run_job(r);
		pthread_mutex_lock(&s->job_lock);
		s->n_chat_jobs_running -= is_chat;
	}
	pthread_cond_broadcast(&s->job_wake); // one that left the last chats to others ends too
	pthread_mutex_unlock(&s->job_lock);
	return NULL;
}
