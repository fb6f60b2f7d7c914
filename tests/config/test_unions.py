"""Every member of every union: it round-trips, it is strict, it refuses what is impossible, it counts its tensors."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.config import (
    UNIONS,
    AdaptiveSoftmax,
    AdaptiveTable,
    AllOf,
    AnyOf,
    Attention,
    Bidirectional,
    Causal,
    Config,
    FeedForward,
    Head,
    Latent,
    LayerNorm,
    MultiHead,
    Norm,
    Parallel,
    Positions,
    Prefix,
    Reach,
    Residual,
    RMSNorm,
    Rotary,
    Sizes,
    SlidingWindow,
    TokenTable,
    Variant,
)
from qkv.config.parameter import Table
from qkv.errors import ConfigError

from .strategies import configs, members

SIZES = Sizes(d_model=840, max_seq_len=16, n_heads=4, head_dim=8)
ALL = pytest.mark.parametrize("member", members(), ids=lambda member: f"{member.__mro__[1].__name__}-{kind(member)}")


def kind(member: type[Variant]) -> str:
    return str(member.model_fields["kind"].default)


def union_of(member: type[Variant]) -> type[Variant]:
    return next(union for union in UNIONS if member in union.members)


# Every member


@ALL
@given(data=st.data())
def test_json_toml_and_dict_give_the_same_config_back(member: type[Variant], data: st.DataObject) -> None:
    config = data.draw(configs(member))
    union = union_of(member)
    for again in (
        member.from_json(config.to_json()),
        union.from_json(config.to_json()),
        union.from_toml(config.to_toml()),
        union.from_dict(config.to_dict()),
        member(**dict(config)),
    ):
        assert type(again) is member
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json() == config.to_json()


@ALL
@given(data=st.data())
def test_a_written_member_has_every_field_but_the_absent(member: type[Variant], data: st.DataObject) -> None:
    config = data.draw(configs(member))
    written = config.to_dict()
    assert set(written) == {name for name, value in dict(config).items() if value is not None}
    assert written["kind"] == kind(member)


@ALL
@given(data=st.data())
def test_an_unknown_field_is_refused(member: type[Variant], data: st.DataObject) -> None:
    config = data.draw(configs(member))
    with pytest.raises(ConfigError, match=r"^kindd: unknown field; did you mean 'kind'\?$"):
        union_of(member).from_dict(config.to_dict() | {"kindd": 1})
    with pytest.raises(ConfigError, match=r"^kindd: unknown field; did you mean 'kind'\?$"):
        member(**dict(config), kindd=1)


@ALL
@given(data=st.data())
def test_every_field_refuses_a_value_of_another_type(member: type[Variant], data: st.DataObject) -> None:
    config = data.draw(configs(member))
    for name in member.model_fields:
        with pytest.raises(ConfigError, match=rf"^{name}: "):
            member.from_dict(config.to_dict() | {name: Ellipsis})


@ALL
@given(data=st.data())
def test_what_a_member_requires_is_missed(member: type[Variant], data: st.DataObject) -> None:
    written = data.draw(configs(member)).to_dict()
    for name, field in member.model_fields.items():
        if field.is_required():
            with pytest.raises(ConfigError, match=rf"^{name}: required, but not given$"):
                member.from_dict({key: value for key, value in written.items() if key != name})


@pytest.mark.parametrize("union", UNIONS, ids=lambda union: union.__name__)
def test_a_union_offers_its_own_kinds_only(union: type[Variant]) -> None:
    assert union.is_union()
    assert len(union.kinds()) == len(union.members)
    for member in union.members:
        assert not member.is_union()
        assert issubclass(member, union)
    with pytest.raises(ConfigError) as error:
        union.from_dict({"kind": "no-such-kind"})
    assert str(error.value).startswith("config: unknown kind 'no-such-kind'; ")
    foreign = {name for other in UNIONS if other is not union for name in other.kinds()} - set(union.kinds())
    for name in foreign:
        with pytest.raises(ConfigError, match="unknown kind"):
            union.from_dict({"kind": name})


# Tensors


def tensors(config: Config) -> Table:
    """The tensors of a config that stands alone."""
    if isinstance(config, Positions | Attention):
        return config.parameters(SIZES)
    if isinstance(config, FeedForward):
        return config.parameters(SIZES.d_model)
    if isinstance(config, Norm):
        return config.parameters(SIZES.head_dim)
    if isinstance(config, TokenTable | Head):
        return config.parameters(100, 840**3)
    return {}


@ALL
@given(data=st.data())
def test_tensors_have_positive_sizes(member: type[Variant], data: st.DataObject) -> None:
    for name, parameter in tensors(data.draw(configs(member))).items():
        assert all(name.split("."))
        assert parameter.shape
        assert min(parameter.shape) >= 1
        assert parameter.fan_in >= 1


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in tensors(config).items()}


def test_multi_head_tensors() -> None:
    attention = MultiHead(n_heads=6, n_kv_heads=2, head_dim=8, pattern=Causal(), qkv_bias=True, qk_norm=RMSNorm())
    assert shapes(attention) == {
        "q_proj.weight": (48, 840),
        "q_proj.bias": (48,),
        "k_proj.weight": (16, 840),
        "k_proj.bias": (16,),
        "v_proj.weight": (16, 840),
        "v_proj.bias": (16,),
        "o_proj.weight": (840, 48),
        "q_norm.weight": (8,),
        "k_norm.weight": (8,),
    }
    whole = MultiHead(
        n_heads=4, head_dim=8, pattern={"kind": "longformer", "window": 4}, global_projections=True, sinks=True,
        o_bias=True, positions={"kind": "shaw", "max_distance": 3},
    )  # fmt: skip
    assert {name: shape for name, shape in shapes(whole).items() if "_proj.weight" not in name} == {
        "o_proj.bias": (840,),
        "sinks": (4,),
        "positions.key": (7, 8),
        "positions.value": (7, 8),
    }
    assert {name for name in shapes(whole) if "global" in name} == {f"{x}_global_proj.weight" for x in "qkv"}


def test_latent_tensors() -> None:
    fields: dict[str, Any] = {"n_heads": 4, "kv_rank": 16, "nope_dim": 8, "rope_dim": 6, "v_head_dim": 5}
    plain = Latent(**fields, pattern=Causal(), positions=Rotary())
    rebuilt = {
        "kv_down_proj.weight": (22, 840),
        "kv_norm.weight": (16,),
        "kv_up_proj.weight": (4 * 13, 16),
        "o_proj.weight": (840, 20),
    }
    assert shapes(plain) == {"q_proj.weight": (56, 840)} | rebuilt
    ranked = Latent(**fields, q_rank=12, pattern=Causal(), positions=Rotary(), norm=LayerNorm(bias=False))
    queries = {"q_down_proj.weight": (12, 840), "q_norm.weight": (12,), "q_up_proj.weight": (56, 12)}
    assert shapes(ranked) == queries | rebuilt
    assert plain.score_scale == 14**-0.5
    assert MultiHead(n_heads=1, head_dim=16, pattern=Causal()).score_scale == 0.25
    assert MultiHead(n_heads=1, head_dim=16, pattern=Causal(), scale=1).score_scale == 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"kind": "learned", "offset": 2}, {"weight": (18, 840)}),
        ({"kind": "t5-buckets", "n_buckets": 16, "bidirectional": True}, {"weight": (16, 4)}),
        ({"kind": "shaw", "max_distance": 3, "values": False}, {"key": (7, 8)}),
        ({"kind": "transformer-xl"}, {"u": (4, 8), "v": (4, 8), "r_proj.weight": (32, 840)}),
        ({"kind": "rotary"}, {}),
        ({"kind": "alibi"}, {}),
        ({"kind": "none"}, {}),
        ({"kind": "sinusoidal"}, {}),
    ],
)
def test_position_tensors(written: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    assert shapes(Positions.from_dict(written)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            {"kind": "dense", "d_ff": 6, "activation": "relu", "bias": True},
            {"up_proj.weight": (6, 840), "up_proj.bias": (6,), "down_proj.weight": (840, 6), "down_proj.bias": (840,)},
        ),
        (
            {"kind": "gated", "d_ff": 6},
            {"gate_proj.weight": (6, 840), "up_proj.weight": (6, 840), "down_proj.weight": (840, 6)},
        ),
        (
            {"kind": "mixture-of-experts", "n_experts": 4, "top_k": 2, "d_ff": 6, "shared_d_ff": 5, "correction": True},
            {
                "router.weight": (4, 840),
                "router.correction": (4,),
                "experts.gate_proj": (4, 6, 840),
                "experts.up_proj": (4, 6, 840),
                "experts.down_proj": (4, 840, 6),
                "shared.gate_proj.weight": (5, 840),
                "shared.up_proj.weight": (5, 840),
                "shared.down_proj.weight": (840, 5),
            },
        ),
    ],
)
def test_feed_forward_tensors(written: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    assert shapes(FeedForward.from_dict(written)) == expected


def test_adaptive_tensors() -> None:
    table = AdaptiveTable(cutoffs=(10, 30), divisor=2)
    assert table.clusters(100, 8) == ((0, 10, 8), (10, 30, 4), (30, 100, 2))
    assert {name: p.shape for name, p in table.parameters(100, 8).items()} == {
        "clusters.0.weight": (10, 8),
        "projections.0.weight": (8, 8),
        "clusters.1.weight": (20, 4),
        "projections.1.weight": (8, 4),
        "clusters.2.weight": (70, 2),
        "projections.2.weight": (8, 2),
    }
    head = AdaptiveSoftmax(cutoffs=(10, 30), divisor=2, tied_projections=(False, True))
    own = {"cluster_weight": (2, 8), "cluster_bias": (2,), "biases.0": (10,), "biases.1": (20,), "biases.2": (70,)}
    projections = {"projections.0.weight": (8, 8), "projections.2.weight": (8, 2)}
    assert {name: p.shape for name, p in head.parameters(100, 8).items()} == own | projections
    untied = AdaptiveSoftmax(cutoffs=(10, 30), divisor=2, tied=False, tied_projections=(True, True, True))
    clusters = {"clusters.0.weight": (10, 8), "clusters.1.weight": (20, 4), "clusters.2.weight": (70, 2)}
    assert {name: p.shape for name, p in untied.parameters(100, 8).items()} == own | clusters


DENSE = {"pooler.weight": (8, 8), "pooler.bias": (8,)}
TRANSFORM = {"transform.weight": (8, 8), "transform.bias": (8,), "norm.weight": (8,), "norm.bias": (8,)}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"kind": "none"}, {}),
        ({"kind": "lm", "tied": True, "bias": True}, {"bias": (100,)}),
        ({"kind": "lm", "tied": False}, {"weight": (100, 8)}),
        ({"kind": "masked-lm"}, TRANSFORM | {"bias": (100,)}),
        ({"kind": "masked-lm", "tied": False}, TRANSFORM | {"weight": (100, 8), "bias": (100,)}),
        ({"kind": "pooler"}, DENSE),
        ({"kind": "next-sentence"}, DENSE | {"classifier.weight": (2, 8), "classifier.bias": (2,)}),
        ({"kind": "classifier", "n_classes": 3, "bias": False}, DENSE | {"classifier.weight": (3, 8)}),
        (
            {"kind": "classifier", "n_classes": 3, "hidden": "none"},
            {"classifier.weight": (3, 8), "classifier.bias": (3,)},
        ),
        ({"kind": "token-classifier", "n_classes": 3}, {"classifier.weight": (3, 8), "classifier.bias": (3,)}),
        ({"kind": "span"}, {"classifier.weight": (2, 8), "classifier.bias": (2,)}),
    ],
)
def test_head_tensors(written: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    assert {name: p.shape for name, p in Head.from_dict(written).parameters(100, 8).items()} == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"kind": "pre"}, ("attention_norm", "ffn_norm")),
        ({"kind": "post"}, ("attention_norm", "ffn_norm")),
        ({"kind": "sandwich"}, ("attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm")),
        ({"kind": "parallel"}, ("norm",)),
        ({"kind": "parallel", "shared_norm": False}, ("attention_norm", "ffn_norm")),
    ],
)
def test_residuals_name_their_norms(written: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert Residual.from_dict(written).norms(("attention", "ffn")) == expected


# What patterns say of themselves


def test_combined_patterns_answer_for_their_parts() -> None:
    window = SlidingWindow(window=4, sinks=1)
    assert AllOf(patterns=(Bidirectional(), window)).causal
    assert not AnyOf(patterns=(Bidirectional(), window)).causal
    assert AnyOf(patterns=(Causal(), window)).causal
    assert AnyOf(patterns=(Prefix(), window)).fields == {"position", "prefix_length"}
    assert AllOf(patterns=(Causal(), window)).reach() == Reach(3, 0, 1)
    assert AnyOf(patterns=(Causal(), window)).reach() == Reach(None, 0, 1)
    assert AllOf(patterns=(Bidirectional(), Prefix())).reach() == Reach(None, None)


def test_parallel_has_one_norm_by_default() -> None:
    assert Parallel().shared_norm
