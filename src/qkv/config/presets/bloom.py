"""BLOOM (BigScience 2022, arXiv 2211.05100): GPT-2's block with ALiBi, and a norm after the embedding."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Dense
from qkv.config.head import LanguageModel
from qkv.config.init import LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Causal
from qkv.config.position import Alibi
from qkv.config.residual import PreNorm


def bloom(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    """Biases everywhere, tanh-GELU, a tied head over 250,880 rows (250,680 tokens, padded)."""
    norm = LayerNorm(eps=1e-5)
    attention = MultiHead(
        n_heads=n_heads,
        head_dim=d_model // n_heads,
        pattern=Causal(),
        positions=Alibi(),
        qkv_bias=True,
        o_bias=True,
    )
    ffn = Dense(d_ff=4 * d_model, activation="gelu-tanh", bias=True)
    block = Block(attention=attention, ffn=ffn, norm=norm, residual=PreNorm())
    return ModelConfig(
        vocab_size=250_880,
        d_model=d_model,
        max_seq_len=2048,
        embedding=Embedding(norm=norm),
        decoder=Stack(n_layers=n_layers, layers=(block,), norm=norm),
        head=LanguageModel(tied=True),
        init=LlamaInit(std=0.02),  # `initializer_range`
    )


# Table 3 of the paper and config.json. 112 heads are no power of two: ALiBi takes the slopes of 64, then 48 of 128.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "bloom-560m": lambda: bloom(d_model=1024, n_layers=24, n_heads=16),
    "bloom-176b": lambda: bloom(d_model=14_336, n_layers=70, n_heads=112),
}
