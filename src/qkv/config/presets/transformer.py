"""The Transformer of 2017 (Vaswani et al., arXiv 1706.03762).

Encoder and decoder of 6 post-norm layers, sinusoids, one matrix for source, target and pre-softmax (section 3.4).
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Dense
from qkv.config.head import LanguageModel
from qkv.config.init import XavierInit
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Bidirectional, Causal
from qkv.config.position import Sinusoidal
from qkv.config.residual import PostNorm


def vaswani(d_model: int, n_heads: int, d_ff: int, dropout: float) -> ModelConfig:
    """An encoder-decoder as the paper describes it."""
    # The paper's projections have no biases (section 3.2.2), its feed-forward networks do (equation 2). Of the norms it
    # says only "layer normalization": weight and bias, with the epsilon of its released code.
    norm, width = LayerNorm(eps=1e-6), d_model // n_heads
    ffn = Dense(d_ff=d_ff, activation="relu", bias=True)
    both_sides = MultiHead(n_heads=n_heads, head_dim=width, pattern=Bidirectional())
    to_the_past = MultiHead(n_heads=n_heads, head_dim=width, pattern=Causal())
    encoder = Block(attention=both_sides, ffn=ffn, norm=norm, residual=PostNorm(), dropout=dropout)
    decoder = Block(
        attention=to_the_past, cross_attention=both_sides, ffn=ffn, norm=norm, residual=PostNorm(), dropout=dropout
    )
    return ModelConfig(
        vocab_size=37_000,  # "about 37000 tokens" of byte pairs shared by English and German (section 5.1)
        d_model=d_model,
        max_seq_len=256,  # no limit in the paper, and none in a sinusoid: the longest sentence that its code trains on
        # Section 5.4 drops out the output of each sublayer and the sums of embeddings and positions, nothing else.
        embedding=Embedding(scale="sqrt_d_model", positions=Sinusoidal(), dropout=dropout),
        encoder=Stack(n_layers=6, layers=(encoder,)),
        decoder=Stack(n_layers=6, layers=(decoder,)),
        head=LanguageModel(tied=True),
        init=XavierInit(),
    )


# Table 3, rows "base" and "big". The big model's dropout is 0.3 for English-German, and 0.1 for English-French.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "transformer-base": lambda: vaswani(d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
    "transformer-big": lambda: vaswani(d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
}
