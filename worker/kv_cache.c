// See kv_cache.h. Pages of a layer are two allocations (K and V) of [n_blocks][n_kv_heads][block_size][head_dim]; the
// backend gives them zeroed and untouched, so a large cache costs memory only as it fills, but is counted in full.
#include "worker/kv_cache.h"

#include <stdlib.h>
#include <string.h>

struct kv_slot {
	bool active;
	bool fresh;                        // no rows yet: its first rows may start behind shared blocks
	uint32_t length;                   // tokens
	uint32_t n_blocks[MAX_KV_GROUPS];
};

struct kv_pages { void *k, *v; };

struct kv_cache {
	const struct ops *ops;
	struct ops_context *context;
	int n_layers, block_size, n_kv_heads, head_dim;
	enum dtype dtype;
	uint32_t n_groups, n_blocks[MAX_KV_GROUPS];
	uint32_t max_seqs, max_context;
	uint32_t table_stride;             // blocks of the longest sequence
	uint64_t bytes;
	uint8_t *layer_group;              // [n_layers]
	struct kv_pages *pages;            // [n_layers]
	struct kv_slot *slots;             // [max_seqs]
	int32_t *tables;                   // [n_groups][max_seqs][table_stride]
};

uint64_t kv_cache_block_bytes(enum dtype dtype, int block_size, int n_kv_heads, int head_dim, int n_layers)
{
	if (dtype != DTYPE_F32 && dtype != DTYPE_F16 && dtype != DTYPE_BF16)
		return 0;
	uint64_t bytes = (uint64_t)dtype_info(dtype)->block_bytes * 2;
	int factors[] = {block_size, n_kv_heads, head_dim, n_layers};
	for (int i = 0; i < 4; i++)
		if (factors[i] < 0 || __builtin_mul_overflow(bytes, (uint64_t)factors[i], &bytes))
			return 0;
	return bytes;
}

enum status kv_cache_create(struct kv_cache **out, const struct kv_cache_options *o, struct error *e)
{
	enum status status = STATUS_OK;
	*out = NULL;
	uint64_t layer_block_bytes = kv_cache_block_bytes(o->dtype, o->block_size, o->n_kv_heads, o->head_dim, 1);
	if (layer_block_bytes == 0 || o->n_groups < 1 || o->n_groups > MAX_KV_GROUPS || o->max_seqs < 1 ||
	    o->max_context < 1)
		return error_set(e, STATUS_REFUSED, "KV cache of type %s, block size %d, %d heads of %d, %u groups",
		                 dtype_info(o->dtype)->name, o->block_size, o->n_kv_heads, o->head_dim, o->n_groups);

	struct kv_cache *c = xcalloc(1, sizeof *c);
	c->ops = o->ops;
	c->context = o->context;
	c->n_layers = o->n_layers;
	c->block_size = o->block_size;
	c->n_kv_heads = o->n_kv_heads;
	c->head_dim = o->head_dim;
	c->dtype = o->dtype;
	c->n_groups = o->n_groups;
	memcpy(c->n_blocks, o->n_blocks, sizeof c->n_blocks);
	c->max_seqs = o->max_seqs;
	c->max_context = o->max_context;
	c->table_stride = (o->max_context + (uint32_t)o->block_size - 1) / (uint32_t)o->block_size;
	c->layer_group = xcalloc((unsigned long)o->n_layers + 1, 1);
	c->pages = xcalloc((unsigned long)o->n_layers + 1, sizeof *c->pages);
	c->slots = xcalloc(o->max_seqs, sizeof *c->slots);
	c->tables = xcalloc((unsigned long)c->n_groups * c->max_seqs * c->table_stride, sizeof *c->tables);
	for (int l = 0; l < o->n_layers; l++) {
		uint32_t group = o->layer_group ? o->layer_group[l] : 0;
		ASSERT(group < c->n_groups);
		c->layer_group[l] = (uint8_t)group;
		uint64_t half = layer_block_bytes / 2;
		if (__builtin_mul_overflow(half, (uint64_t)c->n_blocks[group], &half)) {
			status = error_set(e, STATUS_REFUSED, "%u KV blocks overflow", c->n_blocks[group]);
			goto out;
		}
		c->pages[l].k = c->ops->alloc(c->context, half);
		c->pages[l].v = c->ops->alloc(c->context, half);
		if (!c->pages[l].k || !c->pages[l].v) {
			status = error_set(e, STATUS_REFUSED, "no memory for KV: %llu bytes for each of %d layers",
			                   (unsigned long long)half * 2, o->n_layers);
			goto out;
		}
		c->bytes += half * 2;
	}
out:
	if (status == STATUS_OK)
		*out = c;
	else
		kv_cache_destroy(&c);
	return status;
}

void kv_cache_destroy(struct kv_cache **cache)
{
	struct kv_cache *c = *cache;
	if (!c)
		return;
	for (int l = 0; l < c->n_layers; l++) {
		if (c->pages[l].v)
			c->ops->free(c->context, c->pages[l].v);
		if (c->pages[l].k)
			c->ops->free(c->context, c->pages[l].k);
	}
	free(c->tables);
	free(c->slots);
	free(c->pages);
	free(c->layer_group);
	free(c);
	*cache = NULL;
}

struct kv_view kv_cache_view(const struct kv_cache *c, int layer)
{
	ASSERT(layer >= 0 && layer < c->n_layers);
	return (struct kv_view){.k = c->pages[layer].k, .v = c->pages[layer].v, .dtype = c->dtype,
	                        .block_size = c->block_size, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim};
}

int kv_cache_layer_group(const struct kv_cache *c, int layer)
{
	return c->layer_group[layer];
}

uint32_t kv_cache_group_count(const struct kv_cache *c)
{
	return c->n_groups;
}

uint64_t kv_cache_bytes(const struct kv_cache *c)
{
	return c->bytes;
}

static int32_t *slot_table(const struct kv_cache *c, uint32_t slot, uint32_t group)
{
	return c->tables + ((size_t)group * c->max_seqs + slot) * c->table_stride;
}

static enum status find_active(struct kv_cache *c, uint32_t slot, struct kv_slot **out, struct error *e)
{
	if (slot >= c->max_seqs)
		return error_set(e, STATUS_INVALID, "slot %u, but there are %u", slot, c->max_seqs);
	if (!c->slots[slot].active)
		return error_set(e, STATUS_INVALID, "slot %u is not in use", slot);
	*out = &c->slots[slot];
	return STATUS_OK;
}

enum status kv_cache_begin(struct kv_cache *c, uint32_t slot, struct error *e)
{
	if (slot >= c->max_seqs)
		return error_set(e, STATUS_INVALID, "new slot %u, but there are %u", slot, c->max_seqs);
	if (c->slots[slot].active)
		return error_set(e, STATUS_INVALID, "new slot %u is in use", slot);
	c->slots[slot] = (struct kv_slot){.active = true, .fresh = true};
	return STATUS_OK;
}

enum status kv_cache_end(struct kv_cache *c, uint32_t slot, struct error *e)
{
	struct kv_slot *s = NULL;
	TRY(find_active(c, slot, &s, e));
	s->active = false;
	return STATUS_OK;
}

enum status kv_cache_append_blocks(struct kv_cache *c, uint32_t slot, uint32_t group, const uint32_t *ids, uint32_t n,
                                   struct error *e)
{
	struct kv_slot *s = NULL;
	TRY(find_active(c, slot, &s, e));
	if (group >= c->n_groups)
		return error_set(e, STATUS_INVALID, "slot %u: KV group %u of %u", slot, group, c->n_groups);
	if (n > c->table_stride - s->n_blocks[group])
		return error_set(e, STATUS_INVALID, "slot %u: %u blocks and %u more, a table holds %u", slot,
		                 s->n_blocks[group], n, c->table_stride);
	int32_t *table = slot_table(c, slot, group) + s->n_blocks[group];
	for (uint32_t i = 0; i < n; i++) {
		if (ids[i] >= c->n_blocks[group])
			return error_set(e, STATUS_INVALID, "slot %u: block %u of %u", slot, ids[i], c->n_blocks[group]);
		table[i] = (int32_t)ids[i];
	}
	s->n_blocks[group] += n;
	return STATUS_OK;
}

enum status kv_cache_truncate(struct kv_cache *c, uint32_t slot, uint32_t length, struct error *e)
{
	struct kv_slot *s = NULL;
	TRY(find_active(c, slot, &s, e));
	if (s->fresh)
		return STATUS_OK; // nothing of it is in the cache but shared blocks
	if (length > s->length)
		return error_set(e, STATUS_INVALID, "slot %u: cut to %u tokens, has %u", slot, length, s->length);
	s->length = length;
	uint32_t keep = (length + (uint32_t)c->block_size - 1) / (uint32_t)c->block_size;
	for (uint32_t g = 0; g < c->n_groups; g++)
		if (s->n_blocks[g] > keep)
			s->n_blocks[g] = keep;
	return STATUS_OK;
}

enum status kv_cache_extend(struct kv_cache *c, uint32_t slot, uint32_t start, uint32_t n_tokens, struct error *e)
{
	struct kv_slot *s = NULL;
	TRY(find_active(c, slot, &s, e));
	if (!s->fresh && start != s->length)
		return error_set(e, STATUS_INVALID, "slot %u: rows start at %u, its length is %u", slot, start, s->length);
	if (n_tokens == 0 || start > c->max_context || n_tokens > c->max_context - start)
		return error_set(e, STATUS_INVALID, "slot %u: %u tokens at %u, the context is %u", slot, n_tokens, start,
		                 c->max_context);
	for (uint32_t g = 0; g < c->n_groups; g++)
		if ((uint64_t)s->n_blocks[g] * (uint64_t)c->block_size < (uint64_t)start + n_tokens)
			return error_set(e, STATUS_INVALID, "slot %u: %u tokens do not fit its %u blocks of %d", slot,
			                 start + n_tokens, s->n_blocks[g], c->block_size);
	s->fresh = false;
	s->length = start + n_tokens;
	return STATUS_OK;
}

bool kv_cache_active(const struct kv_cache *c, uint32_t slot)
{
	return slot < c->max_seqs && c->slots[slot].active;
}

uint32_t kv_cache_length(const struct kv_cache *c, uint32_t slot)
{
	return c->slots[slot].length;
}

const int32_t *kv_cache_table(const struct kv_cache *c, uint32_t slot, uint32_t group, uint32_t *n_blocks)
{
	*n_blocks = c->slots[slot].n_blocks[group];
	return slot_table(c, slot, group);
}
