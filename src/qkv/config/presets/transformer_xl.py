"""Transformer-XL (Dai 2019, arXiv 1901.02860): relative sinusoids, segment memory, adaptive embedding and softmax."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import AdaptiveTable, Embedding
from qkv.config.ffn import Dense
from qkv.config.head import AdaptiveSoftmax
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Causal
from qkv.config.position import TransformerXL
from qkv.config.residual import PostNorm


def wikitext_103_large() -> ModelConfig:
    """The released checkpoint `transfo-xl-wt103`: the paper's large model for WikiText-103 (perplexity 18.3)."""
    # Clusters of 20,000, 20,000, 160,000 and 67,735 tokens with rows of width 1024, 256, 64 and 16 (`div_val` 4).
    cutoffs, dropout = (20_000, 40_000, 200_000), 0.2
    attention = MultiHead(
        n_heads=16,
        head_dim=64,
        pattern=Causal(),
        positions=TransformerXL(clamp=1000),  # `clamp_len`; `untie_r`: every layer has its own u and v
        dropout=dropout,
    )
    block = Block(
        attention=attention,
        ffn=Dense(d_ff=4096, activation="relu", bias=True, dropout=dropout),
        norm=LayerNorm(eps=1e-5),
        residual=PostNorm(),  # `pre_lnorm` is false
        dropout=dropout,
    )
    return ModelConfig(
        vocab_size=267_735,
        d_model=1024,
        max_seq_len=768,  # trained on segments of 384 tokens that also see a memory of 384; evaluated with 128 and 1600
        embedding=Embedding(tokens=AdaptiveTable(cutoffs=cutoffs, divisor=4), scale="sqrt_d_model", dropout=dropout),
        decoder=Stack(n_layers=18, layers=(block,)),
        # `tie_projs`: the projections of the three tail clusters are the embedding's, that of the first is its own.
        head=AdaptiveSoftmax(cutoffs=cutoffs, divisor=4, tied=True, tied_projections=(False, True, True, True)),
    )


# Sizes from the released configuration; dropout 0.2 from the authors' training script (the configuration that came with
# a later conversion says 0.1, and 0 in attention). The number of parameters, 285,205,322, follows from these:
#   embedding: rows       20,000 * 1024 + 20,000 * 256 + 160,000 * 64 + 67,735 * 16     =  36,923,760
#              projections  1024 * (1024 + 256 + 64 + 16)                               =   1,392,640
#   layers:    18 * (5 * 1024^2 for q, k, v, o, r  +  2 * 1024 for u, v  +  2 * 1024 * 4096 + 4096 + 1024 for the
#              feed-forward network  +  4 * 1024 for two norms) = 18 * 13,642,752       = 245,569,536
#   softmax:   3 cluster entries with bias 3,075, biases 267,735, first projection 1024^2 = 1,319,386
MODELS: dict[str, Callable[[], ModelConfig]] = {"transformer-xl-wt103": wikitext_103_large}
