// From a GGUF file to a model: a tiny llama, and a table of what changes in it and what the refusal has to say.
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <math.h>

#include "common/model.h"
#include "gguf_builder.h"
#include "temp_folder.h"

static struct error e;
static struct temp_folder folder;

static void setup(void)
{
	temp_folder_create(&folder);
}

static void teardown(void)
{
	temp_folder_remove(&folder);
}

static const char *write_model(const char *name, const struct gguf_edit *edit)
{
	struct bytes b = gguf_tiny_llama(edit);
	const char *path = temp_folder_write(&folder, name, b.p, b.n);
	free(b.p);
	return path;
}

static enum status open_edited(struct model **m, const struct gguf_edit *edit)
{
	e.text[0] = 0;
	return model_open(m, write_model("tiny.gguf", edit), NULL, &e);
}

#define UNCHANGED .ggml_type = -1, GGUF_NO_SPLIT

Test(model_gguf, a_good_file_gives_configuration_tensors_and_end_tokens, .init = setup, .fini = teardown)
{
	struct model *m;
	cr_assert_eq(open_edited(&m, &(struct gguf_edit){UNCHANGED}), STATUS_OK, "%s", e.text);
	const struct model_config *c = model_config(m);
	cr_assert_str_eq(c->architecture, "llama");
	cr_assert(c->n_layers == 2 && c->hidden == 32 && c->ffn == 64 && c->n_heads == 4 && c->n_kv_heads == 2);
	cr_assert(c->head_dim == 8 && c->vocab_size == 8 && c->vocab_rows == 8 && c->max_context == 64);
	cr_assert(c->rope_kind == ROPE_INTERLEAVED && c->rope_theta == 10000 && c->rope_scaling == ROPE_SCALING_NONE);
	cr_assert(c->tied_head && !c->dummy && c->dtype == DTYPE_F32);
	cr_assert_str_eq(model_display_name(m), "tiny");
	cr_assert_eq(model_path(m)[0], '/');

	// The one that the metadata name, and one that is known by its text.
	const struct model_generation *g = model_generation(m);
	cr_assert(g->n_eos == 2 && g->eos[0] == 3 && g->eos[1] == 4);
	cr_assert(isnan(g->temperature) && g->top_k == -1 && g->bos == -1 && !g->add_bos);
	cr_assert_null(model_chat_template(m));

	const struct tensor *embedding = model_tensor(m, TENSOR_TOKEN_EMBEDDING, 0);
	cr_assert_eq(model_tensor(m, TENSOR_OUTPUT_HEAD, 0), embedding);
	const struct tensor *k = model_tensor(m, TENSOR_WK, 1);
	cr_assert_str_eq(k->name, "blk.1.attn_k.weight");
	cr_assert(k->rows == 16 && k->cols == 32 && k->bytes == 16 * 32 * 4 && k->data);
	cr_assert(model_tensor(m, TENSOR_ATTN_NORM, 0)->rows == 1 && model_tensor(m, TENSOR_ATTN_NORM, 0)->cols == 32);
	cr_assert_null(model_tensor(m, TENSOR_BQ, 0));
	cr_assert_null(model_tensor(m, TENSOR_ROPE_FACTORS, 0));
	cr_assert_eq(model_embedding_bytes(m), 8 * 32 * 4);
	cr_assert_eq(model_head_bytes(m), 8 * 32 * 4 + 32 * 4);
	cr_assert_eq(model_layer_bytes(m, 0), 4 * (32 + 1024 + 512 + 512 + 1024 + 32 + 3 * 2048));
	cr_assert_not_null(model_gguf(m));
	model_close(&m);
	cr_assert_null(m);
	model_close(&m);
}

Test(model_gguf, a_dummy_load_keeps_shapes_and_forgets_data, .init = setup, .fini = teardown)
{
	struct model *m;
	const char *path = write_model("tiny.gguf", &(struct gguf_edit){UNCHANGED});
	cr_assert_eq(model_open(&m, path, &(struct model_open_options){.load_dummy = true}, &e), STATUS_OK, "%s", e.text);
	cr_assert(model_config(m)->dummy);
	cr_assert_null(model_tensor(m, TENSOR_WQ, 0)->data);
	cr_assert_eq(model_tensor(m, TENSOR_WQ, 0)->rows, 32);
	model_close(&m);
}

static void linear_rope(struct bytes *b, int *n)
{
	put_kv_string(b, "llama.rope.scaling.type", "linear");
	put_kv_f32(b, "llama.rope.scaling.factor", 4);
	put_kv_f32(b, "llama.rope.freq_base", 5000);
	*n += 3;
}

static void no_rope(struct bytes *b, int *n)
{
	put_kv_string(b, "llama.rope.scaling.type", "none");
	put_kv_f32(b, "llama.rope.scaling.factor", 4);
	*n += 2;
}

static void head_size(struct bytes *b, int *n)
{
	put_kv_u32(b, "llama.attention.key_length", 8);
	put_kv_u32(b, "llama.attention.value_length", 8);
	put_kv_u32(b, "llama.rope.dimension_count", 8);
	*n += 3;
}

Test(model_gguf, rope_settings_are_read, .init = setup, .fini = teardown)
{
	struct model *m;
	cr_assert_eq(open_edited(&m, &(struct gguf_edit){.add_keys = linear_rope, UNCHANGED}), STATUS_OK, "%s", e.text);
	cr_assert(model_config(m)->rope_scaling == ROPE_SCALING_LINEAR && model_config(m)->rope_factor == 4);
	cr_assert_eq(model_config(m)->rope_theta, 5000);
	model_close(&m);
	cr_assert_eq(open_edited(&m, &(struct gguf_edit){.add_keys = no_rope, UNCHANGED}), STATUS_OK, "%s", e.text);
	cr_assert_eq(model_config(m)->rope_scaling, ROPE_SCALING_NONE);
	model_close(&m);
	cr_assert_eq(open_edited(&m, &(struct gguf_edit){.add_keys = head_size, UNCHANGED}), STATUS_OK, "%s", e.text);
	model_close(&m);
}

static void sampling(struct bytes *b, int *n)
{
	int32_t k = 40;
	put_kv_f32(b, "general.sampling.temp", 0.7f);
	put_key(b, "general.sampling.top_k", GGUF_INT32);
	put(b, &k, 4);
	put_kv_u32(b, "tokenizer.ggml.eot_token_id", 6);
	put_kv_u32(b, "tokenizer.ggml.bos_token_id", 1);
	put_kv_string(b, "tokenizer.ggml.pre", "llama-bpe");
	put_kv_string(b, "tokenizer.chat_template", "{{ messages }}");
	*n += 6;
}

Test(model_gguf, sampling_defaults_template_and_bos_are_read, .init = setup, .fini = teardown)
{
	struct model *m;
	cr_assert_eq(open_edited(&m, &(struct gguf_edit){.add_keys = sampling, UNCHANGED}), STATUS_OK, "%s", e.text);
	const struct model_generation *g = model_generation(m);
	cr_assert(g->temperature == 0.7f && g->top_k == 40 && isnan(g->top_p));
	cr_assert(g->n_eos == 3 && g->eos[1] == 6 && g->bos == 1);
	cr_assert(g->add_bos, "the pre-tokenizer llama-bpe wants a BOS where the file does not say");
	cr_assert_str_eq(model_chat_template(m), "{{ messages }}");
	model_close(&m);
}

static void other_architecture(struct bytes *b, int *n) { put_kv_string(b, "general.architecture", "mamba"), ++*n; }
static void architecture_as_number(struct bytes *b, int *n) { put_kv_u32(b, "general.architecture", 3), ++*n; }
static void blocks_as_float(struct bytes *b, int *n) { put_kv_f32(b, "llama.block_count", 2), ++*n; }
static void three_blocks(struct bytes *b, int *n) { put_kv_u32(b, "llama.block_count", 3), ++*n; }
static void one_block(struct bytes *b, int *n) { put_kv_u32(b, "llama.block_count", 1), ++*n; }
static void huge_blocks(struct bytes *b, int *n) { put_kv_u32(b, "llama.block_count", 4000000000u), ++*n; }
static void many_blocks(struct bytes *b, int *n) { put_kv_u32(b, "llama.block_count", 2000), ++*n; }
static void no_heads(struct bytes *b, int *n) { put_kv_u32(b, "llama.attention.head_count", 0), ++*n; }
static void three_heads(struct bytes *b, int *n) { put_kv_u32(b, "llama.attention.head_count", 3), ++*n; }
static void three_kv_heads(struct bytes *b, int *n) { put_kv_u32(b, "llama.attention.head_count_kv", 3), ++*n; }
static void kv_heads_by_layer(struct bytes *b, int *n)
{
	put_array(b, "llama.attention.head_count_kv", GGUF_UINT32, 2);
	put_u32(b, 2);
	put_u32(b, 1);
	++*n;
}
static void eps_nan(struct bytes *b, int *n) { put_kv_f32(b, "llama.attention.layer_norm_rms_epsilon", NAN), ++*n; }
static void other_values(struct bytes *b, int *n) { put_kv_u32(b, "llama.attention.value_length", 16), ++*n; }
static void partial_rope(struct bytes *b, int *n) { put_kv_u32(b, "llama.rope.dimension_count", 4), ++*n; }
static void yarn(struct bytes *b, int *n) { put_kv_string(b, "llama.rope.scaling.type", "yarn"), ++*n; }
static void negative_factor(struct bytes *b, int *n) { put_kv_f32(b, "llama.rope.scaling.factor", -2), ++*n; }
static void theta_infinite(struct bytes *b, int *n) { put_kv_f32(b, "llama.rope.freq_base", INFINITY), ++*n; }
static void experts(struct bytes *b, int *n) { put_kv_u32(b, "llama.expert_count", 8), ++*n; }
static void soft_cap(struct bytes *b, int *n) { put_kv_f32(b, "llama.final_logit_softcapping", 30), ++*n; }
static void logit_scale(struct bytes *b, int *n) { put_kv_f32(b, "llama.logit_scale", 0.5f), ++*n; }
static void window(struct bytes *b, int *n) { put_kv_u32(b, "llama.attention.sliding_window", 32), ++*n; }
static void not_causal(struct bytes *b, int *n) { put_kv_bool(b, "llama.attention.causal", 0), ++*n; }
static void eos_outside(struct bytes *b, int *n) { put_kv_u32(b, "tokenizer.ggml.eos_token_id", 8), ++*n; }
static void bos_outside(struct bytes *b, int *n) { put_kv_u32(b, "tokenizer.ggml.bos_token_id", 9), ++*n; }
static void eos_as_text(struct bytes *b, int *n) { put_kv_string(b, "tokenizer.ggml.eos_token_id", "3"), ++*n; }
static void tokens_as_numbers(struct bytes *b, int *n)
{
	put_array(b, "tokenizer.ggml.tokens", GGUF_UINT8, 1);
	put(b, "x", 1);
	++*n;
}
static void nine_tokens(struct bytes *b, int *n)
{
	put_array(b, "tokenizer.ggml.tokens", GGUF_STRING, 9);
	for (int i = 0; i < 9; i++)
		put_string(b, "t");
	++*n;
}
static void hot(struct bytes *b, int *n) { put_kv_f32(b, "general.sampling.temp", -1), ++*n; }
static void template_nul(struct bytes *b, int *n)
{
	put_key(b, "tokenizer.chat_template", GGUF_STRING);
	put_text(b, "a\0b", 3);
	++*n;
}

#define KEY(key, add) {.drop_key = key, .add_keys = add, UNCHANGED}
#define SHAPE(t, ...) {.change_tensor = t, .n_dims = sizeof((uint64_t[]){__VA_ARGS__}) / 8, .dims = {__VA_ARGS__}, UNCHANGED}

static const struct { struct gguf_edit edit; const char *place, *reason; } broken[] = {
	{KEY("general.architecture", NULL), "general.architecture", "missing"},
	{KEY("general.architecture", other_architecture), "\"mamba\"", "supported are llama, qwen2, qwen3"},
	{KEY("general.architecture", architecture_as_number), "general.architecture", "expected string, found uint32"},
	{KEY("llama.block_count", NULL), "llama.block_count", "missing"},
	{KEY("llama.block_count", blocks_as_float), "llama.block_count", "expected uint32, found float32"},
	{KEY("llama.block_count", three_blocks), "blk.2.attn_norm.weight", "missing; expected shape [32]"},
	{KEY("llama.block_count", one_block), "blk.1.", "architecture llama with 1 layers has no such tensor"},
	{KEY("llama.block_count", huge_blocks), "llama.block_count", "at most 2147483647, found 4000000000"},
	{KEY("llama.block_count", many_blocks), "number of layers", "expected 1 to 1024, found 2000"},
	{KEY("llama.embedding_length", NULL), "llama.embedding_length", "missing"},
	{KEY("llama.feed_forward_length", NULL), "llama.feed_forward_length", "missing"},
	{KEY("llama.context_length", NULL), "llama.context_length", "missing"},
	{KEY("llama.attention.head_count", NULL), "llama.attention.head_count", "missing"},
	{KEY("llama.attention.head_count", no_heads), "hidden size 32", "multiple of the 0 heads"},
	{KEY("llama.attention.head_count", three_heads), "hidden size 32", "multiple of the 3 heads"},
	{KEY("llama.attention.head_count_kv", three_kv_heads), "4 heads", "not a multiple of 3"},
	{KEY("llama.attention.head_count_kv", kv_heads_by_layer), "head_count_kv", "expected uint32, found an array of uint32"},
	{KEY("llama.attention.head_count_kv", NULL), "blk.0.attn_k.weight", "expected shape [32, 32], found [16, 32]"},
	{KEY("llama.attention.layer_norm_rms_epsilon", NULL), "layer_norm_rms_epsilon", "missing"},
	{KEY("llama.attention.layer_norm_rms_epsilon", eps_nan), "norm epsilon", "nan"},
	{KEY(NULL, other_values), "llama.attention.value_length", "differ in size"},
	{KEY(NULL, partial_rope), "partial rotary", "4 of 8"},
	{KEY(NULL, yarn), "llama.rope.scaling.type", "\"yarn\" is not supported"},
	{KEY(NULL, negative_factor), "rope scaling factor", "found -2"},
	{KEY(NULL, theta_infinite), "rope theta", "inf"},
	{KEY(NULL, experts), "llama.expert_count", "is 8, and this feature is not supported"},
	{KEY(NULL, soft_cap), "llama.final_logit_softcapping", "is 30"},
	{KEY(NULL, logit_scale), "llama.logit_scale", "is 0.5"},
	{KEY(NULL, window), "llama.attention.sliding_window", "is 32, below the context of 64"},
	{KEY(NULL, not_causal), "llama.attention.causal", "not causal"},
	{KEY("tokenizer.ggml.eos_token_id", eos_outside), "end token 8", "vocabulary of 8"},
	{KEY(NULL, bos_outside), "BOS token 9", "vocabulary of 8"},
	{KEY("tokenizer.ggml.eos_token_id", eos_as_text), "tokenizer.ggml.eos_token_id", "expected uint32, found string"},
	{KEY("tokenizer.ggml.tokens", tokens_as_numbers), "tokenizer.ggml.tokens", "expected an array of string"},
	{KEY("tokenizer.ggml.tokens", nine_tokens), "9 tokens", "only 8 rows"},
	{KEY(NULL, hot), "general.sampling.temp", "found -1"},
	{KEY(NULL, template_nul), "tokenizer.chat_template", "NUL"},
	{{.drop_tensor = "token_embd.weight", UNCHANGED}, "token_embd.weight", "missing; expected shape [8, 32]"},
	{{.drop_tensor = "output_norm.weight", UNCHANGED}, "output_norm.weight", "missing"},
	{{.drop_tensor = "blk.1.ffn_down.weight", UNCHANGED}, "blk.1.ffn_down.weight", "missing; expected shape [32, 64]"},
	{{.rename_tensor = "blk.0.attn_q.weight", .new_name = "blk.0.attn_qkv.weight", UNCHANGED}, "blk.0.attn_q.weight",
	 "missing"},
	{{.add_tensor = "blk.0.attn_q.bias", UNCHANGED}, "blk.0.attn_q.bias", "architecture llama with 2 layers has no such"},
	{{.add_tensor = "blk.0.attn_q_norm.weight", UNCHANGED}, "blk.0.attn_q_norm.weight", "no such tensor"},
	{{.add_tensor = "blk.01.attn_norm.weight", UNCHANGED}, "blk.01.attn_norm.weight", "no such tensor"},
	{{.add_tensor = "rope_freqs.weight", UNCHANGED}, "rope_freqs.weight", "expected shape [4], found [32]"},
	{SHAPE("blk.0.attn_q.weight", 32, 16), "blk.0.attn_q.weight", "expected shape [32, 32], found [16, 32]"},
	{SHAPE("blk.0.ffn_up.weight", 64, 32), "blk.0.ffn_up.weight", "expected shape [64, 32], found [32, 64]"},
	{SHAPE("blk.1.attn_norm.weight", 31), "blk.1.attn_norm.weight", "expected shape [32], found [31]"},
	{SHAPE("blk.1.attn_norm.weight", 16, 2), "blk.1.attn_norm.weight", "expected shape [32], found [2, 16]"},
	{SHAPE("token_embd.weight", 32, 7), "8 tokens", "only 7 rows"},
	{{.change_tensor = "blk.0.ffn_norm.weight", .ggml_type = 8, GGUF_NO_SPLIT}, "blk.0.ffn_norm.weight",
	 "expected type float32, float16 or bfloat16, found q8_0"},
	{{.change_tensor = "blk.0.ffn_up.weight", .ggml_type = 39, GGUF_NO_SPLIT}, "blk.0.ffn_up.weight", "MXFP4 (39)"},
};

Test(model_gguf, every_broken_model_of_the_table_is_refused_with_place_and_reason, .init = setup, .fini = teardown)
{
	for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
		struct model *m;
		cr_assert_eq(open_edited(&m, &broken[i].edit), STATUS_REFUSED, "row %zu: %s, %s", i, broken[i].place,
		             broken[i].reason);
		cr_assert_null(m);
		cr_assert(strstr(e.text, "tiny.gguf"), "row %zu: %s", i, e.text);
		cr_assert(strstr(e.text, broken[i].place), "row %zu: %s", i, e.text);
		cr_assert(strstr(e.text, broken[i].reason), "row %zu: %s", i, e.text);
	}
}

Test(model_gguf, more_embedding_rows_than_tokens_is_padding, .init = setup, .fini = teardown)
{
	struct model *m;
	struct gguf_edit edit = SHAPE("token_embd.weight", 32, 11);
	cr_assert_eq(open_edited(&m, &edit), STATUS_OK, "%s", e.text);
	cr_assert(model_config(m)->vocab_rows == 11 && model_config(m)->vocab_size == 8);
	model_close(&m);
}

#define SHARD(i, ...) (&(struct gguf_edit){.ggml_type = -1, .shard = (i), __VA_ARGS__})
static const char first_name[] = "tiny-00001-of-00002.gguf", second_name[] = "tiny-00002-of-00002.gguf";

static void write_shards(void)
{
	write_model(first_name, SHARD(1, .split_no = 0, .split_count = 2, .split_tensors = 20));
	write_model(second_name, SHARD(2, .split_no = 1, .split_count = 2, .split_tensors = 20));
}

Test(model_gguf, the_first_shard_finds_the_others, .init = setup, .fini = teardown)
{
	struct model *m;
	write_shards();
	cr_assert_eq(model_open(&m, temp_folder_path(&folder, first_name), NULL, &e), STATUS_OK, "%s", e.text);
	cr_assert_not_null(model_tensor(m, TENSOR_W_DOWN, 1)->data);
	cr_assert_str_eq(model_display_name(m), "tiny-00001-of-00002");
	model_close(&m);
}

Test(model_gguf, the_first_shard_may_hold_metadata_only, .init = setup, .fini = teardown)
{
	struct model *m;
	// Made by hand: all tensors, of an embedding with padding, in the second file.
	struct gguf_edit all = SHAPE("token_embd.weight", 32, 11);
	struct bytes b = {0};
	all.split_no = 1, all.split_count = 2;
	write_model(second_name, &all);
	all = (struct gguf_edit){.ggml_type = -1, .shard = 1, .split_no = 0, .split_count = 2, .split_tensors = -1};
	b = gguf_tiny_llama(&all);
	memset(b.p + 8, 0, 8); // no tensors
	temp_folder_write(&folder, first_name, b.p, b.n);
	free(b.p);
	cr_assert_eq(model_open(&m, temp_folder_path(&folder, first_name), NULL, &e), STATUS_OK, "%s", e.text);
	cr_assert(model_config(m)->vocab_rows == 11 && model_config(m)->vocab_size == 8);
	model_close(&m);
}

static void expect_refused(const char *name, const char *place, const char *reason)
{
	struct model *m;
	cr_assert_eq(model_open(&m, temp_folder_path(&folder, name), NULL, &e), STATUS_REFUSED);
	cr_assert(strstr(e.text, place), "%s", e.text);
	cr_assert(strstr(e.text, reason), "%s", e.text);
}

Test(model_gguf, a_shard_that_is_missing_or_of_another_model_is_named, .init = setup, .fini = teardown)
{
	write_shards();
	expect_refused(second_name, second_name, "this is shard 2 of 2; give the first,");
	unlink(temp_folder_path(&folder, second_name));
	expect_refused(first_name, second_name, "shard 2 of 2 is missing");
	write_model(second_name, SHARD(2, .split_no = 0, .split_count = 2, .split_tensors = 20));
	expect_refused(first_name, second_name, "expected shard 2 of 2, found shard 1 of 2");
	write_model(second_name, SHARD(2, .split_no = 1, .split_count = 3, .split_tensors = 20));
	expect_refused(first_name, second_name, "expected shard 2 of 2, found shard 2 of 3");
	write_model(second_name, SHARD(2, GGUF_NO_SPLIT));
	expect_refused(first_name, second_name, "\"split.no\" is missing");
	write_model(second_name, SHARD(2, .split_no = 1, .split_count = 2, .split_tensors = 20, .drop_tensor =
	                               "blk.1.attn_q.weight"));
	expect_refused(first_name, "split.tensors.count", "expected 20 tensors in 2 shards, found 19");
	write_model(second_name, SHARD(1, .split_no = 1, .split_count = 2, .split_tensors = -1));
	write_model(first_name, SHARD(1, .split_no = 0, .split_count = 2, .split_tensors = -1));
	expect_refused(first_name, "\"blk.0.", "stands in");
	write_model("tiny.gguf", SHARD(1, .split_no = 0, .split_count = 2, .split_tensors = 20));
	expect_refused("tiny.gguf", "tiny.gguf", "does not end in -00001-of-00002.gguf");
}

Test(model_gguf, files_that_are_no_models_are_refused, .init = setup, .fini = teardown)
{
	temp_folder_write_text(&folder, "empty.gguf", "");
	temp_folder_write_text(&folder, "text.gguf", "hello, this is some text");
	mkfifo(temp_folder_path(&folder, "fifo.gguf"), 0600);
	expect_refused("empty.gguf", "empty.gguf", "empty");
	expect_refused("text.gguf", "text.gguf", "not a GGUF file");
	expect_refused("fifo.gguf", "fifo.gguf", "not a regular file");
	expect_refused("none.gguf", "none.gguf", "no such file or folder");
}
