#!/usr/bin/env python3
"""make_demo_reference.py MODEL.gguf [OUT.json]: what the demo model answers in float32 arithmetic.

The weights of the GGUF are dequantised to float32, put into transformers' own LlamaForCausalLM, and asked greedily for
64 tokens after each prompt (end tokens do not end it). Stored for every position: the five best ids with their natural
log-probabilities, and the margin between the best two. The values come from one forward pass over the whole sequence;
that it picks the same tokens as generation step by step is asserted. Needs torch, transformers, tokenizers, gguf,
jinja2; takes a few minutes on two cores. The surprising decision: prompts are stored as ids too, so that a test of the
engine does not depend on a tokenizer.
"""
import hashlib
import json
import os
import sys

import gguf
import jinja2
import numpy as np
import tokenizers
import torch
import transformers

N_NEW, N_TOP = 64, 5

LONG_STORY = """The lighthouse at Carrow Point had been dark for eleven years when Ines decided to light it again. She had \
come to the island as a surveyor, with a tripod, two notebooks and a box of pencils, to measure how quickly the cliff was \
falling into the sea. The answer, after the first month, was forty centimetres a year on the southern side and almost \
nothing on the northern one, where the rock was older and darker. She wrote this down and sent it to the office on the \
mainland, and the office wrote back that the numbers were surprising and that she should stay until the spring.

So she stayed. In the evenings there was little to do. The village had nine houses, of which four were lived in, and the \
shop opened on Tuesdays. The secret word of the village, an old man told her, was marigold, and nobody remembered why. She \
began to walk up to the lighthouse after supper, first to shelter from the wind, later because she had started to clean the \
lens. It was taller than she was and made of hundreds of pieces of glass, each set at its own angle in a frame of brass. \
Salt had made it grey. She used vinegar, warm water and the sleeves of an old shirt, and every night another ring of glass \
became clear.

By February the lens was clean. The lamp itself was a different matter: the bulb had been taken away, the wires were \
green, and the little motor that turned the whole thing had seized. She wrote to the office for a bulb, saying that it was \
for the survey. She took the motor apart on the kitchen table, laid its parts on a newspaper in the order in which they \
had come out, cleaned each, and put them back in the opposite order. One small spring was left over. The motor ran without \
it."""

LONG_RECIPE = """Notes on bread, written down for whoever has the kitchen after me.

1. Flour. Use the strong white flour in the blue bin, not the soft one in the green bin. The green bin is for cakes. If \
both are empty there is a sack under the stairs; shake it first, since mice have been known to sit on it.
2. Water. It should be as warm as the inside of your wrist. Weigh it: 350 grams of water for 500 grams of flour. Do not \
trust the jug, whose marks were painted on by somebody who was thinking of something else.
3. Salt. Ten grams, always. Bread without salt tastes of regret.
4. Yeast. Seven grams of the dry kind, or a piece of the fresh kind as large as a walnut. Never put it directly on the \
salt.
5. Mixing. Stir with a wooden spoon until no dry flour is left, cover with a cloth, and wait for twenty minutes. Most of \
the work happens while you do nothing, which is the reason that I like bread.
6. Kneading. Eight minutes by hand on the wooden table. The dough is ready when it springs back slowly from a finger. If \
it sticks, use less flour than you would like to.
7. Rising. One hour near the oven, or the whole night in the cellar. The cellar gives a better taste.
8. Shaping. Flatten it, fold the sides into the middle, turn it over, and pull it towards you until the skin is tight.
9. Baking. As hot as the oven goes for ten minutes with a cup of water on its floor, then at 200 degrees for thirty \
minutes. Knock on the bottom: it should sound hollow, like a small drum.
10. Waiting. At least half an hour. Nobody has ever managed this.

Questions that people ask me: why does my bread"""

LONG_CODE = """// A queue of fixed capacity for one writer and one reader.
//
// The indices only grow; the place in the array is the index modulo the capacity, which has to be a power of two. The
// queue is empty when both indices are equal, and full when they are a whole capacity apart, so that no slot is wasted.
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

struct ring {
    size_t capacity;
    _Atomic size_t head;
    _Atomic size_t tail;
    int *items;
};

struct ring *ring_create(size_t capacity)
{
    if (capacity == 0 || (capacity & (capacity - 1)) != 0)
        return NULL;
    struct ring *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->items = malloc(capacity * sizeof *r->items);
    if (!r->items) {
        free(r);
        return NULL;
    }
    r->capacity = capacity;
    return r;
}

bool ring_push(struct ring *r, int item)
{
    size_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    size_t head = atomic_load_explicit(&r->head, memory_order_acquire);
    if (tail - head == r->capacity)
        return false;
    r->items[tail & (r->capacity - 1)] = item;
    atomic_store_explicit(&r->tail, tail + 1, memory_order_release);
    return true;
}

bool ring_pop(struct ring *r, int *item)
{"""

# (name, kind, text or messages)
PROMPTS = [
    ("chat capital", "chat", [("user", "What is the capital of Portugal, and on which river does it lie?")]),
    ("chat gravity", "chat", [("user", "Explain to a ten-year-old why the moon does not fall down.")]),
    ("chat haiku", "chat", [("user", "Write a haiku about a railway station at night.")]),
    ("chat list", "chat", [("user", "Give me five names for a grey cat. Only the names, one per line.")]),
    ("chat system", "chat", [("system", "You answer in one short sentence."), ("user", "Why is the sky blue?")]),
    ("chat turns", "chat", [("user", "My name is Tomas and I have 3 apples."),
                            ("assistant", "Hello Tomas! Three apples are a good start."),
                            ("user", "I eat one of them. How many are left, and what is my name?")]),
    ("chat python", "chat", [("user", "Write a Python function that returns the n-th Fibonacci number.")]),
    ("chat translate", "chat", [("user", "Translate into French: The train leaves at seven in the morning.")]),
    ("chat json", "chat", [("user", "Return a JSON object with the keys \"name\" and \"age\" for a person you invent.")]),
    ("chat arithmetic", "chat", [("user", "What is 17 + 26? Show the steps.")]),
    ("chat long", "chat", [("user", LONG_STORY + "\n\nWhat is the secret word of the village?")]),
    ("chat story", "chat", [("system", "You are a careful editor."),
                            ("user", "Improve this sentence: me and him was walking to the shop when it rains.")]),
    ("raw one word", "raw", "The"),
    ("raw fox", "raw", "The quick brown fox"),
    ("raw history", "raw", "In the year 1453, the city of Constantinople"),
    ("raw science", "raw", "Photosynthesis is the process by which plants"),
    ("raw dialogue", "raw", "\"I don't believe you,\" said Clara, and closed the door.\n\n\"Then look for yourself,\""),
    ("raw counting", "raw", "one, two, three, four, five, six, seven,"),
    ("raw numbers", "raw", "2, 4, 8, 16, 32, 64,"),
    ("raw python", "raw", "def is_prime(n):\n    \"\"\"Return True if n is a prime number.\"\"\"\n"),
    ("raw html", "raw", "<ul>\n  <li>Monday</li>\n  <li>Tuesday</li>\n"),
    ("raw german", "raw", "Der alte Mann ging langsam \u00fcber die Br\u00fccke und"),
    ("raw spanish", "raw", "Hab\u00eda una vez una ni\u00f1a que viv\u00eda"),
    ("raw unicode", "raw", "\u6625\u306f\u3042\u3051\u307c\u306e\u3002 \U0001f600 caf\u00e9 na\u00efve \u2014"),
    ("raw spaces", "raw", "Name:      Ada\nBorn:      1815\nField:     "),
    ("raw table", "raw", "| city | country |\n|---|---|\n| Oslo | Norway |\n| Lima |"),
    ("raw email", "raw", "Dear Dr Lindqvist,\n\nThank you for your letter of 4 May. I am writing to"),
    ("raw long story", "raw", LONG_STORY),
    ("raw long recipe", "raw", LONG_RECIPE),
    ("raw long code", "raw", LONG_CODE),
]


def strings(reader, key):
    field = reader.fields[key]
    return [bytes(field.parts[i]).decode("utf-8") for i in field.data]


def value(reader, key):
    return reader.fields[key].contents()


def load_model(reader):
    """LlamaForCausalLM in float32 with the dequantised weights of a GGUF of architecture llama."""
    heads, kv_heads = value(reader, "llama.attention.head_count"), value(reader, "llama.attention.head_count_kv")
    tensors = {t.name: t for t in reader.tensors}

    def weight(name, unpermute_heads=0):
        t = tensors[name]
        w = gguf.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(tuple(int(d) for d in reversed(t.shape)))
        if unpermute_heads:  # GGUF pairs neighbours in RoPE, transformers the two halves of a head
            rows = w.shape[0]
            w = w.reshape(unpermute_heads, rows // unpermute_heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
        return torch.from_numpy(np.array(w))  # a copy of its own

    layers = value(reader, "llama.block_count")
    config = transformers.LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]), hidden_size=value(reader, "llama.embedding_length"),
        intermediate_size=value(reader, "llama.feed_forward_length"), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=value(reader, "llama.context_length"),
        rms_norm_eps=value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value(reader, "llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors, attn_implementation="eager", dtype="float32")
    state = {"model.embed_tokens.weight": weight("token_embd.weight"), "model.norm.weight": weight("output_norm.weight")}
    state["lm_head.weight"] = weight("output.weight") if "output.weight" in tensors else state["model.embed_tokens.weight"]
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj"}
    for i in range(layers):
        for ours, theirs in names.items():
            state[f"model.layers.{i}.{theirs}.weight"] = weight(f"blk.{i}.{ours}.weight")
        state[f"model.layers.{i}.self_attn.q_proj.weight"] = weight(f"blk.{i}.attn_q.weight", heads)
        state[f"model.layers.{i}.self_attn.k_proj.weight"] = weight(f"blk.{i}.attn_k.weight", kv_heads)
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


def load_tokenizer(reader):
    """The byte-level BPE of the metadata; pre-tokenizer "smollm": single digits, then GPT-2's pattern."""
    assert value(reader, "tokenizer.ggml.model") == "gpt2" and value(reader, "tokenizer.ggml.pre") == "smollm"
    tokens = strings(reader, "tokenizer.ggml.tokens")
    types = [int(reader.fields["tokenizer.ggml.token_type"].parts[i][0])
             for i in reader.fields["tokenizer.ggml.token_type"].data]
    merges = [tuple(m.split(" ")) for m in strings(reader, "tokenizer.ggml.merges")]
    tok = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True),
         tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False)
                            for t, kind in zip(tokens, types) if kind == gguf.TokenType.CONTROL])
    return tok


def main():
    path = sys.argv[1]
    out = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                                              "demo_reference.json")
    reader = gguf.GGUFReader(path)
    model, tok = load_model(reader), load_tokenizer(reader)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        value(reader, "tokenizer.chat_template"))
    results = []
    for name, kind, prompt in PROMPTS:
        text = prompt if kind == "raw" else template.render(
            messages=[{"role": r, "content": c} for r, c in prompt], add_generation_prompt=True)
        ids = tok.encode(text, add_special_tokens=False).ids
        with torch.no_grad():
            cache, feed, new = None, ids, []
            for _ in range(N_NEW):
                step = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
                cache, feed = step.past_key_values, [int(step.logits[0, -1].argmax())]
                new += feed
            logits = model(torch.tensor([ids + new[:-1]])).logits[0, len(ids) - 1:].double()
        logprobs = torch.log_softmax(logits, dim=-1)
        top = logprobs.topk(N_TOP, dim=-1)
        margin = (top.values[:, 0] - top.values[:, 1]).tolist()
        for i, (token, best) in enumerate(zip(new, top.indices[:, 0].tolist())):
            assert token == best or margin[i] < 1e-3, (name, i, token, best, margin[i])
        results.append({"name": name, "kind": kind, "text": text, "prompt_ids": ids, "tokens": new,
                        "top_ids": top.indices.tolist(),
                        "top_logprobs": [[round(v, 6) for v in row] for row in top.values.tolist()],
                        "margin": [round(v, 6) for v in margin]})
        print(f"{name}: {len(ids)} + {N_NEW} tokens, smallest margin {min(margin):.4f}: "
              f"{tok.decode(new, skip_special_tokens=False)[:100]!r}", flush=True)
    with open(path, "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()
    with open(out, "w", encoding="utf-8") as f:
        f.write('{"model_sha256": "%s", "new_tokens": %d, "top": %d,\n "prompts": [\n' % (digest, N_NEW, N_TOP))
        f.write(",\n".join(json.dumps(r, separators=(",", ":")) for r in results))
        f.write("\n]}\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
