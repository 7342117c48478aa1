// The blocks of one KV group: who holds which, and which full blocks can serve another sequence with the same
// beginning. The surprising decision: a published block is named by a content id that is never used twice, and a child
// names its parent by that id, so that comparing one block's tokens proves the whole prefix equal; a hash only finds
// candidates.
#ifndef STAGECOACH_COORDINATOR_BLOCK_POOL_H
#define STAGECOACH_COORDINATOR_BLOCK_POOL_H

#include <stdint.h>

struct block_pool;

enum { BLOCK_NONE = UINT32_MAX };

struct block_pool_options {
	uint32_t n_blocks;
	uint32_t block_size; // tokens of a block
	uint32_t hash_bits;  // bits of the hash in use; 0 = all. Fewer make collisions for tests
};

// What a full block holds. Blocks are shared only where everything here is equal.
struct block_key {
	uint64_t parent;        // content id of the block before it; 0 = first of its sequence
	uint64_t salt;          // the tenant's
	uint64_t scope;         // 0 = anyone with this salt; else only within this request
	const uint32_t *tokens; // [block_size], borrowed for the call
};

struct block_pool *block_pool_create(const struct block_pool_options *);
void block_pool_destroy(struct block_pool **);

// Takes a block for one holder, evicting the least recently freed published one if no other is free.
// BLOCK_NONE: every block is held.
uint32_t block_pool_take(struct block_pool *);
// One more holder. The block is held, or free and still published (as block_pool_find() gave it).
void block_pool_hold(struct block_pool *, uint32_t block);
// One holder less. With none left the block is free; a published one stays findable until it is taken.
void block_pool_release(struct block_pool *, uint32_t block);

// The published block of this key, BLOCK_NONE if there is none. Does not hold it.
uint32_t block_pool_find(const struct block_pool *, const struct block_key *);
// Makes a held block findable. Returns the content id to name as parent of the next block: its own, or that of a block
// published earlier with the same key (then this one stays unpublished).
uint64_t block_pool_publish(struct block_pool *, uint32_t block, const struct block_key *);
uint64_t block_pool_content(const struct block_pool *, uint32_t block); // 0: not published

uint32_t block_pool_holders(const struct block_pool *, uint32_t block);
uint32_t block_pool_free_count(const struct block_pool *); // held by nobody; published ones included
uint32_t block_pool_count(const struct block_pool *);
// Test support: aborts if lists, counts or table disagree.
void block_pool_check(const struct block_pool *);

#endif
