// Sampling against a plain reference in double precision that sorts the whole vocabulary.
#include "op_check.h"

static const struct sample_row plain = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};

static void sample(struct ops_context *x, int n_rows, int vocab, int stride, float *logits, struct sample_row *rows)
{
	cpu_sample(x, &(struct sample_args){
	                      .n_rows = n_rows, .vocab_size = vocab, .stride = stride, .logits = logits, .rows = rows});
}

static struct sample_row sample_row(struct ops_context *x, int vocab, const float *logits, struct sample_row row)
{
	float *copy = memcpy(malloc((size_t)vocab * 4), logits, (size_t)vocab * 4);
	sample(x, 1, vocab, vocab, copy, &row);
	free(copy);
	return row;
}

Test(sample, greedy_takes_the_smallest_id_among_equals_and_never_padding_or_nan)
{
	const int vocabs[] = {1, 2, 17, 1000, 1024, 1025, 5000, 49152};
	for (size_t v = 0; v < sizeof(vocabs) / sizeof(vocabs[0]); v++)
		FOR_EACH_ISA(isa) {
			int vocab = vocabs[v], stride = vocab + 13;
			struct op_random random = {v + 1};
			struct ops_context *x = op_context(isa, 2);
			float *logits = op_random_floats(&random, (size_t)(3 * stride), 2);
			struct sample_row rows[3] = {plain, plain, plain};
			int expected[3];
			for (int r = 0; r < 3; r++) {
				float *l = logits + r * stride;
				rows[r].temperature = 0;
				expected[r] = op_random_below(&random, vocab);
				for (int i = 0; i < 13; i++)
					l[vocab + i] = i % 2 ? 1000 : NAN;
				for (int i = 0; i < vocab; i++)
					l[i] = i % 7 == 3 && i != expected[r] ? NAN : i < expected[r] ? fminf(l[i], 19) : l[i];
				l[expected[r]] = 20;
				for (int i = 0; i < 5; i++) // equals behind it
					l[expected[r] + op_random_below(&random, vocab - expected[r])] = 20;
			}
			sample(x, 3, vocab, stride, logits, rows);
			for (int r = 0; r < 3; r++)
				cr_assert_eq(rows[r].id, expected[r], "%s vocabulary %d row %d: %d, expected %d", op_isa_name[isa], vocab,
				             r, rows[r].id, expected[r]);
			free(logits);
			ops_cpu()->destroy(&x);
		}
}

struct pair {
	float logit;
	int id;
};

static int descending(const void *a, const void *b)
{
	const struct pair *p = a, *q = b;
	return p->logit != q->logit ? (p->logit < q->logit ? 1 : -1) : p->id - q->id;
}

static struct pair *sorted(const float *x, int n)
{
	struct pair *p = malloc(sizeof(*p) * (size_t)n);
	for (int i = 0; i < n; i++)
		p[i] = (struct pair){x[i], i};
	qsort(p, (size_t)n, sizeof(*p), descending);
	return p;
}

static double reference_log_sum(const float *x, int n)
{
	double max = -INFINITY, sum = 0;
	for (int i = 0; i < n; i++)
		max = fmax(max, (double)x[i]);
	for (int i = 0; i < n; i++)
		sum += exp((double)x[i] - max);
	return max + log(sum);
}

Test(sample, log_probabilities_are_of_the_raw_logits_and_the_top_ones_descend_with_ties_by_id)
{
	const int vocabs[] = {20, 50, 1023, 4097, 49152, 151936};
	for (size_t v = 0; v < sizeof(vocabs) / sizeof(vocabs[0]); v++) {
		int vocab = vocabs[v];
		struct op_random random = {v + 50};
		float *logits = op_random_floats(&random, (size_t)vocab, 4);
		for (int i = 0; i < vocab; i++) // many ties
			logits[i] = roundf(logits[i] * 8) / 8;
		logits[3] = -INFINITY;
		struct pair *order = sorted(logits, vocab);
		double log_sum = reference_log_sum(logits, vocab);
		int banned[] = {order[0].id, order[1].id}, bias_id[] = {order[5].id};
		float bias[] = {30};
		FOR_EACH_ISA(isa) for (int changed = 0; changed < 2; changed++) {
			struct ops_context *x = op_context(isa, 1);
			struct sample_row row = plain;
			row.temperature = 0;
			row.n_top = 20;
			row.want_logprob = true;
			if (changed) {
				row.banned = banned;
				row.n_banned = 2;
				row.bias_id = bias_id;
				row.bias_value = bias;
				row.n_bias = 1;
			}
			row = sample_row(x, vocab, logits, row);
			int expected = changed ? order[5].id : order[0].id;
			cr_assert_eq(row.id, expected, "%s: %d, expected %d", op_isa_name[isa], row.id, expected);
			double want = (double)logits[expected] - log_sum;
			cr_assert_float_eq(row.logprob, want, 2e-6, "%s: %.9g, expected %.9g", op_isa_name[isa], (double)row.logprob,
			                   want);
			for (int i = 0; i < 20; i++) {
				cr_assert_eq(row.top_id[i], order[i].id, "%s vocabulary %d: top %d is %d, expected %d", op_isa_name[isa],
				             vocab, i, row.top_id[i], order[i].id);
				want = (double)order[i].logit - log_sum;
				cr_assert((double)row.top_logprob[i] == want || fabs((double)row.top_logprob[i] - want) < 2e-6,
				          "%s: top %d is %.9g, expected %.9g", op_isa_name[isa], i, (double)row.top_logprob[i], want);
			}
			ops_cpu()->destroy(&x);
		}
		free(order);
		free(logits);
	}
}

Test(sample, bias_bans_and_penalties_change_the_logits_in_the_stated_order)
{
	enum { VOCAB = 3000, PROMPT = 400, OUTPUT = 300 };
	struct op_random random = {70};
	float *logits = op_random_floats(&random, VOCAB, 3);
	int32_t history[PROMPT + OUTPUT], bias_id[] = {5, 9, 5, VOCAB - 1}, banned[] = {9, 77};
	float bias[] = {1.5f, 100, -0.25f, 2};
	for (int i = 0; i < PROMPT + OUTPUT; i++)
		history[i] = op_random_below(&random, 900);
	history[3] = 5;
	history[PROMPT] = 77;
	for (int which = 0; which < 8; which++) {
		struct sample_row row = plain;
		row.temperature = 0;
		row.bias_id = bias_id;
		row.bias_value = bias;
		row.n_bias = 4;
		row.banned = banned;
		row.n_banned = 2;
		row.history = history;
		row.n_prompt = PROMPT;
		row.n_output = OUTPUT;
		row.repetition_penalty = which & 1 ? 1.3f : 1;
		row.presence_penalty = which & 2 ? 0.7f : 0;
		row.frequency_penalty = which & 4 ? -0.2f : 0;
		double expected[VOCAB];
		for (int i = 0; i < VOCAB; i++)
			expected[i] = (double)logits[i];
		for (int i = 0; i < 4; i++)
			expected[bias_id[i]] += (double)bias[i];
		for (int i = 0; i < VOCAB; i++) {
			int in_all = 0, in_output = 0;
			for (int k = 0; k < PROMPT + OUTPUT; k++) {
				in_all += history[k] == i;
				in_output += k >= PROMPT && history[k] == i;
			}
			if (in_all)
				expected[i] = expected[i] > 0 ? expected[i] / (double)row.repetition_penalty
				                              : expected[i] * (double)row.repetition_penalty;
			expected[i] -= in_output * (double)row.frequency_penalty;
			expected[i] -= in_output ? (double)row.presence_penalty : 0;
		}
		FOR_EACH_ISA(isa) {
			struct ops_context *x = op_context(isa, 1);
			float *copy = memcpy(malloc(VOCAB * 4), logits, VOCAB * 4);
			sample(x, 1, VOCAB, VOCAB, copy, &row);
			for (int i = 0; i < VOCAB; i++) {
				if (i == 9 || i == 77)
					cr_assert_eq(copy[i], -INFINITY);
				else
					cr_assert(fabs((double)copy[i] - expected[i]) < 1e-5, "%s which %d: [%d] is %.9g, expected %.9g",
					          op_isa_name[isa], which, i, (double)copy[i], expected[i]);
			}
			free(copy);
			ops_cpu()->destroy(&x);
		}
	}
	free(logits);
}

// Probabilities after temperature, top-k, top-p and min-p; zero for tokens that are cut.
static double *reference_probabilities(const float *x, int n, const struct sample_row *r)
{
	struct pair *order = sorted(x, n);
	double *w = calloc((size_t)n, sizeof(double)), sum = 0, have = 0, total = 0;
	int kept = r->top_k > 0 && r->top_k < n ? r->top_k : n;
	for (int i = 0; i < kept; i++)
		sum += exp(((double)x[order[i].id] - (double)order[0].logit) / (double)r->temperature);
	for (int i = 0; i < kept; i++) {
		double e = exp(((double)x[order[i].id] - (double)order[0].logit) / (double)r->temperature);
		if (r->top_p < 1 && i > 0 && have >= (double)r->top_p * sum)
			break;
		have += e;
		if (e >= (double)r->min_p)
			w[order[i].id] = e;
	}
	for (int i = 0; i < n; i++)
		total += w[i];
	for (int i = 0; i < n; i++)
		w[i] /= total;
	free(order);
	return w;
}

static const struct {
	int vocab;
	float deviation, temperature;
	int top_k;
	float top_p, min_p;
} draws[] = {
	{40, 2, 1, 0, 1, 0},          {40, 2, 0.7f, 5, 1, 0},       {3000, 3, 1, 0, 0.6f, 0},   {3000, 3, 1, 0, 1, 0.1f},
	{3000, 3, 1.3f, 20, 0.8f, 0}, {3000, 1, 2, 50, 0.95f, 0.2f}, {3000, 3, 1, 1, 1, 0},      {3000, 3, 1, 0, 1e-6f, 0},
	{50, 0.01f, 1, 7, 1, 0},      {3000, 0.5f, 1, 2999, 0.02f, 0}, {20000, 0.1f, 5, 0, 0.5f, 0}, {3000, 3, 1, 5000, 1, 0},
	{3000, 40, 0.5f, 100, 0.999f, 0}, {64, 1, 100, 0, 0.999999f, 0},
};

Test(sample, tokens_are_drawn_as_often_as_temperature_top_k_top_p_and_min_p_say)
{
	enum { DRAWS = 4000 };
	for (size_t c = 0; c < sizeof(draws) / sizeof(draws[0]); c++) {
		int vocab = draws[c].vocab;
		struct op_random random = {c + 80};
		float *logits = op_random_floats(&random, (size_t)vocab, draws[c].deviation);
		for (int i = 0; i < vocab; i += 5) // ties
			logits[i] = logits[(i + 5) % vocab];
		struct sample_row row = plain;
		row.temperature = draws[c].temperature;
		row.top_k = draws[c].top_k;
		row.top_p = draws[c].top_p;
		row.min_p = draws[c].min_p;
		double *p = reference_probabilities(logits, vocab, &row);
		FOR_EACH_ISA(isa) {
			struct ops_context *x = op_context(isa, 1);
			int *count = calloc((size_t)vocab, sizeof(int));
			int n = vocab > 10000 ? DRAWS / 4 : DRAWS;
			for (int i = 0; i < n; i++) {
				row.seed = 7;
				row.position = (uint32_t)i;
				sample(x, 1, vocab, vocab, logits, &row);
				cr_assert(row.id >= 0 && row.id < vocab);
				count[row.id]++;
			}
			// Six standard deviations, and what lies at the edge of top-p by rounding may come or not.
			for (int i = 0; i < vocab; i++) {
				double limit = 6 * sqrt(n * p[i] * (1 - p[i])) + 3;
				cr_assert(fabs(count[i] - n * p[i]) <= (p[i] > 0 ? limit : 0),
				          "%s case %zu: token %d came %d times, expected %.1f", op_isa_name[isa], c, i, count[i], n * p[i]);
			}
			free(count);
			ops_cpu()->destroy(&x);
		}
		free(p);
		free(logits);
	}
}

Test(sample, a_draw_depends_on_seed_choice_and_position_only)
{
	enum { VOCAB = 2000, ROWS = 30 };
	struct op_random random = {90};
	float *logits = op_random_floats(&random, ROWS * VOCAB, 1), *copy = malloc(ROWS * VOCAB * 4);
	int32_t history[50];
	for (int i = 0; i < 50; i++)
		history[i] = op_random_below(&random, VOCAB);
	FOR_EACH_ISA(isa) {
		struct sample_row rows[ROWS], again[ROWS];
		struct ops_context *one = op_context(isa, 1), *many = op_context(isa, 4);
		for (int r = 0; r < ROWS; r++) {
			rows[r] = plain;
			rows[r].seed = (uint64_t)r / 10;
			rows[r].choice = (uint32_t)r / 3;
			rows[r].position = (uint32_t)r % 3;
			rows[r].top_k = r % 2 ? 40 : 0;
			rows[r].top_p = r % 3 ? 0.9f : 1;
			rows[r].want_logprob = r % 5 == 0;
			rows[r].repetition_penalty = r % 7 == 0 ? 1.1f : 1;
			rows[r].history = history;
			rows[r].n_prompt = rows[r].n_output = 25;
			again[r] = rows[r];
		}
		memcpy(copy, logits, ROWS * VOCAB * 4);
		sample(many, ROWS, VOCAB, VOCAB, copy, rows);
		for (int r = ROWS - 1; r >= 0; r--) {
			again[r] = sample_row(one, VOCAB, logits + r * VOCAB, again[r]);
			cr_assert_eq(rows[r].id, again[r].id, "%s row %d: %d, alone %d", op_isa_name[isa], r, rows[r].id, again[r].id);
			if (rows[r].want_logprob)
				op_assert_same_bits(&rows[r].logprob, &again[r].logprob, 1, "%s row %d", op_isa_name[isa], r);
		}
		// Each of the three matters.
		int differ[3] = {0};
		for (int i = 0; i < 20; i++) {
			struct sample_row a = plain, b = plain;
			b.seed = (uint64_t)i + 1;
			differ[0] += sample_row(one, VOCAB, logits, a).id != sample_row(one, VOCAB, logits, b).id;
			b = plain;
			b.choice = (uint32_t)i + 1;
			differ[1] += sample_row(one, VOCAB, logits, a).id != sample_row(one, VOCAB, logits, b).id;
			b = plain;
			b.position = (uint32_t)i + 1;
			differ[2] += sample_row(one, VOCAB, logits, a).id != sample_row(one, VOCAB, logits, b).id;
		}
		for (int i = 0; i < 3; i++)
			cr_assert_gt(differ[i], 10, "%d", i);
		ops_cpu()->destroy(&one);
		ops_cpu()->destroy(&many);
	}
	free(logits);
	free(copy);
}

Test(sample, impossible_logits_give_a_defined_token)
{
	enum { VOCAB = 100 };
	struct row {
		float fill, value;
		int at, expected;
	} rows[] = {
		{NAN, NAN, 0, 0}, {-INFINITY, -INFINITY, 0, 0}, {NAN, 1, 60, 60}, {-INFINITY, -5, 99, 99}, {0, INFINITY, 42, 42},
		{NAN, INFINITY, 7, 7}, {-INFINITY, NAN, 7, 0}, {-3e38f, 3e38f, 9, 9},
	};
	FOR_EACH_ISA(isa) for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		for (int mode = 0; mode < 8; mode++) {
			struct ops_context *x = op_context(isa, 1);
			float logits[VOCAB];
			for (int k = 0; k < VOCAB; k++)
				logits[k] = k == rows[i].at ? rows[i].value : rows[i].fill;
			struct sample_row row = plain;
			row.temperature = mode & 1 ? 1 : mode & 2 ? 1e-30f : 0;
			row.top_k = mode & 2 ? 10 : 0;
			row.top_p = mode & 4 ? 0.5f : 1;
			row.want_logprob = true;
			row.n_top = 5;
			row = sample_row(x, VOCAB, logits, row);
			cr_assert_eq(row.id, rows[i].expected, "%s case %zu mode %d: %d, expected %d", op_isa_name[isa], i, mode, row.id,
			             rows[i].expected);
			cr_assert(!isnan(row.logprob), "%s case %zu mode %d", op_isa_name[isa], i, mode);
			for (int k = 0; k < 5; k++)
				cr_assert(!isnan(row.top_logprob[k]) && row.top_id[k] >= 0 && row.top_id[k] < VOCAB);
			ops_cpu()->destroy(&x);
		}
}

Test(sample, a_vocabulary_smaller_than_the_top_list_fills_the_rest_with_no_token)
{
	float logits[3] = {1, 3, 2};
	FOR_EACH_ISA(isa) {
		struct ops_context *x = op_context(isa, 1);
		struct sample_row row = plain;
		row.n_top = 5;
		row.temperature = 0;
		row = sample_row(x, 3, logits, row);
		const int expected[] = {1, 2, 0, -1, -1};
		for (int i = 0; i < 5; i++)
			cr_assert_eq(row.top_id[i], expected[i]);
		ops_cpu()->destroy(&x);
	}
}

Test(sample, top_p_cuts_under_a_top_k_above_the_number_of_tokens)
{
	// 0.5, 0.25, 0.15, 0.1: the first two hold more than 0.7; the rest have no weight at all at this temperature.
	enum { VOCAB = 3000, DRAWS = 200 };
	const float p[] = {0.5f, 0.25f, 0.15f, 0.1f};
	float logits[VOCAB];
	for (int i = 0; i < VOCAB; i++)
		logits[i] = i < 4 ? logf(p[i]) : -200;
	FOR_EACH_ISA(isa) {
		struct ops_context *x = op_context(isa, 1);
		const int top_k[] = {100, VOCAB, VOCAB + 1};
		for (int k = 0; k < 3; k++)
			for (int i = 0; i < DRAWS; i++) {
				struct sample_row row = plain;
				row.top_k = top_k[k];
				row.top_p = 0.7f;
				row.seed = (uint64_t)i;
				row = sample_row(x, VOCAB, logits, row);
				cr_assert(row.id < 2, "%s, top-k %d: token %d", op_isa_name[isa], top_k[k], row.id);
			}
		ops_cpu()->destroy(&x);
	}
}
