// The engine's life and its loop. See engine.h.
#include "coordinator/engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "common/log.h"
#include "coordinator/engine_internal.h"

uint64_t engine_now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

enum status engine_create(struct engine **out, const struct options *o, const struct model *model, struct error *error)
{
	struct engine *e = xcalloc(1, sizeof *e);
	enum status status;
	pthread_condattr_t clock;
	*out = NULL;
	e->o = *o;
	e->model = model;
	e->plan_only = !strcmp(o->verb, "plan") || o->dry_run;
	e->info.healthy = true;
	pthread_mutex_init(&e->lock, NULL);
	pthread_condattr_init(&clock);
	pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
	pthread_cond_init(&e->changed, &clock);
	pthread_condattr_destroy(&clock);
	engine_requests_init(e);
	e->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (e->wake_fd < 0) {
		status = error_set(error, STATUS_FATAL, "eventfd: %s", strerror(errno));
		goto out;
	}
	if (!o->run_dir[0]) {
		status = error_set(error, STATUS_USAGE, "--run-dir is needed (the launcher sets it)");
		goto out;
	}
	uint32_t n_local = o->devices_auto ? 1 : (uint32_t)o->n_devices;
	if (n_local + o->expect < 1 || n_local + o->expect > MAX_STAGES) {
		status = error_set(error, STATUS_USAGE, "%u workers, expected 1 to %d", n_local + o->expect, MAX_STAGES);
		goto out;
	}
	struct hub_options h = {.run_dir = o->run_dir, .listen = o->listen, .key_file = o->key_file, .max_message_bytes = MESSAGE_CAP_BYTES};
	TRY_GOTO(hub_create(&e->hub, &h, error), out);
	if (o->trace[0])
		TRY_GOTO(trace_open(&e->trace, o->trace, error), out);
	engine_pipeline_init(e);
	*out = e;
	return STATUS_OK;
out:
	engine_destroy(&e);
	return status;
}

// Requests that were accepted before a drain are finished; then the workers are told to end.
static void finish_drain(struct engine *e)
{
	pthread_mutex_lock(&e->lock);
	bool wanted = e->drain && !e->n_inbox;
	pthread_mutex_unlock(&e->lock);
	bool idle = !e->scheduler || e->failed || (scheduler_idle(e->scheduler) && !e->n_entries);
	if (!wanted || !idle || e->ended)
		return;
	// The workers' last trace events come with their next heartbeats.
	if (e->trace && !e->flush_until_us)
		e->flush_until_us = engine_now_us() + TRACE_FLUSH_US;
	if (engine_now_us() < e->flush_until_us)
		return;
	engine_say_drain(e);
	e->ended = e->publish_now = true;
}

static void *run(void *arg)
{
	struct engine *e = arg;
	int fds[] = {e->wake_fd, e->launcher.fd};
	for (bool stop = false; !stop;) {
		fds[1] = e->launcher.fd;
		hub_wait(e->hub, fds, 2, e->probing ? PROBE_US / 1000 : TICK_MS);
		engine_receive(e);
		engine_take_commands(e);
		engine_supervise(e);
		engine_send_steps(e);
		engine_deliver(e);
		finish_drain(e);
		engine_publish(e);
		pthread_mutex_lock(&e->lock);
		stop = e->stop;
		pthread_mutex_unlock(&e->lock);
	}
	engine_take_commands(e);
	engine_end_all(e, FINISH_FAILED);
	if (!e->ended)
		engine_say_drain(e);
	e->ended = e->publish_now = true;
	engine_publish(e);
	return NULL;
}

enum status engine_start(struct engine *e, struct error *error)
{
	if (pthread_create(&e->thread, NULL, run, e))
		return error_set(error, STATUS_FATAL, "cannot start the engine thread: %s", strerror(errno));
	e->started = true;
	return STATUS_OK;
}

enum status engine_wait_ready(struct engine *e, unsigned timeout_ms, struct error *error)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += timeout_ms / 1000;
	until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	enum status status = STATUS_OK;
	pthread_mutex_lock(&e->lock);
	while (e->info.state == ENGINE_STARTING && status == STATUS_OK)
		if (pthread_cond_timedwait(&e->changed, &e->lock, &until) == ETIMEDOUT && e->info.state == ENGINE_STARTING)
			status = error_set(error, STATUS_TIMEOUT, "the pipeline was not ready within %u ms", timeout_ms);
	if (status == STATUS_OK && e->info.state == ENGINE_FAILED)
		status = error_set(error, e->failure_status, "%s", e->info.failure);
	pthread_mutex_unlock(&e->lock);
	return status;
}

void engine_get_info(struct engine *e, struct engine_info *out)
{
	pthread_mutex_lock(&e->lock);
	*out = e->info;
	pthread_mutex_unlock(&e->lock);
}

enum engine_state engine_get_state(struct engine *e)
{
	pthread_mutex_lock(&e->lock);
	enum engine_state state = e->info.state;
	pthread_mutex_unlock(&e->lock);
	return state;
}

static void wake(struct engine *e)
{
	uint64_t one = 1;
	ssize_t n = write(e->wake_fd, &one, sizeof one);
	(void)n;
}

void engine_drain(struct engine *e)
{
	pthread_mutex_lock(&e->lock);
	e->drain = true;
	if (e->info.state == ENGINE_READY || e->info.state == ENGINE_RECOVERING || e->info.state == ENGINE_STARTING)
		e->info.state = ENGINE_DRAINING;
	e->info.ready = false;
	pthread_cond_broadcast(&e->changed);
	pthread_mutex_unlock(&e->lock);
	wake(e);
}

void engine_destroy(struct engine **engine)
{
	struct engine *e = *engine;
	if (!e)
		return;
	if (e->started) {
		if (e->trace)
			usleep(TRACE_FLUSH_US);
		pthread_mutex_lock(&e->lock);
		e->stop = true;
		pthread_mutex_unlock(&e->lock);
		wake(e);
		pthread_join(e->thread, NULL);
		// ZeroMQ's own thread sends the last messages; linger is 0, so give it a moment.
		usleep(20000);
	}
	hub_destroy(&e->hub);
	trace_close(&e->trace);
	recovery_destroy(&e->recovery);
	scheduler_destroy(&e->scheduler);
	engine_requests_free(e);
	free(e->buffer);
	if (e->wake_fd >= 0)
		close(e->wake_fd);
	pthread_cond_destroy(&e->changed);
	pthread_mutex_destroy(&e->lock);
	free(e);
	*engine = NULL;
}
