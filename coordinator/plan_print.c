// See plan_print.h.
#include "coordinator/plan_print.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

static void print_json(const struct engine_info *info, const struct model *model)
{
	const struct plan *p = &info->plan;
	json_t *stages = json_array();
	for (uint32_t i = 0; i < p->n_stages; i++) {
		const struct plan_stage *s = &p->stage[i];
		json_array_append_new(stages, json_pack(
			"{s:i, s:s, s:s, s:i, s:i, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:f, s:f}", "stage", (int)i, "label",
			info->stage[i].label, "device", info->stage[i].device_name, "first_layer", (int)s->first_layer, "layers",
			(int)s->n_layers, "embedding", s->has_embedding, "head", s->has_head, "weight_bytes", (json_int_t)s->weight_bytes,
			"workspace_bytes", (json_int_t)s->workspace_bytes, "kv_bytes", (json_int_t)s->kv_bytes, "bytes_per_block",
			(json_int_t)s->bytes_per_block, "blocks_possible", (json_int_t)s->blocks_possible, "decode_us", s->decode_us,
			"prefill_us_per_token", s->prefill_us_per_token));
	}
	json_t *j = json_pack("{s:s, s:i, s:I, s:i, s:f, s:i, s:i, s:s, s:o}", "model", model_display_name(model), "stages_count",
	                      (int)p->n_stages, "blocks", (json_int_t)p->n_blocks, "micro_batches", (int)p->micro_batches,
	                      "tokens_per_s", p->tokens_per_s, "bottleneck_memory", (int)p->bottleneck_memory, "bottleneck_speed",
	                      (int)p->bottleneck_speed, "why", p->why, "stages", stages);
	json_dumpf(j, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(7));
	putchar('\n');
	json_decref(j);
}

void plan_print(const struct engine_info *info, const struct model *model, bool json)
{
	const struct plan *p = &info->plan;
	if (json) {
		print_json(info, model);
		return;
	}
	printf("%s over %u stages: %" PRIu64 " KV blocks, %u micro-batches, %.0f tokens/s predicted\n", model_display_name(model),
	       p->n_stages, p->n_blocks, p->micro_batches, p->tokens_per_s);
	printf("%-36s %-12s %10s %10s %10s %9s %10s %12s\n", "stage", "layers", "weights MB", "work MB", "KV MB", "blocks", "decode ms",
	       "prefill tok/s");
	for (uint32_t i = 0; i < p->n_stages; i++) {
		const struct plan_stage *s = &p->stage[i];
		char layers[48];
		snprintf(layers, sizeof layers, "%s%u%s", s->has_embedding ? "E+" : "", s->n_layers, s->has_head ? "+H" : "");
		printf("%-36.36s %-12s %10.1f %10.1f %10.1f %9" PRIu64 " %10.3f %12.0f\n", info->stage[i].label, layers,
		       (double)s->weight_bytes * 1e-6, (double)s->workspace_bytes * 1e-6, (double)s->kv_bytes * 1e-6, s->blocks_possible,
		       s->decode_us * 1e-3, s->prefill_us_per_token > 0 ? 1e6 / s->prefill_us_per_token : 0);
	}
	printf("bottleneck by %s\n", p->why);
}
