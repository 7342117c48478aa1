// Architectures as data: one row each, and one list of tensors with their names in both file formats. To add a mix of
// known pieces, add a row to `architectures`; to add a mechanism, add a feature, the tensors that need it, and the
// function in the forward pass.
#ifndef STAGECOACH_COMMON_MODEL_ARCH_H
#define STAGECOACH_COMMON_MODEL_ARCH_H

#include "common/model.h"

enum model_format { MODEL_GGUF, MODEL_SAFETENSORS, MODEL_FORMAT_COUNT };

enum arch_feature {
	ARCH_QKV_BIAS = 1 << 0,     // biases on q, k and v, none on the output projection
	ARCH_QK_NORM = 1 << 1,      // RMS norm of each q and k head before RoPE
	ARCH_ROPE_FACTORS = 1 << 2, // may bring a divisor per rotated pair (GGUF's way to store Llama-3 scaling)
};

// When config.json's sliding_window counts.
enum arch_window {
	ARCH_WINDOW_NEVER,   // the architecture has none
	ARCH_WINDOW_ALWAYS,  // wherever it is not null; 4096 where the key is missing (Mistral)
	ARCH_WINDOW_IF_USED, // only with use_sliding_window (Qwen)
};

// Terms that shapes are made of.
enum arch_dim { DIM_ONE, DIM_HIDDEN, DIM_FFN, DIM_VOCAB, DIM_Q, DIM_KV, DIM_HEAD, DIM_HALF_ROPE };

struct arch_tensor {
	enum tensor_role role;
	const char *name[MODEL_FORMAT_COUNT]; // "%d" is the layer; NULL: this format never has it
	enum arch_dim rows, cols;             // a vector is DIM_ONE x n
	unsigned needs;                       // features of which all must be there, else the tensor is unknown
	bool optional;
};

struct model_arch {
	const char *name;           // as model_config.architecture
	const char *gguf_name;      // general.architecture; NULL where another row stands for it
	const char *hf_class;       // config.json "architectures"
	const char *hf_model_type;  // config.json "model_type"
	enum rope_kind rope[MODEL_FORMAT_COUNT];
	unsigned features;
	enum arch_window window;
	int hf_head_dim;            // head_dim where config.json has none; 0: hidden / heads
	int hf_kv_heads;            // num_key_value_heads where config.json has none; 0: as many as heads
	const struct arch_tensor *tensors;
	int n_tensors;
};

const struct model_arch *model_arch_from_gguf(const char *name, size_t len);
const struct model_arch *model_arch_from_hf(const char *class_name, const char *model_type); // either may be NULL
// "llama, qwen2, ..." for messages: the names by which the format knows them.
const char *model_arch_list(enum model_format, char *buf, size_t cap);
int64_t model_arch_dim(const struct model_config *, enum arch_dim);

#endif
