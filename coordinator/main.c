// stagecoach-coordinator: parses options, opens the model, runs engine and HTTP server until told to stop. The surprising
// decision: the main thread only waits for signals, by sigtimedwait, so that there is no handler and no race with one.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/log.h"
#include "common/options.h"
#include "coordinator/bench.h"
#include "coordinator/bench_url.h"
#include "coordinator/engine.h"
#include "coordinator/plan_print.h"
#include "coordinator/tokenizer.h"

enum { POLL_MS = 50 };

struct program {
	struct options o;
	struct model *model;
	struct tokenizer *tokenizer;
	struct engine *engine;
	struct engine_info info; // scratch: too large for the stack
};

static sigset_t end_signals;

// Waits at most timeout_ms for a signal to end; whether one came.
static bool end_wanted(unsigned timeout_ms)
{
	struct timespec t = {timeout_ms / 1000, (long)(timeout_ms % 1000) * 1000000};
	return sigtimedwait(&end_signals, NULL, &t) > 0;
}

static enum engine_state state(struct program *p)
{
	engine_get_info(p->engine, &p->info);
	return p->info.state;
}

// Until the engine has started, failed, or a signal came (*stopped).
static enum status wait_started(struct program *p, bool *stopped, struct error *e)
{
	for (;;) {
		enum status s = engine_wait_ready(p->engine, POLL_MS, e);
		if (s != STATUS_TIMEOUT)
			return s;
		if (end_wanted(0)) {
			*stopped = true;
			return STATUS_OK;
		}
	}
}

static enum status plan(struct program *p, struct error *e)
{
	bool stopped = false;
	TRY(engine_start(p->engine, e));
	TRY(wait_started(p, &stopped, e));
	if (stopped)
		return STATUS_OK;
	engine_get_info(p->engine, &p->info);
	plan_print(&p->info, p->model, p->o.json);
	return STATUS_OK;
}

static void *end_on_signal(void *unused)
{
	int number;
	(void)unused;
	sigwait(&end_signals, &number);
	_Exit(STATUS_OK);
}

static enum status bench(struct program *p, struct error *e)
{
	bool stopped = false;
	pthread_t thread;
	TRY(engine_start(p->engine, e));
	TRY(wait_started(p, &stopped, e));
	if (stopped)
		return STATUS_OK;
	if (!pthread_create(&thread, NULL, end_on_signal, NULL))
		pthread_detach(thread);
	TRY(bench_run(p->engine, p->model, &p->o, e));
	engine_drain(p->engine);
	return STATUS_OK;
}

static void print_dry_run(struct program *p)
{
	const struct options *o = &p->o;
	const struct model_config *c = model_config(p->model);
	int n = o->devices_auto ? 1 : o->n_devices;
	printf("would start: stagecoach-coordinator and %d stagecoach-worker%s\n", n, n == 1 ? "" : "s");
	for (int i = 0; i < n; i++) {
		struct option_device d = o->devices_auto ? (struct option_device){OPTION_DEVICE_CPU, 0, 0} : o->devices[i];
		if (d.kind == OPTION_DEVICE_CUDA)
			printf("  worker %d: cuda:%d\n", i, d.index);
		else if (d.threads)
			printf("  worker %d: cpu, %d threads\n", i, d.threads);
		else
			printf("  worker %d: cpu, its share of the cores\n", i);
	}
	printf("model: %s (%s, %d layers, context %d)\n", model_path(p->model), c->architecture, c->n_layers, c->max_context);
	if (!strcmp(o->verb, "serve"))
		printf("HTTP: %s port %u\n", o->host, o->port);
}

static enum status run(struct program *p, struct error *e)
{
	const struct options *o = &p->o;
	bool is_bench = !strcmp(o->verb, "bench"), is_serve = !strcmp(o->verb, "serve"), is_plan = !strcmp(o->verb, "plan");
	if (is_bench && o->url[0])
		return bench_url_run(o, e);
	if (!is_bench && !is_serve && !is_plan)
		return error_set(e, STATUS_USAGE, "the coordinator runs serve, plan and bench; `%s` is the launcher's", o->verb);
	if (is_serve)
		return error_set(e, STATUS_USAGE, "`serve` waits for chat templates, which are not built yet");
	TRY(model_open(&p->model, o->model, &(struct model_open_options){.load_dummy = o->load_dummy}, e));
	if (is_serve)
		TRY(tokenizer_create(&p->tokenizer, p->model, e));
	if (o->dry_run) {
		print_dry_run(p);
		return STATUS_OK;
	}
	TRY(engine_create(&p->engine, o, p->model, e));
	return is_plan ? plan(p, e) : bench(p, e);
}

int main(int argc, char **argv)
{
	static struct program p;
	struct error e = {""};
	enum log_level level;
	log_set_prefix("coordinator");
	bool resolve = argc > 1 && !strcmp(argv[1], "--resolve");
	enum status status = options_parse(&p.o, argc - 1 - resolve, argv + 1 + resolve, &e);
	if (status != STATUS_OK) {
		log_error("%s", e.text);
		return (int)status;
	}
	if (!p.o.verb[0])
		return STATUS_OK; // help was asked for
	if (resolve) {
		options_print_json(&p.o, stdout);
		return STATUS_OK;
	}
	if (log_level_parse(p.o.log_level, &level))
		log_set_level(level);
	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&end_signals);
	sigaddset(&end_signals, SIGTERM);
	sigaddset(&end_signals, SIGINT);
	sigaddset(&end_signals, SIGHUP);
	pthread_sigmask(SIG_BLOCK, &end_signals, NULL);
	status = run(&p, &e);
	if (status != STATUS_OK && !(p.engine && state(&p) == ENGINE_FAILED))
		log_error("%s", e.text); // a failed engine has said it already
	engine_destroy(&p.engine);
	tokenizer_destroy(&p.tokenizer);
	model_close(&p.model);
	return status == STATUS_OK || (status >= STATUS_USAGE && status <= STATUS_FATAL) ? (int)status : STATUS_FATAL;
}
