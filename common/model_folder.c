// From a folder in Hugging Face form (config.json, *.safetensors, tokenizer files) to a checked model. The surprising
// decision: end tokens are the union of what config.json, generation_config.json and tokenizer_config.json name, since
// chat models commonly add the end of a turn in one of them only.
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/json_fields.h"
#include "common/model_parts.h"
#include "common/model_vocabulary.h"
#include "common/quote.h"
#include "common/safetensors.h"

// Limits on files that are parsed into a tree, so that one of nonsense is refused within a second.
enum { CONFIG_LIMIT_BYTES = 1 << 20, TREE_LIMIT_BYTES = 4 << 20, FILE_LIMIT_BYTES = 256 << 20 };

struct folder {
	struct model *model;
	const char *path;
	struct safetensors **parsed; // [model->n_files]
	struct error *error;
};

// The text of a file, and its path as the label for messages.
struct text {
	char *data;
	size_t len;
	char label[PATH_MAX];
};

static enum status read_text(const struct folder *f, const char *name, size_t limit_bytes, struct text *out)
{
	out->data = NULL;
	if ((size_t)snprintf(out->label, sizeof out->label, "%s/%s", f->path, name) >= sizeof out->label)
		return error_set(f->error, STATUS_REFUSED, "%s: the path of its %s is too long", f->path, name);
	return file_read(out->label, limit_bytes, &out->data, &out->len, f->error);
}

static enum status read_config(const struct folder *f, bool dummy)
{
	struct model *m = f->model;
	struct text text;
	enum status status = read_text(f, "config.json", CONFIG_LIMIT_BYTES, &text);
	if (status == STATUS_ABSENT)
		return error_set(f->error, STATUS_REFUSED, "%s: not a model folder: it has no config.json", f->path);
	TRY(status);
	status = config_from_json(text.data, text.len, text.label, &m->config, &m->arch, &m->generation, f->error);
	free(text.data);
	m->config.dummy = dummy;
	if (dummy && m->config.dtype == DTYPE_COUNT)
		m->config.dtype = DTYPE_F32; // what transformers makes where the config names no type
	return status;
}

static enum status read_generation(const struct folder *f)
{
	struct text text;
	enum status status = read_text(f, "generation_config.json", CONFIG_LIMIT_BYTES, &text);
	if (status == STATUS_ABSENT)
		return STATUS_OK;
	TRY(status);
	status = generation_from_json(text.data, text.len, text.label, &f->model->generation, f->error);
	free(text.data);
	return status;
}

// A token that tokenizer_config.json names: a string, or an object with "content".
static const char *token_text(const json_t *root, const char *key)
{
	const json_t *v = json_object_get(root, key);
	return json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
}

// transformers 4 lists added tokens in tokenizer_config.json too, keyed by their id.
static int32_t find_decoder_id(const json_t *root, const char *token)
{
	const char *key;
	json_t *v;
	json_object_foreach(json_object_get(root, "added_tokens_decoder"), key, v) {
		const char *content = json_string_value(json_object_get(v, "content"));
		char *end;
		long id = strtol(key, &end, 10);
		if (content && !strcmp(content, token) && *key && !*end && id >= 0 && id <= INT32_MAX)
			return (int32_t)id;
	}
	return -1;
}

static int32_t find_token(const json_t *root, const struct vocabulary_summary *vocabulary, const char *token)
{
	int32_t id = token ? vocabulary_find_added(vocabulary, token) : -1;
	return id < 0 && token ? find_decoder_id(root, token) : id;
}

// chat_template: a string, or a list of {"name", "template"} of which "default" is meant.
static enum status template_from_config(const json_t *root, const char *label, char **out, struct error *e)
{
	const json_t *v = json_object_get(root, "chat_template"), *item;
	size_t i;
	if (!v || json_is_null(v))
		return STATUS_OK;
	if (json_is_string(v)) {
		*out = xstrdup(json_string_value(v));
		return STATUS_OK;
	}
	json_array_foreach(v, i, item) {
		const char *name = json_string_value(json_object_get(item, "name"));
		const char *text = json_string_value(json_object_get(item, "template"));
		if (name && text && !strcmp(name, "default")) {
			*out = xstrdup(text);
			return STATUS_OK;
		}
	}
	return error_set(e, STATUS_REFUSED, "%s: field \"chat_template\": expected a string or a list with one named "
	                 "\"default\", found %s", label, json_kind(v));
}

static enum status read_tokenizer_config(const struct folder *f, const struct vocabulary_summary *vocabulary)
{
	struct model *m = f->model;
	struct text text;
	json_t *root = NULL;
	enum status status = read_text(f, "tokenizer_config.json", TREE_LIMIT_BYTES, &text);
	if (status == STATUS_ABSENT)
		return STATUS_OK;
	TRY(status);
	TRY_GOTO(json_fields_parse(&root, text.data, text.len, JSON_DECODE_INT_AS_REAL, text.label, f->error), out);
	status = json_fields_bool(&(struct json_fields){root, text.label, "", f->error}, "add_bos_token",
	                          &m->generation.add_bos);
	if (status != STATUS_OK && status != STATUS_ABSENT)
		goto out;
	generation_add_eos(&m->generation, find_token(root, vocabulary, token_text(root, "eos_token")));
	if (m->generation.bos < 0)
		m->generation.bos = find_token(root, vocabulary, token_text(root, "bos_token"));
	status = m->chat_template ? STATUS_OK : template_from_config(root, text.label, &m->chat_template, f->error);
out:
	json_decref(root);
	free(text.data);
	return status;
}

static enum status read_template_file(const struct folder *f)
{
	struct text text;
	enum status status = read_text(f, "chat_template.jinja", TREE_LIMIT_BYTES, &text);
	if (status == STATUS_ABSENT)
		return STATUS_OK;
	TRY(status);
	if (memchr(text.data, 0, text.len)) {
		free(text.data);
		return error_set(f->error, STATUS_REFUSED, "%s: holds a NUL byte", text.label);
	}
	f->model->chat_template = text.data;
	return STATUS_OK;
}

static enum status read_tokenizer_files(const struct folder *f)
{
	struct model *m = f->model;
	struct vocabulary_summary vocabulary = {0};
	struct text text;
	enum status status = read_text(f, "tokenizer.json", FILE_LIMIT_BYTES, &text);
	if (status == STATUS_OK) {
		status = vocabulary_scan(text.data, text.len, text.label, &vocabulary, f->error);
		if (status == STATUS_OK && vocabulary.added_len > TREE_LIMIT_BYTES)
			status = error_set(f->error, STATUS_REFUSED, "%s: field \"added_tokens\" has %zu bytes, at most %d are allowed",
			                   text.label, vocabulary.added_len, TREE_LIMIT_BYTES);
		if (status == STATUS_OK && vocabulary.size > m->config.vocab_rows)
			status = error_set(f->error, STATUS_REFUSED, "%s: the vocabulary has %d tokens, but config.json's vocab_size "
			                   "is only %d", text.label, vocabulary.size, m->config.vocab_rows);
		if (status == STATUS_OK)
			m->config.vocab_size = vocabulary.size;
	} else if (status == STATUS_ABSENT) {
		status = STATUS_OK; // the tokenizer refuses this where one is needed
	}
	if (status == STATUS_OK)
		status = read_template_file(f);
	if (status == STATUS_OK)
		status = read_tokenizer_config(f, &vocabulary);
	free(text.data);
	return status;
}

static enum status open_file(struct folder *f, const char *name)
{
	struct model *m = f->model;
	size_t n = (size_t)m->n_files + 1, bytes = strlen(f->path) + strlen(name) + 2;
	char *path = xmalloc(bytes);
	snprintf(path, bytes, "%s/%s", f->path, name);
	m->maps = xrealloc(m->maps, n * sizeof *m->maps);
	m->files = xrealloc(m->files, n * sizeof *m->files);
	f->parsed = xrealloc(f->parsed, n * sizeof *f->parsed);
	m->maps[n - 1] = (struct file_map){0};
	f->parsed[n - 1] = NULL;
	m->files[n - 1] = path;
	m->n_files++;
	TRY(file_map_open(&m->maps[n - 1], path, f->error));
	return safetensors_parse(&f->parsed[n - 1], m->maps[n - 1].data, m->maps[n - 1].len, path, f->error);
}

static int compare_offered(const void *a, const void *b)
{
	return strcmp(((const struct offered_tensor *)a)->name, ((const struct offered_tensor *)b)->name);
}

static struct offered_tensor *collect(const struct folder *f, size_t *count)
{
	const struct model *m = f->model;
	size_t n = 0;
	*count = 0;
	for (int i = 0; i < m->n_files; i++)
		*count += safetensors_count(f->parsed[i]);
	struct offered_tensor *offered = xcalloc(*count, sizeof *offered);
	for (int i = 0; i < m->n_files; i++)
		for (size_t j = 0; j < safetensors_count(f->parsed[i]); j++, n++) {
			const struct safetensors_tensor *t = safetensors_at(f->parsed[i], j);
			offered[n] = (struct offered_tensor){.name = t->name, .name_len = strlen(t->name), .dtype = t->dtype,
			                                     .n_dims = t->n_dims, .data = m->maps[i].data + t->offset,
			                                     .bytes = t->bytes, .file = m->files[i]};
			memcpy(offered[n].dims, t->dims, sizeof t->dims);
		}
	if (n)
		qsort(offered, n, sizeof *offered, compare_offered);
	return offered;
}

// Every tensor of the index has to lie in the shard that it names, so that a shard of another model is noticed.
static enum status check_index(const struct folder *f, const struct safetensors_index *index, const char *label,
                               const struct offered_tensor *offered, size_t count)
{
	char q[140];
	for (size_t i = 0; i < safetensors_index_count(index); i++) {
		const char *name, *file;
		safetensors_index_at(index, i, &name, &file);
		struct offered_tensor wanted = {.name = name};
		const struct offered_tensor *t = count ? bsearch(&wanted, offered, count, sizeof wanted, compare_offered) : NULL;
		const char *slash = t ? strrchr(t->file, '/') : NULL;
		if (!t || strcmp(slash ? slash + 1 : t->file, file))
			return error_set(f->error, STATUS_REFUSED, "%s: tensor \"%s\" is not in its shard %s%s%s", label,
			                 quote_bytes(q, sizeof q, name, strlen(name)), file, t ? " but in " : "",
			                 t ? t->file : "");
	}
	return STATUS_OK;
}

static enum status open_shards(struct folder *f, const struct text *text, struct safetensors_index **index)
{
	TRY(safetensors_index_parse(index, text->data, text->len, text->label, f->error));
	for (int i = 0; i < safetensors_index_file_count(*index); i++) {
		enum status status = open_file(f, safetensors_index_file(*index, i));
		if (status == STATUS_ABSENT)
			return error_set(f->error, STATUS_REFUSED, "%s: shard %d of %d, which %s names, is missing",
			                 f->model->files[i], i + 1, safetensors_index_file_count(*index), text->label);
		TRY(status);
	}
	return STATUS_OK;
}

static enum status open_weights(struct folder *f)
{
	struct safetensors_index *index = NULL;
	struct offered_tensor *offered = NULL;
	struct text text = {0};
	size_t count = 0;
	// As transformers does: one file if it is there, else the index.
	enum status status = open_file(f, "model.safetensors");
	if (status == STATUS_ABSENT) {
		free(f->model->files[--f->model->n_files]);
		status = read_text(f, "model.safetensors.index.json", TREE_LIMIT_BYTES, &text);
		if (status == STATUS_ABSENT)
			status = error_set(f->error, STATUS_REFUSED, "%s: has neither model.safetensors nor "
			                   "model.safetensors.index.json", f->path);
		if (status == STATUS_OK)
			status = open_shards(f, &text, &index);
	}
	if (status != STATUS_OK)
		goto out;
	offered = collect(f, &count);
	if (index)
		TRY_GOTO(check_index(f, index, text.label, offered, count), out);
	status = model_bind(f->model, MODEL_SAFETENSORS, offered, count, index ? text.label : f->model->files[0], f->error);
out:
	free(offered);
	safetensors_index_destroy(&index);
	free(text.data);
	return status;
}

static enum status check_ids(const struct model *m, const char *path, struct error *e)
{
	for (int i = 0; i < m->generation.n_eos; i++)
		if (m->generation.eos[i] >= m->config.vocab_rows)
			return error_set(e, STATUS_REFUSED, "%s: end token %d is not in the vocabulary of %d tokens", path,
			                 m->generation.eos[i], m->config.vocab_rows);
	if (m->generation.bos >= m->config.vocab_rows)
		return error_set(e, STATUS_REFUSED, "%s: BOS token %d is not in the vocabulary of %d tokens", path,
		                 m->generation.bos, m->config.vocab_rows);
	return STATUS_OK;
}

enum status model_open_folder(struct model *m, const char *path, bool dummy, struct error *e)
{
	struct folder f = {.model = m, .path = path, .error = e};
	TRY(read_config(&f, dummy));
	TRY(read_generation(&f));
	TRY(read_tokenizer_files(&f));
	TRY(check_ids(m, path, e));
	if (dummy)
		return model_bind(m, MODEL_SAFETENSORS, NULL, 0, path, e);
	enum status status = open_weights(&f);
	for (int i = 0; i < m->n_files; i++)
		safetensors_destroy(&f.parsed[i]);
	free(f.parsed);
	return status;
}
