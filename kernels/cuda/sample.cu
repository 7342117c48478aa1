// Sampling on the device, one block per row; the CPU's sample.c is the specification. The surprising decision: weights
// are summed as whole numbers, 2^-44 each. Sums are then the same in any order, so that a replay draws the same token
// although threads add in a different order each time. Nothing is sorted: where top-k and top-p end is found by three
// rounds of a histogram over the bits of the logits, in descending order.
#include "kernels/cuda/device.cuh"

#include <string.h>

enum { THREADS = 1024, WARPS = THREADS / 32, BINS = 2048, BIN_BITS = 11 };

struct sampler {
	int vocab_size;
	int64_t stride;
	float *logits;
	float *copy;      // [n_rows, vocab_size] for rows that change their logits and want the raw ones; or NULL
	int32_t *counts;  // [n_rows, vocab_size], zero; or NULL
	struct sample_row *rows;
};

static __device__ bool changes_logits(const struct sample_row &r)
{
	return r.n_bias > 0 || r.n_banned > 0 || r.history;
}

// Orders as floats do; NaN lowest, with -infinity.
static __device__ inline uint32_t order_of(float x)
{
	x = x > -INFINITY ? x + 0.0f : -INFINITY; // -0 becomes 0
	uint32_t u = __float_as_uint(x);
	return u & 0x80000000 ? ~u : u | 0x80000000;
}

static __device__ inline float from_order(uint32_t u)
{
	return __uint_as_float(u & 0x80000000 ? u & 0x7fffffff : ~u);
}

// By descending logit, then ascending id.
static __device__ inline uint64_t rank_of(float x, int id)
{
	return (uint64_t)order_of(x) << 32 | (0xffffffffu - (uint32_t)id);
}

template <typename V, typename F> __device__ V block_reduce(V v, F f)
{
	__shared__ V part[WARPS];
	for (int i = 16; i > 0; i /= 2)
		v = f(v, __shfl_xor_sync(0xffffffff, v, i));
	__syncthreads();
	if (threadIdx.x % 32 == 0)
		part[threadIdx.x / 32] = v;
	__syncthreads();
	v = part[threadIdx.x % 32];
	for (int i = 16; i > 0; i /= 2)
		v = f(v, __shfl_xor_sync(0xffffffff, v, i));
	return v;
}

static __device__ uint64_t block_add(uint64_t v)
{
	return block_reduce(v, [](uint64_t a, uint64_t b) { return a + b; });
}

// The best rank below `below`, 0 if there is none.
static __device__ uint64_t best_rank(const float *x, int n, uint64_t below)
{
	uint64_t best = 0;
	for (int i = threadIdx.x; i < n; i += THREADS) {
		uint64_t r = rank_of(x[i], i);
		best = r < below && r > best ? r : best;
	}
	return block_reduce(best, [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}

static __device__ double log_sum(const float *x, int n, float max)
{
	double sum = 0;
	if (max == -INFINITY)
		return 0;
	for (int i = threadIdx.x; i < n; i += THREADS)
		sum += max == INFINITY ? (double)(x[i] == INFINITY) : x[i] > -INFINITY ? (double)expf(x[i] - max) : 0.0;
	return log(block_reduce(sum, [](double a, double b) { return a + b; }));
}

static __device__ float log_probability(float logit, float max, double log_sum)
{
	if (!(logit > -INFINITY))
		return -INFINITY;
	if (max == INFINITY)
		return logit == INFINITY ? (float)-log_sum : -INFINITY;
	return (float)((double)logit - (double)max - log_sum);
}

static __device__ void change_logits(const struct sample_row &r, float *x, int32_t *counts, int vocab)
{
	// Lists may name a token twice, so the first thread adds them one by one; they are short.
	if (threadIdx.x == 0) {
		for (int i = 0; i < r.n_bias; i++)
			if (r.bias_id[i] >= 0 && r.bias_id[i] < vocab)
				x[r.bias_id[i]] += r.bias_value[i];
	}
	__syncthreads();
	for (int i = threadIdx.x; i < r.n_banned; i += THREADS)
		if (r.banned[i] >= 0 && r.banned[i] < vocab)
			x[r.banned[i]] = -INFINITY;
	__syncthreads();
	if (!r.history)
		return;
	int all = r.n_prompt + r.n_output;
	const int32_t *h = r.history;
	if (r.repetition_penalty != 1) {
		for (int i = threadIdx.x; i < all; i += THREADS)
			if (h[i] >= 0 && h[i] < vocab && atomicExch(&counts[h[i]], 1) == 0) {
				float &v = x[h[i]];
				v = v > 0 ? v / r.repetition_penalty : v * r.repetition_penalty;
			}
		__syncthreads();
		for (int i = threadIdx.x; i < all; i += THREADS)
			if (h[i] >= 0 && h[i] < vocab)
				counts[h[i]] = 0;
		__syncthreads();
	}
	for (int i = r.n_prompt + threadIdx.x; i < all; i += THREADS)
		if (h[i] >= 0 && h[i] < vocab)
			atomicAdd(&counts[h[i]], 1);
	__syncthreads();
	for (int i = r.n_prompt + threadIdx.x; i < all; i += THREADS)
		if (h[i] >= 0 && h[i] < vocab) {
			int count = atomicExch(&counts[h[i]], 0);
			if (count > 0) {
				x[h[i]] = __fsub_rn(x[h[i]], __fmul_rn(r.frequency_penalty, (float)count));
				x[h[i]] -= r.presence_penalty;
			}
		}
	__syncthreads();
}

static __device__ uint64_t mix(uint64_t z) // finaliser of splitmix64
{
	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

// In [0, 1), 53 bits; the CPU's.
static __device__ double random_unit(uint64_t seed, uint32_t choice, uint32_t position)
{
	uint64_t counter = (uint64_t)choice << 32 | position;
	uint64_t h = mix(mix(seed + UINT64_C(0x9e3779b97f4a7c15)) ^ mix(counter + UINT64_C(0xd1b54a32d192ed03)));
	return (double)(h >> 11) * 0x1p-53;
}

static __device__ inline float weight_of(float x, float max, float temperature)
{
	float w = expf((x - max) / temperature);
	return w > 0 ? w : 0; // NaN too
}

static __device__ inline uint64_t mass_of(float w)
{
	return (uint64_t)((double)w * 0x1p44);
}

struct histogram {
	uint64_t mass[BINS];
	uint32_t count[BINS];
	uint64_t sum;       // of what lies above the chosen bin, by what is sought
	uint64_t mass_above;
	int bin;
};

struct cut {
	uint32_t order;  // tokens above are kept,
	uint64_t equal;  // and so many of those at it
	uint64_t mass;   // of all that is kept
};

// Finds the shortest prefix of the tokens, in descending order, that holds `want` tokens (by_count) or so much mass.
// want is at least 1 and not more than there is.
static __device__ struct cut find_cut(struct histogram *h, const float *x, int n, float max, float temperature,
                                      bool by_count, uint64_t want)
{
	uint32_t prefix = 0;
	uint64_t above = 0, mass_above = 0;
	int shift = 32;
	while (shift > 0) {
		int bits = shift < BIN_BITS ? shift : BIN_BITS;
		shift -= bits;
		__syncthreads();
		for (int i = threadIdx.x; i < BINS; i += THREADS) {
			h->mass[i] = 0;
			h->count[i] = 0;
		}
		__syncthreads();
		for (int i = threadIdx.x; i < n; i += THREADS) {
			uint32_t o = order_of(x[i]);
			if (shift + bits < 32 && o >> (shift + bits) != prefix)
				continue;
			int b = (int)(o >> shift & ((1u << bits) - 1));
			atomicAdd(&h->count[b], 1u);
			atomicAdd((unsigned long long *)&h->mass[b], (unsigned long long)mass_of(weight_of(x[i], max, temperature)));
		}
		__syncthreads();
		if (threadIdx.x < 32) {
			// Lane l holds the bins from the top: BINS - 1 - 64 l and 63 below.
			const int per = BINS / 32;
			int top = BINS - 1 - (int)threadIdx.x * per;
			uint64_t sum = 0, mass = 0;
			for (int i = 0; i < per; i++) {
				sum += by_count ? h->count[top - i] : h->mass[top - i];
				mass += h->mass[top - i];
			}
			uint64_t sum_to = sum, mass_to = mass;
			for (int i = 1; i < 32; i *= 2) {
				uint64_t s = __shfl_up_sync(0xffffffff, sum_to, i), m = __shfl_up_sync(0xffffffff, mass_to, i);
				if ((int)threadIdx.x >= i) {
					sum_to += s;
					mass_to += m;
				}
			}
			uint64_t have = above + sum_to - sum, have_mass = mass_above + mass_to - mass;
			if (have < want && have + sum >= want) {
				int i = 0;
				for (;; i++) {
					uint64_t s = by_count ? h->count[top - i] : h->mass[top - i];
					if (have + s >= want)
						break;
					have += s;
					have_mass += h->mass[top - i];
				}
				h->bin = top - i;
				h->sum = have;
				h->mass_above = have_mass;
			}
		}
		__syncthreads();
		prefix = prefix << bits | (uint32_t)h->bin;
		above = h->sum;
		mass_above = h->mass_above;
	}
	uint64_t each = mass_of(weight_of(from_order(prefix), max, temperature));
	uint64_t equal = by_count ? want - above : each ? (want - above + each - 1) / each : 1;
	return {prefix, equal, mass_above + equal * each};
}

// The smallest id at which the sum of f over ids up to it exceeds `target`; the last with f > 0 if none does. A warp has
// a stretch of ids, so that reading is in order and the sums by warp give the stretch.
template <typename F> __device__ int find_id(int n, uint64_t target, F f)
{
	__shared__ uint64_t sums[WARPS];
	__shared__ int found, last;
	int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per = ((n + WARPS - 1) / WARPS + 31) / 32 * 32;
	int begin = warp * per, end = begin + per < n ? begin + per : n;
	uint64_t sum = 0;
	int mine = -1;
	for (int i = begin + lane; i < end; i += 32) {
		uint64_t v = f(i);
		sum += v;
		mine = v ? i : mine;
	}
	for (int i = 16; i > 0; i /= 2)
		sum += __shfl_xor_sync(0xffffffff, sum, i);
	__syncthreads();
	if (threadIdx.x == 0) {
		found = 0x7fffffff;
		last = -1;
	}
	if (lane == 0)
		sums[warp] = sum;
	__syncthreads();
	atomicMax(&last, mine);
	uint64_t before = 0;
	for (int w = 0; w < warp; w++)
		before += sums[w];
	if (before <= target && before + sum > target)
		for (int i = begin; i < end; i += 32) {
			uint64_t v = i + lane < end ? f(i + lane) : 0, to = v;
			for (int k = 1; k < 32; k *= 2) {
				uint64_t s = __shfl_up_sync(0xffffffff, to, k);
				if (lane >= k)
					to += s;
			}
			unsigned past = __ballot_sync(0xffffffff, before + to > target);
			if (past) {
				if (lane == 0)
					found = i + __ffs(past) - 1;
				break;
			}
			before += __shfl_sync(0xffffffff, to, 31);
		}
	__syncthreads();
	return found != 0x7fffffff ? found : last;
}

static __device__ int draw(struct histogram *h, const struct sample_row &r, const float *x, int n, float max)
{
	const float temperature = r.temperature, min_p = r.min_p;
	bool use_k = r.top_k > 0 && r.top_k < n, use_p = r.top_p < 1;
	struct cut cut = {0, UINT64_MAX, 0};
	uint64_t total = 0;
	if (use_k) {
		cut = find_cut(h, x, n, max, temperature, true, (uint64_t)r.top_k);
		total = cut.mass;
	} else if (use_p) {
		for (int i = threadIdx.x; i < n; i += THREADS)
			total += mass_of(weight_of(x[i], max, temperature));
		total = block_add(total);
	}
	if (use_p) {
		double want = ceil((double)r.top_p * (double)total);
		cut = find_cut(h, x, n, max, temperature, false, want < 1 ? 1 : want > (double)total ? total : (uint64_t)want);
	}
	int last_equal = 0x7fffffff;
	if (use_k || use_p)
		last_equal = find_id(n, cut.equal - 1, [&](int i) { return (uint64_t)(order_of(x[i]) == cut.order); });
	auto kept = [&](int i) {
		uint32_t o = order_of(x[i]);
		float w = weight_of(x[i], max, temperature);
		return (o > cut.order || (o == cut.order && i <= last_equal)) && w >= min_p ? mass_of(w) : (uint64_t)0;
	};
	uint64_t sum = 0;
	for (int i = threadIdx.x; i < n; i += THREADS)
		sum += kept(i);
	sum = block_add(sum);
	double u = random_unit(r.seed, r.choice, r.position);
	return find_id(n, (uint64_t)(u * (double)sum), kept);
}

__global__ __launch_bounds__(THREADS) void sample_kernel(struct sampler s)
{
	__shared__ struct histogram h;
	__shared__ struct sample_row r;
	int row = blockIdx.x, n = s.vocab_size;
	if (threadIdx.x == 0)
		r = s.rows[row];
	__syncthreads();
	float *x = s.logits + row * s.stride;
	const float *raw = x;
	bool wants_logprob = r.want_logprob || r.n_top > 0, changes = changes_logits(r);
	uint64_t best = best_rank(x, n, UINT64_MAX);
	float raw_max = from_order((uint32_t)(best >> 32)), max = raw_max;
	double raw_log_sum = 0;
	if (wants_logprob) {
		raw_log_sum = log_sum(x, n, raw_max);
		uint64_t rank = UINT64_MAX;
		for (int i = 0; i < r.n_top && i < SAMPLE_MAX_TOP; i++) {
			rank = i == 0 ? best : rank ? best_rank(x, n, rank) : 0;
			if (threadIdx.x == 0) {
				s.rows[row].top_id[i] = rank ? (int32_t)(0xffffffffu - (uint32_t)rank) : -1;
				s.rows[row].top_logprob[i] =
					rank ? log_probability(from_order((uint32_t)(rank >> 32)), raw_max, raw_log_sum) : -INFINITY;
			}
		}
	}
	if (changes) {
		if (wants_logprob) {
			x = s.copy + (int64_t)row * n;
			for (int i = threadIdx.x; i < n; i += THREADS)
				x[i] = raw[i];
			__syncthreads();
		}
		change_logits(r, x, s.counts ? s.counts + (int64_t)row * n : NULL, n);
		best = best_rank(x, n, UINT64_MAX);
		max = from_order((uint32_t)(best >> 32));
	}
	int id = (int)(0xffffffffu - (uint32_t)best);
	if (r.temperature > 0 && isfinite(max))
		id = draw(&h, r, x, n, max);
	if (threadIdx.x == 0) {
		s.rows[row].id = id;
		if (wants_logprob)
			s.rows[row].logprob = log_probability(raw[id], raw_max, raw_log_sum);
	}
}

static bool has_penalty(const struct sample_row *r)
{
	return r->history && (r->repetition_penalty != 1 || r->presence_penalty != 0 || r->frequency_penalty != 0);
}

// Appends a list to the staging buffer and returns where it will lie on the device.
template <typename V> static const V *stage(char *pinned, const char *device, size_t *at, const V *list, int n)
{
	if (n < 1)
		return NULL;
	memcpy(pinned + *at, list, (size_t)n * sizeof *list);
	const V *to = (const V *)(device + *at);
	*at += (size_t)n * sizeof *list;
	return to;
}

void cuda_sample(struct ops_context *c, const struct sample_args *a)
{
	if (a->n_rows < 1)
		return;
	size_t rows_bytes = (size_t)a->n_rows * sizeof(struct sample_row), bytes = rows_bytes;
	bool penalties = false, copies = false;
	for (int i = 0; i < a->n_rows; i++) {
		const struct sample_row *r = &a->rows[i];
		int history = has_penalty(r) ? r->n_prompt + r->n_output : 0;
		bytes += 4 * ((size_t)history + 2 * (size_t)r->n_bias + (size_t)r->n_banned);
		penalties |= history > 0;
		copies |= (history > 0 || r->n_bias > 0 || r->n_banned > 0) && (r->want_logprob || r->n_top > 0);
	}
	size_t elements = (size_t)a->n_rows * (size_t)a->vocab_size, copy_at = (bytes + 255) / 256 * 256;
	char *pinned = (char *)cuda_pinned(c, bytes);
	char *device = (char *)cuda_scratch(c, SCRATCH_SAMPLE, copy_at + (copies ? elements * sizeof(float) : 0));
	struct sample_row *rows = (struct sample_row *)pinned;
	size_t at = rows_bytes;
	for (int i = 0; i < a->n_rows; i++) {
		struct sample_row *r = &rows[i];
		*r = a->rows[i];
		r->history = stage(pinned, device, &at, r->history, has_penalty(r) ? r->n_prompt + r->n_output : 0);
		r->bias_id = stage(pinned, device, &at, r->bias_id, r->n_bias);
		r->bias_value = stage(pinned, device, &at, r->bias_value, r->n_bias);
		r->banned = stage(pinned, device, &at, r->banned, r->n_banned);
	}
	struct sampler s = {a->vocab_size, a->stride, a->logits, copies ? (float *)(device + copy_at) : NULL,
	                    penalties ? cuda_counts(c, elements) : NULL, (struct sample_row *)device};
	CUDA_MUST(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, c->stream));
	sample_kernel<<<a->n_rows, THREADS, 0, c->stream>>>(s);
	CUDA_LAUNCHED();
	CUDA_MUST(cudaMemcpyAsync(pinned, device, rows_bytes, cudaMemcpyDeviceToHost, c->stream));
	CUDA_MUST(cudaStreamSynchronize(c->stream));
	for (int i = 0; i < a->n_rows; i++) {
		struct sample_row *r = &a->rows[i];
		r->id = rows[i].id;
		r->logprob = rows[i].logprob;
		memcpy(r->top_id, rows[i].top_id, sizeof r->top_id);
		memcpy(r->top_logprob, rows[i].top_logprob, sizeof r->top_logprob);
	}
}
