// From a GGUF file, or its shards, to a checked model. The surprising decision: end tokens are also found by their text
// ("<|im_end|>", ...), as llama.cpp does, because many files name only one of the several that their chat format uses.
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model_parts.h"
#include "common/quote.h"

enum { MAX_SHARDS = 1024 };

// Keys of the architecture that would change the maths: refused unless they hold the value that changes nothing.
// A key whose last part is here counts whatever its type.
static const struct { const char *key; bool is_float; double neutral; } unsupported_keys[] = {
	{"expert_count", false, 0},
	{"expert_used_count", false, 0},
	{"expert_shared_count", false, 0},
	{"attention.max_alibi_bias", true, 0},
	{"attention.clamp_kqv", true, 0},
	{"attention.scale", true, 0},
	{"attention.output_scale", true, 1},
	{"attention.temperature_scale", true, 0},
	{"attn_logit_softcapping", true, 0},
	{"final_logit_softcapping", true, 0},
	{"logit_scale", true, 1},
	{"embedding_scale", true, 1},
	{"residual_scale", true, 1},
	{"rope.scaling.attn_factor", true, 1},
	{"rope.scaling.yarn_log_multiplier", true, 0},
	{"pooling_type", false, 0},
	{"nextn_predict_layers", false, 0},
};

static const char *const eos_keys[] = {
	"tokenizer.ggml.eos_token_id",
	"tokenizer.ggml.eot_token_id",
	"tokenizer.ggml.eom_token_id",
};

// Texts that end a turn in some chat format; a token with such a text is an end token.
static const char *const eos_texts[] = {
	"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
	"<|end_of_text|>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>",
};

// Pre-tokenizers whose files want a BOS where they do not say.
static const char *const bos_pre_tokenizers[] = {
	"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken", "chameleon",
};

struct keys {
	const struct gguf *gguf;
	char prefix[40];
	char key[128]; // the last one made
	struct error *error;
};

static const char *key(struct keys *k, const char *name)
{
	snprintf(k->key, sizeof k->key, "%s.%s", k->prefix, name);
	return k->key;
}

static enum status get_int(struct keys *k, const char *name, int32_t *out)
{
	uint32_t value = 0;
	TRY(gguf_get_u32(k->gguf, key(k, name), &value, k->error));
	if (value > INT32_MAX)
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\": expected at most 2147483647, found %u",
		                 gguf_label(k->gguf), k->key, value);
	*out = (int32_t)value;
	return STATUS_OK;
}

static enum status required(struct keys *k, enum status status)
{
	return status == STATUS_ABSENT ? STATUS_REFUSED : status; // the text names the key already
}

// Leaves *out alone where the key is absent.
static enum status optional(enum status status)
{
	return status == STATUS_ABSENT ? STATUS_OK : status;
}

static enum status refuse_unsupported(struct keys *k, const struct model_config *c)
{
	for (size_t i = 0; i < sizeof unsupported_keys / sizeof *unsupported_keys; i++) {
		const char *name = key(k, unsupported_keys[i].key);
		double value = unsupported_keys[i].neutral;
		float f = 0;
		uint32_t u = 0;
		enum status status = unsupported_keys[i].is_float ? gguf_get_f32(k->gguf, name, &f, k->error)
		                                                  : gguf_get_u32(k->gguf, name, &u, k->error);
		if (status == STATUS_ABSENT)
			continue;
		TRY(status);
		value = unsupported_keys[i].is_float ? (double)f : (double)u;
		if (value != unsupported_keys[i].neutral)
			return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\" is %g, and this feature is not supported",
			                 gguf_label(k->gguf), name, value);
	}
	bool causal = true, parallel = false;
	TRY(optional(gguf_get_bool(k->gguf, key(k, "attention.causal"), &causal, k->error)));
	if (!causal)
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\" is false: attention that is not causal is "
		                 "not supported", gguf_label(k->gguf), k->key);
	TRY(optional(gguf_get_bool(k->gguf, key(k, "use_parallel_residual"), &parallel, k->error)));
	if (parallel)
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\" is true, and this feature is not supported",
		                 gguf_label(k->gguf), k->key);
	int32_t window = 0;
	TRY(optional(get_int(k, "attention.sliding_window", &window)));
	if (window > 0 && window < c->max_context)
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\" is %d, below the context of %d: sliding "
		                 "window attention is not supported", gguf_label(k->gguf), k->key, window, c->max_context);
	return STATUS_OK;
}

static enum status read_rope(struct keys *k, struct model_config *c)
{
	struct gguf_string type = {"", 0};
	char q[48];
	c->rope_theta = 10000;
	c->rope_dim = c->head_dim;
	TRY(optional(get_int(k, "rope.dimension_count", &c->rope_dim)));
	TRY(optional(gguf_get_f32(k->gguf, key(k, "rope.freq_base"), &c->rope_theta, k->error)));
	float factor = 0;
	enum status status = gguf_get_f32(k->gguf, key(k, "rope.scaling.factor"), &factor, k->error);
	if (status == STATUS_ABSENT) // its older name
		status = gguf_get_f32(k->gguf, key(k, "rope.scale_linear"), &factor, k->error);
	TRY(optional(status));
	status = gguf_get_string(k->gguf, key(k, "rope.scaling.type"), &type, k->error);
	TRY(optional(status));
	// A factor without a type is linear. 0 and 1 both say that nothing is scaled.
	if (type.len == 4 && !memcmp(type.data, "none", 4))
		return STATUS_OK;
	if (status == STATUS_OK && !(type.len == 6 && !memcmp(type.data, "linear", 6)))
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"%s\": rope scaling \"%s\" is not supported, only "
		                 "\"none\" and \"linear\"", gguf_label(k->gguf), k->key,
		                 quote_bytes(q, sizeof q, type.data, type.len));
	if (factor != 0 && factor != 1) {
		c->rope_scaling = ROPE_SCALING_LINEAR;
		c->rope_factor = factor;
	}
	return STATUS_OK;
}

static const struct gguf_tensor *find_tensor(const struct gguf *g, const char *name)
{
	size_t len = strlen(name);
	for (uint64_t i = 0; i < gguf_tensor_count(g); i++) {
		const struct gguf_tensor *t = gguf_tensor_at(g, i);
		if (t->name.len == len && !memcmp(t->name.data, name, len))
			return t;
	}
	return NULL;
}

static enum status read_vocabulary_sizes(struct keys *k, struct model_config *c)
{
	const struct gguf *g = k->gguf;
	const struct gguf_tensor *embedding = find_tensor(g, "token_embd.weight");
	const struct gguf_kv *tokens = gguf_find(g, "tokenizer.ggml.tokens");
	int32_t stated = 0;
	TRY(optional(get_int(k, "vocab_size", &stated)));
	// The embedding may lie in another shard; then its rows are what the metadata say.
	int64_t rows = embedding ? embedding->dims[1] : stated ? stated : tokens ? (int64_t)tokens->count : 0;
	if (rows < 1 || rows > 1 << 24)
		return error_set(k->error, STATUS_REFUSED, "%s: tensor \"token_embd.weight\": expected 1 to 16777216 rows, found "
		                 "%lld", gguf_label(g), (long long)rows);
	c->vocab_rows = (int32_t)rows;
	if (tokens && (tokens->type != GGUF_ARRAY || tokens->item_type != GGUF_STRING))
		return error_set(k->error, STATUS_REFUSED, "%s: metadata key \"tokenizer.ggml.tokens\": expected an array of "
		                 "string, found %s", gguf_label(g), gguf_type_name(tokens->type));
	// config_check() compares the two.
	c->vocab_size = tokens ? (int32_t)tokens->count : stated ? stated : c->vocab_rows;
	return STATUS_OK;
}

enum status config_from_gguf(const struct gguf *g, struct model_config *c, const struct model_arch **arch,
                             struct error *e)
{
	struct gguf_string name = {"", 0};
	char q[48], list[160];
	struct keys k = {.gguf = g, .error = e};
	*c = (struct model_config){.dtype = DTYPE_COUNT, .tied_head = true};
	TRY(required(&k, gguf_get_string(g, "general.architecture", &name, e)));
	*arch = model_arch_from_gguf(name.data, name.len);
	if (!*arch)
		return error_set(e, STATUS_REFUSED, "%s: architecture \"%s\" is not supported; supported are %s", gguf_label(g),
		                 quote_bytes(q, sizeof q, name.data, name.len),
		                 model_arch_list(MODEL_GGUF, list, sizeof list));
	snprintf(c->architecture, sizeof c->architecture, "%s", (*arch)->name);
	snprintf(k.prefix, sizeof k.prefix, "%s", (*arch)->gguf_name);
	c->rope_kind = (*arch)->rope[MODEL_GGUF];
	c->has_qkv_bias = (*arch)->features & ARCH_QKV_BIAS;
	c->has_qk_norm = (*arch)->features & ARCH_QK_NORM;
	TRY(required(&k, get_int(&k, "block_count", &c->n_layers)));
	TRY(required(&k, get_int(&k, "embedding_length", &c->hidden)));
	TRY(required(&k, get_int(&k, "feed_forward_length", &c->ffn)));
	TRY(required(&k, get_int(&k, "attention.head_count", &c->n_heads)));
	TRY(required(&k, get_int(&k, "context_length", &c->max_context)));
	TRY(required(&k, gguf_get_f32(g, key(&k, "attention.layer_norm_rms_epsilon"), &c->norm_eps, e)));
	c->n_kv_heads = c->n_heads;
	TRY(optional(get_int(&k, "attention.head_count_kv", &c->n_kv_heads)));
	enum status status = get_int(&k, "attention.key_length", &c->head_dim);
	TRY(optional(status));
	if (status == STATUS_ABSENT) {
		if (c->n_heads < 1 || c->hidden % c->n_heads)
			return error_set(e, STATUS_REFUSED, "%s: without a key \"%s\", the hidden size %d has to be a multiple of "
			                 "the %d heads", gguf_label(g), k.key, c->hidden, c->n_heads);
		c->head_dim = c->hidden / c->n_heads;
	}
	int32_t value_dim = c->head_dim;
	TRY(optional(get_int(&k, "attention.value_length", &value_dim)));
	if (value_dim != c->head_dim)
		return error_set(e, STATUS_REFUSED, "%s: metadata key \"%s\" is %d: values that differ in size from keys (%d) "
		                 "are not supported", gguf_label(g), k.key, value_dim, c->head_dim);
	TRY(read_rope(&k, c));
	TRY(read_vocabulary_sizes(&k, c));
	TRY(config_check(c, gguf_label(g), e));
	return refuse_unsupported(&k, c);
}

static bool string_is(struct gguf_string s, const char *text)
{
	return s.len == strlen(text) && !memcmp(s.data, text, s.len);
}

static enum status add_eos_by_text(const struct gguf *g, struct model_generation *out, struct error *e)
{
	struct gguf_string *tokens = NULL;
	uint64_t count = 0;
	TRY(optional(gguf_get_string_array(g, "tokenizer.ggml.tokens", &tokens, &count, e)));
	for (uint64_t i = 0; i < count; i++) {
		char first = tokens[i].len > 2 && tokens[i].len < 24 ? tokens[i].data[0] : 0;
		if (first != '<' && first != '[' && first != '_')
			continue;
		for (size_t j = 0; j < sizeof eos_texts / sizeof *eos_texts; j++)
			if (string_is(tokens[i], eos_texts[j]))
				generation_add_eos(out, (int64_t)i);
	}
	free(tokens);
	return STATUS_OK;
}

static enum status default_add_bos(const struct gguf *g, bool *out, struct error *e)
{
	struct gguf_string model = {"", 0}, pre = {"", 0};
	TRY(optional(gguf_get_string(g, "tokenizer.ggml.model", &model, e)));
	TRY(optional(gguf_get_string(g, "tokenizer.ggml.pre", &pre, e)));
	*out = string_is(model, "llama");
	for (size_t i = 0; i < sizeof bos_pre_tokenizers / sizeof *bos_pre_tokenizers; i++)
		*out = *out || string_is(pre, bos_pre_tokenizers[i]);
	return STATUS_OK;
}

enum status generation_from_gguf(const struct gguf *g, struct model_generation *out, struct error *e)
{
	static const struct { const char *key; size_t offset; float low, high; } floats[] = {
		{"general.sampling.temp", offsetof(struct model_generation, temperature), 0, 100},
		{"general.sampling.top_p", offsetof(struct model_generation, top_p), 0, 1},
		{"general.sampling.min_p", offsetof(struct model_generation, min_p), 0, 1},
		{"general.sampling.penalty_repeat", offsetof(struct model_generation, repetition_penalty), 0, 100},
	};
	for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
		float value = NAN;
		TRY(optional(gguf_get_f32(g, floats[i].key, &value, e)));
		if (!isnan(value) && !(value >= floats[i].low && value <= floats[i].high))
			return error_set(e, STATUS_REFUSED, "%s: metadata key \"%s\": expected %g to %g, found %g", gguf_label(g),
			                 floats[i].key, (double)floats[i].low, (double)floats[i].high, (double)value);
		memcpy((char *)out + floats[i].offset, &value, sizeof value);
	}
	TRY(optional(gguf_get_i32(g, "general.sampling.top_k", &out->top_k, e)));
	for (size_t i = 0; i < sizeof eos_keys / sizeof *eos_keys; i++) {
		uint32_t id = 0;
		enum status status = gguf_get_u32(g, eos_keys[i], &id, e);
		TRY(optional(status));
		// -1 as unsigned says "none", which old converters wrote.
		if (status == STATUS_OK && id != UINT32_MAX)
			generation_add_eos(out, id);
	}
	TRY(add_eos_by_text(g, out, e));
	uint32_t bos = UINT32_MAX;
	TRY(optional(gguf_get_u32(g, "tokenizer.ggml.bos_token_id", &bos, e)));
	out->bos = bos <= INT32_MAX ? (int32_t)bos : -1;
	enum status status = gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &out->add_bos, e);
	if (status == STATUS_ABSENT)
		status = default_add_bos(g, &out->add_bos, e);
	return status;
}

// NAME-00001-of-00003.gguf: where the five digits of the shard stand, or NULL.
static const char *shard_digits(const char *path, int *index, int *count)
{
	size_t n = strlen(path);
	const char *tail = path + n - 20; // "-00001-of-00003.gguf"
	int used = 0;
	if (n < 21 || sscanf(tail, "-%5d-of-%5d.gguf%n", index, count, &used) != 2 || used != 20)
		return NULL;
	return tail + 1;
}

static enum status add_file(struct model *m, const char *path, struct error *e)
{
	size_t n = (size_t)m->n_files + 1;
	m->maps = xrealloc(m->maps, n * sizeof *m->maps);
	m->files = xrealloc(m->files, n * sizeof *m->files);
	m->ggufs = xrealloc(m->ggufs, n * sizeof *m->ggufs);
	m->maps[n - 1] = (struct file_map){0};
	m->ggufs[n - 1] = NULL;
	m->files[n - 1] = xstrdup(path);
	m->n_files++;
	TRY(file_map_open(&m->maps[n - 1], path, e));
	return gguf_parse(&m->ggufs[n - 1], m->maps[n - 1].data, m->maps[n - 1].len, path, e);
}

static enum status check_shard(const struct gguf *g, const struct gguf *first, int index, int count, struct error *e)
{
	uint16_t no = 0, of = 0;
	TRY(gguf_get_u16(g, "split.no", &no, e));
	TRY(gguf_get_u16(g, "split.count", &of, e));
	if (no != index || of != count)
		return error_set(e, STATUS_REFUSED, "%s: expected shard %d of %d, found shard %d of %d", gguf_label(g), index + 1,
		                 count, no + 1, of);
	struct gguf_string mine = {"", 0}, theirs = {"", 0};
	char q[48], q2[48];
	enum status status = gguf_get_string(g, "general.architecture", &mine, e);
	TRY(optional(status));
	if (status == STATUS_OK && gguf_get_string(first, "general.architecture", &theirs, NULL) == STATUS_OK &&
	    (mine.len != theirs.len || memcmp(mine.data, theirs.data, mine.len)))
		return error_set(e, STATUS_REFUSED, "%s: a shard of another model: architecture \"%s\" instead of \"%s\"",
		                 gguf_label(g), quote_bytes(q, sizeof q, mine.data, mine.len),
		                 quote_bytes(q2, sizeof q2, theirs.data, theirs.len));
	return STATUS_OK;
}

static enum status open_shards(struct model *m, const char *path, struct error *e)
{
	const struct gguf *first = m->ggufs[0];
	uint16_t count = 1, no = 0;
	int32_t tensors_stated = -1;
	int index = 0, of = 0;
	char other[PATH_MAX];
	TRY(optional(gguf_get_u16(first, "split.count", &count, e)));
	TRY(optional(gguf_get_u16(first, "split.no", &no, e)));
	TRY(optional(gguf_get_i32(first, "split.tensors.count", &tensors_stated, e)));
	if (count <= 1)
		return STATUS_OK;
	const char *digits = shard_digits(path, &index, &of);
	if (!digits)
		return error_set(e, STATUS_REFUSED, "%s: split.count says shard %d of %d, but the file's name does not end in "
		                 "-%05d-of-%05d.gguf, so the others cannot be found", path, no + 1, count, no + 1, count);
	if (count > MAX_SHARDS || of != count || index != no + 1)
		return error_set(e, STATUS_REFUSED, "%s: its name says shard %d of %d, its metadata shard %d of %d (at most %d)",
		                 path, index, of, no + 1, count, MAX_SHARDS);
	if (no != 0)
		return error_set(e, STATUS_REFUSED, "%s: this is shard %d of %d; give the first, %.*s00001%s", path, no + 1,
		                 count, (int)(digits - path), path, digits + 5);
	for (int i = 1; i < count; i++) {
		if ((size_t)snprintf(other, sizeof other, "%.*s%05d%s", (int)(digits - path), path, i + 1, digits + 5) >=
		    sizeof other)
			return error_set(e, STATUS_REFUSED, "%s: the path of its shards is too long", path);
		enum status status = add_file(m, other, e);
		if (status == STATUS_ABSENT)
			return error_set(e, STATUS_REFUSED, "%s: shard %d of %d is missing", other, i + 1, count);
		TRY(status);
		status = check_shard(m->ggufs[i], m->ggufs[0], i, count, e);
		TRY(status == STATUS_ABSENT ? STATUS_REFUSED : status);
	}
	uint64_t tensors = 0;
	for (int i = 0; i < count; i++)
		tensors += gguf_tensor_count(m->ggufs[i]);
	if (tensors_stated >= 0 && tensors != (uint64_t)tensors_stated)
		return error_set(e, STATUS_REFUSED, "%s: split.tensors.count: expected %d tensors in %d shards, found %llu", path,
		                 tensors_stated, count, (unsigned long long)tensors);
	return STATUS_OK;
}

static enum status bind_shards(struct model *m, const char *path, struct error *e)
{
	uint64_t count = 0, n = 0;
	for (int i = 0; i < m->n_files; i++)
		count += gguf_tensor_count(m->ggufs[i]);
	struct offered_tensor *offered = xcalloc(count, sizeof *offered);
	for (int i = 0; i < m->n_files; i++)
		for (uint64_t j = 0; j < gguf_tensor_count(m->ggufs[i]); j++, n++) {
			const struct gguf_tensor *t = gguf_tensor_at(m->ggufs[i], j);
			offered[n] = (struct offered_tensor){.name = t->name.data, .name_len = t->name.len, .dtype = t->dtype,
			                                     .n_dims = t->n_dims, .data = m->maps[i].data + t->offset,
			                                     .bytes = t->bytes, .file = m->files[i]};
			for (int d = 0; d < t->n_dims; d++) // ggml's first dimension is the contiguous one
				offered[n].dims[d] = t->dims[t->n_dims - 1 - d];
		}
	enum status status = model_bind(m, MODEL_GGUF, offered, count, path, e);
	free(offered);
	return status;
}

static enum status read_chat_template(struct model *m, struct error *e)
{
	struct gguf_string text = {"", 0};
	enum status status = gguf_get_string(m->ggufs[0], "tokenizer.chat_template", &text, e);
	if (status != STATUS_OK)
		return optional(status);
	if (memchr(text.data, 0, text.len))
		return error_set(e, STATUS_REFUSED, "%s: metadata key \"tokenizer.chat_template\" holds a NUL byte", m->files[0]);
	m->chat_template = xmalloc(text.len + 1);
	memcpy(m->chat_template, text.data, text.len);
	m->chat_template[text.len] = 0;
	return STATUS_OK;
}

// Data pointers go away, so that nobody computes with weights where random ones are asked for.
static void forget_data(struct model *m)
{
	m->config.dummy = true;
	for (int role = 0; role < TENSOR_FIRST_LAYER_ROLE; role++)
		m->globals[role].data = NULL;
	for (int i = 0; i < m->config.n_layers * (TENSOR_ROLE_COUNT - TENSOR_FIRST_LAYER_ROLE); i++)
		m->layers[i].data = NULL;
}

// Shards may be made so that the first holds metadata only.
static enum status find_rows_in_shards(struct model *m, struct error *e)
{
	for (int i = 1; i < m->n_files; i++) {
		const struct gguf_tensor *embedding = find_tensor(m->ggufs[i], "token_embd.weight");
		if (!embedding)
			continue;
		if (embedding->dims[1] > INT32_MAX)
			return error_set(e, STATUS_REFUSED, "%s: tensor \"token_embd.weight\" has %lld rows", m->files[i],
			                 (long long)embedding->dims[1]);
		m->config.vocab_rows = (int32_t)embedding->dims[1];
	}
	return config_check(&m->config, m->files[0], e);
}

enum status model_open_gguf(struct model *m, const char *path, bool dummy, struct error *e)
{
	TRY(add_file(m, path, e));
	TRY(open_shards(m, path, e));
	TRY(config_from_gguf(m->ggufs[0], &m->config, &m->arch, e));
	TRY(find_rows_in_shards(m, e));
	TRY(generation_from_gguf(m->ggufs[0], &m->generation, e));
	for (int i = 0; i < m->generation.n_eos; i++)
		if (m->generation.eos[i] >= m->config.vocab_size)
			return error_set(e, STATUS_REFUSED, "%s: end token %d is not in the vocabulary of %d tokens", path,
			                 m->generation.eos[i], m->config.vocab_size);
	if (m->generation.bos >= m->config.vocab_size)
		return error_set(e, STATUS_REFUSED, "%s: BOS token %d is not in the vocabulary of %d tokens", path,
		                 m->generation.bos, m->config.vocab_size);
	TRY(bind_shards(m, path, e));
	TRY(read_chat_template(m, e));
	if (dummy)
		forget_data(m);
	return STATUS_OK;
}
