#include <criterion/criterion.h>

#include "coordinator/block_pool.h"

static struct block_pool *pool_of(uint32_t n, uint32_t hash_bits)
{
	return block_pool_create(&(struct block_pool_options){.n_blocks = n, .block_size = 4, .hash_bits = hash_bits});
}

static struct block_key key_of(uint64_t parent, const uint32_t *tokens)
{
	return (struct block_key){.parent = parent, .tokens = tokens};
}

static const uint32_t A[4] = {1, 2, 3, 4}, B[4] = {5, 6, 7, 8};

Test(block_pool, gives_every_block_once_and_then_none)
{
	struct block_pool *p = pool_of(5, 0);
	bool seen[5] = {false};
	for (int i = 0; i < 5; i++) {
		uint32_t b = block_pool_take(p);
		cr_assert(b < 5 && !seen[b], "block %u", b);
		seen[b] = true;
	}
	cr_assert_eq(block_pool_take(p), BLOCK_NONE);
	cr_assert_eq(block_pool_free_count(p), 0);
	block_pool_release(p, 3);
	cr_assert_eq(block_pool_take(p), 3);
	block_pool_check(p);
	block_pool_destroy(&p);
	cr_assert_null(p);
	block_pool_destroy(&p);
}

Test(block_pool, releasing_a_shared_block_keeps_the_other_holder)
{
	struct block_pool *p = pool_of(2, 0);
	uint32_t b = block_pool_take(p);
	block_pool_hold(p, b);
	block_pool_release(p, b);
	cr_assert_eq(block_pool_holders(p, b), 1);
	cr_assert_eq(block_pool_free_count(p), 1);
	block_pool_release(p, b);
	cr_assert_eq(block_pool_free_count(p), 2);
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, a_published_block_is_found_by_parent_tokens_salt_and_scope_together)
{
	struct block_pool *p = pool_of(4, 0);
	uint32_t a = block_pool_take(p), b = block_pool_take(p);
	struct block_key ka = key_of(0, A);
	cr_assert_eq(block_pool_find(p, &ka), BLOCK_NONE);
	uint64_t ca = block_pool_publish(p, a, &ka);
	struct block_key kb = key_of(ca, B);
	block_pool_publish(p, b, &kb);
	cr_assert_eq(block_pool_find(p, &ka), a);
	cr_assert_eq(block_pool_find(p, &kb), b);
	struct block_key other = key_of(0, B);
	cr_assert_eq(block_pool_find(p, &other), BLOCK_NONE, "another parent");
	other = ka;
	other.salt = 1;
	cr_assert_eq(block_pool_find(p, &other), BLOCK_NONE, "another salt");
	other = ka;
	other.scope = 1;
	cr_assert_eq(block_pool_find(p, &other), BLOCK_NONE, "another scope");
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, equal_hashes_of_unequal_tokens_are_told_apart)
{
	struct block_pool *p = pool_of(64, 1); // one bit of hash: everything collides
	uint32_t blocks[64], tokens[64][4];
	for (uint32_t i = 0; i < 64; i++) {
		blocks[i] = block_pool_take(p);
		for (uint32_t k = 0; k < 4; k++)
			tokens[i][k] = i * 4 + k;
		struct block_key key = key_of(0, tokens[i]);
		block_pool_publish(p, blocks[i], &key);
	}
	for (uint32_t i = 0; i < 64; i++) {
		struct block_key key = key_of(0, tokens[i]);
		cr_assert_eq(block_pool_find(p, &key), blocks[i], "tokens %u", i);
	}
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, a_second_block_with_the_same_content_continues_the_first_ones_chain)
{
	struct block_pool *p = pool_of(4, 0);
	uint32_t first = block_pool_take(p), second = block_pool_take(p), child = block_pool_take(p);
	struct block_key ka = key_of(0, A);
	uint64_t content = block_pool_publish(p, first, &ka);
	cr_assert_eq(block_pool_publish(p, second, &ka), content);
	cr_assert_eq(block_pool_content(p, second), 0);
	cr_assert_eq(block_pool_find(p, &ka), first);
	struct block_key kb = key_of(content, B);
	block_pool_publish(p, child, &kb);
	cr_assert_eq(block_pool_find(p, &kb), child);
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, the_least_recently_freed_published_block_is_evicted_and_only_when_no_other_is_free)
{
	struct block_pool *p = pool_of(4, 0);
	uint32_t tokens[3][4] = {{1, 1, 1, 1}, {2, 2, 2, 2}, {3, 3, 3, 3}}, b[4];
	for (int i = 0; i < 4; i++)
		b[i] = block_pool_take(p);
	struct block_key keys[3];
	for (int i = 0; i < 3; i++) {
		keys[i] = key_of(0, tokens[i]);
		block_pool_publish(p, b[i], &keys[i]);
	}
	block_pool_release(p, b[1]);
	block_pool_release(p, b[3]); // never published
	block_pool_release(p, b[0]);
	block_pool_release(p, b[2]);
	cr_assert_eq(block_pool_free_count(p), 4);
	cr_assert_eq(block_pool_take(p), b[3]);
	// Used again: not the oldest any more.
	cr_assert_eq(block_pool_find(p, &keys[1]), b[1]);
	block_pool_hold(p, b[1]);
	block_pool_release(p, b[1]);
	cr_assert_eq(block_pool_take(p), b[0]);
	cr_assert_eq(block_pool_find(p, &keys[0]), BLOCK_NONE, "an evicted block is not found");
	cr_assert_eq(block_pool_find(p, &keys[1]), b[1]);
	cr_assert_eq(block_pool_take(p), b[2]);
	cr_assert_eq(block_pool_take(p), b[1]);
	cr_assert_eq(block_pool_take(p), BLOCK_NONE);
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, a_child_of_an_evicted_parent_is_not_found_under_the_parents_successor)
{
	struct block_pool *p = pool_of(2, 0);
	uint32_t parent = block_pool_take(p), child = block_pool_take(p);
	struct block_key ka = key_of(0, A);
	uint64_t content = block_pool_publish(p, parent, &ka);
	struct block_key kb = key_of(content, A);
	block_pool_publish(p, child, &kb);
	block_pool_release(p, parent);
	cr_assert_eq(block_pool_take(p), parent); // evicted; now holds something else
	struct block_key other = key_of(0, B);
	uint64_t successor = block_pool_publish(p, parent, &other);
	cr_assert_neq(successor, content);
	struct block_key wrong = key_of(successor, A);
	cr_assert_eq(block_pool_find(p, &wrong), BLOCK_NONE);
	block_pool_check(p);
	block_pool_destroy(&p);
}

Test(block_pool, holding_a_block_that_is_neither_held_nor_published_is_a_bug, .signal = 6)
{
	struct block_pool *p = pool_of(2, 0);
	block_pool_hold(p, 0);
}

Test(block_pool, releasing_a_free_block_is_a_bug, .signal = 6)
{
	struct block_pool *p = pool_of(2, 0);
	block_pool_release(p, 1);
}
