"""What a KV cache takes: kinds of attention at equal width, and published models.

    MHA      2 n_heads head_dim       keys and values of every head (Vaswani 2017)
    GQA      2 n_kv_heads head_dim    of every group of heads (Ainslie 2023)
    MQA      2 head_dim               of one (Shazeer 2019)
    MLA      kv_rank + rope_dim       a latent and a turned key for all heads (DeepSeek-V2 2024)
    window   as MHA, for the last W tokens only (Beltagy 2020)

numbers per token and layer. The teaching text's 2 x layers x length x d_model (question 4) is MHA's count of numbers,
where the heads fill the model; bytes are that times the size of a number and the rows of the batch.

Nothing here needs weights: the plan comes from the config, and a cache is made from it without a model, so that the two
can be compared at any width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qkv.cache.cache import Cache, Options
from qkv.cache.spec import CODE_BITS
from qkv.cache.store import HostStore
from qkv.config import (
    Attention,
    Block,
    Causal,
    Gated,
    LanguageModel,
    Latent,
    ModelConfig,
    MultiHead,
    PreNorm,
    RMSNorm,
    Rotary,
    SlidingWindow,
    Stack,
)
from qkv.config.presets import preset
from qkv.plan import kv_cache_bytes

WINDOW = 1024
CONTEXTS = (512, 4096, 32_768)
PUBLISHED = ("llama-2-7b", "llama-3-8b", "mistral-7b", "deepseek-v2")
PUBLISHED_CONTEXTS = (4096, 32_768, 131_072)
_LARGE = 1 << 30
"""Bytes above which a cache is planned and not made."""


@dataclass(frozen=True)
class Size:
    """A cache of 16-bit numbers for one row of `context` tokens."""

    kind: str
    token_bytes: int
    """Of the first token; beyond its window a windowed layer needs no more."""
    context: int
    planned: int
    made: int | None
    """`nbytes` of the cache itself; None where it would be too large to make."""
    coded: dict[str, int]
    """Planned for each codec."""
    share: float | None = None
    """Of what keys and values of every head would take."""


def sizes(config: ModelConfig, contexts: tuple[int, ...] = CONTEXTS, own: str | None = None) -> list[Size]:
    """Every kind at the width, depth and heads of `config`; also the model itself, if it is to be called `own`."""
    kinds = variants(config)
    every = {context: kv_cache_bytes(next(iter(kinds.values())), context) for context in contexts}
    kinds = ({} if own is None else {own: config}) | kinds
    found = [_size(kind, one, context) for kind, one in kinds.items() for context in contexts]
    return [replace(size, share=size.planned / every[size.context]) for size in found]


def published() -> list[Size]:
    """Models as they were released, from the plan alone."""
    every = ((name, preset(name), context) for name in PUBLISHED for context in PUBLISHED_CONTEXTS)
    return [_size(name, config, context, make=False) for name, config, context in every]


def _size(kind: str, config: ModelConfig, context: int, make: bool = True) -> Size:
    planned, made = kv_cache_bytes(config, context), None
    if make and planned <= _LARGE:
        made = Cache(config, HostStore("float16"), 1, Options(context)).nbytes
        assert made == planned, f"the plan says {planned} bytes for {kind} at {context}, the cache has {made}"
    coded = {codec: kv_cache_bytes(config, context, codec=codec) for codec in CODE_BITS}
    return Size(kind, kv_cache_bytes(config, 1), context, planned, made, coded)


def variants(config: ModelConfig) -> dict[str, ModelConfig]:
    """Decoders with the width, depth and heads of `config`, by their kind of attention: first the plain one."""
    assert config.decoder is not None
    first = config.decoder.blocks[0].attention
    n, f = first.n_heads, first.head_dim if isinstance(first, MultiHead) else config.d_model // first.n_heads
    groups = max(k for k in range(1, max(1, n // 4) + 1) if n % k == 0)
    half = max(2, f // 4 * 2)
    every: dict[str, Attention] = {
        f"MHA, {n} heads": MultiHead(n_heads=n, head_dim=f, pattern=Causal()),
        f"GQA, {groups} key-value heads": MultiHead(n_heads=n, head_dim=f, n_kv_heads=groups, pattern=Causal()),
        "MQA, 1 key-value head": MultiHead(n_heads=n, head_dim=f, n_kv_heads=1, pattern=Causal()),
        f"MLA, latent {4 * f} + {half}": Latent(  # DeepSeek-V2's proportions
            n_heads=n,
            kv_rank=4 * f,
            nope_dim=f,
            rope_dim=half,
            v_head_dim=f,
            pattern=Causal(),
            positions=Rotary(),
        ),
        f"MHA, window {WINDOW}": MultiHead(n_heads=n, head_dim=f, pattern=SlidingWindow(window=WINDOW)),
    }
    return {kind: _decoder(config.d_model, config.decoder.n_layers, attention) for kind, attention in every.items()}


def _decoder(d_model: int, n_layers: int, attention: Attention) -> ModelConfig:
    block = Block(attention=attention, ffn=Gated(d_ff=4 * d_model), norm=RMSNorm(), residual=PreNorm())
    stack = Stack(n_layers=n_layers, layers=(block,), norm=RMSNorm())
    return ModelConfig(vocab_size=256, d_model=d_model, max_seq_len=4096, decoder=stack, head=LanguageModel(tied=True))
