// Exactness of the demo model (tests/golden/demo_reference.json, float32): after the prompt and each beginning of the
// reference's own tokens, the best token and the log-probabilities of the reference's five best ones. Skipped where the
// model is not there ($STAGECOACH_MODEL, or the cache that quickstart fills).
#include <jansson.h>
#include <math.h>

#include "stage_driver.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { EVERY = 10 }; // prompts: a sanitized forward pass is slow, and the numbers are the same
#else
enum { EVERY = 1 };
#endif
enum { MAX_ERRORS = 40 * 64 * 5 };

static const double error_median_max = 0.0063, error_p95_max = 0.0256, sure_margin = 0.25;

static const char *demo_model(void)
{
	static char path[1024];
	const char *given = getenv("STAGECOACH_MODEL"), *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
	if (given)
		snprintf(path, sizeof path, "%s", given);
	else
		snprintf(path, sizeof path, "%s%s/stagecoach/SmolLM2-135M-Instruct.Q4_1.gguf", cache ? cache : home ? home : "",
		         cache ? "" : "/.cache");
	struct stat s;
	return strstr(path, "SmolLM2-135M-Instruct.Q4_1.gguf") && !stat(path, &s) ? path : NULL;
}

static int by_size(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static double log_sum(const float *logits, int n)
{
	double max = logits[0], sum = 0;
	for (int i = 1; i < n; i++)
		max = logits[i] > max ? logits[i] : max;
	for (int i = 0; i < n; i++)
		sum += exp(logits[i] - max);
	return max + log(sum);
}

static uint32_t copy_ids(const json_t *array, uint32_t *out)
{
	for (size_t i = 0; i < json_array_size(array); i++)
		out[i] = (uint32_t)json_integer_value(json_array_get(array, i));
	return (uint32_t)json_array_size(array);
}

struct tally { int positions, flipped, flipped_sure, n_errors; double error[MAX_ERRORS]; };

static void check_prompt(struct driver *d, const json_t *p, struct tally *tally)
{
	static struct driver_seq s;
	uint32_t ids[2048], n_prompt = copy_ids(json_object_get(p, "prompt_ids"), ids);
	uint32_t n_tokens = copy_ids(json_object_get(p, "tokens"), ids + n_prompt);
	driver_seq_init(&s, 0, ids, n_prompt + n_tokens - 1);
	driver_generate(d, &s, 2048, 1);
	for (uint32_t i = 0; i < n_tokens; i++) {
		const float *logits = stage_logits(d->stage[d->o.n_stages - 1], (int)(n_prompt - 1 + i));
		int best = 0;
		for (int t = 1; t < d->config.vocab_size; t++)
			best = logits[t] > logits[best] ? t : best;
		double total = log_sum(logits, d->config.vocab_size);
		const json_t *top = json_array_get(json_object_get(p, "top_ids"), i);
		const json_t *values = json_array_get(json_object_get(p, "top_logprobs"), i);
		double margin = json_number_value(json_array_get(json_object_get(p, "margin"), i));
		tally->positions++;
		if ((uint32_t)best != ids[n_prompt + i]) {
			tally->flipped++;
			tally->flipped_sure += margin > sure_margin;
		}
		for (size_t k = 0; k < json_array_size(top) && tally->n_errors < MAX_ERRORS; k++) {
			json_int_t id = json_integer_value(json_array_get(top, k));
			tally->error[tally->n_errors++] =
				fabs(logits[id] - total - json_number_value(json_array_get(values, k)));
		}
	}
	driver_end(d, &s);
	d->next_block = 0; // its blocks are free again
}

Test(demo, log_probabilities_are_ten_times_closer_to_exact_arithmetic_than_with_8_bit_activations, .timeout = 240)
{
	static struct driver d;
	static struct tally tally;
	char path[1024];
	const char *model = demo_model();
	if (!model)
		cr_skip_test("the demo model is not here: run deploy/quickstart --prepare, or set STAGECOACH_MODEL");
	snprintf(path, sizeof path, "%s/golden/demo_reference.json", TEST_DATA_DIR);
	json_t *reference = json_load_file(path, 0, NULL);
	cr_assert_not_null(reference, "%s", path);
	driver_open(&d, &(struct driver_options){.model = model, .n_stages = 1, .max_batch_tokens = 2048, .max_seqs = 4,
	                                         .max_context = 2048, .block_size = 16, .threads = 2,
	                                         .kv_dtype = DTYPE_F16});
	const json_t *prompts = json_object_get(reference, "prompts");
	for (size_t i = 0; i < json_array_size(prompts); i += EVERY)
		check_prompt(&d, json_array_get(prompts, i), &tally);
	driver_close(&d);
	json_decref(reference);
	qsort(tally.error, (size_t)tally.n_errors, sizeof *tally.error, by_size);
	double median = tally.error[tally.n_errors / 2], p95 = tally.error[tally.n_errors * 95 / 100];
	fprintf(stderr, "%d positions: %d best tokens differ, %d of them at a margin above %.2f; error of the top five: "
	        "median %.5f, 95th percentile %.5f, largest %.5f\n", tally.positions, tally.flipped, tally.flipped_sure,
	        sure_margin, median, p95, tally.error[tally.n_errors - 1]);
	cr_expect_eq(tally.flipped_sure, 0);
	cr_expect_lt(median, error_median_max);
	cr_expect_lt(p95, error_p95_max);
}
