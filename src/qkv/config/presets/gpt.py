"""GPT-1, GPT-2 and GPT-3: decoders with learned positions, biases everywhere, tanh-GELU and a tied head."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.embedding import Embedding
from qkv.config.ffn import Dense
from qkv.config.head import LanguageModel
from qkv.config.init import GPT2Init, LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Causal
from qkv.config.position import Learned
from qkv.config.residual import PostNorm, PreNorm, Residual


def layer(d_model: int, n_heads: int, residual: Residual, dropout: float) -> Block:
    """A layer whose feed-forward network is four times as wide as the model."""
    attention = MultiHead(
        n_heads=n_heads,
        head_dim=d_model // n_heads,
        pattern=Causal(),
        qkv_bias=True,
        o_bias=True,
        dropout=dropout,
    )
    return Block(
        attention=attention,
        ffn=Dense(d_ff=4 * d_model, activation="gelu-tanh", bias=True),
        norm=LayerNorm(eps=1e-5),
        residual=residual,
        dropout=dropout,
    )


def gpt_1() -> ModelConfig:
    """openai-gpt (Radford et al. 2018, section 4.1): post-norm, hence without a final norm; 40,478 tokens."""
    return ModelConfig(
        vocab_size=40_478,  # 40,000 merges and 478 single symbols
        d_model=768,
        max_seq_len=512,
        embedding=Embedding(positions=Learned(), dropout=0.1),
        decoder=Stack(n_layers=12, layers=(layer(768, 12, PostNorm(), dropout=0.1),)),
        head=LanguageModel(tied=True),
        init=LlamaInit(std=0.02),  # "a simple weight initialization of N(0, 0.02)": the same for every matrix
    )


def gpt_2(d_model: int, n_layers: int, n_heads: int, *, max_seq_len: int = 1024, dropout: float = 0.1) -> ModelConfig:
    """Pre-norm with a final norm, 50,257 tokens (Radford et al. 2019, section 2.3)."""
    return ModelConfig(
        vocab_size=50_257,
        d_model=d_model,
        max_seq_len=max_seq_len,
        embedding=Embedding(positions=Learned(), dropout=dropout),
        decoder=Stack(
            n_layers=n_layers, layers=(layer(d_model, n_heads, PreNorm(), dropout),), norm=LayerNorm(eps=1e-5)
        ),
        head=LanguageModel(tied=True),
        init=GPT2Init(),
    )


# GPT-2: table 2 of the paper, heads and dropout from the released hparams and config.json.
#
# GPT-3 (Brown et al. 2020, arXiv 2005.14165): table 2.1; 2,048 positions, no dropout reported. The paper alternates
# dense layers with locally banded sparse ones (section 2.1) and publishes neither the band's width nor its stride.
# Every layer here is DENSE; no pattern has weights, so the count is the same.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "gpt-1": gpt_1,
    "gpt2": lambda: gpt_2(d_model=768, n_layers=12, n_heads=12),
    "gpt2-medium": lambda: gpt_2(d_model=1024, n_layers=24, n_heads=16),
    "gpt2-large": lambda: gpt_2(d_model=1280, n_layers=36, n_heads=20),
    "gpt2-xl": lambda: gpt_2(d_model=1600, n_layers=48, n_heads=25),
    "gpt-3-small": lambda: gpt_2(d_model=768, n_layers=12, n_heads=12, max_seq_len=2048, dropout=0.0),
    "gpt-3-175b": lambda: gpt_2(d_model=12_288, n_layers=96, n_heads=96, max_seq_len=2048, dropout=0.0),
}
