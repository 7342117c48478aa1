// See recovery.h. A worker goes absent -> greeted -> loading -> loaded -> joining -> ready; whatever goes wrong leads to
// dying (its launcher has still to report the end), delayed (to be restarted at a stated time) and absent again.
// Survivors fall back to loaded, because they keep their weights.
#include "coordinator/recovery.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum worker_state { ABSENT, GREETED, LOADING, LOADED, JOINING, READY, DYING, DELAYED };

// Delays before the restarts of one stage between which no token came; after the last it is given up.
static const uint64_t restart_delay_us[] = {0, 200000, 1000000, 2000000, 4000000};
enum { OWN_ABSENCE_US = 1000000, SUSPECT_US = 1000000 };
enum { RESTARTS = sizeof restart_delay_us / sizeof restart_delay_us[0], ACTIONS = 4 * RECOVERY_MAX_WORKERS };

struct worker {
	enum worker_state state;
	uint64_t sign_us;     // its last message
	uint64_t since_us;    // in this state, or its last progress
	uint64_t until_us;    // DELAYED: when to restart
	uint32_t attempts;    // restarts since the last token
	uint64_t held_step, held_us; // the step in hand and for how long, 0 = none
};

struct recovery {
	struct recovery_options o;
	struct worker workers[RECOVERY_MAX_WORKERS];
	bool planned, has_run, running, failed;
	uint64_t tick_us;       // the last one
	uint64_t disconnect_us, next_disconnect_us; // 0: none that still matters; one that came while it did
	struct recovery_action actions[ACTIONS];
	uint32_t first_action, n_actions;
};

struct recovery *recovery_create(const struct recovery_options *o, uint64_t now_us)
{
	ASSERT(o->n_workers >= 1 && o->n_workers <= RECOVERY_MAX_WORKERS);
	struct recovery *r = xcalloc(1, sizeof *r);
	r->o = *o;
	for (uint32_t i = 0; i < o->n_workers; i++)
		r->workers[i].since_us = now_us;
	return r;
}

void recovery_destroy(struct recovery **r)
{
	if (*r)
		free(*r);
	*r = NULL;
}

static struct recovery_action *push(struct recovery *r, enum recovery_action_kind kind, uint32_t worker)
{
	ASSERT(r->n_actions < ACTIONS);
	struct recovery_action *a = &r->actions[(r->first_action + r->n_actions++) % ACTIONS];
	a->kind = kind;
	a->worker = worker;
	a->status = STATUS_OK;
	a->text[0] = 0;
	return a;
}

bool recovery_next_action(struct recovery *r, struct recovery_action *out)
{
	if (!r->n_actions)
		return false;
	*out = r->actions[r->first_action];
	r->first_action = (r->first_action + 1) % ACTIONS;
	r->n_actions--;
	return true;
}

static bool alive(const struct worker *w)
{
	return w->state >= GREETED && w->state <= READY;
}

static bool all_in(const struct recovery *r, enum worker_state low, enum worker_state high)
{
	for (uint32_t i = 0; i < r->o.n_workers; i++)
		if (r->workers[i].state < low || r->workers[i].state > high)
			return false;
	return true;
}

static void enter(struct worker *w, enum worker_state s, uint64_t now_us)
{
	w->state = s;
	w->since_us = now_us;
}

static const char *doing(const struct worker *w)
{
	switch (w->state) {
	case ABSENT: return "before its hello";
	case GREETED: return "after its hello";
	case LOADING: return "while it loaded";
	case LOADED: return "after it had loaded";
	case JOINING: return "while it joined the pipeline";
	default: return "while it served";
	}
}

static void give_up(struct recovery *r, uint32_t worker, enum status status, const char *text)
{
	if (r->failed)
		return;
	r->failed = true;
	r->running = false;
	r->n_actions = 0;
	struct recovery_action *a = push(r, ACTION_FAIL, worker);
	a->status = status;
	snprintf(a->text, sizeof a->text, "%s", text);
}

// The pipeline is down because of `worker`. Survivors keep their weights.
static void fall_back(struct recovery *r, uint32_t worker, const char *text, uint64_t now_us)
{
	struct recovery_action *a = push(r, ACTION_SUSPEND, worker);
	snprintf(a->text, sizeof a->text, "%s", text);
	r->running = false;
	for (uint32_t i = 0; i < r->o.n_workers; i++) {
		r->workers[i].held_us = 0;
		if (r->workers[i].state == JOINING || r->workers[i].state == READY)
			enter(&r->workers[i], LOADED, now_us);
	}
}

// A worker is of no use any more. `ended`: its process is known to be gone.
static void lose(struct recovery *r, uint32_t worker, enum status status, const char *text, bool ended, uint64_t now_us)
{
	struct worker *w = &r->workers[worker];
	if (!r->has_run) {
		give_up(r, worker, status, text);
		return;
	}
	if (alive(w))
		fall_back(r, worker, text, now_us);
	if (!r->o.has_launcher[worker]) {
		enter(w, ABSENT, now_us);
		push(r, ACTION_KILL, worker);
	} else if (!ended) {
		enter(w, DYING, now_us);
		push(r, ACTION_KILL, worker);
	} else if (w->attempts >= RESTARTS) {
		char t[512];
		snprintf(t, sizeof t, "%s was restarted %d times without a token in between; the last time: %.300s",
		         r->o.labels[worker], RESTARTS, text);
		give_up(r, worker, STATUS_FATAL, t);
	} else {
		enter(w, DELAYED, now_us);
		w->until_us = now_us + restart_delay_us[w->attempts++];
	}
}

static void on_hello(struct recovery *r, uint32_t worker, uint64_t now_us)
{
	struct worker *w = &r->workers[worker];
	if (alive(w)) {
		char text[512];
		snprintf(text, sizeof text, "%s was replaced by a new process %s", r->o.labels[worker], doing(w));
		if (!r->has_run) {
			give_up(r, worker, STATUS_FATAL, text);
			return;
		}
		fall_back(r, worker, text, now_us);
	}
	enter(w, GREETED, now_us);
	if (r->planned) {
		enter(w, LOADING, now_us);
		push(r, ACTION_ASSIGN, worker);
	} else if (all_in(r, GREETED, GREETED)) {
		push(r, ACTION_PLAN, 0);
	}
}

static void on_planned(struct recovery *r, uint64_t now_us)
{
	r->planned = true;
	for (uint32_t i = 0; i < r->o.n_workers; i++)
		if (r->workers[i].state == GREETED) {
			enter(&r->workers[i], LOADING, now_us);
			push(r, ACTION_ASSIGN, i);
		}
}

static void on_budget(struct recovery *r, uint32_t worker, uint64_t now_us)
{
	if (r->workers[worker].state != LOADING)
		return;
	enter(&r->workers[worker], LOADED, now_us);
	if (!all_in(r, LOADED, LOADED))
		return;
	for (uint32_t i = 0; i < r->o.n_workers; i++)
		enter(&r->workers[i], JOINING, now_us);
	push(r, ACTION_CONFIGURE, 0);
}

static void on_ready(struct recovery *r, uint32_t worker, uint64_t now_us)
{
	if (r->workers[worker].state != JOINING)
		return;
	enter(&r->workers[worker], READY, now_us);
	if (!all_in(r, READY, READY))
		return;
	r->running = r->has_run = true;
	push(r, ACTION_RUN, 0);
}

static void on_exit_of(struct recovery *r, const struct recovery_event *e, uint64_t now_us)
{
	struct worker *w = &r->workers[e->worker];
	char text[512];
	if (w->state == DELAYED)
		return;
	snprintf(text, sizeof text, "%s ended (%s) %s", r->o.labels[e->worker], e->text ? e->text : "unknown how", doing(w));
	lose(r, e->worker, e->status ? e->status : STATUS_FATAL, text, true, now_us);
}

// Who holds a step may only be waiting for its data from another. If that one is silent, it is judged by its silence; else
// it is the stage with the oldest step in hand, and of several with the same one the first, from which the others wait.
static void on_holding(struct recovery *r, const struct recovery_event *e, uint64_t now_us)
{
	uint64_t limit = 10 * e->expected_us > r->o.silent_limit_us ? 10 * e->expected_us : r->o.silent_limit_us;
	struct worker *w = &r->workers[e->worker];
	w->held_step = e->step;
	w->held_us = e->held_us;
	if (!r->running || w->state != READY || e->held_us <= limit)
		return;
	uint32_t culprit = e->worker;
	for (uint32_t i = 0; i < r->o.n_workers; i++) {
		const struct worker *other = &r->workers[i];
		uint64_t oldest = r->workers[culprit].held_step;
		if (now_us - other->sign_us > SUSPECT_US)
			return;
		if (other->held_us && (other->held_step < oldest || (other->held_step == oldest && i < culprit)))
			culprit = i;
	}
	w = &r->workers[culprit];
	char text[512];
	snprintf(text, sizeof text, "%s has held step %llu for %.1f s, expected %.3f s", r->o.labels[culprit],
	         (unsigned long long)w->held_step, (double)w->held_us * 1e-6, (double)e->expected_us * 1e-6);
	lose(r, culprit, STATUS_FATAL, text, false, now_us);
}

static void tick_alive(struct recovery *r, uint32_t i, uint64_t now_us)
{
	struct worker *w = &r->workers[i];
	const char *label = r->o.labels[i];
	char text[512] = "";
	if (now_us - w->sign_us > r->o.silent_limit_us)
		snprintf(text, sizeof text, "%s gave no sign of life for %.1f s %s", label,
		         (double)(now_us - w->sign_us) * 1e-6, doing(w));
	else if (r->disconnect_us && w->sign_us <= r->disconnect_us && now_us - r->disconnect_us > r->o.lost_limit_us)
		snprintf(text, sizeof text, "%s closed its connection %s", label, doing(w));
	else if (w->state == LOADING && now_us - w->since_us > r->o.load_limit_us)
		snprintf(text, sizeof text, "%s made no progress in loading for %.0f s", label,
		         (double)(now_us - w->since_us) * 1e-6);
	else if (w->state == JOINING && now_us - w->since_us > r->o.join_limit_us)
		snprintf(text, sizeof text, "%s did not join the pipeline within %.0f s", label, (double)r->o.join_limit_us * 1e-6);
	if (text[0])
		lose(r, i, STATUS_FATAL, text, false, now_us);
}

// If nobody looked for a while (this process was stopped, or the machine slept), nobody is blamed for that while.
static void forgive_own_absence(struct recovery *r, uint64_t now_us)
{
	uint64_t gap_us = r->tick_us ? now_us - r->tick_us : 0;
	r->tick_us = now_us;
	if (gap_us < OWN_ABSENCE_US)
		return;
	for (uint32_t i = 0; i < r->o.n_workers; i++) {
		struct worker *w = &r->workers[i];
		w->sign_us = w->sign_us + gap_us < now_us ? w->sign_us + gap_us : now_us;
		w->since_us = w->since_us + gap_us < now_us ? w->since_us + gap_us : now_us;
	}
}

static void on_tick(struct recovery *r, uint64_t now_us)
{
	forgive_own_absence(r, now_us);
	for (uint32_t i = 0; i < r->o.n_workers && !r->failed; i++) {
		struct worker *w = &r->workers[i];
		char text[512];
		uint64_t hello_us = r->o.has_launcher[i] || !r->has_run ? r->o.hello_limit_us : r->o.rejoin_limit_us;
		if (alive(w)) {
			tick_alive(r, i, now_us);
		} else if (w->state == DELAYED && now_us >= w->until_us) {
			enter(w, ABSENT, now_us);
			push(r, ACTION_RESTART, i);
		} else if (w->state == ABSENT && now_us - w->since_us > hello_us) {
			snprintf(text, sizeof text, "%s did not say hello within %.0f s", r->o.labels[i], (double)hello_us * 1e-6);
			give_up(r, i, STATUS_FATAL, text);
		} else if (w->state == DYING && now_us - w->since_us > r->o.exit_limit_us) {
			snprintf(text, sizeof text, "%s was killed, but its end was not reported within %.0f s", r->o.labels[i],
			         (double)r->o.exit_limit_us * 1e-6);
			give_up(r, i, STATUS_FATAL, text);
		}
	}
	if (r->disconnect_us && now_us - r->disconnect_us > r->o.lost_limit_us) {
		r->disconnect_us = r->next_disconnect_us;
		r->next_disconnect_us = 0;
	}
}

void recovery_event(struct recovery *r, const struct recovery_event *e, uint64_t now_us)
{
	if (r->failed)
		return;
	ASSERT(e->worker < r->o.n_workers);
	struct worker *w = &r->workers[e->worker];
	switch (e->kind) {
	case EVENT_HELLO: case EVENT_PROGRESS: case EVENT_BUDGET: case EVENT_READY: case EVENT_SIGN: case EVENT_HOLDING:
		w->sign_us = now_us;
		break;
	default:
		break;
	}
	switch (e->kind) {
	case EVENT_HELLO: on_hello(r, e->worker, now_us); break;
	case EVENT_PLANNED: on_planned(r, now_us); break;
	case EVENT_SIGN: break;
	case EVENT_PROGRESS:
		if (w->state == LOADING)
			w->since_us = now_us;
		break;
	case EVENT_BUDGET: on_budget(r, e->worker, now_us); break;
	case EVENT_READY: on_ready(r, e->worker, now_us); break;
	case EVENT_HOLDING: on_holding(r, e, now_us); break;
	case EVENT_EXIT: on_exit_of(r, e, now_us); break;
	case EVENT_ERROR: case EVENT_BROKEN:
		if (alive(w))
			lose(r, e->worker, e->kind == EVENT_ERROR ? e->status : STATUS_FATAL, e->text, false, now_us);
		break;
	case EVENT_DISCONNECT:
		if (!r->disconnect_us)
			r->disconnect_us = now_us;
		else
			r->next_disconnect_us = now_us;
		break;
	case EVENT_TOKEN:
		for (uint32_t i = 0; i < r->o.n_workers; i++)
			r->workers[i].attempts = 0;
		break;
	case EVENT_TICK: on_tick(r, now_us); break;
	}
}

bool recovery_running(const struct recovery *r)
{
	return r->running;
}

bool recovery_alive(const struct recovery *r, uint32_t worker)
{
	return alive(&r->workers[worker]);
}

uint32_t recovery_attempts(const struct recovery *r, uint32_t worker)
{
	return r->workers[worker].attempts;
}
