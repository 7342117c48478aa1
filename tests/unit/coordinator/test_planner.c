// The planner against hand-made devices and against every split there is.
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "coordinator/planner.h"

static const uint64_t MiB = 1 << 20;

static struct plan_model model_of(uint32_t n_layers, uint64_t layer_bytes)
{
	struct plan_model m = {
		.n_layers = n_layers,
		.vocab_rows = 32000,
		.hidden = 1024,
		.embedding_bytes = layer_bytes / 2,
		.head_bytes = layer_bytes / 2,
		.layer_flops_per_token = 2.0 * (double)layer_bytes,
		.head_flops_per_token = (double)layer_bytes,
		.kv_bytes_per_token_layer = 4096,
		.n_groups = 1,
		.workspace_bytes_fixed = MiB,
		.workspace_bytes_per_row = 1024,
	};
	for (uint32_t i = 0; i < n_layers; i++)
		m.layer_weight_bytes[i] = layer_bytes;
	return m;
}

static struct plan_device device_of(uint64_t memory, double bandwidth, double flops)
{
	static int n;
	struct plan_device d = {
		.memory_limit_bytes = memory, .bandwidth_bytes_per_s = bandwidth, .matmul_flops = flops, .hop_us = 20};
	snprintf(d.label, sizeof d.label, "device %d", n++ % 100);
	return d;
}

static struct plan_options options_of(uint32_t n_stages)
{
	return (struct plan_options){.n_stages = n_stages,
	                             .plan_sequences = 64,
	                             .plan_tokens = 2048,
	                             .block_size = 16,
	                             .max_seqs = 256,
	                             .max_batch_tokens = 512,
	                             .model_max_context = 8192};
}

static struct plan plan_or_fail(const struct plan_model *m, const struct plan_device *d, const struct plan_options *o)
{
	struct plan p;
	struct error e = {{0}};
	enum status s = planner_plan(&p, m, d, o, &e);
	cr_assert_eq(s, STATUS_OK, "%s: %s", status_name(s), e.text);
	uint32_t sum = 0;
	for (uint32_t i = 0; i < p.n_stages; i++) {
		cr_assert_eq(p.stage[i].first_layer, sum, "stage %u begins at %u, not %u", i, p.stage[i].first_layer,
		             sum);
		sum += p.stage[i].n_layers;
		cr_assert_leq(p.stage[i].weight_bytes + p.stage[i].workspace_bytes +
		                      p.n_blocks * p.stage[i].bytes_per_block,
		              d[i].memory_limit_bytes);
	}
	cr_assert_eq(sum, m->n_layers);
	cr_assert(p.stage[0].has_embedding && p.stage[p.n_stages - 1].has_head);
	cr_assert_gt(strlen(p.why), 0);
	return p;
}

Test(planner, equal_devices_get_equal_layers_up_to_the_head)
{
	struct plan_model m = model_of(24, 50 * MiB);
	struct plan_device d[2] = {device_of(8192 * MiB, 50e9, 1e12), device_of(8192 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(2);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert_eq(p.stage[0].n_layers, 12, "%u layers, %s", p.stage[0].n_layers, p.why);
	cr_assert_eq(p.max_context, 8192);
}

Test(planner, a_device_twice_as_fast_gets_about_twice_the_layers)
{
	struct plan_model m = model_of(30, 50 * MiB);
	struct plan_device d[2] = {device_of(16384 * MiB, 100e9, 2e12), device_of(16384 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(2);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert(p.stage[0].n_layers >= 19 && p.stage[0].n_layers <= 21, "%u layers, %s", p.stage[0].n_layers, p.why);
}

Test(planner, a_context_that_fits_each_stages_own_layers_needs_no_device_that_holds_all)
{
	// Case 1. KV of 8192 tokens is 32 MiB a layer: 24 layers need 768 MiB, no device has that beside its weights.
	struct plan_model m = model_of(24, 50 * MiB);
	struct plan_device d[3] = {device_of(800 * MiB, 50e9, 1e12), device_of(800 * MiB, 50e9, 1e12),
	                           device_of(800 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(3);
	o.max_context = 8192;
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert_geq(p.n_blocks * 16, 8192);
	cr_assert_eq(p.max_context, 8192);
}

Test(planner, the_stage_with_the_least_kv_memory_per_own_layer_is_named_and_both_devices_are_used)
{
	// Case 2: 16 and 32 GB, the second partly used by another program.
	struct plan_model m = model_of(40, 400 * MiB);
	struct plan_device d[2] = {device_of(16000 * MiB, 300e9, 40e12), device_of(20000 * MiB, 300e9, 40e12)};
	struct plan_options o = options_of(2);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert_gt(p.stage[1].n_layers, p.stage[0].n_layers);
	uint32_t least = p.stage[0].blocks_possible <= p.stage[1].blocks_possible ? 0 : 1;
	cr_assert_eq(p.bottleneck_memory, least);
	cr_assert(strstr(p.why, d[least].label) != NULL, "%s", p.why);
	cr_assert_eq(p.n_blocks, p.stage[least].blocks_possible);
	// One layer more or less on the first stage would hold fewer sequences.
	for (int by = -1; by <= 1; by += 2) {
		uint32_t layers[2] = {p.stage[0].n_layers + by, p.stage[1].n_layers - by};
		struct plan_options hand = o;
		hand.layers = layers;
		hand.n_layers_given = 2;
		struct plan q;
		if (planner_plan(&q, &m, d, &hand, NULL) == STATUS_OK)
			cr_assert(q.tokens_per_s < p.tokens_per_s * 1.0001 || q.n_blocks <= p.n_blocks);
	}
}

Test(planner, a_large_vocabulary_is_charged_to_the_stages_that_hold_it)
{
	// Case 3: embedding and head are as large as ten layers each; the small first device holds just the embedding.
	struct plan_model m = model_of(12, 100 * MiB);
	m.embedding_bytes = m.head_bytes = 1000 * MiB;
	struct plan_device d[3] = {device_of(1050 * MiB, 50e9, 1e12), device_of(6000 * MiB, 50e9, 1e12),
	                           device_of(3000 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(3);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert_eq(p.stage[0].n_layers, 0, "%s", p.why);
	cr_assert_eq(p.stage[0].weight_bytes, 1000 * MiB);
	cr_assert_eq(p.stage[0].blocks_possible, UINT64_MAX);
	cr_assert_gt(p.n_blocks, 0);
}

Test(planner, a_tied_head_is_counted_once_on_one_stage_and_twice_on_two)
{
	struct plan_model m = model_of(4, 10 * MiB);
	m.tied_head = true;
	m.embedding_bytes = m.head_bytes = 70 * MiB;
	struct plan_device d[2] = {device_of(4096 * MiB, 50e9, 1e12), device_of(4096 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(1);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert_eq(p.stage[0].weight_bytes, 110 * MiB);
	o = options_of(2);
	p = plan_or_fail(&m, d, &o);
	cr_assert_eq(p.stage[0].weight_bytes + p.stage[1].weight_bytes, 180 * MiB);
}

Test(planner, a_model_that_cannot_fit_is_refused_with_the_missing_bytes_of_each_stage)
{
	struct plan_model m = model_of(10, 100 * MiB);
	struct plan_device d[2] = {device_of(300 * MiB, 50e9, 1e12), device_of(300 * MiB, 50e9, 1e12)};
	snprintf(d[0].label, sizeof d[0].label, "stage 0 (cpu/1 on a)");
	snprintf(d[1].label, sizeof d[1].label, "stage 1 (cpu/1 on b)");
	struct plan_options o = options_of(2);
	struct plan p;
	struct error e;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "stage 0 (cpu/1 on a) is missing ") != NULL &&
	                  strstr(e.text, "stage 1 (cpu/1 on b) is missing ") != NULL,
	          "%s", e.text);
	// 5 layers and half a layer's worth of embedding or head, workspace of 1.5 MiB, one block of 5 layers.
	char expected[64];
	snprintf(expected, sizeof expected, "is missing %llu bytes",
	         (unsigned long long)(550 * MiB + MiB + 512 * 1024 + 5 * 65536 - 300 * MiB));
	cr_assert(strstr(e.text, expected) != NULL, "%s, expected %s", e.text, expected);
}

Test(planner, layers_by_hand_are_honoured_or_refused_with_both_numbers)
{
	struct plan_model m = model_of(10, 10 * MiB);
	struct plan_device d[3] = {device_of(4096 * MiB, 50e9, 1e12), device_of(4096 * MiB, 10e9, 1e11),
	                           device_of(4096 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(2);
	struct plan p;
	struct error e;
	uint32_t layers[3] = {3, 7, 0};
	o.layers = layers;
	o.n_layers_given = 2;
	p = plan_or_fail(&m, d, &o);
	cr_assert(p.stage[0].n_layers == 3 && p.stage[1].n_layers == 7);

	layers[1] = 6;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "--layers adds up to 9 layers, the model has 10");
	layers[1] = 10, layers[0] = 0;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, "gives 0 layers to stage 0") != NULL, "%s", e.text);
	o.n_layers_given = 3;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "--layers names 3 stages, there are 2");
	m.n_layers = 2;
	o = options_of(3);
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "3 stages are more than the model's 2 layers");
}

Test(planner, a_context_by_hand_needs_blocks_for_it)
{
	struct plan_model m = model_of(8, 10 * MiB);
	struct plan_device d[1] = {device_of(200 * MiB, 50e9, 1e12)};
	struct plan_options o = options_of(1);
	struct plan p = plan_or_fail(&m, d, &o);
	cr_assert(p.max_context < 8192 && p.max_context == p.n_blocks * 16, "%u", p.max_context);
	o.max_context = p.max_context;
	plan_or_fail(&m, d, &o);
	o.max_context += 1;
	struct error e;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	o.max_context = 9000;
	cr_assert_eq(planner_plan(&p, &m, d, &o, &e), STATUS_REFUSED);
	cr_assert_str_eq(e.text, "a context of 9000 tokens was asked for, the model's own is 8192");
}

Test(planner, few_sequences_or_a_shared_device_want_fewer_micro_batches)
{
	struct plan_model m = model_of(24, 100 * MiB);
	struct plan_device d[2] = {device_of(8192 * MiB, 50e9, 5e11), device_of(8192 * MiB, 50e9, 5e11)};
	struct plan_options o = options_of(2);
	struct plan p = plan_or_fail(&m, d, &o);
	// Bound by multiplications: weights are read for free, both stages work.
	cr_assert_lt(planner_round_us(&p, &m, d, 2, 200, 128), planner_round_us(&p, &m, d, 1, 200, 128));
	// One device in truth: a second micro-batch only reads all weights again.
	d[0].share_group = d[1].share_group = 1;
	cr_assert_gt(planner_round_us(&p, &m, d, 2, 2, 128), planner_round_us(&p, &m, d, 1, 2, 128));
	// And one sequence takes as long as it takes through all stages.
	double one = planner_round_us(&p, &m, d, 1, 1, 128);
	cr_assert_float_eq(one, 2450 * 1048576.0 / 50e9 * 1e6 + 24 * 4096 * 128 / 50e9 * 1e6 + 40, 1, "%g", one);
}

Test(planner, prompt_chunks_keep_a_step_below_a_second)
{
	struct plan_model m = model_of(24, 400 * MiB);
	struct plan_device d[2] = {device_of(32768 * MiB, 50e9, 4e11), device_of(32768 * MiB, 50e9, 4e11)};
	struct plan_options o = options_of(2);
	struct plan p = plan_or_fail(&m, d, &o);
	uint32_t rows = planner_chunk_tokens(&p, 2048);
	cr_assert(rows >= 1 && rows < 2048);
	for (uint32_t i = 0; i < 2; i++)
		cr_assert_lt(rows * p.stage[i].prefill_us_per_token, 1e6);
	cr_assert_eq(planner_chunk_tokens(&p, 1), 1);
}

// ---- against all splits

static uint64_t state = 12345;
static uint32_t between(uint32_t low, uint32_t high)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return low + (uint32_t)(state >> 33) % (high - low + 1);
}

static void try_all(const struct plan_model *m, const struct plan_device *d, struct plan_options *o, uint32_t *layers,
                    uint32_t stage, uint32_t left, double floor, double *best, uint64_t *blocks)
{
	if (stage + 1 == o->n_stages) {
		layers[stage] = left;
		struct plan p;
		if (left > 0 && planner_plan(&p, m, d, o, NULL) == STATUS_OK) {
			*best = fmax(*best, p.tokens_per_s);
			if (p.tokens_per_s >= floor && p.n_blocks > *blocks)
				*blocks = p.n_blocks;
		}
		return;
	}
	for (layers[stage] = 1; layers[stage] + 1 <= left; layers[stage]++)
		try_all(m, d, o, layers, stage + 1, left - layers[stage], floor, best, blocks);
}

Test(planner, no_split_is_over_two_percent_faster_nor_as_fast_with_many_more_blocks, .timeout = 60)
{
	for (int round = 0; round < 60; round++) {
		struct plan_model m = model_of(between(6, 20), between(20, 200) * MiB);
		struct plan_device d[4];
		uint32_t n = between(2, 4), layers[4];
		m.embedding_bytes = between(10, 300) * MiB;
		m.head_bytes = between(10, 300) * MiB;
		m.kv_bytes_per_token_layer = between(512, 8192);
		for (uint32_t i = 0; i < n; i++) {
			d[i] = device_of(between(600, 6000) * MiB, between(10, 200) * 1e9, between(1, 50) * 1e11);
			d[i].share_group = between(0, 3) == 0;
		}
		struct plan_options o = options_of(n);
		o.plan_sequences = between(1, 64);
		struct plan p;
		enum status s = planner_plan(&p, &m, d, &o, NULL);
		double best = 0, none = INFINITY;
		uint64_t blocks = 0;
		o.layers = layers;
		o.n_layers_given = n;
		try_all(&m, d, &o, layers, 0, m.n_layers, none, &best, &blocks);
		if (s != STATUS_OK) {
			cr_assert_eq(best, 0, "round %d: refused though a split fits", round);
			continue;
		}
		cr_assert_geq(p.tokens_per_s, 0.975 * best, "round %d: %g tok/s, %g are possible", round,
		              p.tokens_per_s, best);
		try_all(&m, d, &o, layers, 0, m.n_layers, fmax(0.985 * best, p.tokens_per_s), &best, &blocks);
		cr_assert_geq(p.n_blocks * 1.02 + 1, blocks, "round %d: %lu blocks, %lu are possible", round,
		              (unsigned long)p.n_blocks, (unsigned long)blocks);
	}
}

Test(planner, sixty_four_stages_and_many_layers_are_planned, .timeout = 60)
{
	struct plan_model m = model_of(128, 300 * MiB);
	struct plan_device d[64];
	for (uint32_t i = 0; i < 64; i++)
		d[i] = device_of(between(2500, 6000) * MiB, between(50, 100) * 1e9, between(5, 10) * 1e11);
	struct plan_options o = options_of(64);
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	plan_or_fail(&m, d, &o);
	clock_gettime(CLOCK_MONOTONIC, &b);
	fprintf(stderr, "planned in %.3f s\n", (b.tv_sec - a.tv_sec) + (b.tv_nsec - a.tv_nsec) * 1e-9);
}
