// What the files behind model.h share: the model's own struct, tensors as a file offers them, and the steps from a
// parsed file to a checked model. Nobody else includes this, except tests and fuzz targets of these very steps.
#ifndef STAGECOACH_COMMON_MODEL_PARTS_H
#define STAGECOACH_COMMON_MODEL_PARTS_H

#include "common/file_map.h"
#include "common/gguf.h"
#include "common/model.h"
#include "common/model_arch.h"

// A tensor that a file offers, in either format.
struct offered_tensor {
	const char *name;  // borrowed from the file, [name_len]
	size_t name_len;   // at most GGUF_MAX_NAME
	enum dtype dtype;
	int n_dims;        // 1 to 4
	int64_t dims[4];   // row-major: the last of n_dims is contiguous
	const void *data;
	int64_t bytes;
	const char *file;  // borrowed
	bool used;
};

struct model {
	struct model_config config;
	struct model_generation generation;
	const struct model_arch *arch;
	char *path;         // absolute
	char *display_name;
	char *chat_template;
	bool is_folder;
	struct file_map *maps; // [n_files]
	char **files;          // [n_files] paths
	struct gguf **ggufs;   // [n_files], NULL in folders
	int n_files;
	struct tensor *globals; // [TENSOR_FIRST_LAYER_ROLE], name[0] == 0 where absent
	struct tensor *layers;  // [n_layers][TENSOR_ROLE_COUNT - TENSOR_FIRST_LAYER_ROLE]
};

// model.c
void generation_init(struct model_generation *);
void generation_add_eos(struct model_generation *, int64_t id); // ignores negative ids and ones that are there
// Ranges of all numbers, divisibility, and what follows from them. label names the file.
enum status config_check(const struct model_config *, const char *label, struct error *);

// model_bind.c: gives every role its tensor, checks shape and type, and refuses what is missing or left over. offered
// is sorted in place. With config.dummy, offered is not used and all data pointers are NULL.
enum status model_bind(struct model *, enum model_format, struct offered_tensor *offered, size_t count,
                       const char *label, struct error *);

// model_gguf.c
enum status model_open_gguf(struct model *, const char *path, bool dummy, struct error *);
enum status config_from_gguf(const struct gguf *, struct model_config *, const struct model_arch **, struct error *);
enum status generation_from_gguf(const struct gguf *, struct model_generation *, struct error *);

// model_folder.c, model_config.c
enum status model_open_folder(struct model *, const char *path, bool dummy, struct error *);
// From the text of config.json, [len] bytes. Also collects end tokens and bos. model_config.dtype is left as
// DTYPE_COUNT where the text names none.
enum status config_from_json(const char *text, size_t len, const char *label, struct model_config *,
                             const struct model_arch **, struct model_generation *, struct error *);
// From the text of generation_config.json.
enum status generation_from_json(const char *text, size_t len, const char *label, struct model_generation *,
                                 struct error *);

#endif
