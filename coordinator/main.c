// stagecoach-coordinator: parses options, opens the model, runs engine and HTTP server until told to stop. The surprising
// decision: the main thread only waits for signals, by sigtimedwait, so that there is no handler and no race with one.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/log.h"
#include "common/options.h"
#include "coordinator/bench.h"
#include "coordinator/bench_common.h"
#include "coordinator/bench_url.h"
#include "coordinator/chat_template.h"
#include "coordinator/engine.h"
#include "coordinator/http.h"
#include "coordinator/plan_print.h"
#include "coordinator/tokenizer.h"

enum { POLL_MS = 50 };

struct program {
	struct options o;
	struct model *model;
	struct tokenizer *tokenizer;
	struct chat_template *chat_template;
	struct engine *engine;
	struct http_server *http;
	struct engine_info info; // scratch: too large for the stack
};

static sigset_t end_signals;

// Waits at most timeout_ms for a signal to end; whether one came.
static bool end_wanted(unsigned timeout_ms)
{
	struct timespec t = {timeout_ms / 1000, (long)(timeout_ms % 1000) * 1000000};
	return sigtimedwait(&end_signals, NULL, &t) > 0;
}

static enum status failed(struct program *p, struct error *e)
{
	engine_get_info(p->engine, &p->info);
	return error_set(e, STATUS_FATAL, "%s", p->info.failure);
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

// Of the file that --chat-template names; a limit, because it is read into memory.
static enum status read_template(const char *path, char **text, struct error *e)
{
	enum { MOST = 4 << 20 };
	FILE *f = fopen(path, "rb");
	if (!f)
		return error_set(e, STATUS_REFUSED, "--chat-template %s: %s", path, strerror(errno));
	*text = xmalloc(MOST + 1);
	size_t n = fread(*text, 1, MOST + 1, f);
	bool bad = ferror(f) || n > MOST || memchr(*text, 0, n);
	fclose(f);
	if (bad)
		return error_set(e, STATUS_REFUSED, "--chat-template %s: not a text of at most %d bytes", path, MOST);
	(*text)[n] = 0;
	return STATUS_OK;
}

// The helper lies beside the program.
static enum status start_chat_template(struct program *p, struct error *e)
{
	char *text = NULL, helper[4200];
	const char *source = model_chat_template(p->model);
	enum status status = STATUS_OK;
	ssize_t n = readlink("/proc/self/exe", helper, sizeof helper - 64);
	char *slash = n > 0 ? (helper[n] = 0, strrchr(helper, '/')) : NULL;
	if (p->o.chat_template[0]) {
		TRY_GOTO(read_template(p->o.chat_template, &text, e), out);
		source = text;
	}
	if (!source) {
		log_info("the model has no chat template: chat completions will be refused");
		goto out;
	}
	strcpy(slash ? slash + 1 : helper, "chat_template_helper.py");
	struct chat_template_options o = {
		.source = source, .tokenizer = p->tokenizer, .python = p->o.python, .helper_path = helper,
		.bos_token = tokenizer_special_text(p->tokenizer, TOKENIZER_BOS),
		.eos_token = tokenizer_special_text(p->tokenizer, TOKENIZER_EOS),
		.unk_token = tokenizer_special_text(p->tokenizer, TOKENIZER_UNK),
		.pad_token = tokenizer_special_text(p->tokenizer, TOKENIZER_PAD),
	};
	status = chat_template_create(&p->chat_template, &o, e);
out:
	free(text);
	return status;
}

// The port in use, for `stop` to find the pipeline by where --port was 0.
static enum status write_port(struct program *p, struct error *e)
{
	char path[4200];
	snprintf(path, sizeof path, "%s/port", p->o.run_dir);
	FILE *f = fopen(path, "w");
	if (!f)
		return error_set(e, STATUS_UNAVAILABLE, "%s: %s", path, strerror(errno));
	fprintf(f, "%s\n", strrchr(http_server_address(p->http), ':') + 1);
	fclose(f);
	return STATUS_OK;
}

static enum status start_http(struct program *p, struct error *e)
{
	const struct options *o = &p->o;
	struct http_options h = {
		.engine = p->engine, .tokenizer = p->tokenizer, .chat_template = p->chat_template,
		.generation = model_generation(p->model),
		.served_model_name = o->served_model_name[0] ? o->served_model_name : model_display_name(p->model),
		.host = o->host, .port = o->port, .api_key_file = o->api_key_file, .no_auth = o->no_auth, .cors_origin = o->cors_origin,
		.tls_cert = o->tls_cert, .tls_key = o->tls_key, .slow_client_timeout_s = o->slow_client_timeout_s,
		.max_queue = o->max_queue,
	};
	TRY(http_server_start(&p->http, &h, e));
	return write_port(p, e);
}

static void *end_on_second_signal(void *unused)
{
	int number;
	(void)unused;
	sigwait(&end_signals, &number);
	log_warn("ending at once");
	_Exit(STATUS_OK);
}

// The first signal: refuse new requests, finish the running ones. A second one ends the process at once.
static void drain(struct program *p)
{
	pthread_t thread;
	log_info("shutting down: running requests are finished; another signal ends at once");
	if (!pthread_create(&thread, NULL, end_on_second_signal, NULL))
		pthread_detach(thread);
	engine_drain(p->engine);
	const struct timespec pause = {0, POLL_MS * 1000000L / 5};
	for (enum engine_state s = engine_get_state(p->engine); s != ENGINE_ENDED && s != ENGINE_FAILED; s = engine_get_state(p->engine))
		nanosleep(&pause, NULL);
	http_server_stop(&p->http, true);
}

static enum status serve(struct program *p, struct error *e)
{
	bool stopped = false;
	TRY(start_chat_template(p, e));
	TRY(start_http(p, e));
	TRY(engine_start(p->engine, e));
	TRY(wait_started(p, &stopped, e));
	if (!stopped) {
		if (p->chat_template)
			TRY(chat_template_wait(p->chat_template, e));
		engine_get_info(p->engine, &p->info);
		printf("ready %s model=%s stages=%u blocks=%llu\n", http_server_address(p->http),
		       p->o.served_model_name[0] ? p->o.served_model_name : model_display_name(p->model), p->info.n_stages,
		       (unsigned long long)p->info.n_blocks);
		fflush(stdout);
		while (!end_wanted(POLL_MS))
			if (engine_get_state(p->engine) == ENGINE_FAILED) {
				// Streams get their error event before the sockets close.
				http_server_stop(&p->http, true);
				return failed(p, e);
			}
	}
	drain(p);
	return engine_get_state(p->engine) == ENGINE_FAILED ? failed(p, e) : STATUS_OK;
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

// All checks that need no loading: sockets, keys, template and the plan, for which workers measure themselves.
static enum status dry_run(struct program *p, struct error *e)
{
	bool stopped = false;
	if (!strcmp(p->o.verb, "serve")) {
		TRY(start_chat_template(p, e));
		TRY(start_http(p, e));
	}
	TRY(engine_start(p->engine, e));
	TRY(wait_started(p, &stopped, e));
	if (stopped)
		return STATUS_OK;
	if (p->chat_template)
		TRY(chat_template_wait(p->chat_template, e));
	engine_get_info(p->engine, &p->info);
	print_dry_run(p);
	plan_print(&p->info, p->model, false);
	return STATUS_OK;
}

static enum status run(struct program *p, struct error *e)
{
	const struct options *o = &p->o;
	bool is_bench = !strcmp(o->verb, "bench"), is_serve = !strcmp(o->verb, "serve"), is_plan = !strcmp(o->verb, "plan");
	if (is_bench && o->url[0])
		return bench_url_run(o, e);
	if (!is_bench && !is_serve && !is_plan)
		return error_set(e, STATUS_USAGE, "the coordinator runs serve, plan and bench; `%s` is the launcher's", o->verb);
	struct bench_grid grid;
	if (is_bench)
		TRY(bench_grid_parse(&grid, o->bench_grid, e)); // before anything is loaded
	TRY(model_open(&p->model, o->model, &(struct model_open_options){.load_dummy = o->load_dummy}, e));
	if (is_serve)
		TRY(tokenizer_create(&p->tokenizer, p->model, e));
	TRY(engine_create(&p->engine, o, p->model, e));
	if (o->dry_run)
		return dry_run(p, e);
	return is_serve ? serve(p, e) : is_plan ? plan(p, e) : bench(p, e);
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
	if (status != STATUS_OK && !(p.engine && engine_get_state(p.engine) == ENGINE_FAILED))
		log_error("%s", e.text); // a failed engine has said it already
	http_server_stop(&p.http, false);
	engine_destroy(&p.engine);
	chat_template_destroy(&p.chat_template);
	tokenizer_destroy(&p.tokenizer);
	model_close(&p.model);
	return status == STATUS_OK || (status >= STATUS_USAGE && status <= STATUS_FATAL) ? (int)status : STATUS_FATAL;
}
