// CURVE keys of a pipeline that takes workers of other hosts. A key file has lines `name key`, keys as 40 characters of
// ZeroMQ's Z85; the coordinator's has all four names, a worker's all but server-secret:
//   server-public, server-secret, client-public, client-secret
// The surprising decision: all workers of a pipeline share one client key, since whoever runs one runs them all; what
// counts is that a key is asked for at all, which ZeroMQ does only through a ZAP handler (hub_keys_guard).
#ifndef STAGECOACH_COORDINATOR_HUB_KEYS_H
#define STAGECOACH_COORDINATOR_HUB_KEYS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/status.h"

enum { HUB_KEY_CHARS = 40 };

struct hub_keys {
	char server_public[HUB_KEY_CHARS + 1], server_secret[HUB_KEY_CHARS + 1];
	char client_public[HUB_KEY_CHARS + 1], client_secret[HUB_KEY_CHARS + 1];
	uint8_t client[32]; // client_public as bytes
	void *context, *zap; // of the handler
	pthread_t thread;
	bool guarding;
};

// STATUS_USAGE: unreadable, readable by others than its owner, or a line that is not `name key`; names file and line.
enum status hub_keys_read(struct hub_keys *out, const char *path, struct error *);
// New keys, as the text of a coordinator's file (server_secret true) or of a worker's.
enum status hub_keys_write_new(const char *coordinator_path, const char *worker_path, struct error *);
// Answers ZeroMQ's questions about clients until hub_keys_unguard(), which comes before zmq_ctx_term().
enum status hub_keys_guard(struct hub_keys *, void *zmq_context, struct error *);
void hub_keys_unguard(struct hub_keys *);

#endif
