"""Right in every combination: members of all unions combined, model against oracle.

The axes are those that meet inside an attention or block. `make test` takes rows that cover every pair of values;
`--slow` adds seeded random rows, and the full product of what meets in one attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from parity.cases import block, inputs
from parity.test_forward import compare, float32_weights, model_with, tensors
from qkv import config as c
from qkv import reference
from qkv.config import ModelConfig
from qkv.errors import ConfigError

D, V, LENGTH = 16, 40, 17

POSITIONS: dict[str, tuple[c.Positions, c.Positions]] = {
    "none": (c.NoPositions(), c.NoPositions()),
    "sinusoidal": (c.Sinusoidal(), c.NoPositions()),
    "learned": (c.Learned(offset=2), c.NoPositions()),
    "learned+alibi": (c.Learned(), c.Alibi()),
    "rotary": (c.NoPositions(), c.Rotary(theta=100.0)),
    "rotary-pairs-half": (c.NoPositions(), c.Rotary(layout="pairs", fraction=0.5)),
    "rotary-dynamic": (
        c.NoPositions(),
        c.Rotary(scaling=c.DynamicNtkScaling(factor=2.0, original_max_seq_len=6)),
    ),
    "rotary-yarn": (
        c.NoPositions(),
        c.Rotary(theta=50.0, scaling=c.YarnScaling(factor=4.0, original_max_seq_len=32, beta_fast=4.0)),
    ),
    "alibi": (c.NoPositions(), c.Alibi()),
    "t5": (c.NoPositions(), c.T5Buckets(n_buckets=8, max_distance=12, bidirectional=True)),
    "t5-own": (c.NoPositions(), c.T5Buckets(n_buckets=8, max_distance=12, bidirectional=False, shared=False)),
    "shaw": (c.NoPositions(), c.Shaw(max_distance=3)),
    "transformer-xl": (c.NoPositions(), c.TransformerXL(clamp=9)),
}
PATTERNS: dict[str, c.Pattern] = {
    "causal": c.Causal(),
    "bidirectional": c.Bidirectional(),
    "prefix": c.Prefix(),
    "window": c.SlidingWindow(window=4),
    "window-sinks": c.SlidingWindow(window=3, sinks=2),
    "chunked": c.Chunked(chunk=5),
    "dilated": c.Dilated(window=3, dilation=2),
    "longformer": c.Longformer(window=4),
    "bigbird": c.BigBird(block=2, random_blocks=1),
    "all-of": c.AllOf(patterns=(c.Causal(), c.Longformer(window=6))),
    "any-of": c.AnyOf(patterns=(c.SlidingWindow(window=2), c.Dilated(window=3, dilation=3))),
}
HEADS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"n_kv_heads": 2},
    "mqa-bias": {"n_kv_heads": 1, "qkv_bias": True, "o_bias": True},
    "qk-norm": {"n_kv_heads": 2, "qk_norm": c.RMSNorm()},
    "softcap": {"softcap": 1.5, "n_kv_heads": 2},
    "sinks": {"sinks": True},
    "log-n": {"log_n": 5},
    "latent": {},
}
FEED_FORWARD: dict[str, c.FeedForward] = {
    "dense": c.Dense(d_ff=12, activation="gelu", bias=True),
    "gated": c.Gated(d_ff=12),
    "experts": c.MixtureOfExperts(n_experts=4, top_k=2, d_ff=6, shared_d_ff=5),
}
NORMS: dict[str, c.Norm] = {
    "none": c.NoNorm(),
    "layernorm": c.LayerNorm(),
    "rmsnorm": c.RMSNorm(),
    "gemma": c.RMSNorm(unit_offset=True, cast="after"),
}
RESIDUALS: dict[str, c.Residual] = {
    "pre": c.PreNorm(),
    "post": c.PostNorm(),
    "sandwich": c.SandwichNorm(),
    "parallel": c.Parallel(),
    "parallel-two": c.Parallel(shared_norm=False),
}
TOPOLOGIES = ("decoder", "encoder", "encoder-decoder")
KINDS = ("plain", "padded-right", "padded-left", "packed", "positions")
UNIONS = (POSITIONS, PATTERNS, HEADS, FEED_FORWARD, NORMS, RESIDUALS)
AXES: tuple[Sequence[str], ...] = (*map(tuple, UNIONS), TOPOLOGIES, KINDS)
Row = tuple[str, ...]
Pair = tuple[int, int, str, str]


def possible(row: Sequence[str]) -> bool:
    """Whether the (perhaps partial) row can be a model."""
    filled = dict(
        zip(("positions", "pattern", "heads", "ffn", "norm", "residual", "topology", "kind"), row, strict=False)
    )
    positions, pattern, topology = filled["positions"], filled.get("pattern"), filled.get("topology")
    if positions == "transformer-xl" and pattern is not None and PATTERNS[pattern].reach().ahead != 0:
        return False
    if filled.get("heads") == "latent" and not positions.startswith("rotary"):
        return False
    if topology == "encoder-decoder":
        return filled["residual"] not in ("parallel", "parallel-two") and filled.get("kind") != "packed"
    return True


def attention(row: Row, pattern: c.Pattern) -> c.Attention:
    """The self-attention of a row."""
    scheme = POSITIONS[row[0]][1]
    if row[2] == "latent":
        return c.Latent(
            n_heads=4, q_rank=6, kv_rank=5, nope_dim=4, rope_dim=8, v_head_dim=5, pattern=pattern, positions=scheme
        )
    return c.MultiHead(n_heads=4, head_dim=8, pattern=pattern, positions=scheme, **HEADS[row[2]])


def build(row: Row) -> ModelConfig:
    """The model of a row: two layers; the first has the row's pattern, the second sees everything it may."""
    pattern, topology = PATTERNS[row[1]], row[6]
    second = c.Causal() if pattern.causal else c.Bidirectional()

    def layer(pattern: c.Pattern, cross: bool) -> c.Block:
        looks = c.MultiHead(n_heads=2, head_dim=6, n_kv_heads=1, pattern=c.Bidirectional())
        return block(
            attention=attention(row, pattern),
            cross_attention=looks if cross else None,
            ffn=FEED_FORWARD[row[3]],
            norm=NORMS[row[4]],
            residual=RESIDUALS[row[5]],
        )

    def stack(cross: bool) -> c.Stack:
        return c.Stack(n_layers=2, layers=(layer(pattern, cross), layer(second, cross)), norm=NORMS[row[4]])

    source = c.Stack(
        n_layers=1, layers=(block(attention=c.MultiHead(n_heads=2, head_dim=4, pattern=c.Bidirectional())),)
    )
    return ModelConfig(
        vocab_size=V,
        d_model=D,
        max_seq_len=64,
        embedding=c.Embedding(positions=POSITIONS[row[0]][0], norm=NORMS[row[4]]),
        encoder={"decoder": None, "encoder": stack(False), "encoder-decoder": source}[topology],
        decoder=None if topology == "encoder" else stack(topology == "encoder-decoder"),
        head=c.LanguageModel(tied=True) if topology != "encoder" and pattern.causal else c.NoHead(),
    )


def check(row: Row) -> None:
    """Model and oracle agree on this row."""
    config = build(row)
    given = inputs(config, row[7], length=LENGTH)
    assert given is not None
    weights = float32_weights(config)
    expected = reference.run(config, weights, **given)
    valid = given.get("valid", np.ones(given["tokens"].shape, dtype=bool))
    with torch.no_grad():
        found = model_with(config, weights, torch.float64)(**tensors(given))
    assert compare(expected, found, valid) < 1e-10


def random_row(rng: np.random.Generator, fixed: dict[int, str] | None = None) -> Row:
    """A random possible row, with the values of some axes given."""
    while True:
        drawn = [str(rng.choice(axis)) for axis in AXES]
        for axis, value in (fixed or {}).items():
            drawn[axis] = value
        if possible(drawn):
            return tuple(drawn)


def pairs(row: Row) -> set[Pair]:
    """Every pair of values in the row."""
    return {(i, j, row[i], row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def possible_pairs() -> set[Pair]:
    """Every pair of values that some possible row holds: those that no rule about three axes or fewer excludes."""
    rng = np.random.default_rng(0)
    found: set[Pair] = set()
    for _ in range(30_000):
        found |= pairs(random_row(rng))
    return found


def pairwise() -> list[Row]:
    """Rows that cover every possible pair; what the library's greedy search leaves is added one by one."""
    rows = [tuple(row) for row in AllPairs([list(axis) for axis in AXES], filter_func=possible)]
    covered = set().union(*map(pairs, rows))
    rng = np.random.default_rng(1)
    for i, j, x, y in sorted(possible_pairs() - covered):
        if (i, j, x, y) not in covered:
            rows.append(random_row(rng, {i: x, j: y}))
            covered |= pairs(rows[-1])
    return rows


@pytest.mark.parametrize("row", pairwise(), ids="-".join)
def test_every_pair_of_choices(row: Row) -> None:
    check(row)


def test_the_rules_exclude_what_they_say_and_nothing_else() -> None:
    """Counted by hand: 9 axis pairs of xl with patterns that look ahead, and so on."""
    everything = sum(len(AXES[i]) * len(AXES[j]) for i, j in itertools.combinations(range(len(AXES)), 2))
    looking_ahead = sum(pattern.reach().ahead != 0 for pattern in PATTERNS.values())
    unturned = sum(not name.startswith("rotary") for name in POSITIONS)
    encoder_decoder = 2 + 1  # the two parallel residuals, and packing
    assert len(possible_pairs()) == everything - looking_ahead - unturned - encoder_decoder


@pytest.mark.parametrize(
    "row",
    [
        ("transformer-xl", "bidirectional", "mha", "gated", "rmsnorm", "pre", "decoder", "plain"),
        ("alibi", "causal", "latent", "gated", "rmsnorm", "pre", "decoder", "plain"),
        ("rotary", "causal", "mha", "gated", "rmsnorm", "parallel", "encoder-decoder", "plain"),
    ],
)
def test_what_the_rules_exclude_is_refused(row: Row) -> None:
    assert not possible(row)
    with pytest.raises(ConfigError):
        build(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [random_row(np.random.default_rng(seed)) for seed in range(1500)], ids="-".join)
def test_random_combinations(row: Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_full_product_of_one_attention(positions: str, kind: str) -> None:
    """Every position scheme with every pattern, kind of heads and kind of input, in a decoder."""
    for pattern, heads in itertools.product(PATTERNS, HEADS):
        row = (positions, pattern, heads, "gated", "rmsnorm", "pre", "decoder", kind)
        if possible(row):
            check(row)
