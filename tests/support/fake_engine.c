// See fake_engine.h. Included by tests in place of the real engine.
#include "fake_engine.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FAKE_MAX_CHOICES = 128 };

struct fake_request {
	struct fake_request *next;
	uint64_t id;
	uint32_t *script, n_script, n_choices, max_tokens, n_prompt;
	uint32_t *end_ids, n_end_ids;
	int32_t n_logprobs;
	uint32_t sent;
	bool ended[FAKE_MAX_CHOICES], stop[FAKE_MAX_CHOICES], cancelled;
	engine_events_fn on_events;
	void *user;
};

struct engine {
	pthread_mutex_t lock;
	pthread_cond_t wake;
	pthread_t thread;
	bool end, woken;
	uint64_t last_id;
	struct fake_request *list;
	struct fake_engine_controls control;
	struct fake_engine_seen seen;
};

static struct engine fake_engine;

// Under the lock. The engine's thread may be outside it, in a callback, and must not sleep afterwards.
static void wake(struct engine *e)
{
	e->woken = true;
	pthread_cond_broadcast(&e->wake);
}

void fake_engine_control(const struct fake_engine_controls *c)
{
	pthread_mutex_lock(&fake_engine.lock);
	fake_engine.control = *c;
	wake(&fake_engine);
	pthread_mutex_unlock(&fake_engine.lock);
}

void fake_engine_look(struct fake_engine_seen *out)
{
	pthread_mutex_lock(&fake_engine.lock);
	*out = fake_engine.seen;
	pthread_mutex_unlock(&fake_engine.lock);
}

static uint32_t script_token(const struct fake_request *r, uint32_t choice)
{
	uint32_t t = r->script[r->sent % r->n_script];
	return t >= 'a' && t <= 'z' ? 'a' + (t - 'a' + choice) % 26 : t;
}

static bool is_end_id(const struct fake_request *r, uint32_t id)
{
	for (uint32_t i = 0; i < r->n_end_ids; i++)
		if (r->end_ids[i] == id)
			return true;
	return false;
}

// Fills the events of one step of r; returns their number. *over: nothing more will come.
static uint32_t step_request(struct engine *e, struct fake_request *r, struct scheduler_event *events, bool *over)
{
	uint32_t n = 0;
	bool fail = e->control.fail_after && r->sent >= e->control.fail_after;
	*over = true;
	for (uint32_t c = 0; c < r->n_choices; c++) {
		if (r->ended[c])
			continue;
		struct scheduler_event *ev = &events[n];
		*ev = (struct scheduler_event){.request_id = r->id, .choice = c, .n_cached = r->n_prompt / 2};
		if (r->cancelled || r->stop[c] || fail) {
			ev->finish = r->cancelled ? FINISH_CANCELLED : fail ? FINISH_FAILED : FINISH_STOP;
		} else if (e->control.silent) {
			*over = false;
			continue;
		} else {
			ev->has_token = true;
			ev->token = script_token(r, c);
			ev->logprob = -(float)(ev->token + 1) / 8;
			for (int32_t i = 0; i < r->n_logprobs; i++) {
				ev->top_ids[i] = (ev->token + (uint32_t)i) % 256;
				ev->top_logprobs[i] = ev->logprob - (float)i;
				ev->n_top++;
			}
			if (is_end_id(r, ev->token))
				ev->finish = FINISH_STOP;
			else if (r->sent + 1 == r->max_tokens)
				ev->finish = FINISH_LENGTH;
		}
		n++;
		r->ended[c] = ev->finish != FINISH_NONE;
		*over &= r->ended[c];
	}
	if (!e->control.silent)
		r->sent++;
	return n;
}

static void free_request(struct fake_request *r)
{
	free(r->script);
	free(r->end_ids);
	free(r);
}

static void *engine_thread(void *user)
{
	struct engine *e = user;
	static struct scheduler_event events[FAKE_MAX_CHOICES];
	pthread_mutex_lock(&e->lock);
	while (!e->end) {
		bool work = false;
		for (struct fake_request **place = &e->list; *place;) {
			struct fake_request *r = *place;
			bool over;
			uint32_t n = step_request(e, r, events, &over);
			pthread_mutex_unlock(&e->lock);
			if (n)
				r->on_events(r->user, events, n);
			pthread_mutex_lock(&e->lock);
			work |= n > 0;
			while (*place != r) // new ones came in front
				place = &(*place)->next;
			if (over) {
				*place = r->next;
				free_request(r);
				e->seen.ended++;
				e->seen.in_hand--;
			} else {
				place = &r->next;
			}
		}
		uint32_t pause = e->control.step_us;
		if (!e->list || !work) {
			while (!e->woken)
				pthread_cond_wait(&e->wake, &e->lock);
			e->woken = false;
		} else {
			pthread_mutex_unlock(&e->lock);
			if (pause)
				usleep(pause);
			pthread_mutex_lock(&e->lock);
		}
	}
	pthread_mutex_unlock(&e->lock);
	return NULL;
}

enum status engine_create(struct engine **out, const struct options *o, const struct model *m, struct error *error)
{
	struct engine *e = &fake_engine;
	memset(e, 0, sizeof *e);
	pthread_mutex_init(&e->lock, NULL);
	pthread_cond_init(&e->wake, NULL);
	pthread_create(&e->thread, NULL, engine_thread, e);
	*out = e;
	return STATUS_OK;
}

void engine_destroy(struct engine **out)
{
	struct engine *e = *out;
	pthread_mutex_lock(&e->lock);
	e->end = true;
	wake(e);
	pthread_mutex_unlock(&e->lock);
	pthread_join(e->thread, NULL);
	while (e->list) {
		struct fake_request *r = e->list;
		e->list = r->next;
		free_request(r);
	}
	*out = NULL;
}

void engine_get_info(struct engine *e, struct engine_info *out)
{
	memset(out, 0, sizeof *out);
	pthread_mutex_lock(&e->lock);
	out->state = e->control.not_ready ? ENGINE_RECOVERING : ENGINE_READY;
	out->healthy = !e->control.not_healthy;
	out->ready = !e->control.not_ready;
	out->n_stages = 2;
	out->max_context = e->control.max_context ? e->control.max_context : 512;
	out->n_blocks = 100;
	out->stats = (struct scheduler_stats){.n_running = e->seen.in_hand, .blocks_total = 100, .blocks_free = 75};
	out->stage[1].busy_s = 1.5;
	pthread_mutex_unlock(&e->lock);
}

uint64_t engine_new_id(struct engine *e)
{
	pthread_mutex_lock(&e->lock);
	uint64_t id = ++e->last_id;
	pthread_mutex_unlock(&e->lock);
	return id;
}

static void set_script(struct fake_request *r, const struct scheduler_request *q)
{
	uint32_t begin = 0, end = q->n_prompt;
	if (q->prompt[0] == 257) { // a chat: from the line end of its last whole message to the message's end token
		while (q->prompt[end - 1] != 258)
			end--;
		for (begin = end; q->prompt[begin - 1] != 257;)
			begin--;
		while (q->prompt[begin++] != '\n')
			;
	}
	r->n_script = end - begin;
	r->script = malloc(r->n_script * sizeof *r->script);
	memcpy(r->script, q->prompt + begin, r->n_script * sizeof *r->script);
}

static void remember(struct fake_engine_seen *s, const struct scheduler_request *q)
{
	s->submitted++;
	s->in_hand++;
	s->n_prompt = q->n_prompt;
	memcpy(s->prompt, q->prompt, (q->n_prompt < 1024 ? q->n_prompt : 1024) * sizeof *s->prompt);
	s->n_choices = q->n_choices;
	s->max_tokens = q->max_tokens;
	s->n_end_ids = q->n_end_ids;
	if (q->n_end_ids)
		memcpy(s->end_ids, q->end_ids, (q->n_end_ids < 64 ? q->n_end_ids : 64) * sizeof *s->end_ids);
	s->sampling = q->sampling;
	s->bias_id = q->sampling.n_bias ? q->sampling.bias_ids[0] : 0;
	s->bias_value = q->sampling.n_bias ? q->sampling.bias_values[0] : 0;
	s->sampling.bias_ids = s->sampling.stop_ids = NULL;
	s->sampling.bias_values = NULL;
	s->cache_salt = q->cache_salt;
}

enum status engine_submit(struct engine *e, const struct scheduler_request *q, engine_events_fn on_events, void *user,
			  struct error *error)
{
	pthread_mutex_lock(&e->lock);
	enum status status = e->control.refuse;
	uint32_t max_queue = e->control.max_queue ? e->control.max_queue : 64;
	if (status == STATUS_OK && e->seen.in_hand >= max_queue)
		status = STATUS_BUSY;
	if (status == STATUS_OK) {
		struct fake_request *r = calloc(1, sizeof *r);
		*r = (struct fake_request){.id = q->id,
					   .n_choices = q->n_choices,
					   .max_tokens = q->max_tokens,
					   .n_prompt = q->n_prompt,
					   .n_end_ids = q->n_end_ids,
					   .n_logprobs = q->sampling.n_logprobs,
					   .on_events = on_events,
					   .user = user,
					   .next = e->list};
		set_script(r, q);
		r->end_ids = malloc(q->n_end_ids * sizeof(uint32_t) + 1);
		if (q->n_end_ids)
			memcpy(r->end_ids, q->end_ids, q->n_end_ids * sizeof(uint32_t));
		e->list = r;
		remember(&e->seen, q);
		wake(e);
	}
	pthread_mutex_unlock(&e->lock);
	return status ? error_set(error, status, "the fake engine says %s", status_name(status)) : STATUS_OK;
}

static struct fake_request *find(struct engine *e, uint64_t id)
{
	struct fake_request *r = e->list;
	while (r && r->id != id)
		r = r->next;
	return r;
}

void engine_cancel(struct engine *e, uint64_t id)
{
	pthread_mutex_lock(&e->lock);
	struct fake_request *r = find(e, id);
	if (r && !r->cancelled) {
		r->cancelled = true;
		e->seen.cancelled++;
	}
	wake(e);
	pthread_mutex_unlock(&e->lock);
}

void engine_stop_choice(struct engine *e, uint64_t id, uint32_t choice)
{
	pthread_mutex_lock(&e->lock);
	struct fake_request *r = find(e, id);
	if (r)
		r->stop[choice] = true;
	e->seen.stopped++;
	wake(e);
	pthread_mutex_unlock(&e->lock);
}
