// Owns reference counts, the free list and the table of published blocks of one KV group. The surprising decision: one
// list serves as free list and as LRU order: blocks nobody can find go to its front, published ones to its back, so
// that taking from the front evicts a published block only when no other is free.
#include "coordinator/block_pool.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"
#include "coordinator/planted.h"

struct block {
	uint32_t holders;
	uint32_t prev, next; // free list
	uint32_t chain;      // next of its bucket
	uint64_t content;    // 0: not published
	uint64_t parent, salt, scope, hash;
};

struct block_pool {
	uint32_t n_blocks, block_size, n_free;
	uint32_t front, back;
	uint32_t bucket_mask;
	uint64_t hash_mask;
	uint64_t last_content;
	uint32_t *buckets;    // [bucket_mask + 1] first block
	uint32_t *tokens;     // [n_blocks][block_size] of published blocks
	struct block *blocks; // [n_blocks]
};

static uint64_t mix(uint64_t h, uint64_t v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ull;
	return h ^ (h >> 29);
}

static uint64_t key_hash(const struct block_pool *p, const struct block_key *k)
{
	uint64_t h = mix(mix(mix(0x5851f42d4c957f2dull, k->parent), k->salt), k->scope);
	for (uint32_t i = 0; i < p->block_size; i++)
		h = mix(h, k->tokens[i]);
	return mix(h, h >> 32) & p->hash_mask;
}

static void list_remove(struct block_pool *p, uint32_t b)
{
	struct block *x = &p->blocks[b];
	if (x->prev == BLOCK_NONE)
		p->front = x->next;
	else
		p->blocks[x->prev].next = x->next;
	if (x->next == BLOCK_NONE)
		p->back = x->prev;
	else
		p->blocks[x->next].prev = x->prev;
	x->prev = x->next = BLOCK_NONE;
	p->n_free--;
}

static void list_push(struct block_pool *p, uint32_t b, bool at_back)
{
	struct block *x = &p->blocks[b];
	x->prev = at_back ? p->back : BLOCK_NONE;
	x->next = at_back ? BLOCK_NONE : p->front;
	if (x->prev == BLOCK_NONE)
		p->front = b;
	else
		p->blocks[x->prev].next = b;
	if (x->next == BLOCK_NONE)
		p->back = b;
	else
		p->blocks[x->next].prev = b;
	p->n_free++;
}

static void unpublish(struct block_pool *p, uint32_t b)
{
	struct block *x = &p->blocks[b];
	uint32_t *link = &p->buckets[x->hash & p->bucket_mask];
	while (*link != b)
		link = &p->blocks[*link].chain;
	*link = x->chain;
	x->chain = BLOCK_NONE;
	x->content = 0;
}

struct block_pool *block_pool_create(const struct block_pool_options *o)
{
	ASSERT(o->block_size > 0);
	struct block_pool *p = xcalloc(1, sizeof *p);
	p->n_blocks = o->n_blocks;
	p->block_size = o->block_size;
	p->hash_mask = o->hash_bits == 0 || o->hash_bits >= 64 ? UINT64_MAX : (1ull << o->hash_bits) - 1;
	uint64_t buckets = 16;
	while (buckets < (uint64_t)o->n_blocks * 2 && buckets < 1u << 31)
		buckets *= 2;
	p->bucket_mask = (uint32_t)(buckets - 1);
	p->buckets = xmalloc(buckets * sizeof *p->buckets);
	memset(p->buckets, 0xff, buckets * sizeof *p->buckets);
	p->tokens = xmalloc(((uint64_t)o->n_blocks * o->block_size + 1) * sizeof *p->tokens);
	p->blocks = xcalloc((uint64_t)o->n_blocks + 1, sizeof *p->blocks);
	p->front = p->back = BLOCK_NONE;
	for (uint32_t b = 0; b < o->n_blocks; b++) {
		p->blocks[b].chain = BLOCK_NONE;
		list_push(p, b, true);
	}
	return p;
}

void block_pool_destroy(struct block_pool **pool)
{
	struct block_pool *p = *pool;
	if (p == NULL)
		return;
	free(p->buckets);
	free(p->tokens);
	free(p->blocks);
	free(p);
	*pool = NULL;
}

uint32_t block_pool_take(struct block_pool *p)
{
	uint32_t b = p->front;
	if (b == BLOCK_NONE)
		return BLOCK_NONE;
	list_remove(p, b);
	if (p->blocks[b].content != 0 && !PLANTED(STAYS_PUBLISHED))
		unpublish(p, b);
	p->blocks[b].holders = 1;
	return b;
}

void block_pool_hold(struct block_pool *p, uint32_t b)
{
	ASSERT(b < p->n_blocks);
	if (p->blocks[b].holders == 0) {
		ASSERT(p->blocks[b].content != 0);
		list_remove(p, b);
	}
	p->blocks[b].holders++;
}

void block_pool_release(struct block_pool *p, uint32_t b)
{
	ASSERT(b < p->n_blocks && p->blocks[b].holders > 0);
	if (--p->blocks[b].holders == 0)
		list_push(p, b, p->blocks[b].content != 0);
}

static uint32_t find(const struct block_pool *p, const struct block_key *k, uint64_t hash)
{
	for (uint32_t b = p->buckets[hash & p->bucket_mask]; b != BLOCK_NONE; b = p->blocks[b].chain) {
		const struct block *x = &p->blocks[b];
		if (x->hash == hash && x->parent == k->parent && x->salt == k->salt && x->scope == k->scope &&
		    memcmp(p->tokens + (size_t)b * p->block_size, k->tokens, p->block_size * sizeof *k->tokens) == 0)
			return b;
	}
	return BLOCK_NONE;
}

uint32_t block_pool_find(const struct block_pool *p, const struct block_key *k)
{
	return find(p, k, key_hash(p, k));
}

uint64_t block_pool_publish(struct block_pool *p, uint32_t b, const struct block_key *k)
{
	struct block *x = &p->blocks[b];
	ASSERT(b < p->n_blocks && x->holders > 0 && x->content == 0);
	uint64_t hash = key_hash(p, k);
	uint32_t same = find(p, k, hash);
	if (same != BLOCK_NONE)
		return p->blocks[same].content;
	x->parent = k->parent;
	x->salt = k->salt;
	x->scope = k->scope;
	x->hash = hash;
	x->content = ++p->last_content;
	memcpy(p->tokens + (size_t)b * p->block_size, k->tokens, p->block_size * sizeof *k->tokens);
	x->chain = p->buckets[hash & p->bucket_mask];
	p->buckets[hash & p->bucket_mask] = b;
	return x->content;
}

uint64_t block_pool_content(const struct block_pool *p, uint32_t b)
{
	return p->blocks[b].content;
}

uint32_t block_pool_holders(const struct block_pool *p, uint32_t b)
{
	return p->blocks[b].holders;
}

uint32_t block_pool_free_count(const struct block_pool *p)
{
	return p->n_free;
}

uint32_t block_pool_count(const struct block_pool *p)
{
	return p->n_blocks;
}

void block_pool_check(const struct block_pool *p)
{
	uint32_t n_free = 0, n_idle = 0, n_published = 0, n_found = 0;
	bool seen_published = false;
	for (uint32_t b = p->front, prev = BLOCK_NONE; b != BLOCK_NONE; prev = b, b = p->blocks[b].next) {
		ASSERT(b < p->n_blocks && p->blocks[b].holders == 0 && p->blocks[b].prev == prev);
		ASSERT(!seen_published || p->blocks[b].content != 0);
		seen_published = p->blocks[b].content != 0;
		ASSERT(++n_free <= p->n_blocks);
	}
	for (uint32_t b = 0; b < p->n_blocks; b++) {
		n_idle += p->blocks[b].holders == 0;
		n_published += p->blocks[b].content != 0;
	}
	for (uint64_t i = 0; i <= p->bucket_mask; i++) {
		for (uint32_t b = p->buckets[i]; b != BLOCK_NONE; b = p->blocks[b].chain) {
			ASSERT(p->blocks[b].content != 0 && (p->blocks[b].hash & p->bucket_mask) == i);
			ASSERT(++n_found <= p->n_blocks);
		}
	}
	ASSERT(n_free == p->n_free && n_idle == n_free && n_found == n_published);
}
