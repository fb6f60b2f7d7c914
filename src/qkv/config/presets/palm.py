"""PaLM 540B (Chowdhery et al. 2022, arXiv 2204.02311): parallel block, one key-value head, SwiGLU, rotary positions."""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.ffn import Gated
from qkv.config.head import LanguageModel
from qkv.config.init import FanInInit
from qkv.config.model import ModelConfig
from qkv.config.norm import LayerNorm
from qkv.config.pattern import Causal
from qkv.config.position import Rotary
from qkv.config.residual import Parallel


def palm_540b() -> ModelConfig:
    """Section 2 and table 1. Its heads are 48 * 256 = 12,288 wide together, in a model of 18,432."""
    # Assumed where the paper is silent: each block has one norm, which both branches read; there is a final norm; the
    # epsilon; that halves of a head form the rotary pairs. Biases are in "none of the dense kernels or layer norms".
    norm = LayerNorm(eps=1e-6, bias=False)
    attention = MultiHead(n_heads=48, n_kv_heads=1, head_dim=256, pattern=Causal(), positions=Rotary())
    block = Block(attention=attention, ffn=Gated(d_ff=4 * 18_432), norm=norm, residual=Parallel(shared_norm=True))
    return ModelConfig(
        vocab_size=256_000,
        d_model=18_432,
        max_seq_len=2048,
        decoder=Stack(n_layers=118, layers=(block,), norm=norm),
        # Section 5: embeddings start from N(0, 1) and serve as the output too, so logits are divided by sqrt(d_model).
        head=LanguageModel(tied=True, scale="rsqrt_d_model"),
        init=FanInInit(),
    )


# With tied embeddings and one norm of 18,432 per block: 256,000 * 18,432 + 118 * (2 * 18,432 * 12,288 for q and o
# + 2 * 18,432 * 256 for k and v + 3 * 18,432 * 73,728 + 18,432) + 18,432 = 540,356,474,880.
MODELS: dict[str, Callable[[], ModelConfig]] = {"palm-540b": palm_540b}
