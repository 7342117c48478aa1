// Builds GGUF files in memory, good ones and broken ones: headers byte by byte, and a tiny llama model of which a test
// changes one thing. Buffers are exact, so that a sanitizer sees any read beyond the end.
#ifndef STAGECOACH_TESTS_GGUF_BUILDER_H
#define STAGECOACH_TESTS_GGUF_BUILDER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/gguf.h"

struct bytes {
	uint8_t *p;
	size_t n;
};

static inline void put(struct bytes *b, const void *data, size_t n)
{
	b->p = realloc(b->p, b->n + n ? b->n + n : 1);
	if (n)
		memcpy(b->p + b->n, data, n);
	b->n += n;
}

static inline void put_u32(struct bytes *b, uint32_t v)
{
	put(b, &v, 4);
}

static inline void put_u64(struct bytes *b, uint64_t v)
{
	put(b, &v, 8);
}

static inline void put_text(struct bytes *b, const char *text, size_t len)
{
	put_u64(b, len);
	put(b, text, len);
}

static inline void put_string(struct bytes *b, const char *text)
{
	put_text(b, text, strlen(text));
}

static inline void put_header(struct bytes *b, uint32_t version, uint64_t tensors, uint64_t kvs)
{
	put(b, "GGUF", 4);
	put_u32(b, version);
	put_u64(b, tensors);
	put_u64(b, kvs);
}

static inline void put_key(struct bytes *b, const char *key, uint32_t type)
{
	put_string(b, key);
	put_u32(b, type);
}

static inline void put_kv_u32(struct bytes *b, const char *key, uint32_t v)
{
	put_key(b, key, GGUF_UINT32);
	put_u32(b, v);
}

static inline void put_kv_u16(struct bytes *b, const char *key, uint16_t v)
{
	put_key(b, key, GGUF_UINT16);
	put(b, &v, 2);
}

static inline void put_kv_f32(struct bytes *b, const char *key, float v)
{
	put_key(b, key, GGUF_FLOAT32);
	put(b, &v, 4);
}

static inline void put_kv_bool(struct bytes *b, const char *key, uint8_t v)
{
	put_key(b, key, GGUF_BOOL);
	put(b, &v, 1);
}

static inline void put_kv_string(struct bytes *b, const char *key, const char *v)
{
	put_key(b, key, GGUF_STRING);
	put_string(b, v);
}

static inline void put_array(struct bytes *b, const char *key, uint32_t item_type, uint64_t count)
{
	put_key(b, key, GGUF_ARRAY);
	put_u32(b, item_type);
	put_u64(b, count);
}

static inline void put_tensor(struct bytes *b, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                              uint64_t offset)
{
	put_string(b, name);
	put_u32(b, n_dims);
	for (uint32_t i = 0; i < n_dims; i++)
		put_u64(b, dims[i]);
	put_u32(b, type);
	put_u64(b, offset);
}

static inline void put_padding(struct bytes *b, size_t alignment)
{
	while (b->n % alignment)
		put(b, "", 1);
}

// One change to the tiny model below. Everything that is 0 or NULL is left as it is.
struct gguf_edit {
	const char *drop_key;               // a metadata key that is left out
	void (*add_keys)(struct bytes *, int *count); // keys that are put in
	const char *drop_tensor;
	const char *change_tensor;          // a tensor that gets other dimensions or another type
	uint64_t dims[2];
	int n_dims;
	int ggml_type;                      // -1: unchanged; only looked at with change_tensor
	const char *rename_tensor, *new_name;
	const char *add_tensor;             // of shape [32]
	// Shards: tensors of layer 1 go into the second of two where `shard` is 1 or 2.
	int shard;
	int split_no, split_count, split_tensors; // as stated; -1: not stated
};

#define GGUF_NO_SPLIT .split_no = -1, .split_count = -1, .split_tensors = -1

struct gguf_builder {
	struct bytes kvs, infos;
	int n_kvs, n_tensors;
	uint64_t data_bytes;
	const struct gguf_edit *edit;
};

static inline bool gguf_builder_wants(struct gguf_builder *g, const char *key)
{
	if ((g->edit->drop_key && !strcmp(g->edit->drop_key, key)) || g->edit->shard == 2)
		return false;
	g->n_kvs++;
	return true;
}

static inline void gguf_builder_u32(struct gguf_builder *g, const char *key, uint32_t v)
{
	if (gguf_builder_wants(g, key))
		put_kv_u32(&g->kvs, key, v);
}

static inline void gguf_builder_tensor(struct gguf_builder *g, const char *name, uint64_t cols, uint64_t rows)
{
	const struct gguf_edit *e = g->edit;
	uint64_t dims[2] = {cols, rows};
	uint32_t n_dims = rows ? 2 : 1;
	uint32_t type = 0;
	if (e->drop_tensor && !strcmp(e->drop_tensor, name))
		return;
	if (e->shard && (e->shard == 2) != (strncmp(name, "blk.1.", 6) == 0))
		return;
	if (e->change_tensor && !strcmp(e->change_tensor, name)) {
		if (e->n_dims) {
			memcpy(dims, e->dims, sizeof dims);
			n_dims = (uint32_t)e->n_dims;
		}
		if (e->ggml_type >= 0)
			type = (uint32_t)e->ggml_type;
	}
	if (e->rename_tensor && !strcmp(e->rename_tensor, name))
		name = e->new_name;
	enum dtype t = DTYPE_F32;
	dtype_from_gguf(type, &t);
	put_tensor(&g->infos, name, n_dims, dims, type, g->data_bytes);
	g->data_bytes += ((uint64_t)dtype_row_bytes(t, (int64_t)dims[0]) * (n_dims > 1 ? dims[1] : 1) + 31) / 32 * 32;
	g->n_tensors++;
}

// A llama of two layers: hidden 32, 4 heads, 2 KV heads, feed-forward 64, 8 tokens, all float32 and zero. Caller frees.
static inline struct bytes gguf_tiny_llama(const struct gguf_edit *edit)
{
	static const char *const tokens[] = {"a", "b", "c", "<|im_end|>", "<|endoftext|>", "d", "e", "f"};
	struct gguf_builder g = {.edit = edit};
	struct bytes out = {0};
	char name[64];
	if (gguf_builder_wants(&g, "general.architecture"))
		put_kv_string(&g.kvs, "general.architecture", "llama");
	gguf_builder_u32(&g, "llama.block_count", 2);
	gguf_builder_u32(&g, "llama.context_length", 64);
	gguf_builder_u32(&g, "llama.embedding_length", 32);
	gguf_builder_u32(&g, "llama.feed_forward_length", 64);
	gguf_builder_u32(&g, "llama.attention.head_count", 4);
	gguf_builder_u32(&g, "llama.attention.head_count_kv", 2);
	if (gguf_builder_wants(&g, "llama.attention.layer_norm_rms_epsilon"))
		put_kv_f32(&g.kvs, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
	if (gguf_builder_wants(&g, "tokenizer.ggml.model"))
		put_kv_string(&g.kvs, "tokenizer.ggml.model", "gpt2");
	if (gguf_builder_wants(&g, "tokenizer.ggml.tokens")) {
		put_array(&g.kvs, "tokenizer.ggml.tokens", GGUF_STRING, 8);
		for (int i = 0; i < 8; i++)
			put_string(&g.kvs, tokens[i]);
	}
	gguf_builder_u32(&g, "tokenizer.ggml.eos_token_id", 3);
	if (edit->split_no >= 0)
		put_kv_u16(&g.kvs, "split.no", (uint16_t)edit->split_no), g.n_kvs++;
	if (edit->split_count >= 0)
		put_kv_u16(&g.kvs, "split.count", (uint16_t)edit->split_count), g.n_kvs++;
	if (edit->split_tensors >= 0) {
		int32_t n = edit->split_tensors;
		put_key(&g.kvs, "split.tensors.count", GGUF_INT32);
		put(&g.kvs, &n, 4);
		g.n_kvs++;
	}
	if (edit->add_keys)
		edit->add_keys(&g.kvs, &g.n_kvs);
	gguf_builder_tensor(&g, "token_embd.weight", 32, 8);
	gguf_builder_tensor(&g, "output_norm.weight", 32, 0);
	for (int i = 0; i < 2; i++) {
		static const struct { const char *name; uint64_t cols, rows; } layer[] = {
			{"attn_norm", 32, 0}, {"attn_q", 32, 32}, {"attn_k", 32, 16},   {"attn_v", 32, 16},  {"attn_output", 32, 32},
			{"ffn_norm", 32, 0},  {"ffn_gate", 32, 64}, {"ffn_up", 32, 64}, {"ffn_down", 64, 32},
		};
		for (size_t j = 0; j < sizeof layer / sizeof *layer; j++) {
			snprintf(name, sizeof name, "blk.%d.%s.weight", i, layer[j].name);
			gguf_builder_tensor(&g, name, layer[j].cols, layer[j].rows);
		}
	}
	if (edit->add_tensor)
		gguf_builder_tensor(&g, edit->add_tensor, 32, 0);
	put_header(&out, 3, (uint64_t)g.n_tensors, (uint64_t)g.n_kvs);
	put(&out, g.kvs.p, g.kvs.n);
	put(&out, g.infos.p, g.infos.n);
	put_padding(&out, 32);
	for (uint64_t i = 0; i < g.data_bytes / 32; i++)
		put(&out, (const uint8_t[32]){0}, 32);
	free(g.kvs.p);
	free(g.infos.p);
	return out;
}

#endif
