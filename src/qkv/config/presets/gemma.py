"""Gemma 3 (Google 2025, arXiv 2503.19786): five local layers, then a global one; each sublayer between two norms."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Gated
from qkv.config.head import LanguageModel
from qkv.config.init import LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.norm import RMSNorm
from qkv.config.pattern import Causal, Pattern, SlidingWindow
from qkv.config.position import Rotary
from qkv.config.residual import SandwichNorm

NORM = RMSNorm(eps=1e-6, unit_offset=True, cast="after")  # factor 1 + weight, multiplied before rounding


def layer(pattern: Pattern, theta: float) -> Block:
    """One layer of the 270M model: its four heads of 256 are wider together than the model of 640."""
    attention = MultiHead(
        n_heads=4,
        n_kv_heads=1,
        head_dim=256,  # and the scores are divided by sqrt(256): `query_pre_attn_scalar`
        pattern=pattern,
        positions=Rotary(theta=theta),
        qk_norm=NORM,
    )
    return Block(attention=attention, ffn=Gated(d_ff=2048, activation="gelu-tanh"), norm=NORM, residual=SandwichNorm())


def gemma_3_270m() -> ModelConfig:
    """google/gemma-3-270m: windows of 512 with theta 10,000 in local layers, 1,000,000 in global ones."""
    local = layer(SlidingWindow(window=512), theta=10_000.0)
    whole = layer(Causal(), theta=1e6)
    return ModelConfig(
        vocab_size=262_144,
        d_model=640,
        max_seq_len=32_768,
        embedding=Embedding(scale="sqrt_d_model"),
        decoder=Stack(n_layers=18, layers=(*(local,) * 5, whole), norm=NORM),
        head=LanguageModel(tied=True),
        init=LlamaInit(std=0.02),
    )


# config.json of the release. Unlike Gemma 2 there is no softcap; unlike the larger Gemma 3 no scaling of positions.
MODELS: dict[str, Callable[[], ModelConfig]] = {"gemma-3-270m": gemma_3_270m}
