// Owns the cost model and the search for a split. The surprising decision: a split is judged by one number, predicted
// tokens per second of the planned load on the sequences that get blocks; memory needs no weight of its own.
//
// One micro-batch of n sequences at context c takes on a stage
//     max(weight bytes / bandwidth, n * flops per token / speed) + n * c * KV bytes / bandwidth
// since matrix products read weights and multiply at once, while attention reads KV in a phase of its own. Weights are
// read once per micro-batch; of the embedding only rows are read, so it costs memory and no time. A round of m
// micro-batches takes as long as its busiest device, m times that, or as long as one micro-batch takes through all
// stages and hops, whichever is longer. Stages that share a device add up.
#include "coordinator/planner.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/planner_internal.h"

// A step should stay below a second wherever it is; half of that leaves room for neighbours on the machine.
enum { STEP_TARGET_US = 500000, LEAST_CHUNK_TOKENS = 16 };

// ---- memory

uint64_t planner_weight_bytes(const struct planner *p, uint32_t stage, uint32_t first, uint32_t n)
{
	const struct plan_model *m = p->model;
	uint64_t bytes = p->layer_bytes[first + n] - p->layer_bytes[first];
	bool embedding = stage == 0, head = stage + 1 == p->o->n_stages;
	if (embedding && head && m->tied_head)
		return bytes + (m->embedding_bytes > m->head_bytes ? m->embedding_bytes : m->head_bytes);
	return bytes + (embedding ? m->embedding_bytes : 0) + (head ? m->head_bytes : 0);
}

static uint64_t workspace_bytes(const struct planner *p)
{
	return p->model->workspace_bytes_fixed + p->model->workspace_bytes_per_row * p->o->max_batch_tokens;
}

uint64_t planner_need_bytes(const struct planner *p, uint32_t stage, uint32_t first, uint32_t n, uint64_t blocks)
{
	return planner_weight_bytes(p, stage, first, n) + workspace_bytes(p) + blocks * p->block_bytes * n;
}

uint64_t planner_blocks(const struct planner *p, const uint32_t *layers)
{
	uint64_t least = UINT64_MAX;
	for (uint32_t i = 0, first = 0; i < p->o->n_stages; first += layers[i++]) {
		uint64_t need = planner_need_bytes(p, i, first, layers[i], 0), limit = p->devices[i].memory_limit_bytes;
		if (need > limit)
			return 0;
		uint64_t blocks = layers[i] > 0 ? (limit - need) / (p->block_bytes * layers[i]) : UINT64_MAX;
		least = blocks < least ? blocks : least;
	}
	return least > INT32_MAX ? INT32_MAX : least;
}

// ---- time

double planner_stage_us(const struct planner *p, uint32_t stage, uint32_t first, uint32_t n, double seqs,
                        double context)
{
	const struct plan_model *m = p->model;
	const struct plan_device *d = &p->devices[stage];
	bool head = stage + 1 == p->o->n_stages;
	double weights = p->layer_bytes[first + n] - p->layer_bytes[first] + (head ? m->head_bytes : 0);
	double flops = n * m->layer_flops_per_token + (head ? m->head_flops_per_token : 0);
	double kv = (double)n * m->kv_bytes_per_token_layer * context;
	double read_us = weights / d->bandwidth_bytes_per_s * 1e6, multiply_us = seqs * flops / d->matmul_flops * 1e6;
	return fmax(read_us, multiply_us) + seqs * kv / d->bandwidth_bytes_per_s * 1e6;
}

static double round_us(const struct planner *p, const uint32_t *layers, uint32_t m, double seqs, double context)
{
	double busy[MAX_STAGES], through = 0, busiest = 0;
	for (uint32_t i = 0, first = 0; i < p->o->n_stages; first += layers[i++]) {
		busy[i] = planner_stage_us(p, i, first, layers[i], seqs / m, context);
		through += busy[i] + p->devices[i].hop_us;
		for (uint32_t k = 0; k < i; k++)
			if (p->devices[k].share_group != 0 && p->devices[k].share_group == p->devices[i].share_group) {
				busy[k] += busy[i]; // the group's first member carries its sum
				break;
			}
	}
	for (uint32_t i = 0; i < p->o->n_stages; i++)
		busiest = fmax(busiest, busy[i]);
	return fmax(busiest * m, through);
}

struct verdict planner_judge(const struct planner *p, const uint32_t *layers)
{
	struct verdict v = {.blocks = planner_blocks(p, layers)};
	if (v.blocks < p->least_blocks)
		return v;
	double held = (double)(v.blocks * p->o->block_size) / p->o->plan_tokens, share = 1;
	v.running = p->sequences;
	if (held < 1) {
		v.running = 1;
		share = held; // sequences of the planned length do not fit at all; more room is still better
	} else if (held < v.running) {
		v.running = (uint32_t)held;
	}
	for (uint32_t m = 1; m <= p->o->n_stages && m <= v.running; m++) {
		double us = round_us(p, layers, m, v.running, p->o->plan_tokens);
		if (m == 1 || us < v.round_us) {
			v.round_us = us;
			v.micro_batches = m;
		}
	}
	v.tokens_per_s = share * v.running / v.round_us * 1e6;
	return v;
}

double planner_round_us(const struct plan *plan, const struct plan_model *model, const struct plan_device *devices,
                        uint32_t micro_batches, uint32_t sequences, uint32_t context_tokens)
{
	uint32_t layers[MAX_STAGES];
	struct plan_options o = {.n_stages = plan->n_stages};
	struct planner p = {.model = model, .devices = devices, .o = &o};
	p.layer_bytes[0] = 0;
	for (uint32_t i = 0; i < model->n_layers; i++)
		p.layer_bytes[i + 1] = p.layer_bytes[i] + model->layer_weight_bytes[i];
	for (uint32_t i = 0; i < plan->n_stages; i++)
		layers[i] = plan->stage[i].n_layers;
	return round_us(&p, layers, micro_batches, sequences, context_tokens);
}

uint32_t planner_chunk_tokens(const struct plan *plan, uint32_t max_batch_tokens)
{
	double slowest = 0;
	for (uint32_t i = 0; i < plan->n_stages; i++)
		slowest = fmax(slowest, plan->stage[i].prefill_us_per_token);
	double rows = slowest > 0 ? STEP_TARGET_US / slowest : max_batch_tokens;
	rows = fmax(rows, LEAST_CHUNK_TOKENS);
	return rows < max_batch_tokens ? (uint32_t)rows : max_batch_tokens;
}

// ---- refusals

static enum status check(const struct plan_model *m, const struct plan_device *d, const struct plan_options *o,
                         struct error *e)
{
	if (o->n_stages < 1 || o->n_stages > MAX_STAGES)
		return error_set(e, STATUS_REFUSED, "%u stages, at most %d are possible", o->n_stages, MAX_STAGES);
	if (m->n_layers < 1 || m->n_layers > MODEL_MAX_LAYERS)
		return error_set(e, STATUS_REFUSED, "the model has %u layers, 1 to %d are possible", m->n_layers,
		                 MODEL_MAX_LAYERS);
	if (o->n_stages > m->n_layers)
		return error_set(e, STATUS_REFUSED, "%u stages are more than the model's %u layers", o->n_stages,
		                 m->n_layers);
	if (o->max_context > o->model_max_context)
		return error_set(e, STATUS_REFUSED, "a context of %u tokens was asked for, the model's own is %u",
		                 o->max_context, o->model_max_context);
	for (uint32_t i = 0; i < o->n_stages; i++)
		if (!(d[i].bandwidth_bytes_per_s > 0) || !(d[i].matmul_flops > 0))
			return error_set(e, STATUS_REFUSED, "%s reports a speed of zero", d[i].label);
	if (o->layers == NULL)
		return STATUS_OK;
	if (o->n_layers_given != o->n_stages)
		return error_set(e, STATUS_REFUSED, "--layers names %u stages, there are %u", o->n_layers_given,
		                 o->n_stages);
	uint64_t sum = 0;
	for (uint32_t i = 0; i < o->n_stages; i++) {
		if (o->layers[i] == 0)
			return error_set(e, STATUS_REFUSED,
			                 "--layers gives 0 layers to stage %u, each needs at least 1", i);
		sum += o->layers[i];
	}
	if (sum != m->n_layers)
		return error_set(e, STATUS_REFUSED, "--layers adds up to %llu layers, the model has %u",
		                 (unsigned long long)sum, m->n_layers);
	return STATUS_OK;
}

static enum status refuse(const struct planner *p, const uint32_t *layers, struct error *e)
{
	char text[sizeof e->text];
	size_t len = 0;
	for (uint32_t i = 0, first = 0; i < p->o->n_stages; first += layers[i++]) {
		uint64_t need = planner_need_bytes(p, i, first, layers[i], p->least_blocks);
		uint64_t limit = p->devices[i].memory_limit_bytes;
		if (need > limit && len < sizeof text - 160)
			len += (size_t)snprintf(text + len, sizeof text - len,
			                        "; %.48s is missing %llu bytes: %u layers need %llu of %llu",
			                        p->devices[i].label, (unsigned long long)(need - limit), layers[i],
			                        (unsigned long long)need, (unsigned long long)limit);
	}
	text[len] = 0;
	return error_set(e, STATUS_REFUSED, "the model does not fit with a context of %llu tokens%s",
	                 (unsigned long long)(p->o->max_context > 0 ? p->o->max_context : p->o->block_size), text);
}

// ---- the plan as others see it

static void explain(const struct planner *p, struct plan *out, const struct verdict *v)
{
	uint64_t idle_bytes = 0;
	uint32_t idlest = 0;
	for (uint32_t i = 0; i < out->n_stages; i++) {
		idle_bytes += out->stage[i].kv_bytes - out->n_blocks * out->stage[i].bytes_per_block;
		if (out->stage[i].decode_us < out->stage[idlest].decode_us)
			idlest = i;
	}
	const struct plan_stage *slow = &out->stage[out->bottleneck_speed];
	char waits[64] = "";
	if (v->running < p->sequences)
		snprintf(waits, sizeof waits, " (%u of %u planned sequences wait)", p->sequences - v->running,
		         p->sequences);
	snprintf(out->why, sizeof out->why,
	         "speed: %.64s is busiest, %.2f of %.2f ms a round with %u micro-batches, %.64s idles %.0f %%; "
	         "memory: %.64s holds least KV per layer of its own, %llu blocks%s, %.1f MiB stay unused elsewhere",
	         p->devices[out->bottleneck_speed].label, slow->decode_us / 1e3, v->round_us / 1e3, v->micro_batches,
	         p->devices[idlest].label, 100 * fmax(0, 1 - out->stage[idlest].decode_us / v->round_us),
	         p->devices[out->bottleneck_memory].label, (unsigned long long)out->n_blocks, waits,
	         idle_bytes / 1048576.0);
}

static void describe(const struct planner *p, const uint32_t *layers, struct plan *out)
{
	struct verdict v = planner_judge(p, layers);
	memset(out, 0, sizeof *out);
	out->n_stages = p->o->n_stages;
	out->n_blocks = v.blocks;
	out->micro_batches = v.micro_batches;
	out->tokens_per_s = v.tokens_per_s;
	uint64_t room = v.blocks * p->o->block_size;
	out->max_context = p->o->max_context > 0            ? p->o->max_context
	                   : room < p->o->model_max_context ? (uint32_t)room
	                                                    : p->o->model_max_context;
	for (uint32_t i = 0, first = 0; i < out->n_stages; first += layers[i++]) {
		struct plan_stage *s = &out->stage[i];
		bool head = i + 1 == out->n_stages;
		double flops = layers[i] * p->model->layer_flops_per_token;
		s->first_layer = first;
		s->n_layers = layers[i];
		s->has_embedding = i == 0;
		s->has_head = head;
		s->weight_bytes = planner_weight_bytes(p, i, first, layers[i]);
		s->workspace_bytes = workspace_bytes(p);
		s->kv_bytes = p->devices[i].memory_limit_bytes - s->weight_bytes - s->workspace_bytes;
		s->bytes_per_block = p->block_bytes * layers[i];
		s->blocks_possible = layers[i] > 0 ? s->kv_bytes / s->bytes_per_block : UINT64_MAX;
		s->decode_us =
			v.micro_batches * planner_stage_us(p, i, first, layers[i], (double)v.running / v.micro_batches,
		                                           p->o->plan_tokens);
		// The head multiplies only the last row of a prompt.
		s->prefill_us_per_token = flops / p->devices[i].matmul_flops * 1e6;
		if (s->blocks_possible < out->stage[out->bottleneck_memory].blocks_possible)
			out->bottleneck_memory = i;
		if (s->decode_us > out->stage[out->bottleneck_speed].decode_us)
			out->bottleneck_speed = i;
	}
	explain(p, out, &v);
}

enum status planner_plan(struct plan *out, const struct plan_model *model, const struct plan_device *devices,
                         const struct plan_options *o, struct error *e)
{
	TRY(check(model, devices, o, e));
	struct planner p = {.model = model, .devices = devices, .o = o};
	p.block_bytes = model->kv_bytes_per_token_layer * o->block_size;
	p.least_blocks = o->max_context > 0 ? (o->max_context + o->block_size - 1) / o->block_size : 1;
	p.sequences = o->plan_sequences < o->max_seqs ? o->plan_sequences : o->max_seqs;
	p.sequences = p.sequences > 0 ? p.sequences : 1;
	for (uint32_t i = 0; i < model->n_layers; i++)
		p.layer_bytes[i + 1] = p.layer_bytes[i] + model->layer_weight_bytes[i];
	for (uint32_t i = 0; i < o->n_stages; i++)
		for (uint32_t k = 0; k < o->n_stages; k++)
			p.sharers[i] += k == i || (devices[i].share_group != 0 &&
			                           devices[k].share_group == devices[i].share_group);
	uint32_t layers[MAX_STAGES];
	bool fits;
	if (o->layers != NULL) {
		memcpy(layers, o->layers, o->n_stages * sizeof *layers);
		fits = planner_blocks(&p, layers) >= p.least_blocks;
	} else {
		fits = planner_search(&p, layers);
	}
	if (!fits)
		return refuse(&p, layers, e);
	describe(&p, layers, out);
	return STATUS_OK;
}
