// GGUF v2 and v3, read as untrusted input: pure over (ptr, len), checked arithmetic, nothing allocated from a claimed
// size that the bytes present could not hold. The surprising decision: metadata arrays are not unpacked; they are
// iterated in place, so that a vocabulary of 256k strings costs one index array, made on first use by its reader.
#ifndef STAGECOACH_COMMON_GGUF_H
#define STAGECOACH_COMMON_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

enum gguf_type {
	GGUF_UINT8, GGUF_INT8, GGUF_UINT16, GGUF_INT16, GGUF_UINT32, GGUF_INT32, GGUF_FLOAT32, GGUF_BOOL,
	GGUF_STRING, GGUF_ARRAY, GGUF_UINT64, GGUF_INT64, GGUF_FLOAT64,
};

struct gguf_string { const char *data; uint64_t len; }; // borrowed, not NUL-terminated

struct gguf_kv {
	struct gguf_string key;
	enum gguf_type type;       // of the value
	enum gguf_type item_type;  // of the items of an array
	uint64_t count;            // items of an array, else 1
	const uint8_t *value;      // first item in the file's bytes
};

struct gguf_tensor {
	struct gguf_string name;
	enum dtype dtype;
	int n_dims;
	int64_t dims[4];           // ggml order: dims[0] is contiguous
	uint64_t offset;           // from the start of the file, checked to lie inside with `bytes`
	int64_t bytes;
};

// Limits on what a file may claim, so that a large file of nonsense is refused quickly.
enum { GGUF_MAX_KEYS = 1 << 16, GGUF_MAX_TENSORS = 1 << 17, GGUF_MAX_NAME = 127, GGUF_MAX_KEY = 1024 };
#define GGUF_MAX_ITEMS (UINT64_C(1) << 24)

struct gguf;

// Parses the header of a file of which `data[0..len)` is present. `label` names the file in errors; copied.
// data is borrowed until gguf_destroy().
enum status gguf_parse(struct gguf **out, const uint8_t *data, size_t len, const char *label, struct error *);
void gguf_destroy(struct gguf **);

uint64_t gguf_kv_count(const struct gguf *);
const struct gguf_kv *gguf_kv_at(const struct gguf *, uint64_t i);
const struct gguf_kv *gguf_find(const struct gguf *, const char *key); // NULL if absent
uint64_t gguf_tensor_count(const struct gguf *);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *, uint64_t i);
const uint8_t *gguf_data(const struct gguf *);
const char *gguf_label(const struct gguf *);
const char *gguf_type_name(enum gguf_type);

// Typed getters: STATUS_ABSENT if there is no such key, STATUS_REFUSED (key, expected, found) if it has another type.
// Types are exact, as everywhere that GGUF is read: a count stored as a float or as 64 bits is not a uint32.
enum status gguf_get_u16(const struct gguf *, const char *key, uint16_t *out, struct error *);
enum status gguf_get_i32(const struct gguf *, const char *key, int32_t *out, struct error *);
enum status gguf_get_u32(const struct gguf *, const char *key, uint32_t *out, struct error *);
enum status gguf_get_f32(const struct gguf *, const char *key, float *out, struct error *);
enum status gguf_get_bool(const struct gguf *, const char *key, bool *out, struct error *);
enum status gguf_get_string(const struct gguf *, const char *key, struct gguf_string *out, struct error *);
// An array of strings as an index: *items is malloc'ed (caller frees), strings are borrowed.
enum status gguf_get_string_array(const struct gguf *, const char *key, struct gguf_string **items, uint64_t *count,
                                  struct error *);
// Arrays of int32/uint32 (or float32) items, unaligned in the file: copied out, caller frees.
enum status gguf_get_i32_array(const struct gguf *, const char *key, int32_t **items, uint64_t *count, struct error *);
enum status gguf_get_f32_array(const struct gguf *, const char *key, float **items, uint64_t *count, struct error *);

#endif
