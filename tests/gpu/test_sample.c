// The sampler on a GPU against the CPU: the same tokens from the same logits and seeds, and the same log-probabilities.
#include "gpu_check.h"

enum { ROWS = 24, VOCAB = 50257, STRIDE = 50304 };

static float *random_logits(uint64_t seed, float deviation)
{
	struct op_random r = {seed};
	float *x = op_random_floats(&r, (size_t)ROWS * STRIDE, deviation);
	for (int i = 0; i < ROWS; i++)
		for (int k = VOCAB; k < STRIDE; k++)
			x[(size_t)i * STRIDE + (size_t)k] = 1e9f; // padding
	return x;
}

static int compare(const struct sample_row *settings, const float *logits, int vocab)
{
	struct ops_context *cpu = gpu_reference(), *c = gpu_context(DTYPE_BF16);
	struct sample_row a[ROWS], b[ROWS];
	memcpy(a, settings, sizeof a);
	memcpy(b, settings, sizeof b);
	for (int i = 0; i < ROWS; i++)
		a[i].id = b[i].id = -7;
	size_t bytes = (size_t)ROWS * STRIDE * sizeof *logits;
	float *on_cpu = malloc(bytes), *on_gpu = gpu_copy(logits, bytes);
	memcpy(on_cpu, logits, bytes);
	ops_cpu()->sample(cpu, &(struct sample_args){
		.n_rows = ROWS, .vocab_size = vocab, .stride = STRIDE, .logits = on_cpu, .rows = a});
	ops_cuda()->sample(c, &(struct sample_args){
		.n_rows = ROWS, .vocab_size = vocab, .stride = STRIDE, .logits = on_gpu, .rows = b});
	int different = 0;
	for (int i = 0; i < ROWS; i++) {
		cr_assert(b[i].id >= 0 && b[i].id < vocab, "row %d: token %d", i, b[i].id);
		different += a[i].id != b[i].id;
		if (a[i].want_logprob && a[i].id == b[i].id)
			cr_assert(a[i].logprob == b[i].logprob || fabsf(a[i].logprob - b[i].logprob) < 1e-4f,
			          "row %d: log-probability %.9g, expected %.9g", i, b[i].logprob, a[i].logprob);
		for (int t = 0; t < a[i].n_top; t++) {
			cr_assert_eq(b[i].top_id[t], a[i].top_id[t], "row %d: top %d is %d, expected %d", i, t, b[i].top_id[t],
			             a[i].top_id[t]);
			cr_assert(a[i].top_logprob[t] == b[i].top_logprob[t] ||
			          fabsf(a[i].top_logprob[t] - b[i].top_logprob[t]) < 1e-4f);
		}
	}
	free(on_cpu);
	cudaFree(on_gpu);
	ops_cuda()->destroy(&c);
	ops_cpu()->destroy(&cpu);
	return different;
}

static struct sample_row plain(int i)
{
	return (struct sample_row){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 77 + (uint64_t)i,
	                           .choice = (uint32_t)i % 3, .position = 100u + (uint32_t)i};
}

Test(gpu_sample, greedy_takes_the_smallest_of_equal_ids)
{
	float *x = random_logits(1, 3);
	struct sample_row rows[ROWS];
	for (int i = 0; i < ROWS; i++) {
		rows[i] = plain(i);
		rows[i].temperature = 0;
		rows[i].want_logprob = true;
		rows[i].n_top = i % (SAMPLE_MAX_TOP + 1);
		x[(size_t)i * STRIDE + 40000] = x[(size_t)i * STRIDE + (size_t)(100 + i)] = 50;
	}
	x[0] = NAN, x[5] = -INFINITY;
	x[STRIDE + 9] = INFINITY; // an infinite logit takes all
	for (int k = 0; k < STRIDE; k++)
		x[2 * STRIDE + k] = -INFINITY;
	cr_assert_eq(compare(rows, x, VOCAB), 0);
	free(x);
}

// The two add in different orders and round exponentials differently, so a draw on a boundary may fall on either side.
Test(gpu_sample, the_same_seeds_draw_the_cpus_tokens)
{
	for (int round = 0; round < 4; round++) {
		float *x = random_logits(2 + (uint64_t)round, 2);
		struct sample_row rows[ROWS];
		for (int i = 0; i < ROWS; i++) {
			rows[i] = plain(i + ROWS * round);
			rows[i].temperature = 0.3f + 0.1f * (float)(i % 12);
			rows[i].top_k = i % 4 == 1 ? 40 : i % 4 == 3 ? 3 + i : i % 7 == 0 ? VOCAB : 0;
			rows[i].top_p = i % 4 >= 2 ? 0.9f : 1;
			rows[i].min_p = i % 3 == 2 ? 0.05f : 0;
			rows[i].want_logprob = i % 2;
		}
		int different = compare(rows, x, VOCAB);
		cr_assert(different <= 1, "%d of %d tokens differ", different, ROWS);
		free(x);
	}
}

Test(gpu_sample, ties_at_the_cuts_go_to_the_smaller_ids)
{
	float *x = random_logits(9, 1);
	for (size_t i = 0; i < (size_t)ROWS * STRIDE; i++)
		x[i] = roundf(x[i] * 2); // few values, many ties
	struct sample_row rows[ROWS];
	for (int i = 0; i < ROWS; i++) {
		rows[i] = plain(i);
		rows[i].top_k = i % 2 ? 1 + 5 * i : 0;
		rows[i].top_p = i % 2 ? 1 : 0.01f + 0.01f * (float)i;
	}
	int different = compare(rows, x, VOCAB);
	cr_assert(different <= 1, "%d of %d tokens differ", different, ROWS);
	free(x);
}

Test(gpu_sample, penalties_bias_and_bans_give_the_cpus_tokens_and_leave_raw_log_probabilities)
{
	float *x = random_logits(5, 4);
	int32_t history[900], bias_id[] = {5, 5, 40000, VOCAB + 3}, banned[3];
	float bias_value[] = {40, -1, 38, 1e6f};
	struct op_random r = {4};
	for (int i = 0; i < 900; i++)
		history[i] = i % 3 ? op_random_below(&r, VOCAB) : 17 + i % 4;
	struct sample_row rows[ROWS];
	for (int round = 0; round < 2; round++) { // the counts are zero again afterwards
		for (int i = 0; i < ROWS; i++) {
			rows[i] = plain(i);
			rows[i].temperature = i % 2 ? 0 : 0.7f;
			rows[i].want_logprob = i % 3 != 0;
			rows[i].n_top = i % 3 == 1 ? 4 : 0;
			if (i % 4 < 3) {
				rows[i].history = history;
				rows[i].n_prompt = 400;
				rows[i].n_output = 500 - i;
				rows[i].repetition_penalty = 1.3f;
				rows[i].presence_penalty = i % 4 == 1 ? 0.5f : 0;
				rows[i].frequency_penalty = i % 4 == 2 ? 0.25f : 0;
			}
			if (i % 5 == 0) {
				rows[i].bias_id = bias_id;
				rows[i].bias_value = bias_value;
				rows[i].n_bias = 4;
			}
			if (i % 5 < 2) {
				rows[i].banned = banned;
				rows[i].n_banned = 1;
			}
		}
		banned[0] = 5;
		int different = compare(rows, x, VOCAB);
		cr_assert(different <= 1, "%d of %d tokens differ", different, ROWS);
	}
	free(x);
}

Test(gpu_sample, a_vocabulary_of_a_few_tokens_works)
{
	float *x = random_logits(6, 1);
	struct sample_row rows[ROWS];
	for (int i = 0; i < ROWS; i++) {
		rows[i] = plain(i);
		rows[i].top_k = i % 5;
		rows[i].top_p = 0.2f + 0.03f * (float)i;
		rows[i].n_top = 5; // more than there are
	}
	for (int vocab = 1; vocab <= 4; vocab++)
		cr_assert(compare(rows, x, vocab) <= 1);
	free(x);
}
