#!/usr/bin/env python3
"""Writes tokenizer/: texts of our own and what Hugging Face `tokenizers` makes of them under many tokenizers.

usage: make_tokenizer_reference.py DEMO_MODEL.gguf      (needs the packages tokenizers and gguf)

Files: demo_vocabulary.gguf (the demo model's metadata without tensors), tiny_vocabulary.json (about 1,000 merges trained
here on the texts below), tiny_PRE.gguf (the same for a value of tokenizer.ggml.pre), configs.json (tokenizer.json files
whose vocabulary and merges are those of tiny_vocabulary.json), reference.bin, whose layout stands at write_reference().
"""
import json
import os
import random
import struct
import sys

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer")
R = random.Random(20240229)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (r"[^\r\n\p{L}\p{N}]?U*L+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?U+L*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+").replace("U*", UPPER + "*").replace(
             "U+", UPPER + "+").replace("L+(", LOWER + "+(").replace("L*(", LOWER + "*(")
TEKKEN = O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")

# --- texts -----------------------------------------------------------------------------------------------------------

PROSE = """The lighthouse keeper counts ships at dusk, and writes their names into a ledger that nobody reads.
When it's foggy he can't see them; he'll listen instead, and they've never been late. I'm sure you'd like it there!
A pipeline of stages moves hidden states from one device to the next: each stage holds its layers, its cache, its work.
In 1987 there were 3,141 of them, 59% older than 26 years (about 5.35 tonnes each), costing $7.90 or 8€ apiece.
WE'RE SURE THAT'S WRONG, THEY'LL SAY; I'D RATHER DON'T. It's Sam's, isn't it? Y'all shouldn't've.
"""
CODE = """def merge(pairs, ranks):\n    while True:\n\tbest = min(pairs, key=lambda p: ranks.get(p, 1e9))\n        if best not in ranks:
            break\n    return [x for x in pairs if x != best]  # done\n
static int heap_push(struct heap *h, uint32_t v)\n{\n\tsize_t i = h->count++;\n\tfor (; i && v < h->at[(i - 1) / 2]; i = (i - 1) / 2)
\t\th->at[i] = h->at[(i - 1) / 2];\n\treturn 0;\n}\n\n\n#include <stdio.h>\n<div class="row"><p>&nbsp;{{ x }}</p></div>
SELECT name, COUNT(*) FROM ships WHERE seen_at >= '2024-02-29T12:00:00Z' GROUP BY 1;\nx = {"a": [1, 2.5e-3, null], "b": true}\n"""
WORDS = {
    "latin": "straße Ærøskøbing żółć naïve façade Ångström ﬁn Ĳssel coöperate ǅungla ŉ ſtrange K İstanbul ıssız",
    "greek": "θάλασσα Ὀδυσσεύς φῶς ἄλφα ΣΊΣΥΦΟΣ", "cyrillic": "Привет мир ёлка Щука їжак Ӂ",
    "cjk": "你好，世界！今天天气很好。 東京都に住んでいます。カタカナ ひらがな 한국어를 배웁니다 ㈱ 〇 㐀 𠀀𪜀 龘",
    "arabic": "السلامُ عليكم ١٢٣ كتاب، لا إله پژگ ﷺ", "hebrew": "שָׁלוֹם עולם",
    "thai": "สวัสดีครับ ผมกินข้าวแล้ว ๑๒๓", "devanagari": "नमस्ते दुनिया क्षत्रिय १२३ हिन्दी में", "tamil": "வணக்கம் ௧௨",
    "bengali": "বাংলা ভাষা ১২৩", "khmer": "សួស្តី ១២", "tibetan": "བོད་ཡིག ༡༢", "georgian": "გამარჯობა ᲒᲐᲛ", "amharic": "ሰላም ፩፪",
    "emoji": "😀 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 1️⃣ ❤️ ☎️ 🧑🏻‍🚀 ⌚︎ 🫨🫩 🪉",
    "marks": "e\u0301 a\u0308\u0304 q\u0323\u0307 q\u0307\u0323 \u0344 \u1e9b\u0323 o\u0338\u0301 Å \u212b \ufb2c \u0958 가\u11a8 \u1100\u1161\u11a8",
    "symbols": "∑∫≈≠ ½ ² ³ ¹ Ⅷ ⅷ ① ㊿ ™ ® © § ¶ • … — – ‘quoted’ “double” «guillemets» ‹x› ₿ ₫ → ⇒ ░▒▓ ♠♣",
    "newest": "ꟊ ꟛ Ƛ \ua7cb\ua7da\ua7ce\ua7d2\ua7f1 \U00010d40\U00010d41\U00010d50\U00010d70 \U00011380\U0001138b \U00016d40\U00016d70 "
              "\U0001e6c0\U0001e6c1 \U00010940\U00010941 \U00011db0\U00011de0\U00011de1 \U00016ff4\U00016ff5 \U0001e5d0\U0001e5f1 "
              "\U000323b0\U000323b1 \U00011bc0\U00011bf0 \U000105c0 \U0001c800 \u1c89\u1c8a \u088f \u0cdc",
    "controls": "a\x00b \x01\x02 \x7f \x1b[0m \x85 \xa0x\xad \ufeff \u200b\u200c\u200d \u2060 \ufffd \ufffe \uffff \ue000 \U000f0000 \U0010ffff",
}
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\v", "\f", "\x85", "\xa0", "\u1680", "\u2003", "\u2028",
          "\u2029", "\u202f", "\u205f", "\u3000", "\u200b", " \n", "\n ", "\t\t", " \t ", "\x1c", "\x1f", "\u180e", "\ufeff"]
CONTRACTIONS = ["'s", "'S", "'t", "'re", "'RE", "'Ve", "'m", "'ll", "'LL", "'d", "'ſ", "’s", "'x", "''s", "' s", "'s's", "'lL", "'"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start", "im_end|>", "<repo_name>", "<reponame>", "<s>", "</s>",
           "<unk>", "<word>", "<left>", "<right>", "<both>", "<nörm>", "<no\u0308rm>", "<long", "<longer>", "<longest>", "[single]",
           "<|", "|>", "<|im_end|><|im_end|>", "<|IM_END|>", "<0x41>", "<file_sep>"]


def pool():
    words = PROSE.split() + CODE.split()
    for w in WORDS.values():
        words += w.split(" ")
    return words


def invalid_bytes():
    parts = [b"\x80", b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", b"\xe0\x80\x80",
             b"\xf4\x90\x80\x80", b"\xf5", b"\xfe\xfe", b"\xe2\x28\xa1", b"\xf0\x28\x8c\xbc", b"\xc3\xc3\xa9", b"\xe4\xbd\xe4\xbd\xa0"]
    good = [b"ok", " é ".encode(), "你".encode(), b" ", b"\n", "😀".encode(), b"a b", b"<|im_end|>"]
    return b"".join(R.choice(parts if R.random() < 0.5 else good) for _ in range(R.randint(1, 10)))


def texts():
    words, out = pool(), [b"", b" ", b"a", PROSE.encode(), CODE.encode()]
    add = lambda s: out.append(s.encode())
    for w in list(WORDS.values()) + CONTRACTIONS + SPECIAL + SPACES:
        add(w)
    for line in PROSE.splitlines() + CODE.splitlines():
        add(line)
    for _ in range(500):  # words of every script with spaces of every kind
        add("".join(R.choice(words) + (R.choice(SPACES) if R.random() < 0.4 else " ") for _ in range(R.randint(1, 9))))
    for _ in range(150):
        add("".join(R.choice(SPACES) for _ in range(R.randint(1, 9))) + R.choice(words) +
            "".join(R.choice(SPACES) for _ in range(R.randint(0, 6))))
    for _ in range(120):
        add("".join(R.choice(words) + R.choice(CONTRACTIONS) + R.choice(["", " ", "x", "\n"]) for _ in range(R.randint(1, 4))))
    for _ in range(250):
        add("".join(R.choice(SPECIAL) + R.choice(["", " ", "  ", "\n", "x", "é", "\u0301", R.choice(words)])
                    for _ in range(R.randint(1, 5))))
    for _ in range(150):
        out.append(invalid_bytes())
    digits = [c for c in range(0x32000) if chr(c).isnumeric()] + [0x11DE0, 0x16FF4, 0x10D40, 0x11BF0]
    for _ in range(120):
        add("".join(R.choice("0123456789") if R.random() < 0.5 else chr(R.choice(digits)) + R.choice(["", "", " ", "a", "."])
                    for _ in range(R.randint(1, 12))))
    code_points = [c for c in range(0x80, 0x33500) if not 0xD800 <= c <= 0xDFFF and not 0x4000 < c < 0xA000 and
                   not 0x17000 < c < 0x1AF00 and not 0x20100 < c < 0x32300 and not 0xAD00 < c < 0xD700 and not 0xE100 < c < 0xF900]
    R.shuffle(code_points)
    for i in range(0, 16000, 40):  # code points of every block, some assigned only lately, some not yet
        add("".join(chr(c) + R.choice(["", "", "a", " ", "1", "A"]) for c in code_points[i:i + 40]))
    marks = [c for c in code_points if 0x300 <= c < 0x370 or 0x591 <= c < 0x5C8 or 0x900 <= c < 0xDFF or 0x1DC0 <= c < 0x1E00]
    bases = "aeioucnszAEIOU가각ηωαक\u1100\u1161\u11a8ड\u0928\u09c7\u0b47\u0dd9\u1025"
    for _ in range(120):
        add("".join(R.choice(bases) + "".join(chr(R.choice(marks)) for _ in range(R.randint(0, 4))) for _ in range(R.randint(1, 8))))
    for n in (40, 47, 48, 49, 50, 64, 100, 500, 1500):
        add("a" * n)
        add("".join(R.choice("etaoinsrhl") for _ in range(n)))
        add("".join(R.choice(["the", "ing", "er", "你", "é"]) for _ in range(n // 3)))
        add(" " * n + "x")
        add("ab" * (n // 2) + "\n" * (n // 4))
    for _ in range(160):
        add("".join(CODE[(k := R.randrange(len(CODE))):k + R.randint(1, 20)] for _ in range(R.randint(1, 5))))
    seen = set()
    return [t for t in out if not (t in seen or seen.add(t))]


# --- tokenizers ------------------------------------------------------------------------------------------------------

def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    keep = [c for c in pre_tokenizers.ByteLevel.alphabet() if c not in "ZQ~" and c not in "ñ"]  # bytes without a token
    corpus = [PROSE, CODE] * 4 + list(WORDS.values()) * 2
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=1300, min_frequency=2, initial_alphabet=keep,
                                                              limit_alphabet=len(keep), show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], model["merges"]
    for c in "ZQ~ñ":
        assert c not in vocab, c
    order = sorted(vocab, key=vocab.get)
    front = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    order = front + order + ["<0xC5>", "<0x83>", "<0x51>"]
    return {t: i for i, t in enumerate(order)}, merges


def added(content, id, **kw):
    return dict({"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                 "special": True}, **kw)


def config(vocab, pre, model={}, extra=(), normalizer=None, post=None):
    specials = [added(t, vocab[t]) for t in ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    specials += [added(c, len(vocab) + i, **kw) for i, (c, kw) in enumerate(extra)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": normalizer,
            "pre_tokenizer": pre, "post_processor": post,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": dict({"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}, **model)}


def byte_level(prefix=False, regex=True):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def configs(vocab):
    flat = byte_level(regex=False)
    digits = lambda one: {"type": "Digits", "individual_digits": one}
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                                                    {"SpecialToken": {"id": "</s>", "type_id": 0}}],
           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
           "special_tokens": {t: {"id": t, "ids": [vocab[t]], "tokens": [t]} for t in ("<s>", "</s>")}}
    odd = [("<word>", {"single_word": True}), ("<left>", {"lstrip": True}), ("<right>", {"rstrip": True, "special": False}),
           ("<both>", {"lstrip": True, "rstrip": True}), ("<nörm>", {"normalized": True, "special": False}), ("<long", {}),
           ("<longer>", {"special": False}), ("<longest>", {}), ("[single]", {"single_word": True, "special": False, "normalized": True}),
           ("im_end", {"special": False}), ("  ", {"special": False}), ("naïve", {"special": False, "normalized": True})]
    c = lambda *a, **k: config(vocab, *a, **k)
    return {
        "gpt2": c(byte_level()),
        "llama3": c(sequence(split(LLAMA3), flat), {"ignore_merges": True}, post={"type": "Sequence", "processors": [byte_level(), bos]}),
        "qwen2": c(sequence(split(QWEN2), flat), normalizer={"type": "NFC"}),
        "o200k": c(sequence(split(O200K), flat)),
        "tekken": c(sequence(split(TEKKEN), flat), normalizer={"type": "NFD"}),
        "odd_added_tokens": c(byte_level(), extra=odd, normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}),
        "unknown_token": c(byte_level(), {"unk_token": "<unk>"}),
        "fused_unknown": c(sequence(digits(False), byte_level(prefix=True)), {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}),
        "behaviors": c(sequence(split(r"\s", "MergedWithNext"), split(r"\p{P}|\$", "MergedWithPrevious"), split(r"\p{N}", "Contiguous"),
                                split("e", "Isolated", kind="String"), split(r"[\p{L}\p{M}]+|\p{N}+|[^\p{L}\p{N}]", "Removed", True), flat)),
        "deepseek_like": c(sequence(split("[\r\n]"), split(r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿ]+"), split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
                                    split(r"\s+$"), split("[一-龥ࠀ-一가-퟿]+"), digits(True), flat)),
        "looks_around": c(sequence(split(r"(?<=\d)\p{L}+|\p{L}++(?=\s)|(?>\s+)|\p{N}{2,3}?|(?:ab)+|[^\s\S]|[\w.-]+|.{1,4}"),
                                   split(r"(?=(\d{3})+(?!\d))"), flat)),
    }


PRE = {  # tokenizer.ggml.pre: (pre-tokenizer, normalizer, ignore_merges)
    "smollm": (lambda: sequence({"type": "Digits", "individual_digits": True}, byte_level()), None, False),
    "gpt-2": (byte_level, None, False),
    "llama-bpe": (lambda: sequence(split(LLAMA3), byte_level(regex=False)), None, True),
    "qwen2": (lambda: sequence(split(QWEN2), byte_level(regex=False)), {"type": "NFC"}, False),
    "gpt-4o": (lambda: sequence(split(O200K), byte_level(regex=False)), None, False),
    "tekken": (lambda: sequence(split(TEKKEN), byte_level(regex=False)), None, True),
    "default": (lambda: sequence(split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"),
                                 byte_level(regex=False)), None, False),
}


def write_gguf(path, pre, tokens, types, merges, extra):
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    for key, value in extra.items():
        (w.add_bool if isinstance(value, bool) else w.add_string if isinstance(value, str) else w.add_uint32)(key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()


def demo(path):
    reader = gguf.GGUFReader(path)
    get = lambda k: reader.fields["tokenizer." + k].contents()
    tokens, types, merges, pre = get("ggml.tokens"), get("ggml.token_type"), get("ggml.merges"), get("ggml.pre")
    extra = {"tokenizer." + k: get(k) for k in ("ggml.bos_token_id", "ggml.eos_token_id", "ggml.unknown_token_id", "ggml.padding_token_id",
                                                "ggml.add_bos_token", "chat_template")}
    extra.update({k: reader.fields[k].contents() for k in ("general.name", "general.license", "general.organization")})
    write_gguf(os.path.join(HERE, "demo_vocabulary.gguf"), pre, tokens, types, merges, extra)
    vocab = {t: i for i, t in enumerate(tokens)}
    c = config({t: 0 for t in ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")}, PRE[pre][0]())
    c["added_tokens"] = [added(t, i, special=k == 3) for i, (t, k) in enumerate(zip(tokens, types)) if k in (3, 4)]
    c["model"].update(vocab=vocab, merges=[m.split(" ") for m in merges])
    return Tokenizer.from_str(json.dumps(c))


# --- the reference ---------------------------------------------------------------------------------------------------

def varint(n):
    out = bytearray()
    while n >= 128:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out) + bytes([n])


def blob(b):
    return varint(len(b)) + b


def fnv(b):
    h = 2166136261
    for x in b:
        h = (h ^ x) * 16777619 & 0xFFFFFFFF
    return struct.pack("<I", h)


def id_list(ids):
    return varint(len(ids)) + b"".join(map(varint, ids))


def encode(tokenizer, text, bos):
    """With special tokens added; a BOS that the text brings itself is not doubled, which is our rule."""
    ids = tokenizer.encode(text).ids
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def write_reference(path, all_texts, tokenizers):
    """"STKR", varint count of texts, each as a blob (varint length, bytes); varint count of tokenizers, each: blob name, byte
    1 if ids are stored (the first tokenizer) or 0; per text with A = ids with specials parsed and added, B = with specials
    as text, C and D = A decoded with and without specials: A and B as varint count and varints, or the two counts;
    then FNV-1a of A and B as 4 bytes each id, and the bytes of C and D; then varint count of random lists of ids, each
    with its decoded text as a blob."""
    out = bytearray(b"STKR" + varint(len(all_texts)))
    for t in all_texts:
        out += blob(t)
    out += varint(len(tokenizers))
    for number, (name, (tokenizer, bos)) in enumerate(tokenizers.items()):
        before = len(out)
        out += blob(name.encode()) + bytes([number == 0])
        for t in all_texts:
            text = t.decode("utf-8", "replace")
            ids = encode(tokenizer, text, bos)
            tokenizer.encode_special_tokens = True
            plain = encode(tokenizer, text, bos)
            tokenizer.encode_special_tokens = False
            decoded = "".join(tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
            for some in (ids, plain):
                out += id_list(some) if number == 0 else varint(len(some))
            out += fnv(struct.pack("<%dI" % len(ids + plain), *ids, *plain) + decoded.encode())
        size = tokenizer.get_vocab_size()
        lists = [[R.randrange(size) for _ in range(R.randint(1, 12))] for _ in range(40)]
        out += varint(len(lists))
        for ids in lists:
            out += id_list(ids) + blob(tokenizer.decode(ids, skip_special_tokens=False).encode())
        print(name, len(out) - before, "bytes", file=sys.stderr)
    with open(path, "wb") as f:
        f.write(out)


def main():
    os.makedirs(HERE, exist_ok=True)
    vocab, merges = train()
    with open(os.path.join(HERE, "tiny_vocabulary.json"), "w", encoding="utf-8") as f:
        json.dump({"vocab": vocab, "merges": merges}, f, ensure_ascii=False, separators=(",", ":"))
    tokenizers = {"demo": (demo(sys.argv[1]), None)}
    made = configs(vocab)
    with open(os.path.join(HERE, "configs.json"), "w", encoding="utf-8") as f:
        json.dump(made, f, ensure_ascii=False, indent=1)
    for name, c in made.items():
        c["model"].update(vocab=vocab, merges=merges)
        tokenizers[name] = Tokenizer.from_str(json.dumps(c)), vocab["<s>"] if name == "llama3" else None
    order = sorted(vocab, key=vocab.get)
    for pre, (steps, normalizer, ignore_merges) in PRE.items():
        c = config(vocab, steps(), {"ignore_merges": ignore_merges}, normalizer=normalizer)
        c["model"].update(vocab=vocab, merges=merges)
        tokenizers["gguf " + pre] = Tokenizer.from_str(json.dumps(c)), None
        write_gguf(os.path.join(HERE, "tiny_%s.gguf" % pre), pre, order, [3] * 6 + [1] * (len(order) - 6),
                   [" ".join(m) for m in merges], {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
                                                   "tokenizer.ggml.add_bos_token": False})
    all_texts = texts()
    print(len(all_texts), "texts,", len(vocab), "tokens", file=sys.stderr)
    write_reference(os.path.join(HERE, "reference.bin"), all_texts, tokenizers)


main()
