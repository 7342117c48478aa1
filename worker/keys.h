// CURVE keys of a worker that joins over TCP: lines `name key` with server-public, client-public and client-secret, keys as
// 40 characters of ZeroMQ's Z85. A coordinator's file, which has server-secret too, is taken as well.
#ifndef STAGECOACH_WORKER_KEYS_H
#define STAGECOACH_WORKER_KEYS_H

#include "common/status.h"

enum { WORKER_KEY_CHARS = 40 };

struct worker_keys {
	char server_public[WORKER_KEY_CHARS + 1];
	char client_public[WORKER_KEY_CHARS + 1], client_secret[WORKER_KEY_CHARS + 1];
};

// STATUS_USAGE: unreadable, readable by others than its owner, malformed (with the line), or a key is missing.
enum status worker_keys_read(struct worker_keys *out, const char *path, struct error *);
// Makes a socket that is not connected yet a CURVE client. STATUS_USAGE: ZeroMQ does not take the keys.
enum status worker_keys_apply(const struct worker_keys *, void *socket, struct error *);

#endif
