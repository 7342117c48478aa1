// The scheduler in chosen situations, on the pipeline model: each row's context is read back through its block table,
// each token compared with what it has to be (support/pipeline_model.h).
#include <criterion/criterion.h>
#include <time.h>

#include "scheduler_cases.h"

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
