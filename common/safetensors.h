// Safetensors files and their index, read as untrusted input: pure over (ptr, len). A file is eight bytes of header
// length, the header (JSON: name, type, shape and place of each tensor), and the data. The surprising decision: a
// header may not exceed 2 MiB (some 15,000 tensors), where the format allows 100, so that the worst one is parsed within
// a second.
// Source: the format's description in the safetensors repository.
#ifndef STAGECOACH_COMMON_SAFETENSORS_H
#define STAGECOACH_COMMON_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"
#include "common/status.h"

enum { SAFETENSORS_MAX_HEADER_BYTES = 2 << 20, SAFETENSORS_MAX_NAME = 127, SAFETENSORS_MAX_SHARDS = 1024 };

struct safetensors_tensor {
	const char *name;   // borrowed until safetensors_destroy(), at most SAFETENSORS_MAX_NAME bytes
	enum dtype dtype;   // F32, F16 or BF16
	int n_dims;         // 1 to 4
	int64_t dims[4];    // row-major
	uint64_t offset;    // from the start of the file, checked to lie inside with `bytes`
	int64_t bytes;
};

struct safetensors;

// data is borrowed only during the call. Refuses what overlaps, leaves holes, lies outside, or has a type that is not
// supported.
enum status safetensors_parse(struct safetensors **out, const uint8_t *data, size_t len, const char *label,
                              struct error *);
void safetensors_destroy(struct safetensors **);
size_t safetensors_count(const struct safetensors *);
const struct safetensors_tensor *safetensors_at(const struct safetensors *, size_t i); // in order of offset

// model.safetensors.index.json: which shard holds which tensor.
struct safetensors_index;
enum status safetensors_index_parse(struct safetensors_index **out, const char *text, size_t len, const char *label,
                                    struct error *);
void safetensors_index_destroy(struct safetensors_index **);
int safetensors_index_file_count(const struct safetensors_index *);
const char *safetensors_index_file(const struct safetensors_index *, int i); // sorted; a plain file name
size_t safetensors_index_count(const struct safetensors_index *);            // tensors
void safetensors_index_at(const struct safetensors_index *, size_t i, const char **tensor, const char **file);

#endif
