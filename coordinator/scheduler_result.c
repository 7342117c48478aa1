// Owns what results do. The surprising decision: rows are looked up in the record of their step, never by slot, so that
// a slot can belong to another sequence by the time a thrown-away token of its old one arrives.
#include <string.h>

#include "coordinator/scheduler_internal.h"

static bool is_end(const struct request *r, uint32_t token)
{
	for (uint32_t i = 0; i < r->n_end_ids; i++)
		if (r->end_ids[i] == token)
			return true;
	return false;
}

static void deliver(struct scheduler *s, struct sequence *q, const struct sampled_token *t)
{
	ASSERT(q->n_refs > 0 && q->n_tokens < q->max_len);
	q->tokens[q->n_tokens++] = t->id;
	if (!PLANTED(REFERENCE_NOT_MOVED))
		q->refs[0] = q->refs[1];
	q->n_refs--;
	s->generation_tokens++;
	struct scheduler_event *e = scheduler_push_event(s, q);
	e->has_token = true;
	e->token = t->id;
	e->logprob = t->logprob;
	e->n_top = t->n_top < MAX_TOP_LOGPROBS ? t->n_top : MAX_TOP_LOGPROBS;
	if (e->n_top > 0) {
		memcpy(e->top_ids, t->top_ids, e->n_top * sizeof *e->top_ids);
		memcpy(e->top_logprobs, t->top_logprobs, e->n_top * sizeof *e->top_logprobs);
	}
	if (is_end(q->request, t->id))
		scheduler_finish(s, q, FINISH_STOP, e);
	else if (q->n_tokens == q->max_len)
		scheduler_finish(s, q, FINISH_LENGTH, e);
	else if (q->state == SEQ_RUNNING)
		scheduler_publish(s, q);
}

static enum status check(const struct scheduler *s, const struct message *m, struct error *e)
{
	const struct message_step_result *r = &m->result;
	unsigned long long step = m->step;
	if (s->n_flights == 0)
		return error_set(e, STATUS_INVALID, "result of step %llu, but no step is in flight", step);
	const struct flight *f = &s->flights[s->flight_first];
	if (m->step != f->step)
		return error_set(e, STATUS_INVALID, "result of step %llu, expected step %llu", step,
		                 (unsigned long long)f->step);
	if (r->micro_batch != f->lane || r->n_tokens != f->n_samples)
		return error_set(e, STATUS_INVALID,
		                 "result of step %llu has micro-batch %u and %u tokens, expected %u and %u", step,
		                 r->micro_batch, r->n_tokens, f->lane, f->n_samples);
	for (uint32_t i = 0, n = 0; i < f->n_rows; i++) {
		if (!f->rows[i].sample)
			continue;
		if (r->tokens[n].slot != f->rows[i].slot)
			return error_set(e, STATUS_INVALID, "result of step %llu has slot %u as token %u, expected %u",
			                 step, r->tokens[n].slot, n, f->rows[i].slot);
		n++;
	}
	return STATUS_OK;
}

enum status scheduler_apply_result(struct scheduler *s, const struct message *m, uint64_t now_us, struct error *e)
{
	(void)now_us;
	ASSERT(m->type == MESSAGE_STEP_RESULT);
	if (m->epoch != s->epoch && !PLANTED(STALE_RESULT_TAKEN))
		return STATUS_OK;
	TRY(check(s, m, e));
	struct flight *f = &s->flights[s->flight_first];
	s->flight_first = (s->flight_first + 1) % s->flight_capacity;
	s->n_flights--;
	s->lane_in_flight[f->lane]--;
	for (uint32_t i = 0, n = 0; i < f->n_rows; i++) {
		struct sequence *q = f->rows[i].seq;
		const struct sampled_token *t = f->rows[i].sample ? &m->result.tokens[n++] : NULL;
		q->in_flight--;
		q->request->in_flight--;
		bool wanted = q->state == SEQ_RUNNING || (q->state == SEQ_DRAINING && !PLANTED(DRAINED_TOKENS_LOST)) ||
		              PLANTED(TOKEN_AFTER_END);
		if (t != NULL && wanted)
			deliver(s, q, t);
		if (q->state == SEQ_DRAINING && q->in_flight == 0)
			scheduler_drained(s, q);
		if (q->state == SEQ_FINISHED)
			scheduler_release_request(s, q->request);
	}
	return STATUS_OK;
}
