// Histories of events and what recovery.c wants done about them. A history is text: one word per event, `>` begins what
// has to come out. Times are milliseconds.
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/recovery.h"

static const char labels[3][96] = {"stage 0", "stage 1", "stage 2"};

struct history {
	struct recovery *r;
	uint32_t n;
	uint64_t now_us;
	char said[4096]; // actions as words
	char last_text[512];
	enum status status;
};

static void begin(struct history *h, uint32_t n, bool launcher)
{
	struct recovery_options o = {
		.n_workers = n, .hello_limit_us = 30000000, .rejoin_limit_us = 60000000, .silent_limit_us = 5000000,
		.lost_limit_us = 900000, .load_limit_us = 120000000, .join_limit_us = 30000000, .exit_limit_us = 10000000,
		.labels = labels,
	};
	for (uint32_t i = 0; i < n; i++)
		o.has_launcher[i] = launcher;
	memset(h, 0, sizeof *h);
	h->n = n;
	h->now_us = 1000000;
	h->r = recovery_create(&o, h->now_us);
}

static void collect(struct history *h)
{
	static const char *const names[] = {"plan", "assign", "configure", "run", "suspend", "kill", "restart", "fail"};
	struct recovery_action a;
	while (recovery_next_action(h->r, &a)) {
		char word[32];
		bool numbered = a.kind == ACTION_ASSIGN || a.kind == ACTION_KILL || a.kind == ACTION_RESTART;
		snprintf(word, sizeof word, numbered ? "%s%u " : "%s ", names[a.kind], a.worker);
		cr_assert_lt(strlen(h->said) + strlen(word), sizeof h->said);
		strcat(h->said, word);
		if (a.text[0])
			strcpy(h->last_text, a.text);
		if (a.kind == ACTION_FAIL)
			h->status = a.status;
	}
}

static void happens(struct history *h, struct recovery_event e)
{
	recovery_event(h->r, &e, h->now_us);
	collect(h);
}

// Time passes in ticks of 50 ms; `signs` is a set of workers that send heartbeats meanwhile.
static void pass(struct history *h, uint64_t ms, uint32_t signs)
{
	for (uint64_t end = h->now_us + ms * 1000; h->now_us < end;) {
		h->now_us += 50000;
		for (uint32_t i = 0; i < h->n; i++)
			if (signs & 1u << i)
				happens(h, (struct recovery_event){.kind = EVENT_SIGN, .worker = i});
		happens(h, (struct recovery_event){.kind = EVENT_TICK});
	}
}

static void play(struct history *h, const char *words)
{
	char *copy = strdup(words), *save = NULL;
	for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
		char name[32];
		unsigned n = 0;
		cr_assert_geq(sscanf(w, "%31[a-z]%u", name, &n), 1);
		static const struct { const char *name; enum recovery_event_kind kind; } rows[] = {
			{"hello", EVENT_HELLO}, {"planned", EVENT_PLANNED}, {"progress", EVENT_PROGRESS}, {"budget", EVENT_BUDGET},
			{"ready", EVENT_READY}, {"exit", EVENT_EXIT}, {"error", EVENT_ERROR}, {"broken", EVENT_BROKEN},
			{"disconnect", EVENT_DISCONNECT}, {"token", EVENT_TOKEN},
		};
		bool known = false;
		for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
			if (!strcmp(rows[i].name, name)) {
				happens(h, (struct recovery_event){.kind = rows[i].kind, .worker = n, .status = rows[i].kind == EVENT_ERROR ? STATUS_REFUSED : STATUS_OK,
				                                   .text = "signal 9 (SIGKILL)"});
				known = true;
			}
		if (!strcmp(name, "wait")) { // everyone alive sends signs
			pass(h, n, 7);
			known = true;
		}
		cr_assert(known, "no event %s", w);
	}
	free(copy);
}

#define START2 "hello0 hello1 planned budget0 budget1 ready0 ready1 "
#define STARTED2 "plan assign0 assign1 configure run "

struct row { const char *name, *events, *actions; };

static const struct row rows[] = {
	{"two workers start", START2, STARTED2},
	{"order of hellos and budgets does not matter", "hello1 hello0 planned budget1 budget0 ready1 ready0", STARTED2},
	{"readiness of an unconfigured worker counts for nothing", "hello0 hello1 ready0 ready1 planned ready0", "plan assign0 assign1 "},
	{"a death is followed by a restart and a new epoch", START2 "exit1 wait50 hello1 budget1 ready0 ready1",
	 STARTED2 "suspend restart1 assign1 configure run "},
	{"the survivor keeps its weights", START2 "exit0 wait50 hello0 budget0 ready0 ready1", STARTED2 "suspend restart0 assign0 configure run "},
	{"both die", START2 "exit0 exit1 wait50 hello1 hello0 budget1 budget0 ready0 ready1",
	 STARTED2 "suspend suspend restart0 restart1 assign1 assign0 configure run "},
	{"the other one dies while the first loads", START2 "exit1 wait50 hello1 exit0 wait50 budget1 hello0 budget0 ready0 ready1",
	 STARTED2 "suspend restart1 assign1 suspend restart0 assign0 configure run "},
	{"one dies while the new epoch is joined", START2 "exit1 wait50 hello1 budget1 ready0 exit1 wait250 hello1 budget1 ready0 ready1",
	 STARTED2 "suspend restart1 assign1 configure suspend restart1 assign1 configure run "},
	{"an error is followed by a kill, and the restart waits for the end", START2 "error0 wait200 exit0 wait50 hello0",
	 STARTED2 "suspend kill0 restart0 assign0 "},
	{"an end is reported twice", START2 "exit1 exit1 wait50 hello1", STARTED2 "suspend restart1 assign1 "},
	{"events of a dying worker are not its return", START2 "broken1 budget1 ready1 wait100", STARTED2 "suspend kill1 "},
	{"a closed connection of a living worker is nothing", START2 "disconnect wait2000", STARTED2},
};

Test(recovery, histories_lead_to_the_right_actions)
{
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
		struct history h;
		begin(&h, 2, true);
		play(&h, rows[i].events);
		cr_assert_str_eq(h.said, rows[i].actions, "%s:\n  came     %s\n  expected %s", rows[i].name, h.said, rows[i].actions);
		recovery_destroy(&h.r);
	}
}

static const struct row without_launcher[] = {
	{"a new process takes the place of a dead one", START2 "hello1 budget1 ready0 ready1", STARTED2 "suspend assign1 configure run "},
	{"it is told to end and nobody restarts it", START2 "error1 wait1000 hello1", STARTED2 "suspend kill1 assign1 "},
};

Test(recovery, without_a_launcher_it_waits_for_a_new_process)
{
	for (size_t i = 0; i < sizeof without_launcher / sizeof without_launcher[0]; i++) {
		struct history h;
		begin(&h, 2, false);
		play(&h, without_launcher[i].events);
		cr_assert_str_eq(h.said, without_launcher[i].actions, "%s: %s", without_launcher[i].name, h.said);
		recovery_destroy(&h.r);
	}
}

Test(recovery, before_the_first_run_every_end_fails_the_start)
{
	static const struct { const char *events, *text; enum status status; } cases[] = {
		{"hello0 exit1", "stage 1 ended (signal 9 (SIGKILL)) before its hello", STATUS_FATAL},
		{"hello0 hello1 planned exit0", "stage 0 ended (signal 9 (SIGKILL)) while it loaded", STATUS_FATAL},
		{"hello0 hello1 planned budget0 exit0", "stage 0 ended (signal 9 (SIGKILL)) after it had loaded", STATUS_FATAL},
		{"hello0 hello1 planned error1", "signal 9 (SIGKILL)", STATUS_REFUSED},
		{"hello0 wait31000", "stage 1 did not say hello within 30 s", STATUS_FATAL},
		{"hello0 hello1 planned wait121000", "stage 0 made no progress in loading", STATUS_FATAL},
		{"hello0 hello1 planned budget0 budget1 ready0 wait31000", "stage 1 did not join the pipeline within 30 s", STATUS_FATAL},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct history h;
		begin(&h, 2, true);
		play(&h, cases[i].events);
		cr_assert(strstr(h.said, "fail "), "case %zu: %s", i, h.said);
		cr_assert(strstr(h.last_text, cases[i].text), "case %zu: %s", i, h.last_text);
		cr_assert_eq(h.status, cases[i].status, "case %zu: %d", i, h.status);
		h.said[0] = 0;
		play(&h, "hello0 hello1 budget0 wait1000");
		cr_assert_str_eq(h.said, "", "after the end came %s", h.said);
		recovery_destroy(&h.r);
	}
}

Test(recovery, restarts_without_a_token_wait_longer_and_end)
{
	static const uint64_t delays_ms[] = {0, 200, 1000, 2000, 4000};
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	for (int k = 0; k < 5; k++) {
		h.said[0] = 0;
		play(&h, "exit1");
		cr_assert_str_eq(h.said, "suspend ");
		uint64_t waited = 0;
		for (; !strstr(h.said, "restart1"); waited += 50) {
			cr_assert_leq(waited, delays_ms[k] + 50, "attempt %d: no restart after %llu ms", k, (unsigned long long)waited);
			pass(&h, 50, 1);
		}
		cr_assert_geq(waited, delays_ms[k], "attempt %d: restarted after %llu ms", k, (unsigned long long)waited);
		play(&h, "hello1 budget1 ready0 ready1");
	}
	play(&h, "exit1");
	cr_assert(strstr(h.last_text, "restarted 5 times without a token"), "%s", h.last_text);
	cr_assert_eq(h.status, STATUS_FATAL);
	recovery_destroy(&h.r);
}

Test(recovery, a_token_makes_the_restarts_count_from_the_beginning)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	for (int k = 0; k < 20; k++) {
		play(&h, "exit1 wait50 hello1 budget1 ready0 ready1 token");
		cr_assert(!strstr(h.said, "fail"), "round %d", k);
	}
	recovery_destroy(&h.r);
}

Test(recovery, a_silent_worker_is_killed_after_five_seconds_and_not_before)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	h.said[0] = 0;
	pass(&h, 4950, 1);
	cr_assert_str_eq(h.said, "");
	pass(&h, 150, 1);
	cr_assert_str_eq(h.said, "suspend kill1 ");
	cr_assert(strstr(h.last_text, "stage 1 gave no sign of life"), "%s", h.last_text);
	recovery_destroy(&h.r);
}

Test(recovery, a_stopped_worker_that_continues_in_time_is_left_alone)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	h.said[0] = 0;
	pass(&h, 4500, 1);
	pass(&h, 10000, 3);
	cr_assert_str_eq(h.said, "");
	cr_assert(recovery_running(h.r));
	recovery_destroy(&h.r);
}

static void holds(struct history *h, uint32_t worker, uint64_t step, uint64_t held_ms)
{
	happens(h, (struct recovery_event){.kind = EVENT_HOLDING, .worker = worker, .step = step, .held_us = held_ms * 1000,
	                                   .expected_us = 20000});
}

Test(recovery, of_stages_that_wait_for_each_other_the_one_with_the_oldest_step_is_killed)
{
	struct history h;
	begin(&h, 3, true);
	play(&h, "hello0 hello1 hello2 planned budget0 budget1 budget2 ready0 ready1 ready2");
	h.said[0] = 0;
	holds(&h, 1, 7, 4000);
	holds(&h, 2, 7, 4000); // waits for the hidden states of stage 1
	holds(&h, 0, 8, 5100); // waits for the ids of step 7
	cr_assert_str_eq(h.said, "suspend kill1 ");
	cr_assert(strstr(h.last_text, "stage 1 has held step 7"), "%s", h.last_text);
	recovery_destroy(&h.r);
}

Test(recovery, a_stage_that_waits_for_a_silent_one_is_left_alone)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	h.said[0] = 0;
	pass(&h, 4900, 1);
	holds(&h, 0, 8, 5100);
	cr_assert_str_eq(h.said, "");
	pass(&h, 200, 1);
	cr_assert_str_eq(h.said, "suspend kill1 ");
	cr_assert(strstr(h.last_text, "stage 1 gave no sign of life"), "%s", h.last_text);
	recovery_destroy(&h.r);
}

Test(recovery, a_step_may_take_ten_times_what_is_expected)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	h.said[0] = 0;
	happens(&h, (struct recovery_event){.kind = EVENT_HOLDING, .worker = 1, .step = 3, .held_us = 9000000, .expected_us = 1000000});
	cr_assert_str_eq(h.said, "");
	happens(&h, (struct recovery_event){.kind = EVENT_HOLDING, .worker = 1, .step = 3, .held_us = 10100000, .expected_us = 1000000});
	cr_assert_str_eq(h.said, "suspend kill1 ");
	recovery_destroy(&h.r);
}

Test(recovery, a_closed_connection_makes_silence_count_as_death_within_a_second)
{
	struct history h;
	begin(&h, 3, false);
	play(&h, "hello0 hello1 hello2 planned budget0 budget1 budget2 ready0 ready1 ready2");
	h.said[0] = 0;
	play(&h, "disconnect");
	pass(&h, 1000, 5);
	cr_assert_str_eq(h.said, "suspend kill1 ");
	cr_assert(strstr(h.last_text, "stage 1 closed its connection"), "%s", h.last_text);
	recovery_destroy(&h.r);
}

Test(recovery, two_closed_connections_half_a_second_apart_are_both_found)
{
	struct history h;
	begin(&h, 3, false);
	play(&h, "hello0 hello1 hello2 planned budget0 budget1 budget2 ready0 ready1 ready2");
	h.said[0] = 0;
	play(&h, "disconnect");
	pass(&h, 500, 5);
	play(&h, "disconnect");
	pass(&h, 1100, 1);
	cr_assert_str_eq(h.said, "suspend kill1 suspend kill2 ");
	recovery_destroy(&h.r);
}

Test(recovery, a_step_held_far_too_long_is_a_hang)
{
	static const struct { uint64_t held_ms, expected_ms; bool hang; } cases[] = {
		{4900, 1, false}, {5100, 1, true}, {9000, 1000, false}, {10100, 1000, true},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
		struct history h;
		begin(&h, 2, true);
		play(&h, START2);
		h.said[0] = 0;
		happens(&h, (struct recovery_event){.kind = EVENT_HOLDING, .worker = 1, .step = 77, .held_us = cases[i].held_ms * 1000,
		                                    .expected_us = cases[i].expected_ms * 1000});
		cr_assert_str_eq(h.said, cases[i].hang ? "suspend kill1 " : "", "case %zu: %s", i, h.said);
		cr_assert(!cases[i].hang || strstr(h.last_text, "step 77"), "%s", h.last_text);
		recovery_destroy(&h.r);
	}
}

Test(recovery, a_kill_whose_end_is_never_reported_and_a_hello_that_never_comes_are_failures)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2 "broken1");
	pass(&h, 10200, 1);
	cr_assert(strstr(h.last_text, "end was not reported"), "%s", h.last_text);
	recovery_destroy(&h.r);
	begin(&h, 2, true);
	play(&h, START2 "exit1");
	pass(&h, 30500, 1);
	cr_assert(strstr(h.last_text, "stage 1 did not say hello within 30 s"), "%s", h.last_text);
	recovery_destroy(&h.r);
}

Test(recovery, a_coordinator_that_was_stopped_itself_blames_nobody)
{
	struct history h;
	begin(&h, 2, true);
	play(&h, START2);
	h.said[0] = 0;
	pass(&h, 200, 3);
	h.now_us += 60000000;
	happens(&h, (struct recovery_event){.kind = EVENT_TICK});
	pass(&h, 4000, 0);
	cr_assert_str_eq(h.said, "");
	pass(&h, 2000, 1);
	cr_assert_str_eq(h.said, "suspend kill1 ", "and then: %s", h.said);
	recovery_destroy(&h.r);
}
