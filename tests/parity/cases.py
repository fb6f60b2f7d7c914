"""The table of toy models: every member of every union stands in at least one row.

`CASES` is the hand-made part; `ALL` adds every preset at toy size. `INPUTS` says which inputs a model is tried with:
plain, padded on either side, packed documents, explicit positions, and what its topology needs besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qkv import config as c

V, D = 61, 16
Arrays = dict[str, np.ndarray]


def attention(**changes: Any) -> c.MultiHead:
    """Grouped heads whose width times number is not d_model."""
    defaults: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "pattern": c.Causal()}
    return c.MultiHead(**(defaults | changes))


def block(**changes: Any) -> c.Block:
    """A small pre-norm block; `attention` may be given whole."""
    defaults: dict[str, Any] = {
        "attention": attention(),
        "ffn": c.Gated(d_ff=20),
        "norm": c.RMSNorm(eps=1e-5),
        "residual": c.PreNorm(),
    }
    return c.Block(**(defaults | changes))


def decoder(*blocks: c.Block, n_layers: int = 2, **changes: Any) -> c.ModelConfig:
    """A language model of these blocks."""
    stack = c.Stack(n_layers=n_layers, layers=blocks or (block(),), norm=c.RMSNorm(eps=1e-5))
    defaults: dict[str, Any] = {
        "vocab_size": V,
        "d_model": D,
        "max_seq_len": 32,
        "decoder": stack,
        "head": c.LanguageModel(tied=True),
    }
    return c.ModelConfig(**(defaults | changes))


def encoder(head: c.Head, pattern: c.Pattern | None = None, **changes: Any) -> c.ModelConfig:
    """A BERT-like post-norm encoder."""
    looks = attention(pattern=pattern or c.Bidirectional(), n_kv_heads=4, qkv_bias=True, o_bias=True)
    layer = block(
        attention=looks,
        ffn=c.Dense(d_ff=20, activation="gelu", bias=True),
        norm=c.LayerNorm(eps=1e-12),
        residual=c.PostNorm(),
    )
    embedding = c.Embedding(positions=c.Learned(), n_segments=2, norm=c.LayerNorm(eps=1e-12))
    stack = c.Stack(n_layers=2, layers=(layer,))
    defaults: dict[str, Any] = {
        "vocab_size": V,
        "d_model": D,
        "max_seq_len": 32,
        "embedding": embedding,
        "encoder": stack,
    }
    return c.ModelConfig(**(defaults | {"head": head, "init": c.BertInit()} | changes))


def encoder_decoder(**changes: Any) -> c.ModelConfig:
    """A 2017-like model."""

    def layer(pattern: c.Pattern, cross: bool) -> c.Block:
        looks = attention(pattern=pattern, n_kv_heads=4)
        return block(
            attention=looks,
            cross_attention=attention(pattern=c.Bidirectional(), n_kv_heads=2) if cross else None,
            ffn=c.Dense(d_ff=20, activation="relu", bias=True),
            norm=c.LayerNorm(eps=1e-6),
            residual=c.PostNorm(),
        )

    defaults: dict[str, Any] = {
        "vocab_size": V,
        "d_model": D,
        "max_seq_len": 32,
        "embedding": c.Embedding(scale="sqrt_d_model", positions=c.Sinusoidal()),
        "encoder": c.Stack(n_layers=2, layers=(layer(c.Bidirectional(), False),)),
        "decoder": c.Stack(n_layers=2, layers=(layer(c.Causal(), True),)),
        "head": c.LanguageModel(tied=True),
        "init": c.XavierInit(),
    }
    return c.ModelConfig(**(defaults | changes))


def rotary(scaling: c.RotaryScaling | None = None, **changes: Any) -> c.ModelConfig:
    """A decoder with these rotary positions."""
    return decoder(block(attention=attention(positions=c.Rotary(scaling=scaling or c.NoScaling(), **changes))))


def pattern(pattern: c.Pattern) -> c.ModelConfig:
    """A decoder with this pattern, and rotary positions so that shifts show."""
    return decoder(block(attention=attention(pattern=pattern, positions=c.Rotary())))


def positions(positions: c.Positions, **changes: Any) -> c.ModelConfig:
    """A decoder with this scheme in its attention."""
    return decoder(block(attention=attention(positions=positions, **changes)))


def experts(moe: c.MixtureOfExperts) -> c.ModelConfig:
    """A decoder whose first layer is ordinary and whose others are mixtures of experts."""
    stack = c.Stack(n_layers=3, first=(block(),), layers=(block(ffn=moe),), norm=c.RMSNorm())
    return decoder(decoder=stack)


_LATENT = c.Latent(
    n_heads=4, q_rank=10, kv_rank=8, nope_dim=6, rope_dim=4, v_head_dim=5, pattern=c.Causal(),
    positions=c.Rotary(layout="pairs"),
)  # fmt: skip
_LAYERNORM_FREE = c.LayerNorm(weight=False, bias=False)
_BIGBIRD = encoder(c.NoHead(), c.BigBird(block=2, random_blocks=1, seed=3))
_CUTOFFS = (10, 30)

CASES: dict[str, c.ModelConfig] = {
    # positions
    "no-positions": decoder(),
    "sinusoidal-pairs": decoder(embedding=c.Embedding(positions=c.Sinusoidal(), scale="sqrt_d_model")),
    "sinusoidal-halves": decoder(
        embedding=c.Embedding(positions=c.Sinusoidal(layout="halves", theta=500.0), scale=2.5)
    ),
    "learned": decoder(embedding=c.Embedding(positions=c.Learned()), init=c.GPT2Init()),
    "learned-offset": decoder(embedding=c.Embedding(positions=c.Learned(offset=2))),
    "rotary-halves": rotary(theta=100.0),
    "rotary-pairs-half": rotary(layout="pairs", fraction=2 / 3),
    "rotary-linear": rotary(c.LinearScaling(factor=4.0)),
    "rotary-ntk": rotary(c.NtkScaling(factor=4.0)),
    "rotary-dynamic-ntk": rotary(c.DynamicNtkScaling(factor=2.0, original_max_seq_len=5)),
    "rotary-qwen-dynamic": rotary(c.QwenDynamicScaling(original_max_seq_len=5)),
    "rotary-yarn": rotary(c.YarnScaling(factor=8.0, original_max_seq_len=64, beta_fast=4.0), theta=100.0),
    "rotary-yarn-mscale": rotary(
        c.YarnScaling(factor=8.0, original_max_seq_len=64, truncate=False, mscale=0.7, mscale_all_dim=0.5), theta=100.0
    ),
    "rotary-llama3": rotary(c.Llama3Scaling(factor=8.0, original_max_seq_len=64), theta=100.0),
    "rotary-longrope": rotary(
        c.LongRopeScaling(short_factor=(1.0, 1.5, 2.0), long_factor=(1.0, 3.0, 9.0), factor=4.0, original_max_seq_len=6)
    ),
    "alibi": positions(c.Alibi(), n_heads=6, n_kv_heads=3),
    "alibi-scaled": positions(c.Alibi(scaled=True), n_heads=6, n_kv_heads=3),
    "alibi-rounded": positions(c.Alibi(rounded=True), n_heads=6),
    "alibi-encoder": encoder(c.NoHead()).override({"encoder.layers.0.attention.positions": c.Alibi(max_bias=4.0)}),
    "t5-buckets-own": positions(c.T5Buckets(n_buckets=8, max_distance=10, bidirectional=False, shared=False)),
    "shaw": positions(c.Shaw(max_distance=3)),
    "shaw-keys": positions(c.Shaw(max_distance=4, values=False)),
    "transformer-xl": positions(c.TransformerXL(), n_kv_heads=4),
    "transformer-xl-clamped": positions(c.TransformerXL(clamp=3, theta=50.0)),
    # patterns
    "prefix": pattern(c.Prefix()),
    "sliding-window": pattern(c.SlidingWindow(window=4)),
    "sliding-window-sinks": pattern(c.SlidingWindow(window=3, sinks=2)),
    "chunked": pattern(c.Chunked(chunk=4)),
    "dilated": pattern(c.Dilated(window=3, dilation=2)),
    "longformer": encoder(c.Span(), c.Longformer(window=4)),
    "longformer-projections": encoder(c.NoHead(), c.Longformer(window=4)).override(
        {"encoder.layers.*.attention.global_projections": True}
    ),
    "bigbird": _BIGBIRD,
    "all-of": pattern(c.AllOf(patterns=(c.Causal(), c.Longformer(window=6)))),
    "any-of": pattern(c.AnyOf(patterns=(c.SlidingWindow(window=2), c.Dilated(window=3, dilation=3)))),
    # attention
    "multi-query": decoder(block(attention=attention(n_kv_heads=1))),
    "qk-norm": decoder(block(attention=attention(qk_norm=c.RMSNorm(), positions=c.Rotary()))),
    "softcap": decoder(block(attention=attention(softcap=2.0, scale=0.7, positions=c.Alibi()))),
    "clip": decoder(block(attention=attention(clip=0.3, n_kv_heads=2, positions=c.Rotary()))),
    "attention-sinks": decoder(block(attention=attention(sinks=True, positions=c.Rotary()))),
    "log-n": decoder(block(attention=attention(log_n=4, positions=c.Rotary(), qkv_bias=True))),
    "latent": decoder(block(attention=_LATENT)),
    "latent-direct-wide-values": decoder(block(attention=_LATENT.override({"v_head_dim": 12, "q_rank": None}))),
    # feed-forward and experts
    "dense-relu": decoder(block(ffn=c.Dense(d_ff=20, activation="relu", bias=True))),
    "dense-relu2": decoder(block(ffn=c.Dense(d_ff=20, activation="relu2"))),
    "dense-gelu-tanh": decoder(block(ffn=c.Dense(d_ff=20, activation="gelu-tanh"))),
    "dense-quick-gelu": decoder(block(ffn=c.Dense(d_ff=20, activation="quick-gelu"))),
    "gated-gelu": decoder(block(ffn=c.Gated(d_ff=20, activation="gelu", bias=True))),
    "gated-sigmoid": decoder(block(ffn=c.Gated(d_ff=20, activation="sigmoid"))),
    "dense-tanh": decoder(block(ffn=c.Dense(d_ff=20, activation="tanh")), init=c.FanInInit()),
    "dense-silu": decoder(block(ffn=c.Dense(d_ff=20, activation="silu"))),
    "experts": experts(c.MixtureOfExperts(n_experts=6, top_k=2, d_ff=10)),
    "experts-v2": experts(
        c.MixtureOfExperts(
            n_experts=8, top_k=3, d_ff=10, shared_d_ff=6, normalize=False, scale=4.0, n_groups=4, top_groups=2
        )
    ),
    "experts-v3": experts(
        c.MixtureOfExperts(
            n_experts=8, top_k=3, d_ff=10, shared_d_ff=6, score="sigmoid", scale=2.5, correction=True,
            n_groups=4, top_groups=2, group_score="top2",
        )
    ),
    # norms and residuals
    "norm-none": decoder(block(norm=c.NoNorm(), residual=c.PostNorm())),
    "layernorm-free": decoder(block(norm=_LAYERNORM_FREE)),
    "rmsnorm-offset": decoder(block(norm=c.RMSNorm(unit_offset=True, cast="after"))),
    "sandwich": decoder(block(residual=c.SandwichNorm())),
    "parallel": decoder(block(residual=c.Parallel())),
    "parallel-two-norms": decoder(block(residual=c.Parallel(shared_norm=False), norm=c.LayerNorm())),
    # embeddings and heads
    "adaptive": decoder(
        embedding=c.Embedding(tokens=c.AdaptiveTable(cutoffs=_CUTOFFS, divisor=2), scale="sqrt_d_model"),
        head=c.AdaptiveSoftmax(cutoffs=_CUTOFFS, divisor=2, tied_projections=(False, True, True)),
    ),
    "adaptive-untied": decoder(head=c.AdaptiveSoftmax(cutoffs=_CUTOFFS, divisor=2, tied=False)),
    "adaptive-one-table": decoder(head=c.AdaptiveSoftmax(cutoffs=_CUTOFFS, divisor=1, projected=False)),
    "adaptive-one-table-projected": decoder(head=c.AdaptiveSoftmax(cutoffs=_CUTOFFS, divisor=1)),
    "adaptive-untied-unprojected": decoder(
        head=c.AdaptiveSoftmax(cutoffs=_CUTOFFS, divisor=1, tied=False, projected=False)
    ),
    "untied-bias-softcap": decoder(head=c.LanguageModel(tied=False, bias=True, softcap=3.0), init=c.T5Init()),
    "masked-lm": encoder(c.MaskedLanguageModel()),
    "masked-lm-untied": encoder(c.MaskedLanguageModel(tied=False, activation="relu")),
    "pooler": encoder(c.Pooler()),
    "next-sentence": encoder(c.NextSentence()),
    "classifier": encoder(c.Classifier(n_classes=3)),
    "classifier-mean": encoder(c.Classifier(n_classes=3, pooling="mean", hidden="relu")),
    "classifier-gelu": encoder(c.Classifier(n_classes=3, hidden="gelu")),
    "classifier-last": decoder(head=c.Classifier(n_classes=3, pooling="last", hidden="none", bias=False)),
    "token-classifier": encoder(c.TokenClassifier(n_classes=4)),
    # topologies
    "encoder-decoder": encoder_decoder(),
    "encoder-decoder-tables": encoder_decoder(
        sharing="none", embedding=c.Embedding(positions=c.Learned()), head=c.LanguageModel(tied=True)
    ),
    "encoder-decoder-tokens": encoder_decoder(
        sharing="tokens", embedding=c.Embedding(positions=c.Learned(offset=2), norm=c.LayerNorm())
    ),
    "mixed-layers": decoder(
        block(attention=attention(pattern=c.SlidingWindow(window=3), positions=c.Rotary(theta=100.0))),
        block(attention=attention(positions=c.Rotary(theta=1000.0), qk_norm=c.RMSNorm())),
        n_layers=5,
    ),
}  # fmt: skip


def presets() -> dict[str, c.ModelConfig]:
    """Every published model at toy size."""
    from qkv.config.presets import preset
    from qkv.config.presets import presets as names

    return {name: preset(name).toy() for name in names()}


def kinds(node: Any) -> set[tuple[type, str]]:
    """(union, kind) of every union member in a config."""
    found: set[tuple[type, str]] = set()
    if isinstance(node, c.Config):
        if isinstance(node, c.Variant):
            union = next(base for base in type(node).__mro__ if base in c.UNIONS)
            found.add((union, node.kind))
        for name in type(node).model_fields:
            found |= kinds(getattr(node, name))
    elif isinstance(node, tuple):
        for item in node:
            found |= kinds(item)
    return found


Make = Callable[[c.ModelConfig, np.random.Generator], Arrays]


def inputs(config: c.ModelConfig, kind: str, seed: int = 0, batch: int = 2, length: int = 11) -> Arrays | None:
    """Inputs of a kind for this model, or None where the kind does not apply; long enough for BigBird to be sparse."""
    rng = np.random.default_rng(seed)
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    length = max(length, *(getattr(block.attention.pattern, "dense_below", 0) + 1 for block in blocks))
    both = config.encoder is not None and config.decoder is not None
    given: Arrays = {"tokens": rng.integers(0, config.vocab_size, (batch, length))}
    reads = frozenset().union(*(block.attention.pattern.fields for block in blocks))
    if both:
        given["source"] = rng.integers(0, config.vocab_size, (batch, length - 2))
    if "prefix_length" in reads:
        given["prefix_length"] = np.array([4, 0][:batch])
    if "is_global" in reads:
        given["global_tokens"] = rng.random((batch, length)) < 0.2
    if config.embedding.n_segments and not both:
        given["segments"] = rng.integers(0, config.embedding.n_segments, (batch, length))
    if kind == "plain":
        return given
    if kind in ("padded-right", "padded-left"):
        pads = np.array([3, 0])[:, None]
        place = np.arange(length)[None]
        given["valid"] = place < length - pads if kind == "padded-right" else place >= pads
        if both:
            given["source_valid"] = np.arange(length - 2)[None] < length - 2 - pads
        return given
    if kind == "packed":
        if both:
            return None
        given["documents"] = np.repeat(np.array([[0, 1, 2], [5, 5, 5]]), (4, 4, length - 8), axis=1)
        return given
    assert kind == "positions", kind
    given["positions"] = np.stack([np.arange(length) + 5, np.arange(length) * 2])
    return given


INPUTS = ("plain", "padded-right", "padded-left", "packed", "positions")
