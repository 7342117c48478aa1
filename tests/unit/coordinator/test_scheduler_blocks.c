// What the scheduler does with blocks and with ends that come from outside, over a simulated pipeline: preemption, prefix
// reuse, choices, cancelling, new epochs, truncation.
#include <criterion/criterion.h>

#include "scheduler_cases.h"

// ---- blocks

Test(scheduler_blocks, ample_memory_and_very_different_lengths_preempt_nobody)
{
	// Case 6.
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 400);
	add(&w, request_of(400, 100, 1));
	add(&w, request_of(3, 500, 2));
	world_finish(&w, 2000);
	cr_assert_eq(stats_of(&w).preemptions, 0);
	world_destroy(&w);
}

Test(scheduler_blocks, blocks_of_a_finished_sequence_are_used_in_the_very_next_step)
{
	// Case 7: the pool holds one of them.
	struct world w;
	struct scheduler_options o = options_of(4);
	world_create(&w, &o, 3);
	for (uint32_t i = 0; i < 20; i++)
		add(&w, request_of(8, 4, i));
	while (!world_done(&w, 1)) {
		step_all(&w);
		world_report(&w);
	}
	cr_assert(world_step(&w));
	cr_assert_eq(w.last_step.step_.n_new, 1);
	world_finish(&w, 1000);
	world_destroy(&w);
}

Test(scheduler_blocks, twice_as_many_long_sequences_as_fit_all_finish_oldest_first_and_little_is_computed_twice)
{
	// Case 17: 16 sequences of 448 tokens at their end, blocks for 8.
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 8 * 112);
	for (uint32_t i = 0; i < 16; i++)
		add(&w, request_of(48, 400, i));
	uint32_t order = 0;
	while (!scheduler_idle(w.scheduler)) {
		step_all(&w);
		world_report(&w);
		while (order < 16 && world_done(&w, order + 1))
			order++;
		for (uint32_t i = order + 8; i < 16; i++)
			cr_assert(!world_done(&w, i + 1), "%u ends before %u", i + 1, order + 1);
	}
	struct scheduler_stats s = stats_of(&w);
	cr_assert_eq(s.generation_tokens, 16 * 400);
	cr_assert_lt(s.recomputed_tokens * 20, s.generation_tokens + s.prompt_tokens,
	             "%lu of %lu tokens, %lu preemptions", (unsigned long)s.recomputed_tokens,
	             (unsigned long)(s.generation_tokens + s.prompt_tokens), (unsigned long)s.preemptions);
	world_destroy(&w);
}

Test(scheduler_blocks, sequences_that_outgrow_every_expectation_preempt_the_newest_and_the_oldest_never_stops)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	o.prefix_cache = false;
	world_create(&w, &o, 110);
	// Short answers first, so that long ones are not expected.
	for (uint32_t i = 0; i < 60; i++)
		add(&w, request_of(4, 2, i));
	world_finish(&w, 1000);
	for (uint32_t i = 0; i < 8; i++)
		add(&w, request_of(10, 300, 100 + i));
	uint32_t before = 0, still = 0;
	while (!world_done(&w, 61)) {
		step_all(&w);
		world_report(&w);
		still = delivered(&w, 61) == before ? still + 1 : 0;
		before = delivered(&w, 61);
		cr_assert_leq(still, 12, "the oldest waits");
	}
	cr_assert_gt(stats_of(&w).preemptions, 0);
	world_finish(&w, 10000);
	world_destroy(&w);
}

Test(scheduler_blocks, a_prompt_larger_than_the_whole_pool_is_refused_at_once_with_both_numbers)
{
	// Case 18.
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 10);
	struct error e;
	cr_assert_eq(world_add(&w, request_of(41, 1, 1), &e), 0);
	cr_assert_str_eq(e.text, "the prompt has 41 tokens, the whole KV cache holds 40");
	cr_assert_eq(world_add(&w, request_of(512, 1, 1), &e), 0);
	cr_assert_str_eq(e.text, "the prompt has 512 tokens, the longest possible is 511 (a context of 512)");
	add(&w, request_of(40, 1, 1));
	world_finish(&w, 100);
	world_destroy(&w);
}

Test(scheduler_blocks, a_sequence_alone_that_fills_the_pool_ends_with_length)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 5);
	add(&w, request_of(10, 100, 1));
	world_finish(&w, 200);
	cr_assert_eq(w.orders[0]->choices[0].finish, FINISH_LENGTH);
	cr_assert_eq(delivered(&w, 1), 11); // positions 0 to 19 have KV, the 21st token is known but has no room
	world_destroy(&w);
}

// ---- prefix reuse

static uint32_t rows_of_same_prompt_twice(bool prefix_cache, uint64_t second_salt)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	o.prefix_cache = prefix_cache;
	world_create(&w, &o, 128);
	add(&w, request_of(42, 3, 1));
	world_finish(&w, 100);
	uint64_t before = w.model.rows_run;
	struct scheduler_request r = request_of(42, 3, 1);
	r.cache_salt = second_salt;
	add(&w, r);
	world_finish(&w, 100);
	uint32_t rows = (uint32_t)(w.model.rows_run - before);
	cr_assert_eq(stats_of(&w).prefix_hits, 44 - rows);
	world_destroy(&w);
	return rows;
}

Test(scheduler_blocks, the_same_prompt_again_computes_only_what_is_not_in_equal_full_blocks)
{
	// Case 19. 42 prompt rows and 2 of output; ten full blocks.
	cr_assert_eq(rows_of_same_prompt_twice(true, 0), 4);
	cr_assert_eq(rows_of_same_prompt_twice(false, 0), 44);
	cr_assert_eq(rows_of_same_prompt_twice(true, 7), 44, "another tenant's salt");
}

Test(scheduler_blocks, at_least_the_last_prompt_token_is_computed)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 128);
	add(&w, request_of(40, 1, 1));
	world_finish(&w, 100);
	uint64_t before = w.model.rows_run;
	add(&w, request_of(40, 1, 1));
	world_finish(&w, 100);
	cr_assert_eq(w.model.rows_run - before, 4, "the last block");
	world_destroy(&w);
}

Test(scheduler_blocks, an_answer_is_reused_by_the_prompt_that_continues_it)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 128);
	add(&w, request_of(10, 31, 1));
	world_finish(&w, 100);
	uint32_t next[60];
	for (uint32_t i = 0; i < 60; i++)
		next[i] = i < 41 ? w.orders[0]->choices[0].tokens[i] : 5;
	struct scheduler_request r = {.prompt = next, .n_prompt = 60, .n_choices = 1, .max_tokens = 1};
	uint64_t before = w.model.rows_run;
	add(&w, r);
	world_finish(&w, 100);
	cr_assert_eq(w.model.rows_run - before, 20, "%lu rows", (unsigned long)(w.model.rows_run - before));
	world_destroy(&w);
}

static void several_choices(bool prefix_cache)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	o.prefix_cache = prefix_cache;
	world_create(&w, &o, 256);
	struct scheduler_request r = request_of(42, 5, 1);
	r.n_choices = 4;
	add(&w, r);
	world_finish(&w, 200);
	// The prompt once, its last two tokens per choice, four rows of output each.
	cr_assert_eq(w.model.rows_run, 42 + 3 * 2 + 4 * 4);
	cr_assert_eq(stats_of(&w).prompt_tokens, 42);
	cr_assert_eq(stats_of(&w).prefix_hits, 0);
	world_destroy(&w);
}

Test(scheduler_blocks, the_prompt_of_several_choices_is_computed_once)
{
	several_choices(true);
}

Test(scheduler_blocks, the_prompt_of_several_choices_is_computed_once_without_the_prefix_cache_too)
{
	several_choices(false);
}

Test(scheduler_blocks, more_choices_than_slots_take_turns)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	o.max_seqs = 2;
	world_create(&w, &o, 64);
	struct scheduler_request r = request_of(10, 5, 1);
	r.n_choices = 7;
	add(&w, r);
	world_finish(&w, 500);
	world_destroy(&w);
}

// ---- ends from outside

Test(scheduler_blocks, a_client_that_leaves_in_queue_prefill_or_decode_gives_all_blocks_back)
{
	// Case 16.
	struct world w;
	struct scheduler_options o = options_of(3);
	o.max_seqs = 2;
	world_create(&w, &o, 128);
	for (uint32_t i = 0; i < 300; i++) {
		uint64_t id = add(&w, request_of(5 + i % 150, 30, i));
		for (uint32_t k = 0; k < i % 7; k++) {
			world_step(&w);
			if (k % 2)
				world_report(&w);
		}
		world_cancel(&w, id);
		cr_assert_eq(stats_of(&w).blocks_free, 128);
	}
	world_finish(&w, 200);
	world_cancel(&w, 1); // unknown by now: nothing happens
	world_destroy(&w);
}

Test(scheduler_blocks, a_stopped_choice_ends_alone)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 128);
	struct scheduler_request r = request_of(9, 20, 1);
	r.n_choices = 3;
	add(&w, r);
	for (uint32_t i = 0; i < 6; i++) {
		step_all(&w);
		world_report(&w);
	}
	world_stop_choice(&w, 1, 1);
	cr_assert_eq(w.orders[0]->choices[1].finish, FINISH_STOP);
	world_stop_choice(&w, 1, 1);
	world_stop_choice(&w, 1, 99);
	world_finish(&w, 200);
	cr_assert_eq(w.orders[0]->choices[0].n_delivered, 20);
	cr_assert_lt(w.orders[0]->choices[1].n_delivered, 20);
	world_destroy(&w);
}

Test(scheduler_blocks, a_full_queue_refuses_and_takes_again_later)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	o.max_queue = 3;
	world_create(&w, &o, 128);
	struct error e;
	for (uint32_t i = 0; i < 3; i++)
		add(&w, request_of(5, 3, i));
	struct scheduler_request r = request_of(5, 3, 9);
	r.id = 77;
	r.sampling.repetition_penalty = 1;
	cr_assert_eq(scheduler_add(w.scheduler, &r, 0, &e), STATUS_BUSY);
	cr_assert_str_eq(e.text, "3 requests are waiting, the limit is 3");
	step_all(&w);
	add(&w, request_of(5, 3, 9));
	world_finish(&w, 200);
	world_destroy(&w);
}

// ---- epochs and results

Test(scheduler_blocks, a_new_epoch_replays_every_sequence_and_delivers_no_token_twice)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 128);
	struct scheduler_request r = request_of(11, 40, 1);
	r.sampling.frequency_penalty = 1; // its history is checked by the model
	add(&w, r);
	add(&w, request_of(30, 40, 2));
	for (uint32_t i = 0; i < 9; i++) {
		step_all(&w);
		world_report(&w);
	}
	uint32_t had = delivered(&w, 1);
	cr_assert_gt(had, 0);
	scheduler_suspend(w.scheduler);
	cr_assert(!world_step(&w), "no step while the pipeline is down");
	world_report(&w); // what the last stage had sent
	add(&w, request_of(7, 3, 3));
	world_new_epoch(&w, 128, true);
	cr_assert(world_step(&w));
	cr_assert_eq(w.last_step.step, 1);
	cr_assert_eq(w.last_step.epoch, 2);
	cr_assert_eq(w.last_step.step_.news[0].n_prompt, 11, "output stays output");
	world_finish(&w, 300);
	world_destroy(&w);
}

Test(scheduler_blocks, a_request_that_no_longer_fits_the_new_epochs_blocks_fails)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 128);
	add(&w, request_of(100, 40, 1));
	add(&w, request_of(10, 10, 2));
	step_all(&w);
	world_new_epoch(&w, 24, false);
	cr_assert_eq(w.orders[0]->choices[0].finish, FINISH_FAILED);
	world_finish(&w, 200);
	cr_assert_eq(delivered(&w, 2), 10);
	world_destroy(&w);
}

Test(scheduler_blocks, a_gap_in_step_numbers_or_rows_that_do_not_fit_are_invalid)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 128);
	add(&w, request_of(5, 10, 1));
	cr_assert_eq(step_all(&w), 2);
	struct error e;
	struct message later = w.flights[1], wrong = w.flights[0];
	cr_assert_eq(scheduler_apply_result(w.scheduler, &later, 0, &e), STATUS_INVALID);
	cr_assert_str_eq(e.text, "result of step 2, expected step 1");
	wrong.result.n_tokens = 0;
	cr_assert_eq(scheduler_apply_result(w.scheduler, &wrong, 0, &e), STATUS_INVALID);
	struct sampled_token other = w.flights[0].result.tokens[0];
	other.slot++;
	wrong = w.flights[0];
	wrong.result.tokens = &other;
	cr_assert_eq(scheduler_apply_result(w.scheduler, &wrong, 0, &e), STATUS_INVALID);
	wrong = w.flights[0];
	wrong.epoch = 7;
	cr_assert_eq(scheduler_apply_result(w.scheduler, &wrong, 0, &e), STATUS_OK, "another epoch is ignored");
	world_finish(&w, 100);
	struct message none = {.type = MESSAGE_STEP_RESULT, .epoch = 1, .step = 99};
	cr_assert_eq(scheduler_apply_result(w.scheduler, &none, 0, &e), STATUS_INVALID);
	world_destroy(&w);
}

Test(scheduler_blocks, a_request_may_wait_for_the_first_epoch)
{
	struct scheduler *s;
	struct scheduler_options o = options_of(1);
	struct error e;
	cr_assert_eq(scheduler_create(&s, &o, &e), STATUS_OK);
	struct scheduler_request r = request_of(20, 4, 1);
	r.id = 5;
	cr_assert_eq(scheduler_add(s, &r, 0, &e), STATUS_OK);
	struct message m;
	cr_assert(!scheduler_next_step(s, 0, &m));
	uint32_t few[MAX_KV_GROUPS] = {2};
	scheduler_begin_epoch(s, 1, few);
	struct scheduler_event event;
	cr_assert(scheduler_pop_event(s, &event));
	cr_assert(event.request_id == 5 && event.finish == FINISH_FAILED && !event.has_token);
	scheduler_check(s);
	cr_assert(scheduler_idle(s));
	scheduler_destroy(&s);
	cr_assert_null(s);
}

// ---- truncation

Test(scheduler_blocks, a_truncated_sequence_is_computed_again_from_any_length)
{
	for (uint32_t cut = 0; cut <= 24; cut++) {
		struct world w;
		struct scheduler_options o = options_of(2);
		world_create(&w, &o, 128);
		struct scheduler_request r = request_of(14, 20, 1);
		r.not_ahead = true;
		r.n_choices = 2;
		add(&w, r);
		uint32_t before = 0;
		for (uint32_t i = 0; i < 11; i++) {
			step_all(&w);
			world_report(&w);
			world_report(&w);
		}
		before = delivered(&w, 1);
		struct error e;
		step_all(&w);
		cr_assert_eq(scheduler_truncate(w.scheduler, 1, 0, 0, &e), STATUS_BUSY);
		while (world_report(&w))
			;
		uint32_t computed = 14 + delivered(&w, 1) - 1;
		if (cut > computed) {
			cr_assert_eq(scheduler_truncate(w.scheduler, 1, 0, cut, &e), STATUS_INVALID);
		} else {
			cr_assert_eq(scheduler_truncate(w.scheduler, 1, 0, cut, &e), STATUS_OK, "%s", e.text);
			scheduler_check(w.scheduler);
			cr_assert(world_step(&w));
			bool seen = false;
			for (uint32_t i = 0; i < w.last_step.step_.n_seqs; i++)
				seen |= w.last_step.step_.seqs[i].truncate && w.last_step.step_.seqs[i].start <= cut;
			cr_assert(seen || cut == computed, "cut to %u", cut);
		}
		cr_assert_eq(scheduler_truncate(w.scheduler, 9, 0, 0, &e), STATUS_ABSENT);
		world_finish(&w, 200);
		cr_assert(delivered(&w, 1) == 20 && before > 0);
		world_destroy(&w);
	}
}
