// Owns the number of micro-batches and which decoding sequence belongs to which. The surprising decision: it is judged
// by predicted round time but changed only for a gain of 5 % and at most every 50 ms, since a change moves sequences
// and a moved sequence may wait one round.
#include "coordinator/scheduler_internal.h"

enum { STABLE_US = 50000 };
static const double WORTH = 0.95;

uint32_t scheduler_lightest_lane(const struct scheduler *s)
{
	uint32_t best = 0;
	for (uint32_t i = 1; i < s->micro_batches; i++)
		if (s->lane_seqs[i] < s->lane_seqs[best])
			best = i;
	return best;
}

static void move(struct scheduler *s, struct sequence *q, uint32_t lane)
{
	s->lane_seqs[q->lane]--;
	s->lane_seqs[lane]++;
	q->lane = lane;
}

static void deal(struct scheduler *s)
{
	uint32_t n = 0;
	for (uint32_t i = 0; i < s->n_running; i++)
		if (s->running[i]->decoding)
			move(s, s->running[i], n++ % s->micro_batches);
}

// Ends leave lanes uneven; the longest one sets the time of a round. Moves the newest until lanes differ by at most one
// sequence or a quarter of their mean.
static void level(struct scheduler *s)
{
	for (uint32_t i = s->n_running; i-- > 0;) {
		uint32_t light = 0, heavy = 0, sum = 0;
		for (uint32_t l = 0; l < s->micro_batches; l++) {
			light = s->lane_seqs[l] < s->lane_seqs[light] ? l : light;
			heavy = s->lane_seqs[l] > s->lane_seqs[heavy] ? l : heavy;
			sum += s->lane_seqs[l];
		}
		uint32_t gap = s->lane_seqs[heavy] - s->lane_seqs[light];
		if (gap < 2 || gap * 4 * s->micro_batches <= sum)
			return;
		if (s->running[i]->decoding && s->running[i]->lane == heavy)
			move(s, s->running[i], light);
	}
}

static bool differs(uint32_t a, uint32_t b, uint32_t part)
{
	uint32_t gap = a > b ? a - b : b - a;
	return gap * part > b;
}

void scheduler_choose_lanes(struct scheduler *s, uint64_t now_us)
{
	uint32_t n = s->n_running, most = n < s->o.n_stages ? n : s->o.n_stages;
	if (s->o.n_stages == 1 || s->o.round_us == NULL || n == 0)
		return;
	bool too_many = s->micro_batches > most;
	if (!too_many && now_us - s->changed_us < STABLE_US && s->judged_seqs != 0) {
		level(s);
		return;
	}
	uint64_t tokens = 0;
	for (uint32_t i = 0; i < n; i++)
		tokens += s->running[i]->n_tokens;
	uint32_t context = (uint32_t)(tokens / n);
	if (too_many || differs(n, s->judged_seqs, 8) || differs(context, s->judged_context, 4)) {
		uint32_t best = 1, now = too_many ? most : s->micro_batches;
		double best_us = 0, now_cost_us = 0;
		for (uint32_t m = 1; m <= most; m++) {
			double us = s->o.round_us(s->o.user, m, n, context);
			if (m == 1 || us < best_us) {
				best = m;
				best_us = us;
			}
			if (m == now)
				now_cost_us = us;
		}
		s->judged_seqs = n;
		s->judged_context = context;
		if (best_us >= WORTH * now_cost_us)
			best = now;
		if (best != s->micro_batches) {
			s->micro_batches = best;
			s->changed_us = now_us;
			deal(s);
		}
	}
	level(s);
}
