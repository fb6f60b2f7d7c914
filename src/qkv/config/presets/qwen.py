"""Qwen (Bai 2023, arXiv 2309.16609) and Qwen2 (Yang 2024, arXiv 2407.10671): Llama's block with QKV bias."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.model import ModelConfig
from qkv.config.pattern import Causal
from qkv.config.position import QwenDynamicScaling, Rotary
from qkv.config.presets.llama import heads, llama


def qwen_7b() -> ModelConfig:
    """Qwen/Qwen-7B in its present form, trained on 8,192 tokens (the first release of August 2023 on 2,048)."""
    # `use_dynamic_ntk` and `use_logn_attn`: beyond `seq_length` the rotary base grows with the row, and queries grow
    # with the logarithm of their position. Its `intermediate_size` 22,016 counts gate and up together.
    attention = MultiHead(
        n_heads=32,
        head_dim=128,
        pattern=Causal(),
        positions=Rotary(theta=10_000.0, scaling=QwenDynamicScaling(original_max_seq_len=8192)),
        qkv_bias=True,
        log_n=8192,
    )
    return llama(4096, 32, attention, d_ff=11_008, vocab_size=151_936, max_seq_len=8192, eps=1e-6)


def qwen_2(d_model: int, n_layers: int, attention: MultiHead, *, d_ff: int, eps: float = 1e-6) -> ModelConfig:
    """A base model of table 1 that has its own head: 152,064 rows."""
    return llama(d_model, n_layers, attention, d_ff=d_ff, vocab_size=152_064, max_seq_len=32_768, eps=eps)


def small_qwen_2(d_model: int, n_layers: int, attention: MultiHead, *, d_ff: int) -> ModelConfig:
    """A base model of table 1 whose head is the token table: 151,936 rows."""
    return llama(d_model, n_layers, attention, d_ff=d_ff, vocab_size=151_936, max_seq_len=32_768, eps=1e-6, tied=True)


# Qwen2: table 1 and section 3 (32,768 tokens, theta 1,000,000), config.json of the base models; YaRN is an option at
# inference, not part of the trained model. The 72B base model's epsilon is 1e-5.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "qwen-7b": qwen_7b,
    "qwen2-0.5b": lambda: small_qwen_2(896, 24, heads(14, 2, head_dim=64, theta=1e6, qkv_bias=True), d_ff=4864),
    "qwen2-1.5b": lambda: small_qwen_2(1536, 28, heads(12, 2, theta=1e6, qkv_bias=True), d_ff=8960),
    "qwen2-7b": lambda: qwen_2(3584, 28, heads(28, 4, theta=1e6, qkv_bias=True), d_ff=18_944),
    "qwen2-72b": lambda: qwen_2(8192, 80, heads(64, 8, theta=1e6, qkv_bias=True), d_ff=29_568, eps=1e-5),
}
