// Counters and histograms of the HTTP side, and everything as Prometheus text. See metrics.h.
#include "coordinator/metrics.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "common/status.h"
#include "coordinator/engine.h"

enum { MAX_BOUNDS = 24 };

static const struct histogram_row {
	const char *name, *help;
	double bounds[MAX_BOUNDS]; // seconds, ends with 0
} histogram_rows[METRICS_HISTOGRAM_COUNT] = {
    [METRICS_FIRST_TOKEN] = {"time_to_first_token_seconds",
			     "Time from a request's arrival to its first token.",
			     {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
			      0.75,  1,	    2.5,  5,	7.5,  10,   20,	  40,  80,   160}},
    [METRICS_INTER_TOKEN] = {"inter_token_latency_seconds",
			     "Time between tokens of one sequence.",
			     {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1,
			      2.5, 5, 10}},
    [METRICS_END_TO_END] = {"e2e_request_latency_seconds",
			    "Time from a request's arrival to its end.",
			    {0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960}},
};

static const char *const refusal_names[REFUSED_COUNT] = {
    [REFUSED_INVALID] = "invalid",	     [REFUSED_CONTEXT_LENGTH] = "context_length",
    [REFUSED_QUEUE_FULL] = "queue_full",     [REFUSED_UNAVAILABLE] = "unavailable",
    [REFUSED_UNAUTHORIZED] = "unauthorized",
};

struct metrics {
	pthread_mutex_t lock;
	uint64_t refused[REFUSED_COUNT], accepted, ended[OUTCOME_COUNT];
	struct {
		uint64_t count[MAX_BOUNDS + 1];
		double sum;
	} histogram[METRICS_HISTOGRAM_COUNT];
};

struct metrics *metrics_create(void)
{
	struct metrics *m = xcalloc(1, sizeof *m);
	pthread_mutex_init(&m->lock, NULL);
	return m;
}

void metrics_destroy(struct metrics **m)
{
	if (!*m)
		return;
	pthread_mutex_destroy(&(*m)->lock);
	free(*m);
	*m = NULL;
}

void metrics_refused(struct metrics *m, enum metrics_refusal why)
{
	pthread_mutex_lock(&m->lock);
	m->refused[why]++;
	pthread_mutex_unlock(&m->lock);
}

void metrics_accepted(struct metrics *m)
{
	pthread_mutex_lock(&m->lock);
	m->accepted++;
	pthread_mutex_unlock(&m->lock);
}

void metrics_ended(struct metrics *m, enum metrics_outcome outcome)
{
	pthread_mutex_lock(&m->lock);
	m->ended[outcome]++;
	pthread_mutex_unlock(&m->lock);
}

void metrics_observe(struct metrics *m, enum metrics_histogram which, double seconds, uint64_t count)
{
	const double *bounds = histogram_rows[which].bounds;
	unsigned i = 0;
	while (i < MAX_BOUNDS && bounds[i] > 0 && seconds > bounds[i])
		i++;
	pthread_mutex_lock(&m->lock);
	m->histogram[which].count[i] += count;
	m->histogram[which].sum += seconds * (double)count;
	pthread_mutex_unlock(&m->lock);
}

static void head(struct json_buf *out, const char *name, const char *type, const char *help)
{
	json_addf(out, "# HELP stagecoach_%s %s\n# TYPE stagecoach_%s %s\n", name, help, name, type);
}

static void single(struct json_buf *out, const char *name, const char *type, const char *help, double value)
{
	head(out, name, type, help);
	json_addf(out, "stagecoach_%s %.17g\n", name, value);
}

static void write_histogram(struct json_buf *out, const struct metrics *m, enum metrics_histogram which)
{
	const struct histogram_row *row = &histogram_rows[which];
	head(out, row->name, "histogram", row->help);
	uint64_t total = 0;
	unsigned i = 0;
	for (; i < MAX_BOUNDS && row->bounds[i] > 0; i++) {
		total += m->histogram[which].count[i];
		json_addf(out, "stagecoach_%s_bucket{le=\"%g\"} %" PRIu64 "\n", row->name, row->bounds[i], total);
	}
	total += m->histogram[which].count[i];
	json_addf(out, "stagecoach_%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", row->name, total);
	json_addf(out, "stagecoach_%s_sum %.9g\nstagecoach_%s_count %" PRIu64 "\n", row->name, m->histogram[which].sum,
		  row->name, total);
}

static void write_requests(struct json_buf *out, const struct metrics *m)
{
	single(out, "requests_accepted_total", "counter", "Requests that were accepted.", (double)m->accepted);
	head(out, "requests_refused_total", "counter", "Requests that were refused, by reason.");
	for (unsigned i = 0; i < REFUSED_COUNT; i++)
		json_addf(out, "stagecoach_requests_refused_total{reason=\"%s\"} %" PRIu64 "\n", refusal_names[i],
			  m->refused[i]);
	head(out, "request_success_total", "counter", "Accepted requests that were answered whole.");
	json_addf(out, "stagecoach_request_success_total{finished_reason=\"stop\"} %" PRIu64 "\n",
		  m->ended[OUTCOME_STOP]);
	json_addf(out, "stagecoach_request_success_total{finished_reason=\"length\"} %" PRIu64 "\n",
		  m->ended[OUTCOME_LENGTH]);
	single(out, "requests_cancelled_total", "counter", "Accepted requests whose client went away.",
	       (double)m->ended[OUTCOME_CANCELLED]);
	head(out, "requests_failed_total", "counter", "Accepted requests that could not be answered whole, by reason.");
	json_addf(out, "stagecoach_requests_failed_total{reason=\"engine\"} %" PRIu64 "\n",
		  m->ended[OUTCOME_FAILED_ENGINE]);
	json_addf(out, "stagecoach_requests_failed_total{reason=\"slow_client\"} %" PRIu64 "\n",
		  m->ended[OUTCOME_FAILED_SLOW_CLIENT]);
	uint64_t ended = 0;
	for (unsigned i = 0; i < OUTCOME_COUNT; i++)
		ended += m->ended[i];
	single(out, "requests_in_hand", "gauge", "Accepted requests that have not ended.",
	       (double)(m->accepted - ended));
}

static void write_engine(struct json_buf *out, const struct engine_info *info)
{
	const struct scheduler_stats *s = &info->stats;
	single(out, "num_requests_running", "gauge", "Sequences that have blocks.", s->n_running);
	single(out, "num_requests_waiting", "gauge", "Sequences that wait for blocks or a place.", s->n_waiting);
	double used = s->blocks_total ? 1 - (double)s->blocks_free / (double)s->blocks_total : 0;
	single(out, "kv_cache_usage_perc", "gauge", "Share of KV blocks held by sequences, 1 is all.", used);
	single(out, "kv_blocks_total", "gauge", "KV blocks of the pool.", (double)s->blocks_total);
	single(out, "kv_blocks_free", "gauge", "KV blocks held by no sequence; cached ones count as free.",
	       (double)s->blocks_free);
	single(out, "prompt_tokens_total", "counter", "Prompt tokens processed.", (double)s->prompt_tokens);
	single(out, "generation_tokens_total", "counter", "Tokens generated.", (double)s->generation_tokens);
	single(out, "num_preemptions_total", "counter", "Sequences preempted for lack of blocks.",
	       (double)s->preemptions);
	single(out, "recomputed_tokens_total", "counter", "Tokens computed again after preemption or recovery.",
	       (double)s->recomputed_tokens);
	single(out, "prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
	       (double)s->prefix_queries);
	single(out, "prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
	       (double)s->prefix_hits);
	single(out, "recoveries_total", "counter", "Times the pipeline was rebuilt.", (double)info->recoveries);
	head(out, "stage_busy_seconds_total", "counter", "Time a stage computed.");
	for (uint32_t i = 0; i < info->n_stages; i++)
		json_addf(out, "stagecoach_stage_busy_seconds_total{stage=\"%u\"} %.9g\n", i, info->stage[i].busy_s);
	head(out, "stage_wait_seconds_total", "counter", "Time a stage waited for steps or data.");
	for (uint32_t i = 0; i < info->n_stages; i++)
		json_addf(out, "stagecoach_stage_wait_seconds_total{stage=\"%u\"} %.9g\n", i, info->stage[i].wait_s);
}

void metrics_write(struct metrics *m, const struct engine_info *info, struct json_buf *out)
{
	write_engine(out, info);
	pthread_mutex_lock(&m->lock);
	write_requests(out, m);
	for (unsigned i = 0; i < METRICS_HISTOGRAM_COUNT; i++)
		write_histogram(out, m, i);
	pthread_mutex_unlock(&m->lock);
}
