// Who the workers are: which connection is which stage, what each said at its hello, was told, and reported last. The
// surprising decision: a worker is found by its connection only; what messages say about themselves is not believed.
#ifndef STAGECOACH_COORDINATOR_REGISTRY_H
#define STAGECOACH_COORDINATOR_REGISTRY_H

#include "coordinator/hub.h"
#include "proto/message.h"

struct registry_worker {
	bool connected;            // the fields below are of a living process
	bool local;                // came through this host's socket
	struct hub_peer peer;
	struct message_hello hello;
	struct message_assign assign;
	bool has_budget;
	struct message_budget budget;
	struct message_heartbeat heartbeat; // without events
	uint64_t heartbeat_us;     // when it came; 0 none
	uint64_t done_bytes, total_bytes; // of loading
	uint64_t load_begin_us, load_said_us; // when it got its stage, and when its progress was logged last
	double busy_before_s, wait_before_s; // of processes before this one
};

enum { REGISTRY_MAX_BANNED = 64 };

struct registry {
	uint32_t n_workers, n_local; // workers n_local.. come from other hosts, in order of arrival
	struct registry_worker workers[MAX_STAGES];
	char labels[MAX_STAGES][96]; // "stage 1 (cpu on host)"
	struct hub_peer banned[REGISTRY_MAX_BANNED]; // a ring of peers that sent nonsense
	uint32_t next_banned;
};

void registry_init(struct registry *, uint32_t n_workers, uint32_t n_local);
// The worker of this connection, or NULL.
struct registry_worker *registry_find(struct registry *, const struct hub_peer *);
uint32_t registry_index(const struct registry *, const struct registry_worker *);
// Takes a hello. STATUS_INVALID: no place for it (index out of range, or more workers of other hosts than expected).
enum status registry_hello(struct registry *, const struct hub_peer *, const struct message_hello *, uint32_t *index,
                           struct error *);
void registry_forget(struct registry *, uint32_t index); // its process is gone
void registry_ban(struct registry *, const struct hub_peer *);
bool registry_is_banned(const struct registry *, const struct hub_peer *);

#endif
