"""The whole model: what does not fit together is refused; its tensors and their first values are as published."""

import math
from typing import Any

import pytest
from hypothesis import given

from qkv.config import (
    BertInit,
    Constant,
    GPT2Init,
    Init,
    LanguageModel,
    ModelConfig,
    Normal,
    Parameter,
    T5Init,
    Uniform,
    XavierInit,
)
from qkv.config.init import Distribution
from qkv.errors import ConfigError

from .examples import EXAMPLES, Plain, block, decoder_only, encoder_decoder, encoder_only, example, multi_head
from .strategies import models

BIDIRECTIONAL = multi_head("bidirectional")


def cross_block(**fields: Any) -> Plain:
    return block(multi_head(), cross_attention=BIDIRECTIONAL, **fields)


def with_decoder(*blocks: Plain, **stack: Any) -> Plain:
    return encoder_decoder(decoder={"n_layers": 2, "layers": list(blocks)} | stack)


# Whole models of any kind


@given(config=models())
def test_a_model_survives_json_toml_and_python(config: ModelConfig) -> None:
    written = config.to_json()
    for again in (
        ModelConfig.from_json(written),
        ModelConfig.from_toml(config.to_toml()),
        ModelConfig.from_dict(config.to_dict()),
        ModelConfig(**dict(config)),
        config.override({}),
    ):
        assert again == config
        assert hash(again) == hash(config)
        assert again.to_json() == written


@given(config=models())
def test_every_tensor_has_a_name_a_size_and_a_distribution(config: ModelConfig) -> None:
    shapes, starts = config.shapes(), config.parameters()
    assert list(shapes) == list(starts)
    assert config.n_parameters == sum(math.prod(shape) for shape, _ in starts.values())
    parents = {name.rsplit(".", 1)[0] for name in shapes if "." in name}
    for name, (shape, distribution) in starts.items():
        assert shape == shapes[name].shape
        assert min(shape) >= 1
        assert isinstance(distribution, Constant | Normal | Uniform)
        assert math.isfinite(next(iter(vars(distribution).values())))
        assert all(part.isidentifier() or part.isdigit() for part in name.split("."))
        assert name not in parents, f"{name} is a tensor and a module"


@given(config=models())
def test_the_table_counts_every_layer(config: ModelConfig) -> None:
    for name, stack in config.stacks.items():
        own = {tensor: p for tensor, p in config.shapes().items() if tensor.startswith(f"{name}.layers.")}
        assert {int(tensor.split(".")[2]) for tensor in own} == set(range(stack.n_layers))
        parts = [block.parameters(config.sizes).values() for block in stack.blocks]
        assert sum(p.size for p in own.values()) == sum(p.size for part in parts for p in part)
        assert len(stack.blocks) == stack.n_layers
        assert stack.blocks[: len(stack.first)] == stack.first
        for index in range(len(stack.first), stack.n_layers):
            assert stack.block(index) == stack.layers[(index - len(stack.first)) % len(stack.layers)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_models(name: str) -> None:
    assert example(name).n_parameters > 10_000
    assert ModelConfig.from_toml(example(name).to_toml()) == example(name)


# What does not fit together

SHARED_UNEQUAL = [
    block(multi_head(n_heads=heads, positions={"kind": "t5-buckets", "n_buckets": 16, "bidirectional": False}))
    for heads in (4, 2)
]
CLUSTERS = {"kind": "adaptive", "cutoffs": [24, 48], "divisor": 2}
TABLE = {"tokens": CLUSTERS}

UNFIT: dict[str, tuple[Plain, list[str]]] = {
    "no stack": (
        {"vocab_size": 8, "d_model": 8, "max_seq_len": 8},
        ["config: a model needs an encoder, a decoder, or both"],
    ),
    "sharing in a decoder": (
        decoder_only(block(multi_head()), sharing="none"),
        ["sharing: 'none' speaks of source and target: it needs an encoder and a decoder"],
    ),
    "sharing in an encoder": (
        encoder_only(block(BIDIRECTIONAL), sharing="tokens"),
        ["sharing: 'tokens' speaks of source and target: it needs an encoder and a decoder"],
    ),
    "odd sinusoids": (
        decoder_only(block(multi_head()), d_model=33, embedding={"positions": {"kind": "sinusoidal"}}),
        ["d_model: must be even for 'sinusoidal' positions, got 33"],
    ),
    "odd relative sinusoids": (
        decoder_only(block(multi_head(positions={"kind": "transformer-xl"})), d_model=33),
        ["d_model: must be even for 'transformer-xl' positions, got 33"],
    ),
    "rotary at the embedding": (
        decoder_only(block(multi_head()), embedding={"positions": {"kind": "rotary"}}),
        ["embedding.positions: 'rotary' acts in attention: set it at attention.positions, and 'none' here"],
    ),
    "buckets at the embedding": (
        decoder_only(block(multi_head()), embedding={"positions": {"kind": "t5-buckets", "bidirectional": True}}),
        ["embedding.positions: 't5-buckets' acts in attention: set it at attention.positions, and 'none' here"],
    ),
    "learned in attention": (
        decoder_only(block(multi_head(positions={"kind": "learned"}))),
        [
            "decoder.layers.0.attention.positions: 'learned' is added to embeddings: set it at embedding.positions, "
            "and 'none' here"
        ],
    ),
    "window 0": (
        decoder_only(block(multi_head({"kind": "sliding-window", "window": 0}))),
        ["decoder.layers.0.attention.pattern.window: must be >= 1, got 0"],
    ),
    "7 heads over 2": (
        decoder_only(block(multi_head()), block(multi_head(n_heads=7, n_kv_heads=2))),
        ["decoder.layers.1.attention.n_kv_heads: must divide n_heads (7), got 2"],
    ),
    "no layers": (
        with_decoder(cross_block()) | {"encoder": {"n_layers": 2, "layers": []}},
        ["encoder.layers: needs at least one block"],
    ),
    "more first layers than layers": (
        decoder_only(block(multi_head())) | {
            "decoder": {"n_layers": 1, "layers": [block(multi_head())], "first": [block(multi_head())] * 2}
        },
        ["decoder.first: has 2 blocks, more than n_layers (1)"],
    ),
    "cross-attention without an encoder": (
        decoder_only(block(multi_head()), cross_block()),
        ["decoder.layers.1.cross_attention: a model without an encoder has no source to look at: remove it"],
    ),
    "cross-attention in an encoder": (
        encoder_decoder(encoder={"n_layers": 1, "layers": [block(BIDIRECTIONAL, cross_attention=BIDIRECTIONAL)]}),
        ["encoder.layers.0.cross_attention: an encoder has no source to look at: remove it"],
    ),
    "decoder without cross-attention": (
        with_decoder(cross_block(), first=[block(multi_head())]),
        ["decoder.first.0.cross_attention: required: without it this decoder layer never sees the encoder"],
    ),
    "cross-attention with positions": (
        with_decoder(block(multi_head(), cross_attention=BIDIRECTIONAL | {"positions": {"kind": "rotary"}})),
        [
            "decoder.layers.0.cross_attention.positions: source and target have no common positions: use 'none', "
            "not 'rotary'"
        ],
    ),
    "cross-attention with a mask": (
        with_decoder(block(multi_head(), cross_attention=multi_head())),
        [
            "decoder.layers.0.cross_attention.pattern: the whole source is visible: use 'bidirectional', not 'causal'"
        ],
    ),
    "parallel with cross-attention": (
        with_decoder(cross_block(residual={"kind": "parallel"})),
        [
            "decoder.layers.0.residual: 'parallel' joins attention and ffn only: a block with cross-attention needs "
            "another kind"
        ],
    ),
    "shared positions of unequal layers": (
        decoder_only(*SHARED_UNEQUAL),
        ["decoder.layers: layers that share 't5-buckets' need equal n_heads and head_dim, got [(2, 8), (4, 8)]"],
    ),
    "encoder with a language model head": (
        encoder_only(block(BIDIRECTIONAL), head={"kind": "lm", "tied": True}),
        ["head: 'lm' predicts the next token: it needs a decoder, and this model has only an encoder"],
    ),
    "encoder with an adaptive head": (
        encoder_only(block(BIDIRECTIONAL), head=CLUSTERS, embedding=TABLE),
        ["head: 'adaptive' predicts the next token: it needs a decoder, and this model has only an encoder"],
    ),
    "language model that sees the future": (
        decoder_only(block(multi_head()), block(BIDIRECTIONAL)),
        ["decoder.layers.1.attention.pattern: 'bidirectional' sees the tokens that head 'lm' must predict"],
    ),
    "decoder that sees the future": (
        with_decoder(cross_block(), first=[cross_block() | {"attention": BIDIRECTIONAL}]),
        ["decoder.first.0.attention.pattern: 'bidirectional' sees the tokens that head 'lm' must predict"],
    ),
    "masked language model over a decoder": (
        decoder_only(block(multi_head()), head={"kind": "masked-lm"}),
        ["head: 'masked-lm' reads both sides of a token: it needs an encoder, and this model has only a decoder"],
    ),
    "masked language model over both": (
        encoder_decoder(head={"kind": "next-sentence"}),
        ["head: 'next-sentence' reads an encoder, but heads of an encoder-decoder read the decoder"],
    ),
    "tied head without a full table": (
        decoder_only(block(multi_head()), embedding=TABLE),
        ["head.tied: a tied 'lm' head needs a 'full' token table, not 'adaptive'"],
    ),
    "tied masked head without a full table": (
        encoder_only(block(BIDIRECTIONAL), embedding=TABLE),
        ["head.tied: a tied 'masked-lm' head needs a 'full' token table, not 'adaptive'"],
    ),
    "adaptive head tied to a full table": (
        decoder_only(block(multi_head()), head=CLUSTERS),
        ["head.tied: ties to the token table: embedding.tokens must be 'adaptive' with equal cutoffs and divisor"],
    ),
    "adaptive head tied to another table": (
        decoder_only(block(multi_head()), head=CLUSTERS | {"cutoffs": [24, 49]}, embedding=TABLE),
        ["head.tied: ties to the token table: embedding.tokens must be 'adaptive' with equal cutoffs and divisor"],
    ),
    "tied projections of an untied head": (
        decoder_only(block(multi_head()), head=CLUSTERS | {"tied": False, "tied_projections": [False, True]}),
        ["head.tied: ties to the token table: embedding.tokens must be 'adaptive' with equal cutoffs and divisor"],
    ),
    "cutoffs beyond the vocabulary": (
        decoder_only(block(multi_head()), head=CLUSTERS, embedding=TABLE, vocab_size=48),
        [
            "embedding.tokens.cutoffs: must stay below vocab_size (48), got 48",
            "head.cutoffs: must stay below vocab_size (48), got 48",
        ],
    ),
    "clusters of broken width": (
        decoder_only(
            block(multi_head()), head=CLUSTERS | {"divisor": 3}, embedding={"tokens": CLUSTERS | {"divisor": 3}}
        ),
        [
            "embedding.tokens.divisor: 3^2 must divide d_model (32)",
            "head.divisor: 3^2 must divide d_model (32)",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused(name: str) -> None:
    written, problems = UNFIT[name]
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(written)
    expected = problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems:", *problems])
    assert str(error.value) == expected
    with pytest.raises(ConfigError) as constructed:
        ModelConfig(**written)
    assert str(constructed.value) == expected


def test_what_fits_is_accepted() -> None:
    shared = [b | {"ffn": {"kind": "gated", "d_ff": 8}} for b in SHARED_UNEQUAL[:1]]
    for written in (
        with_decoder(cross_block(), first=[cross_block()] * 2),
        encoder_decoder(sharing="none"),
        encoder_decoder(sharing="tokens", head={"kind": "classifier", "n_classes": 2}),
        encoder_only(block(multi_head()), head={"kind": "none"}, d_model=33),
        decoder_only(block(BIDIRECTIONAL), head={"kind": "token-classifier", "n_classes": 2}),
        decoder_only(block(multi_head("prefix"))),
        decoder_only(SHARED_UNEQUAL[0], *shared),
        decoder_only(block(multi_head()), embedding=TABLE, head={"kind": "lm", "tied": False}),
        decoder_only(block(multi_head()), head=CLUSTERS | {"tied": False}),
        decoder_only(block(multi_head()), head=CLUSTERS | {"tied": False}, vocab_size=49),
    ):
        assert ModelConfig.from_dict(written).to_dict()["head"]["kind"]


# Tensors


def names(config: ModelConfig) -> set[str]:
    return set(config.shapes())


def test_the_tensors_of_gpt2() -> None:
    config = example("gpt2")
    width = {"weight": (32,), "bias": (32,)}
    layer: dict[str, tuple[int, ...]] = {
        **{f"attention.{x}_proj.weight": (32, 32) for x in "qkvo"},
        **{f"attention.{x}_proj.bias": (32,) for x in "qkvo"},
        "ffn.up_proj.weight": (48, 32),
        "ffn.down_proj.weight": (32, 48),
        **{f"{norm}.{name}": shape for norm in ("attention_norm", "ffn_norm") for name, shape in width.items()},
    }
    expected = {"embed.tokens.weight": (96, 32), "embed.positions.weight": (64, 32)}
    expected |= {f"decoder.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {f"decoder.norm.{name}": shape for name, shape in width.items()}
    assert {name: parameter.shape for name, parameter in config.shapes().items()} == expected


@pytest.mark.parametrize("name", ["gpt2", "gemma", "t5", "vaswani"])
def test_a_tied_head_adds_nothing(name: str) -> None:
    config = example(name)
    untied = config.override({"head.tied": False})
    assert names(untied) - names(config) == {"head.weight"}
    assert untied.n_parameters - config.n_parameters == config.vocab_size * config.d_model
    assert not {tensor for tensor in names(config) if tensor.startswith("head.")}


def test_a_tied_adaptive_head_adds_its_clusters_only() -> None:
    config = example("transformer-xl")
    assert {name for name in names(config) if name.startswith("head.")} == {
        "head.cluster_weight", "head.cluster_bias", "head.biases.0", "head.biases.1", "head.biases.2",
        "head.projections.0.weight",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sharing", "target"),
    [
        ("all", set()),
        ("tokens", {"target_embed.positions.weight"}),
        ("none", {"target_embed.positions.weight", "target_embed.tokens.weight"}),
    ],
)
def test_source_and_target_share_as_told(sharing: str, target: set[str]) -> None:
    config = ModelConfig.from_dict(encoder_decoder(sharing=sharing, embedding={"positions": {"kind": "learned"}}))
    assert {name for name in names(config) if name.startswith("target_embed.")} == target
    assert config.has_target_embedding == bool(target)
    assert {"embed.positions.weight", "embed.tokens.weight"} <= names(config)


def test_shared_positions_stand_once_per_stack() -> None:
    relative = {name: p.shape for name, p in example("t5").shapes().items() if "positions" in name}
    assert relative == {"encoder.positions.0.weight": (16, 4), "decoder.positions.0.weight": (16, 4)}
    own = example("t5").override({"decoder.layers.0.attention.positions.shared": False})
    assert {name for name in names(own) if "positions" in name} == {
        "encoder.positions.0.weight",
        "decoder.layers.0.attention.positions.weight",
        "decoder.layers.1.attention.positions.weight",
    }


def test_first_layers_come_first() -> None:
    experts = {name.split(".")[2] for name in names(example("deepseek")) if "experts" in name}
    assert experts == {"1", "2"}


def test_scales_by_name_follow_the_width() -> None:
    assert example("vaswani").embedding.factor(64) == 8
    assert example("gpt2").embedding.factor(64) == 1
    assert LanguageModel(tied=True, scale="rsqrt_d_model").factor(64) == 1 / 8
    assert LanguageModel(tied=True, scale=3).factor(64) == 3


# How tensors start


def start(config: ModelConfig, name: str) -> Distribution:
    return config.parameters()[name][1]


def test_gpt2_shrinks_what_joins_the_residual_stream() -> None:
    config = example("gpt2").override({"decoder.n_layers": 12})
    residual = Normal(0.02 / math.sqrt(24))
    assert start(config, "decoder.layers.11.attention.o_proj.weight") == residual
    assert start(config, "decoder.layers.0.ffn.down_proj.weight") == residual
    assert start(config, "decoder.layers.0.ffn.up_proj.weight") == Normal(0.02)
    assert start(config, "embed.tokens.weight") == start(config, "embed.positions.weight") == Normal(0.02)
    assert start(config, "decoder.layers.0.attention.q_proj.bias") == Constant(0)
    assert start(config, "decoder.norm.weight") == Constant(1)
    assert start(config, "decoder.norm.bias") == Constant(0)


def test_gpt2_counts_the_layers_of_each_stack() -> None:
    config = example("vaswani").override({"init": {"kind": "gpt2", "std": 0.1}, "encoder.n_layers": 8})
    assert start(config, "encoder.layers.0.ffn.down_proj.weight") == Normal(0.1 / 4)
    assert start(config, "decoder.layers.0.ffn.down_proj.weight") == Normal(0.1 / 2)


def test_llama_and_bert_start_every_matrix_alike() -> None:
    for name, expected in (("llama", Normal(0.02)), ("longformer", Normal(0.02, cut=2))):
        config = example(name)
        matrices = {n: d for n, (shape, d) in config.parameters().items() if len(shape) > 1}
        assert len(matrices) > 10
        assert set(matrices.values()) == {expected}
    assert BertInit(std=0.5).distribution(Parameter((3, 4), "key"), 2) == Normal(0.5, 2)


def test_t5_puts_the_score_scale_into_the_queries() -> None:
    config = example("t5").override({"encoder.layers.*.attention.n_heads": 2})
    layer = "encoder.layers.0"
    assert start(config, f"{layer}.attention.q_proj.weight") == Normal((32 * 8) ** -0.5)
    assert start(config, f"{layer}.attention.k_proj.weight") == Normal(32**-0.5)
    assert start(config, f"{layer}.attention.o_proj.weight") == Normal(16**-0.5)
    assert start(config, f"{layer}.ffn.down_proj.weight") == Normal(48**-0.5)
    assert start(config, "embed.tokens.weight") == Normal(1.0)
    assert start(config, "encoder.norm.weight") == Constant(1)


def test_xavier_is_glorots_and_not_hes() -> None:
    config = example("vaswani").override({"d_model": 512})
    square = Parameter((512, 512), "value")
    bound = XavierInit().distribution(square, 6)
    assert bound == Uniform(math.sqrt(6 / 1024))
    # The standard deviation of that uniform is 1/sqrt(512) = 0.0442; sqrt(2/512) = 0.0625 would be He's.
    assert math.isclose(bound.bound / math.sqrt(3), 512**-0.5)
    assert math.isclose(bound.bound / math.sqrt(3), 0.0442, abs_tol=1e-4)
    assert start(config, "decoder.layers.0.ffn.up_proj.weight") == Uniform(math.sqrt(6 / (512 + 48)))
    assert start(config, "embed.tokens.weight") == Normal(512**-0.5)


def test_experts_start_like_the_matrices_that_they_are() -> None:
    stacked = Parameter((8, 16, 32), "ffn_input")
    assert (stacked.fan_in, stacked.fan_out, stacked.size) == (32, 16, 4096)
    assert XavierInit().distribution(stacked, 1) == Uniform(math.sqrt(6 / 48))
    assert T5Init().distribution(stacked, 1) == Normal(32**-0.5)


@pytest.mark.parametrize("scheme", Init.members, ids=lambda scheme: scheme.__name__)
def test_ones_and_zeros_are_the_same_in_every_scheme(scheme: type[Init]) -> None:
    assert scheme().distribution(Parameter((4,), "ones"), 3) == Constant(1)
    assert scheme().distribution(Parameter((4,), "zeros"), 3) == Constant(0)


def test_a_scheme_without_a_table_says_so() -> None:
    class Bare(Init):
        """It lacks its table."""

    with pytest.raises(NotImplementedError, match="Bare must define table"):
        Bare(kind="bare").distribution(Parameter((2, 2), "key"), 1)
    assert GPT2Init(std=0.5).distribution(Parameter((2, 2), "ffn_output"), 2) == Normal(0.25)
