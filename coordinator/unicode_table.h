// What `tokenizers` 0.23 thinks of every code point: general category, script, word, space and numeric, and canonical
// decomposition and composition. The surprising decision: the table holds no single Unicode version, since the
// reference does not either. Its regular expressions use Unicode 16.0, its Digits splitter 17.0 and its NFC an older
// one, so make_unicode_table.py asked the reference itself about each property where it is used.
#ifndef STAGECOACH_COORDINATOR_UNICODE_TABLE_H
#define STAGECOACH_COORDINATOR_UNICODE_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum unicode_category {
	UNICODE_CN, UNICODE_CC, UNICODE_CF, UNICODE_CO, UNICODE_CS, UNICODE_LL, UNICODE_LM, UNICODE_LO, UNICODE_LT,
	UNICODE_LU, UNICODE_MC, UNICODE_ME, UNICODE_MN, UNICODE_ND, UNICODE_NL, UNICODE_NO, UNICODE_PC, UNICODE_PD,
	UNICODE_PE, UNICODE_PF, UNICODE_PI, UNICODE_PO, UNICODE_PS, UNICODE_SC, UNICODE_SK, UNICODE_SM, UNICODE_SO,
	UNICODE_ZL, UNICODE_ZP, UNICODE_ZS, UNICODE_CATEGORY_COUNT,
};

enum unicode_script {
	UNICODE_OTHER_SCRIPT, UNICODE_HAN, UNICODE_HIRAGANA, UNICODE_KATAKANA, UNICODE_HANGUL, UNICODE_LATIN,
	UNICODE_CYRILLIC, UNICODE_GREEK, UNICODE_ARABIC, UNICODE_HEBREW, UNICODE_THAI, UNICODE_DEVANAGARI,
	UNICODE_SCRIPT_COUNT,
};

enum { // flags
	UNICODE_SPACE = 1,         // \s
	UNICODE_WORD = 2,          // \w
	UNICODE_NUMERIC = 4,       // what Digits splits at
	UNICODE_ADDED_WORD = 8,    // what single_word of an added token forbids around it
	UNICODE_WORD_IN_CLASS = 16 // \w within [], where Oniguruma leaves out superscript digits and fractions
};

struct unicode_record { uint8_t category, script, flags; };
struct unicode_decomposition { uint32_t cp; uint16_t offset; uint16_t len; };
struct unicode_composition { uint32_t first, second, composed; };
struct unicode_combining { uint32_t from, to; uint8_t class; };

enum { UNICODE_PAGE_BITS = 7 };

extern const int unicode_record_count;
extern const struct unicode_record unicode_records[];
extern const uint16_t unicode_page_index[0x110000 >> UNICODE_PAGE_BITS];
extern const uint8_t unicode_pages[][1 << UNICODE_PAGE_BITS];
extern const uint32_t unicode_decomposition_pool[];
extern const int unicode_decomposition_count;
extern const struct unicode_decomposition unicode_decompositions[];
extern const int unicode_composition_count;
extern const struct unicode_composition unicode_compositions[];
extern const int unicode_combining_count;
extern const struct unicode_combining unicode_combinings[];

// Index into unicode_records of a code point below 0x110000.
static inline uint8_t unicode_record_index(uint32_t cp)
{
	return unicode_pages[unicode_page_index[cp >> UNICODE_PAGE_BITS]][cp & ((1u << UNICODE_PAGE_BITS) - 1)];
}

static inline bool unicode_has(uint32_t cp, int flag)
{
	return unicode_records[unicode_record_index(cp)].flags & flag;
}

#endif
