// What tokenizer_gguf.c and tokenizer_json.c fill and tokenizer.c uses. A tokenizer is built in one order: tokens, then
// tokenizer_index_vocabulary(), merges, added tokens, tokenizer_finish(); after that it never changes, but for the
// one-byte answers in `whole`, which any thread may write since all write the same.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_INTERNAL_H
#define STAGECOACH_COORDINATOR_TOKENIZER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/gguf.h"
#include "coordinator/pretokenizer.h"
#include "coordinator/tokenizer.h"
#include "coordinator/tokenizer_normalize.h"

#define NO_TOKEN UINT32_MAX
enum { TOKENIZER_MAX_NORMALIZERS = 4, TOKENIZER_MAX_SPECIALS = 16, TOKENIZER_MAX_VOCABULARY = 1 << 20 };

struct token {
	const char *text;   // as the vocabulary spells it; NULL where there is no such id
	const char *bytes;  // what it stands for
	uint32_t text_len, bytes_len;
	bool control;       // special: never matched as text when specials are not parsed, not shown
	bool in_model;      // known to the merges, and not only added
};

struct added_token {
	uint32_t id;
	const char *match;  // its text, normalised where it is matched in normalised text
	uint32_t match_len;
	bool control, normalized, lstrip, rstrip, single_word;
};

struct string_map { // ids by a string of the token, open addressing
	uint32_t *slots;
	size_t mask;
};

struct merge { uint32_t left, right, rank, result; };
struct merge_map {
	struct merge *slots; // left == NO_TOKEN: free
	size_t mask;
};

struct trie_node { uint32_t child, sibling, added; uint8_t byte; };
struct added_trie {
	struct trie_node *nodes;
	size_t count, capacity;
	uint32_t root[256]; // 0: none
};

struct tokenizer {
	bool no_vocabulary;
	uint32_t vocab_size;
	struct token *tokens;
	struct string_map by_text, by_bytes; // of tokens in the model
	struct string_map added_by_text;
	struct merge_map merges;
	uint32_t byte_ids[256];        // token of a byte, or NO_TOKEN
	uint32_t fallback_ids[256][2]; // of a byte's printable character, with byte_fallback
	uint8_t fallback_count[256];
	uint32_t unknown_id;           // NO_TOKEN: unknown bytes vanish
	bool fuse_unknown, ignore_merges;
	uint8_t *whole;                // per token: 0 not known, 1 its bytes merge to it alone, 2 they do not
	struct added_token *added;
	size_t added_count;
	struct added_trie tries[2];    // on the raw text, on the normalised text
	enum normal_form normalizers[TOKENIZER_MAX_NORMALIZERS];
	int normalizer_count;
	struct pretokenizer *pretokenizer;
	uint32_t prefix[TOKENIZER_MAX_SPECIALS], suffix[TOKENIZER_MAX_SPECIALS];
	int prefix_count, suffix_count;
	struct model_generation generation;
	const char *specials[TOKENIZER_SPECIAL_COUNT]; // texts, NULL: none
	char *arena;                   // all strings
	size_t arena_count, arena_capacity;
	char **arenas;
};

struct tokenizer *tokenizer_allocate(uint32_t vocab_size);
// A copy that lives as long as the tokenizer.
const char *tokenizer_keep(struct tokenizer *, const char *text, size_t len);
void tokenizer_set_token(struct tokenizer *, uint32_t id, const char *text, size_t len, bool in_model);
// Maps of the tokens in the model, and the tokens of single bytes.
void tokenizer_index_vocabulary(struct tokenizer *, bool byte_fallback);
void tokenizer_merges_reserve(struct tokenizer *, size_t count);
// left and right as the vocabulary spells them. STATUS_REFUSED if one, or their union, is no token.
enum status tokenizer_add_merge(struct tokenizer *, uint32_t rank, const char *left, size_t left_len, const char *right,
                                size_t right_len, struct error *);
// "left right", as both formats may write it.
enum status tokenizer_add_merge_line(struct tokenizer *, uint32_t rank, const char *line, size_t len, struct error *);
void tokenizer_add_added(struct tokenizer *, uint32_t id, struct added_token settings);
void tokenizer_finish(struct tokenizer *);

uint32_t tokenizer_find_text(const struct tokenizer *, const char *text, size_t len); // of the model
uint32_t tokenizer_find_bytes(const struct tokenizer *, const uint8_t *bytes, size_t len);
uint32_t tokenizer_find_added(const struct tokenizer *, const char *text, size_t len);
// Normalised by all normalizers; NULL if that changes nothing.
uint8_t *tokenizer_normalize(const struct tokenizer *, const uint8_t *text, size_t len, size_t *out_len);
void token_list_push(struct token_list *, uint32_t id);

struct bpe_scratch { void *symbols; size_t symbol_capacity; void *heap; size_t heap_capacity; };
// Appends the tokens of one piece.
void bpe_encode(const struct tokenizer *, const uint8_t *piece, size_t len, struct bpe_scratch *, struct token_list *);
void bpe_scratch_free(struct bpe_scratch *);

// A match of an added token.
struct added_match { size_t start, end; const struct added_token *token; };
struct byte_range { size_t from, to; };
struct added_search {
	const uint8_t *text;
	size_t len;
	bool parse_special;
	const struct byte_range *forbidden; // sorted; a control token that overlaps one stays text
	size_t forbidden_count;
	size_t next;    // where the search goes on
	size_t taken;   // end of the last match with the spaces that it took
};
bool added_next(const struct tokenizer *, int trie, struct added_search *, struct added_match *);
void added_index(struct tokenizer *);

// The two formats, pure over what they are given. Both copy all they keep.
enum status tokenizer_from_gguf(struct tokenizer **out, const struct gguf *, struct error *);
enum status tokenizer_from_json(struct tokenizer **out, const char *data, size_t len, struct error *);

#endif
