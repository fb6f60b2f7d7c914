"""ChatGLM2 and ChatGLM3 (THUDM 2023): Llama's block, two key-value heads, QKV bias, and half of each head turned.

The turned half is the first; its 64 elements pair as neighbours (2i, 2i + 1) with frequencies theta^(-2i/64).
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.model import ModelConfig
from qkv.config.pattern import Causal
from qkv.config.position import Rotary
from qkv.config.presets.llama import llama


def chatglm(max_seq_len: int) -> ModelConfig:
    """The decoder that both 6B models share; 65,024 is `padded_vocab_size`."""
    attention = MultiHead(
        n_heads=32,
        n_kv_heads=2,
        head_dim=128,
        pattern=Causal(),
        positions=Rotary(theta=10_000.0, fraction=0.5, layout="pairs"),
        qkv_bias=True,
    )
    config = llama(4096, 28, attention, d_ff=13_696, vocab_size=65_024, max_seq_len=max_seq_len, eps=1e-5)
    # Its norms round after the weight has multiplied, unlike Llama's.
    return config.override({"decoder.layers.*.norm.cast": "after", "decoder.norm.cast": "after"})


# config.json of THUDM/chatglm2-6b and THUDM/chatglm3-6b: they differ in `seq_length` alone (and in their training).
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "chatglm2-6b": lambda: chatglm(max_seq_len=32_768),
    "chatglm3-6b": lambda: chatglm(max_seq_len=8192),
}
