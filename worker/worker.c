// See worker.h. The calling thread computes; the link has a thread of its own (link.c) and may only abort edges.
#define _GNU_SOURCE
#include "worker/worker.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/log.h"
#include "worker/link.h"
#include "worker/memory.h"
#include "worker/stage.h"

enum {
	MEASURE_MS = 60,            // of the 100 that a hello may take
	PROGRESS_US = 50000,        // between two progress messages
	JOIN_MS = 10000,            // for the neighbours to come
	JOIN_SLICE_MS = 50,
	GONE_AFTER_MS = 2500,       // a coordinator on this host does not come back: its launcher ends with it
	OTHER_BYTES = 12 << 20,     // what a worker grows to hold beside its own: tables of slots, queues, sockets
};

struct worker {
	const struct options *options;
	const struct ops *ops;
	const struct transport *transport;
	uint64_t incarnation;
	uint32_t threads;
	struct memory_state memory;
	uint64_t limit_bytes;
	struct message hello;       // said again if the coordinator was lost and is back
	struct ring *ring;
	struct worker_link *link;

	struct ops_context *context;
	struct model *model;
	struct stage *stage;
	struct message_assign assign;
	struct message budget;      // as last sent
	uint64_t progress_us;
	void *listener;
	char data_address[256];

	pthread_mutex_t edges_lock; // the link thread aborts edges, the compute thread replaces them
	struct edge *in, *out;
	bool joined;                // steps of the current epoch can run
};

static void interrupt_edges(void *user)
{
	struct worker *w = user;
	pthread_mutex_lock(&w->edges_lock);
	if (w->in)
		w->transport->abort(w->in);
	if (w->out)
		w->transport->abort(w->out);
	pthread_mutex_unlock(&w->edges_lock);
}

static void close_edges(struct worker *w)
{
	pthread_mutex_lock(&w->edges_lock);
	struct edge *in = w->in, *out = w->out;
	w->in = w->out = NULL;
	pthread_mutex_unlock(&w->edges_lock);
	if (in)
		w->transport->close(&in);
	if (out)
		w->transport->close(&out);
	w->joined = false;
}

// The pipeline is broken for this epoch: a neighbour is gone, or it did not come.
static void go_idle(struct worker *w, const char *why)
{
	log_warn("%s; waiting for the next epoch", why);
	worker_link_unsubscribe(w->link);
	if (w->stage)
		stage_set_edges(w->stage, NULL, NULL, NULL);
	close_edges(w);
}

static uint32_t usable_cores(void)
{
	cpu_set_t set;
	return sched_getaffinity(0, sizeof set, &set) ? 1 : (uint32_t)CPU_COUNT(&set);
}

// Threads of this worker: as --devices says, else an equal share of the cores that no entry names.
static uint32_t default_threads(const struct options *o)
{
	uint32_t cores = usable_cores(), unnamed = 0, named = 0;
	if (o->worker_index < (uint32_t)o->n_devices && o->devices[o->worker_index].threads > 0)
		return (uint32_t)o->devices[o->worker_index].threads;
	for (int i = 0; i < o->n_devices; i++)
		if (o->devices[i].kind == OPTION_DEVICE_CPU) {
			named += (uint32_t)o->devices[i].threads;
			unnamed += o->devices[i].threads == 0;
		}
	uint32_t left = cores > named ? cores - named : 1;
	uint32_t share = unnamed ? left / unnamed : left;
	return share ? share : 1;
}

static enum status find_limits(struct worker *w, struct error *e)
{
	const struct options *o = w->options;
	uint32_t n_cpu = 0;
	for (int i = 0; i < o->n_devices; i++)
		n_cpu += o->devices[i].kind == OPTION_DEVICE_CPU;
	memory_read(&w->memory, "");
	const struct option_memory *own = NULL;
	if (o->n_memory == 1)
		own = &o->memory[0];
	else if (o->n_memory > 1 && o->worker_index < (uint32_t)o->n_memory)
		own = &o->memory[o->worker_index];
	if (own && !own->is_fraction && own->bytes > w->memory.total_bytes)
		return error_set(e, STATUS_REFUSED, "--memory names %.1f GB, this %s has %.1f GB", (double)own->bytes * 1e-9,
		                 w->memory.in_cgroup ? "cgroup" : "host", (double)w->memory.total_bytes * 1e-9);
	// One value is for the device, which all CPU workers of this host share; several are one for each.
	w->limit_bytes = memory_limit(&w->memory, own, o->n_memory > 1 ? 1 : n_cpu);
	return STATUS_OK;
}

static void read_cpu_name(char *out, size_t size)
{
	char line[512];
	FILE *f = fopen("/proc/cpuinfo", "r");
	snprintf(out, size, "CPU");
	while (f && fgets(line, sizeof line, f)) {
		char *value = strchr(line, ':');
		if (!strncmp(line, "model name", 10) && value && value[1]) {
			value[strcspn(value, "\n")] = 0;
			snprintf(out, size, "%.90s", value + 2);
			break;
		}
	}
	if (f)
		fclose(f);
}

static enum status say_hello(struct worker *w, struct error *e)
{
	w->hello = (struct message){.type = MESSAGE_HELLO};
	struct message_hello *h = &w->hello.hello;
	h->protocol_version = PROTOCOL_VERSION;
	snprintf(h->version, sizeof h->version, "%s", STAGECOACH_VERSION);
	if (gethostname(h->host, sizeof h->host - 1))
		snprintf(h->host, sizeof h->host, "unknown");
	h->pid = (uint32_t)getpid();
	h->worker_index = w->options->worker_index;
	h->incarnation = w->incarnation;
	h->device_kind = DEVICE_CPU;
	read_cpu_name(h->device_name, sizeof h->device_name);
	h->threads = w->threads;
	h->memory_total_bytes = w->memory.total_bytes;
	h->memory_free_bytes = w->memory.available_bytes;
	h->memory_limit_bytes = w->limit_bytes;
	struct ops_context *context;
	TRY(w->ops->create(&context, &(struct ops_options){.threads = (int)w->threads, .max_rows = 64}, e));
	struct ops_speed speed = {0};
	w->ops->measure(context, MEASURE_MS, &speed);
	h->isa = (uint32_t)w->ops->isa(context);
	log_debug("%s: %.1f GB/s, %.1f GFLOP/s", w->ops->describe(context), speed.bandwidth_bytes_per_s / 1e9,
	          speed.matmul_flops / 1e9);
	w->ops->destroy(&context);
	h->bandwidth_bytes_per_s = speed.bandwidth_bytes_per_s;
	h->matmul_flops = speed.matmul_flops;
	for (int t = 0; t < DTYPE_COUNT; t++) {
		if (!w->ops->weight_supported((enum dtype)t))
			continue;
		struct weight_source source = {.dtype = (enum dtype)t, .rows = 4096, .cols = 4096};
		h->weight_ratio[t] = (double)w->ops->weight_bytes_predicted(&source, false, true) /
		                     (4096.0 * (double)dtype_row_bytes((enum dtype)t, 4096));
	}
	struct memory_usage usage;
	memory_of_self(&usage);
	h->base_bytes = usage.private_bytes + OTHER_BYTES;
	return worker_link_send(w->link, &w->hello, e);
}

static void send_progress(void *user, uint64_t done, uint64_t total)
{
	struct worker *w = user;
	uint64_t now = ring_now_us();
	if (done < total && now - w->progress_us < PROGRESS_US)
		return;
	w->progress_us = now;
	struct message m = {.type = MESSAGE_PROGRESS, .progress = {.done_bytes = done, .total_bytes = total, .what = "load"}};
	worker_link_send(w->link, &m, NULL);
}

static const struct message *peek_next(void *user)
{
	return worker_link_peek_step(((struct worker *)user)->link);
}

static void unload(struct worker *w)
{
	close_edges(w);
	stage_destroy(&w->stage);
	model_close(&w->model);
	if (w->context)
		w->ops->destroy(&w->context);
}

static enum status load(struct worker *w, const struct message_assign *a, struct error *e)
{
	unload(w);
	w->assign = *a;
	char prefix[32];
	snprintf(prefix, sizeof prefix, "stage %u", a->stage);
	log_set_prefix(prefix);
	int cores[MAX_CORES];
	for (uint32_t i = 0; i < a->n_cores; i++)
		cores[i] = (int)a->cores[i];
	TRY(w->ops->create(&w->context, &(struct ops_options){
		.threads = (int)(a->n_cores ? a->n_cores : w->threads), .cores = a->n_cores ? cores : NULL,
		.may_spin = a->may_spin, .isa = (enum ops_isa)a->isa, .max_rows = (int)a->max_batch_tokens}, e));
	TRY(model_open(&w->model, a->model_path, &(struct model_open_options){.load_dummy = a->load_dummy}, e));
	ring_set_trace(w->ring, a->trace);
	return stage_create(&w->stage, &(struct stage_options){
		.ops = w->ops, .context = w->context, .assign = a, .model = w->model, .ring = w->ring,
		.progress = send_progress, .peek_next = peek_next, .user = w}, e);
}

static enum status send_budget(struct worker *w, struct error *e)
{
	struct memory_usage before, after;
	malloc_trim(0);
	memory_of_self(&before);
	TRY(stage_profile(w->stage, e));
	malloc_trim(0);
	memory_of_self(&after);
	// Scratch of the operations is what the profile left behind; the rest of what is neither weights nor workspace is
	// other.
	uint64_t scratch = after.private_bytes > before.private_bytes ? after.private_bytes - before.private_bytes : 0;
	uint64_t own = stage_own_weight_bytes(w->stage), workspace = stage_workspace_bytes(w->stage) + scratch;
	uint64_t other = after.private_bytes > own + workspace ? after.private_bytes - own - workspace : 0;
	other += OTHER_BYTES;
	uint64_t used = stage_weight_bytes(w->stage) + workspace + other;
	struct message m = {.type = MESSAGE_BUDGET};
	m.budget = (struct message_budget){
		.stage = w->assign.stage, .rank = w->assign.rank, .weight_bytes = stage_weight_bytes(w->stage),
		.workspace_bytes = workspace, .other_bytes = other,
		.kv_bytes = w->limit_bytes > used ? w->limit_bytes - used : 0, .n_groups = 1};
	m.budget.bytes_per_block[0] = stage_block_bytes(w->stage);
	memcpy(m.budget.data_address, w->data_address, sizeof w->data_address);
	log_info("layers %u-%u%s%s: weights %.1f MB, workspace %.1f MB, other %.1f MB, left for KV %.1f MB; %s",
	         w->assign.first_layer, w->assign.first_layer + w->assign.n_layers - (w->assign.n_layers > 0),
	         w->assign.has_embedding ? " + embedding" : "", w->assign.has_head ? " + head" : "",
	         (double)m.budget.weight_bytes / 1e6, (double)workspace / 1e6, (double)other / 1e6,
	         (double)m.budget.kv_bytes / 1e6, w->ops->describe(w->context));
	w->budget = m;
	return worker_link_send(w->link, &m, e);
}

// Listens for the data plane: in the folder of the pipeline, or on the first free port of --data-address
// (ADDRESS[:PORT[-PORT]]), which is loopback for a worker that joined over TCP.
static enum status open_listener(struct worker *w, struct error *e)
{
	const struct options *o = w->options;
	if (!o->data_address[0] && !o->join[0])
		return w->transport->listen(&w->listener, o->run_dir, w->data_address, sizeof w->data_address, e);
	char host[128], where[160];
	unsigned low = 0, high = 0;
	int n = sscanf(o->data_address[0] ? o->data_address : "127.0.0.1", "%127[^:]:%u-%u", host, &low, &high);
	if (n < 1 || low > 65535 || (n == 3 && (high < low || high > 65535)))
		return error_set(e, STATUS_USAGE, "--data-address %s: expected ADDRESS, ADDRESS:PORT or ADDRESS:PORT-PORT",
		                 o->data_address);
	enum status status;
	do {
		snprintf(where, sizeof where, "tcp:%s:%u", host, low);
		status = w->transport->listen(&w->listener, where, w->data_address, sizeof w->data_address, e);
	} while (status != STATUS_OK && n == 3 && low++ < high);
	return status;
}

static enum status take_assign(struct worker *w, const struct message_assign *a, struct error *e)
{
	if (w->stage && !memcmp(&w->assign, a, sizeof *a)) {
		log_info("the same layers again: weights are kept");
		worker_link_unsubscribe(w->link);
		close_edges(w);
		return worker_link_send(w->link, &w->budget, e);
	}
	TRY(load(w, a, e));
	if (!stage_borrows_model(w->stage))
		model_close(&w->model); // its pages are given back
	if (!w->listener)
		TRY(open_listener(w, e));
	return send_budget(w, e);
}

// Connects to the neighbour behind and takes the connection of the one before. STATUS_ABSENT: a control message came.
static enum status join(struct worker *w, const struct message *m, struct error *e)
{
	if (w->assign.n_stages == 1)
		return STATUS_OK;
	const struct message_configure *c = &m->configure;
	const char *to = stage_is_last(w->stage) ? c->first_address : c->next_address;
	const struct transport *t = transport_find(DEVICE_CPU, DEVICE_CPU, to);
	if (t != w->transport)
		return error_set(e, STATUS_UNAVAILABLE, "no transport for data address \"%s\"", to);
	struct edge *in = NULL, *out = NULL;
	enum status status = STATUS_TIMEOUT;
	for (uint64_t begin = ring_now_us(); status == STATUS_TIMEOUT && ring_now_us() - begin < JOIN_MS * 1000ull;) {
		if (worker_link_control_waits(w->link)) {
			status = error_set(e, STATUS_ABSENT, "another configuration came");
			break;
		}
		if (!out)
			status = t->connect(to, m->epoch, stage_out_kind(w->stage), JOIN_SLICE_MS, &out, e);
		if (out)
			status = t->accept(w->listener, m->epoch, stage_in_kind(w->stage), JOIN_SLICE_MS, &in, e);
	}
	if (status != STATUS_OK) {
		if (out)
			t->close(&out);
		return status;
	}
	pthread_mutex_lock(&w->edges_lock);
	w->in = in;
	w->out = out;
	pthread_mutex_unlock(&w->edges_lock);
	stage_set_edges(w->stage, t, in, out);
	return STATUS_OK;
}

static enum status take_configure(struct worker *w, const struct message *m, struct error *e)
{
	if (!w->stage)
		return error_set(e, STATUS_INVALID, "configured before any layer was assigned");
	worker_link_unsubscribe(w->link);
	close_edges(w);
	ring_begin_epoch(w->ring);
	TRY(stage_configure(w->stage, m->epoch, m->configure.n_groups, m->configure.n_blocks, e));
	enum status status = join(w, m, e);
	if (status == STATUS_ABSENT)
		return STATUS_OK; // the newer configuration is next in the queue
	if (status == STATUS_TIMEOUT) {
		go_idle(w, e->text);
		return STATUS_OK;
	}
	TRY(status);
	struct message_limits limits = stage_limits(w->stage);
	memcpy(limits.n_blocks, m->configure.n_blocks, sizeof limits.n_blocks);
	worker_link_subscribe(w->link, m->configure.steps_endpoint, m->epoch, &limits);
	w->joined = true;
	log_debug("epoch %u: %u blocks", m->epoch, m->configure.n_blocks[0]);
	return STATUS_OK;
}

static enum status take_step(struct worker *w, const struct message *step, struct error *e)
{
	if (!w->joined)
		return STATUS_OK; // of an epoch that is over
	struct message result;
	enum status status = stage_run(w->stage, step, &result, e);
	if (status == STATUS_CLOSED) {
		go_idle(w, e->text);
		return STATUS_OK;
	}
	TRY(status);
	return stage_is_last(w->stage) ? worker_link_send(w->link, &result, e) : STATUS_OK;
}

// One turn of the loop; *ended when the worker is to end with the returned status.
static enum status turn(struct worker *w, bool *ended, struct error *e)
{
	struct message m;
	uint64_t begin = ring_now_us();
	enum worker_link_event event = worker_link_wait(w->link, 1000, &m, e);
	enum status status = STATUS_OK;
	if (w->joined)
		ring_add(w->ring, TRACE_WAIT_STEP, event == LINK_STEP ? m.step : 0, 0, begin, ring_now_us(), 0);
	switch (event) {
	case LINK_NONE:
		return STATUS_OK;
	case LINK_GONE:
		return w->options->join[0]
			? error_set(e, STATUS_UNAVAILABLE, "no coordinator at %s for %u s%s", w->options->join, w->options->rejoin_timeout_s,
			            w->options->key_file[0] ? ", or it does not take these keys" : ", or it takes only workers with --key-file")
			: error_set(e, STATUS_FATAL, "the coordinator is gone");
	case LINK_BACK:
		if (w->joined)
			go_idle(w, "the coordinator was away");
		return worker_link_send(w->link, &w->hello, e);
	case LINK_BROKEN:
		return STATUS_INVALID;
	case LINK_STEP:
		status = take_step(w, &m, e);
		break;
	case LINK_CONTROL:
		if (m.type == MESSAGE_ASSIGN)
			status = take_assign(w, &m.assign, e);
		else if (m.type == MESSAGE_CONFIGURE)
			status = take_configure(w, &m, e);
		else if (m.type == MESSAGE_DRAIN)
			*ended = true;
		else
			status = error_set(e, STATUS_FATAL, "the coordinator says: %s", m.error.text);
		break;
	}
	message_free(&m);
	return status;
}

enum status worker_run(const struct options *o)
{
	struct error e = {""};
	enum status status = STATUS_OK;
	bool ended = false;
	struct worker w = {.options = o, .ops = ops_cpu(), .transport = &transport_socket,
	                   .edges_lock = PTHREAD_MUTEX_INITIALIZER};
	char endpoint[4200];
	char prefix[32];
	snprintf(prefix, sizeof prefix, "worker %u", o->worker_index);
	log_set_prefix(prefix);
	if (getrandom(&w.incarnation, sizeof w.incarnation, 0) != sizeof w.incarnation)
		w.incarnation = ring_now_us() ^ (uint64_t)getpid() << 40;
	ring_create(&w.ring);
	w.threads = default_threads(o);
	TRY_GOTO(find_limits(&w, &e), out);
	struct worker_keys keys;
	if (o->key_file[0] && o->join[0])
		TRY_GOTO(worker_keys_read(&keys, o->key_file, &e), out);
	if (o->join[0])
		snprintf(endpoint, sizeof endpoint, "tcp://%s", o->join);
	else
		snprintf(endpoint, sizeof endpoint, "ipc://%s/control", o->run_dir);
	TRY_GOTO(worker_link_create(&w.link, &(struct worker_link_options){
		.endpoint = endpoint, .keys = o->key_file[0] && o->join[0] ? &keys : NULL,
		.gone_after_ms = o->join[0] ? o->rejoin_timeout_s * 1000 : GONE_AFTER_MS,
		.first_after_ms = o->join[0] ? o->rejoin_timeout_s * 1000 : 0, .watch_fd = o->watch_fd,
		.ring = w.ring, .interrupt = interrupt_edges, .user = &w}, &e), out);
	TRY_GOTO(say_hello(&w, &e), out);
	if (o->join[0])
		log_info("joining the coordinator at %s", o->join);
	while (status == STATUS_OK && !ended)
		status = turn(&w, &ended, &e);
out:
	if (status != STATUS_OK) {
		log_error("%s", e.text);
		if (w.link) {
			struct message m = {.type = MESSAGE_ERROR, .error = {.status = status}};
			memcpy(m.error.text, e.text, sizeof m.error.text);
			worker_link_send(w.link, &m, NULL);
		}
	}
	worker_link_destroy(&w.link);
	unload(&w);
	if (w.listener)
		w.transport->close_listener(&w.listener);
	ring_destroy(&w.ring);
	return status == STATUS_INVALID || status == STATUS_BUSY ? STATUS_FATAL : status;
}
