// Hidden states and sampled ids between stages. A transport is one file and one row: the first row that can join two
// devices is used. The surprising decision: an edge is directed and carries frames in step order only, so a frame needs
// no matching: what comes next is what was posted next, and anything else is an error.
#ifndef STAGECOACH_WORKER_TRANSPORT_H
#define STAGECOACH_WORKER_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#include "common/status.h"
#include "proto/message.h"

struct edge;

struct frame_header {          // little-endian on the wire, checked on arrival against what was posted
	uint32_t magic;
	uint32_t epoch;
	uint64_t step;
	uint32_t kind;         // enum frame_kind
	uint32_t bytes;        // of the payload
};
enum frame_kind { FRAME_HIDDEN = 1, FRAME_IDS = 2 };

struct transport {
	const char *name;      // "socket", "nccl"
	bool (*can_join)(enum device_kind from, enum device_kind to, const char *address);
	// Receiving end: listens (once per process; *address is what peers connect to), then accepts one edge per epoch.
	enum status (*listen)(void **listener, const char *folder_or_address, char *address, size_t address_size, struct error *);
	void (*close_listener)(void **listener);
	enum status (*accept)(void *listener, uint32_t epoch, enum frame_kind, unsigned timeout_ms, struct edge **out, struct error *);
	enum status (*connect)(const char *address, uint32_t epoch, enum frame_kind, unsigned timeout_ms, struct edge **out, struct error *);
	// Posts a receive ahead; buffers are filled in the order of posting while the caller computes.
	enum status (*post_receive)(struct edge *, uint64_t step, void *buffer, size_t bytes, struct error *);
	// Waits for the oldest posted receive. STATUS_CLOSED, STATUS_TIMEOUT, STATUS_INVALID (wrong frame).
	enum status (*wait_receive)(struct edge *, unsigned timeout_ms, struct error *);
	// Whether the waiter may keep its core awake around the time when data is due (there are cores enough); NULL: never.
	void (*set_spin)(struct edge *, bool may_spin);
	// Sends; the buffer may be reused when it returns.
	enum status (*send)(struct edge *, uint64_t step, const void *buffer, size_t bytes, struct error *);
	void (*abort)(struct edge *);   // from any thread: wakes every waiter with STATUS_CLOSED
	void (*close)(struct edge **);
};

extern const struct transport transport_socket;
const struct transport *transport_find(enum device_kind from, enum device_kind to, const char *address);

#endif
