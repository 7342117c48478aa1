// The ZeroMQ side of the coordinator: a ROUTER for control messages of all workers and one XPUB per epoch for steps. Knows
// bytes and peers, not messages. The surprising decision: no send ever blocks; a peer that does not take what it is sent
// has failed, and so a pipe that is full is an answer and not a reason to wait.
#ifndef STAGECOACH_COORDINATOR_LINK_H
#define STAGECOACH_COORDINATOR_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/status.h"

struct link;

struct link_options {
	const char *run_dir;    // folder of mode 0700: ipc://RUN_DIR/control and ipc://RUN_DIR/steps-EPOCH
	const char *listen;     // HOST:PORT for workers of other hosts, NULL or "": none. Steps take the port above
	const char *key_file;   // CURVE keys of that address, see link_keys.h; needed beyond loopback
	size_t max_message_bytes;
};

// A connection to a worker, as ZeroMQ names it.
struct link_peer {
	uint8_t id[32];
	uint8_t id_len;
	uint8_t door; // 0: this host's socket, 1: the listening address
};

// STATUS_UNAVAILABLE: an address in use, naming it. STATUS_USAGE: listen beyond loopback without keys, bad key file.
enum status link_create(struct link **out, const struct link_options *, struct error *);
void link_destroy(struct link **);

// A new endpoint for steps; the old one is closed. endpoint[door] is what peers of that door subscribe to.
enum status link_begin_epoch(struct link *, uint32_t epoch, char endpoint[2][256], struct error *);
// Waits until a message, a closed connection, or one of the n <= 4 extra descriptors is readable, or the timeout passes.
void link_wait(struct link *, const int *fds, uint32_t n, unsigned timeout_ms);
// STATUS_OK: *data is borrowed until the next call. STATUS_ABSENT: nothing there.
enum status link_receive(struct link *, struct link_peer *from, const uint8_t **data, size_t *len);
// Whether some connection was closed since the last call.
bool link_disconnected(struct link *);
// STATUS_BUSY: its pipe is full. STATUS_CLOSED: it is gone.
enum status link_send(struct link *, const struct link_peer *, const uint8_t *data, size_t len);
// STATUS_BUSY: some follower's pipe is full; nobody got the message.
enum status link_broadcast(struct link *, const uint8_t *data, size_t len);

bool link_peer_equal(const struct link_peer *, const struct link_peer *);

#endif
