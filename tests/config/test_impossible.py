"""What is impossible inside one union member is refused, with its reason; what stands just beside it is not."""

from typing import Any

import pytest

from qkv.config import Attention, FeedForward, Head, Pattern, Positions, RotaryScaling, TokenTable, Variant
from qkv.errors import ConfigError

from .examples import multi_head

YARN = {"kind": "yarn", "factor": 4, "original_max_seq_len": 16}
LONG = {"kind": "longrope", "factor": 4, "original_max_seq_len": 16, "short_factor": [1, 2], "long_factor": [3, 4]}
MOE = {"kind": "mixture-of-experts", "n_experts": 8, "top_k": 2, "d_ff": 4}
T5 = {"kind": "t5-buckets", "bidirectional": True}
CLUSTERS = {"kind": "adaptive", "cutoffs": [4, 8]}
LATENT = {
    "kind": "latent", "n_heads": 4, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_head_dim": 6,
    "pattern": {"kind": "causal"},
}  # fmt: skip
ATTENTION_ONLY = "is added to embeddings: set it at embedding.positions, and 'none' here"

IMPOSSIBLE: list[tuple[type[Variant], dict[str, Any], str]] = [
    (Attention, multi_head(n_heads=7, n_kv_heads=2), "n_kv_heads: must divide n_heads (7), got 2"),
    (Attention, multi_head(n_kv_heads=8), "n_kv_heads: must divide n_heads (4), got 8"),
    (Attention, multi_head(log_n=1), "log_n: must be at least 2, since it divides by its logarithm"),
    (
        Attention,
        multi_head(global_projections=True),
        "global_projections: needs a pattern with global tokens, such as 'longformer', not 'causal'",
    ),
    (Attention, multi_head(positions={"kind": "learned"}), f"positions: 'learned' {ATTENTION_ONLY}"),
    (Attention, multi_head(positions={"kind": "sinusoidal"}), f"positions: 'sinusoidal' {ATTENTION_ONLY}"),
    (
        Attention,
        multi_head(head_dim=7, positions={"kind": "rotary"}),
        "positions.fraction: turns 7 of 7 elements, but pairs need a positive even number",
    ),
    (
        Attention,
        multi_head(positions={"kind": "rotary", "fraction": 0.4}),
        "positions.fraction: turns 3 of 8 elements, but pairs need a positive even number",
    ),
    (
        Attention,
        multi_head(positions={"kind": "rotary", "fraction": 0.01}),
        "positions.fraction: turns 0 of 8 elements, but pairs need a positive even number",
    ),
    (
        Attention,
        multi_head(positions={"kind": "rotary", "scaling": LONG}),
        "positions.scaling.short_factor: needs one value per pair (4), got 2",
    ),
    *[
        (
            Attention,
            multi_head(head_dim=2, positions={"kind": "rotary", "scaling": {"kind": kind} | fields}),
            f"positions.scaling: {kind!r} has the exponent d/(d-2): it needs more than 2 turned elements",
        )
        for kind, fields in {
            "ntk": {"factor": 2},
            "dynamic-ntk": {"factor": 2, "original_max_seq_len": 16},
            "qwen-dynamic": {"original_max_seq_len": 16},
        }.items()
    ],
    (
        Attention,
        multi_head("bidirectional", positions={"kind": "transformer-xl"}),
        "positions: 'transformer-xl' knows distances to the past only: not with pattern 'bidirectional'",
    ),
    (
        Attention,
        multi_head({"kind": "longformer", "window": 4}, positions={"kind": "transformer-xl"}),
        "positions: 'transformer-xl' knows distances to the past only: not with pattern 'longformer'",
    ),
    (
        Attention,
        LATENT | {"positions": {"kind": "alibi"}},
        "positions: latent attention turns its rope_dim elements: use 'rotary', not 'alibi'",
    ),
    (Attention, LATENT, "positions: latent attention turns its rope_dim elements: use 'rotary', not 'none'"),
    (
        Attention,
        LATENT | {"rope_dim": 5, "positions": {"kind": "rotary"}},
        "positions.fraction: turns 5 of 5 elements, but pairs need a positive even number",
    ),
    (Pattern, {"kind": "sliding-window", "window": 0}, "window: must be >= 1, got 0"),
    (Pattern, {"kind": "longformer", "window": 5}, "window: must be even, half on each side, got 5"),
    (Pattern, {"kind": "all-of", "patterns": []}, "patterns: needs at least one pattern"),
    (Pattern, {"kind": "any-of", "patterns": []}, "patterns: needs at least one pattern"),
    (
        RotaryScaling,
        {"kind": "llama3", "factor": 8, "high_freq_factor": 1},
        "high_freq_factor: must exceed low_freq_factor (1.0), got 1.0",
    ),
    (RotaryScaling, YARN | {"beta_fast": 1}, "beta_fast: must exceed beta_slow (1.0), got 1.0"),
    (RotaryScaling, LONG | {"long_factor": [3]}, "long_factor: needs 2 values like short_factor, got 1"),
    (RotaryScaling, LONG | {"factor": 0.5}, "factor: must be at least 1 unless attention_factor is given, got 0.5"),
    (
        RotaryScaling,
        LONG | {"original_max_seq_len": 1},
        "original_max_seq_len: must be at least 2 unless attention_factor is given: its logarithm divides",
    ),
    (Positions, T5 | {"n_buckets": 2}, "n_buckets: must be a multiple of 4, got 2"),
    (Positions, T5 | {"n_buckets": 30}, "n_buckets: must be a multiple of 4, got 30"),
    (Positions, T5 | {"n_buckets": 5, "bidirectional": False}, "n_buckets: must be a multiple of 2, got 5"),
    (Positions, T5 | {"n_buckets": 16, "max_distance": 4}, "max_distance: must exceed the 4 exact distances, got 4"),
    (Positions, {"kind": "rotary", "fraction": 1.5}, "fraction: must be <= 1.0, got 1.5"),
    (Positions, {"kind": "alibi", "shared": True}, "shared: unknown value True; choose one of False"),
    (FeedForward, MOE | {"n_groups": 3}, "n_groups: must divide n_experts (8), got 3"),
    (FeedForward, MOE | {"n_groups": 2, "top_groups": 3}, "top_groups: must be at most n_groups (2), got 3"),
    (FeedForward, MOE | {"top_k": 9}, "top_k: must be at most the 8 experts that a token can reach, got 9"),
    (
        FeedForward,
        MOE | {"n_groups": 4, "top_groups": 2, "top_k": 5},
        "top_k: must be at most the 4 experts that a token can reach, got 5",
    ),
    (
        FeedForward,
        MOE | {"n_groups": 8, "top_groups": 2, "group_score": "top2"},
        "group_score: 'top2' needs at least two experts per group",
    ),
    (TokenTable, CLUSTERS | {"cutoffs": []}, "cutoffs: must be increasing and not empty, got []"),
    (TokenTable, CLUSTERS | {"cutoffs": [8, 4]}, "cutoffs: must be increasing and not empty, got [8, 4]"),
    (TokenTable, CLUSTERS | {"cutoffs": [4, 4]}, "cutoffs: must be increasing and not empty, got [4, 4]"),
    (TokenTable, CLUSTERS | {"cutoffs": [4, True]}, "cutoffs.1: expected a whole number, got True"),
    (Head, CLUSTERS | {"cutoffs": []}, "cutoffs: must be increasing and not empty, got []"),
    (Head, CLUSTERS | {"cutoffs": [8, 4]}, "cutoffs: must be increasing and not empty, got [8, 4]"),
    (Head, CLUSTERS | {"tied_projections": [True] * 4}, "tied_projections: has 4 values for 3 clusters"),
]


@pytest.mark.parametrize(("union", "written", "message"), IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_the_impossible_is_refused(union: type[Variant], written: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as decoded:
        union.from_dict(written)
    assert str(decoded.value) == message
    with pytest.raises(ConfigError) as constructed:
        union.kinds()[written["kind"]](**written)
    assert str(constructed.value) == message


def test_the_possible_beside_it_is_accepted() -> None:
    xl = {"positions": {"kind": "transformer-xl"}}
    for union, written in [
        (Attention, multi_head(n_heads=6, n_kv_heads=3)),
        (Attention, multi_head(log_n=2)),
        (Attention, multi_head({"kind": "longformer", "window": 2}, global_projections=True)),
        (Attention, multi_head(head_dim=5, positions={"kind": "rotary", "fraction": 0.4})),
        (Attention, multi_head(head_dim=4, positions={"kind": "rotary", "scaling": LONG})),
        (Attention, multi_head(head_dim=2, positions={"kind": "rotary", "scaling": YARN})),
        (Attention, multi_head({"kind": "sliding-window", "window": 3}, head_dim=7, **xl)),
        (RotaryScaling, {"kind": "llama3", "factor": 8, "high_freq_factor": 1.1}),
        (RotaryScaling, LONG | {"factor": 1, "original_max_seq_len": 2}),
        (RotaryScaling, LONG | {"factor": 0.5, "original_max_seq_len": 1, "attention_factor": 1}),
        (Positions, T5 | {"n_buckets": 4, "max_distance": 2}),
        (Positions, T5 | {"n_buckets": 2, "max_distance": 2, "bidirectional": False}),
        (FeedForward, MOE | {"n_groups": 4, "top_groups": 2, "top_k": 4, "group_score": "top2"}),
        (Head, CLUSTERS | {"tied_projections": [True] * 3}),
    ]:
        assert union.from_dict(written).to_dict()["kind"] == written["kind"]
