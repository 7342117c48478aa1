// config.json and generation_config.json: one good text, and tables of what changes in it and what follows.
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/model_parts.h"
#include "common/model_vocabulary.h"

static const char base[] =
	"{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":64,\"intermediate_size\":96,"
	"\"num_hidden_layers\":2,\"num_attention_heads\":8,\"num_key_value_heads\":2,\"vocab_size\":300,"
	"\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"rope_scaling\":null,"
	"\"hidden_act\":\"silu\",\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\",\"bos_token_id\":1,"
	"\"eos_token_id\":2,\"attention_bias\":false,\"mlp_bias\":false,\"quantization_config\":null}";

static struct error e;
static struct model_config c;
static const struct model_arch *arch;
static struct model_generation g;

// The base with `changes`, an object whose fields replace those of the base ("-" takes a field away).
static enum status parse(const char *changes)
{
	json_t *root = json_loads(base, 0, NULL), *edit = json_loads(changes, 0, NULL), *v;
	const char *key;
	cr_assert(root && edit, "%s", changes);
	json_object_foreach(edit, key, v) {
		if (json_is_string(v) && !strcmp(json_string_value(v), "-"))
			json_object_del(root, key);
		else
			json_object_set(root, key, v);
	}
	char *text = json_dumps(root, 0);
	json_decref(root);
	json_decref(edit);
	e.text[0] = 0;
	generation_init(&g);
	enum status status = config_from_json(text, strlen(text), "config.json", &c, &arch, &g, &e);
	free(text);
	return status;
}

Test(model_config, the_fields_of_transformers_4_are_read)
{
	cr_assert_eq(parse("{}"), STATUS_OK, "%s", e.text);
	cr_assert_str_eq(c.architecture, "llama");
	cr_assert(c.hidden == 64 && c.ffn == 96 && c.n_layers == 2 && c.n_heads == 8 && c.n_kv_heads == 2);
	cr_assert(c.head_dim == 8 && c.rope_dim == 8 && c.vocab_rows == 300 && c.max_context == 2048);
	cr_assert(c.norm_eps == 1e-5f && c.rope_theta == 10000.0f && c.rope_scaling == ROPE_SCALING_NONE);
	cr_assert(c.rope_kind == ROPE_NEOX && !c.tied_head && !c.has_qkv_bias && !c.has_qk_norm && c.dtype == DTYPE_BF16);
	cr_assert(g.bos == 1 && g.n_eos == 1 && g.eos[0] == 2);
}

Test(model_config, the_fields_of_transformers_5_are_read)
{
	cr_assert_eq(parse("{\"rope_theta\":\"-\",\"rope_scaling\":\"-\",\"torch_dtype\":\"-\",\"dtype\":\"float16\","
	                   "\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":500000.0,\"factor\":8.0,"
	                   "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":512}}"),
	             STATUS_OK, "%s", e.text);
	cr_assert_eq(c.dtype, DTYPE_F16);
	cr_assert(c.rope_scaling == ROPE_SCALING_LLAMA3 && c.rope_theta == 500000.0f && c.rope_factor == 8.0f);
	cr_assert(c.rope_low_freq_factor == 1.0f && c.rope_high_freq_factor == 4.0f && c.rope_original_context == 512);
}

Test(model_config, rope_scaling_is_known_by_its_new_and_its_old_name)
{
	cr_assert_eq(parse("{\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}}"), STATUS_OK, "%s", e.text);
	cr_assert(c.rope_scaling == ROPE_SCALING_LINEAR && c.rope_factor == 4.0f);
	cr_assert_eq(parse("{\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2.5}}"), STATUS_OK, "%s", e.text);
	cr_assert(c.rope_scaling == ROPE_SCALING_LINEAR && c.rope_factor == 2.5f);
	cr_assert_eq(parse("{\"rope_scaling\":{\"rope_type\":\"default\"}}"), STATUS_OK, "%s", e.text);
	cr_assert_eq(c.rope_scaling, ROPE_SCALING_NONE);
}

Test(model_config, each_family_has_its_own_pieces_and_defaults)
{
	cr_assert_eq(parse("{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\",\"sliding_window\":32,"
	                   "\"use_sliding_window\":false}"), STATUS_OK, "%s", e.text);
	cr_assert(!strcmp(c.architecture, "qwen2") && c.has_qkv_bias && !c.has_qk_norm);
	cr_assert_eq(parse("{\"architectures\":[\"Qwen3ForCausalLM\"],\"model_type\":\"qwen3\"}"), STATUS_OK, "%s", e.text);
	cr_assert(!strcmp(c.architecture, "qwen3") && c.has_qk_norm && c.head_dim == 128);
	cr_assert_eq(parse("{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"sliding_window\":null,"
	                   "\"head_dim\":16}"), STATUS_OK, "%s", e.text);
	cr_assert(!strcmp(c.architecture, "llama") && c.head_dim == 16);
	cr_assert_eq(parse("{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"sliding_window\":4096,"
	                   "\"num_key_value_heads\":\"-\"}"), STATUS_OK, "%s", e.text);
	cr_assert_eq(c.n_kv_heads, 8);
	cr_assert_eq(parse("{\"architectures\":\"-\",\"num_key_value_heads\":null}"), STATUS_OK, "%s", e.text);
	cr_assert_eq(c.n_kv_heads, 8);
}

Test(model_config, end_tokens_may_be_a_list)
{
	cr_assert_eq(parse("{\"eos_token_id\":[5,6,5,7],\"bos_token_id\":null}"), STATUS_OK, "%s", e.text);
	cr_assert(g.n_eos == 3 && g.eos[0] == 5 && g.eos[1] == 6 && g.eos[2] == 7 && g.bos == -1);
}

static const struct { const char *changes, *place, *reason; } refused[] = {
	{"{\"architectures\":[\"GPT2LMHeadModel\"]}", "GPT2LMHeadModel", "LlamaForCausalLM, MistralForCausalLM"},
	{"{\"architectures\":[\"Qwen2MoeForCausalLM\"]}", "Qwen2MoeForCausalLM", "not supported"},
	{"{\"architectures\":\"LlamaForCausalLM\"}", "architectures", "expected an array of one name"},
	{"{\"architectures\":[\"LlamaForCausalLM\",\"Qwen2ForCausalLM\"]}", "architectures", "an array of one name"},
	{"{\"architectures\":\"-\",\"model_type\":\"-\"}", "architectures", "neither"},
	{"{\"architectures\":\"-\",\"model_type\":\"gemma2\"}", "gemma2", "not supported"},
	{"{\"model_type\":\"qwen2\"}", "model_type", "does not go with LlamaForCausalLM"},
	{"{\"hidden_size\":\"-\"}", "hidden_size", "missing"},
	{"{\"hidden_size\":\"64\"}", "hidden_size", "expected an integer, found a string"},
	{"{\"hidden_size\":64.0}", "hidden_size", "found a number with a fraction"},
	{"{\"hidden_size\":-64}", "hidden size", "found -64"},
	{"{\"hidden_size\":0}", "hidden size", "found 0"},
	{"{\"hidden_size\":99999999999}", "hidden_size", "does not fit 32 bits"},
	{"{\"hidden_size\":2147483640}", "hidden size", "expected 1 to 1048576"},
	{"{\"hidden_size\":60}", "head_dim", "60 has to be a multiple of \"num_attention_heads\" 8"},
	{"{\"intermediate_size\":\"-\"}", "intermediate_size", "missing"},
	{"{\"num_hidden_layers\":0}", "number of layers", "expected 1 to 1024, found 0"},
	{"{\"num_hidden_layers\":1000000000}", "number of layers", "expected 1 to 1024"},
	{"{\"num_attention_heads\":0}", "num_attention_heads", "multiple"},
	{"{\"num_key_value_heads\":3}", "8 heads", "not a multiple of 3"},
	{"{\"num_key_value_heads\":16}", "KV heads", "expected 1 to 8, found 16"},
	{"{\"head_dim\":7}", "head size", "even"},
	{"{\"head_dim\":100000}", "head size", "expected 2 to 1024"},
	{"{\"vocab_size\":0}", "vocabulary", "found 0"},
	{"{\"max_position_embeddings\":\"-\"}", "max_position_embeddings", "missing"},
	{"{\"rms_norm_eps\":\"-\"}", "rms_norm_eps", "missing"},
	{"{\"rms_norm_eps\":0}", "norm epsilon", "found 0"},
	{"{\"rope_theta\":-1}", "rope theta", "found -1"},
	{"{\"rope_theta\":1e300}", "rope_theta", "does not fit float32"},
	{"{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4}}", "rope_scaling.rope_type", "\"yarn\" is not supported"},
	{"{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4}}", "rope_scaling.rope_type", "\"dynamic\" is not supported"},
	{"{\"rope_parameters\":{\"rope_type\":\"longrope\"}}", "rope_parameters.rope_type", "\"longrope\" is not supported"},
	{"{\"rope_scaling\":{\"rope_type\":\"linear\"}}", "rope_scaling.factor", "missing"},
	{"{\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":0}}", "rope scaling factor", "found 0"},
	{"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", "rope_scaling.low_freq_factor", "missing"},
	{"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
	 "\"original_max_position_embeddings\":9}}", "llama3", "low_freq_factor < high_freq_factor"},
	{"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
	 "\"original_max_position_embeddings\":0}}", "original_max_position_embeddings", "found 0"},
	{"{\"rope_scaling\":\"linear\"}", "rope_scaling", "expected an object, found a string"},
	{"{\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2},\"rope_parameters\":{\"rope_type\":\"default\"}}",
	 "rope_parameters", "contradict"},
	{"{\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}", "rope_parameters.full_attention",
	 "differ by kind of layer"},
	{"{\"rope_parameters\":{\"partial_rotary_factor\":0.5}}", "rope_parameters.partial_rotary_factor", "partial rotary"},
	{"{\"partial_rotary_factor\":0.5}", "partial_rotary_factor", "not supported"},
	{"{\"hidden_act\":\"gelu\"}", "hidden_act", "found \"gelu\""},
	{"{\"hidden_activation\":\"gelu_pytorch_tanh\"}", "hidden_activation", "gelu_pytorch_tanh"},
	{"{\"attention_bias\":true}", "attention_bias", "not supported"},
	{"{\"mlp_bias\":true}", "mlp_bias", "not supported"},
	{"{\"quantization_config\":{\"quant_method\":\"gptq\"}}", "quantization_config", "quant_method gptq"},
	{"{\"num_local_experts\":8}", "num_local_experts", "not supported"},
	{"{\"final_logit_softcapping\":30.0}", "final_logit_softcapping", "not supported"},
	{"{\"logits_scaling\":8}", "logits_scaling", "not supported"},
	{"{\"no_rope_layers\":[1,1,0]}", "no_rope_layers", "not supported"},
	{"{\"layer_types\":[\"full_attention\",\"sliding_attention\"]}", "layer_types", "layer 1 is \"sliding_attention\""},
	{"{\"layer_types\":\"full_attention\"}", "layer_types", "expected an array"},
	{"{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"sliding_window\":1024}", "sliding_window",
	 "1024 is below the context of 2048"},
	{"{\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"max_position_embeddings\":8192}",
	 "sliding_window", "(its default): 4096 is below"},
	{"{\"architectures\":[\"Qwen2ForCausalLM\"],\"model_type\":\"qwen2\",\"sliding_window\":32,"
	 "\"use_sliding_window\":true}", "sliding_window", "32 is below"},
	{"{\"torch_dtype\":\"float64\"}", "dtype", "found \"float64\""},
	{"{\"tie_word_embeddings\":\"yes\"}", "tie_word_embeddings", "expected true or false"},
	{"{\"eos_token_id\":\"</s>\"}", "eos_token_id", "found a string"},
	{"{\"eos_token_id\":[1,2.5]}", "eos_token_id", "found a number with a fraction"},
};

Test(model_config, every_config_of_the_table_is_refused_by_the_name_of_its_field)
{
	for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
		cr_assert_eq(parse(refused[i].changes), STATUS_REFUSED, "%s", refused[i].changes);
		cr_assert(strstr(e.text, "config.json"), "%s: %s", refused[i].changes, e.text);
		cr_assert(strstr(e.text, refused[i].place), "%s: %s", refused[i].changes, e.text);
		cr_assert(strstr(e.text, refused[i].reason), "%s: %s", refused[i].changes, e.text);
	}
}

Test(model_config, features_that_are_switched_off_are_no_reason_to_refuse)
{
	static const char *const fine[] = {
		"{\"attention_bias\":false,\"partial_rotary_factor\":1.0,\"logits_scaling\":1,\"num_local_experts\":0}",
		"{\"quantization_config\":{},\"no_rope_layers\":[],\"final_logit_softcapping\":null}",
		"{\"layer_types\":[\"full_attention\",\"full_attention\"],\"pretraining_tp\":1,\"use_cache\":true}",
		"{\"hidden_act\":\"swish\",\"sliding_window\":16}", // the class llama has no windows
	};
	for (size_t i = 0; i < sizeof fine / sizeof *fine; i++)
		cr_assert_eq(parse(fine[i]), STATUS_OK, "%s: %s", fine[i], e.text);
}

Test(model_config, generation_defaults_are_read_and_checked)
{
	static const char text[] = "{\"temperature\":0.6,\"top_p\":0.9,\"top_k\":50,\"repetition_penalty\":1.1,"
	                           "\"eos_token_id\":[3,4],\"bos_token_id\":9,\"do_sample\":true}";
	generation_init(&g);
	generation_add_eos(&g, 3);
	cr_assert_eq(generation_from_json(text, strlen(text), "generation_config.json", &g, &e), STATUS_OK, "%s", e.text);
	cr_assert(g.temperature == 0.6f && g.top_p == 0.9f && g.top_k == 50 && g.repetition_penalty == 1.1f);
	cr_assert(isnan(g.min_p) && g.n_eos == 2 && g.eos[1] == 4 && g.bos == 9);
	static const struct { const char *text, *reason; } bad[] = {
		{"{\"temperature\":-1}", "temperature"},  {"{\"top_p\":1.5}", "top_p"},
		{"{\"top_k\":\"50\"}", "top_k"},          {"{\"repetition_penalty\":0}", "repetition_penalty"},
		{"{\"temperature\":true}", "temperature"}, {"[]", "found an array"},
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		cr_assert_eq(generation_from_json(bad[i].text, strlen(bad[i].text), "generation_config.json", &g, &e),
		             STATUS_REFUSED, "%s", bad[i].text);
		cr_assert(strstr(e.text, bad[i].reason), "%s", e.text);
	}
}

Test(model_vocabulary, the_size_is_the_largest_id_plus_one)
{
	static const struct { const char *text; int32_t size; } good[] = {
		{"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\\\"}\":1},\"merges\":[]},\"added_tokens\":[]}", 2},
		{"{\"added_tokens\":[{\"id\":9,\"content\":\"<x>\",\"special\":true}],\"model\":{\"vocab\":{\"a\":0}}}", 10},
		{"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",-1.5],[\"b\",-2],[\"]\",0]]}}", 3},
		{" { \"x\" : [ { \"y\" : [ 1 , \"]\" ] } , null ] , \"model\" : { \"vocab\" : { \"a\" : 4 } } } ", 5},
	};
	for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
		struct vocabulary_summary v;
		cr_assert_eq(vocabulary_scan(good[i].text, strlen(good[i].text), "tokenizer.json", &v, &e), STATUS_OK, "%s: %s",
		             good[i].text, e.text);
		cr_assert_eq(v.size, good[i].size, "%s: %d", good[i].text, v.size);
	}
	struct vocabulary_summary v;
	cr_assert_eq(vocabulary_scan(good[1].text, strlen(good[1].text), "tokenizer.json", &v, &e), STATUS_OK);
	cr_assert_eq(vocabulary_find_added(&v, "<x>"), 9);
	cr_assert_eq(vocabulary_find_added(&v, "a"), -1);
}

Test(model_vocabulary, broken_texts_are_refused)
{
	static const char *const bad[] = {
		"", "{", "[]", "{}", "{\"model\":{}}", "{\"model\":{\"vocab\":{\"a\":-1}}}", "{\"model\":{\"vocab\":{\"a\":\"0\"}}}",
		"{\"model\":{\"vocab\":{\"a\":99999999999999}}}", "{\"model\":{\"vocab\":{\"a\":0}}", "{\"model\":{\"vocab\":{\"a\":0}}}x",
		"{\"model\":7}", "{\"a\":", "{\"a\":}", "{\"a\":]}", "{\"a", "{\"a\\", "{\"model\":{\"vocab\":[", "{\"added_tokens\":[",
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct vocabulary_summary v;
		char *exact = malloc(strlen(bad[i]) + 1);
		memcpy(exact, bad[i], strlen(bad[i]));
		cr_assert_eq(vocabulary_scan(exact, strlen(bad[i]), "tokenizer.json", &v, &e), STATUS_REFUSED, "%s", bad[i]);
		cr_assert(strstr(e.text, "tokenizer.json"), "%s", e.text);
		free(exact);
	}
}
