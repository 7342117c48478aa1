// Opening a model, whatever its form, and the questions that planner, loader and forward pass ask of it. See model.h.
// The surprising decision: org/name is looked up in the local cache only; nothing here ever uses the network.
#include "common/model.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/model_parts.h"
#include "common/quote.h"

enum { FILE_LIMIT_BYTES = 256 << 20 };

static const char *const role_names[TENSOR_ROLE_COUNT] = {
	[TENSOR_TOKEN_EMBEDDING] = "token_embedding", [TENSOR_OUTPUT_NORM] = "output_norm",
	[TENSOR_OUTPUT_HEAD] = "output_head",         [TENSOR_ROPE_FACTORS] = "rope_factors",
	[TENSOR_ATTN_NORM] = "attn_norm",             [TENSOR_WQ] = "wq",
	[TENSOR_WK] = "wk",                           [TENSOR_WV] = "wv",
	[TENSOR_BQ] = "bq",                           [TENSOR_BK] = "bk",
	[TENSOR_BV] = "bv",                           [TENSOR_Q_NORM] = "q_norm",
	[TENSOR_K_NORM] = "k_norm",                   [TENSOR_WO] = "wo",
	[TENSOR_BO] = "bo",                           [TENSOR_FFN_NORM] = "ffn_norm",
	[TENSOR_W_GATE] = "w_gate",                   [TENSOR_W_UP] = "w_up",
	[TENSOR_W_DOWN] = "w_down",
};

void generation_init(struct model_generation *g)
{
	*g = (struct model_generation){.temperature = NAN, .top_p = NAN, .min_p = NAN, .repetition_penalty = NAN,
	                               .top_k = -1, .bos = -1};
}

void generation_add_eos(struct model_generation *g, int64_t id)
{
	if (id < 0 || id > INT32_MAX)
		return;
	for (int i = 0; i < g->n_eos; i++)
		if (g->eos[i] == id)
			return;
	if (g->n_eos < MODEL_MAX_EOS)
		g->eos[g->n_eos++] = (int32_t)id;
}

static enum status check_range(const char *label, const char *what, int64_t value, int64_t low, int64_t high,
                               struct error *e)
{
	if (value >= low && value <= high)
		return STATUS_OK;
	return error_set(e, STATUS_REFUSED, "%s: %s: expected %lld to %lld, found %lld", label, what, (long long)low,
	                 (long long)high, (long long)value);
}

enum status config_check(const struct model_config *c, const char *label, struct error *e)
{
	TRY(check_range(label, "number of layers", c->n_layers, 1, MODEL_MAX_LAYERS, e));
	TRY(check_range(label, "hidden size", c->hidden, 1, 1 << 20, e));
	TRY(check_range(label, "feed-forward size", c->ffn, 1, 1 << 22, e));
	TRY(check_range(label, "number of heads", c->n_heads, 1, 4096, e));
	TRY(check_range(label, "number of KV heads", c->n_kv_heads, 1, c->n_heads, e));
	TRY(check_range(label, "head size", c->head_dim, 2, 1024, e));
	TRY(check_range(label, "vocabulary rows", c->vocab_rows, 1, 1 << 24, e));
	TRY(check_range(label, "context length", c->max_context, 1, 1 << 30, e));
	if (c->n_heads % c->n_kv_heads)
		return error_set(e, STATUS_REFUSED, "%s: %d heads are not a multiple of %d KV heads", label, c->n_heads,
		                 c->n_kv_heads);
	if (c->head_dim % 2)
		return error_set(e, STATUS_REFUSED, "%s: head size: expected an even number, found %d", label, c->head_dim);
	if (c->rope_dim != c->head_dim)
		return error_set(e, STATUS_REFUSED, "%s: partial rotary embedding (%d of %d elements of a head) is not supported",
		                 label, c->rope_dim, c->head_dim);
	if (c->vocab_size > c->vocab_rows)
		return error_set(e, STATUS_REFUSED, "%s: the vocabulary has %d tokens, but the embedding only %d rows", label,
		                 c->vocab_size, c->vocab_rows);
	TRY(check_range(label, "vocabulary", c->vocab_size, 1, c->vocab_rows, e));
	if (!(c->norm_eps > 0 && c->norm_eps < 1))
		return error_set(e, STATUS_REFUSED, "%s: norm epsilon: expected more than 0 and less than 1, found %g", label,
		                 (double)c->norm_eps);
	if (!(c->rope_theta > 0 && isfinite(c->rope_theta)))
		return error_set(e, STATUS_REFUSED, "%s: rope theta: expected a positive number, found %g", label,
		                 (double)c->rope_theta);
	if (c->rope_scaling != ROPE_SCALING_NONE && !(c->rope_factor > 0 && isfinite(c->rope_factor)))
		return error_set(e, STATUS_REFUSED, "%s: rope scaling factor: expected a positive number, found %g", label,
		                 (double)c->rope_factor);
	if (c->rope_scaling == ROPE_SCALING_LLAMA3) {
		if (!(c->rope_low_freq_factor > 0 && c->rope_high_freq_factor > c->rope_low_freq_factor &&
		      isfinite(c->rope_high_freq_factor)))
			return error_set(e, STATUS_REFUSED, "%s: rope scaling llama3: expected 0 < low_freq_factor < "
			                 "high_freq_factor, found %g and %g", label, (double)c->rope_low_freq_factor,
			                 (double)c->rope_high_freq_factor);
		TRY(check_range(label, "rope scaling llama3: original_max_position_embeddings", c->rope_original_context, 1,
		                1 << 30, e));
	}
	return STATUS_OK;
}

static bool exists(const char *path)
{
	struct stat st;
	return !stat(path, &st);
}

static bool is_folder(const char *path)
{
	struct stat st;
	return !stat(path, &st) && S_ISDIR(st.st_mode);
}

// Where the Hugging Face tools keep downloaded models; false if no such place is known.
static bool hub_cache(char *buf, size_t cap)
{
	static const struct { const char *variable, *tail; } places[] = {
		{"HF_HUB_CACHE", ""},
		{"HUGGINGFACE_HUB_CACHE", ""},
		{"HF_HOME", "/hub"},
		{"XDG_CACHE_HOME", "/huggingface/hub"},
		{"HOME", "/.cache/huggingface/hub"},
	};
	for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
		const char *value = getenv(places[i].variable);
		if (value && *value)
			return (size_t)snprintf(buf, cap, "%s%s", value, places[i].tail) < cap;
	}
	return false;
}

// ORG/NAME, each of letters, digits, '.', '_' and '-', not beginning with '.'.
static bool is_hub_name(const char *text, const char **slash)
{
	*slash = strchr(text, '/');
	if (!*slash || *slash == text || !(*slash)[1] || text[0] == '.' || (*slash)[1] == '.')
		return false;
	return strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == (size_t)(*slash - text) &&
	       !(*slash)[1 + strspn(*slash + 1, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")];
}

// The folder of an org/name: models--ORG--NAME/snapshots/HASH, HASH being the text of refs/main.
static enum status find_in_hub(const char *name, const char *slash, char *buf, size_t cap, struct error *e)
{
	char cache[PATH_MAX], ref[PATH_MAX], q[64];
	char *hash = NULL;
	size_t len = 0;
	if (!hub_cache(cache, sizeof cache))
		return error_set(e, STATUS_REFUSED, "%s: no such file or folder, and no Hugging Face cache to look in", name);
	int n = snprintf(ref, sizeof ref, "%s/models--%.*s--%s/refs/main", cache, (int)(slash - name), name, slash + 1);
	if ((size_t)n >= sizeof ref)
		return error_set(e, STATUS_REFUSED, "%s: the path of its cache folder is too long", name);
	enum status status = file_read(ref, 256, &hash, &len, e);
	if (status == STATUS_ABSENT)
		return error_set(e, STATUS_REFUSED, "%s: no such file or folder, and not in the Hugging Face cache %s", name,
		                 cache);
	TRY(status);
	while (len && (hash[len - 1] == '\n' || hash[len - 1] == ' '))
		hash[--len] = 0;
	if (len == 0 || strspn(hash, "0123456789abcdef") != len) {
		error_set(e, STATUS_REFUSED, "%s: expected a commit hash, found \"%s\"", ref,
		          quote_bytes(q, sizeof q, hash, len));
		free(hash);
		return STATUS_REFUSED;
	}
	n = snprintf(buf, cap, "%s/models--%.*s--%s/snapshots/%s", cache, (int)(slash - name), name, slash + 1, hash);
	free(hash);
	if ((size_t)n >= cap || !is_folder(buf))
		return error_set(e, STATUS_REFUSED, "%s: its folder %s is missing from the Hugging Face cache", name, buf);
	return STATUS_OK;
}

// Last part of a path without ".gguf".
static char *display_name(const char *path)
{
	size_t end = strlen(path), begin;
	while (end > 1 && path[end - 1] == '/')
		end--;
	for (begin = end; begin > 0 && path[begin - 1] != '/'; begin--)
		;
	size_t n = end - begin;
	char *name = xmalloc(n + 1);
	memcpy(name, path + begin, n);
	name[n] = 0;
	if (n > 5 && !strcmp(name + n - 5, ".gguf"))
		name[n - 5] = 0;
	return name;
}

enum status model_open(struct model **out, const char *path, const struct model_open_options *options, struct error *e)
{
	char found[PATH_MAX], absolute[PATH_MAX];
	const char *slash = NULL, *name = NULL;
	const bool dummy = options && options->load_dummy;
	*out = NULL;
	if (!exists(path)) {
		if (!is_hub_name(path, &slash))
			return error_set(e, STATUS_REFUSED, "%s: no such file or folder", path);
		TRY(find_in_hub(path, slash, found, sizeof found, e));
		name = path;
		path = found;
	}
	if (!realpath(path, absolute))
		return error_set(e, STATUS_REFUSED, "%s: its path cannot be resolved", path);

	struct model *m = xcalloc(1, sizeof *m);
	m->is_folder = is_folder(absolute);
	m->path = xstrdup(absolute);
	// A link keeps its own name: in the cache of the hub files are links to blobs named by their hash.
	m->display_name = name ? xstrdup(name) : display_name(path[strspn(path, "./")] ? path : absolute);
	generation_init(&m->generation);
	enum status status = m->is_folder ? model_open_folder(m, absolute, dummy, e) : model_open_gguf(m, path, dummy, e);
	if (status != STATUS_OK) {
		model_close(&m);
		// Whatever the reason, to the caller the model is refused.
		return status == STATUS_ABSENT ? STATUS_REFUSED : status;
	}
	*out = m;
	return STATUS_OK;
}

void model_close(struct model **model)
{
	struct model *m = *model;
	if (!m)
		return;
	for (int i = 0; i < m->n_files; i++) {
		if (m->ggufs)
			gguf_destroy(&m->ggufs[i]);
		file_map_close(&m->maps[i]);
		free(m->files[i]);
	}
	free(m->ggufs);
	free(m->maps);
	free(m->files);
	free(m->globals);
	free(m->layers);
	free(m->chat_template);
	free(m->display_name);
	free(m->path);
	free(m);
	*model = NULL;
}

const struct model_config *model_config(const struct model *m)
{
	return &m->config;
}

const struct model_generation *model_generation(const struct model *m)
{
	return &m->generation;
}

const char *model_path(const struct model *m)
{
	return m->path;
}

const char *model_display_name(const struct model *m)
{
	return m->display_name;
}

const struct tensor *model_tensor(const struct model *m, enum tensor_role role, int layer)
{
	const struct tensor *t;
	ASSERT(role < TENSOR_ROLE_COUNT);
	if (role < TENSOR_FIRST_LAYER_ROLE) {
		t = &m->globals[role];
		if (role == TENSOR_OUTPUT_HEAD && !t->name[0])
			t = &m->globals[TENSOR_TOKEN_EMBEDDING];
	} else {
		ASSERT(layer >= 0 && layer < m->config.n_layers);
		t = &m->layers[layer * (TENSOR_ROLE_COUNT - TENSOR_FIRST_LAYER_ROLE) + role - TENSOR_FIRST_LAYER_ROLE];
	}
	return t->name[0] ? t : NULL;
}

const char *tensor_role_name(enum tensor_role role)
{
	ASSERT(role < TENSOR_ROLE_COUNT);
	return role_names[role];
}

static int64_t bytes_of(const struct model *m, enum tensor_role role, int layer)
{
	const struct tensor *t = model_tensor(m, role, layer);
	return t ? t->bytes : 0;
}

int64_t model_layer_bytes(const struct model *m, int layer)
{
	int64_t bytes = 0;
	for (int role = TENSOR_FIRST_LAYER_ROLE; role < TENSOR_ROLE_COUNT; role++)
		bytes += bytes_of(m, (enum tensor_role)role, layer);
	return bytes;
}

int64_t model_embedding_bytes(const struct model *m)
{
	return bytes_of(m, TENSOR_TOKEN_EMBEDDING, 0);
}

int64_t model_head_bytes(const struct model *m)
{
	return bytes_of(m, TENSOR_OUTPUT_NORM, 0) + bytes_of(m, TENSOR_OUTPUT_HEAD, 0);
}

const struct gguf *model_gguf(const struct model *m)
{
	return m->ggufs ? m->ggufs[0] : NULL;
}

enum status model_read_file(const struct model *m, const char *file, char **data, size_t *len, struct error *e)
{
	char path[PATH_MAX];
	if (!m->is_folder)
		return error_set(e, STATUS_ABSENT, "%s: not a folder, so it has no %s", m->path, file);
	if ((size_t)snprintf(path, sizeof path, "%s/%s", m->path, file) >= sizeof path)
		return error_set(e, STATUS_REFUSED, "%s: the path of its %s is too long", m->path, file);
	return file_read(path, FILE_LIMIT_BYTES, data, len, e);
}

const char *model_chat_template(const struct model *m)
{
	return m->chat_template;
}
