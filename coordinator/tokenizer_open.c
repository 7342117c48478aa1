// The tokenizer of a model: from its GGUF metadata, from the files of its folder, or none.
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"

// Pieces "<id>", for models that bring no vocabulary.
static void create_without_vocabulary(struct tokenizer **out, const struct model *m)
{
	struct tokenizer *t = tokenizer_allocate((uint32_t)model_config(m)->vocab_size);
	t->no_vocabulary = true;
	for (uint32_t id = 0; id < t->vocab_size; id++) {
		char text[16];
		int n = snprintf(text, sizeof text, "<%u>", id);
		t->tokens[id].text = t->tokens[id].bytes = tokenizer_keep(t, text, (size_t)n);
		t->tokens[id].text_len = t->tokens[id].bytes_len = (uint32_t)n;
	}
	*out = t;
}

static void add_end(struct model_generation *g, uint32_t id)
{
	for (int i = 0; i < g->n_eos; i++)
		if (g->eos[i] == (int32_t)id)
			return;
	if (g->n_eos < MODEL_MAX_EOS)
		g->eos[g->n_eos++] = (int32_t)id;
}

// bos_token and its like in tokenizer_config.json: each a string, or an object with the string as its content.
static void read_config(struct tokenizer *t, const json_t *config)
{
	static const char *const keys[TOKENIZER_SPECIAL_COUNT] = {
		[TOKENIZER_BOS] = "bos_token", [TOKENIZER_EOS] = "eos_token", [TOKENIZER_UNK] = "unk_token",
		[TOKENIZER_PAD] = "pad_token",
	};
	for (int i = 0; i < TOKENIZER_SPECIAL_COUNT; i++) {
		const json_t *v = json_object_get(config, keys[i]);
		uint32_t id;
		if (json_is_object(v))
			v = json_object_get(v, "content");
		if (!json_is_string(v))
			continue;
		t->specials[i] = tokenizer_keep(t, json_string_value(v), json_string_length(v));
		if (!tokenizer_find(t, t->specials[i], &id))
			continue;
		if (i == TOKENIZER_BOS)
			t->generation.bos = (int32_t)id;
		if (i == TOKENIZER_EOS)
			add_end(&t->generation, id);
	}
}

static enum status create_from_folder(struct tokenizer **out, const struct model *m, struct error *e)
{
	char *data = NULL;
	size_t len = 0;
	TRY(model_read_file(m, "tokenizer.json", &data, &len, e));
	enum status status = tokenizer_from_json(out, data, len, e);
	free(data);
	if (status != STATUS_OK) {
		error_prefix(e, "%s/tokenizer.json", model_path(m));
		return status;
	}
	data = NULL;
	status = model_read_file(m, "tokenizer_config.json", &data, &len, NULL);
	if (status == STATUS_OK) {
		// model_max_length is often 1e30 written out, which is no integer for jansson.
		json_t *config = json_loadb(data, len, JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, NULL);
		read_config(*out, config);
		json_decref(config);
	}
	free(data);
	return STATUS_OK;
}

// What the model's other files say about generation, with the tokens that the vocabulary added.
static void merge_generation(struct tokenizer *t, const struct model_generation *of_model)
{
	struct model_generation found = t->generation;
	t->generation = *of_model;
	for (int i = 0; i < found.n_eos; i++)
		add_end(&t->generation, (uint32_t)found.eos[i]);
	if (found.bos >= 0)
		t->generation.bos = found.bos;
	if (t->no_vocabulary)
		return;
	t->generation.add_bos = t->prefix_count > 0 && t->generation.bos == (int32_t)t->prefix[0];
}

enum status tokenizer_create(struct tokenizer **out, const struct model *m, struct error *e)
{
	const struct gguf *g = model_gguf(m);
	const struct model_config *config = model_config(m);
	enum status status;
	*out = NULL;
	if (g) {
		struct gguf_string kind;
		status = gguf_get_string(g, "tokenizer.ggml.model", &kind, e);
		bool none = status == STATUS_ABSENT || (status == STATUS_OK && kind.len == 8 && !memcmp(kind.data, "no_vocab", 8));
		if (status == STATUS_ABSENT && !config->dummy)
			return error_set(e, STATUS_REFUSED, "%s: has no vocabulary (no tokenizer.ggml.model)", model_path(m));
		if (status != STATUS_OK && status != STATUS_ABSENT)
			return status;
		if (none) {
			create_without_vocabulary(out, m);
			status = STATUS_OK;
		} else {
			status = tokenizer_from_gguf(out, g, e);
			if (status != STATUS_OK)
				error_prefix(e, "%s", model_path(m));
		}
	} else {
		status = create_from_folder(out, m, e);
		if (status == STATUS_ABSENT) {
			if (!config->dummy)
				return error_set(e, STATUS_REFUSED, "%s: has no vocabulary (no tokenizer.json)", model_path(m));
			create_without_vocabulary(out, m);
			status = STATUS_OK;
		}
	}
	if (status != STATUS_OK)
		return status == STATUS_ABSENT ? STATUS_REFUSED : status;
	merge_generation(*out, model_generation(m));
	if (!(*out)->no_vocabulary && (int64_t)(*out)->vocab_size > config->vocab_rows) {
		status = error_set(e, STATUS_REFUSED, "%s: vocabulary of %u tokens, embedding of %d rows", model_path(m),
		                   (*out)->vocab_size, config->vocab_rows);
		tokenizer_destroy(out);
	}
	return status;
}
