// Text to token ids and back, equal to Hugging Face's `tokenizers` on every input. Byte-level BPE from GGUF metadata and
// from tokenizer.json. The surprising decision: letters, digits and marks come from a generated table of a stated
// Unicode version and not from PCRE2's own, since Debian's is older than the reference's.
#ifndef STAGECOACH_COORDINATOR_TOKENIZER_H
#define STAGECOACH_COORDINATOR_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/model.h"
#include "common/status.h"

struct tokenizer; // immutable after creation: safe from any thread

// Reads what the model brings. STATUS_REFUSED names an unknown tokenizer model, pre-tokenizer, normalizer or a
// vocabulary that disagrees with itself. A model without vocabulary (tokenizer.ggml.model = no_vocab, or dummy) gives
// a tokenizer whose pieces are "<id>" and whose encode fails with STATUS_INVALID ("this model has no vocabulary ...").
enum status tokenizer_create(struct tokenizer **out, const struct model *, struct error *);
void tokenizer_destroy(struct tokenizer **);

struct token_list {
	uint32_t *ids; // caller frees; grown by encode
	size_t count, capacity;
};

struct encode_options {
	bool add_special;   // BOS (exactly one) and what else the model's post-processor adds
	bool parse_special; // control tokens in the text become their ids; false: they stay text
};

// Appends the ids of text[0..len) to out. Invalid UTF-8 is treated as `tokenizers` does after Python's
// decode(errors="replace"): each maximal invalid part becomes U+FFFD. Time grows no faster than n log n.
enum status tokenizer_encode(const struct tokenizer *, const char *text, size_t len, const struct encode_options *,
                             struct token_list *out, struct error *);

// Text in parts of which some come from a client (message content). The parts are encoded as one text, so that the ids
// are those of the whole, but a control token that overlaps a part with from_content stays text.
struct text_segment { const char *text; size_t len; bool from_content; };
enum status tokenizer_encode_segments(const struct tokenizer *, const struct text_segment *segments, size_t count,
                                      bool add_special, struct token_list *out, struct error *);

uint32_t tokenizer_vocab_size(const struct tokenizer *);
// The bytes that a token stands for (not NUL-terminated; may be part of a character); *len = 0 for control tokens when
// skip_special. Borrowed for the tokenizer's life.
const char *tokenizer_token_bytes(const struct tokenizer *, uint32_t id, bool skip_special, size_t *len);
bool tokenizer_is_control(const struct tokenizer *, uint32_t id);
// Exact lookup of a special or ordinary token by its text; false if there is none.
bool tokenizer_find(const struct tokenizer *, const char *text, uint32_t *id);
const struct model_generation *tokenizer_generation(const struct tokenizer *); // bos, eos as resolved by the vocabulary

// Texts that chat templates get as bos_token, eos_token, unk_token and pad_token; "" where the model names none.
enum tokenizer_special { TOKENIZER_BOS, TOKENIZER_EOS, TOKENIZER_UNK, TOKENIZER_PAD, TOKENIZER_SPECIAL_COUNT };
const char *tokenizer_special_text(const struct tokenizer *, enum tokenizer_special);

// Incremental decoding of one answer: bytes of tokens are gathered and given out only up to the last whole UTF-8
// character, so joined pieces equal the whole. An invalid sequence comes out as U+FFFD as soon as it cannot become valid.
struct detokenizer {
	const struct tokenizer *tokenizer;
	bool skip_special;
	unsigned char pending[8]; // beginning of an unfinished character
	unsigned pending_len;
};
void detokenizer_init(struct detokenizer *, const struct tokenizer *, bool skip_special);
// Appends the text that became certain through `id` to buf (grown by realloc; *len counts, no NUL).
void detokenizer_push(struct detokenizer *, uint32_t id, char **buf, size_t *len, size_t *capacity);
// At the end of the answer: what is pending comes out as U+FFFD.
void detokenizer_finish(struct detokenizer *, char **buf, size_t *len, size_t *capacity);

#endif
