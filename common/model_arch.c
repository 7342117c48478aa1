// The table of architectures; see model_arch.h. The surprising decision: all of them share one list of tensors, from
// which a row's features pick, since families differ by a few pieces and not by their skeleton.
//
// Sources: the modeling files of transformers (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
// and the GGUF specification's standardised names.
#include "common/model_arch.h"

#include <stdio.h>
#include <string.h>

#define HF_LAYER "model.layers.%d."

static const struct arch_tensor decoder_tensors[] = {
	{TENSOR_TOKEN_EMBEDDING, {"token_embd.weight", "model.embed_tokens.weight"}, DIM_VOCAB, DIM_HIDDEN, 0, false},
	{TENSOR_OUTPUT_NORM, {"output_norm.weight", "model.norm.weight"}, DIM_ONE, DIM_HIDDEN, 0, false},
	{TENSOR_OUTPUT_HEAD, {"output.weight", "lm_head.weight"}, DIM_VOCAB, DIM_HIDDEN, 0, true}, // required when untied
	{TENSOR_ROPE_FACTORS, {"rope_freqs.weight", NULL}, DIM_ONE, DIM_HALF_ROPE, ARCH_ROPE_FACTORS, true},
	{TENSOR_ATTN_NORM, {"blk.%d.attn_norm.weight", HF_LAYER "input_layernorm.weight"}, DIM_ONE, DIM_HIDDEN, 0, false},
	{TENSOR_WQ, {"blk.%d.attn_q.weight", HF_LAYER "self_attn.q_proj.weight"}, DIM_Q, DIM_HIDDEN, 0, false},
	{TENSOR_WK, {"blk.%d.attn_k.weight", HF_LAYER "self_attn.k_proj.weight"}, DIM_KV, DIM_HIDDEN, 0, false},
	{TENSOR_WV, {"blk.%d.attn_v.weight", HF_LAYER "self_attn.v_proj.weight"}, DIM_KV, DIM_HIDDEN, 0, false},
	{TENSOR_BQ, {"blk.%d.attn_q.bias", HF_LAYER "self_attn.q_proj.bias"}, DIM_ONE, DIM_Q, ARCH_QKV_BIAS, false},
	{TENSOR_BK, {"blk.%d.attn_k.bias", HF_LAYER "self_attn.k_proj.bias"}, DIM_ONE, DIM_KV, ARCH_QKV_BIAS, false},
	{TENSOR_BV, {"blk.%d.attn_v.bias", HF_LAYER "self_attn.v_proj.bias"}, DIM_ONE, DIM_KV, ARCH_QKV_BIAS, false},
	{TENSOR_Q_NORM, {"blk.%d.attn_q_norm.weight", HF_LAYER "self_attn.q_norm.weight"}, DIM_ONE, DIM_HEAD, ARCH_QK_NORM,
	 false},
	{TENSOR_K_NORM, {"blk.%d.attn_k_norm.weight", HF_LAYER "self_attn.k_norm.weight"}, DIM_ONE, DIM_HEAD, ARCH_QK_NORM,
	 false},
	{TENSOR_WO, {"blk.%d.attn_output.weight", HF_LAYER "self_attn.o_proj.weight"}, DIM_HIDDEN, DIM_Q, 0, false},
	{TENSOR_FFN_NORM, {"blk.%d.ffn_norm.weight", HF_LAYER "post_attention_layernorm.weight"}, DIM_ONE, DIM_HIDDEN, 0,
	 false},
	{TENSOR_W_GATE, {"blk.%d.ffn_gate.weight", HF_LAYER "mlp.gate_proj.weight"}, DIM_FFN, DIM_HIDDEN, 0, false},
	{TENSOR_W_UP, {"blk.%d.ffn_up.weight", HF_LAYER "mlp.up_proj.weight"}, DIM_FFN, DIM_HIDDEN, 0, false},
	{TENSOR_W_DOWN, {"blk.%d.ffn_down.weight", HF_LAYER "mlp.down_proj.weight"}, DIM_HIDDEN, DIM_FFN, 0, false},
};
#define DECODER .tensors = decoder_tensors, .n_tensors = sizeof decoder_tensors / sizeof *decoder_tensors

static const struct model_arch architectures[] = {
	{.name = "llama", .gguf_name = "llama", .hf_class = "LlamaForCausalLM", .hf_model_type = "llama",
	 .rope = {ROPE_INTERLEAVED, ROPE_NEOX}, .features = ARCH_ROPE_FACTORS, .window = ARCH_WINDOW_NEVER, DECODER},
	{.name = "llama", .hf_class = "MistralForCausalLM", .hf_model_type = "mistral", // GGUF knows it as llama
	 .rope = {ROPE_INTERLEAVED, ROPE_NEOX}, .window = ARCH_WINDOW_ALWAYS, .hf_kv_heads = 8,
	 DECODER},
	{.name = "qwen2", .gguf_name = "qwen2", .hf_class = "Qwen2ForCausalLM", .hf_model_type = "qwen2",
	 .rope = {ROPE_NEOX, ROPE_NEOX}, .features = ARCH_QKV_BIAS, .window = ARCH_WINDOW_IF_USED,
	 .hf_kv_heads = 32, DECODER},
	{.name = "qwen3", .gguf_name = "qwen3", .hf_class = "Qwen3ForCausalLM", .hf_model_type = "qwen3",
	 .rope = {ROPE_NEOX, ROPE_NEOX}, .features = ARCH_QK_NORM, .window = ARCH_WINDOW_IF_USED,
	 .hf_head_dim = 128, .hf_kv_heads = 32, DECODER},
};
enum { ARCH_COUNT = sizeof architectures / sizeof *architectures };

const struct model_arch *model_arch_from_gguf(const char *name, size_t len)
{
	for (int i = 0; i < ARCH_COUNT; i++) {
		const char *known = architectures[i].gguf_name;
		if (known && strlen(known) == len && !memcmp(known, name, len))
			return &architectures[i];
	}
	return NULL;
}

const struct model_arch *model_arch_from_hf(const char *class_name, const char *model_type)
{
	for (int i = 0; i < ARCH_COUNT; i++) {
		if (class_name && strcmp(class_name, architectures[i].hf_class))
			continue;
		if (model_type && strcmp(model_type, architectures[i].hf_model_type))
			continue;
		if (class_name || model_type)
			return &architectures[i];
	}
	return NULL;
}

const char *model_arch_list(enum model_format format, char *buf, size_t cap)
{
	size_t n = 0;
	buf[0] = 0;
	for (int i = 0; i < ARCH_COUNT; i++) {
		const char *name = format == MODEL_GGUF ? architectures[i].gguf_name : architectures[i].hf_class;
		if (!name || n >= cap)
			continue;
		int m = snprintf(buf + n, cap - n, "%s%s", n ? ", " : "", name);
		n += (size_t)m;
	}
	return buf;
}

int64_t model_arch_dim(const struct model_config *c, enum arch_dim dim)
{
	switch (dim) {
	case DIM_ONE: return 1;
	case DIM_HIDDEN: return c->hidden;
	case DIM_FFN: return c->ffn;
	case DIM_VOCAB: return c->vocab_rows;
	case DIM_Q: return (int64_t)c->n_heads * c->head_dim;
	case DIM_KV: return (int64_t)c->n_kv_heads * c->head_dim;
	case DIM_HEAD: return c->head_dim;
	case DIM_HALF_ROPE: return c->rope_dim / 2;
	}
	ASSERT(!"a dimension without a formula");
	return 0;
}
