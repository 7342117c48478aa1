// See hub_keys.h.
#include "coordinator/hub_keys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

enum status hub_keys_read(struct hub_keys *out, const char *path, struct error *e)
{
	struct { const char *name; char *to; } rows[] = {
		{"server-public", out->server_public}, {"server-secret", out->server_secret},
		{"client-public", out->client_public}, {"client-secret", out->client_secret},
	};
	memset(out, 0, sizeof *out);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat info;
	if (fd < 0 || fstat(fd, &info)) {
		if (fd >= 0)
			close(fd);
		return error_set(e, STATUS_USAGE, "key file %s: %s", path, strerror(errno));
	}
	FILE *f = fdopen(fd, "r");
	if (!f || (info.st_mode & 077)) {
		if (f)
			fclose(f);
		else
			close(fd);
		return error_set(e, STATUS_USAGE, "key file %s has mode %o, expected 600", path, info.st_mode & 0777);
	}
	char line[256], name[33], key[129];
	enum status status = STATUS_OK;
	for (int n = 1; status == STATUS_OK && fgets(line, sizeof line, f); n++) {
		if (line[0] == '#' || line[0] == '\n')
			continue;
		bool known = false;
		if (sscanf(line, "%32s %128s", name, key) == 2 && strlen(key) == HUB_KEY_CHARS)
			for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
				if (!strcmp(rows[i].name, name)) {
					strcpy(rows[i].to, key);
					known = true;
				}
		if (!known)
			status = error_set(e, STATUS_USAGE, "key file %s, line %d: expected a name and a key of %d characters", path,
			                   n, HUB_KEY_CHARS);
	}
	fclose(f);
	TRY(status);
	if (!out->server_public[0] || !out->client_public[0] || !zmq_z85_decode(out->client, out->client_public))
		return error_set(e, STATUS_USAGE, "key file %s lacks server-public or client-public", path);
	return STATUS_OK;
}

static enum status write_file(const char *path, const struct hub_keys *k, bool secret, struct error *e)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	FILE *f = fd >= 0 && !fchmod(fd, 0600) ? fdopen(fd, "w") : NULL;
	if (!f) {
		if (fd >= 0)
			close(fd);
		return error_set(e, STATUS_UNAVAILABLE, "key file %s: %s", path, strerror(errno));
	}
	fprintf(f, "server-public %s\n", k->server_public);
	if (secret)
		fprintf(f, "server-secret %s\n", k->server_secret);
	fprintf(f, "client-public %s\nclient-secret %s\n", k->client_public, k->client_secret);
	if (fclose(f))
		return error_set(e, STATUS_UNAVAILABLE, "key file %s: %s", path, strerror(errno));
	return STATUS_OK;
}

enum status hub_keys_write_new(const char *coordinator_path, const char *worker_path, struct error *e)
{
	struct hub_keys k;
	if (zmq_curve_keypair(k.server_public, k.server_secret) || zmq_curve_keypair(k.client_public, k.client_secret))
		return error_set(e, STATUS_FATAL, "this ZeroMQ makes no CURVE keys: %s", zmq_strerror(zmq_errno()));
	TRY(write_file(coordinator_path, &k, true, e));
	return write_file(worker_path, &k, false, e);
}

// A question has seven parts: version, request id, domain, address, identity, mechanism, client key. "stop" ends the thread.
static void *answer_questions(void *arg)
{
	struct hub_keys *k = arg;
	for (;;) {
		uint8_t parts[7][64];
		int lens[7], n = 0, more = 1;
		while (more) {
			uint8_t extra[64];
			size_t size = sizeof more;
			int got = zmq_recv(k->zap, n < 7 ? parts[n] : extra, 64, 0);
			if (got < 0)
				return NULL; // the context ends
			if (n < 7)
				lens[n] = got;
			n++;
			if (zmq_getsockopt(k->zap, ZMQ_RCVMORE, &more, &size))
				return NULL;
		}
		if (n == 1 && lens[0] == 4 && !memcmp(parts[0], "stop", 4))
			return NULL;
		bool known = n == 7 && lens[5] == 5 && !memcmp(parts[5], "CURVE", 5) && lens[6] == 32 &&
		             !memcmp(parts[6], k->client, 32);
		if (n < 2)
			continue;
		zmq_send(k->zap, "1.0", 3, ZMQ_SNDMORE);
		zmq_send(k->zap, parts[1], lens[1] < 64 ? (size_t)lens[1] : 64, ZMQ_SNDMORE);
		zmq_send(k->zap, known ? "200" : "400", 3, ZMQ_SNDMORE);
		zmq_send(k->zap, known ? "OK" : "unknown key", known ? 2 : 11, ZMQ_SNDMORE);
		zmq_send(k->zap, "", 0, ZMQ_SNDMORE);
		zmq_send(k->zap, "", 0, 0);
	}
}

enum status hub_keys_guard(struct hub_keys *k, void *context, struct error *e)
{
	k->context = context;
	k->zap = zmq_socket(context, ZMQ_REP);
	int linger = 0;
	if (!k->zap || zmq_setsockopt(k->zap, ZMQ_LINGER, &linger, sizeof linger) || zmq_bind(k->zap, "inproc://zeromq.zap.01"))
		return error_set(e, STATUS_FATAL, "cannot guard the control address: %s", zmq_strerror(zmq_errno()));
	if (pthread_create(&k->thread, NULL, answer_questions, k))
		return error_set(e, STATUS_FATAL, "cannot start a thread: %s", strerror(errno));
	k->guarding = true;
	return STATUS_OK;
}

void hub_keys_unguard(struct hub_keys *k)
{
	if (k->guarding) {
		void *s = zmq_socket(k->context, ZMQ_REQ);
		int linger = 0;
		zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof linger);
		if (!zmq_connect(s, "inproc://zeromq.zap.01"))
			zmq_send(s, "stop", 4, 0);
		pthread_join(k->thread, NULL);
		zmq_close(s);
	}
	if (k->zap)
		zmq_close(k->zap);
	k->zap = NULL;
	k->guarding = false;
}
