// See keys.h.
#include "worker/keys.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <zmq.h>

static bool take_line(struct worker_keys *k, const char *line)
{
	struct { const char *name; char *to; } rows[] = {
		{"server-public", k->server_public}, {"client-public", k->client_public}, {"client-secret", k->client_secret},
		{"server-secret", NULL},
	};
	char name[33], key[65], extra;
	if (line[0] == '#' || line[0] == '\n')
		return true;
	if (sscanf(line, "%32s %64s %c", name, key, &extra) != 2 || strlen(key) != WORKER_KEY_CHARS)
		return false;
	for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
		if (!strcmp(rows[i].name, name)) {
			if (rows[i].to)
				memcpy(rows[i].to, key, WORKER_KEY_CHARS + 1);
			return true;
		}
	return false;
}

enum status worker_keys_read(struct worker_keys *out, const char *path, struct error *e)
{
	enum status status = STATUS_OK;
	struct stat info;
	char line[256];
	memset(out, 0, sizeof *out);
	FILE *f = fopen(path, "re");
	if (!f || fstat(fileno(f), &info)) {
		status = error_set(e, STATUS_USAGE, "key file %s: %s", path, strerror(errno));
		goto out;
	}
	if (info.st_mode & 077) {
		status = error_set(e, STATUS_USAGE, "key file %s has mode %o, expected 600", path, info.st_mode & 0777);
		goto out;
	}
	for (int n = 1; fgets(line, sizeof line, f); n++)
		if (!take_line(out, line)) {
			status = error_set(e, STATUS_USAGE, "key file %s, line %d: expected a name and a key of %d characters", path,
			                   n, WORKER_KEY_CHARS);
			goto out;
		}
	if (!out->server_public[0] || !out->client_public[0] || !out->client_secret[0])
		status = error_set(e, STATUS_USAGE, "key file %s: expected server-public, client-public and client-secret", path);
out:
	if (f)
		fclose(f);
	return status;
}

enum status worker_keys_apply(const struct worker_keys *k, void *socket, struct error *e)
{
	if (zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, k->server_public, sizeof k->server_public) ||
	    zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, k->client_public, sizeof k->client_public) ||
	    zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, k->client_secret, sizeof k->client_secret))
		return error_set(e, STATUS_USAGE, "ZeroMQ does not take the keys: %s", zmq_strerror(errno));
	return STATUS_OK;
}
