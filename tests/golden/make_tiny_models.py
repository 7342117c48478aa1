#!/usr/bin/env python3
"""make_tiny_models.py [FOLDER]: tiny random models of every architecture, in both file formats, with the logits that
transformers computes from them in float32.

For each NAME: NAME.gguf, NAME/ (a folder in safetensors form) and NAME.ref (prompts and logits; README.md describes it).
Weights are random, from a fixed seed; odd sizes are on purpose. Folders are written as transformers 5 does, and those
marked "v4" are rewritten into what transformers 4 wrote. The surprising decision: the two quantised models exist as
GGUF only, and their reference is made from the dequantised weights, so it says what exact arithmetic gives.
Needs torch, transformers 5, tokenizers, gguf.
"""
import json
import os
import shutil
import struct
import sys

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Q

MERGES = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("i", "n"), ("e", "r"), ("a", "n"), ("\u0120", "a"), ("o", "u")]
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                r"\s+(?!\S)|\s+")
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), key=ord)
VOCAB = BYTES + ["".join(m) for m in MERGES] + SPECIAL
BOS, EOS, IM_START, IM_END = (VOCAB.index(t) for t in SPECIAL)

LLAMA = transformers.LlamaConfig, transformers.LlamaForCausalLM
MISTRAL = transformers.MistralConfig, transformers.MistralForCausalLM
QWEN2 = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
QWEN3 = transformers.Qwen3Config, transformers.Qwen3ForCausalLM
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# name: (classes, type of the stored matrices, "v4"/"v5"/None for the folder, sharded, config)
MODELS = {
    "llama": (LLAMA, Q.F32, "v5", False, dict(
        vocab_size=len(VOCAB) + 4, hidden_size=36, intermediate_size=52, num_attention_heads=6, num_key_value_heads=3,
        rope_parameters=DEFAULT_ROPE)),
    "llama-tied-llama3-rope": (LLAMA, Q.F32, "v4", False, dict(
        hidden_size=40, intermediate_size=60, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        tie_word_embeddings=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32})),
    "llama-linear-rope": (LLAMA, Q.BF16, "v5", True, dict(
        hidden_size=48, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0})),
    "llama-head-dim": (LLAMA, Q.F16, "v4", True, dict(
        hidden_size=39, intermediate_size=45, num_attention_heads=3, num_key_value_heads=3, head_dim=26,
        rope_parameters=DEFAULT_ROPE)),
    "mistral": (MISTRAL, Q.F16, "v4", False, dict(
        hidden_size=32, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
    "qwen2": (QWEN2, Q.F32, "v4", False, dict(
        hidden_size=42, intermediate_size=50, num_attention_heads=7, num_key_value_heads=1, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
    "qwen3": (QWEN3, Q.F32, "v5", False, dict(
        hidden_size=34, intermediate_size=46, num_attention_heads=4, num_key_value_heads=2, head_dim=14,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0})),
    "llama-quantised": (LLAMA, None, None, False, dict(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters=DEFAULT_ROPE)),
    "llama-k-quantised": (LLAMA, None, None, False, dict(
        hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1,
        rope_parameters=DEFAULT_ROPE)),
}
# Types of the quantised models by the end of GGUF's names.
MIXED = {"token_embd": Q.Q8_0, "output": Q.Q5_1, "attn_q": Q.Q4_0, "attn_k": Q.Q4_1, "attn_v": Q.Q5_0,
         "attn_output": Q.Q5_1, "ffn_gate": Q.Q8_0, "ffn_up": Q.F16, "ffn_down": Q.BF16}
K_MIXED = {"token_embd": Q.Q6_K, "output": Q.Q6_K, "attn_q": Q.Q4_K, "attn_k": Q.Q5_K, "attn_v": Q.Q6_K,
           "attn_output": Q.Q4_K, "ffn_gate": Q.Q5_K, "ffn_up": Q.Q4_K, "ffn_down": Q.Q6_K}

PROMPTS = [
    "<|bos|>The quick brown fox",
    "a",
    "<|im_start|>user\nin the other house 12\u00e9\U0001f600<|im_end|>\n",
]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def make_tokenizer(kind):
    tok = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(VOCAB)}, MERGES))
    pre = tokenizers.pre_tokenizers
    if kind.startswith("qwen"):
        tok.normalizer = tokenizers.normalizers.NFC()
        tok.pre_tokenizer = pre.Sequence([pre.Split(tokenizers.Regex(QWEN_PATTERN), "isolated"),
                                          pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        tok.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tok


def randomise(model, dtype):
    """Everything random, biases and norms too, in steps that the stored type can hold."""
    generator = torch.Generator().manual_seed(20240229)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.copy_(0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise)
            else:
                p.copy_(noise * (1.0 if "embed" in name else 1.5 / p.shape[1] ** 0.5))
            if dtype in (Q.F16, Q.BF16):
                p.copy_(p.to(torch.float16 if dtype == Q.F16 else torch.bfloat16).float())


def permute(w, heads):
    """GGUF's llama keeps the two members of a rotated pair side by side."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def random_blocks(rng, shape, dtype):
    """A K-quantised matrix whose codes are random and whose scales are sensible."""
    size = {Q.Q4_K: 144, Q.Q5_K: 176, Q.Q6_K: 210}[dtype]
    n = shape[0] * shape[1] // 256
    b = rng.integers(0, 256, (n, size), dtype=np.uint8)
    if dtype == Q.Q6_K:
        b[:, 208:210] = np.full((n, 1), 3e-5, np.float16).view(np.uint8)
    else:
        largest = 15 if dtype == Q.Q4_K else 31
        b[:, 0:2] = np.full((n, 1), 0.005 / largest, np.float16).view(np.uint8)
        b[:, 2:4] = np.full((n, 1), 0.0025, np.float16).view(np.uint8)
    return b.reshape(shape[0], shape[1] // 256 * size)


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, rest = stem[len("model.layers."):].split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def llama3_factors(c):
    r = c.rope_parameters
    freq = 1.0 / r["rope_theta"] ** (np.arange(0, c.head_dim, 2) / c.head_dim)
    wave = 2 * np.pi / freq
    low, high = (r["original_max_position_embeddings"] / r[k] for k in ("low_freq_factor", "high_freq_factor"))
    smooth = (r["original_max_position_embeddings"] / wave - r["low_freq_factor"]) / (
        r["high_freq_factor"] - r["low_freq_factor"])
    middle = 1 / ((1 - smooth) / r["factor"] + smooth)
    return np.where(wave < high, 1.0, np.where(wave > low, r["factor"], middle)).astype(np.float32)


def write_gguf(path, name, model, dtype):
    """Writes the model, and puts what quantisation left of the weights back into it."""
    c = model.config
    arch = "llama" if c.model_type == "mistral" else c.model_type
    w = gguf.GGUFWriter(path, arch)
    w.add_name(name)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if head_dim * c.num_attention_heads != c.hidden_size:
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    w.add_rope_dimension_count(head_dim)
    if c.rope_parameters["rope_type"] == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(c.rope_parameters["factor"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2" if c.model_type.startswith("qwen") else "smollm")
    w.add_token_list(VOCAB)
    w.add_token_types([gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL for t in VOCAB])
    w.add_token_merges([" ".join(m) for m in MERGES])
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_add_bos_token(False)
    w.add_chat_template(TEMPLATE)
    if c.rope_parameters["rope_type"] == "llama3":
        w.add_tensor("rope_freqs.weight", llama3_factors(c))
    rng = np.random.default_rng(7)
    for key, p in model.state_dict().items():
        if key == "lm_head.weight" and c.tie_word_embeddings:
            continue
        heads = c.num_attention_heads if ".q_proj.weight" in key else c.num_key_value_heads
        mixed = arch == "llama" and (".q_proj.weight" in key or ".k_proj.weight" in key)
        target = gguf_name(key)
        data = p.numpy()
        kind = Q.F32 if p.dim() == 1 else dtype
        if kind is None:
            kind = (K_MIXED if "k-quantised" in name else MIXED)[target.split(".")[-2]]
        if mixed:
            data = permute(data, heads)
        if kind in (Q.Q4_K, Q.Q5_K, Q.Q6_K):
            data = random_blocks(rng, p.shape, kind)
        else:
            data = gguf.quantize(np.ascontiguousarray(data), kind)
        w.add_tensor(target, data, raw_dtype=kind)
        back = gguf.dequantize(data, kind).reshape(p.shape)
        with torch.no_grad():
            p.copy_(torch.from_numpy(np.array(unpermute(back, heads) if mixed else back, np.float32)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def as_transformers_4(folder):
    """Rewrites config.json and tokenizer_config.json into their older form."""
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as f:
        c = json.load(f)
    rope = c.pop("rope_parameters")
    c["rope_theta"] = rope.pop("rope_theta")
    c["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    c["torch_dtype"] = c.pop("dtype")
    c["transformers_version"] = "4.57.1"
    c.pop("layer_types", None)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(dict(sorted(c.items())), f, indent=2)
        f.write("\n")
    path = os.path.join(folder, "tokenizer_config.json")
    with open(path, encoding="utf-8") as f:
        t = json.load(f)
    template = os.path.join(folder, "chat_template.jinja")
    with open(template, encoding="utf-8") as f:
        t["chat_template"] = f.read()
    os.remove(template)
    t["added_tokens_decoder"] = {str(VOCAB.index(s)): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                                       "single_word": False, "special": True} for s in SPECIAL}
    t["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("backend", "is_local"):
        t.pop(key, None)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(t, f, indent=2)
        f.write("\n")


def write_folder(folder, model, tok, dtype, style, sharded):
    torch_dtype = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}[dtype]
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS, IM_END], do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    stored = model.to(torch_dtype) if dtype != Q.F32 else model
    stored.save_pretrained(folder, max_shard_size="48KB" if sharded else "5GB")
    model.float()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    if style == "v4":
        as_transformers_4(folder)


def write_reference(path, model, prompts):
    with open(path, "wb") as f:
        f.write(b"SCLOGITS" + struct.pack("<III", 1, len(prompts), model.config.vocab_size))
        for ids in prompts:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            f.write(struct.pack("<I", len(ids)) + np.array(ids, "<i4").tobytes())
            f.write(logits.numpy().astype("<f4").tobytes())


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(os.path.abspath(__file__)), "tiny")
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    for name, (classes, dtype, style, sharded, settings) in MODELS.items():
        config = classes[0](**{
            "vocab_size": len(VOCAB), "num_hidden_layers": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
            "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": None, "tie_word_embeddings": False,
            "attn_implementation": "eager", "dtype": "float32", **settings})
        model = classes[1](config).float().eval()
        randomise(model, dtype)
        tok = make_tokenizer(name)
        write_gguf(os.path.join(out, name + ".gguf"), name, model, dtype)
        if style:
            write_folder(os.path.join(out, name), model, tok, dtype, style, sharded)
            again = classes[1].from_pretrained(os.path.join(out, name), dtype=torch.float32).eval()
            for key, value in model.state_dict().items():
                assert torch.equal(value, again.state_dict()[key]), (name, key)
            model = again  # the reference is what transformers itself makes of the committed folder
        prompts = [tok.encode(p, add_special_tokens=False).ids for p in PROMPTS]
        write_reference(os.path.join(out, name + ".ref"), model, prompts)
        print(name, [len(p) for p in prompts], flush=True)


if __name__ == "__main__":
    main()
