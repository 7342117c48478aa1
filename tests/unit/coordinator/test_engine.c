// The engine against workers without a model (fake_worker.h): requests, deaths, hangs, nonsense, epochs, ends.
#include <criterion/criterion.h>
#include <sys/stat.h>

#include "common/log.h"
#include "coordinator/engine.h"
#include "fake_worker.h"

struct answer {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	uint32_t tokens[4][512], n[4], ends[4];
	enum finish_reason finish[4];
	uint32_t n_ended, n_choices, late;
	uint64_t id;
};

struct scene {
	struct fake_pipeline p;
	struct options o;
	struct model *model;
	struct engine *e;
};

static void write_model(const char *dir)
{
	char path[256];
	snprintf(path, sizeof path, "%s/model", dir);
	cr_assert_eq(mkdir(path, 0700), 0);
	strcat(path, "/config.json");
	FILE *f = fopen(path, "w");
	cr_assert(f);
	fprintf(f, "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":128,"
	           "\"num_hidden_layers\":6,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"vocab_size\":%d,"
	           "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"torch_dtype\":\"float32\","
	           "\"hidden_act\":\"silu\",\"tie_word_embeddings\":false}", FAKE_VOCAB);
	fclose(f);
}

static void begin(struct scene *s, uint32_t n, bool launcher)
{
	struct error e = {""};
	char device[] = "cpu/1,cpu/1,cpu/1,cpu/1", run_dir[160], model[160];
	memset(s, 0, sizeof *s);
	log_set_level(LOG_ERROR);
	fake_begin(&s->p, n, launcher);
	write_model(s->p.run_dir);
	snprintf(model, sizeof model, "%s/model", s->p.run_dir);
	snprintf(run_dir, sizeof run_dir, "%s", s->p.run_dir);
	device[n * 6 - 1] = 0;
	char *argv[] = {"serve", model, "--load", "dummy", "--devices", device, "--run-dir", run_dir, "--max-queue", "100"};
	cr_assert_eq(options_parse(&s->o, sizeof argv / sizeof argv[0], argv, &e), STATUS_OK, "%s", e.text);
	s->o.launcher_fd = s->p.launcher[1];
	cr_assert_eq(model_open(&s->model, s->o.model, &(struct model_open_options){.load_dummy = true}, &e), STATUS_OK, "%s", e.text);
}

static void start(struct scene *s)
{
	struct error e = {""};
	cr_assert_eq(engine_create(&s->e, &s->o, s->model, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(engine_start(s->e, &e), STATUS_OK);
}

static void start_ready(struct scene *s, uint32_t n, bool launcher)
{
	struct error e = {""};
	begin(s, n, launcher);
	start(s);
	for (uint32_t i = 0; i < n; i++)
		fake_spawn(&s->p, i, FAULT_NONE);
	cr_assert_eq(engine_wait_ready(s->e, 30000, &e), STATUS_OK, "%s", e.text);
}

static void end(struct scene *s)
{
	engine_destroy(&s->e);
	model_close(&s->model);
	fake_end(&s->p);
}

// ---- requests ------------------------------------------------------------------------------------------------------

static void on_events(void *user, const struct scheduler_event *events, uint32_t count)
{
	struct answer *a = user;
	pthread_mutex_lock(&a->lock);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t c = events[i].choice;
		a->late += a->ends[c] > 0 || events[i].request_id != a->id;
		if (events[i].has_token && a->n[c] < 512)
			a->tokens[c][a->n[c]++] = events[i].token;
		if (events[i].finish != FINISH_NONE) {
			a->finish[c] = events[i].finish;
			a->ends[c]++;
			a->n_ended++;
		}
	}
	pthread_cond_broadcast(&a->changed);
	pthread_mutex_unlock(&a->lock);
}

static enum status submit(struct scene *s, struct answer *a, uint64_t seed, uint32_t n_prompt, uint32_t max_tokens, uint32_t n, struct error *e)
{
	uint32_t prompt[600];
	memset(a, 0, sizeof *a);
	pthread_mutex_init(&a->lock, NULL);
	pthread_cond_init(&a->changed, NULL);
	for (uint32_t i = 0; i < n_prompt && i < 600; i++)
		prompt[i] = (uint32_t)(seed * 13 + i) % FAKE_VOCAB;
	a->id = engine_new_id(s->e);
	a->n_choices = n;
	struct scheduler_request q = {.id = a->id, .prompt = prompt, .n_prompt = n_prompt, .n_choices = n, .max_tokens = max_tokens,
	                              .sampling = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1, .seed = seed}};
	return engine_submit(s->e, &q, on_events, a, e);
}

static void wait_tokens(struct answer *a, uint32_t tokens, bool whole)
{
	struct timespec until;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 30;
	pthread_mutex_lock(&a->lock);
	while (whole ? a->n_ended < a->n_choices : a->n[0] < tokens && !a->n_ended)
		cr_assert_eq(pthread_cond_timedwait(&a->changed, &a->lock, &until), 0, "no end within 30 s: %u tokens, %u of %u choices ended",
		             a->n[0], a->n_ended, a->n_choices);
	pthread_mutex_unlock(&a->lock);
}

static void assert_whole(struct answer *a, uint64_t seed, uint32_t n_prompt, uint32_t max_tokens)
{
	wait_tokens(a, 0, true);
	cr_assert_eq(a->late, 0u);
	for (uint32_t c = 0; c < a->n_choices; c++) {
		cr_assert_eq(a->ends[c], 1u);
		cr_assert_eq(a->finish[c], FINISH_LENGTH, "finish %d", a->finish[c]);
		cr_assert_eq(a->n[c], max_tokens, "%u tokens of %u", a->n[c], max_tokens);
		for (uint32_t i = 0; i < max_tokens; i++)
			cr_assert_eq(a->tokens[c][i], fake_token(seed, n_prompt + i), "token %u is %u, expected %u", i, a->tokens[c][i],
			             fake_token(seed, n_prompt + i));
	}
}

static struct answer answers[64];

static void submit_many(struct scene *s, uint32_t n, uint32_t max_tokens)
{
	struct error e = {""};
	for (uint32_t i = 0; i < n; i++)
		cr_assert_eq(submit(s, &answers[i], i + 1, 5 + i * 7, max_tokens, 1, &e), STATUS_OK, "%s", e.text);
}

static void assert_all_whole(uint32_t n, uint32_t max_tokens)
{
	for (uint32_t i = 0; i < n; i++)
		assert_whole(&answers[i], i + 1, 5 + i * 7, max_tokens);
}

static struct engine_info info;

static const struct engine_info *look(struct scene *s)
{
	engine_get_info(s->e, &info);
	return &info;
}

// Polls a condition on engine_info; fails after the limit.
#define WAIT_FOR(s, limit_ms, condition)                                                                               \
	do {                                                                                                           \
		int left_ = (limit_ms) / 5;                                                                            \
		while (look(s), !(condition) && left_-- > 0)                                                           \
			usleep(5000);                                                                                  \
		cr_assert(condition, "not within %d ms: %s", limit_ms, #condition);                                    \
	} while (0)

// ---- tests ---------------------------------------------------------------------------------------------------------

Test(engine, requests_come_back_whole_through_one_to_four_stages, .timeout = 60)
{
	for (uint32_t n = 1; n <= 4; n++) {
		struct scene s;
		start_ready(&s, n, true);
		submit_many(&s, 12, 40);
		assert_all_whole(12, 40);
		WAIT_FOR(&s, 2000, info.stats.blocks_free == info.stats.blocks_total && info.stats.n_running == 0);
		cr_assert(info.ready && info.healthy && info.state == ENGINE_READY);
		cr_assert_eq(info.n_stages, n);
		end(&s);
	}
}

Test(engine, choices_of_a_request_end_once_each, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	start_ready(&s, 2, true);
	cr_assert_eq(submit(&s, &answers[0], 9, 20, 30, 4, &e), STATUS_OK, "%s", e.text);
	assert_whole(&answers[0], 9, 20, 30);
	end(&s);
}

static void death(uint32_t victim, bool launcher, enum fake_fault fault)
{
	struct scene s;
	start_ready(&s, 3, launcher);
	submit_many(&s, 8, 300);
	wait_tokens(&answers[0], 20, false);
	fake_worker(&s.p, victim)->fault = fault;
	WAIT_FOR(&s, 1500, !info.ready);
	cr_assert(info.healthy);
	if (!launcher)
		fake_spawn(&s.p, victim, FAULT_NONE);
	assert_all_whole(8, 300);
	WAIT_FOR(&s, 3000, info.ready && info.recoveries == 1);
	cr_assert_eq(info.epoch, 2u);
	WAIT_FOR(&s, 2000, info.stats.blocks_free == info.stats.blocks_total);
	end(&s);
}

Test(engine, a_death_of_any_stage_is_a_pause_for_clients, .timeout = 60)
{
	for (uint32_t victim = 0; victim < 3; victim++)
		death(victim, true, FAULT_DIE);
}

Test(engine, without_a_launcher_a_death_is_seen_by_its_closed_connection, .timeout = 60)
{
	death(1, false, FAULT_DIE);
}

Test(engine, a_worker_that_says_that_it_cannot_go_on_is_replaced, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 4, 200);
	wait_tokens(&answers[0], 10, false);
	fake_worker(&s.p, 1)->fault = FAULT_NONSENSE;
	assert_all_whole(4, 200);
	cr_assert_eq(s.p.kills, 1u);
	cr_assert_eq(s.p.restarts, 1u);
	end(&s);
}

Test(engine, a_hung_worker_is_killed_and_replaced, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 4, 200);
	wait_tokens(&answers[0], 10, false);
	fake_worker(&s.p, 1)->fault = FAULT_HANG;
	WAIT_FOR(&s, 4000, !info.ready);
	assert_all_whole(4, 200);
	cr_assert_eq(s.p.kills, 1u);
	end(&s);
}

Test(engine, garbage_of_a_worker_costs_that_worker_only, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 4, 200);
	fake_worker(&s.p, 0)->fault = FAULT_GARBAGE;
	assert_all_whole(4, 200);
	WAIT_FOR(&s, 3000, info.ready && info.recoveries == 1);
	cr_assert_eq(s.p.kills, 1u);
	end(&s);
}

Test(engine, a_stranger_disturbs_nobody, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	void *zmq = zmq_ctx_new();
	char endpoint[160];
	int zero = 0;
	snprintf(endpoint, sizeof endpoint, "ipc://%s/control", s.p.run_dir);
	submit_many(&s, 4, 100);
	for (int i = 0; i < 5; i++) {
		void *z = zmq_socket(zmq, ZMQ_DEALER);
		zmq_setsockopt(z, ZMQ_LINGER, &zero, sizeof zero);
		zmq_connect(z, endpoint);
		uint8_t *data = NULL;
		size_t len = 0, capacity = 0;
		// A result and a hello of a worker that is not expected.
		struct message m = {.type = MESSAGE_STEP_RESULT, .epoch = 1, .step = 3};
		message_encode(&m, &data, &len, &capacity, NULL);
		zmq_send(z, data, len, 0);
		zmq_send(z, "x", 1, ZMQ_SNDMORE);
		zmq_send(z, "three parts", 11, ZMQ_SNDMORE);
		zmq_send(z, "", 0, 0);
		zmq_send(z, "garbage", 7, 0);
		usleep(20000);
		zmq_close(z);
		free(data);
	}
	zmq_ctx_term(zmq);
	assert_all_whole(4, 100);
	cr_assert_eq(look(&s)->recoveries, 0u);
	end(&s);
}

Test(engine, results_of_an_older_epoch_are_dropped, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	s.p.fault_of_next = FAULT_OLD_EPOCH;
	submit_many(&s, 4, 200);
	wait_tokens(&answers[0], 10, false);
	fake_worker(&s.p, 1)->fault = FAULT_DIE;
	assert_all_whole(4, 200);
	cr_assert_eq(look(&s)->recoveries, 1u);
	end(&s);
}

Test(engine, a_stage_that_never_comes_back_ends_every_request_with_a_failure, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	start_ready(&s, 2, true);
	s.p.fault_of_next = FAULT_DIE_AT_CONFIGURE;
	submit_many(&s, 4, 400);
	wait_tokens(&answers[0], 5, false);
	fake_worker(&s.p, 1)->fault = FAULT_DIE;
	for (int i = 0; i < 4; i++) {
		wait_tokens(&answers[i], 0, true);
		cr_assert_eq(answers[i].finish[0], FINISH_FAILED);
		cr_assert_eq(answers[i].ends[0], 1u);
	}
	WAIT_FOR(&s, 1000, info.state == ENGINE_FAILED);
	cr_assert(!info.healthy && !info.ready);
	cr_assert(strstr(info.failure, "restarted 5 times"), "%s", info.failure);
	cr_assert_eq(s.p.restarts, 5u);
	cr_assert_eq(submit(&s, &answers[9], 1, 5, 5, 1, &e), STATUS_UNAVAILABLE);
	end(&s);
}

Test(engine, an_error_while_loading_fails_the_start_with_its_status_and_text, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	begin(&s, 2, true);
	start(&s);
	fake_spawn(&s.p, 0, FAULT_NONE);
	fake_spawn(&s.p, 1, FAULT_ERROR_AT_ASSIGN);
	cr_assert_eq(engine_wait_ready(s.e, 30000, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "stage 1") && strstr(e.text, "the tensor is not there"), "%s", e.text);
	end(&s);
}

Test(engine, too_few_blocks_for_the_context_asked_for_are_refused_with_numbers, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	begin(&s, 2, true);
	s.o.max_context = 512;
	s.p.kv_blocks = 31;
	start(&s);
	fake_spawn(&s.p, 0, FAULT_NONE);
	fake_spawn(&s.p, 1, FAULT_NONE);
	cr_assert_eq(engine_wait_ready(s.e, 30000, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "31 blocks") && strstr(e.text, "needs 32"), "%s", e.text);
	end(&s);
}

Test(engine, what_cannot_be_taken_is_refused_at_once, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	begin(&s, 1, true);
	start(&s);
	cr_assert_eq(submit(&s, &answers[0], 1, 5, 5, 1, &e), STATUS_UNAVAILABLE);
	fake_spawn(&s.p, 0, FAULT_NONE);
	cr_assert_eq(engine_wait_ready(s.e, 30000, &e), STATUS_OK, "%s", e.text);
	cr_assert_eq(look(&s)->max_context, 512u);
	cr_assert_eq(submit(&s, &answers[0], 1, 512, 1, 1, &e), STATUS_INVALID);
	cr_assert(strstr(e.text, "512"), "%s", e.text);
	cr_assert_eq(submit(&s, &answers[0], 1, 500, 13, 1, &e), STATUS_INVALID);
	cr_assert_eq(submit(&s, &answers[0], 1, 500, 12, 1, &e), STATUS_OK, "%s", e.text);
	assert_whole(&answers[0], 1, 500, 12);
	end(&s);
}

Test(engine, a_full_queue_is_busy_and_empties_again, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	enum status status = STATUS_OK;
	static struct answer many[2000];
	uint32_t n = 0;
	start_ready(&s, 1, true);
	fake_worker(&s.p, 0)->fault = FAULT_HANG; // nothing moves for a while
	for (; n < 2000 && status == STATUS_OK; n++)
		status = submit(&s, &many[n], n, 8, 2, 1, &e);
	cr_assert_eq(status, STATUS_BUSY, "%s", e.text);
	n--;
	cr_assert_geq(n, 100u);
	fake_worker(&s.p, 0)->fault = FAULT_NONE;
	for (uint32_t i = 0; i < n; i++)
		assert_whole(&many[i], i, 8, 2);
	WAIT_FOR(&s, 1000, info.stats.n_queued_requests == 0);
	cr_assert_eq(submit(&s, &answers[0], 1, 5, 5, 1, &e), STATUS_OK, "%s", e.text);
	assert_whole(&answers[0], 1, 5, 5);
	end(&s);
}

Test(engine, a_cancelled_request_ends_once_and_frees_its_blocks, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 6, 400);
	for (uint32_t i = 0; i < 6; i += 2)
		engine_cancel(s.e, answers[i].id);
	engine_stop_choice(s.e, answers[1].id, 0);
	engine_cancel(s.e, 987654);
	for (uint32_t i = 0; i < 6; i++) {
		wait_tokens(&answers[i], 0, true);
		cr_assert_eq(answers[i].ends[0], 1u);
		cr_assert_eq(answers[i].finish[0], i == 1 ? FINISH_STOP : i % 2 ? FINISH_LENGTH : FINISH_CANCELLED);
	}
	WAIT_FOR(&s, 2000, info.stats.blocks_free == info.stats.blocks_total);
	end(&s);
}

Test(engine, draining_finishes_what_runs_and_refuses_what_comes, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	start_ready(&s, 2, true);
	submit_many(&s, 4, 200);
	wait_tokens(&answers[0], 5, false);
	engine_drain(s.e);
	cr_assert(!look(&s)->ready);
	cr_assert_eq(submit(&s, &answers[9], 1, 5, 5, 1, &e), STATUS_UNAVAILABLE);
	assert_all_whole(4, 200);
	WAIT_FOR(&s, 2000, info.state == ENGINE_ENDED);
	for (int left = 200; left > 0 && !(fake_worker(&s.p, 0)->drained && fake_worker(&s.p, 1)->drained); left--)
		usleep(10000);
	cr_assert(fake_worker(&s.p, 0)->drained && fake_worker(&s.p, 1)->drained);
	end(&s);
}

Test(engine, a_death_while_draining_still_lets_requests_finish, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 4, 300);
	wait_tokens(&answers[0], 5, false);
	engine_drain(s.e);
	fake_worker(&s.p, 0)->fault = FAULT_DIE;
	assert_all_whole(4, 300);
	WAIT_FOR(&s, 2000, info.state == ENGINE_ENDED);
	end(&s);
}

Test(engine, ending_at_once_fails_what_runs, .timeout = 60)
{
	struct scene s;
	start_ready(&s, 2, true);
	submit_many(&s, 4, 400);
	wait_tokens(&answers[0], 5, false);
	engine_destroy(&s.e);
	for (int i = 0; i < 4; i++)
		cr_assert(answers[i].ends[0] == 1 && (answers[i].finish[0] == FINISH_FAILED || answers[i].finish[0] == FINISH_LENGTH));
	end(&s);
}

Test(engine, a_trace_names_every_stage_and_is_json, .timeout = 60)
{
	struct scene s;
	struct error e = {""};
	begin(&s, 2, true);
	snprintf(s.o.trace, sizeof s.o.trace, "%s/trace.json", s.p.run_dir);
	start(&s);
	fake_spawn(&s.p, 0, FAULT_NONE);
	fake_spawn(&s.p, 1, FAULT_NONE);
	cr_assert_eq(engine_wait_ready(s.e, 30000, &e), STATUS_OK, "%s", e.text);
	engine_destroy(&s.e);
	char text[8192];
	FILE *f = fopen(s.o.trace, "r");
	cr_assert(f);
	size_t n = fread(text, 1, sizeof text - 1, f);
	text[n] = 0;
	fclose(f);
	cr_assert(strstr(text, "stage 0 (cpu on here)") && strstr(text, "stage 1 (cpu on here)") && strstr(text, "\n]}\n"), "%s", text);
	end(&s);
}
