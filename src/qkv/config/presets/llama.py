"""Llama 1 to 3.2, Code Llama and Llama 2 Long; `llama` and `heads` also serve the families that use Llama's block.

The block: RMS norm before each sublayer, rotary queries and keys, SwiGLU, no biases, a final norm.
Layout is `halves`, that of the Hugging Face checkpoints; Meta's own files pair neighbours, which is the same model
after a fixed permutation of the rows of q_proj and k_proj.
"""

from __future__ import annotations

from collections.abc import Callable

from qkv.config.attention import MultiHead
from qkv.config.block import Block, Stack
from qkv.config.ffn import Gated
from qkv.config.head import LanguageModel
from qkv.config.init import LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.norm import RMSNorm
from qkv.config.pattern import Causal, Pattern
from qkv.config.position import Llama3Scaling, NoScaling, Rotary, RotaryScaling
from qkv.config.residual import PreNorm

UNSCALED, CAUSAL = NoScaling(), Causal()


def heads(
    n_heads: int,
    n_kv_heads: int | None = None,
    *,
    head_dim: int = 128,
    theta: float = 10_000.0,
    scaling: RotaryScaling = UNSCALED,
    pattern: Pattern = CAUSAL,
    qkv_bias: bool = False,
) -> MultiHead:
    """Rotary heads; without `n_kv_heads` every query head has keys and values of its own."""
    return MultiHead(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        pattern=pattern,
        positions=Rotary(theta=theta, scaling=scaling),
        qkv_bias=qkv_bias,
    )


def llama(
    d_model: int,
    n_layers: int,
    attention: MultiHead,
    *,
    d_ff: int,
    vocab_size: int,
    max_seq_len: int,
    eps: float = 1e-5,
    tied: bool = False,
) -> ModelConfig:
    """A uniform stack of Llama's blocks."""
    norm = RMSNorm(eps=eps)
    block = Block(attention=attention, ffn=Gated(d_ff=d_ff), norm=norm, residual=PreNorm())
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=max_seq_len,
        decoder=Stack(n_layers=n_layers, layers=(block,), norm=norm),
        head=LanguageModel(tied=tied),
        init=LlamaInit(),
    )


def llama_1(d_model: int, n_layers: int, n_heads: int, *, d_ff: int) -> ModelConfig:
    """Touvron et al., February 2023 (arXiv 2302.13971), table 2: every head has its own keys and values."""
    return llama(d_model, n_layers, heads(n_heads), d_ff=d_ff, vocab_size=32_000, max_seq_len=2048, eps=1e-6)


def llama_2(d_model: int, n_layers: int, attention: MultiHead, *, d_ff: int) -> ModelConfig:
    """Touvron et al., July 2023 (arXiv 2307.09288), table 1: twice the context, grouped keys in 34B and 70B only."""
    return llama(d_model, n_layers, attention, d_ff=d_ff, vocab_size=32_000, max_seq_len=4096)


def code_llama(d_model: int, n_layers: int, attention: MultiHead, *, d_ff: int, vocab_size: int) -> ModelConfig:
    """Rozière et al. 2023 (arXiv 2308.12950): Llama 2 fine-tuned on 16,384 tokens with theta set to 1,000,000."""
    return llama(d_model, n_layers, attention, d_ff=d_ff, vocab_size=vocab_size, max_seq_len=16_384)


def llama_3(
    d_model: int, n_layers: int, attention: MultiHead, *, d_ff: int, max_seq_len: int = 131_072, tied: bool = False
) -> ModelConfig:
    """Dubey et al. 2024 (arXiv 2407.21783), table 3: 128,256 tokens, theta 500,000, grouped keys in every size."""
    return llama(d_model, n_layers, attention, d_ff=d_ff, vocab_size=128_256, max_seq_len=max_seq_len, tied=tied)


THETA_3 = 500_000.0
SCALING_3_1 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)
SCALING_3_2 = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192)

# Sizes from the tables of the papers, d_ff and epsilon from the released params.json and config.json files. In general
# d_ff = m * ceil(floor(k * floor(8 d / 3)) / m): k = 1, m = 256 for Llama 1 and Llama 2 7B and 13B; k = 1.3, m = 4096
# for Llama 2 70B and Llama 3 70B; k = 1.3, m = 1024 for Llama 3 8B; k = 1.2, m = 4096 for Llama 3 405B.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama-7b": lambda: llama_1(4096, 32, 32, d_ff=11_008),
    "llama-13b": lambda: llama_1(5120, 40, 40, d_ff=13_824),
    "llama-33b": lambda: llama_1(6656, 60, 52, d_ff=17_920),
    "llama-65b": lambda: llama_1(8192, 80, 64, d_ff=22_016),
    "llama-2-7b": lambda: llama_2(4096, 32, heads(32), d_ff=11_008),
    "llama-2-13b": lambda: llama_2(5120, 40, heads(40), d_ff=13_824),
    "llama-2-70b": lambda: llama_2(8192, 80, heads(64, 8), d_ff=28_672),
    # Xiong et al. 2023 (arXiv 2309.16039): Llama 2 trained on with a larger theta and nothing else ("adjusted base
    # frequency"; interpolation was tried and found worse). The window of the series is 32,768; the 70B model's own
    # training sequences had 16,384 tokens.
    "llama-2-long-70b": lambda: llama(
        8192, 80, heads(64, 8, theta=500_000.0), d_ff=28_672, vocab_size=32_000, max_seq_len=32_768
    ),
    # The 7B model has 16 more tokens, for filling in the middle; the 34B model has none, and d_ff of Llama 1 65B.
    "codellama-7b": lambda: code_llama(4096, 32, heads(32, theta=1e6), d_ff=11_008, vocab_size=32_016),
    "codellama-34b": lambda: code_llama(8192, 48, heads(64, 8, theta=1e6), d_ff=22_016, vocab_size=32_000),
    # Llama 3 (April 2024): 8,192 positions, no scaling.
    "llama-3-8b": lambda: llama_3(4096, 32, heads(32, 8, theta=THETA_3), d_ff=14_336, max_seq_len=8192),
    "llama-3-70b": lambda: llama_3(8192, 80, heads(64, 8, theta=THETA_3), d_ff=28_672, max_seq_len=8192),
    # The 405B model came with Llama 3.1 (July 2024): 131,072 positions and its scaling, as in 3.1 8B.
    "llama-3-405b": lambda: llama_3(16_384, 126, heads(128, 8, theta=THETA_3, scaling=SCALING_3_1), d_ff=53_248),
    "llama-3.1-8b": lambda: llama_3(4096, 32, heads(32, 8, theta=THETA_3, scaling=SCALING_3_1), d_ff=14_336),
    # Llama 3.2 (September 2024), config.json: factor 32, tied head, heads of 64 in the smallest model.
    "llama-3.2-1b": lambda: llama_3(
        2048, 16, heads(32, 8, head_dim=64, theta=THETA_3, scaling=SCALING_3_2), d_ff=8192, tied=True
    ),
    "llama-3.2-3b": lambda: llama_3(3072, 28, heads(24, 8, theta=THETA_3, scaling=SCALING_3_2), d_ff=8192, tied=True),
}
