// A bump arena with a budget: protobuf-c's allocator while decoding, scratch while encoding. The surprising decision:
// freeing one allocation does nothing; the whole is dropped at once, so a decoded tree is never walked.
#include <stdlib.h>

#include "proto/message_internal.h"

struct chunk { struct chunk *next; };

void arena_init(struct arena *a, size_t budget)
{
	a->chunks = NULL;
	a->at = a->first;
	a->end = a->first + sizeof a->first;
	a->left = budget;
}

void *arena_alloc(void *user, size_t bytes)
{
	struct arena *a = user;
	if (bytes > a->left)
		return NULL;
	bytes = (bytes + 15) & ~(size_t)15;
	if (bytes > (size_t)(a->end - a->at)) {
		size_t n = bytes > 64 << 10 ? bytes : 64 << 10;
		struct chunk *c = malloc(n + 16);
		if (!c)
			return NULL;
		c->next = a->chunks;
		a->chunks = c;
		a->at = (uint8_t *)c + 16;
		a->end = a->at + n;
	}
	a->left -= bytes < a->left ? bytes : a->left;
	void *p = a->at;
	a->at += bytes;
	return p;
}

void arena_free_one(void *user, void *p)
{
	(void)user;
	(void)p;
}

void arena_release(struct arena *a)
{
	while (a->chunks) {
		struct chunk *c = a->chunks;
		a->chunks = c->next;
		free(c);
	}
}
