"""Pieces of templates and rules that families share."""

from __future__ import annotations

from qkv.checkpoint.rules import Rule

ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "silu": "silu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh", "quick_gelu": "quick-gelu", "swish": "silu", "tanh": "tanh", "relu2": "relu2",
    "gelu_python": "gelu",
}  # fmt: skip
"""Their names of activations."""

LLAMA_LAYER = (
    *(
        Rule(f"model.layers.{{i}}.self_attn.{name}.{kind}", f"decoder.layers.{{i}}.attention.{name}.{kind}")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        for kind in ("weight", "bias")
    ),
    *(
        Rule(f"model.layers.{{i}}.mlp.{name}.{kind}", f"decoder.layers.{{i}}.ffn.{name}.{kind}")
        for name in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    ),
)
"""Attention and gated network under Llama's names; a bias rule applies where the config has the bias."""

LLAMA_FRAME = (
    Rule("model.embed_tokens.weight", "embed.tokens.weight"),
    Rule("model.norm.weight", "decoder.norm.weight"),
    Rule("lm_head.weight", "head.weight"),
)
"""Embedding, final norm and head under Llama's names."""
