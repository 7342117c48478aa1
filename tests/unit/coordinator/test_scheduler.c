// The scheduler in chosen situations, on the pipeline model: each row's context is read back through its block table,
// each token compared with what it has to be (support/pipeline_model.h).
#include <criterion/criterion.h>
#include <time.h>

#include "pipeline_model.h"

static struct scheduler_options options_of(uint32_t n_stages)
{
	return (struct scheduler_options){.max_seqs = 16,
	                                  .max_batch_tokens = 64,
	                                  .max_queue = 64,
	                                  .max_context = 512,
	                                  .block_size = 4,
	                                  .n_groups = 1,
	                                  .n_stages = n_stages,
	                                  .prefix_cache = true};
}

static uint32_t *prompt_of(uint32_t n, uint64_t seed)
{
	static uint32_t tokens[4096];
	for (uint32_t i = 0; i < n; i++)
		tokens[i] = (uint32_t)(model_mix(seed, i) % MODEL_VOCAB);
	return tokens;
}

static struct scheduler_request request_of(uint32_t n_prompt, uint32_t max_tokens, uint64_t seed)
{
	return (struct scheduler_request){
		.prompt = prompt_of(n_prompt, seed), .n_prompt = n_prompt, .n_choices = 1, .max_tokens = max_tokens};
}

static uint64_t add(struct world *w, struct scheduler_request r)
{
	struct error e = {{0}};
	uint64_t id = world_add(w, r, &e);
	cr_assert_neq(id, 0, "%s", e.text);
	return id;
}

static uint32_t delivered(const struct world *w, uint64_t id)
{
	return w->orders[id - 1]->choices[0].n_delivered;
}

static struct scheduler_stats stats_of(const struct world *w)
{
	struct scheduler_stats s;
	scheduler_get_stats(w->scheduler, &s);
	return s;
}

static uint32_t step_all(struct world *w)
{
	uint32_t n = 0;
	while (world_step(w))
		n++;
	return n;
}

// ---- ahead

Test(scheduler, a_decoding_sequence_has_two_steps_in_flight_and_names_its_token_by_step_and_row)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 64);
	add(&w, request_of(5, 10, 1));
	cr_assert(world_step(&w));
	cr_assert_eq(w.last_step.step_.n_seqs, 1);
	cr_assert(w.last_step.step_.seqs[0].sample && !w.last_step.step_.seqs[0].by_reference);
	cr_assert(world_step(&w));
	const struct step_seq *q = &w.last_step.step_.seqs[0];
	cr_assert(q->by_reference && q->ref_step == 1 && q->ref_row == 0 && q->start == 5 && q->sample);
	cr_assert_eq(w.last_step.step_.n_tokens, 0);
	cr_assert(!world_step(&w), "a third step in flight");
	world_report(&w);
	cr_assert(world_step(&w));
	cr_assert(w.last_step.step_.seqs[0].by_reference && w.last_step.step_.seqs[0].ref_step == 2);
	world_finish(&w, 100);
	cr_assert_eq(delivered(&w, 1), 10);
	world_destroy(&w);
}

Test(scheduler, a_sequence_that_is_not_scheduled_ahead_waits_for_each_token)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	world_create(&w, &o, 64);
	struct scheduler_request r = request_of(5, 6, 1);
	r.not_ahead = true;
	add(&w, r);
	for (uint32_t i = 0; i < 6; i++) {
		cr_assert_eq(step_all(&w), 1, "token %u", i);
		cr_assert(w.last_step.step_.seqs[0].not_ahead && !w.last_step.step_.seqs[0].by_reference);
		world_report(&w);
	}
	cr_assert(world_done(&w, 1));
	world_destroy(&w);
}

Test(scheduler, nothing_is_computed_beyond_max_tokens)
{
	struct world w;
	struct scheduler_options o = options_of(3);
	world_create(&w, &o, 64);
	add(&w, request_of(5, 7, 1));
	add(&w, request_of(9, 1, 2));
	world_finish(&w, 100);
	// The last token of each is never a row.
	cr_assert_eq(w.model.rows_run, 5 + 6 + 9);
	world_destroy(&w);
}

Test(scheduler, after_an_end_token_the_rows_in_flight_are_thrown_away_and_blocks_are_free_at_once)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	world_create(&w, &o, 64);
	struct scheduler_request r = request_of(6, 20, 1);
	uint64_t h = 1;
	for (uint32_t i = 0; i < r.n_prompt; i++)
		h = model_mix(h, r.prompt[i] + 1);
	uint32_t end = model_next_token(h, 1, 0); // its first token ends it
	r.end_ids = &end;
	r.n_end_ids = 1;
	add(&w, r);
	cr_assert_eq(step_all(&w), 2);
	cr_assert_eq(stats_of(&w).blocks_free, 62);
	world_report(&w);
	cr_assert(world_done(&w, 1));
	cr_assert_eq(w.orders[0]->choices[0].finish, FINISH_STOP);
	cr_assert_eq(stats_of(&w).blocks_free, 64);
	// A new owner of slot and blocks is scheduled while the thrown-away row is still in flight.
	add(&w, request_of(40, 5, 2));
	cr_assert(world_step(&w));
	cr_assert_eq(w.last_step.step_.n_ends, 1);
	cr_assert_eq(w.last_step.step_.ends[0], w.last_step.step_.news[0].slot);
	world_finish(&w, 100);
	cr_assert_eq(delivered(&w, 1), 1);
	world_destroy(&w);
}

// ---- prefill

Test(scheduler, decode_rows_go_first_and_prompt_chunks_fill_the_rest_of_a_step)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	o.max_batch_tokens = 16;
	world_create(&w, &o, 256);
	add(&w, request_of(4, 50, 1));
	add(&w, request_of(4, 50, 2));
	step_all(&w);
	world_report(&w);
	add(&w, request_of(100, 5, 3));
	step_all(&w);
	world_report(&w);
	cr_assert(world_step(&w));
	const struct message_step *s = &w.last_step.step_;
	cr_assert_eq(s->n_seqs, 3);
	cr_assert(s->seqs[0].n_tokens == 1 && s->seqs[1].n_tokens == 1 && s->seqs[2].n_tokens == 14);
	cr_assert(!s->seqs[2].sample, "a chunk that is not the last samples nothing");
	world_finish(&w, 200);
	world_destroy(&w);
}

static uint32_t rounds_to_first_token(uint32_t n_stages, uint32_t n_prompt)
{
	// Time in stage visits: a step of a long chunk takes one unit on each stage, stages work at once.
	struct world w;
	struct scheduler_options o = options_of(n_stages);
	o.max_context = 4096;
	o.max_batch_tokens = 128;
	world_create(&w, &o, 1024);
	add(&w, request_of(n_prompt, 1, 1));
	double stage_free[MAX_STAGES] = {0}, now = 0, ends[WORLD_FLIGHTS];
	uint32_t n = 0;
	while (!world_done(&w, 1)) {
		while (world_step(&w)) {
			double t = now;
			for (uint32_t s = 0; s < n_stages; s++) {
				t = (t > stage_free[s] ? t : stage_free[s]) + 12.0 / n_stages;
				stage_free[s] = t;
			}
			ends[n++ % WORLD_FLIGHTS] = t;
		}
		now = ends[(n - w.n_flights) % WORLD_FLIGHTS];
		world_report(&w);
	}
	world_destroy(&w);
	return (uint32_t)now;
}

Test(scheduler, time_to_the_first_token_of_a_long_prompt_falls_as_stages_are_added)
{
	// Case 13: 16 chunks.
	uint32_t one = rounds_to_first_token(1, 2048), two = rounds_to_first_token(2, 2048),
		 four = rounds_to_first_token(4, 2048);
	cr_assert_eq(one, 16 * 12);
	cr_assert_leq(two, 17 * 6);
	cr_assert_leq(four, 19 * 3);
}

Test(scheduler, chunks_of_one_prompt_are_in_flight_at_once_before_any_has_reported)
{
	struct world w;
	struct scheduler_options o = options_of(4);
	world_create(&w, &o, 256);
	add(&w, request_of(500, 3, 1));
	cr_assert_eq(step_all(&w), 8);
	world_finish(&w, 100);
	world_destroy(&w);
}

Test(scheduler, prompt_rows_of_a_step_are_limited_so_that_it_stays_short)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	o.max_prefill_tokens = 10;
	world_create(&w, &o, 256);
	add(&w, request_of(95, 3, 1));
	world_step(&w);
	cr_assert_eq(w.last_step.step_.seqs[0].n_tokens, 10);
	world_finish(&w, 100);
	world_destroy(&w);
}

Test(scheduler, any_batch_size_from_one_up_works)
{
	for (uint32_t rows = 1; rows <= 5; rows++) {
		for (uint32_t stages = 1; stages <= 3; stages++) {
			struct world w;
			struct scheduler_options o = options_of(stages);
			o.max_batch_tokens = rows;
			world_create(&w, &o, 256);
			for (uint32_t i = 0; i < 8; i++)
				add(&w, request_of(3 + i, 12, i));
			world_finish(&w, 2000);
			world_destroy(&w);
		}
	}
}

Test(scheduler, a_step_of_fewer_rows_than_sequences_serves_all_of_them_in_turn)
{
	struct world w;
	struct scheduler_options o = options_of(1);
	o.max_batch_tokens = 4;
	world_create(&w, &o, 256);
	for (uint32_t i = 0; i < 8; i++)
		add(&w, request_of(2, 60, i));
	while (stats_of(&w).n_waiting > 0 || delivered(&w, 8) == 0) {
		step_all(&w);
		world_report(&w);
	}
	uint32_t before[8], least = 1000, most = 0;
	for (uint32_t i = 0; i < 8; i++)
		before[i] = delivered(&w, i + 1);
	for (uint32_t i = 0; i < 40; i++) {
		step_all(&w);
		world_report(&w);
	}
	for (uint32_t i = 0; i < 8; i++) {
		uint32_t n = delivered(&w, i + 1) - before[i];
		least = n < least ? n : least;
		most = n > most ? n : most;
	}
	cr_assert(least >= 18 && most <= 22, "%u to %u tokens", least, most);
	world_finish(&w, 2000);
	world_destroy(&w);
}

// ---- micro-batches

static double likes(void *user, uint32_t m, uint32_t n, uint32_t context)
{
	uint32_t best = *(uint32_t *)user;
	return 100 + (m > best ? m - best : best - m) * 30;
}

Test(scheduler, sequences_are_spread_over_as_many_micro_batches_as_pay)
{
	struct world w;
	struct scheduler_options o = options_of(4);
	uint32_t best = 3;
	o.round_us = likes;
	o.user = &best;
	world_create(&w, &o, 512);
	for (uint32_t i = 0; i < 12; i++)
		add(&w, request_of(4, 100, i));
	for (uint32_t i = 0; i < 30; i++) {
		step_all(&w);
		w.now_us += 10000;
		world_report(&w);
	}
	cr_assert_eq(stats_of(&w).micro_batches, 3);
	step_all(&w);
	cr_assert_eq(w.n_flights, 6);
	uint32_t rows[3] = {0};
	for (uint32_t i = 0; i < 3; i++) {
		world_report(&w);
		cr_assert(world_step(&w));
		cr_assert_lt(w.last_step.step_.micro_batch, 3);
		rows[w.last_step.step_.micro_batch] += w.last_decode_rows;
	}
	cr_assert(rows[0] == 4 && rows[1] == 4 && rows[2] == 4, "%u %u %u rows", rows[0], rows[1], rows[2]);
	best = 1; // judged again when the load has changed
	for (uint32_t i = 0; i < 8; i++)
		world_cancel(&w, i + 1);
	for (uint32_t i = 0; i < 30; i++) {
		w.now_us += 10000;
		world_report(&w);
		step_all(&w);
	}
	cr_assert_eq(stats_of(&w).micro_batches, 1);
	cr_assert_eq(w.last_decode_rows, 4);
	world_finish(&w, 1000);
	world_destroy(&w);
}

Test(scheduler, the_number_of_micro_batches_does_not_flutter)
{
	struct world w;
	struct scheduler_options o = options_of(2);
	uint32_t best = 2;
	o.round_us = likes;
	o.user = &best;
	world_create(&w, &o, 512);
	for (uint32_t i = 0; i < 4; i++)
		add(&w, request_of(4, 200, i));
	uint32_t changes = 0, last = 1;
	for (uint32_t i = 0; i < 100; i++) {
		best = 1 + i % 2;
		step_all(&w);
		w.now_us += 1000;
		world_report(&w);
		changes += stats_of(&w).micro_batches != last;
		last = stats_of(&w).micro_batches;
	}
	cr_assert_leq(changes, 2, "%u changes in 100 ms", changes);
	world_finish(&w, 2000);
	world_destroy(&w);
}

Test(scheduler, fewer_sequences_than_stages_and_fewer_slots_than_stages_work)
{
	// Case 12.
	for (uint32_t slots = 1; slots <= 4; slots++) {
		struct world w;
		struct scheduler_options o = options_of(4);
		uint32_t best = 4;
		o.max_seqs = slots;
		o.round_us = likes;
		o.user = &best;
		world_create(&w, &o, 256);
		for (uint32_t i = 0; i < 6; i++)
			add(&w, request_of(5, 9, i));
		world_finish(&w, 1000);
		cr_assert_leq(stats_of(&w).micro_batches, slots);
		world_destroy(&w);
	}
}

// ---- blocks

Test(scheduler, ample_memory_and_very_different_lengths_preempt_nobody)
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

Test(scheduler, blocks_of_a_finished_sequence_are_used_in_the_very_next_step)
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

Test(scheduler, twice_as_many_long_sequences_as_fit_all_finish_oldest_first_and_little_is_computed_twice)
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

Test(scheduler, sequences_that_outgrow_every_expectation_preempt_the_newest_and_the_oldest_never_stops)
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

Test(scheduler, a_prompt_larger_than_the_whole_pool_is_refused_at_once_with_both_numbers)
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

Test(scheduler, a_sequence_alone_that_fills_the_pool_ends_with_length)
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

Test(scheduler, the_same_prompt_again_computes_only_what_is_not_in_equal_full_blocks)
{
	// Case 19. 42 prompt rows and 2 of output; ten full blocks.
	cr_assert_eq(rows_of_same_prompt_twice(true, 0), 4);
	cr_assert_eq(rows_of_same_prompt_twice(false, 0), 44);
	cr_assert_eq(rows_of_same_prompt_twice(true, 7), 44, "another tenant's salt");
}

Test(scheduler, at_least_the_last_prompt_token_is_computed)
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

Test(scheduler, an_answer_is_reused_by_the_prompt_that_continues_it)
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

Test(scheduler, the_prompt_of_several_choices_is_computed_once)
{
	several_choices(true);
}

Test(scheduler, the_prompt_of_several_choices_is_computed_once_without_the_prefix_cache_too)
{
	several_choices(false);
}

Test(scheduler, more_choices_than_slots_take_turns)
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

Test(scheduler, a_client_that_leaves_in_queue_prefill_or_decode_gives_all_blocks_back)
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

Test(scheduler, a_stopped_choice_ends_alone)
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

Test(scheduler, a_full_queue_refuses_and_takes_again_later)
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

Test(scheduler, a_new_epoch_replays_every_sequence_and_delivers_no_token_twice)
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

Test(scheduler, a_request_that_no_longer_fits_the_new_epochs_blocks_fails)
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

Test(scheduler, a_gap_in_step_numbers_or_rows_that_do_not_fit_are_invalid)
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

Test(scheduler, a_request_may_wait_for_the_first_epoch)
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

Test(scheduler, a_truncated_sequence_is_computed_again_from_any_length)
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

// ---- size

static uint64_t thread_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

Test(scheduler, a_decode_step_of_256_sequences_stays_below_8_kib, .timeout = 60)
{
	struct scheduler_options o = options_of(2);
	o.max_seqs = 256;
	o.max_queue = 512;
	o.max_batch_tokens = 2048;
	o.max_context = 2048;
	o.block_size = 16;
	struct scheduler *s;
	struct error e;
	cr_assert_eq(scheduler_create(&s, &o, &e), STATUS_OK);
	uint32_t n_blocks[MAX_KV_GROUPS] = {65536, 65536, 65536, 65536};
	scheduler_begin_epoch(s, 1, n_blocks);
	for (uint32_t i = 0; i < 256; i++) {
		struct scheduler_request r = request_of(900 + i, 800, i);
		r.id = i + 1;
		r.sampling.repetition_penalty = 1;
		cr_assert_eq(scheduler_add(s, &r, 0, &e), STATUS_OK);
	}
	uint8_t *buffer = NULL;
	size_t len, capacity = 0, largest = 0;
	uint64_t build_ns = 0, apply_ns = 0, n_decode = 0;
	struct sampled_token tokens[256];
	struct message results[8];
	uint32_t slots[8][256], n_slots[8];
	uint64_t first = 1, next = 1;
	for (uint32_t round = 0; round < 1200; round++) {
		struct message m;
		uint64_t t0 = thread_ns();
		while (scheduler_next_step(s, 0, &m)) {
			build_ns += thread_ns() - t0;
			uint32_t k = next++ % 8;
			n_slots[k] = 0;
			for (uint32_t i = 0; i < m.step_.n_seqs; i++)
				if (m.step_.seqs[i].sample)
					slots[k][n_slots[k]++] = m.step_.seqs[i].slot;
			if (m.step_.n_seqs == 256 && m.step_.n_tokens <= 256) {
				n_decode++;
				cr_assert_eq(message_encode(&m, &buffer, &len, &capacity, &e), STATUS_OK, "%s", e.text);
				largest = len > largest ? len : largest;
			} else {
				build_ns = 0;
				apply_ns = 0;
				n_decode = 0;
			}
			results[k] = (struct message){.type = MESSAGE_STEP_RESULT,
			                              .epoch = 1,
			                              .step = m.step,
			                              .result = {.micro_batch = m.step_.micro_batch}};
			t0 = thread_ns();
		}
		cr_assert_lt(first, next);
		uint32_t k = first++ % 8;
		for (uint32_t i = 0; i < n_slots[k]; i++)
			tokens[i] = (struct sampled_token){.slot = slots[k][i], .id = 3};
		results[k].result.n_tokens = n_slots[k];
		results[k].result.tokens = tokens;
		t0 = thread_ns();
		cr_assert_eq(scheduler_apply_result(s, &results[k], 0, &e), STATUS_OK, "%s", e.text);
		struct scheduler_event event;
		while (scheduler_pop_event(s, &event))
			;
		apply_ns += thread_ns() - t0;
		if (n_decode == 500)
			break;
	}
	cr_assert_eq(n_decode, 500);
	fprintf(stderr, "256 sequences: %.1f us to build a step, %.1f us to apply its result, %zu bytes at most\n",
	        build_ns / 1e3 / n_decode, apply_ns / 1e3 / n_decode, largest);
	cr_assert(largest > 0 && largest < 8192, "%zu bytes", largest);
	free(buffer);
	scheduler_destroy(&s);
}
