// Whole workers, as processes of their own, under a coordinator made up here: the life from hello to drain, and what they do
// when a neighbour, the coordinator or the numbering of steps fails them.
#include <criterion/criterion.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include "common/log.h"
#include "worker/ring.h"
#include "worker/worker.h"

enum { WORKERS = 2, TRIES = 2, WAIT_MS = 20000, BLOCKS = 32 };

struct candidate { pid_t pid; int watch, gate; };

struct fake {
	char folder[64], model[1024];
	void *zmq, *router, *steps;
	pid_t pid[WORKERS];
	int watch[WORKERS];
	struct candidate candidate[WORKERS][TRIES];
	int tries[WORKERS];
	uint8_t id[WORKERS][64];
	size_t id_len[WORKERS];
	struct message budget[WORKERS];
	uint32_t epoch;
	uint64_t step;
};

static struct fake f;

// A process that becomes worker `index` once its gate is opened. All are forked before this process has threads, since
// ThreadSanitizer does not follow a fork after that.
static struct candidate prepare_worker(int index)
{
	struct candidate c;
	int watch[2], gate[2];
	cr_assert_eq(pipe(watch), 0);
	cr_assert_eq(pipe(gate), 0);
	c.pid = fork();
	cr_assert_geq(c.pid, 0);
	if (c.pid == 0) {
		static struct options o;
		char byte;
		close(watch[0]);
		close(gate[1]);
		if (read(gate[0], &byte, 1) != 1)
			_exit(0);
		snprintf(o.run_dir, sizeof o.run_dir, "%s", f.folder);
		o.worker_index = (uint32_t)index;
		o.watch_fd = watch[1];
		o.n_devices = WORKERS;
		for (int i = 0; i < WORKERS; i++)
			o.devices[i] = (struct option_device){.kind = OPTION_DEVICE_CPU, .threads = 1};
		o.n_memory = 1;
		o.memory[0] = (struct option_memory){.bytes = 512u << 20};
		log_set_level(LOG_ERROR);
		_exit(worker_run(&o));
	}
	close(watch[1]);
	close(gate[0]);
	c.watch = watch[0];
	c.gate = gate[1];
	return c;
}

// The next process for this place; there are TRIES.
static void start_worker(int index)
{
	cr_assert_lt(f.tries[index], TRIES);
	struct candidate *c = &f.candidate[index][f.tries[index]++];
	f.pid[index] = c->pid;
	f.watch[index] = c->watch;
	f.id_len[index] = 0;
	c->pid = 0;
	cr_assert_eq(write(c->gate, "", 1), 1);
}

static void open_sockets(void)
{
	char endpoint[128];
	f.zmq = zmq_ctx_new();
	f.router = zmq_socket(f.zmq, ZMQ_ROUTER);
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", f.folder);
	cr_assert_eq(zmq_bind(f.router, endpoint), 0);
}

static void setup(void)
{
	strcpy(f.folder, "/tmp/stagecoach-worker-XXXXXX");
	cr_assert_not_null(mkdtemp(f.folder));
	snprintf(f.model, sizeof f.model, "%s/model.gguf", f.folder);
	char command[2400];
	snprintf(command, sizeof command, "cp '%s/golden/tiny/llama-quantised.gguf' '%s'", TEST_DATA_DIR, f.model);
	cr_assert_eq(system(command), 0);
	for (int i = 0; i < WORKERS; i++)
		for (int k = 0; k < TRIES; k++)
			f.candidate[i][k] = prepare_worker(i);
	for (int i = 0; i < WORKERS; i++)
		start_worker(i);
	open_sockets();
}

static void close_sockets(void)
{
	int linger = 0;
	void **all[] = {&f.steps, &f.router};
	for (int i = 0; i < 2; i++)
		if (*all[i]) {
			zmq_setsockopt(*all[i], ZMQ_LINGER, &linger, sizeof linger);
			zmq_close(*all[i]);
			*all[i] = NULL;
		}
	if (f.zmq)
		zmq_ctx_term(f.zmq);
	f.zmq = NULL;
}

static void end_process(pid_t pid)
{
	if (pid > 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
}

static void teardown(void)
{
	char command[128];
	close_sockets();
	for (int i = 0; i < WORKERS; i++)
		end_process(f.pid[i]);
	for (int i = 0; i < WORKERS * TRIES; i++)
		end_process(f.candidate[i / TRIES][i % TRIES].pid);
	snprintf(command, sizeof command, "rm -r '%s'", f.folder);
	cr_expect_eq(system(command), 0);
}

static void send_to(int index, const struct message *m)
{
	uint8_t *data = NULL;
	size_t len, capacity = 0;
	struct error e = {""};
	cr_assert_eq(message_encode(m, &data, &len, &capacity, &e), STATUS_OK, "%s", e.text);
	cr_assert_geq(zmq_send(f.router, f.id[index], f.id_len[index], ZMQ_SNDMORE), 0);
	cr_assert_geq(zmq_send(f.router, data, len, 0), 0);
	free(data);
}

// Waits for the next message of `type` from worker `index` (-1: any; which one is returned; -1 if none came in time).
static int await_within(unsigned wait_ms, int index, enum message_type type, struct message *out)
{
	uint64_t deadline = ring_now_us() + wait_ms * 1000ull;
	while (ring_now_us() < deadline) {
		static uint8_t data[1 << 20];
		uint8_t id[64];
		struct error e = {""};
		zmq_pollitem_t p = {.socket = f.router, .events = ZMQ_POLLIN};
		if (zmq_poll(&p, 1, 10) <= 0)
			continue;
		int id_len = zmq_recv(f.router, id, sizeof id, 0), len = zmq_recv(f.router, data, sizeof data, 0);
		struct message m;
		cr_assert_eq(message_decode(&m, data, (size_t)len, NULL, &e), STATUS_OK, "%s", e.text);
		int from = -1;
		for (int i = 0; i < WORKERS; i++)
			if (f.id_len[i] == (size_t)id_len && !memcmp(f.id[i], id, (size_t)id_len))
				from = i;
		if (m.type == MESSAGE_HELLO) {
			from = (int)m.hello.worker_index;
			cr_assert_lt(from, WORKERS);
			memcpy(f.id[from], id, (size_t)id_len);
			f.id_len[from] = (size_t)id_len;
		}
		if (m.type == MESSAGE_ERROR && type != MESSAGE_ERROR)
			cr_assert_fail("worker %d: %s", from, m.error.text);
		if (m.type == type && from >= 0 && (index < 0 || index == from)) {
			if (out)
				*out = m;
			else
				message_free(&m);
			return from;
		}
		message_free(&m);
	}
	return -1;
}

static int await(int index, enum message_type type, struct message *out)
{
	int from = await_within(WAIT_MS, index, type, out);
	cr_assert_geq(from, 0, "no %s within %d ms", message_type_name(type), WAIT_MS);
	return from;
}

static void assign(int index)
{
	struct message m = {.type = MESSAGE_ASSIGN};
	m.assign = (struct message_assign){
		.stage = (uint32_t)index, .n_stages = WORKERS, .n_ranks = 1, .first_layer = (uint32_t)index, .n_layers = 1,
		.has_embedding = index == 0, .has_head = index == WORKERS - 1, .act_dtype = DTYPE_F32, .kv_dtype = DTYPE_F16,
		.block_size = 16, .max_seqs = 8, .max_batch_tokens = 64, .max_context = 128};
	snprintf(m.assign.model_path, sizeof m.assign.model_path, "%s", f.model);
	send_to(index, &m);
	await(index, MESSAGE_BUDGET, &f.budget[index]);
	cr_assert_gt(f.budget[index].budget.kv_bytes, 0);
	cr_assert_gt(f.budget[index].budget.bytes_per_block[0], 0);
}

static void broadcast(const struct message *m)
{
	uint8_t *data = NULL;
	size_t len, capacity = 0;
	struct error e = {""};
	cr_assert_eq(message_encode(m, &data, &len, &capacity, &e), STATUS_OK, "%s", e.text);
	cr_assert_geq(zmq_send(f.steps, data, len, 0), 0);
	free(data);
}

static void configure(void)
{
	struct message m = {.type = MESSAGE_CONFIGURE, .epoch = ++f.epoch, .configure = {.n_groups = 1, .n_blocks = {BLOCKS}}};
	int on = 1, ready[WORKERS] = {0}, n_ready = 0;
	if (f.steps)
		zmq_close(f.steps);
	f.steps = zmq_socket(f.zmq, ZMQ_XPUB);
	zmq_setsockopt(f.steps, ZMQ_XPUB_NODROP, &on, sizeof on);
	snprintf(m.configure.steps_endpoint, sizeof m.configure.steps_endpoint, "ipc://%s/steps-%u", f.folder, f.epoch);
	cr_assert_eq(zmq_bind(f.steps, m.configure.steps_endpoint), 0);
	f.step = 0;
	for (int i = 0; i < WORKERS; i++) {
		memset(m.configure.next_address, 0, sizeof m.configure.next_address);
		if (i + 1 < WORKERS)
			memcpy(m.configure.next_address, f.budget[i + 1].budget.data_address, sizeof m.configure.next_address);
		memcpy(m.configure.first_address, f.budget[0].budget.data_address, sizeof m.configure.first_address);
		send_to(i, &m);
	}
	for (int tries = 0; n_ready < WORKERS && tries < 200; tries++) {
		broadcast(&(struct message){.type = MESSAGE_PROBE, .epoch = f.epoch});
		struct message r;
		int from = await_within(50, -1, MESSAGE_READY, &r);
		if (from < 0)
			continue; // who subscribes late has missed it
		if (r.epoch == f.epoch && !ready[from]) {
			ready[from] = 1;
			n_ready++;
		}
		message_free(&r);
	}
	cr_assert_eq(n_ready, WORKERS);
}

static void start(void)
{
	for (int i = 0; i < WORKERS; i++)
		await(-1, MESSAGE_HELLO, NULL);
	for (int i = 0; i < WORKERS; i++)
		assign(i);
	configure();
}

static struct message first_step(void)
{
	static uint32_t tokens[20], blocks[4] = {5, 9, 2, 7};
	static struct step_new fresh = {.slot = 2, .n_prompt = 20, .sampling = {.top_p = 1, .repetition_penalty = 1}};
	static struct step_seq seq = {.slot = 2, .n_tokens = 20, .sample = true, .n_blocks = {4}};
	for (uint32_t i = 0; i < 20; i++)
		tokens[i] = 7 * i + 3;
	return (struct message){.type = MESSAGE_STEP, .epoch = f.epoch, .step = ++f.step,
	                        .step_ = {.n_new = 1, .news = &fresh, .n_seqs = 1, .seqs = &seq, .n_tokens = 20,
	                                  .tokens = tokens, .n_blocks = 4, .blocks = blocks}};
}

static struct message decode_step(uint32_t start)
{
	static struct step_seq seq;
	seq = (struct step_seq){.slot = 2, .start = start, .n_tokens = 1, .sample = true, .by_reference = true,
	                        .ref_step = f.step};
	return (struct message){.type = MESSAGE_STEP, .epoch = f.epoch, .step = ++f.step, .step_ = {.n_seqs = 1, .seqs = &seq}};
}

// Eight greedy tokens; each decode step is broadcast before the token it continues has come back.
static void generate(uint32_t ids[8])
{
	struct message m = first_step(), r;
	broadcast(&m);
	for (uint32_t i = 0; i < 8; i++) {
		if (i < 7) {
			m = decode_step(20 + i);
			broadcast(&m);
		}
		await(WORKERS - 1, MESSAGE_STEP_RESULT, &r);
		cr_assert_eq(r.epoch, f.epoch);
		cr_assert_eq(r.step, i + 1);
		cr_assert_eq(r.result.n_tokens, 1);
		cr_assert_eq(r.result.tokens[0].slot, 2);
		ids[i] = r.result.tokens[0].id;
		message_free(&r);
	}
}

static int exit_status(int index, unsigned within_ms)
{
	int status = -1;
	for (uint64_t end = ring_now_us() + within_ms * 1000ull; ring_now_us() < end; usleep(5000))
		if (waitpid(f.pid[index], &status, WNOHANG) == f.pid[index]) {
			f.pid[index] = 0;
			return status;
		}
	cr_assert_fail("worker %d has not ended within %u ms", index, within_ms);
	return -1;
}

Test(worker, steps_run_through_two_workers_and_drain_ends_them, .init = setup, .fini = teardown, .timeout = 60)
{
	uint32_t ids[8];
	start();
	generate(ids);
	for (int i = 0; i < WORKERS; i++)
		send_to(i, &(struct message){.type = MESSAGE_DRAIN, .epoch = f.epoch});
	for (int i = 0; i < WORKERS; i++) {
		int status = exit_status(i, 5000);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "worker %d ended with %x", i, status);
	}
}

Test(worker, a_survivor_keeps_its_weights_and_joins_the_next_epoch, .init = setup, .fini = teardown, .timeout = 90)
{
	uint32_t before[8], after[8];
	start();
	generate(before);
	for (int dead = 0; dead < WORKERS; dead++) {
		kill(f.pid[dead], SIGKILL);
		waitpid(f.pid[dead], NULL, 0);
		start_worker(dead);
		await(dead, MESSAGE_HELLO, NULL);
		assign(dead);
		configure();
		generate(after);
		cr_expect(!memcmp(before, after, sizeof before), "other tokens after worker %d was replaced", dead);
	}
}

Test(worker, a_new_epoch_frees_a_worker_that_waits_for_data, .init = setup, .fini = teardown, .timeout = 60)
{
	uint32_t before[8], after[8];
	start();
	generate(before);
	// A row that names a token of a step that samples, but stage 1 is stopped: stage 0 waits for its ids.
	kill(f.pid[1], SIGSTOP);
	struct message m = decode_step(27);
	broadcast(&m);
	m = decode_step(28);
	broadcast(&m);
	usleep(100000);
	kill(f.pid[1], SIGCONT);
	configure();
	generate(after);
	cr_expect(!memcmp(before, after, sizeof before));
}

Test(worker, steps_of_an_epoch_that_is_over_are_dropped, .init = setup, .fini = teardown, .timeout = 60)
{
	uint32_t before[8], after[8];
	start();
	generate(before);
	configure();
	struct message old = first_step();
	old.epoch--;
	old.step = 9;
	broadcast(&old);
	f.step = 0;
	generate(after);
	cr_expect(!memcmp(before, after, sizeof before));
}

Test(worker, a_gap_in_step_numbers_is_an_error_that_both_workers_report, .init = setup, .fini = teardown, .timeout = 60)
{
	struct message r;
	start();
	f.step = 1;
	struct message m = first_step();
	broadcast(&m);
	for (int i = 0; i < WORKERS; i++) {
		await(-1, MESSAGE_ERROR, &r);
		cr_expect(strstr(r.error.text, "step 2 came after step 0"), "%s", r.error.text);
		message_free(&r);
	}
	for (int i = 0; i < WORKERS; i++) {
		int status = exit_status(i, 5000);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == STATUS_FATAL);
	}
}

Test(worker, a_step_for_an_unknown_slot_is_an_error, .init = setup, .fini = teardown, .timeout = 60)
{
	struct message r;
	start();
	struct message m = decode_step(0);
	m.step_.seqs = &(struct step_seq){.slot = 5, .n_tokens = 1, .first_token = 0};
	m.step_.n_tokens = 1;
	m.step_.tokens = (const uint32_t[]){1};
	broadcast(&m);
	await(0, MESSAGE_ERROR, &r);
	cr_expect(strstr(r.error.text, "slot 5"), "%s", r.error.text);
	message_free(&r);
}

Test(worker, a_model_that_does_not_exist_is_refused, .init = setup, .fini = teardown, .timeout = 60)
{
	struct message r, m = {.type = MESSAGE_ASSIGN};
	await(-1, MESSAGE_HELLO, NULL);
	await(-1, MESSAGE_HELLO, NULL);
	m.assign = (struct message_assign){.n_stages = 1, .n_ranks = 1, .n_layers = 1, .has_embedding = true, .has_head = true,
	                                   .act_dtype = DTYPE_F32, .kv_dtype = DTYPE_F16, .block_size = 16, .max_seqs = 1,
	                                   .max_batch_tokens = 1, .max_context = 1};
	snprintf(m.assign.model_path, sizeof m.assign.model_path, "/no/such/model.gguf");
	send_to(0, &m);
	await(0, MESSAGE_ERROR, &r);
	cr_expect_eq(r.error.status, STATUS_REFUSED);
	cr_expect(strstr(r.error.text, "/no/such/model.gguf"), "%s", r.error.text);
	message_free(&r);
	int status = exit_status(0, 5000);
	cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == STATUS_REFUSED);
}

Test(worker, workers_end_within_five_seconds_of_their_coordinator, .init = setup, .fini = teardown, .timeout = 60)
{
	start();
	close_sockets();
	for (int i = 0; i < WORKERS; i++) {
		int status = exit_status(i, 5000);
		cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == STATUS_FATAL);
	}
}

Test(worker, a_coordinator_that_comes_back_is_told_hello_and_finds_the_weights_kept, .init = setup, .fini = teardown,
     .timeout = 60)
{
	uint32_t before[8], after[8];
	start();
	generate(before);
	close_sockets();
	open_sockets();
	memset(f.id_len, 0, sizeof f.id_len);
	cr_assert_eq(unlink(f.model), 0); // nothing is loaded again
	start();
	generate(after);
	cr_expect(!memcmp(before, after, sizeof before));
}

Test(worker, signs_of_life_come_from_the_first_moment, .init = setup, .fini = teardown, .timeout = 60)
{
	char byte;
	for (int n = 0; n < 4; n++) {
		struct pollfd p = {.fd = f.watch[0], .events = POLLIN};
		cr_assert_eq(poll(&p, 1, 5000), 1);
		cr_assert_eq(read(f.watch[0], &byte, 1), 1);
	}
}
