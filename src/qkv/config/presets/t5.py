"""T5 (Raffel et al. 2020, arXiv 1910.10683): an encoder-decoder with relative buckets, RMS norms and no biases.

Scores are not scaled by 1/sqrt(head_dim); the initialisation of the queries takes its place. The heads together are
wider than the model in T5-3B (4,096 over 1,024) and T5-11B (16,384 over 1,024).
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Dense, FeedForward, Gated
from qkv.config.head import LanguageModel
from qkv.config.init import T5Init
from qkv.config.model import ModelConfig
from qkv.config.norm import RMSNorm
from qkv.config.pattern import Bidirectional, Causal, Pattern
from qkv.config.position import NoPositions, Positions, T5Buckets
from qkv.config.residual import PreNorm

DROPOUT = 0.1  # of the released configurations; the v1.1 models were pre-trained without, and fine-tune with it
TIED_HEAD = LanguageModel(tied=True, scale="rsqrt_d_model")  # v1.0: hidden states / sqrt(d_model), then the token table
OWN_HEAD = LanguageModel(tied=False)  # v1.1


def heads(n_heads: int, head_dim: int, pattern: Pattern, positions: Positions) -> MultiHead:
    """Attention without biases whose scores are used as they are."""
    return MultiHead(
        n_heads=n_heads, head_dim=head_dim, pattern=pattern, positions=positions, scale=1.0, dropout=DROPOUT
    )


def relu(d_ff: int) -> FeedForward:
    """The network of v1.0."""
    return Dense(d_ff=d_ff, activation="relu", dropout=DROPOUT)


def gated_gelu(d_ff: int) -> FeedForward:
    """The network of v1.1 (Shazeer 2020); its GELU is the tanh form."""
    return Gated(d_ff=d_ff, activation="gelu-tanh", dropout=DROPOUT)


def t5(
    d_model: int, n_layers: int, n_heads: int, *, head_dim: int = 64, ffn: FeedForward, head: LanguageModel = TIED_HEAD
) -> ModelConfig:
    """`n_layers` layers in each stack, whose layers share 32 buckets of distances up to 128."""
    norm = RMSNorm(eps=1e-6)
    seen = heads(n_heads, head_dim, Bidirectional(), T5Buckets(bidirectional=True))
    past = heads(n_heads, head_dim, Causal(), T5Buckets(bidirectional=False))
    source = heads(n_heads, head_dim, Bidirectional(), NoPositions())  # cross-attention has no positions
    encoder = Block(attention=seen, ffn=ffn, norm=norm, residual=PreNorm(), dropout=DROPOUT)
    decoder = Block(attention=past, cross_attention=source, ffn=ffn, norm=norm, residual=PreNorm(), dropout=DROPOUT)
    return ModelConfig(
        vocab_size=32_128,  # 32,000 pieces and 100 sentinels, padded to a multiple of 128
        d_model=d_model,
        max_seq_len=512,
        embedding=Embedding(dropout=DROPOUT),
        encoder=Stack(n_layers=n_layers, layers=(encoder,), norm=norm),
        decoder=Stack(n_layers=n_layers, layers=(decoder,), norm=norm),
        head=head,
        init=T5Init(),
    )


# Section 3.7 of the paper and the released config.json files (`d_kv` is head_dim); v1.1: google/t5-v1_1-base.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "t5-small": lambda: t5(512, n_layers=6, n_heads=8, ffn=relu(2048)),
    "t5-base": lambda: t5(768, n_layers=12, n_heads=12, ffn=relu(3072)),
    "t5-large": lambda: t5(1024, n_layers=24, n_heads=16, ffn=relu(4096)),
    "t5-3b": lambda: t5(1024, n_layers=24, n_heads=32, head_dim=128, ffn=relu(16_384)),
    "t5-11b": lambda: t5(1024, n_layers=24, n_heads=128, head_dim=128, ffn=relu(65_536)),
    "t5-v1.1-base": lambda: t5(768, n_layers=12, n_heads=12, ffn=gated_gelu(2048), head=OWN_HEAD),
}
