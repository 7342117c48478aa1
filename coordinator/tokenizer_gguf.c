// The vocabulary in GGUF metadata. Only the name of the pre-tokenizer is there, not its pattern: pretokenizer_named.c
// knows what it stands for.
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"

enum { TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4 }; // of tokenizer.ggml.token_type

static enum status read_tokens(struct tokenizer *t, const struct gguf *g, const struct gguf_string *texts,
                               bool ignore_merges, struct error *e)
{
	int32_t *types = NULL;
	uint64_t type_count = 0;
	enum status status = gguf_get_i32_array(g, "tokenizer.ggml.token_type", &types, &type_count, e);
	if (status != STATUS_OK && status != STATUS_ABSENT)
		return status;
	status = STATUS_OK;
	if (types && type_count != t->vocab_size)
		TRY_GOTO(error_set(e, STATUS_REFUSED, "tokenizer.ggml.token_type has %llu items, tokenizer.ggml.tokens has %u",
		                   (unsigned long long)type_count, t->vocab_size), out);
	for (uint32_t id = 0; id < t->vocab_size; id++) {
		if (texts[id].len > 1 << 20)
			TRY_GOTO(error_set(e, STATUS_REFUSED, "token %u is longer than 1 MiB", id), out);
		bool added = types && (types[id] == TYPE_CONTROL || types[id] == TYPE_USER_DEFINED);
		// Where a whole word in the vocabulary is taken without merges, control tokens are not in the model.
		tokenizer_set_token(t, id, texts[id].data, texts[id].len, !(added && ignore_merges));
	}
	tokenizer_index_vocabulary(t, false);
	for (uint32_t id = 0; types && id < t->vocab_size; id++)
		if (types[id] == TYPE_CONTROL || types[id] == TYPE_USER_DEFINED)
			tokenizer_add_added(t, id, (struct added_token){.control = types[id] == TYPE_CONTROL});
out:
	free(types);
	return status;
}

static enum status read_merges(struct tokenizer *t, const struct gguf *g, struct error *e)
{
	struct gguf_string *lines = NULL;
	uint64_t count = 0;
	TRY(gguf_get_string_array(g, "tokenizer.ggml.merges", &lines, &count, e));
	enum status status = STATUS_OK;
	if (count > 4 * (uint64_t)TOKENIZER_MAX_VOCABULARY)
		TRY_GOTO(error_set(e, STATUS_REFUSED, "tokenizer.ggml.merges is too long"), out);
	tokenizer_merges_reserve(t, count);
	for (uint64_t i = 0; i < count; i++)
		TRY_GOTO(tokenizer_add_merge_line(t, (uint32_t)i, lines[i].data, lines[i].len, e), out);
out:
	free(lines);
	return status;
}

// One of the token ids that the file names; *id = NO_TOKEN where it names none.
static enum status read_id(const struct tokenizer *t, const struct gguf *g, const char *key, uint32_t *id,
                           struct error *e)
{
	enum status status = gguf_get_u32(g, key, id, e);
	if (status == STATUS_ABSENT) {
		*id = NO_TOKEN;
		return STATUS_OK;
	}
	if (status == STATUS_OK && *id >= t->vocab_size)
		return error_set(e, STATUS_REFUSED, "%s is %u, the vocabulary has %u tokens", key, *id, t->vocab_size);
	return status;
}

static enum status get_optional_bool(const struct gguf *g, const char *key, bool *value, struct error *e)
{
	enum status status = gguf_get_bool(g, key, value, e);
	return status == STATUS_ABSENT ? STATUS_OK : status;
}

static enum status read_specials(struct tokenizer *t, const struct gguf *g, bool bos_by_default, struct error *e)
{
	static const char *const keys[TOKENIZER_SPECIAL_COUNT] = {
		[TOKENIZER_BOS] = "tokenizer.ggml.bos_token_id", [TOKENIZER_EOS] = "tokenizer.ggml.eos_token_id",
		[TOKENIZER_UNK] = "tokenizer.ggml.unknown_token_id", [TOKENIZER_PAD] = "tokenizer.ggml.padding_token_id",
	};
	uint32_t ids[TOKENIZER_SPECIAL_COUNT];
	for (int i = 0; i < TOKENIZER_SPECIAL_COUNT; i++) {
		TRY(read_id(t, g, keys[i], &ids[i], e));
		if (ids[i] != NO_TOKEN)
			t->specials[i] = t->tokens[ids[i]].text;
	}
	uint32_t bos = ids[TOKENIZER_BOS], eos = ids[TOKENIZER_EOS];
	bool add_bos = bos_by_default, add_eos = false;
	TRY(get_optional_bool(g, "tokenizer.ggml.add_bos_token", &add_bos, e));
	TRY(get_optional_bool(g, "tokenizer.ggml.add_eos_token", &add_eos, e));
	if (add_bos && bos != NO_TOKEN)
		t->prefix[t->prefix_count++] = bos;
	if (add_eos && eos != NO_TOKEN)
		t->suffix[t->suffix_count++] = eos;
	static const char *const ends[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
	                                   "tokenizer.ggml.eom_token_id"};
	t->generation.bos = bos == NO_TOKEN ? -1 : (int32_t)bos;
	t->generation.add_bos = t->prefix_count > 0;
	for (int i = 0; i < 3; i++) {
		uint32_t id;
		bool known = false;
		TRY(read_id(t, g, ends[i], &id, e));
		for (int k = 0; k < t->generation.n_eos; k++)
			known |= t->generation.eos[k] == (int32_t)id;
		if (id != NO_TOKEN && !known)
			t->generation.eos[t->generation.n_eos++] = (int32_t)id;
	}
	return STATUS_OK;
}

static enum status build(struct tokenizer *t, const struct gguf *g, const struct gguf_string *texts, struct error *e)
{
	struct gguf_string pre;
	enum status status = gguf_get_string(g, "tokenizer.ggml.pre", &pre, e);
	if (status == STATUS_ABSENT)
		pre = (struct gguf_string){"default", strlen("default")};
	else
		TRY(status);
	bool nfc = false, ignore_merges = false;
	TRY(pretokenizer_add_named(t->pretokenizer, pre.data, pre.len, &nfc, &ignore_merges, e));
	t->ignore_merges = ignore_merges;
	if (nfc)
		t->normalizers[t->normalizer_count++] = NORMAL_FORM_C;
	TRY(read_tokens(t, g, texts, ignore_merges, e));
	TRY(read_merges(t, g, e));
	TRY(read_specials(t, g, ignore_merges, e));
	tokenizer_finish(t);
	return STATUS_OK;
}

enum status tokenizer_from_gguf(struct tokenizer **out, const struct gguf *g, struct error *e)
{
	struct gguf_string model, *texts = NULL;
	uint64_t count = 0;
	*out = NULL;
	TRY(gguf_get_string(g, "tokenizer.ggml.model", &model, e));
	if (model.len != 4 || memcmp(model.data, "gpt2", 4))
		return error_set(e, STATUS_REFUSED, "tokenizer.ggml.model '%.*s' is not supported, only gpt2 (byte-level BPE)",
		                 (int)(model.len < 80 ? model.len : 80), model.data);
	TRY(gguf_get_string_array(g, "tokenizer.ggml.tokens", &texts, &count, e));
	enum status status;
	struct tokenizer *t = NULL;
	if (count == 0 || count > TOKENIZER_MAX_VOCABULARY)
		TRY_GOTO(error_set(e, STATUS_REFUSED, "tokenizer.ggml.tokens has %llu items", (unsigned long long)count), out);
	t = tokenizer_allocate((uint32_t)count);
	TRY_GOTO(build(t, g, texts, e), out);
	*out = t;
	t = NULL;
out:
	tokenizer_destroy(&t);
	free(texts);
	return status;
}
