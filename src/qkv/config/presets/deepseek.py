"""DeepSeek: LLM (arXiv 2401.02954), V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437).

LLM is Llama's architecture. V2 and V3 have latent attention (one vector of 512 and a rotary key of 64 per token) and,
after the first layers, mixtures of experts of which each token may reach a few groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from qkv.config.attention import Latent
from qkv.config.block import Block, Stack
from qkv.config.ffn import Gated, MixtureOfExperts
from qkv.config.head import LanguageModel
from qkv.config.init import LlamaInit
from qkv.config.model import ModelConfig
from qkv.config.norm import RMSNorm
from qkv.config.pattern import Causal
from qkv.config.position import Rotary, YarnScaling
from qkv.config.presets.llama import heads, llama
from qkv.config.residual import PreNorm

NORM = RMSNorm(eps=1e-6)
INIT = LlamaInit(std=0.006)  # all three papers; the `initializer_range` 0.02 of config.json is a default


def latent(mscale: float) -> Latent:
    """128 heads over latents of 1,536 (queries) and 512 (keys and values), extended from 4,096 tokens by YaRN."""
    # YaRN's temperature: the scores, not cos and sin, are multiplied by m^2 with m = 0.1 * mscale * ln(factor) + 1
    # (V2's section 3.1.4 fits 0.0707 ln s + 1). mscale equals mscale_all_dim, so that cos and sin keep their size.
    factor = 40.0
    temperature = 0.1 * mscale * math.log(factor) + 1.0
    scaling = YarnScaling(
        factor=factor,
        original_max_seq_len=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
    )
    nope_dim, rope_dim = 128, 64
    return Latent(
        n_heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_head_dim=128,
        pattern=Causal(),
        positions=Rotary(theta=10_000.0, layout="pairs", scaling=scaling),  # the checkpoints store pairs as neighbours
        norm=NORM,
        scale=temperature**2 / math.sqrt(nope_dim + rope_dim),
    )


def sparse(
    d_model: int,
    n_layers: int,
    attention: Latent,
    *,
    dense: tuple[int, int],
    experts: MixtureOfExperts,
    vocab_size: int,
) -> ModelConfig:
    """`dense` is how many layers come first, and the width of their feed-forward network; experts fill the others."""
    n_dense, d_ff = dense
    first = Block(attention=attention, ffn=Gated(d_ff=d_ff), norm=NORM, residual=PreNorm())
    other = Block(attention=attention, ffn=experts, norm=NORM, residual=PreNorm())
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        max_seq_len=131_072,  # "128K" in both papers; config.json allows 40 * 4,096 = 163,840
        decoder=Stack(n_layers=n_layers, first=(first,) * n_dense, layers=(other,), norm=NORM),
        head=LanguageModel(tied=False),
        init=INIT,
    )


def deepseek_v2() -> ModelConfig:
    """deepseek-ai/DeepSeek-V2: 6 of 160 experts inside the 3 best of 8 groups; two shared experts make one of 3,072."""
    experts = MixtureOfExperts(
        n_experts=160,
        top_k=6,
        d_ff=1536,
        shared_d_ff=2 * 1536,
        score="softmax",
        normalize=False,
        scale=16.0,
        n_groups=8,
        top_groups=3,
        group_score="max",
    )
    return sparse(5120, 60, latent(mscale=0.707), dense=(1, 12_288), experts=experts, vocab_size=102_400)


def deepseek_v3() -> ModelConfig:
    """deepseek-ai/DeepSeek-V3: 8 of 256 experts inside the 4 best of 8 groups, balanced by a correction, not a loss."""
    # 671,026,419,200 parameters with the routers' corrections, 671,026,404,352 without these 58 * 256 = 14,848. The
    # extra layer that predicts a second token in training, stored after the 61 of the release, is not part of it.
    experts = MixtureOfExperts(
        n_experts=256,
        top_k=8,
        d_ff=2048,
        shared_d_ff=2048,
        score="sigmoid",
        normalize=True,
        scale=2.5,
        correction=True,
        n_groups=8,
        top_groups=4,
        group_score="top2",
    )
    return sparse(7168, 61, latent(mscale=1.0), dense=(3, 18_432), experts=experts, vocab_size=129_280)


# LLM: table 2 of the paper. V2 and V3: section 3.1.2 and 4.2 of the papers, and config.json.
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "deepseek-llm-7b": lambda: llama(
        4096, 30, heads(32), d_ff=11_008, vocab_size=102_400, max_seq_len=4096, eps=1e-6
    ).override({"init": INIT}),
    "deepseek-llm-67b": lambda: llama(
        8192, 95, heads(64, 8), d_ff=22_016, vocab_size=102_400, max_seq_len=4096, eps=1e-6
    ).override({"init": INIT}),
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
}
