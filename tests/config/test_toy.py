"""The toys: every preset, and every config, has a small twin with the same choices."""

from collections.abc import Iterator

import pytest
from hypothesis import given

from config.strategies import models
from qkv.config import (
    AdaptiveTable,
    Block,
    Causal,
    Config,
    Gated,
    Latent,
    Llama3Scaling,
    LongRopeScaling,
    MixtureOfExperts,
    ModelConfig,
    MultiHead,
    NoScaling,
    QwenDynamicScaling,
    Rotary,
    SlidingWindow,
    YarnScaling,
)
from qkv.config.presets import preset, presets
from qkv.reference.position import rotary_frequencies

LIMIT = 150_000
"""Parameters of a toy: a forward pass of the slow oracle stays in milliseconds."""


def parts(node: object) -> Iterator[Config]:
    """Every config of the tree."""
    if isinstance(node, tuple):
        for item in node:
            yield from parts(item)
    elif isinstance(node, Config):
        yield node
        for name in type(node).model_fields:
            yield from parts(getattr(node, name))


def choices(config: ModelConfig) -> set[tuple[object, ...]]:
    """What each part of the tree decides: its class and every field but whole numbers and parts."""
    found = set()
    for part in parts(config):
        values = {name: getattr(part, name) for name in type(part).model_fields}
        kept = [(k, v) for k, v in values.items() if isinstance(v, bool | str | float) or v is None]
        found.add((type(part), *kept))
    return found


def whole_numbers(config: ModelConfig) -> dict[tuple[type, str], int]:
    """The largest value of each whole-number field."""
    found: dict[tuple[type, str], int] = {}
    for part in parts(config):
        for name in type(part).model_fields:
            value = getattr(part, name)
            if isinstance(value, int) and not isinstance(value, bool):
                found[type(part), name] = max(value, found.get((type(part), name), 0))
    return found


def blocks(config: ModelConfig) -> list[Block]:
    return [block for stack in config.stacks.values() for block in stack.blocks]


def sharing_of_keys(config: ModelConfig) -> set[str]:
    """Which of the three ways to share keys the model has."""
    heads = [part for part in parts(config) if isinstance(part, MultiHead)]
    return {"own" if a.kv_heads == a.n_heads else "single" if a.kv_heads == 1 else "grouped" for a in heads}


@pytest.mark.parametrize("name", presets())
def test_a_toy_is_small(name: str):
    toy = preset(name).toy()
    assert toy.n_parameters < LIMIT
    assert (toy.vocab_size, toy.max_seq_len) == (96, 64)
    assert toy.d_model <= 32


@pytest.mark.parametrize("name", presets())
def test_a_toy_round_trips_and_is_its_own_toy(name: str):
    toy = preset(name).toy()
    assert ModelConfig.from_json(toy.to_json()) == toy
    assert ModelConfig.from_toml(toy.to_toml()) == toy
    assert toy.toy() == toy


@pytest.mark.parametrize("name", presets())
def test_every_choice_survives_and_every_number_shrinks(name: str):
    config = preset(name)
    toy = config.toy()
    assert choices(toy) == choices(config)
    large, small = whole_numbers(config), whole_numbers(toy)
    assert small.keys() == large.keys()
    assert [key for key in small if small[key] > large[key]] == []


@pytest.mark.parametrize("name", presets())
def test_every_kind_of_layer_still_runs(name: str):
    config = preset(name)
    signatures = [
        {(type(b.attention), type(b.attention.pattern), type(b.ffn), type(b.residual)) for b in blocks(c)}
        for c in (config, config.toy())
    ]
    assert signatures[0] == signatures[1]


@pytest.mark.parametrize("name", presets())
def test_keys_are_shared_as_before(name: str):
    assert sharing_of_keys(preset(name).toy()) == sharing_of_keys(preset(name))


@pytest.mark.parametrize("name", presets())
def test_heads_fill_the_model_where_they_did(name: str):
    fills = [
        [part.n_heads * part.head_dim == config.d_model for part in parts(config) if isinstance(part, MultiHead)]
        for config in (preset(name), preset(name).toy())
    ]
    assert set(fills[0]) == set(fills[1])


def test_networks_four_times_as_wide_stay_so():
    for name in ("transformer-base", "bert-base-uncased", "gpt2", "bloom-176b", "palm-540b"):
        toy = preset(name).toy()
        assert {block.ffn.parameters(toy.d_model)["up_proj.weight"].shape for block in blocks(toy)} == {
            (4 * toy.d_model, toy.d_model)
        }


def test_gemma_keeps_its_cycle_of_six():
    patterns = [type(block.attention.pattern) for block in blocks(preset("gemma-3-270m").toy())]
    assert patterns == [SlidingWindow] * 5 + [Causal]


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_deepseek_keeps_one_dense_layer_and_experts_out_of_reach(name: str):
    toy = preset(name).toy()
    dense, sparse = blocks(toy)
    assert isinstance(dense.ffn, Gated)
    assert isinstance(sparse.ffn, MixtureOfExperts)
    assert 1 < sparse.ffn.top_groups < sparse.ffn.n_groups
    assert sparse.ffn.top_k < sparse.ffn.n_experts // sparse.ffn.n_groups * sparse.ffn.top_groups
    assert isinstance(sparse.attention, Latent)
    assert len({sparse.attention.nope_dim, sparse.attention.rope_dim, sparse.attention.v_head_dim}) == 3


def test_shared_experts_keep_their_multiple():
    shares = []
    for name in ("deepseek-v2", "deepseek-v3"):
        ffn = blocks(preset(name).toy())[-1].ffn
        assert isinstance(ffn, MixtureOfExperts)
        shares.append(ffn.shared_d_ff / ffn.d_ff)
    assert shares == [2, 1]


def test_bloom_keeps_heads_that_are_no_power_of_two():
    small = {name: preset(name).toy() for name in ("bloom-560m", "bloom-176b")}
    assert {name: blocks(toy)[0].attention.n_heads for name, toy in small.items()} == {"bloom-560m": 4, "bloom-176b": 3}
    grouped = preset("bloom-176b").override({"decoder.layers.*.attention.n_kv_heads": 8}).toy()
    attention = blocks(grouped)[0].attention
    assert isinstance(attention, MultiHead)
    assert (attention.n_heads, attention.kv_heads) == (6, 2)


def test_transformer_xl_keeps_four_clusters_each_narrower_than_the_last():
    toy = preset("transformer-xl-wt103").toy()
    assert isinstance(toy.embedding.tokens, AdaptiveTable)
    clusters = toy.embedding.tokens.clusters(toy.vocab_size, toy.d_model)
    assert clusters == ((0, 24, 32), (24, 48, 16), (48, 72, 8), (72, 96, 4))
    assert toy.head.kind == "adaptive"


WINDOWED = {"mistral-7b": 8, "gemma-3-270m": 8, "longformer-base": 8}


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_shorter_than_the_context(name: str):
    patterns = [part for part in parts(preset(name).toy()) if "window" in type(part).model_fields]
    assert {pattern.to_dict()["window"] for pattern in patterns} == {WINDOWED[name]}


SCALED = {
    "llama-3.1-8b": Llama3Scaling,
    "llama-3.2-1b": Llama3Scaling,
    "deepseek-v2": YarnScaling,
    "deepseek-v3": YarnScaling,
    "qwen-7b": QwenDynamicScaling,
}


@pytest.mark.parametrize("name", SCALED)
def test_scaling_still_changes_angles_inside_the_context(name: str):
    toy = preset(name).toy()
    attention = blocks(toy)[-1].attention
    rotary = attention.positions
    assert isinstance(rotary, Rotary)
    assert type(rotary.scaling) is SCALED[name]
    width = attention.rope_dim if isinstance(attention, Latent) else attention.query_dim
    plain, _ = rotary_frequencies(Rotary(theta=rotary.theta, scaling=NoScaling()), width, toy.max_seq_len)
    scaled, _ = rotary_frequencies(rotary, width, toy.max_seq_len)
    turned = [toy.max_seq_len * abs(a - b) for a, b in zip(plain, scaled, strict=True)]
    assert max(turned) > 0.5, "radians by which the last position's angles differ"


def test_scaling_that_grows_with_the_row_has_not_begun_at_a_quarter_of_the_context():
    rotary = blocks(preset("qwen-7b").toy())[0].attention.positions
    assert isinstance(rotary, Rotary)
    plain, _ = rotary_frequencies(Rotary(theta=rotary.theta), 8, 16)
    assert rotary_frequencies(rotary, 8, 16)[0] == plain
    assert rotary_frequencies(rotary, 8, 17)[0] != plain


def with_attention(**changes: object) -> ModelConfig:
    """Llama 2 7B with other attention."""
    return preset("llama-2-7b").override({f"decoder.layers.*.attention.{key}": v for key, v in changes.items()})


@pytest.mark.parametrize(
    ("head_dim", "fraction", "turned"),
    [(128, 0.25, 2), (128, 0.5, 4), (80, 0.4, 4), (128, 0.89, 8), (100, 0.02, 2)],  # 0.4: Phi-2
)
def test_a_fraction_that_would_turn_an_odd_part_of_the_small_head_is_rounded(
    head_dim: int, fraction: float, turned: int
):
    config = with_attention(head_dim=head_dim, n_heads=4096 // head_dim, positions=Rotary(fraction=fraction))
    attention = blocks(config.override({"d_model": 4096 // head_dim * head_dim}).toy())[0].attention
    assert isinstance(attention.positions, Rotary)
    assert attention.query_dim == 8
    assert attention.positions.width(8) == turned


def test_longrope_keeps_factors_from_its_whole_range():
    factors = tuple(float(i + 1) for i in range(64))
    scaling = LongRopeScaling(short_factor=factors, long_factor=factors, factor=4.0, original_max_seq_len=4096)
    attention = blocks(with_attention(positions=Rotary(scaling=scaling)).toy())[0].attention
    assert isinstance(attention.positions, Rotary)
    assert isinstance(attention.positions.scaling, LongRopeScaling)
    assert attention.positions.scaling.short_factor == (1.0, 17.0, 33.0, 49.0)


def test_a_long_cycle_keeps_each_distinct_layer_once():
    config = preset("mistral-7b")
    assert config.decoder is not None
    local = config.decoder.layers[0]
    whole = local.model_copy(update={"attention": local.attention.model_copy(update={"pattern": Causal()})})
    long = config.override({"decoder.layers": (*(local,) * 15, whole) * 2}).toy()
    assert [type(block.attention.pattern) for block in blocks(long)] == [SlidingWindow, Causal]


@given(models())
def test_every_config_has_a_toy_no_larger_than_itself(config: ModelConfig):
    toy = config.toy()
    assert {type(part) for part in parts(toy)} == {type(part) for part in parts(config)}
    assert (toy.vocab_size, toy.max_seq_len) == (config.vocab_size, config.max_seq_len)  # both below the caps
    assert toy.d_model <= max(config.d_model, 32)
