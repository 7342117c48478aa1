// See file_map.h. Mapped shared and read-only: pages of weights stay in the page cache, one copy for all workers.
#include "common/file_map.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static enum status open_regular(const char *path, int *fd, size_t *len, struct error *e)
{
	struct stat st;
	*fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // non-blocking, so that a FIFO does not hang us
	if (*fd < 0)
		return error_set(e, errno == ENOENT || errno == ENOTDIR ? STATUS_ABSENT : STATUS_REFUSED, "%s: %s", path,
		                 strerror(errno));
	if (fstat(*fd, &st) || !S_ISREG(st.st_mode)) {
		close(*fd);
		return error_set(e, STATUS_REFUSED, "%s: not a regular file", path);
	}
	*len = (size_t)st.st_size;
	return STATUS_OK;
}

enum status file_map_open(struct file_map *out, const char *path, struct error *e)
{
	int fd = -1;
	size_t len = 0;
	*out = (struct file_map){0};
	TRY(open_regular(path, &fd, &len, e));
	if (len == 0) {
		close(fd);
		return error_set(e, STATUS_REFUSED, "%s: the file is empty", path);
	}
	void *p = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
	int why = errno;
	close(fd);
	if (p == MAP_FAILED)
		return error_set(e, STATUS_REFUSED, "%s: cannot be mapped: %s", path, strerror(why));
	out->data = p;
	out->len = len;
	return STATUS_OK;
}

void file_map_close(struct file_map *map)
{
	if (map->data)
		munmap((void *)map->data, map->len);
	*map = (struct file_map){0};
}

enum status file_read(const char *path, size_t limit_bytes, char **data, size_t *len, struct error *e)
{
	int fd = -1;
	size_t size = 0, got = 0;
	TRY(open_regular(path, &fd, &size, e));
	if (size > limit_bytes) {
		close(fd);
		return error_set(e, STATUS_REFUSED, "%s: has %zu bytes, at most %zu are allowed", path, size, limit_bytes);
	}
	char *text = xmalloc(size + 1);
	while (got < size) {
		ssize_t n = read(fd, text + got, size - got);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	close(fd);
	if (got < size) {
		free(text);
		return error_set(e, STATUS_REFUSED, "%s: cannot be read whole: %zu of %zu bytes", path, got, size);
	}
	text[size] = 0;
	*data = text;
	*len = size;
	return STATUS_OK;
}
