// A file mapped read-only, or a small one read whole.
#ifndef STAGECOACH_COMMON_FILE_MAP_H
#define STAGECOACH_COMMON_FILE_MAP_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct file_map {
	const uint8_t *data;
	size_t len;
};

// STATUS_ABSENT: there is no such file. STATUS_REFUSED: not a regular file, empty, or not readable.
enum status file_map_open(struct file_map *out, const char *path, struct error *);
void file_map_close(struct file_map *); // accepts a zeroed one

// NUL-terminated after *len bytes; caller frees. STATUS_ABSENT as above; STATUS_REFUSED if longer than limit_bytes.
enum status file_read(const char *path, size_t limit_bytes, char **data, size_t *len, struct error *);

#endif
