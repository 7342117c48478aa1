// Worker processes as far as recovery can tell them from real ones: they say hello, load, join, give signs of life,
// die, hang, go on again and are replaced, each in its own time. The engine's part (what to do for each action) is the
// few lines of cluster_act(). The surprising decision: time moves only when the history says so, so five seconds of
// silence cost nothing.
#ifndef STAGECOACH_TESTS_CLUSTER_MODEL_H
#define STAGECOACH_TESTS_CLUSTER_MODEL_H

#include "coordinator/recovery.h"
#include "pipeline_model.h"

enum { CLUSTER_TICK_US = 50000, CLUSTER_NOTES = 4 * MAX_STAGES };

struct process {
	bool alive, hangs;
	uint32_t incarnation;
};

struct note { // something a process or its launcher will say
	uint64_t due_us;
	enum recovery_event_kind kind;
	uint32_t worker, incarnation, epoch;
};

struct cluster {
	struct world *w;
	struct recovery *recovery;
	struct recovery_options options;
	char labels[MAX_STAGES][96];
	struct process processes[MAX_STAGES];
	struct note notes[CLUSTER_NOTES];
	uint32_t n_notes;
	uint64_t random; // of delays
	uint32_t configured, next_blocks;
	char failure[512];
	bool failed, broken;  // broken: results since the fault do not arrive
	uint32_t deliverable; // results that were sent before it
	uint32_t runs, faults;
};

static inline uint32_t cluster_draw(struct cluster *c, uint32_t low, uint32_t high)
{
	c->random = model_mix(c->random, 0x51ed);
	return low + (uint32_t)((c->random >> 20) % (high - low + 1));
}

static inline void cluster_note(struct cluster *c, uint32_t worker, enum recovery_event_kind kind, uint32_t delay_us)
{
	WANT(c->n_notes < CLUSTER_NOTES, "too many notes");
	c->notes[c->n_notes++] = (struct note){.due_us = c->w->now_us + delay_us,
	                                       .kind = kind,
	                                       .worker = worker,
	                                       .incarnation = c->processes[worker].incarnation,
	                                       .epoch = c->w->epoch + c->configured};
}

static inline void cluster_start_process(struct cluster *c, uint32_t worker)
{
	c->processes[worker] = (struct process){.alive = true, .incarnation = c->processes[worker].incarnation + 1};
	cluster_note(c, worker, EVENT_HELLO, cluster_draw(c, 1000, 300000));
}

static inline void cluster_fault(struct cluster *c)
{
	c->faults++;
	if (!c->broken)
		c->deliverable = cluster_draw(c, 0, c->w->n_flights);
	c->broken = true;
}

static inline void cluster_end_process(struct cluster *c, uint32_t worker)
{
	struct process *p = &c->processes[worker];
	if (!p->alive)
		return;
	p->alive = p->hangs = false;
	cluster_fault(c);
	if (c->options.has_launcher[worker]) {
		cluster_note(c, worker, EVENT_EXIT, cluster_draw(c, 1000, 20000));
	} else {
		if (cluster_draw(c, 0, 2) > 0)
			recovery_event(c->recovery,
			               &(struct recovery_event){.kind = EVENT_DISCONNECT, .worker = worker},
			               c->w->now_us);
		cluster_start_process(c, worker); // somebody starts it again on its host
	}
}

static inline void cluster_act(struct cluster *c, const struct recovery_action *a)
{
	uint32_t n = c->options.n_workers;
	switch (a->kind) {
	case ACTION_PLAN:
		recovery_event(c->recovery, &(struct recovery_event){.kind = EVENT_PLANNED}, c->w->now_us);
		break;
	case ACTION_ASSIGN:
		cluster_note(c, a->worker, EVENT_BUDGET, cluster_draw(c, 1000, 2000000));
		break;
	case ACTION_CONFIGURE:
		c->configured++;
		for (uint32_t i = 0; i < n; i++)
			cluster_note(c, i, EVENT_READY, cluster_draw(c, 1000, 200000));
		break;
	case ACTION_RUN: {
		bool whole = true;
		for (uint32_t i = 0; i < n; i++)
			whole &= c->processes[i].alive && !c->processes[i].hangs;
		c->runs++;
		c->w->epoch += c->configured - 1;
		c->configured = 0;
		world_new_epoch(c->w, c->next_blocks, c->runs % 2);
		c->broken = !whole; // one may have died after it was ready
		c->deliverable = 0;
		break;
	}
	case ACTION_SUSPEND:
		scheduler_suspend(c->w->scheduler);
		if (!c->options.has_launcher[a->worker] && c->processes[a->worker].hangs)
			cluster_end_process(c, a->worker); // whoever started it on its host kills the silent one
		break;
	case ACTION_KILL:
		c->processes[a->worker].hangs = false;
		if (c->processes[a->worker].alive)
			cluster_end_process(c, a->worker);
		break;
	case ACTION_RESTART:
		WANT(!c->processes[a->worker].alive, "worker %u is restarted while it lives", a->worker);
		cluster_start_process(c, a->worker);
		break;
	case ACTION_FAIL:
		c->failed = true;
		snprintf(c->failure, sizeof c->failure, "%s", a->text);
		break;
	}
}

static inline void cluster_settle(struct cluster *c)
{
	struct recovery_action a;
	while (!c->failed && recovery_next_action(c->recovery, &a))
		cluster_act(c, &a);
}

// A launcher reports ends even if the next process has been started; all else comes from the process itself.
static inline bool cluster_note_counts(const struct cluster *c, const struct note *n)
{
	const struct process *p = &c->processes[n->worker];
	if (n->kind == EVENT_EXIT)
		return n->incarnation == p->incarnation;
	if (n->kind == EVENT_READY && n->epoch != c->w->epoch + c->configured)
		return false; // the engine drops other epochs
	return n->incarnation == p->incarnation && p->alive;
}

static inline void cluster_speak(struct cluster *c)
{
	for (uint32_t i = 0; i < c->n_notes; i++) {
		struct note n = c->notes[i];
		if (n.due_us > c->w->now_us || (c->processes[n.worker].hangs && n.kind != EVENT_EXIT))
			continue;
		c->notes[i--] = c->notes[--c->n_notes];
		if (!cluster_note_counts(c, &n))
			continue;
		recovery_event(c->recovery,
		               &(struct recovery_event){.kind = n.kind, .worker = n.worker, .text = "signal 9"},
		               c->w->now_us);
		cluster_settle(c);
	}
}

static inline void cluster_advance(struct cluster *c, uint64_t us)
{
	for (uint64_t end = c->w->now_us + us; c->w->now_us < end && !c->failed;) {
		c->w->now_us += CLUSTER_TICK_US < end - c->w->now_us ? CLUSTER_TICK_US : end - c->w->now_us;
		for (uint32_t i = 0; i < c->options.n_workers; i++)
			if (recovery_alive(c->recovery, i) && c->processes[i].alive && !c->processes[i].hangs)
				recovery_event(c->recovery, &(struct recovery_event){.kind = EVENT_SIGN, .worker = i},
				               c->w->now_us);
		cluster_speak(c);
		recovery_event(c->recovery, &(struct recovery_event){.kind = EVENT_TICK}, c->w->now_us);
		cluster_settle(c);
	}
}

static inline void cluster_create(struct cluster *c, struct world *w, uint64_t seed)
{
	*c = (struct cluster){.w = w, .random = seed, .next_blocks = w->n_blocks[0]};
	c->options = (struct recovery_options){
		.n_workers = w->options.n_stages,
		.hello_limit_us = 20000000,
		.rejoin_limit_us = 60000000,
		.silent_limit_us = 5000000,
		.lost_limit_us = 900000,
		.load_limit_us = 30000000,
		.join_limit_us = 10000000,
		.exit_limit_us = 5000000,
		.labels = c->labels,
	};
	for (uint32_t i = 0; i < c->options.n_workers; i++) {
		snprintf(c->labels[i], sizeof c->labels[i], "stage %u", i);
		c->options.has_launcher[i] = cluster_draw(c, 0, 3) > 0;
	}
	c->recovery = recovery_create(&c->options, w->now_us);
	for (uint32_t i = 0; i < c->options.n_workers; i++)
		cluster_start_process(c, i);
	while (!recovery_running(c->recovery) && !c->failed)
		cluster_advance(c, 100000);
	WANT(!c->failed, "the first start fails");
}

static inline void cluster_destroy(struct cluster *c)
{
	recovery_destroy(&c->recovery);
}

// Broadcasts a step if recovery lets steps flow.
static inline bool cluster_step(struct cluster *c)
{
	return recovery_running(c->recovery) && world_step(c->w);
}

// A result arrives, unless it was never sent.
static inline bool cluster_report(struct cluster *c)
{
	if (c->broken && c->deliverable == 0)
		return false;
	uint64_t before = c->w->tokens_delivered;
	if (!world_report(c->w))
		return false;
	c->deliverable -= c->broken;
	if (c->w->tokens_delivered > before)
		recovery_event(c->recovery, &(struct recovery_event){.kind = EVENT_TOKEN}, c->w->now_us);
	return true;
}

static inline void cluster_hang(struct cluster *c, uint32_t worker)
{
	// Before its hello a silent process is given up after a limit; that is the answer, not a history to finish.
	if (!c->processes[worker].alive || c->processes[worker].hangs || !recovery_alive(c->recovery, worker))
		return;
	c->processes[worker].hangs = true;
	cluster_fault(c);
}

// A stopped process goes on. If it was not replaced meanwhile, nothing was lost.
static inline void cluster_continue(struct cluster *c, uint32_t worker)
{
	bool whole = c->processes[worker].alive && c->processes[worker].hangs;
	c->processes[worker].hangs = false;
	for (uint32_t i = 0; i < c->options.n_workers; i++)
		whole &= c->processes[i].alive && !c->processes[i].hangs;
	if (whole && recovery_running(c->recovery))
		c->broken = false;
}

#endif
