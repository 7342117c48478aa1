// A model on disk as data: configuration, tensors by role and layer, and the raw metadata that the tokenizer needs.
// Planner, loader, KV sizing and forward pass all read this and nothing else. The surprising decision: opening maps the
// files and checks every tensor (name, shape, type, place), but touches no weight, so that the coordinator opens a
// model of any size in milliseconds and a worker pays only for its own layers.
#ifndef STAGECOACH_COMMON_MODEL_H
#define STAGECOACH_COMMON_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

enum { MODEL_MAX_LAYERS = 1024, MODEL_MAX_EOS = 16 };

enum rope_kind {
	ROPE_NEOX,        // pairs (i, i + dim/2): safetensors of every family, GGUF of qwen2 and qwen3
	ROPE_INTERLEAVED, // pairs (2i, 2i + 1): GGUF of llama, whose q and k rows are permuted
};

enum rope_scaling { ROPE_SCALING_NONE, ROPE_SCALING_LINEAR, ROPE_SCALING_LLAMA3 };

// Roles of tensors. Which of them an architecture has, with what shape, is a row in model_arch.c.
enum tensor_role {
	TENSOR_TOKEN_EMBEDDING, // [vocab_rows, hidden]
	TENSOR_OUTPUT_NORM,     // [hidden]
	TENSOR_OUTPUT_HEAD,     // [vocab_rows, hidden]; absent when tied: model_tensor() then returns the embedding
	TENSOR_ROPE_FACTORS,    // [rope_dim / 2], GGUF "rope_freqs.weight"; optional
	TENSOR_ATTN_NORM,       // from here on per layer
	TENSOR_WQ,              // [n_heads * head_dim, hidden]
	TENSOR_WK,              // [n_kv_heads * head_dim, hidden]
	TENSOR_WV,              // [n_kv_heads * head_dim, hidden]
	TENSOR_BQ,              // optional by architecture
	TENSOR_BK,
	TENSOR_BV,
	TENSOR_Q_NORM,          // [head_dim]
	TENSOR_K_NORM,          // [head_dim]
	TENSOR_WO,              // [hidden, n_heads * head_dim]
	TENSOR_BO,
	TENSOR_FFN_NORM,        // [hidden]
	TENSOR_W_GATE,          // [ffn, hidden]
	TENSOR_W_UP,            // [ffn, hidden]
	TENSOR_W_DOWN,          // [hidden, ffn]
	TENSOR_ROLE_COUNT,
};
#define TENSOR_FIRST_LAYER_ROLE TENSOR_ATTN_NORM

struct model_config {
	char architecture[32];   // "llama", "qwen2", "qwen3"
	int32_t n_layers;
	int32_t hidden;
	int32_t ffn;
	int32_t n_heads;
	int32_t n_kv_heads;
	int32_t head_dim;        // may differ from hidden / n_heads
	int32_t vocab_size;      // tokens of the vocabulary; ids from here on are padding and never sampled
	int32_t vocab_rows;      // rows of embedding and head, >= vocab_size
	int32_t max_context;     // the model's own
	float norm_eps;
	enum rope_kind rope_kind;
	int32_t rope_dim;        // rotated elements of a head, even, <= head_dim
	float rope_theta;
	enum rope_scaling rope_scaling;
	float rope_factor;       // LINEAR and LLAMA3
	float rope_low_freq_factor, rope_high_freq_factor; // LLAMA3
	int32_t rope_original_context;                     // LLAMA3
	bool tied_head;
	bool has_qkv_bias;
	bool has_qk_norm;
	bool dummy;              // no weights on disk: model_tensor() gives shapes and types with data == NULL
	enum dtype dtype;        // "the model's own type": torch_dtype, or the commonest type of a GGUF's matrices
};

struct tensor {
	char name[128];
	enum dtype dtype;
	int64_t rows, cols;      // rows x cols, row-major, cols contiguous; a vector is 1 x n
	const void *data;        // into the mapping; borrowed until model_close()
	int64_t bytes;
};

// Defaults for sampling fields that a request leaves out (generation_config.json); NaN or -1 where the model is silent.
struct model_generation {
	float temperature, top_p, min_p, repetition_penalty;
	int32_t top_k;
	int32_t n_eos;
	int32_t eos[MODEL_MAX_EOS]; // all end tokens that the model declares, from every file that names some
	int32_t bos;                // -1 if none
	bool add_bos;
};

struct model;

struct model_open_options {
	bool load_dummy; // a folder with config.json alone is enough
};

// path: a .gguf file (the first shard finds the others), a folder in safetensors form, or org/name (looked up in the
// local Hugging Face cache: $HF_HUB_CACHE, $HF_HOME/hub, ~/.cache/huggingface/hub).
// Errors: STATUS_REFUSED with file, tensor or key, expected and found.
enum status model_open(struct model **out, const char *path, const struct model_open_options *, struct error *);
void model_close(struct model **);

const struct model_config *model_config(const struct model *);
const struct model_generation *model_generation(const struct model *);
const char *model_path(const struct model *);           // the file or folder in use, absolute
// Name for answers: file name without .gguf, or folder name, or org/name as given.
const char *model_display_name(const struct model *);
// NULL if this model has no such tensor. layer is ignored for roles that are not per layer.
const struct tensor *model_tensor(const struct model *, enum tensor_role, int layer);
const char *tensor_role_name(enum tensor_role);

// Bytes on disk of one layer, of the embedding, and of final norm + head (head counted also when tied, since the last
// stage has to hold it too unless it also holds the embedding).
int64_t model_layer_bytes(const struct model *, int layer);
int64_t model_embedding_bytes(const struct model *);
int64_t model_head_bytes(const struct model *);

// What the tokenizer and the chat template need. GGUF metadata, or NULL where the model is a folder.
struct gguf;
const struct gguf *model_gguf(const struct model *);
// Reads FILE of a model folder ("tokenizer.json", "tokenizer_config.json", ...), NUL-terminated after *len bytes.
// STATUS_ABSENT if there is none (or the model is a GGUF). Caller frees. Refuses more than 256 MiB.
enum status model_read_file(const struct model *, const char *file, char **data, size_t *len, struct error *);
// The model's chat template: GGUF tokenizer.chat_template, chat_template.jinja, or tokenizer_config.json; NULL if none.
const char *model_chat_template(const struct model *);

#endif
