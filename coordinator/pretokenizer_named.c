// The pre-tokenizers that GGUF names in tokenizer.ggml.pre: patterns as the models' own tokenizer.json files have them.
// Names that mean the same share a row's patterns; a name that is not here is refused.
#include "coordinator/pretokenizer.h"

#include <string.h>

#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define LLAMA3 "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" \
	"\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2 "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" \
	"\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" \
	"[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}|" \
	" ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEKKEN "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*|\\p{N}|" \
	" ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

const char pretokenizer_gpt2_pattern[] = GPT2;

enum { NFC = 1, IGNORE_MERGES = 2, DIGITS = 4 };

static const struct {
	const char *name;
	int flags;
	const char *patterns[4]; // in order, each an isolated split, after DIGITS
} named[] = {
	{"smollm", DIGITS, {GPT2}},
	{"starcoder", DIGITS, {GPT2}},
	{"refact", DIGITS, {GPT2}},
	{"command-r", DIGITS | NFC, {GPT2}},
	{"codeshell", DIGITS, {GPT2}},
	{"gpt-2", 0, {GPT2}},
	{"phi-2", 0, {GPT2}},
	{"mpt", NFC, {GPT2}},
	{"olmo", NFC, {GPT2}},
	{"llama-bpe", IGNORE_MERGES, {LLAMA3}},
	{"llama3", IGNORE_MERGES, {LLAMA3}},
	{"llama-v3", IGNORE_MERGES, {LLAMA3}},
	{"dbrx", 0, {LLAMA3}},
	{"smaug-bpe", IGNORE_MERGES, {LLAMA3}},
	{"qwen2", NFC, {QWEN2}},
	{"deepseek-r1-qwen", NFC, {QWEN2}},
	{"gpt-4o", 0, {O200K}},
	{"llama4", 0, {O200K}},
	{"tekken", IGNORE_MERGES, {TEKKEN}},
	// What files without a better name mean: punctuation, GPT-2's words, and numbers in threes.
	{"default", 0, {"[\\p{P}\\$\\+<=>\\^~\\|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
};

enum status pretokenizer_add_named(struct pretokenizer *p, const char *name, size_t len, bool *nfc, bool *ignore_merges,
                                   struct error *e)
{
	for (size_t i = 0; i < sizeof named / sizeof *named; i++) {
		if (strlen(named[i].name) != len || memcmp(named[i].name, name, len))
			continue;
		*nfc = named[i].flags & NFC;
		*ignore_merges = named[i].flags & IGNORE_MERGES;
		if (named[i].flags & DIGITS)
			pretokenizer_add_digits(p, true);
		for (int k = 0; k < 4 && named[i].patterns[k]; k++)
			TRY(pretokenizer_add_split(p, named[i].patterns[k], strlen(named[i].patterns[k]), false, SPLIT_ISOLATED,
			                           false, e));
		return STATUS_OK;
	}
	return error_set(e, STATUS_REFUSED, "tokenizer.ggml.pre: unknown pre-tokenizer '%.*s'", (int)(len > 80 ? 80 : len),
	                 name);
}
