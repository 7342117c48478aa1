// The ZeroMQ side of the coordinator: a ROUTER for control messages of all workers and one XPUB per epoch for steps. Knows
// bytes and peers, not messages. The surprising decision: no send ever blocks; a peer that does not take what it is sent
// has failed, and so a pipe that is full is an answer and not a reason to wait.
#ifndef STAGECOACH_COORDINATOR_HUB_H
#define STAGECOACH_COORDINATOR_HUB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct hub;

struct hub_options {
	const char *run_dir;    // folder of mode 0700: ipc://RUN_DIR/control and ipc://RUN_DIR/steps-EPOCH
	const char *listen;     // HOST:PORT for workers of other hosts, NULL or "": none. Steps take a free port there
	const char *key_file;   // CURVE keys of that address, see hub_keys.h; needed beyond loopback, made if absent
	size_t max_message_bytes;
};

// A connection to a worker, as ZeroMQ names it.
struct hub_peer {
	uint8_t id[32];
	uint8_t id_len;
	uint8_t door; // 0: this host's socket, 1: the listening address
};

// STATUS_UNAVAILABLE: an address in use, naming it. STATUS_USAGE: listen beyond loopback without keys, bad key file.
enum status hub_create(struct hub **out, const struct hub_options *, struct error *);
void hub_destroy(struct hub **);

// A new endpoint for steps; the old one is closed. endpoint[door] is what peers of that door subscribe to.
enum status hub_begin_epoch(struct hub *, uint32_t epoch, char endpoint[2][256], struct error *);
// Waits until a message, a closed connection, or one of the n <= 4 extra descriptors is readable, or the timeout passes.
void hub_wait(struct hub *, const int *fds, uint32_t n, unsigned timeout_ms);
// STATUS_OK: *data is borrowed until the next call. STATUS_ABSENT: nothing there.
enum status hub_receive(struct hub *, struct hub_peer *from, const uint8_t **data, size_t *len);
// Whether some connection was closed since the last call.
bool hub_disconnected(struct hub *);
// STATUS_BUSY: its pipe is full. STATUS_CLOSED: it is gone.
enum status hub_send(struct hub *, const struct hub_peer *, const uint8_t *data, size_t len);
// STATUS_BUSY: some follower's pipe is full; nobody of its door got the message.
enum status hub_broadcast(struct hub *, const uint8_t *data, size_t len);

bool hub_peer_equal(const struct hub_peer *, const struct hub_peer *);

#endif
