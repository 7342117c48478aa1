// config.json and generation_config.json, as transformers 4 and 5 write them. The surprising decision: a field that
// would change the maths is refused even where transformers itself would not look at it for this class, because its
// presence says that the weights were trained with it.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/json_fields.h"
#include "common/model_parts.h"
#include "common/quote.h"

// Fields that say "off" by being absent, null, false, empty, or `neutral`. Anything else is a feature that is not here.
static const struct { const char *key; double neutral; } unsupported_fields[] = {
	{"attention_bias", 0},          {"mlp_bias", 0},
	{"quantization_config", 0},     {"compression_config", 0},
	{"partial_rotary_factor", 1},   {"rotary_pct", 1},
	{"num_experts", 0},             {"num_local_experts", 0},
	{"n_routed_experts", 0},        {"final_logit_softcapping", 0},
	{"attn_logit_softcapping", 0},  {"logits_scaling", 1},
	{"logit_scale", 1},             {"embedding_multiplier", 1},
	{"residual_multiplier", 1},     {"attention_multiplier", 0},
	{"query_pre_attn_scalar", 0},   {"use_qk_norm", 0},
	{"qk_layernorm", 0},            {"parallel_attn", 0},
	{"use_parallel_residual", 0},   {"alibi", 0},
	{"clip_qkv", 0},                {"no_rope_layers", 0},
	{"kv_lora_rank", 0},            {"q_lora_rank", 0},
	{"attn_output_gate", 0},        {"is_encoder_decoder", 0},
	{"add_cross_attention", 0},     {"cross_attention_layers", 0},
	{"rope_interleave", 0},         {"attention_chunk_size", 0},
};

static enum status optional(enum status status)
{
	return status == STATUS_ABSENT ? STATUS_OK : status;
}

static enum status required(enum status status)
{
	return status == STATUS_ABSENT ? STATUS_REFUSED : status; // the text names the field already
}

static bool says_off(const json_t *v, double neutral)
{
	if (!v || json_is_null(v) || json_is_false(v))
		return true;
	if (json_is_number(v))
		return json_number_value(v) == neutral;
	return (json_is_array(v) && !json_array_size(v)) || (json_is_object(v) && !json_object_size(v));
}

static enum status refuse_unsupported(const struct json_fields *f)
{
	const char *text = NULL;
	char q[64];
	for (size_t i = 0; i < sizeof unsupported_fields / sizeof *unsupported_fields; i++) {
		const char *key = unsupported_fields[i].key;
		const json_t *v = json_object_get(f->object, key);
		if (says_off(v, unsupported_fields[i].neutral))
			continue;
		const json_t *method = json_object_get(v, "quant_method");
		text = json_string_value(method);
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%s\" asks for a feature that is not supported (found "
		                 "%s%s%s)", f->label, key, json_kind(v), text ? ", quant_method " : "",
		                 text ? quote_bytes(q, sizeof q, text, strlen(text)) : "");
	}
	static const char *const activations[] = {"hidden_act", "hidden_activation"};
	for (int i = 0; i < 2; i++) {
		enum status status = json_fields_string(f, activations[i], &text);
		TRY(optional(status));
		if (status == STATUS_OK && strcmp(text, "silu") && strcmp(text, "swish"))
			return error_set(f->error, STATUS_REFUSED, "%s: field \"%s\": expected \"silu\", found \"%s\", which is not "
			                 "supported", f->label, activations[i], quote_bytes(q, sizeof q, text, strlen(text)));
	}
	return STATUS_OK;
}

static enum status check_windows(const struct json_fields *f, const struct model_arch *arch,
                                 const struct model_config *c)
{
	char q[64];
	const json_t *types = json_object_get(f->object, "layer_types"), *type;
	size_t i;
	if (types && !json_is_null(types) && !json_is_array(types))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"layer_types\": expected an array, found %s", f->label,
		                 json_kind(types));
	json_array_foreach(types, i, type) {
		const char *text = json_string_value(type);
		if (!text || strcmp(text, "full_attention"))
			return error_set(f->error, STATUS_REFUSED, "%s: field \"layer_types\": layer %zu is \"%s\"; only "
			                 "\"full_attention\" is supported", f->label, i,
			                 text ? quote_bytes(q, sizeof q, text, strlen(text)) : json_kind(type));
	}
	bool used = arch->window == ARCH_WINDOW_ALWAYS;
	int32_t window = 4096; // MistralConfig's default, which holds where the key is missing and not where it is null
	if (arch->window == ARCH_WINDOW_IF_USED)
		TRY(optional(json_fields_bool(f, "use_sliding_window", &used)));
	if (!used || (json_object_get(f->object, "sliding_window") && json_is_null(json_object_get(f->object,
	                                                                                             "sliding_window"))))
		return STATUS_OK;
	TRY(optional(json_fields_int(f, "sliding_window", &window)));
	if (window < c->max_context)
		return error_set(f->error, STATUS_REFUSED, "%s: field \"sliding_window\"%s: %d is below the context of %d: sliding "
		                 "window attention is not supported", f->label,
		                 json_object_get(f->object, "sliding_window") ? "" : " (its default)", window, c->max_context);
	return STATUS_OK;
}

static enum status read_scaling(const struct json_fields *f, struct model_config *c)
{
	const char *type = "default";
	char q[64], key[64];
	const json_t *v;
	void *iterator = json_object_iter((json_t *)f->object);
	for (; iterator; iterator = json_object_iter_next((json_t *)f->object, iterator))
		if (json_is_object(json_object_iter_value(iterator)))
			return error_set(f->error, STATUS_REFUSED, "%s: field \"%s%s\": RoPE settings that differ by kind of layer "
			                 "are not supported", f->label, f->path,
			                 quote_bytes(key, sizeof key, json_object_iter_key(iterator),
			                             strlen(json_object_iter_key(iterator))));
	enum status status = json_fields_string(f, "rope_type", &type);
	if (status == STATUS_ABSENT) // its older name
		status = json_fields_string(f, "type", &type);
	TRY(optional(status));
	v = json_object_get(f->object, "partial_rotary_factor");
	if (!says_off(v, 1))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%spartial_rotary_factor\": partial rotary embedding is "
		                 "not supported", f->label, f->path);
	if (!strcmp(type, "default"))
		return STATUS_OK;
	if (strcmp(type, "linear") && strcmp(type, "llama3"))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%srope_type\": rope scaling \"%s\" is not supported, only "
		                 "\"default\", \"linear\" and \"llama3\"", f->label, f->path,
		                 quote_bytes(q, sizeof q, type, strlen(type)));
	c->rope_scaling = ROPE_SCALING_LINEAR;
	TRY(required(json_fields_float(f, "factor", &c->rope_factor)));
	if (!strcmp(type, "linear"))
		return STATUS_OK;
	c->rope_scaling = ROPE_SCALING_LLAMA3;
	TRY(required(json_fields_float(f, "low_freq_factor", &c->rope_low_freq_factor)));
	TRY(required(json_fields_float(f, "high_freq_factor", &c->rope_high_freq_factor)));
	return required(json_fields_int(f, "original_max_position_embeddings", &c->rope_original_context));
}

// transformers 4: rope_theta beside rope_scaling. transformers 5: both in rope_parameters.
static enum status read_rope(const struct json_fields *f, struct model_config *c)
{
	struct json_fields inner = *f;
	const json_t *scaling = NULL, *parameters = NULL;
	c->rope_theta = 10000;
	TRY(optional(json_fields_float(f, "rope_theta", &c->rope_theta)));
	TRY(optional(json_fields_object(f, "rope_scaling", &scaling)));
	TRY(optional(json_fields_object(f, "rope_parameters", &parameters)));
	if (scaling && parameters && !json_equal(scaling, parameters))
		return error_set(f->error, STATUS_REFUSED, "%s: fields \"rope_scaling\" and \"rope_parameters\" contradict each "
		                 "other", f->label);
	inner.object = parameters ? parameters : scaling;
	inner.path = parameters ? "rope_parameters." : "rope_scaling.";
	if (!inner.object)
		return STATUS_OK;
	TRY(optional(json_fields_float(&inner, "rope_theta", &c->rope_theta)));
	return read_scaling(&inner, c);
}

static enum status read_architecture(const struct json_fields *f, const struct model_arch **arch)
{
	char q[64], list[160];
	const char *class_name = NULL, *model_type = NULL;
	const json_t *classes = json_object_get(f->object, "architectures");
	if (classes && !json_is_null(classes)) {
		if (!json_is_array(classes) || json_array_size(classes) != 1 || !json_is_string(json_array_get(classes, 0)))
			return error_set(f->error, STATUS_REFUSED, "%s: field \"architectures\": expected an array of one name, found "
			                 "%s", f->label, json_is_array(classes) ? "another array" : json_kind(classes));
		class_name = json_string_value(json_array_get(classes, 0));
	}
	TRY(optional(json_fields_string(f, "model_type", &model_type)));
	*arch = model_arch_from_hf(class_name, model_type);
	if (*arch)
		return STATUS_OK;
	if (!class_name && !model_type)
		return error_set(f->error, STATUS_REFUSED, "%s: neither \"architectures\" nor \"model_type\" is there", f->label);
	const char *found = class_name ? class_name : model_type;
	if (class_name && model_type && model_arch_from_hf(class_name, NULL))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"model_type\": \"%s\" does not go with %s", f->label,
		                 quote_bytes(q, sizeof q, model_type, strlen(model_type)), class_name);
	return error_set(f->error, STATUS_REFUSED, "%s: architecture \"%s\" is not supported; supported are %s", f->label,
	                 quote_bytes(q, sizeof q, found, strlen(found)),
	                 model_arch_list(MODEL_SAFETENSORS, list, sizeof list));
}

static enum status read_dtype(const struct json_fields *f, struct model_config *c)
{
	static const enum dtype known[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
	char q[48];
	const char *name = NULL;
	enum status status = json_fields_string(f, "dtype", &name);
	if (status == STATUS_ABSENT)
		status = json_fields_string(f, "torch_dtype", &name);
	if (status != STATUS_OK)
		return optional(status);
	for (int i = 0; i < 3; i++)
		if (!strcmp(name, dtype_info(known[i])->name)) {
			c->dtype = known[i];
			return STATUS_OK;
		}
	return error_set(f->error, STATUS_REFUSED, "%s: field \"dtype\": expected float32, float16 or bfloat16, found \"%s\"",
	                 f->label, quote_bytes(q, sizeof q, name, strlen(name)));
}

// A token id, a list of them, or null.
static enum status read_ids(const struct json_fields *f, const char *key, struct model_generation *g, bool is_bos)
{
	const json_t *v = json_object_get(f->object, key);
	size_t n = json_is_array(v) ? json_array_size(v) : 1;
	if (!v || json_is_null(v))
		return STATUS_OK;
	for (size_t i = 0; i < n; i++) {
		const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
		if (!json_is_integer(id) || json_integer_value(id) > INT32_MAX || json_integer_value(id) < -1)
			return error_set(f->error, STATUS_REFUSED, "%s: field \"%s\": expected a token id or a list of them, found %s",
			                 f->label, key, json_kind(id));
		if (!is_bos)
			generation_add_eos(g, json_integer_value(id));
		else if (i == 0)
			g->bos = (int32_t)json_integer_value(id);
	}
	return STATUS_OK;
}

static enum status config_from_fields(const struct json_fields *f, struct model_config *c,
                                      const struct model_arch **arch, struct model_generation *g)
{
	*c = (struct model_config){.dtype = DTYPE_COUNT};
	TRY(read_architecture(f, arch));
	snprintf(c->architecture, sizeof c->architecture, "%s", (*arch)->name);
	c->rope_kind = (*arch)->rope[MODEL_SAFETENSORS];
	c->has_qkv_bias = (*arch)->features & ARCH_QKV_BIAS;
	c->has_qk_norm = (*arch)->features & ARCH_QK_NORM;
	TRY(required(json_fields_int(f, "num_hidden_layers", &c->n_layers)));
	TRY(required(json_fields_int(f, "hidden_size", &c->hidden)));
	TRY(required(json_fields_int(f, "intermediate_size", &c->ffn)));
	TRY(required(json_fields_int(f, "num_attention_heads", &c->n_heads)));
	TRY(required(json_fields_int(f, "vocab_size", &c->vocab_rows)));
	TRY(required(json_fields_int(f, "max_position_embeddings", &c->max_context)));
	TRY(required(json_fields_float(f, "rms_norm_eps", &c->norm_eps)));
	c->n_kv_heads = (*arch)->hf_kv_heads;
	if (c->n_kv_heads == 0 || json_object_get(f->object, "num_key_value_heads")) // null means as many as heads
		c->n_kv_heads = c->n_heads;
	TRY(optional(json_fields_int(f, "num_key_value_heads", &c->n_kv_heads)));
	c->head_dim = (*arch)->hf_head_dim;
	TRY(optional(json_fields_int(f, "head_dim", &c->head_dim)));
	if (c->head_dim == 0) {
		if (c->n_heads < 1 || c->hidden % c->n_heads)
			return error_set(f->error, STATUS_REFUSED, "%s: without a field \"head_dim\", \"hidden_size\" %d has to be a "
			                 "multiple of \"num_attention_heads\" %d", f->label, c->hidden, c->n_heads);
		c->head_dim = c->hidden / c->n_heads;
	}
	c->rope_dim = c->head_dim;
	c->vocab_size = c->vocab_rows; // until the tokenizer's files are known
	TRY(optional(json_fields_bool(f, "tie_word_embeddings", &c->tied_head)));
	TRY(read_rope(f, c));
	TRY(read_dtype(f, c));
	TRY(config_check(c, f->label, f->error));
	TRY(check_windows(f, *arch, c));
	TRY(refuse_unsupported(f));
	TRY(read_ids(f, "bos_token_id", g, true));
	return read_ids(f, "eos_token_id", g, false);
}

enum status config_from_json(const char *text, size_t len, const char *label, struct model_config *c,
                             const struct model_arch **arch, struct model_generation *g, struct error *e)
{
	json_t *root = NULL;
	TRY(json_fields_parse(&root, text, len, 0, label, e));
	enum status status = config_from_fields(&(struct json_fields){root, label, "", e}, c, arch, g);
	json_decref(root);
	return status;
}

static enum status read_setting(const struct json_fields *f, const char *key, float low, float high, float *out)
{
	enum status status = json_fields_float(f, key, out);
	if (status == STATUS_OK && !(*out >= low && *out <= high))
		return error_set(f->error, STATUS_REFUSED, "%s: field \"%s\": expected %g to %g, found %g", f->label, key,
		                 (double)low, (double)high, (double)*out);
	return optional(status);
}

static enum status generation_from_fields(const struct json_fields *f, struct model_generation *g)
{
	TRY(read_setting(f, "temperature", 0, 100, &g->temperature));
	TRY(read_setting(f, "top_p", 0, 1, &g->top_p));
	TRY(read_setting(f, "min_p", 0, 1, &g->min_p));
	TRY(read_setting(f, "repetition_penalty", 0.01f, 100, &g->repetition_penalty));
	TRY(optional(json_fields_int(f, "top_k", &g->top_k)));
	TRY(read_ids(f, "bos_token_id", g, true));
	return read_ids(f, "eos_token_id", g, false);
}

enum status generation_from_json(const char *text, size_t len, const char *label, struct model_generation *g,
                                 struct error *e)
{
	json_t *root = NULL;
	TRY(json_fields_parse(&root, text, len, 0, label, e));
	enum status status = generation_from_fields(&(struct json_fields){root, label, "", e}, g);
	json_decref(root);
	return status;
}
