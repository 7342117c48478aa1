// A temporary folder of a test, with helpers to fill it; removed at the end with all that is in it.
#ifndef STAGECOACH_TESTS_TEMP_FOLDER_H
#define STAGECOACH_TESTS_TEMP_FOLDER_H

#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct temp_folder {
	char path[64];
};

static inline void temp_folder_create(struct temp_folder *t)
{
	*t = (struct temp_folder){.path = "/tmp/stagecoach-test-XXXXXX"};
	if (!mkdtemp(t->path))
		abort();
}

// Good until eight more were asked for.
static inline const char *temp_folder_path(const struct temp_folder *t, const char *name)
{
	static char joined[8][PATH_MAX];
	static int next;
	char *buf = joined[next++ % 8];
	snprintf(buf, PATH_MAX, "%s/%s", t->path, name);
	return buf;
}

// Writes a file; folders in its name are made.
static inline const char *temp_folder_write(struct temp_folder *t, const char *name, const void *data, size_t len)
{
	const char *path = temp_folder_path(t, name);
	char part[PATH_MAX];
	for (const char *p = strchr(path + strlen(t->path) + 1, '/'); p; p = strchr(p + 1, '/')) {
		snprintf(part, sizeof part, "%.*s", (int)(p - path), path);
		mkdir(part, 0700);
	}
	FILE *f = fopen(path, "wb");
	if (!f || fwrite(data, 1, len, f) != len || fclose(f))
		abort();
	return path;
}

static inline const char *temp_folder_write_text(struct temp_folder *t, const char *name, const char *text)
{
	return temp_folder_write(t, name, text, strlen(text));
}

static inline void temp_folder_copy(struct temp_folder *t, const char *from, const char *name)
{
	FILE *f = fopen(from, "rb");
	if (!f)
		abort();
	fseek(f, 0, SEEK_END);
	size_t n = (size_t)ftell(f);
	rewind(f);
	char *data = malloc(n + 1);
	if (fread(data, 1, n, f) != n)
		abort();
	fclose(f);
	temp_folder_write(t, name, data, n);
	free(data);
}

static inline int temp_folder_unlink(const char *path, const struct stat *st, int kind, struct FTW *w)
{
	return remove(path);
}

static inline void temp_folder_remove(struct temp_folder *t)
{
	nftw(t->path, temp_folder_unlink, 8, FTW_DEPTH | FTW_PHYS);
}

#endif
