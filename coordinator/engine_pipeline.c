// Between the engine and its workers: messages in, what recovery wants done, steps out. The surprising decision: nothing
// here decides whether the pipeline is up; every message becomes an event for recovery.c, and what is done is what comes
// back from there.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "coordinator/cores.h"
#include "coordinator/engine_internal.h"

static void happened(struct engine *e, const struct recovery_event *v)
{
	recovery_event(e->recovery, v, engine_now_us());
}

static const char *label(const struct engine *e, uint32_t worker)
{
	return e->registry.labels[worker];
}

void engine_pipeline_init(struct engine *e)
{
	uint32_t n_local = e->o.devices_auto ? 1 : (uint32_t)e->o.n_devices;
	registry_init(&e->registry, n_local + e->o.expect, n_local);
	launcher_init(&e->launcher, e->o.launcher_fd);
	struct recovery_options r = {
		.n_workers = e->registry.n_workers,
		.hello_limit_us = e->o.expect ? (uint64_t)e->o.rejoin_timeout_s * 1000000 : 30000000,
		.rejoin_limit_us = (uint64_t)e->o.rejoin_timeout_s * 1000000,
		.silent_limit_us = 5000000,
		.lost_limit_us = 900000,
		.load_limit_us = 120000000,
		.join_limit_us = 30000000,
		.exit_limit_us = 10000000,
		.labels = e->registry.labels,
	};
	for (uint32_t i = 0; i < n_local; i++)
		r.has_launcher[i] = e->launcher.present;
	e->recovery = recovery_create(&r, engine_now_us());
}

// ---- sending -------------------------------------------------------------------------------------------------------

static bool encode(struct engine *e, const struct message *m)
{
	struct error error;
	if (message_encode(m, &e->buffer, &e->buffer_len, &e->buffer_capacity, &error) == STATUS_OK)
		return true;
	log_error("the message %s cannot be sent: %s", message_type_name(m->type), error.text);
	return false;
}

static void send_to(struct engine *e, uint32_t worker, const struct message *m)
{
	const struct registry_worker *w = &e->registry.workers[worker];
	if (!w->connected || !encode(e, m))
		return;
	enum status s = hub_send(e->hub, &w->peer, e->buffer, e->buffer_len);
	if (s == STATUS_OK)
		return;
	char text[256];
	snprintf(text, sizeof text, "%s takes no messages (%s)", label(e, worker), s == STATUS_BUSY ? "its pipe is full" : "closed");
	// A closed connection is found by the missing heartbeats; a full pipe is a failure of its own.
	if (s == STATUS_BUSY)
		happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = worker, .text = text});
	else
		happened(e, &(struct recovery_event){.kind = EVENT_DISCONNECT, .worker = worker});
}

void engine_say_drain(struct engine *e)
{
	for (uint32_t i = 0; i < e->registry.n_workers; i++)
		send_to(e, i, &(struct message){.type = MESSAGE_DRAIN, .epoch = e->epoch});
}

// ---- receiving -----------------------------------------------------------------------------------------------------

static void nonsense(struct engine *e, const struct hub_peer *from, const char *what)
{
	struct registry_worker *w = registry_find(&e->registry, from);
	char text[640];
	registry_ban(&e->registry, from);
	if (!w) {
		log_warn("an unknown peer is ignored from now on: %s", what);
		return;
	}
	uint32_t i = registry_index(&e->registry, w);
	snprintf(text, sizeof text, "%s sent what makes no sense: %s", label(e, i), what);
	happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = i, .text = text});
}

static void take_hello(struct engine *e, const struct hub_peer *from, const struct message_hello *h)
{
	struct error error;
	uint32_t i;
	if (registry_hello(&e->registry, from, h, &i, &error) != STATUS_OK) {
		nonsense(e, from, error.text);
		return;
	}
	log_info("%s: %s, pid %u, %.1f of %.1f GB for it, %.1f GB/s, %.0f GFLOP/s", label(e, i), h->device_name, h->pid,
	         (double)h->memory_limit_bytes * 1e-9, (double)h->memory_total_bytes * 1e-9, h->bandwidth_bytes_per_s * 1e-9,
	         h->matmul_flops * 1e-9);
	happened(e, &(struct recovery_event){.kind = EVENT_HELLO, .worker = i});
}

static void take_progress(struct engine *e, uint32_t i, const struct message_progress *p)
{
	struct registry_worker *w = &e->registry.workers[i];
	uint64_t now = engine_now_us();
	w->done_bytes = p->done_bytes;
	w->total_bytes = p->total_bytes;
	if (now - w->load_said_us >= PROGRESS_US && p->done_bytes && p->done_bytes < p->total_bytes) {
		double rate = (double)p->done_bytes / (double)(now - w->load_begin_us);
		w->load_said_us = now;
		log_info("%s: loading, %.0f %% of %.2f GB, %.2f GB/s, %.0f s left", label(e, i),
		         100 * (double)p->done_bytes / (double)p->total_bytes, (double)p->total_bytes * 1e-9, rate * 1e-3,
		         (double)(p->total_bytes - p->done_bytes) / rate * 1e-6);
	}
	happened(e, &(struct recovery_event){.kind = EVENT_PROGRESS, .worker = i});
}

static void take_budget(struct engine *e, uint32_t i, const struct message_budget *b)
{
	struct registry_worker *w = &e->registry.workers[i];
	const struct plan_stage *p = &e->plan.stage[i];
	w->budget = *b;
	w->has_budget = true;
	log_info("%s: loaded; weights %.1f MB, workspace %.1f MB, KV %.1f MB", label(e, i), (double)b->weight_bytes * 1e-6,
	         (double)b->workspace_bytes * 1e-6, (double)b->kv_bytes * 1e-6);
	if ((double)b->kv_bytes < 0.98 * (double)p->kv_bytes)
		log_warn("%s: %.1f MB are left for KV, the plan predicted %.1f MB", label(e, i), (double)b->kv_bytes * 1e-6,
		         (double)p->kv_bytes * 1e-6);
	happened(e, &(struct recovery_event){.kind = EVENT_BUDGET, .worker = i});
}

static void take_heartbeat(struct engine *e, uint32_t i, const struct message *m)
{
	struct registry_worker *w = &e->registry.workers[i];
	const struct message_heartbeat *h = &m->heartbeat;
	if (e->trace && h->n_events)
		trace_add(e->trace, i, m->epoch, h->events, h->n_events);
	w->heartbeat = *h;
	w->heartbeat.n_events = 0;
	w->heartbeat.events = NULL;
	w->heartbeat_us = engine_now_us();
	if (m->epoch != e->epoch || !recovery_running(e->recovery)) {
		happened(e, &(struct recovery_event){.kind = EVENT_SIGN, .worker = i});
		return;
	}
	happened(e, &(struct recovery_event){.kind = EVENT_HOLDING, .worker = i, .step = h->last_step_taken, .held_us = h->holding_us,
	                                     .expected_us = e->step_us});
	if (e->last_step > h->last_step_taken + STEPS_BEHIND) {
		char text[256];
		snprintf(text, sizeof text, "%s has taken step %" PRIu64 " of %" PRIu64, label(e, i), h->last_step_taken, e->last_step);
		happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = i, .text = text});
	}
}

static void take_result(struct engine *e, uint32_t i, const struct message *m)
{
	struct error error;
	if (m->epoch != e->epoch || !recovery_running(e->recovery))
		return;
	happened(e, &(struct recovery_event){.kind = EVENT_SIGN, .worker = i});
	enum status s = i + 1 == e->registry.n_workers ? scheduler_apply_result(e->scheduler, m, engine_now_us(), &error)
	                                               : error_set(&error, STATUS_INVALID, "a step result from a stage that is not the last");
	if (s != STATUS_OK) {
		error_prefix(&error, "%s", label(e, i));
		happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = i, .text = error.text});
		return;
	}
	e->last_result = m->step;
	e->result_us = engine_now_us();
	// The longest of the last hundred or so.
	uint64_t faded = e->step_us - e->step_us / 64;
	e->step_us = m->result.stage_us > faded ? m->result.stage_us : faded;
	// The next steps first: what waits for tokens is the pipeline, then the clients.
	engine_send_steps(e);
	engine_deliver(e);
}

static void take_error(struct engine *e, uint32_t i, const struct message_error *m)
{
	char text[640];
	snprintf(text, sizeof text, "%s: %s", label(e, i), m->text);
	happened(e, &(struct recovery_event){.kind = EVENT_ERROR, .worker = i, .status = m->status, .text = text});
}

static void take_message(struct engine *e, const struct hub_peer *from, const struct message *m)
{
	struct registry_worker *w = registry_find(&e->registry, from);
	if (m->type == MESSAGE_HELLO) {
		if (w && w->hello.incarnation == m->hello.incarnation)
			return; // said again
		take_hello(e, from, &m->hello);
		return;
	}
	if (!w) {
		// Before its hello a worker sends heartbeats; a replaced process may send anything until its launcher ends it.
		log_debug("a %s of an unknown peer was dropped", message_type_name(m->type));
		return;
	}
	uint32_t i = registry_index(&e->registry, w);
	switch (m->type) {
	case MESSAGE_PROGRESS: take_progress(e, i, &m->progress); break;
	case MESSAGE_BUDGET: take_budget(e, i, &m->budget); break;
	case MESSAGE_READY:
		happened(e, &(struct recovery_event){.kind = m->epoch == e->epoch ? EVENT_READY : EVENT_SIGN, .worker = i});
		break;
	case MESSAGE_STEP_RESULT: take_result(e, i, m); break;
	case MESSAGE_HEARTBEAT: take_heartbeat(e, i, m); break;
	case MESSAGE_ERROR: take_error(e, i, &m->error); break;
	default: {
		char text[64];
		snprintf(text, sizeof text, "a %s, which only a coordinator sends", message_type_name(m->type));
		nonsense(e, from, text);
	}
	}
}

static void take_exits(struct engine *e)
{
	struct launcher_exit x;
	while (launcher_next_exit(&e->launcher, &x)) {
		char text[512];
		if (x.worker >= e->registry.n_local)
			continue;
		bool first = !e->first_ready_us && x.log[0];
		snprintf(text, sizeof text, "%s%s%.300s", x.how, first ? "; its last lines: " : "", first ? x.log : "");
		registry_forget(&e->registry, x.worker);
		happened(e, &(struct recovery_event){.kind = EVENT_EXIT, .worker = x.worker, .text = text,
		                                     .status = x.exit_status > 0 && x.exit_status <= STATUS_FATAL ? (enum status)x.exit_status : STATUS_OK});
	}
}

void engine_receive(struct engine *e)
{
	struct hub_peer from;
	const uint8_t *data;
	size_t len;
	if (hub_disconnected(e->hub))
		happened(e, &(struct recovery_event){.kind = EVENT_DISCONNECT});
	// Not without end, or a fast pipeline would keep commands and deadlines waiting.
	for (int n = 0; n < MESSAGES_PER_TURN && hub_receive(e->hub, &from, &data, &len) == STATUS_OK; n++) {
		struct message m;
		struct error error;
		if (registry_is_banned(&e->registry, &from))
			continue;
		if (message_decode(&m, data, len, &e->limits, &error) != STATUS_OK) {
			nonsense(e, &from, error.text);
			continue;
		}
		take_message(e, &from, &m);
		message_free(&m);
		engine_supervise(e);
	}
	take_exits(e);
}

// ---- what recovery wants -------------------------------------------------------------------------------------------

// Cores for the CPU workers of this host; workers of other hosts use their own judgement.
static void hand_out_cores(struct engine *e)
{
	uint32_t cores[CORES_MAX], n_cores = cores_of_host(cores), n = 0, threads = 0;
	uint32_t who[MAX_STAGES];
	struct cores_share shares[MAX_STAGES] = {{0}};
	for (uint32_t i = 0; i < e->registry.n_local; i++) {
		if (e->registry.workers[i].hello.device_kind != DEVICE_CPU)
			continue;
		who[n] = i;
		shares[n++].wanted = e->registry.workers[i].hello.threads;
	}
	bool enough = cores_hand_out(n_cores, shares, n);
	for (uint32_t k = 0; k < n; k++)
		threads += shares[k].count;
	for (uint32_t k = 0; k < n; k++) {
		struct message_assign *a = &e->registry.workers[who[k]].assign;

		a->may_spin = enough;
		a->n_cores = enough && shares[k].count <= MAX_CORES ? shares[k].count : 0;
		for (uint32_t c = 0; c < a->n_cores; c++)
			a->cores[c] = cores[shares[k].first + c];
	}
	if (!enough)
		log_warn("%u worker threads on %u cores: none is pinned, none may spin", threads, n_cores);
}

static void make_assignments(struct engine *e)
{
	const struct plan_settings *s = &e->settings;
	const struct model_config *c = model_config(e->model);
	for (uint32_t i = 0; i < e->registry.n_workers; i++) {
		struct message_assign *a = &e->registry.workers[i].assign;
		const struct plan_stage *p = &e->plan.stage[i];
		*a = (struct message_assign){
			.stage = i, .n_stages = e->registry.n_workers, .n_ranks = 1, .first_layer = p->first_layer,
			.n_layers = p->n_layers, .has_embedding = p->has_embedding, .has_head = p->has_head,
			.load_dummy = e->o.load_dummy, .act_dtype = s->act_dtype, .kv_dtype = s->kv_dtype,
			.block_size = s->block_size, .max_seqs = s->max_seqs, .max_batch_tokens = s->max_batch_tokens,
			.max_context = s->max_context ? s->max_context : (uint32_t)c->max_context, .isa = s->isa,
			.trace = e->trace != NULL,
		};
		snprintf(a->model_path, sizeof a->model_path, "%s", model_path(e->model));
	}
	hand_out_cores(e);
}

static void log_plan(struct engine *e)
{
	for (uint32_t i = 0; i < e->plan.n_stages; i++) {
		const struct plan_stage *p = &e->plan.stage[i];
		char layers[64] = "no layers";
		if (p->n_layers)
			snprintf(layers, sizeof layers, "layers %u to %u", p->first_layer, p->first_layer + p->n_layers - 1);
		log_info("%s: %s%s%s, %.1f MB of weights, %" PRIu64 " blocks possible", label(e, i), layers,
		         p->has_embedding ? ", embedding" : "", p->has_head ? ", head" : "", (double)p->weight_bytes * 1e-6,
		         p->blocks_possible);
	}
	log_info("plan: %s", e->plan.why);
}

static void act_plan(struct engine *e)
{
	struct error error;
	enum status status;
	const struct model_config *c = model_config(e->model);
	TRY_GOTO(plan_inputs_settings(&e->settings, &e->o, e->model, &e->registry, &error), out);
	TRY_GOTO(plan_inputs_model(&e->plan_model, e->model, &e->registry, &e->settings, &error), out);
	plan_inputs_devices(e->plan_devices, &e->registry);
	for (uint32_t i = 0; i < e->registry.n_workers; i++) {
		const struct message_hello *h = &e->registry.workers[i].hello;
		if (h->memory_limit_bytes <= h->base_bytes)
			log_warn("%s: a worker itself takes %.1f MB, --memory leaves it %.1f MB", label(e, i), (double)h->base_bytes * 1e-6,
			         (double)h->memory_limit_bytes * 1e-6);
	}
	struct plan_options o = {
		.n_stages = e->registry.n_workers, .plan_sequences = e->o.plan_sequences, .plan_tokens = e->o.plan_tokens,
		.block_size = e->settings.block_size, .max_seqs = e->settings.max_seqs,
		.max_batch_tokens = e->settings.max_batch_tokens, .max_context = e->settings.max_context,
		.model_max_context = (uint32_t)c->max_context, .layers = e->o.n_layers ? e->o.layers : NULL,
		.n_layers_given = (uint32_t)e->o.n_layers,
	};
	TRY_GOTO(planner_plan(&e->plan, &e->plan_model, e->plan_devices, &o, &error), out);
	e->planned = true;
	e->publish_now = true;
	if (e->plan_only) {
		e->ended = true;
		return;
	}
	log_plan(e);
	make_assignments(e);
	if (e->trace)
		for (uint32_t i = 0; i < e->registry.n_workers; i++)
			trace_stage(e->trace, i, label(e, i));
	happened(e, &(struct recovery_event){.kind = EVENT_PLANNED});
	return;
out:
	engine_fail(e, status, error.text);
}

// The block count that every stage can hold. Later epochs never take more than the first, so that survivors keep theirs.
static enum status count_blocks(struct engine *e, struct error *error)
{
	uint32_t worst = 0;
	uint64_t least = e->n_blocks[0] ? e->n_blocks[0] : INT32_MAX;
	e->n_groups = 1;
	for (uint32_t i = 0; i < e->registry.n_workers; i++) {
		const struct message_budget *b = &e->registry.workers[i].budget;
		if (b->n_groups != 1)
			return error_set(error, STATUS_FATAL, "%s reports %u KV groups, expected 1", label(e, i), b->n_groups);
		uint64_t n = b->bytes_per_block[0] ? b->kv_bytes / b->bytes_per_block[0] : INT32_MAX;
		if (n < least) {
			least = n;
			worst = i;
		}
	}
	uint64_t model_context = (uint64_t)model_config(e->model)->max_context;
	uint64_t wanted = e->settings.max_context ? e->settings.max_context : 2;
	// More than all sequences at full length is never used.
	uint64_t most = (model_context + e->settings.block_size - 1) / e->settings.block_size * e->settings.max_seqs;
	if (least > most)
		least = most;
	if (least * e->settings.block_size < wanted)
		return error_set(error, STATUS_REFUSED,
		                 "%s has %.1f MB for KV: %" PRIu64 " blocks of %u tokens, a context of %" PRIu64 " needs %" PRIu64,
		                 label(e, worst), (double)e->registry.workers[worst].budget.kv_bytes * 1e-6, least,
		                 e->settings.block_size, wanted, (wanted + e->settings.block_size - 1) / e->settings.block_size);
	e->n_blocks[0] = (uint32_t)least;
	return STATUS_OK;
}

static double round_us(void *user, uint32_t micro_batches, uint32_t sequences, uint32_t context)
{
	struct engine *e = user;
	return planner_round_us(&e->plan, &e->plan_model, e->plan_devices, micro_batches, sequences, context);
}

static enum status make_scheduler(struct engine *e, struct error *error)
{
	uint64_t fits = (uint64_t)e->n_blocks[0] * e->settings.block_size;
	uint64_t own = (uint64_t)model_config(e->model)->max_context;
	uint32_t context = e->settings.max_context ? e->settings.max_context : (uint32_t)(fits < own ? fits : own);
	struct scheduler_options o = {
		.max_seqs = e->settings.max_seqs, .max_batch_tokens = e->settings.max_batch_tokens,
		// The queue is bounded where requests are submitted; preempted ones may come on top.
		.max_queue = e->settings.max_queue * 2 + 64, .max_context = context, .block_size = e->settings.block_size,
		.n_groups = e->n_groups, .n_stages = e->registry.n_workers, .prefix_cache = e->o.prefix_cache,
		.max_prefill_tokens = planner_chunk_tokens(&e->plan, e->settings.max_batch_tokens),
		.round_us = round_us, .user = e,
	};
	TRY(scheduler_create(&e->scheduler, &o, error));
	e->limits = (struct message_limits){
		.max_seqs = o.max_seqs, .max_batch_tokens = o.max_batch_tokens, .max_context = o.max_context,
		.vocab_size = (uint32_t)model_config(e->model)->vocab_size, .n_groups = e->n_groups,
	};
	pthread_mutex_lock(&e->lock);
	e->max_context = context;
	e->pool_tokens = fits;
	e->max_queue = e->settings.max_queue;
	pthread_mutex_unlock(&e->lock);
	return STATUS_OK;
}

static void act_configure(struct engine *e)
{
	struct error error;
	enum status status;
	char endpoints[2][256];
	TRY_GOTO(count_blocks(e, &error), out);
	if (!e->scheduler)
		TRY_GOTO(make_scheduler(e, &error), out);
	e->epoch++;
	TRY_GOTO(hub_begin_epoch(e->hub, e->epoch, endpoints, &error), out);
	uint32_t n = e->registry.n_workers;
	for (uint32_t i = 0; i < n; i++) {
		struct message m = {.type = MESSAGE_CONFIGURE, .epoch = e->epoch, .configure = {.n_groups = e->n_groups}};
		memcpy(m.configure.n_blocks, e->n_blocks, sizeof m.configure.n_blocks);
		snprintf(m.configure.steps_endpoint, 256, "%s", endpoints[e->registry.workers[i].peer.door]);
		if (i + 1 < n)
			snprintf(m.configure.next_address, 256, "%s", e->registry.workers[i + 1].budget.data_address);
		snprintf(m.configure.first_address, 256, "%s", e->registry.workers[0].budget.data_address);
		send_to(e, i, &m);
	}
	e->probing = true;
	e->next_probe_us = 0;
	return;
out:
	engine_fail(e, status, error.text);
}

static void act_run(struct engine *e)
{
	uint64_t now = engine_now_us();
	e->probing = false;
	e->last_step = e->last_result = 0;
	e->result_us = now;
	scheduler_begin_epoch(e->scheduler, e->epoch, e->n_blocks);
	if (!e->first_ready_us) {
		e->first_ready_us = now;
		log_info("all %u stages are ready: %u blocks of %u tokens, context %u", e->registry.n_workers, e->n_blocks[0],
		         e->settings.block_size, e->max_context);
	} else {
		e->recoveries++;
		log_info("the pipeline runs again after %.2f s (epoch %u)", (double)(now - e->suspended_us) * 1e-6, e->epoch);
	}
	if (e->trace)
		trace_mark(e->trace, "ready", now);
	e->publish_now = true;
	engine_deliver(e);
}

static void act_suspend(struct engine *e, const struct recovery_action *a)
{
	const struct registry_worker *w = &e->registry.workers[a->worker];
	char step[96] = "";
	if (!e->suspended_us || !e->probing)
		e->suspended_us = engine_now_us();
	if (w->heartbeat.last_step_taken > w->heartbeat.last_step_done)
		snprintf(step, sizeof step, "; it held step %" PRIu64, w->heartbeat.last_step_taken);
	log_warn("the pipeline is down: %s%s", a->text, step);
	e->probing = false;
	if (e->scheduler)
		scheduler_suspend(e->scheduler);
	if (e->trace)
		trace_mark(e->trace, a->text, engine_now_us());
	e->publish_now = true;
}

static void act(struct engine *e, const struct recovery_action *a)
{
	switch (a->kind) {
	case ACTION_PLAN: act_plan(e); break;
	case ACTION_ASSIGN: {
		struct registry_worker *w = &e->registry.workers[a->worker];
		struct message m = {.type = MESSAGE_ASSIGN, .epoch = e->epoch, .assign = w->assign};
		w->load_begin_us = w->load_said_us = engine_now_us();
		send_to(e, a->worker, &m);
		break;
	}
	case ACTION_CONFIGURE: act_configure(e); break;
	case ACTION_RUN: act_run(e); break;
	case ACTION_SUSPEND: act_suspend(e, a); break;
	case ACTION_KILL:
		if (a->worker >= e->registry.n_local)
			send_to(e, a->worker, &(struct message){.type = MESSAGE_ERROR, .epoch = e->epoch,
			                                        .error = {.status = STATUS_FATAL, .text = "this worker was given up"}});
		registry_forget(&e->registry, a->worker);
		if (a->worker < e->registry.n_local)
			launcher_kill(&e->launcher, a->worker);
		break;
	case ACTION_RESTART:
		log_info("restarting stage %u (attempt %u)", a->worker, recovery_attempts(e->recovery, a->worker));
		registry_forget(&e->registry, a->worker);
		launcher_restart(&e->launcher, a->worker);
		break;
	case ACTION_FAIL: engine_fail(e, a->status, a->text); break;
	}
}

// Steps are out, none comes back, and nobody computes: the first stage that has not done the oldest one is at fault.
static void watch_stall(struct engine *e, uint64_t now)
{
	if (!recovery_running(e->recovery) || e->last_result == e->last_step || now - e->result_us < STALL_US)
		return;
	for (uint32_t i = 0; i < e->registry.n_workers; i++)
		if (e->registry.workers[i].heartbeat.holding_us)
			return;
	for (uint32_t i = 0; i < e->registry.n_workers; i++)
		if (e->registry.workers[i].heartbeat.last_step_done <= e->last_result || i + 1 == e->registry.n_workers) {
			char text[256];
			snprintf(text, sizeof text, "%s has not finished step %" PRIu64 " for %.0f s and computes nothing", label(e, i),
			         e->last_result + 1, (double)(now - e->result_us) * 1e-6);
			happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = i, .text = text});
			return;
		}
}

void engine_supervise(struct engine *e)
{
	uint64_t now = engine_now_us();
	struct recovery_action a;
	if (now >= e->next_tick_us) {
		e->next_tick_us = now + TICK_MS * 1000;
		happened(e, &(struct recovery_event){.kind = EVENT_TICK});
		watch_stall(e, now);
	}
	while (!e->failed && !e->ended && recovery_next_action(e->recovery, &a))
		act(e, &a);
	if (e->probing && now >= e->next_probe_us && !e->failed) {
		e->next_probe_us = now + PROBE_US;
		if (encode(e, &(struct message){.type = MESSAGE_PROBE, .epoch = e->epoch}))
			hub_broadcast(e->hub, e->buffer, e->buffer_len);
	}
	if (now >= e->next_beat_us) {
		e->next_beat_us = now + BEAT_US;
		for (uint32_t i = 0; i < e->registry.n_workers; i++)
			send_to(e, i, &(struct message){.type = MESSAGE_HEARTBEAT, .epoch = e->epoch});
	}
}

void engine_fail(struct engine *e, enum status status, const char *text)
{
	if (e->failed)
		return;
	e->failed = true;
	e->probing = false;
	if (status < STATUS_USAGE || status > STATUS_FATAL)
		status = STATUS_FATAL;
	log_error("%s", text);
	pthread_mutex_lock(&e->lock);
	e->failure_status = status;
	snprintf(e->info.failure, sizeof e->info.failure, "%s", text);
	pthread_mutex_unlock(&e->lock);
	if (e->scheduler)
		scheduler_suspend(e->scheduler);
	e->publish_now = true;
	engine_publish(e);
	engine_end_all(e, FINISH_FAILED);
}

// ---- steps ---------------------------------------------------------------------------------------------------------

// The one furthest behind, by what heartbeats said.
static uint32_t slowest(const struct engine *e)
{
	uint32_t worst = 0;
	for (uint32_t i = 1; i < e->registry.n_workers; i++)
		if (e->registry.workers[i].heartbeat.last_step_taken < e->registry.workers[worst].heartbeat.last_step_taken)
			worst = i;
	return worst;
}

void engine_send_steps(struct engine *e)
{
	struct message m;
	uint64_t now = engine_now_us();
	while (recovery_running(e->recovery) && !e->failed && scheduler_next_step(e->scheduler, now, &m)) {
		struct error error;
		char text[640];
		if (e->last_result == e->last_step)
			e->result_us = now;
		if (message_encode(&m, &e->buffer, &e->buffer_len, &e->buffer_capacity, &error) != STATUS_OK) {
			snprintf(text, sizeof text, "step %" PRIu64 " cannot be sent: %s", m.step, error.text);
			engine_fail(e, STATUS_FATAL, text);
			return;
		}
		if (hub_broadcast(e->hub, e->buffer, e->buffer_len) != STATUS_OK) {
			uint32_t i = slowest(e);
			snprintf(text, sizeof text, "%s does not take its steps", label(e, i));
			happened(e, &(struct recovery_event){.kind = EVENT_BROKEN, .worker = i, .text = text});
			return;
		}
		e->last_step = m.step;
	}
}
