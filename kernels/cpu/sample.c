// Sampling, one row per thread. The surprising decision: the vocabulary is never sorted. top-k, top-p and min-p each
// keep a prefix of the tokens in descending order, so all that is needed is where the shortest prefix ends: a histogram
// finds the bin of that place, and only that bin is sorted. The draw then walks the kept tokens in ascending id.
//
// Order among equal logits is by id everywhere. NaN counts as -infinity; a row without any logit above -infinity gives
// its smallest id.
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

enum {
	BINS_PER_UNIT = 64, // of (max - logit) / temperature
	BINS = 2048,        // the last one holds all from 32 on
};
// Candidates are first those within e^-2 of the best; only if top-k or top-p want more are further ones looked at. The
// last step takes all that are not zero. Which step suffices does not change the result.
static const float candidate_weight[] = {1.3533528e-1f, 1.8315639e-2f, 3.3546263e-4f, 0x1p-149f};
enum { CANDIDATE_STEPS = sizeof(candidate_weight) / sizeof(candidate_weight[0]) };

struct candidate {
	float logit;
	int32_t id;
};

struct scratch {
	float *logits;               // [vocab] changed copy
	float *weights;              // [vocab]
	int32_t *list;               // [vocab]
	uint32_t *counts;            // [vocab]
	struct candidate *sorted;    // [vocab]
	float *chunk_max, *chunk_sum; // [chunks]
	double mass[BINS];
	int count[BINS];
};

struct job {
	struct ops_context *context;
	const struct sample_args *args;
	const struct sample_kernel *kernel;
};

static int chunk_count(int vocab)
{
	return (vocab + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
}

static struct scratch *carve(struct ops_context *c, int thread, int vocab)
{
	size_t v = ((size_t)vocab + 15) / 16 * 16, chunks = ((size_t)chunk_count(vocab) + 15) / 16 * 16;
	size_t head = (sizeof(struct scratch) + 63) / 64 * 64;
	char *p = cpu_thread_scratch(c, thread, head + v * (4 * sizeof(float) + sizeof(struct candidate)) +
	                                                2 * chunks * sizeof(float));
	struct scratch *s = (struct scratch *)p;
	s->logits = (float *)(p + head);
	s->weights = s->logits + v;
	s->list = (int32_t *)(s->weights + v);
	s->counts = (uint32_t *)(s->list + v);
	s->sorted = (struct candidate *)(s->counts + v);
	s->chunk_max = (float *)(s->sorted + v);
	s->chunk_sum = s->chunk_max + chunks;
	return s;
}

static float max_of(const float *chunk_max, int vocab)
{
	float m = -INFINITY;
	for (int i = 0; i < chunk_count(vocab); i++)
		m = chunk_max[i] > m ? chunk_max[i] : m;
	return m;
}

// The smallest id whose logit is the maximum.
static int32_t argmax(const float *x, const float *chunk_max, int vocab, float max)
{
	for (int c = 0; c < chunk_count(vocab); c++)
		if (chunk_max[c] == max)
			for (int i = c * SAMPLE_CHUNK; i < vocab && i < (c + 1) * SAMPLE_CHUNK; i++)
				if (x[i] == max)
					return i;
	return 0;
}

// Logarithm of the sum of exponentials. An infinite logit shares all probability with its equals.
static double log_sum(const struct job *j, struct scratch *s, const float *x, int vocab, float max)
{
	double sum = 0;
	if (max == -INFINITY)
		return 0;
	if (max == INFINITY) {
		for (int i = 0; i < vocab; i++)
			sum += x[i] == INFINITY;
		return log(sum);
	}
	j->kernel->chunk_sum_exp(s->chunk_sum, x, vocab, max);
	for (int i = 0; i < chunk_count(vocab); i++)
		sum += (double)s->chunk_sum[i];
	return log(sum);
}

static float log_probability(float logit, float max, double log_sum)
{
	if (!(logit > -INFINITY))
		return -INFINITY;
	if (max == INFINITY)
		return logit == INFINITY ? (float)-log_sum : -INFINITY;
	return (float)((double)logit - (double)max - log_sum);
}

static void find_top(struct sample_row *r, const float *x, const float *chunk_max, int vocab, float max, double log_sum)
{
	int n = 0, want = r->n_top < SAMPLE_MAX_TOP ? r->n_top : SAMPLE_MAX_TOP;
	float logit[SAMPLE_MAX_TOP];
	for (int c = 0; c < chunk_count(vocab); c++) {
		if (n == want && !(chunk_max[c] > logit[want - 1]))
			continue;
		for (int i = c * SAMPLE_CHUNK; i < vocab && i < (c + 1) * SAMPLE_CHUNK; i++) {
			float v = x[i] > -INFINITY ? x[i] : -INFINITY;
			if (n == want && !(v > logit[want - 1]))
				continue;
			int at = n < want ? n++ : want - 1;
			for (; at > 0 && v > logit[at - 1]; at--) {
				logit[at] = logit[at - 1];
				r->top_id[at] = r->top_id[at - 1];
			}
			logit[at] = v;
			r->top_id[at] = i;
		}
	}
	for (int i = 0; i < want; i++) {
		if (i >= n)
			r->top_id[i] = -1; // fewer tokens than wanted
		r->top_logprob[i] = i < n ? log_probability(logit[i], max, log_sum) : -INFINITY;
	}
}

static bool has_penalty(const struct sample_row *r)
{
	return r->history && (r->repetition_penalty != 1 || r->presence_penalty != 0 || r->frequency_penalty != 0);
}

// counts[] is set to zero only where the history will look, never as a whole.
static void penalise(const struct sample_row *r, float *x, uint32_t *counts, int vocab)
{
	const int32_t *h = r->history;
	int all = r->n_prompt + r->n_output;
	for (int i = 0; i < all; i++)
		if (h[i] >= 0 && h[i] < vocab)
			counts[h[i]] = 0;
	if (r->repetition_penalty != 1)
		for (int i = 0; i < all; i++)
			if (h[i] >= 0 && h[i] < vocab && !counts[h[i]]) {
				counts[h[i]] = 1;
				x[h[i]] = x[h[i]] > 0 ? x[h[i]] / r->repetition_penalty : x[h[i]] * r->repetition_penalty;
			}
	for (int i = r->n_prompt; i < all; i++)
		if (h[i] >= 0 && h[i] < vocab)
			counts[h[i]] = 0;
	for (int i = r->n_prompt; i < all; i++)
		if (h[i] >= 0 && h[i] < vocab)
			counts[h[i]]++;
	for (int i = r->n_prompt; i < all; i++)
		if (h[i] >= 0 && h[i] < vocab && counts[h[i]]) {
			x[h[i]] -= r->frequency_penalty * (float)counts[h[i]];
			x[h[i]] -= r->presence_penalty;
			counts[h[i]] = 0;
		}
}

static uint64_t mix(uint64_t z) // finaliser of splitmix64
{
	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

// In [0, 1), 53 bits.
static double random_unit(uint64_t seed, uint32_t choice, uint32_t position)
{
	uint64_t counter = (uint64_t)choice << 32 | position;
	uint64_t h = mix(mix(seed + UINT64_C(0x9e3779b97f4a7c15)) ^ mix(counter + UINT64_C(0xd1b54a32d192ed03)));
	return (double)(h >> 11) * 0x1p-53;
}

static bool before(struct candidate a, struct candidate b)
{
	return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Heapsort, since it needs no memory and has no bad case.
static void sort_candidates(struct candidate *c, int n)
{
	for (int end = n, start = n / 2; end > 1;) {
		if (start > 0) {
			start--;
		} else {
			end--;
			struct candidate t = c[0];
			c[0] = c[end];
			c[end] = t;
		}
		struct candidate sunk = c[start];
		int at = start;
		for (int child; (child = 2 * at + 1) < end; at = child) {
			if (child + 1 < end && before(c[child], c[child + 1]))
				child++;
			if (!before(sunk, c[child]))
				break;
			c[at] = c[child];
		}
		c[at] = sunk;
	}
}

static int bin_of(float logit, float max, float bins_per_logit)
{
	float y = (max - logit) * bins_per_logit;
	return y < BINS - 1 ? (int)y : BINS - 1;
}

static int sort_bin(struct scratch *s, const float *x, int n, int bin, float max, float bins_per_logit)
{
	int count = 0;
	for (int i = 0; i < n; i++)
		if (bin_of(x[s->list[i]], max, bins_per_logit) == bin)
			s->sorted[count++] = (struct candidate){x[s->list[i]], s->list[i]};
	sort_candidates(s->sorted, count);
	return count;
}

// Finds the last token that top-k and top-p keep, given the n candidates in s->list; false if they do not end among
// them. A cut at the end of all is {-infinity, INT32_MAX}. Where the candidates are all tokens of any weight, a top-k
// above their number keeps them all, and top-p still cuts.
static bool find_cut(struct scratch *s, const struct sample_row *r, const float *x, int n, bool all, float max,
                     double total, struct candidate *cut)
{
	bool use_k = r->top_k > 0 && !(all && n < r->top_k), use_p = r->top_p < 1;
	float bins_per_logit = fminf(BINS_PER_UNIT / r->temperature, 1e30f);
	*cut = (struct candidate){-INFINITY, INT32_MAX};
	if (use_k && n < r->top_k)
		return false;
	if (!use_k) {
		double listed = 0;
		for (int i = 0; i < n; i++)
			listed += (double)s->weights[s->list[i]];
		if (listed < (double)r->top_p * total)
			return false;
	}
	memset(s->mass, 0, sizeof(s->mass));
	memset(s->count, 0, sizeof(s->count));
	for (int i = 0; i < n; i++) {
		int b = bin_of(x[s->list[i]], max, bins_per_logit);
		s->count[b]++;
		s->mass[b] += (double)s->weights[s->list[i]];
	}
	if (use_k) {
		int b = 0, left = r->top_k;
		for (total = 0; s->count[b] < left; b++) {
			left -= s->count[b];
			total += s->mass[b];
		}
		sort_bin(s, x, n, b, max, bins_per_logit);
		for (int i = 0; i < left; i++)
			total += (double)s->weights[s->sorted[i].id];
		*cut = s->sorted[left - 1];
	}
	if (use_p) {
		double want = (double)r->top_p * total, have = 0;
		int b = 0;
		for (; b < BINS && have + s->mass[b] < want; b++)
			have += s->mass[b];
		if (b == BINS)
			return use_k;
		int count = sort_bin(s, x, n, b, max, bins_per_logit), i = 0;
		for (; i < count - 1; i++) {
			have += (double)s->weights[s->sorted[i].id];
			if (have >= want)
				break;
		}
		if (count > 0 && before(s->sorted[i], *cut))
			*cut = s->sorted[i];
	}
	return true;
}

// Draws from the tokens that top-k, top-p and min-p leave.
static int32_t draw_filtered(const struct job *j, struct scratch *s, const struct sample_row *r, const float *x,
                             int vocab, float max, double total, double u)
{
	struct candidate cut;
	int n = 0;
	for (int step = 0; step < CANDIDATE_STEPS; step++) {
		n = j->kernel->collect(s->list, s->weights, vocab, candidate_weight[step]);
		if (find_cut(s, r, x, n, step == CANDIDATE_STEPS - 1, max, total, &cut))
			break;
	}
	int kept = 0;
	double sum = 0;
	for (int i = 0; i < n; i++) {
		int32_t id = s->list[i];
		if (before(cut, (struct candidate){x[id], id}) || s->weights[id] < r->min_p)
			continue;
		s->list[kept++] = id;
		sum += (double)s->weights[id];
	}
	double have = 0;
	for (int i = 0; i < kept; i++) {
		have += (double)s->weights[s->list[i]];
		if (have > u * sum)
			return s->list[i];
	}
	return kept ? s->list[kept - 1] : argmax(x, s->chunk_max, vocab, max);
}

static int32_t draw(const struct job *j, struct scratch *s, const struct sample_row *r, const float *x, int vocab,
                    float max)
{
	bool filtered = (r->top_k > 0 && r->top_k < vocab) || r->top_p < 1;
	double u = random_unit(r->seed, r->choice, r->position), total = 0, have = 0;
	j->kernel->weigh(s->weights, s->chunk_sum, x, vocab, max, r->temperature, filtered ? 0 : r->min_p);
	for (int i = 0; i < chunk_count(vocab); i++)
		total += (double)s->chunk_sum[i];
	if (filtered)
		return draw_filtered(j, s, r, x, vocab, max, total, u);
	int32_t last = 0; // rounding may leave the chunk's own sum a little short: then its last token
	for (int c = 0; c < chunk_count(vocab); c++) {
		if (have + (double)s->chunk_sum[c] <= u * total) {
			have += (double)s->chunk_sum[c];
			continue;
		}
		for (int i = c * SAMPLE_CHUNK; i < vocab && i < (c + 1) * SAMPLE_CHUNK; i++) {
			if (s->weights[i] > 0)
				last = i;
			have += (double)s->weights[i];
			if (have > u * total)
				break;
		}
		break;
	}
	return last;
}

static void sample_one(const struct job *j, struct scratch *s, float *x, struct sample_row *r)
{
	int vocab = j->args->vocab_size;
	bool wants_logprob = r->want_logprob || r->n_top > 0;
	bool changes = r->n_bias > 0 || r->n_banned > 0 || has_penalty(r);
	float raw_max = -INFINITY;
	double raw_log_sum = 0;
	const float *raw = x;
	if (wants_logprob) {
		j->kernel->chunk_max(s->chunk_max, x, vocab);
		raw_max = max_of(s->chunk_max, vocab);
		raw_log_sum = log_sum(j, s, x, vocab, raw_max);
		if (r->n_top > 0)
			find_top(r, x, s->chunk_max, vocab, raw_max, raw_log_sum);
		if (changes)
			x = memcpy(s->logits, x, (size_t)vocab * sizeof(float));
	}
	for (int i = 0; i < r->n_bias; i++)
		if (r->bias_id[i] >= 0 && r->bias_id[i] < vocab)
			x[r->bias_id[i]] += r->bias_value[i];
	for (int i = 0; i < r->n_banned; i++)
		if (r->banned[i] >= 0 && r->banned[i] < vocab)
			x[r->banned[i]] = -INFINITY;
	if (has_penalty(r))
		penalise(r, x, s->counts, vocab);
	if (changes || !wants_logprob)
		j->kernel->chunk_max(s->chunk_max, x, vocab);
	float max = max_of(s->chunk_max, vocab);
	if (!(r->temperature > 0) || !isfinite(max))
		r->id = argmax(x, s->chunk_max, vocab, max);
	else
		r->id = draw(j, s, r, x, vocab, max);
	if (wants_logprob)
		r->logprob = log_probability(raw[r->id], raw_max, raw_log_sum);
}

static void run(void *arg, int thread, int threads)
{
	const struct job *j = arg;
	struct scratch *s = carve(j->context, thread, j->args->vocab_size);
	for (int row; (row = cpu_next_piece(j->context)) < j->args->n_rows;)
		sample_one(j, s, j->args->logits + row * j->args->stride, &j->args->rows[row]);
}

void cpu_sample(struct ops_context *c, const struct sample_args *a)
{
	struct job j = {.context = c, .args = a, .kernel = &sample_kernel_portable};
#if defined(__x86_64__)
	if (c->isa >= ISA_AVX512)
		j.kernel = &sample_kernel_avx512;
	else if (c->isa >= ISA_AVX2)
		j.kernel = &sample_kernel_avx2;
#endif
	if (a->n_rows == 1)
		sample_one(&j, carve(c, 0, a->vocab_size), a->logits, &a->rows[0]);
	else if (a->n_rows > 1)
		cpu_parallel(c, run, &j);
}
