// See plan_inputs.h.
#include "coordinator/plan_inputs.h"

#include <stdio.h>
#include <string.h>

// One more than a hop over a Unix socket and the wake-up at its end took on a 2-core 2.6 GHz machine (25 to 40 us).
static const double hop_same_host_us = 40, hop_other_host_us = 100;

static enum status named_dtype(const char *name, enum dtype *out)
{
	static const struct { const char *name; enum dtype dtype; } rows[] = {
		{"float32", DTYPE_F32}, {"float16", DTYPE_F16}, {"bfloat16", DTYPE_BF16}, {"fp8", DTYPE_FP8},
	};
	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
		if (!strcmp(rows[i].name, name)) {
			*out = rows[i].dtype;
			return STATUS_OK;
		}
	return STATUS_ABSENT;
}

static bool has_cpu(const struct registry *r)
{
	for (uint32_t i = 0; i < r->n_workers; i++)
		if (r->workers[i].hello.device_kind == DEVICE_CPU)
			return true;
	return false;
}

enum status plan_inputs_settings(struct plan_settings *out, const struct options *o, const struct model *m,
                                 const struct registry *r, struct error *e)
{
	const struct model_config *c = model_config(m);
	bool cpu = has_cpu(r);
	// float32 where any stage is a CPU, since hidden states travel in the activations' type.
	out->act_dtype = cpu || c->dtype == DTYPE_F32 ? DTYPE_F32 : c->dtype == DTYPE_F16 ? DTYPE_F16 : DTYPE_BF16;
	if (strcmp(o->dtype, "auto") && named_dtype(o->dtype, &out->act_dtype) != STATUS_OK)
		return error_set(e, STATUS_USAGE, "--dtype %s is not known", o->dtype);
	if (cpu && out->act_dtype != DTYPE_F32)
		return error_set(e, STATUS_REFUSED, "--dtype %s: CPU stages compute in float32 only", o->dtype);
	bool f32_asked = !strcmp(o->dtype, "float32");
	out->kv_dtype = cpu ? (f32_asked ? DTYPE_F32 : DTYPE_F16) : out->act_dtype;
	if (strcmp(o->kv_dtype, "auto") && named_dtype(o->kv_dtype, &out->kv_dtype) != STATUS_OK)
		return error_set(e, STATUS_USAGE, "--kv-dtype %s is not known", o->kv_dtype);
	if (cpu && out->kv_dtype == DTYPE_FP8)
		return error_set(e, STATUS_REFUSED, "--kv-dtype fp8: CPU stages have float32, float16 and bfloat16 only");
	if (o->max_context > (uint32_t)c->max_context)
		return error_set(e, STATUS_REFUSED, "--max-context %u is more than the model's own %d", o->max_context, c->max_context);
	out->block_size = o->block_size;
	out->max_seqs = o->max_seqs;
	out->max_queue = o->max_queue;
	out->max_batch_tokens = o->max_batch_tokens ? o->max_batch_tokens : cpu ? 512 : 2048;
	out->max_context = o->max_context;
	out->isa = UINT32_MAX;
	for (uint32_t i = 0; i < r->n_workers; i++)
		if (r->workers[i].hello.device_kind == DEVICE_CPU && r->workers[i].hello.isa < out->isa)
			out->isa = r->workers[i].hello.isa;
	if (out->isa == UINT32_MAX)
		out->isa = 0;
	return STATUS_OK;
}

// Bytes of a tensor in memory; a vector stays as it is in float32.
static enum status tensor_memory(const struct model *m, enum tensor_role role, int layer, const struct registry *r,
                                 uint64_t *bytes, uint64_t *elements, struct error *e)
{
	const struct tensor *t = model_tensor(m, role, layer);
	if (!t)
		return STATUS_OK;
	if (t->rows <= 1) {
		*bytes += (uint64_t)t->cols * 4;
		return STATUS_OK;
	}
	double ratio = 0;
	for (uint32_t i = 0; i < r->n_workers; i++) {
		double x = r->workers[i].hello.weight_ratio[t->dtype];
		if (x <= 0)
			return error_set(e, STATUS_REFUSED, "%s has type %s, which %s cannot multiply", t->name,
			                 dtype_info(t->dtype)->name, r->labels[i]);
		if (x > ratio)
			ratio = x;
	}
	*bytes += (uint64_t)((double)t->bytes * ratio);
	*elements += (uint64_t)t->rows * (uint64_t)t->cols;
	return STATUS_OK;
}

enum status plan_inputs_model(struct plan_model *out, const struct model *m, const struct registry *r,
                              const struct plan_settings *s, struct error *e)
{
	const struct model_config *c = model_config(m);
	uint64_t elements = 0, head_elements = 0, ignored = 0;
	memset(out, 0, sizeof *out);
	out->n_layers = (uint32_t)c->n_layers;
	out->vocab_rows = (uint32_t)c->vocab_rows;
	out->hidden = (uint32_t)c->hidden;
	out->tied_head = c->tied_head;
	out->n_groups = 1;
	for (int i = 0; i < c->n_layers; i++)
		for (int role = TENSOR_FIRST_LAYER_ROLE; role < TENSOR_ROLE_COUNT; role++)
			TRY(tensor_memory(m, (enum tensor_role)role, i, r, &out->layer_weight_bytes[i], &elements, e));
	TRY(tensor_memory(m, TENSOR_TOKEN_EMBEDDING, 0, r, &out->embedding_bytes, &ignored, e));
	TRY(tensor_memory(m, TENSOR_OUTPUT_HEAD, 0, r, &out->head_bytes, &head_elements, e));
	out->head_bytes += (uint64_t)c->hidden * 4;
	out->layer_flops_per_token = 2.0 * (double)elements / c->n_layers;
	out->head_flops_per_token = 2.0 * (double)head_elements;
	out->kv_bytes_per_token_layer = 2ull * (uint64_t)c->n_kv_heads * (uint64_t)c->head_dim *
	                                (uint64_t)dtype_info(s->kv_dtype)->block_bytes;
	// Per row: three hidden states, q, k, v, attention and the widest of the MLP, as float32; a quarter more for scratch.
	uint64_t row = 3ull * (uint64_t)c->hidden + 2ull * (uint64_t)(c->n_heads + c->n_kv_heads) * (uint64_t)c->head_dim +
	               (uint64_t)c->ffn;
	out->workspace_bytes_per_row = row * 4 * 5 / 4;
	uint64_t context = s->max_context ? s->max_context : (uint64_t)c->max_context;
	uint64_t tables = (context + s->block_size - 1) / s->block_size * s->max_seqs * 4;
	uint64_t logits = (uint64_t)(s->max_seqs < 64 ? s->max_seqs : 64) * (uint64_t)c->vocab_rows * 4;
	out->workspace_bytes_fixed = tables + logits + context * (uint64_t)c->rope_dim * 4;
	return STATUS_OK;
}

void plan_inputs_devices(struct plan_device *out, const struct registry *r)
{
	for (uint32_t i = 0; i < r->n_workers; i++) {
		const struct message_hello *h = &r->workers[i].hello;
		struct plan_device *d = &out[i];
		memset(d, 0, sizeof *d);
		memcpy(d->label, r->labels[i], sizeof d->label);
		d->memory_limit_bytes = h->memory_limit_bytes > h->base_bytes ? h->memory_limit_bytes - h->base_bytes : 0;
		d->bandwidth_bytes_per_s = h->bandwidth_bytes_per_s;
		d->matmul_flops = h->matmul_flops;
		bool last = i + 1 == r->n_workers;
		d->hop_us = last || strcmp(h->host, r->workers[i + 1].hello.host) ? hop_other_host_us : hop_same_host_us;
		if (last)
			d->hop_us = 0;
		// CPU workers measure at the same moment and before they are pinned, so that they disturb each other; those with
		// as many threads on the same host are the same hardware, and the best figure is the least disturbed.
		for (uint32_t k = 0; k < r->n_workers && h->device_kind == DEVICE_CPU; k++) {
			const struct message_hello *other = &r->workers[k].hello;
			if (other->device_kind != DEVICE_CPU || other->threads != h->threads || strcmp(other->host, h->host))
				continue;
			if (other->bandwidth_bytes_per_s > d->bandwidth_bytes_per_s)
				d->bandwidth_bytes_per_s = other->bandwidth_bytes_per_s;
			if (other->matmul_flops > d->matmul_flops)
				d->matmul_flops = other->matmul_flops;
		}
		for (uint32_t k = 0; k < r->n_workers && h->device_kind == DEVICE_CUDA; k++) {
			const struct message_hello *other = &r->workers[k].hello;
			if (k != i && other->device_kind == DEVICE_CUDA && other->device_index == h->device_index &&
			    !strcmp(other->host, h->host))
				d->share_group = 1 + (k < i ? k : i);
		}
	}
}
