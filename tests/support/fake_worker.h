// Workers without a model for tests of the engine: threads that speak the protocol over a run folder's sockets. The last
// stage "samples" fake_token(seed, position), so that what a client gets is known, also after a replay. Includes a launcher
// end that restarts them. Everything is in this header because only one program uses it.
#ifndef STAGECOACH_TESTS_FAKE_WORKER_H
#define STAGECOACH_TESTS_FAKE_WORKER_H

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include <zmq.h>

#include "proto/message.h"

enum { FAKE_VOCAB = 1000, FAKE_SLOTS = 64, FAKE_MAX = 4 };

enum fake_fault {
	FAULT_NONE,
	FAULT_DIE,        // ends without a word
	FAULT_HANG,       // says nothing and does nothing until told to die
	FAULT_NONSENSE,   // the next result has one token too many
	FAULT_GARBAGE,    // sends bytes that are no message
	FAULT_OLD_EPOCH,  // sends a result of epoch 1 before each of its own
	FAULT_ERROR,      // says that it cannot go on, and ends
	FAULT_DIE_AT_CONFIGURE,
	FAULT_ERROR_AT_ASSIGN,
};

struct fake_worker {
	char run_dir[128];
	uint32_t index, n_stages, kv_blocks;
	_Atomic int fault;
	_Atomic bool ended, drained;
	_Atomic uint64_t steps;
	uint64_t incarnation;
	pthread_t thread;
	bool joined;
	int exit_fd;      // tells the fake launcher; -1 none

	void *zmq, *control, *sub;
	uint32_t epoch, stage_count;
	bool last;
	uint64_t seeds[FAKE_SLOTS], done;
	uint8_t *buffer;
	size_t len, capacity;
};

static inline uint32_t fake_token(uint64_t seed, uint32_t position)
{
	return (uint32_t)((seed * 31 + position * 7) % FAKE_VOCAB);
}

static inline void fake_send(struct fake_worker *w, const struct message *m)
{
	struct error e = {""};
	cr_assert_eq(message_encode(m, &w->buffer, &w->len, &w->capacity, &e), STATUS_OK, "%s", e.text);
	zmq_send(w->control, w->buffer, w->len, ZMQ_DONTWAIT);
}

static inline void fake_hello(struct fake_worker *w)
{
	struct message m = {.type = MESSAGE_HELLO};
	struct message_hello *h = &m.hello;
	h->protocol_version = PROTOCOL_VERSION;
	strcpy(h->version, "test");
	strcpy(h->host, "here");
	strcpy(h->device_name, "fake");
	h->pid = 1000 + w->index;
	h->worker_index = w->index;
	h->incarnation = w->incarnation;
	h->threads = 1;
	h->isa = 1;
	h->memory_total_bytes = h->memory_free_bytes = h->memory_limit_bytes = 4ull << 30;
	h->bandwidth_bytes_per_s = 1e10;
	h->matmul_flops = 1e11;
	for (int i = 0; i < DTYPE_COUNT; i++)
		h->weight_ratio[i] = 1;
	fake_send(w, &m);
}

static inline void fake_step(struct fake_worker *w, const struct message *m)
{
	struct sampled_token tokens[FAKE_SLOTS];
	struct message r = {.type = MESSAGE_STEP_RESULT, .epoch = m->epoch, .step = m->step};
	const struct message_step *s = &m->step_;
	cr_assert_eq(m->step, w->done + 1, "step %lu came after %lu", (unsigned long)m->step, (unsigned long)w->done);
	w->done = m->step;
	w->steps++;
	for (uint32_t i = 0; i < s->n_new; i++)
		w->seeds[s->news[i].slot] = s->news[i].sampling.seed;
	if (!w->last)
		return;
	usleep(500); // so that a test can act in the middle of requests
	uint32_t n = 0;
	for (uint32_t i = 0; i < s->n_seqs; i++)
		if (s->seqs[i].sample)
			tokens[n++] = (struct sampled_token){.slot = s->seqs[i].slot,
			                                     .id = fake_token(w->seeds[s->seqs[i].slot], s->seqs[i].start + s->seqs[i].n_tokens)};
	if (w->fault == FAULT_NONSENSE) {
		tokens[n++] = (struct sampled_token){.slot = 63};
		int nonsense = FAULT_NONSENSE;
		atomic_compare_exchange_strong(&w->fault, &nonsense, FAULT_NONE);
	}
	r.result = (struct message_step_result){.micro_batch = s->micro_batch, .n_tokens = n, .tokens = tokens, .stage_us = 100};
	if (w->fault == FAULT_OLD_EPOCH) {
		struct message old = r;
		old.epoch = 1;
		fake_send(w, &old);
	}
	fake_send(w, &r);
}

static inline void fake_configure(struct fake_worker *w, const struct message *m)
{
	int zero = 0;
	if (w->sub)
		zmq_close(w->sub);
	w->sub = zmq_socket(w->zmq, ZMQ_SUB);
	zmq_setsockopt(w->sub, ZMQ_LINGER, &zero, sizeof zero);
	zmq_setsockopt(w->sub, ZMQ_SUBSCRIBE, "", 0);
	zmq_connect(w->sub, m->configure.steps_endpoint);
	w->epoch = m->epoch;
	w->done = 0;
}

static inline void fake_control(struct fake_worker *w, const struct message *m)
{
	if (m->type == MESSAGE_ASSIGN) {
		if (w->fault == FAULT_ERROR_AT_ASSIGN) {
			fake_send(w, &(struct message){.type = MESSAGE_ERROR, .error = {STATUS_REFUSED, "the tensor is not there"}});
			w->fault = FAULT_DIE;
			return;
		}
		w->last = m->assign.stage + 1 == m->assign.n_stages;
		struct message b = {.type = MESSAGE_BUDGET, .budget = {.stage = w->index, .weight_bytes = 1, .n_groups = 1}};
		b.budget.bytes_per_block[0] = 100;
		b.budget.kv_bytes = 100ull * w->kv_blocks;
		snprintf(b.budget.data_address, 256, "unix:%s/data-%u", w->run_dir, w->index);
		fake_send(w, &b);
	} else if (m->type == MESSAGE_CONFIGURE) {
		if (w->fault == FAULT_DIE_AT_CONFIGURE)
			w->fault = FAULT_DIE;
		else
			fake_configure(w, m);
	} else if (m->type == MESSAGE_DRAIN) {
		w->drained = true;
		w->fault = FAULT_DIE;
	}
}

static inline void fake_receive(struct fake_worker *w, void *socket)
{
	zmq_msg_t raw;
	zmq_msg_init(&raw);
	while (w->fault != FAULT_DIE && w->fault != FAULT_HANG && zmq_msg_recv(&raw, socket, ZMQ_DONTWAIT) >= 0) {
		struct message m;
		struct error e = {""};
		cr_assert_eq(message_decode(&m, zmq_msg_data(&raw), zmq_msg_size(&raw), NULL, &e), STATUS_OK, "%s", e.text);
		if (m.type == MESSAGE_STEP && m.epoch == w->epoch)
			fake_step(w, &m);
		else if (m.type == MESSAGE_PROBE && m.epoch == w->epoch)
			fake_send(w, &(struct message){.type = MESSAGE_READY, .epoch = m.epoch});
		else
			fake_control(w, &m);
		message_free(&m);
		if (socket == w->control)
			break; // the other socket may be a new one
	}
	zmq_msg_close(&raw);
}

static inline void *fake_run(void *arg)
{
	struct fake_worker *w = arg;
	char endpoint[160];
	int zero = 0, linger = w->fault == FAULT_ERROR_AT_ASSIGN ? 500 : 0;
	struct timespec beat = {0}, now;
	w->zmq = zmq_ctx_new();
	w->control = zmq_socket(w->zmq, ZMQ_DEALER);
	zmq_setsockopt(w->control, ZMQ_LINGER, &linger, sizeof zero);
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", w->run_dir);
	zmq_connect(w->control, endpoint);
	fake_hello(w);
	while (w->fault != FAULT_DIE) {
		if (w->fault == FAULT_HANG) {
			usleep(10000);
			continue;
		}
		if (w->fault == FAULT_GARBAGE) {
			zmq_send(w->control, "garbage", 7, ZMQ_DONTWAIT);
			int garbage = FAULT_GARBAGE;
			atomic_compare_exchange_strong(&w->fault, &garbage, FAULT_NONE); // it may have been killed meanwhile
		}
		clock_gettime(CLOCK_MONOTONIC, &now);
		if ((now.tv_sec - beat.tv_sec) * 1000 + (now.tv_nsec - beat.tv_nsec) / 1000000 >= 200) {
			beat = now;
			fake_send(w, &(struct message){.type = MESSAGE_HEARTBEAT, .epoch = w->epoch,
			                               .heartbeat = {.last_step_taken = w->done, .last_step_done = w->done, .busy_us = 5}});
		}
		zmq_pollitem_t items[] = {{.socket = w->control, .events = ZMQ_POLLIN}, {.socket = w->sub, .events = ZMQ_POLLIN}};
		zmq_poll(items, w->sub ? 2 : 1, 20);
		if (items[0].revents)
			fake_receive(w, w->control);
		else if (w->sub && items[1].revents)
			fake_receive(w, w->sub);
	}
	if (w->sub)
		zmq_close(w->sub);
	zmq_close(w->control);
	zmq_ctx_term(w->zmq);
	free(w->buffer);
	w->ended = true;
	char line[96];
	int n = snprintf(line, sizeof line, "{\"exit\":%u,\"pid\":1,\"how\":\"signal 9 (SIGKILL)\",\"log\":\"bye\"}\n", w->index);
	if (w->exit_fd >= 0 && !w->drained)
		send(w->exit_fd, line, (size_t)n, MSG_NOSIGNAL);
	return NULL;
}

// All workers of a pipeline, and the launcher that restarts them.
struct fake_pipeline {
	char run_dir[128];
	uint32_t n, kv_blocks;
	struct fake_worker *workers[FAKE_MAX]; // the present process of each
	struct fake_worker *past[64];
	uint32_t n_past;
	int launcher[2];           // [0] ours, [1] the engine's; -1 without launcher
	_Atomic int fault_of_next; // what restarted workers begin with
	_Atomic uint32_t restarts, kills;
	_Atomic bool stop;
	pthread_t thread;
	pthread_mutex_t lock;
};

static inline void fake_spawn(struct fake_pipeline *p, uint32_t index, enum fake_fault fault)
{
	static _Atomic uint64_t incarnations = 1;
	struct fake_worker *w = calloc(1, sizeof *w);
	strcpy(w->run_dir, p->run_dir);
	w->index = index;
	w->n_stages = p->n;
	w->kv_blocks = p->kv_blocks;
	w->incarnation = incarnations++;
	w->fault = fault;
	w->exit_fd = p->launcher[0];
	pthread_mutex_lock(&p->lock);
	if (p->workers[index])
		p->past[p->n_past++] = p->workers[index];
	p->workers[index] = w;
	pthread_mutex_unlock(&p->lock);
	cr_assert_eq(pthread_create(&w->thread, NULL, fake_run, w), 0);
}

static inline struct fake_worker *fake_worker(struct fake_pipeline *p, uint32_t index)
{
	pthread_mutex_lock(&p->lock);
	struct fake_worker *w = p->workers[index];
	pthread_mutex_unlock(&p->lock);
	return w;
}

static inline void *fake_launcher(void *arg)
{
	struct fake_pipeline *p = arg;
	FILE *f = fdopen(dup(p->launcher[0]), "r");
	char line[128];
	unsigned i;
	while (fgets(line, sizeof line, f)) {
		if (p->stop)
			break;
		if (sscanf(line, "{\"restart\":%u}", &i) == 1) {
			p->restarts++;
			fake_spawn(p, i, (enum fake_fault)p->fault_of_next);
		} else if (sscanf(line, "{\"kill\":%u}", &i) == 1) {
			p->kills++;
			fake_worker(p, i)->fault = FAULT_DIE;
		}
	}
	fclose(f);
	return NULL;
}

static inline void fake_begin(struct fake_pipeline *p, uint32_t n, bool launcher)
{
	memset(p, 0, sizeof *p);
	strcpy(p->run_dir, "/tmp/stagecoach-test.XXXXXX");
	cr_assert(mkdtemp(p->run_dir));
	pthread_mutex_init(&p->lock, NULL);
	p->n = n;
	p->kv_blocks = 200;
	p->launcher[0] = p->launcher[1] = -1;
	if (launcher) {
		cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, p->launcher), 0);
		cr_assert_eq(pthread_create(&p->thread, NULL, fake_launcher, p), 0);
	}
}

// After the engine is gone.
static inline void fake_end(struct fake_pipeline *p)
{
	char command[160];
	p->stop = true;
	if (p->launcher[0] >= 0) {
		shutdown(p->launcher[0], SHUT_RDWR);
		pthread_join(p->thread, NULL);
	}
	for (uint32_t i = 0; i < p->n; i++)
		if (p->workers[i])
			p->past[p->n_past++] = p->workers[i];
	for (uint32_t i = 0; i < p->n_past; i++) {
		p->past[i]->fault = FAULT_DIE;
		pthread_join(p->past[i]->thread, NULL);
		free(p->past[i]);
	}
	if (p->launcher[0] >= 0)
		close(p->launcher[0]);
	snprintf(command, sizeof command, "rm -rf %s", p->run_dir);
	cr_assert_eq(system(command), 0);
}

#endif
