#!/usr/bin/env python3
"""Writes rope.h: cosines and sines that transformers computes, in float32. Needs torch and transformers."""
import os

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

CASES = [
    # head_dim, theta, position, rope_scaling
    (64, 10000.0, 0, None),
    (64, 10000.0, 1, None),
    (64, 100000.0, 8191, None),
    (64, 500000.0, 5000, {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}),
    (128, 500000.0, 20000, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 8192}),
    (128, 10000.0, 4095, {"rope_type": "linear", "factor": 4.0}),
    (80, 10000.0, 2047, None),
]


def main():
    out = ["// Made by make_rope.py with torch %s: do not edit." % torch.__version__.split("+")[0],
           "static const struct rope_golden {", "\tint dim;", "\tfloat theta;", "\tint position;",
           "\tenum rope_scaling scaling;", "\tfloat factor, low, high;", "\tint original_context;",
           "\tfloat cosine[64], sine[64];", "} rope_golden[] = {"]
    for dim, theta, position, scaling in CASES:
        config = LlamaConfig(hidden_size=dim, num_attention_heads=1, head_dim=dim, max_position_embeddings=131072,
                             rope_parameters=dict({"rope_theta": theta, "rope_type": "default"}, **(scaling or {})))
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.tensor([[position]]))
        s = scaling or {}
        kind = {"llama3": "ROPE_SCALING_LLAMA3", "linear": "ROPE_SCALING_LINEAR"}.get(s.get("rope_type"),
                                                                                     "ROPE_SCALING_NONE")

        def row(t):
            return "{" + ", ".join("%.9gf" % x if "." in "%.9g" % x or "e" in "%.9g" % x else "%.9g" % x
                                   for x in t[0, 0, :dim // 2].tolist()) + "}"
        out.append("\t{%d, %g, %d, %s, %g, %g, %g, %d,\n\t %s,\n\t %s}," % (
            dim, theta, position, kind, s.get("factor", 1), s.get("low_freq_factor", 1), s.get("high_freq_factor", 4),
            s.get("original_max_position_embeddings", 0), row(cos), row(sin)))
    out.append("};")
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "rope.h"), "w") as f:
        f.write("\n".join(out) + "\n")


main()
