#!/usr/bin/env python3
"""Writes unicode_table.c: what Hugging Face `tokenizers` thinks of every code point, found by asking it.

Run with an interpreter that has `tokenizers` (0.23.3 wrote the committed file). Its parts carry Unicode tables of
different ages, so each property is probed where it is used: general categories, scripts and \\w through its regex engine
(Oniguruma), numerics through pre_tokenizers.Digits (Rust's standard library), words through pre_tokenizers.Whitespace
(the regex crate), decomposition, composition and combining classes through normalizers.NFD and NFC.
"""
import os
import sys

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CATEGORIES = ["Cn", "Cc", "Cf", "Co", "Cs", "Ll", "Lm", "Lo", "Lt", "Lu", "Mc", "Me", "Mn", "Nd", "Nl", "No",
              "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps", "Sc", "Sk", "Sm", "So", "Zl", "Zp", "Zs"]
SCRIPTS = ["", "Han", "Hiragana", "Katakana", "Hangul", "Latin", "Cyrillic", "Greek", "Arabic", "Hebrew", "Thai",
           "Devanagari"]
ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
SHIFT = 7


def matching(pattern):
    """Code points that a regular expression matches, asked in long strings."""
    found = set()
    for mark in "XY":
        replace = normalizers.Replace(Regex(pattern), mark)
        for i in range(0, len(ALL), 4096):
            part = ALL[i:i + 4096]
            answer = replace.normalize_str("".join(map(chr, part)))
            assert len(answer) == len(part)
            found.update(c for c, a in zip(part, answer) if a == mark and chr(c) != mark)
    return found


def tokens_of(pre_tokenizer, left):
    found = set()
    for i in range(0, len(ALL), 2048):
        text = "".join(left + chr(c) for c in ALL[i:i + 2048])
        found.update(t for t, _ in pre_tokenizer.pre_tokenize_str(text))
    return found


def combining_classes():
    """By where NFD sorts a code point among marks of known class."""
    nfd = normalizers.NFD().normalize_str
    known = {1: 0x334, 7: 0x93C, 8: 0x3099, 9: 0x94D, 202: 0x321, 214: 0x1DCE, 216: 0x31B, 218: 0x302A,
             220: 0x316, 222: 0x59A, 224: 0x302E, 226: 0x1D16D, 228: 0x5AE, 230: 0x301, 232: 0x302C, 233: 0x35C,
             234: 0x35D, 240: 0x345}
    known.update({10: 0x5B0, 11: 0x5B1, 12: 0x5B2, 13: 0x5B3, 14: 0x5B4, 15: 0x5B5, 16: 0x5B6, 17: 0x5B7, 18: 0x5B8,
                  19: 0x5B9, 20: 0x5BB, 21: 0x5BC, 22: 0x5BD, 23: 0x5BF, 24: 0x5C1, 25: 0x5C2, 26: 0xFB1E, 27: 0x64B,
                  28: 0x64C, 29: 0x64D, 30: 0x64E, 31: 0x64F, 32: 0x650, 33: 0x651, 34: 0x652, 35: 0x670, 36: 0x711,
                  84: 0xC55, 91: 0xC56, 103: 0xE38, 107: 0xE48, 118: 0xEB8, 122: 0xEC8, 129: 0xF71, 130: 0xF72,
                  132: 0xF74})
    order = sorted(known)
    for a, b in zip(order, order[1:]):
        assert nfd(chr(known[b]) + chr(known[a])) == chr(known[a]) + chr(known[b]), (a, b)

    def swaps(c, k):  # 0 < class of c < k
        return nfd("a" + chr(known[k]) + chr(c)) == "a" + chr(c) + chr(known[k]) and c != known[k]

    def moved(c, k):  # class of c > k
        return nfd("a" + chr(c) + chr(known[k])) == "a" + chr(known[k]) + chr(c) and c != known[k]

    classes = {}
    for c in ALL:
        if c == known[240]:
            classes[c] = 240
        elif nfd(chr(c)) == chr(c) and swaps(c, 240):
            same = [k for k in order if not swaps(c, k) and not moved(c, k)]
            assert len(same) == 1, (hex(c), same)
            classes[c] = same[0]
    return classes


def rows(out, values, form, per_line):
    for i in range(0, len(values), per_line):
        out.append("\t" + " ".join(form(v) + "," for v in values[i:i + per_line]))


def main():
    category = {}
    for index, name in enumerate(CATEGORIES):
        if name not in ("Cn", "Cs"):
            for c in matching(r"\p{%s}" % name):
                assert c not in category
                category[c] = index
    script = {}
    for index, name in enumerate(SCRIPTS):
        if name:
            for c in matching(r"\p{%s}" % name):
                script[c] = index
    word, word_in_class = matching(r"\w"), matching(r"[\w]")  # Oniguruma's differ in six superscripts and fractions
    space = matching(r"\s")
    numeric = {ord(t) for t in tokens_of(pre_tokenizers.Digits(individual_digits=True), "a") if len(t) == 1} - {ord("a")}
    rust_word = {ord(t[1]) for t in tokens_of(pre_tokenizers.Whitespace(), " a") if len(t) == 2 and t[0] == "a"}

    def record(c):
        return (category.get(c, 0), script.get(c, 0),
                (c in space) | (c in word) << 1 | (c in numeric) << 2 | (c in rust_word) << 3 |
                (c in word_in_class) << 4)

    records = {}
    pages = {}
    index = []
    for start in range(0, 0x110000, 1 << SHIFT):
        page = tuple(records.setdefault(record(c) if not 0xD800 <= c <= 0xDFFF else (4, 0, 0), len(records))
                     for c in range(start, start + (1 << SHIFT)))
        index.append(pages.setdefault(page, len(pages)))
    assert len(records) <= 256, len(records)

    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    decomposed, pool, composed = [], [], []
    for c in ALL:
        d = nfd(chr(c))
        if d == chr(c) or 0xAC00 <= c <= 0xD7A3:
            continue
        decomposed.append((c, len(pool), len(d)))
        pool.extend(map(ord, d))
        if len(d) > 1 and nfc(d) == chr(c):
            first = nfc(d[:-1])
            assert len(first) == 1, hex(c)
            composed.append((ord(first), ord(d[-1]), c))
    composed.sort()
    ranges = []
    for c, k in sorted(combining_classes().items()):
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][2] == k:
            ranges[-1][1] = c
        else:
            ranges.append([c, c, k])

    o = ["// Generated by make_unicode_table.py from tokenizers %s; do not edit." % tokenizers.__version__,
         "// Categories, scripts and \\w are those of its Oniguruma (Unicode 16.0), numerics those of its Rust (Unicode 17.0);",
         "// decomposition and composition are those of its normalizers.",
         '#include "coordinator/unicode_table.h"', "",
         "const int unicode_record_count = %d;" % len(records),
         "const struct unicode_record unicode_records[%d] = {" % len(records)]
    rows(o, list(records), lambda r: "{%d, %d, %d}" % r, 9)
    o += ["};", "const uint16_t unicode_page_index[%d] = {" % len(index)]
    rows(o, index, str, 26)
    o += ["};", "const uint8_t unicode_pages[%d][%d] = {" % (len(pages), 1 << SHIFT)]
    for p in pages:
        runs, i = [], 0
        while i < len(p):
            j = i
            while j < len(p) and p[j] == p[i]:
                j += 1
            runs.append("[%d ... %d] = %d" % (i, j - 1, p[i]) if j - i > 4 else ", ".join(
                "[%d] = %d" % (i, p[i]) if k == 0 and runs and "..." in runs[-1] else str(p[i]) for k in range(j - i)))
            i = j
        line, text = "\t{", []
        for r in runs:
            if len(line) + len(r) > 116:
                text.append(line.rstrip())
                line = "\t "
            line += r + ", "
        o += text + [line.rstrip(", ") + "},"]
    o += ["};", "const uint32_t unicode_decomposition_pool[%d] = {" % len(pool)]
    rows(o, pool, hex, 13)
    o += ["};", "const int unicode_decomposition_count = %d;" % len(decomposed),
          "const struct unicode_decomposition unicode_decompositions[%d] = {" % len(decomposed)]
    rows(o, decomposed, lambda d: "{0x%x, %d, %d}" % d, 6)
    o += ["};", "const int unicode_composition_count = %d;" % len(composed),
          "const struct unicode_composition unicode_compositions[%d] = {" % len(composed)]
    rows(o, composed, lambda d: "{0x%x, 0x%x, 0x%x}" % d, 4)
    o += ["};", "const int unicode_combining_count = %d;" % len(ranges),
          "const struct unicode_combining unicode_combinings[%d] = {" % len(ranges)]
    rows(o, ranges, lambda d: "{0x%x, 0x%x, %d}" % tuple(d), 6)
    o += ["};", ""]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "unicode_table.c")
    with open(path, "w", encoding="ascii") as f:
        f.write("\n".join(o))
    print(len(records), "records,", len(pages), "pages,", len(decomposed), "decompositions,", len(composed),
          "compositions,", len(ranges), "combining ranges", file=sys.stderr)


main()
