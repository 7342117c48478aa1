// Shared by the files of the codec. Not for other folders.
#ifndef STAGECOACH_PROTO_MESSAGE_INTERNAL_H
#define STAGECOACH_PROTO_MESSAGE_INTERNAL_H

#include "proto/message.h"

// Bits of wire Step.flags.
enum { FLAG_TRUNCATE = 1, FLAG_SAMPLE = 2, FLAG_NOT_AHEAD = 4, FLAG_BY_REFERENCE = 8, FLAG_ALL = 15 };

struct chunk;
struct arena {
	struct chunk *chunks;
	uint8_t *at, *end;
	size_t left; // of the budget
	_Alignas(16) uint8_t first[8192];
};
void arena_init(struct arena *, size_t budget_bytes);
void *arena_alloc(void *arena, size_t bytes); // NULL beyond the budget; aligned to 16
void arena_free_one(void *arena, void *p);    // nothing; protobuf-c wants one
void arena_release(struct arena *);

// Every rule about a single message that plain C structs can break. limits may be NULL. STATUS_INVALID names the field.
enum status message_check(const struct message *, const struct message_limits *, struct error *);
// Most bytes that a message of this type may have on the wire.
size_t message_type_cap(enum message_type);

#endif
