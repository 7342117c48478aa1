// See memory.h.
#include "worker/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Reads a file of /proc, /sys: at most size - 1 bytes, NUL-terminated. False if it cannot be read.
static bool read_text(const char *root, const char *path, char *text, size_t size)
{
	char full[4096];
	if ((size_t)snprintf(full, sizeof full, "%s%s", root, path) >= sizeof full)
		return false;
	FILE *f = fopen(full, "r");
	if (!f)
		return false;
	size_t n = fread(text, 1, size - 1, f);
	fclose(f);
	text[n] = 0;
	return true;
}

// The number after `key` at the start of a line; false if there is none.
static bool number_of(const char *text, const char *key, uint64_t *out)
{
	size_t n = strlen(key);
	for (const char *line = text; line; line = strchr(line, '\n')) {
		if (*line == '\n')
			line++;
		if (!strncmp(line, key, n) && (line[n] == ' ' || line[n] == ':' || line[n] == '\t'))
			return sscanf(line + n + 1, "%" SCNu64, out) == 1;
	}
	return false;
}

// Takes one cgroup folder into account. False if it has no such files.
static bool apply_cgroup(struct memory_state *m, const char *root, const char *folder, bool v2)
{
	char path[3072], text[16384];
	uint64_t limit, used = 0, cached = 0, inactive = 0;
	snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.max" : "memory.limit_in_bytes");
	if (!read_text(root, path, text, sizeof text))
		return false;
	if (sscanf(text, "%" SCNu64, &limit) != 1)
		return true; // "max"
	snprintf(path, sizeof path, "%s/%s", folder, v2 ? "memory.current" : "memory.usage_in_bytes");
	if (read_text(root, path, text, sizeof text))
		sscanf(text, "%" SCNu64, &used);
	snprintf(path, sizeof path, "%s/memory.stat", folder);
	if (read_text(root, path, text, sizeof text)) {
		number_of(text, v2 ? "active_file" : "total_active_file", &cached);
		number_of(text, v2 ? "inactive_file" : "total_inactive_file", &inactive);
		cached += inactive;
	}
	used = used > cached ? used - cached : 0;
	uint64_t available = limit > used ? limit - used : 0;
	if (limit < m->total_bytes) {
		m->total_bytes = limit;
		m->in_cgroup = true;
	}
	if (available < m->available_bytes) {
		m->available_bytes = available;
		m->in_cgroup = true;
	}
	return true;
}

// Every folder from `path` up to the mount counts: a parent's limit binds its children.
static void apply_path(struct memory_state *m, const char *root, const char *mount, const char *path, bool v2)
{
	char folder[2048];
	if ((size_t)snprintf(folder, sizeof folder, "%s%s", mount, strcmp(path, "/") ? path : "") >= sizeof folder)
		return;
	for (;;) {
		apply_cgroup(m, root, folder, v2);
		if (strlen(folder) <= strlen(mount))
			return;
		*strrchr(folder, '/') = 0;
	}
}

void memory_read(struct memory_state *m, const char *root)
{
	char text[16384];
	uint64_t kib;
	memset(m, 0, sizeof *m);
	if (read_text(root, "/proc/meminfo", text, sizeof text)) {
		if (number_of(text, "MemTotal", &kib))
			m->total_bytes = kib * 1024;
		if (number_of(text, "MemAvailable", &kib))
			m->available_bytes = kib * 1024;
	}
	if (!read_text(root, "/proc/self/cgroup", text, sizeof text))
		return;
	// Lines are "ID:CONTROLLERS:PATH"; v2 has ID 0 and no controllers.
	char *save = NULL;
	for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
		char *controllers = strchr(line, ':');
		char *path = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!path)
			continue;
		*path++ = 0;
		controllers++;
		if (!*controllers) {
			apply_path(m, root, "/sys/fs/cgroup", path, true);
			continue;
		}
		char padded[512];
		snprintf(padded, sizeof padded, ",%s,", controllers);
		if (strstr(padded, ",memory,"))
			apply_path(m, root, "/sys/fs/cgroup/memory", path, false);
	}
}

uint64_t memory_limit(const struct memory_state *m, const struct option_memory *own, uint32_t n_sharing)
{
	double bytes = 0.5 * (double)m->available_bytes;
	if (own)
		bytes = own->is_fraction ? own->fraction * (double)m->available_bytes : (double)own->bytes;
	return (uint64_t)(bytes / (n_sharing ? n_sharing : 1));
}

void memory_of_self(struct memory_usage *out)
{
	char text[8192];
	uint64_t kib;
	memset(out, 0, sizeof *out);
	if (!read_text("", "/proc/self/status", text, sizeof text))
		return;
	if (number_of(text, "VmRSS", &kib))
		out->rss_bytes = kib * 1024;
	out->private_bytes = out->rss_bytes;
	if (number_of(text, "RssFile", &kib))
		out->private_bytes -= kib * 1024 < out->rss_bytes ? kib * 1024 : out->rss_bytes;
}
