// tokenizer.json of Hugging Face. Everything in it is either honoured or refused by name; only "truncation" and
// "padding" are left aside, which are about batches and which transformers switches off as well.
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "coordinator/tokenizer_internal.h"

static const char *type_of(const json_t *o)
{
	const char *type = json_string_value(json_object_get(o, "type"));
	return type ? type : "(without type)";
}

static bool truth(const json_t *o, const char *key, bool absent)
{
	const json_t *v = json_object_get(o, key);
	return json_is_boolean(v) ? json_is_true(v) : absent;
}

static bool is(const char *a, const char *b)
{
	return strcmp(a, b) == 0;
}

static bool get_id(const json_t *v, uint32_t *id)
{
	if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= TOKENIZER_MAX_VOCABULARY)
		return false;
	*id = (uint32_t)json_integer_value(v);
	return true;
}

// --- normalizer, pre-tokenizer, post-processor, decoder --------------------------------------------------------------

static enum status read_normalizer(struct tokenizer *t, const json_t *o, int depth, struct error *e)
{
	if (!o || json_is_null(o))
		return STATUS_OK;
	const char *type = type_of(o);
	if (is(type, "Sequence") && depth < 8) {
		const json_t *items = json_object_get(o, "normalizers");
		if (!json_is_array(items))
			return error_set(e, STATUS_REFUSED, "normalizer Sequence without its list");
		for (size_t i = 0; i < json_array_size(items); i++)
			TRY(read_normalizer(t, json_array_get(items, i), depth + 1, e));
		return STATUS_OK;
	}
	if (!is(type, "NFC") && !is(type, "NFD"))
		return error_set(e, STATUS_REFUSED, "normalizer %.80s is not supported", type);
	if (t->normalizer_count == TOKENIZER_MAX_NORMALIZERS)
		return error_set(e, STATUS_REFUSED, "more than %d normalizers", TOKENIZER_MAX_NORMALIZERS);
	t->normalizers[t->normalizer_count++] = is(type, "NFC") ? NORMAL_FORM_C : NORMAL_FORM_D;
	return STATUS_OK;
}

static enum status read_split(struct tokenizer *t, const json_t *o, struct error *e)
{
	static const struct { const char *name; enum split_behavior behavior; } behaviors[] = {
		{"Removed", SPLIT_REMOVED}, {"Isolated", SPLIT_ISOLATED}, {"MergedWithPrevious", SPLIT_MERGED_WITH_PREVIOUS},
		{"MergedWithNext", SPLIT_MERGED_WITH_NEXT}, {"Contiguous", SPLIT_CONTIGUOUS},
	};
	const json_t *pattern = json_object_get(o, "pattern");
	const json_t *regex = json_object_get(pattern, "Regex"), *text = json_object_get(pattern, "String");
	const json_t *p = regex ? regex : text;
	const char *behavior = json_string_value(json_object_get(o, "behavior"));
	if (!json_is_string(p))
		return error_set(e, STATUS_REFUSED, "pre_tokenizer Split: its pattern is neither Regex nor String");
	for (size_t i = 0; behavior && i < sizeof behaviors / sizeof *behaviors; i++)
		if (is(behavior, behaviors[i].name))
			return pretokenizer_add_split(t->pretokenizer, json_string_value(p), json_string_length(p), !regex,
			                              behaviors[i].behavior, truth(o, "invert", false), e);
	return error_set(e, STATUS_REFUSED, "pre_tokenizer Split: unknown behavior '%.80s'", behavior ? behavior : "");
}

static enum status read_pretokenizer(struct tokenizer *t, const json_t *o, int depth, bool *byte_level, struct error *e)
{
	const char *type = type_of(o);
	if (*byte_level)
		return error_set(e, STATUS_REFUSED, "pre_tokenizer %.80s after ByteLevel is not supported", type);
	if (is(type, "Sequence") && depth < 8) {
		const json_t *items = json_object_get(o, "pretokenizers");
		if (!json_is_array(items))
			return error_set(e, STATUS_REFUSED, "pre_tokenizer Sequence without its list");
		for (size_t i = 0; i < json_array_size(items); i++)
			TRY(read_pretokenizer(t, json_array_get(items, i), depth + 1, byte_level, e));
		return STATUS_OK;
	}
	if (is(type, "Split"))
		return read_split(t, o, e);
	if (is(type, "Digits")) {
		pretokenizer_add_digits(t->pretokenizer, truth(o, "individual_digits", false));
		return STATUS_OK;
	}
	if (is(type, "ByteLevel")) {
		*byte_level = true;
		if (truth(o, "add_prefix_space", true))
			pretokenizer_add_leading_space(t->pretokenizer);
		if (truth(o, "use_regex", true))
			return pretokenizer_add_split(t->pretokenizer, pretokenizer_gpt2_pattern, strlen(pretokenizer_gpt2_pattern),
			                              false, SPLIT_ISOLATED, false, e);
		return STATUS_OK;
	}
	return error_set(e, STATUS_REFUSED, "pre_tokenizer %.80s is not supported", type);
}

static enum status read_template(struct tokenizer *t, const json_t *o, struct error *e)
{
	const json_t *single = json_object_get(o, "single"), *specials = json_object_get(o, "special_tokens");
	bool seen = false;
	if (!json_is_array(single))
		return error_set(e, STATUS_REFUSED, "post_processor TemplateProcessing without 'single'");
	for (size_t i = 0; i < json_array_size(single); i++) {
		const json_t *item = json_array_get(single, i), *special = json_object_get(item, "SpecialToken");
		if (json_object_get(item, "Sequence")) {
			if (seen)
				return error_set(e, STATUS_REFUSED, "post_processor TemplateProcessing: the text twice is not supported");
			seen = true;
			continue;
		}
		const char *name = json_string_value(json_object_get(special, "id"));
		const json_t *ids = json_object_get(json_object_get(specials, name ? name : ""), "ids");
		if (!json_is_array(ids))
			return error_set(e, STATUS_REFUSED, "post_processor TemplateProcessing: no ids for '%.80s'", name ? name : "");
		for (size_t k = 0; k < json_array_size(ids); k++) {
			uint32_t id;
			if (!get_id(json_array_get(ids, k), &id) || id >= t->vocab_size)
				return error_set(e, STATUS_REFUSED, "post_processor: id of '%.80s' is not in the vocabulary", name);
			int *count = seen ? &t->suffix_count : &t->prefix_count;
			if (*count == TOKENIZER_MAX_SPECIALS)
				return error_set(e, STATUS_REFUSED, "post_processor: more than %d tokens", TOKENIZER_MAX_SPECIALS);
			(seen ? t->suffix : t->prefix)[(*count)++] = id;
		}
	}
	if (!seen)
		return error_set(e, STATUS_REFUSED, "post_processor TemplateProcessing leaves out the text");
	return STATUS_OK;
}

static enum status read_postprocessor(struct tokenizer *t, const json_t *o, int depth, struct error *e)
{
	if (!o || json_is_null(o))
		return STATUS_OK;
	const char *type = type_of(o);
	if (is(type, "ByteLevel")) // moves offsets only
		return STATUS_OK;
	if (is(type, "Sequence") && depth < 8) {
		const json_t *items = json_object_get(o, "processors");
		for (size_t i = 0; i < json_array_size(items); i++)
			TRY(read_postprocessor(t, json_array_get(items, i), depth + 1, e));
		return STATUS_OK;
	}
	if (!is(type, "TemplateProcessing"))
		return error_set(e, STATUS_REFUSED, "post_processor %.80s is not supported", type);
	if (t->prefix_count || t->suffix_count)
		return error_set(e, STATUS_REFUSED, "two TemplateProcessing in one post_processor are not supported");
	return read_template(t, o, e);
}

// --- vocabulary ------------------------------------------------------------------------------------------------------

static enum status count_ids(const json_t *vocab, const json_t *added, uint32_t *count, struct error *e)
{
	const char *key;
	json_t *value;
	uint32_t id, largest = 0;
	json_object_foreach((json_t *)vocab, key, value) {
		if (!get_id(value, &id))
			return error_set(e, STATUS_REFUSED, "model.vocab: token '%.80s' has no proper id", key);
		largest = id > largest ? id : largest;
	}
	for (size_t i = 0; i < json_array_size(added); i++) {
		if (!get_id(json_object_get(json_array_get(added, i), "id"), &id))
			return error_set(e, STATUS_REFUSED, "added_tokens[%zu]: no proper id", i);
		largest = id > largest ? id : largest;
	}
	*count = largest + 1;
	return STATUS_OK;
}

static enum status read_merges(struct tokenizer *t, const json_t *merges, struct error *e)
{
	size_t count = json_array_size(merges);
	if (!json_is_array(merges) || count > 4 * (size_t)TOKENIZER_MAX_VOCABULARY)
		return error_set(e, STATUS_REFUSED, "model.merges is no list, or too long");
	tokenizer_merges_reserve(t, count);
	for (size_t i = 0; i < count; i++) {
		const json_t *m = json_array_get(merges, i);
		const json_t *a = json_array_get(m, 0), *b = json_array_get(m, 1);
		if (json_is_string(m))
			TRY(tokenizer_add_merge_line(t, (uint32_t)i, json_string_value(m), json_string_length(m), e));
		else if (json_array_size(m) == 2 && json_is_string(a) && json_is_string(b))
			TRY(tokenizer_add_merge(t, (uint32_t)i, json_string_value(a), json_string_length(a), json_string_value(b),
			                        json_string_length(b), e));
		else
			return error_set(e, STATUS_REFUSED, "model.merges[%zu] is neither a string nor a pair", i);
	}
	return STATUS_OK;
}

static enum status read_added(struct tokenizer *t, const json_t *added, struct error *e)
{
	for (size_t i = 0; i < json_array_size(added); i++) {
		const json_t *o = json_array_get(added, i), *content = json_object_get(o, "content");
		uint32_t id;
		if (!json_is_string(content) || !get_id(json_object_get(o, "id"), &id))
			return error_set(e, STATUS_REFUSED, "added_tokens[%zu] lacks its content", i);
		const char *text = json_string_value(content);
		size_t len = json_string_length(content);
		uint32_t in_model = tokenizer_find_text(t, text, len);
		if (in_model != NO_TOKEN && in_model != id)
			return error_set(e, STATUS_REFUSED, "added token '%.80s' has id %u, but %u in the model", text, id, in_model);
		if (in_model == NO_TOKEN && t->tokens[id].text)
			return error_set(e, STATUS_REFUSED, "added token '%.80s' has the id of '%.80s'", text, t->tokens[id].text);
		if (in_model == NO_TOKEN)
			tokenizer_set_token(t, id, text, len, false);
		bool special = truth(o, "special", false);
		tokenizer_add_added(t, id, (struct added_token){
			.control = special, .normalized = truth(o, "normalized", !special), .lstrip = truth(o, "lstrip", false),
			.rstrip = truth(o, "rstrip", false), .single_word = truth(o, "single_word", false)});
	}
	return STATUS_OK;
}

static enum status check_model(const json_t *model, struct error *e)
{
	// Files older than the "type" field are told by their merges.
	const char *type = json_string_value(json_object_get(model, "type"));
	if (type ? !is(type, "BPE") : !json_object_get(model, "merges"))
		return error_set(e, STATUS_REFUSED, "tokenizer model %.80s is not supported, only BPE", type ? type : "(none)");
	const json_t *dropout = json_object_get(model, "dropout");
	if (json_is_number(dropout) && json_number_value(dropout) != 0)
		return error_set(e, STATUS_REFUSED, "model.dropout is not supported: it makes encoding random");
	static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
	for (int i = 0; i < 2; i++) {
		const char *affix = json_string_value(json_object_get(model, affixes[i]));
		if (affix && *affix)
			return error_set(e, STATUS_REFUSED, "model.%s '%.80s' is not supported", affixes[i], affix);
	}
	if (!json_is_object(json_object_get(model, "vocab")))
		return error_set(e, STATUS_REFUSED, "model.vocab is not an object");
	return STATUS_OK;
}

static enum status build(struct tokenizer *t, const json_t *root, struct error *e)
{
	const json_t *model = json_object_get(root, "model"), *vocab = json_object_get(model, "vocab");
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)vocab, key, value) {
		uint32_t id = (uint32_t)json_integer_value(value);
		if (t->tokens[id].text)
			return error_set(e, STATUS_REFUSED, "model.vocab: id %u is both '%.80s' and '%.80s'", id, t->tokens[id].text,
			                 key);
		tokenizer_set_token(t, id, key, strlen(key), true);
	}
	tokenizer_index_vocabulary(t, truth(model, "byte_fallback", false));
	t->ignore_merges = truth(model, "ignore_merges", false);
	t->fuse_unknown = truth(model, "fuse_unk", false);
	const json_t *unknown = json_object_get(model, "unk_token");
	if (json_is_string(unknown)) {
		t->unknown_id = tokenizer_find_text(t, json_string_value(unknown), json_string_length(unknown));
		if (t->unknown_id == NO_TOKEN)
			return error_set(e, STATUS_REFUSED, "model.unk_token '%.80s' is not in the vocabulary",
			                 json_string_value(unknown));
	}
	TRY(read_merges(t, json_object_get(model, "merges"), e));
	TRY(read_normalizer(t, json_object_get(root, "normalizer"), 0, e));
	TRY(read_added(t, json_object_get(root, "added_tokens"), e));
	bool byte_level = false;
	const json_t *pre = json_object_get(root, "pre_tokenizer");
	if (json_is_object(pre))
		TRY(read_pretokenizer(t, pre, 0, &byte_level, e));
	if (!byte_level)
		return error_set(e, STATUS_REFUSED, "a pre_tokenizer without ByteLevel is not supported");
	const json_t *decoder = json_object_get(root, "decoder");
	if (!json_is_object(decoder) || !is(type_of(decoder), "ByteLevel"))
		return error_set(e, STATUS_REFUSED, "decoder %.80s is not supported, only ByteLevel",
		                 json_is_object(decoder) ? type_of(decoder) : "(none)");
	TRY(read_postprocessor(t, json_object_get(root, "post_processor"), 0, e));
	tokenizer_finish(t);
	return STATUS_OK;
}

enum status tokenizer_from_json(struct tokenizer **out, const char *data, size_t len, struct error *e)
{
	json_error_t json_error;
	*out = NULL;
	json_t *root = json_loadb(data, len, JSON_ALLOW_NUL, &json_error);
	if (!root)
		return error_set(e, STATUS_REFUSED, "not JSON: %s (line %d)", json_error.text, json_error.line);
	struct tokenizer *t = NULL;
	enum status status;
	uint32_t count = 0;
	const json_t *model = json_object_get(root, "model"), *added = json_object_get(root, "added_tokens");
	if (!json_is_object(model))
		TRY_GOTO(error_set(e, STATUS_REFUSED, "has no model"), out);
	if (added && !json_is_array(added) && !json_is_null(added))
		TRY_GOTO(error_set(e, STATUS_REFUSED, "added_tokens is not a list"), out);
	TRY_GOTO(check_model(model, e), out);
	TRY_GOTO(count_ids(json_object_get(model, "vocab"), added, &count, e), out);
	t = tokenizer_allocate(count);
	TRY_GOTO(build(t, root, e), out);
	*out = t;
	t = NULL;
out:
	tokenizer_destroy(&t);
	json_decref(root);
	return status;
}
