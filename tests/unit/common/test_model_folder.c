// Model folders in safetensors form, and the same tiny models in both forms: they have to hold the same numbers.
#define _GNU_SOURCE
#include <criterion/criterion.h>
#include <math.h>

#include "common/model.h"
#include "temp_folder.h"

#define TINY TEST_DATA_DIR "/golden/tiny/"

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

static struct model *open_model(const char *path)
{
	struct model *m;
	e.text[0] = 0;
	cr_assert_eq(model_open(&m, path, NULL, &e), STATUS_OK, "%s", e.text);
	return m;
}

static void expect_refused(const char *path, const char *place, const char *reason)
{
	struct model *m;
	e.text[0] = 0;
	cr_assert_eq(model_open(&m, path, NULL, &e), STATUS_REFUSED, "%s: %s", place, reason);
	cr_assert_null(m);
	cr_assert(strstr(e.text, place), "expected %s: %s", place, e.text);
	cr_assert(strstr(e.text, reason), "expected %s: %s", reason, e.text);
}

static float element(const struct tensor *t, int64_t i)
{
	if (t->dtype == DTYPE_F32)
		return ((const float *)t->data)[i];
	uint16_t half = ((const uint16_t *)t->data)[i];
	if (t->dtype == DTYPE_F16) {
		int exponent = half >> 10 & 31, mantissa = half & 1023;
		float magnitude = exponent ? ldexpf((float)(mantissa | 1024), exponent - 25) : ldexpf((float)mantissa, -24);
		return half & 0x8000 ? -magnitude : magnitude;
	}
	uint32_t wide = (uint32_t)half << 16;
	float f;
	memcpy(&f, &wide, 4);
	return f;
}

// Row of the safetensors form that GGUF's row `row` of q or k came from: GGUF keeps rotated pairs side by side.
static int64_t unpermuted_row(int64_t row, int head_dim)
{
	int64_t head = row / head_dim, i = row % head_dim;
	return head * head_dim + i % 2 * (head_dim / 2) + i / 2;
}

static void compare(const struct model *gguf, const struct model *other, enum tensor_role role, int layer)
{
	const struct tensor *a = model_tensor(gguf, role, layer), *b = model_tensor(other, role, layer);
	if (role == TENSOR_ROPE_FACTORS)
		return;
	cr_assert_eq(!a, !b, "%s", tensor_role_name(role));
	if (!a)
		return;
	cr_assert(a->rows == b->rows && a->cols == b->cols, "%s", tensor_role_name(role));
	bool permuted = (role == TENSOR_WQ || role == TENSOR_WK) && model_config(gguf)->rope_kind == ROPE_INTERLEAVED;
	for (int64_t r = 0; r < a->rows; r++) {
		int64_t from = permuted ? unpermuted_row(r, model_config(gguf)->head_dim) : r;
		for (int64_t c = 0; c < a->cols; c++)
			cr_assert_eq(element(a, r * a->cols + c), element(b, from * a->cols + c), "%s, layer %d, [%ld, %ld]",
			             tensor_role_name(role), layer, (long)r, (long)c);
	}
}

static const char *const in_both_forms[] = {
	"llama", "llama-tied-llama3-rope", "llama-linear-rope", "llama-head-dim", "mistral", "qwen2", "qwen3",
};

Test(model_folder, both_file_formats_of_every_tiny_model_hold_the_same_numbers)
{
	for (size_t i = 0; i < sizeof in_both_forms / sizeof *in_both_forms; i++) {
		char path[4096];
		snprintf(path, sizeof path, TINY "%s.gguf", in_both_forms[i]);
		struct model *gguf = open_model(path);
		snprintf(path, sizeof path, TINY "%s", in_both_forms[i]);
		struct model *other = open_model(path);
		const struct model_config *a = model_config(gguf), *b = model_config(other);
		cr_assert_str_eq(a->architecture, b->architecture);
		cr_assert(a->n_layers == b->n_layers && a->hidden == b->hidden && a->ffn == b->ffn && a->n_heads == b->n_heads &&
		          a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->vocab_rows == b->vocab_rows &&
		          a->vocab_size == b->vocab_size && a->max_context == b->max_context && a->tied_head == b->tied_head &&
		          a->norm_eps == b->norm_eps && a->rope_theta == b->rope_theta && a->dtype == b->dtype, "%s", path);
		cr_assert_eq(b->rope_kind, ROPE_NEOX);
		for (int role = 0; role < TENSOR_ROLE_COUNT; role++)
			for (int layer = 0; layer < (role < TENSOR_ATTN_NORM ? 1 : a->n_layers); layer++)
				compare(gguf, other, (enum tensor_role)role, layer);
		const struct model_generation *g = model_generation(gguf), *h = model_generation(other);
		cr_assert(g->n_eos == 2 && g->eos[0] == 265 && g->eos[1] == 267 && g->bos == 264);
		cr_assert(h->n_eos == 2 && h->eos[0] == 265 && h->eos[1] == 267 && h->bos == 264);
		cr_assert(h->temperature == 0.6f && h->top_k == 20 && h->top_p == 0.95f && isnan(h->min_p));
		cr_assert_str_eq(model_chat_template(gguf), model_chat_template(other));
		cr_assert_str_eq(model_display_name(other), in_both_forms[i]);
		cr_assert_null(model_gguf(other));
		model_close(&gguf);
		model_close(&other);
	}
}

Test(model_folder, llama3_scaling_is_factors_in_gguf_and_settings_in_a_folder)
{
	struct model *gguf = open_model(TINY "llama-tied-llama3-rope.gguf"), *other = open_model(TINY "llama-tied-llama3-rope");
	const struct tensor *factors = model_tensor(gguf, TENSOR_ROPE_FACTORS, 0);
	cr_assert_not_null(factors);
	cr_assert(factors->cols == 6 && factors->rows == 1 && element(factors, 0) == 1.0f && element(factors, 5) == 8.0f);
	cr_assert_eq(model_config(gguf)->rope_scaling, ROPE_SCALING_NONE);
	cr_assert_null(model_tensor(other, TENSOR_ROPE_FACTORS, 0));
	cr_assert_eq(model_config(other)->rope_scaling, ROPE_SCALING_LLAMA3);
	model_close(&gguf);
	model_close(&other);
}

Test(model_folder, quantised_models_open_with_the_types_they_are_stored_in)
{
	struct model *m = open_model(TINY "llama-quantised.gguf");
	cr_assert_eq(model_tensor(m, TENSOR_WQ, 1)->dtype, DTYPE_Q4_0);
	cr_assert_eq(model_tensor(m, TENSOR_WK, 1)->dtype, DTYPE_Q4_1);
	cr_assert_eq(model_tensor(m, TENSOR_WV, 1)->dtype, DTYPE_Q5_0);
	cr_assert_eq(model_tensor(m, TENSOR_TOKEN_EMBEDDING, 0)->dtype, DTYPE_Q8_0);
	model_close(&m);
	m = open_model(TINY "llama-k-quantised.gguf");
	cr_assert_eq(model_tensor(m, TENSOR_WQ, 0)->dtype, DTYPE_Q4_K);
	cr_assert_eq(model_tensor(m, TENSOR_WK, 0)->dtype, DTYPE_Q5_K);
	cr_assert_eq(model_tensor(m, TENSOR_WV, 0)->dtype, DTYPE_Q6_K);
	model_close(&m);
}

static void copy_tiny(const char *name, const char *file)
{
	char from[4096];
	snprintf(from, sizeof from, TINY "%s/%s", name, file);
	temp_folder_copy(&folder, from, file);
}

static void copy_sharded(void)
{
	static const char *const files[] = {
		"config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors",
		"model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
	};
	for (size_t i = 0; i < sizeof files / sizeof *files; i++)
		copy_tiny("llama-linear-rope", files[i]);
}

Test(model_folder, a_shard_that_is_missing_or_of_another_model_is_named, .init = setup, .fini = teardown)
{
	copy_sharded();
	struct model *m = open_model(folder.path);
	model_close(&m);
	unlink(temp_folder_path(&folder, "model-00002-of-00003.safetensors"));
	expect_refused(folder.path, "model-00002-of-00003.safetensors", "shard 2 of 3, which");
	temp_folder_copy(&folder, TINY "llama-linear-rope/model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors");
	expect_refused(folder.path, "model-00002-of-00003.safetensors", "is not in its shard");
	temp_folder_copy(&folder, TINY "llama-head-dim/model-00002-of-00003.safetensors", "model-00002-of-00003.safetensors");
	expect_refused(folder.path, "safetensors", "tensor \"");
	temp_folder_write_text(&folder, "model.safetensors.index.json", "{}");
	expect_refused(folder.path, "model.safetensors.index.json", "\"weight_map\" is missing");
	unlink(temp_folder_path(&folder, "model.safetensors.index.json"));
	expect_refused(folder.path, folder.path, "neither model.safetensors nor model.safetensors.index.json");
}

Test(model_folder, a_folder_without_what_it_needs_is_refused, .init = setup, .fini = teardown)
{
	expect_refused(folder.path, folder.path, "no config.json");
	copy_tiny("qwen2", "config.json");
	temp_folder_write_text(&folder, "model.safetensors", "");
	expect_refused(folder.path, "model.safetensors", "empty");
	copy_tiny("qwen3", "model.safetensors");
	expect_refused(folder.path, "model.safetensors", "tensor \"model.embed_tokens.weight\": expected shape [268, 42], found "
	               "[268, 34]");
	copy_tiny("qwen3", "config.json");
	struct model *m = open_model(folder.path);
	cr_assert_eq(model_config(m)->vocab_size, 268, "without a tokenizer every row counts");
	model_close(&m);
	temp_folder_write_text(&folder, "tokenizer.json", "{\"model\":{\"vocab\":{\"a\":268}}}");
	expect_refused(folder.path, "tokenizer.json", "269 tokens, but config.json's vocab_size is only 268");
	temp_folder_write_text(&folder, "tokenizer.json", "{\"model\":{\"vocab\":{\"a\":99}}}");
	m = open_model(folder.path);
	cr_assert(model_config(m)->vocab_size == 100 && model_config(m)->vocab_rows == 268);
	model_close(&m);
	temp_folder_write_text(&folder, "generation_config.json", "{\"eos_token_id\":268}");
	expect_refused(folder.path, folder.path, "end token 268");
	temp_folder_write_text(&folder, "generation_config.json", "{");
	expect_refused(folder.path, "generation_config.json", "not valid JSON");
}

// One float32 tensor after another; names and shapes as given.
static void write_safetensors(const char *name, const char *const *tensors, const int (*shapes)[2], int n)
{
	char *header = NULL, *data = NULL;
	size_t len = 0, bytes = 0;
	FILE *f = open_memstream(&header, &len);
	for (int i = 0; i < n; i++) {
		size_t size = (size_t)shapes[i][0] * (size_t)(shapes[i][1] ? shapes[i][1] : 1) * 4;
		fprintf(f, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%d", i ? "," : "{", tensors[i], shapes[i][0]);
		if (shapes[i][1])
			fprintf(f, ",%d", shapes[i][1]);
		fprintf(f, "],\"data_offsets\":[%zu,%zu]}", bytes, bytes + size);
		bytes += size;
	}
	fprintf(f, "}");
	while ((ftell(f)) % 8)
		fputc(' ', f);
	fclose(f);
	uint64_t n_header = len;
	data = calloc(1, 8 + len + bytes);
	memcpy(data, &n_header, 8);
	memcpy(data + 8, header, len);
	temp_folder_write(&folder, name, data, 8 + len + bytes);
	free(header);
	free(data);
}

static const char small_config[] =
	"{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":8,\"intermediate_size\":12,\"num_hidden_layers\":1,"
	"\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":16,\"max_position_embeddings\":64,"
	"\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":%s}";

#define L "model.layers.0."
static const char *const small_names[] = {
	"model.embed_tokens.weight", "model.norm.weight", L "input_layernorm.weight", L "self_attn.q_proj.weight",
	L "self_attn.k_proj.weight", L "self_attn.v_proj.weight", L "self_attn.o_proj.weight",
	L "post_attention_layernorm.weight", L "mlp.gate_proj.weight", L "mlp.up_proj.weight", L "mlp.down_proj.weight",
	"lm_head.weight",
};
static const int small_shapes[][2] = {{16, 8}, {8, 0}, {8, 0}, {8, 8}, {4, 8}, {4, 8}, {8, 8}, {8, 0}, {12, 8}, {12, 8},
                                      {8, 12}, {16, 8}};

static void write_small_config(const char *tied)
{
	char text[1024];
	snprintf(text, sizeof text, small_config, tied);
	temp_folder_write_text(&folder, "config.json", text);
}

Test(model_folder, tensors_that_are_missing_left_over_or_misshapen_are_named, .init = setup, .fini = teardown)
{
	const char *names[13];
	int shapes[13][2];
	write_small_config("false");
	write_safetensors("model.safetensors", small_names, small_shapes, 12);
	struct model *m = open_model(folder.path);
	cr_assert(!model_config(m)->tied_head);
	model_close(&m);
	for (int i = 0; i < 12; i++) { // each of them renamed, then each of them misshapen
		memcpy(names, small_names, sizeof small_names);
		memcpy(shapes, small_shapes, sizeof small_shapes);
		names[i] = "unheard.of";
		write_safetensors("model.safetensors", names, shapes, 12);
		expect_refused(folder.path, small_names[i], "missing");
		names[i] = small_names[i];
		shapes[i][0]++;
		write_safetensors("model.safetensors", names, shapes, 12);
		expect_refused(folder.path, small_names[i], "expected shape [");
		shapes[i][0]--;
		shapes[i][1] = shapes[i][1] ? 0 : 1; // a vector where a matrix belongs and the other way round
		write_safetensors("model.safetensors", names, shapes, 12);
		expect_refused(folder.path, small_names[i], "expected shape [");
	}
	memcpy(names, small_names, sizeof small_names);
	memcpy(shapes, small_shapes, sizeof small_shapes);
	names[12] = L "self_attn.q_proj.bias";
	shapes[12][0] = 8, shapes[12][1] = 0;
	write_safetensors("model.safetensors", names, shapes, 13);
	expect_refused(folder.path, L "self_attn.q_proj.bias", "has no such tensor");
	names[12] = L "self_attn.rotary_emb.inv_freq"; // old files carry what follows from the config
	write_safetensors("model.safetensors", names, shapes, 13);
	m = open_model(folder.path);
	model_close(&m);
}

Test(model_folder, a_tied_head_is_the_embedding_unless_a_head_is_stored, .init = setup, .fini = teardown)
{
	write_small_config("true");
	write_safetensors("model.safetensors", small_names, small_shapes, 11);
	struct model *m = open_model(folder.path);
	cr_assert(model_config(m)->tied_head);
	cr_assert_eq(model_tensor(m, TENSOR_OUTPUT_HEAD, 0), model_tensor(m, TENSOR_TOKEN_EMBEDDING, 0));
	model_close(&m);
	write_safetensors("model.safetensors", small_names, small_shapes, 12);
	m = open_model(folder.path);
	cr_assert(!model_config(m)->tied_head);
	cr_assert_neq(model_tensor(m, TENSOR_OUTPUT_HEAD, 0), model_tensor(m, TENSOR_TOKEN_EMBEDDING, 0));
	model_close(&m);
}

Test(model_folder, a_dummy_load_needs_config_json_alone, .init = setup, .fini = teardown)
{
	struct model *m;
	write_small_config("false");
	cr_assert_eq(model_open(&m, folder.path, &(struct model_open_options){.load_dummy = true}, &e), STATUS_OK, "%s", e.text);
	const struct tensor *k = model_tensor(m, TENSOR_WK, 0), *head = model_tensor(m, TENSOR_OUTPUT_HEAD, 0);
	cr_assert(k->rows == 4 && k->cols == 8 && !k->data && k->bytes == 4 * 8 * 4 && k->dtype == DTYPE_F32);
	cr_assert(head && head != model_tensor(m, TENSOR_TOKEN_EMBEDDING, 0));
	cr_assert(model_config(m)->dummy);
	model_close(&m);
	expect_refused(folder.path, folder.path, "neither model.safetensors");
}

Test(model_folder, the_chat_template_comes_from_its_file_or_from_the_tokenizer_config, .init = setup, .fini = teardown)
{
	static const struct { const char *config, *expected; } cases[] = {
		{"{\"model_max_length\":1000000000000000019884624838656}", NULL},
		{"{\"chat_template\":null}", NULL},
		{"{\"chat_template\":\"plain\"}", "plain"},
		{"{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"t\"},{\"name\":\"default\",\"template\":\"d\"}]}", "d"},
	};
	struct model *m;
	write_small_config("false");
	write_safetensors("model.safetensors", small_names, small_shapes, 12);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		temp_folder_write_text(&folder, "tokenizer_config.json", cases[i].config);
		m = open_model(folder.path);
		const char *found = model_chat_template(m);
		cr_assert(found == cases[i].expected || !strcmp(found, cases[i].expected), "%s", cases[i].config);
		model_close(&m);
	}
	temp_folder_write_text(&folder, "chat_template.jinja", "from the file");
	m = open_model(folder.path);
	cr_assert_str_eq(model_chat_template(m), "from the file");
	model_close(&m);
	unlink(temp_folder_path(&folder, "chat_template.jinja"));
	temp_folder_write_text(&folder, "tokenizer_config.json", "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"t\"}]}");
	expect_refused(folder.path, "chat_template", "a list with one named \"default\"");
}

Test(model_folder, end_tokens_named_by_text_are_found_among_the_added_ones, .init = setup, .fini = teardown)
{
	struct model *m;
	write_small_config("false");
	write_safetensors("model.safetensors", small_names, small_shapes, 12);
	temp_folder_write_text(&folder, "tokenizer_config.json",
	                       "{\"eos_token\":{\"content\":\"<end>\"},\"bos_token\":\"<begin>\",\"add_bos_token\":true,"
	                       "\"added_tokens_decoder\":{\"7\":{\"content\":\"<begin>\"},\"8\":{\"content\":\"<end>\"}}}");
	m = open_model(folder.path);
	cr_assert(model_generation(m)->n_eos == 1 && model_generation(m)->eos[0] == 8 && model_generation(m)->bos == 7);
	cr_assert(model_generation(m)->add_bos);
	model_close(&m);
	temp_folder_write_text(&folder, "tokenizer.json", "{\"added_tokens\":[{\"id\":9,\"content\":\"<end>\"}],"
	                                                  "\"model\":{\"vocab\":{\"a\":0}}}");
	m = open_model(folder.path);
	cr_assert_eq(model_generation(m)->eos[0], 9, "tokenizer.json is what the tokenizer goes by");
	model_close(&m);
}

Test(model_folder, files_of_the_folder_are_read_for_others, .init = setup, .fini = teardown)
{
	struct model *m = open_model(TINY "qwen3");
	char *data = NULL;
	size_t len = 0;
	cr_assert_eq(model_read_file(m, "generation_config.json", &data, &len, &e), STATUS_OK, "%s", e.text);
	cr_assert(len == strlen(data) && strstr(data, "eos_token_id"));
	free(data);
	cr_assert_eq(model_read_file(m, "absent.json", &data, &len, &e), STATUS_ABSENT);
	model_close(&m);
	m = open_model(TINY "qwen3.gguf");
	cr_assert_eq(model_read_file(m, "config.json", &data, &len, &e), STATUS_ABSENT);
	model_close(&m);
}

Test(model_folder, org_and_name_are_looked_up_in_the_local_cache, .init = setup, .fini = teardown)
{
	static const char hash[] = "0123456789abcdef0123456789abcdef01234567";
	char link[128];
	setenv("HF_HUB_CACHE", folder.path, 1);
	expect_refused("org/some-model", "org/some-model", "not in the Hugging Face cache");
	temp_folder_write_text(&folder, "models--org--some-model/refs/main", hash);
	expect_refused("org/some-model", hash, "missing from the Hugging Face cache");
	snprintf(link, sizeof link, "models--org--some-model/snapshots/%s", hash);
	temp_folder_write_text(&folder, "models--org--some-model/snapshots/other/x", "");
	char *target = realpath(TINY "qwen2", NULL);
	cr_assert_eq(symlink(target, temp_folder_path(&folder, link)), 0);
	free(target);
	struct model *m = open_model("org/some-model");
	cr_assert_str_eq(model_display_name(m), "org/some-model");
	cr_assert_str_eq(model_config(m)->architecture, "qwen2");
	model_close(&m);
	temp_folder_write_text(&folder, "models--org--some-model/refs/main", "../../../etc");
	expect_refused("org/some-model", "refs/main", "expected a commit hash");
	unsetenv("HF_HUB_CACHE");
	setenv("HF_HOME", "/nowhere", 1);
	expect_refused("org/some-model", "org/some-model", "/nowhere/hub");
	expect_refused("../some-model", "../some-model", "no such file or folder");
}
