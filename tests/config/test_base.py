"""Strict decoding, one error for all problems, overriding, and a member that a user adds."""

import json
import math
import pickle
from types import MappingProxyType
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from qkv.config import (
    Alibi,
    AllOf,
    Attention,
    Block,
    Causal,
    Dense,
    FeedForward,
    LayerNorm,
    LlamaInit,
    ModelConfig,
    MultiHead,
    NoPositions,
    Norm,
    Parameter,
    Pattern,
    Positions,
    PreNorm,
    RMSNorm,
    Rotary,
    Stack,
    Variant,
    XavierInit,
    register,
)
from qkv.errors import ConfigError

from .examples import EXAMPLES, block, decoder_only, example, multi_head

GPT = EXAMPLES["gpt2"]


def refusal(call: Any, *arguments: Any, **fields: Any) -> str:
    """The message of the ConfigError that the call raises."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **fields)
    return str(error.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The plain GPT-2 with one value replaced, without any check."""
    plain = json.loads(json.dumps(GPT))
    *parents, last = path.split(".")
    node = plain
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    return plain


# What one field may hold


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vocab_size", True, "expected a whole number, got True"),
        ("vocab_size", 96.0, "expected a whole number, got 96.0"),
        ("vocab_size", "96", "expected a whole number, got '96'"),
        ("vocab_size", None, "expected a whole number, got None"),
        ("vocab_size", {"a": {"b": 1}}, "expected a whole number, got {'a': {'b': 1}}"),
        ("vocab_size", 0, "must be >= 1, got 0"),
        ("decoder.n_layers", -1, "must be >= 1, got -1"),
        ("embedding.dropout", 1, "must be < 1.0, got 1"),
        ("embedding.dropout", -0.1, "must be >= 0.0, got -0.1"),
        ("embedding.dropout", True, "expected a number, got True"),
        ("embedding.dropout", "0.1", "expected a number, got '0.1'"),
        ("embedding.dropout", None, "expected a number, got None"),
        ("embedding.dropout", math.nan, "expected a finite number, got nan"),
        ("embedding.scale", math.inf, "expected a positive number or 'sqrt_d_model', got inf"),
        ("embedding.scale", "sqrt", "expected a positive number or 'sqrt_d_model', got 'sqrt'"),
        ("embedding.scale", True, "expected a positive number or 'sqrt_d_model', got True"),
        ("embedding.scale", 0, "expected a positive number or 'sqrt_d_model', got 0"),
        ("head.scale", "sqrt_d_model", "expected a positive number or 'rsqrt_d_model', got 'sqrt_d_model'"),
        ("head.scale", -math.inf, "expected a positive number or 'rsqrt_d_model', got -inf"),
        ("head.softcap", math.inf, "expected a finite number, got inf"),
        ("head.softcap", 0, "must be > 0.0, got 0"),
        ("head.tied", 1, "expected true or false, got 1"),
        ("head.tied", "{a}", "expected true or false, got '{a}'"),
        ("decoder.layers", multi_head(), "expected a list, got "),
        ("decoder.layers", "block", "expected a list, got 'block'"),
        ("decoder", [1], "expected a table, got [1]"),
        ("decoder", LayerNorm(), "expected a table, got LayerNorm("),
        ("sharing", "tokns", "unknown value 'tokns'; did you mean 'tokens'?"),
        ("sharing", 3, "unknown value 3; choose one of all, none, tokens"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path: str, value: Any, message: str) -> None:
    text = refusal(ModelConfig.from_dict, changed(path, value))
    assert text.startswith(f"{path}: {message}")
    assert "\n" not in text


def test_a_long_wrong_value_is_cut() -> None:
    assert refusal(ModelConfig.from_dict, changed("vocab_size", "x" * 500)).endswith("xxx...")
    assert len(refusal(ModelConfig.from_dict, changed("vocab_size", "x" * 500))) < 200
    assert len(refusal(ModelConfig.from_dict, changed("encoder", example("gpt2")))) < 200


@pytest.mark.parametrize("number", [2, 2.5, 10**20])
def test_a_whole_number_stands_for_a_float(number: float) -> None:
    config = ModelConfig.from_dict(changed("embedding.scale", number))
    assert config.embedding.scale == number
    assert isinstance(config.embedding.scale, float)


@pytest.mark.parametrize("path", ["encoder", "decoder.layers.0.attention.n_kv_heads", "head.softcap"])
def test_null_means_the_default_only_where_that_is_the_default(path: str) -> None:
    assert ModelConfig.from_dict(changed(path, None)) == example("gpt2")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vocabsize", 1, "vocabsize: unknown field; did you mean 'vocab_size'?"),
        ("x", 1, "x: unknown field; choose one of d_model, decoder, embedding, encoder, head, init, max_seq_len, "),
        ("{x}", 1, "{x}: unknown field; choose one of d_model"),
        ("decoder.layers.0.droput", 0.1, "decoder.layers.0.droput: unknown field; did you mean 'dropout'?"),
        (
            "decoder.layers.0.attention.zoom",
            8,
            "decoder.layers.0.attention.zoom: unknown field; choose one of clip, dropout, ",
        ),
        (
            "decoder.layers.0.attention.positions",
            {"kind": "rotery"},
            "decoder.layers.0.attention.positions: unknown kind 'rotery'; did you mean 'rotary'?",
        ),
        ("head", {"kind": "xyz"}, "head: unknown kind 'xyz'; choose one of adaptive, classifier, lm, masked-lm, "),
        ("head", {"kind": ["lm"]}, "head: unknown kind ['lm']; "),
        ("head", {"kind": None}, "head: unknown kind None; "),
        ("head", {"tied": True}, "head: expected a table with a 'kind'; choose one of adaptive, classifier, lm, "),
        ("head", "lm", "head: expected a table with a 'kind'; choose one of "),
        ("head", None, "head: expected a table with a 'kind'; choose one of "),
        ("head", LayerNorm(), "head: expected a table with a 'kind'; choose one of "),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(path: str, value: Any, message: str) -> None:
    assert refusal(ModelConfig.from_dict, changed(path, value)).startswith(message)


@pytest.mark.parametrize("data", [None, 3, "gpt2", ["gpt2"]])
def test_what_is_no_table_is_refused(data: Any) -> None:
    assert refusal(ModelConfig.from_dict, data) == f"config: expected a table, got {data!r}"


# All problems in one error


def wrong_everywhere() -> dict[str, Any]:
    first = block(multi_head(n_heads=7, n_kv_heads=2, positions={"kind": "rotery"}), drop=0.1)
    second = block(
        multi_head({"kind": "all-of", "patterns": [{"kind": "causal"}, {"kind": "sliding-window", "window": 0}]}),
        ffn={"kind": "dense", "activation": "rel", "d_ff": True},
    )
    third = block(multi_head(n_heads=7, n_kv_heads=2), norm={"kind": "layernorm", "eps": math.nan})
    return decoder_only(first, second, third, vocab_size="96", embedding={"scale": "sqrt"}) | {"Head": {}}


PROBLEMS = [
    "Head: unknown field; did you mean 'head'?",
    "vocab_size: expected a whole number, got '96'",
    "embedding.scale: expected a positive number or 'sqrt_d_model', got 'sqrt'",
    "decoder.layers.0.drop: unknown field; did you mean 'dropout'?",
    "decoder.layers.0.attention.positions: unknown kind 'rotery'; did you mean 'rotary'?",
    "decoder.layers.1.attention.pattern.patterns.1.window: must be >= 1, got 0",
    "decoder.layers.1.ffn.d_ff: expected a whole number, got True",
    "decoder.layers.1.ffn.activation: unknown value 'rel'; did you mean 'relu'?",
    "decoder.layers.2.attention.n_kv_heads: must divide n_heads (7), got 2",
    "decoder.layers.2.norm.eps: expected a finite number, got nan",
]


def test_every_problem_comes_in_one_error_with_plain_paths() -> None:
    assert refusal(ModelConfig.from_dict, wrong_everywhere()).split("\n  ") == ["10 problems:", *PROBLEMS]


def test_python_json_and_dict_raise_the_same_error() -> None:
    wrong = wrong_everywhere()
    expected = refusal(ModelConfig.from_dict, wrong)
    assert refusal(ModelConfig, **wrong) == expected
    assert refusal(ModelConfig.from_json, json.dumps(wrong)) == expected  # json writes NaN, and reads it


def test_a_nested_constructor_names_its_own_path() -> None:
    assert refusal(MultiHead, n_heads=7, n_kv_heads=2, head_dim=4, pattern=Causal()) == (
        "n_kv_heads: must divide n_heads (7), got 2"
    )
    assert refusal(Rotary, kind="alibi") == "kind: unknown value 'alibi'; choose one of rotary"
    assert refusal(Rotary, layout="pair") == "layout: unknown value 'pair'; did you mean 'pairs'?"


def test_a_union_is_not_constructed_but_decodes_its_members() -> None:
    for union in (Positions, Attention, Norm):
        assert refusal(union, kind="none") == (
            f"{union.__name__} is a union: construct one of its members, or use from_dict"
        )
    assert Positions.from_dict({"kind": "rotary", "theta": 5}) == Rotary(theta=5)
    assert Norm.from_json('{"kind": "rmsnorm"}') == RMSNorm()


# Files


def test_json_and_toml_report_what_is_no_document() -> None:
    assert refusal(ModelConfig.from_json, "{").startswith("not JSON: Expecting property name")
    assert refusal(ModelConfig.from_json, "[1]") == "config: expected a table, got [1]"
    assert refusal(ModelConfig.from_toml, "d_model =").startswith("not TOML: Invalid value")
    assert "problems:" in refusal(ModelConfig.from_toml, "d_model = 1979-05-27")


def test_a_repeated_key_is_refused() -> None:
    assert refusal(Norm.from_json, '{"kind": "rmsnorm", "eps": 1e-5, "eps": 1e-6}') == (
        "not JSON: the key 'eps' stands twice in one table"
    )
    assert refusal(Norm.from_toml, 'kind = "rmsnorm"\neps = 1e-5\neps = 1e-6').startswith("not TOML: Cannot overwrite")


def test_a_json_number_too_large_is_refused() -> None:
    assert refusal(Norm.from_json, '{"kind": "rmsnorm", "eps": 1e400}') == "eps: expected a finite number, got inf"
    assert refusal(Norm.from_json, f'{{"kind": "rmsnorm", "eps": 1{400 * "0"}}}').startswith("eps: expected a number")


def test_a_written_config_holds_every_default_but_no_null() -> None:
    written = example("gpt2").to_dict()
    assert written["sharing"] == "all"
    assert written["decoder"]["layers"][0]["attention"]["qk_norm"] == {"kind": "none"}
    assert "encoder" not in written
    assert "n_kv_heads" not in written["decoder"]["layers"][0]["attention"]
    assert "null" not in example("gpt2").to_json()


def test_from_dict_takes_configs_and_any_mapping() -> None:
    config = example("gpt2")
    mixed = GPT | {"head": config.head, "decoder": GPT["decoder"] | {"layers": (config.decoder.layers[0],)}}
    assert ModelConfig.from_dict(mixed) == config
    assert ModelConfig.from_dict(MappingProxyType(mixed)) == config
    assert ModelConfig.from_dict(config) is config
    assert ModelConfig(**mixed) == config


# Values of Python


def test_a_config_is_frozen_hashable_and_equal_by_value() -> None:
    config, again = example("gpt2"), example("gpt2")
    assert config == again
    assert hash(config) == hash(again)
    assert len({config, again, example("llama")}) == 2
    assert config != config.override({"embedding.dropout": 0.2})
    assert config.decoder.layers[0].attention == MultiHead(
        n_heads=4, head_dim=8, pattern=Causal(), qkv_bias=True, o_bias=True, dropout=0.0, positions=NoPositions()
    )
    assert NoPositions() != LlamaInit()
    with pytest.raises(ValidationError, match="frozen"):
        config.d_model = 3
    with pytest.raises(ValidationError, match="frozen"):
        del config.decoder.layers[0].attention.dropout
    with pytest.raises(ValidationError, match="d_modell"):
        config.d_modell = 3


def test_a_config_survives_pickling() -> None:
    config = example("deepseek")
    assert pickle.loads(pickle.dumps(config)) == config


# override


def test_override_reaches_every_depth() -> None:
    config = example("gemma").override(
        {
            "d_model": 64,
            "decoder.n_layers": 6,
            "decoder.layers.*.attention.dropout": 0.25,
            "decoder.layers.1.attention.pattern.window": 4,
            "decoder.layers.2.attention.positions.theta": 7,
            "decoder.norm": {"kind": "rmsnorm"},
            "init": XavierInit(),
            "head.softcap": None,
        }
    )
    blocks = config.decoder.layers
    assert (config.d_model, config.decoder.n_layers) == (64, 6)
    assert [block.attention.dropout for block in blocks] == [0.25] * 3
    assert [block.attention.pattern.to_dict().get("window") for block in blocks] == [8, 4, None]
    assert [block.attention.positions.theta for block in blocks] == [1e4, 1e4, 7.0]
    assert (config.decoder.norm, config.init, config.head.softcap) == (RMSNorm(), XavierInit(), None)
    assert example("gemma").decoder.layers[0].attention.dropout == 0  # the original is as before


def test_override_replaces_a_union_member_whole() -> None:
    config = example("llama").override({"decoder.layers.*.attention.positions": {"kind": "alibi"}})
    assert config.decoder.layers[0].attention.positions == Alibi()
    message = refusal(example("llama").override, {"decoder.layers.*.attention.positions.kind": "alibi"})
    assert "decoder.layers.0.attention.positions.theta: unknown field" in message


def test_override_sets_the_places_of_a_star_apart() -> None:
    config = example("gemma").override(
        {"decoder.layers.*.attention": multi_head(), "decoder.layers.0.attention.dropout": 0.5}
    )
    assert [block.attention.dropout for block in config.decoder.layers] == [0.5, 0, 0]


def test_override_does_not_keep_the_callers_objects() -> None:
    layers = [block(multi_head())]
    config = example("gpt2").override({"decoder.layers": layers, "decoder.layers.0.dropout": 0.5})
    assert config.decoder.layers[0].dropout == 0.5
    assert "dropout" not in layers[0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("d_modell", 3, "d_modell: unknown field; did you mean 'd_model'?"),
        (
            "decoder.layerz.*.dropout",
            0.1,
            "decoder.layerz.*.dropout: nothing stands at 'layerz'; did you mean 'layers'?",
        ),
        ("decoder.layers.*.droput", 0.1, "decoder.layers.0.droput: unknown field; did you mean 'dropout'?"),
        ("decoder.layers.1.dropout", 0.1, "decoder.layers.1.dropout: '1' is not one of the indices 0 to 0, nor '*'"),
        ("decoder.layers.-1.dropout", 0.1, "decoder.layers.-1.dropout: '-1' is not one of the indices 0 to 0, nor '*'"),
        ("decoder.layers.².dropout", 0.1, "decoder.layers.².dropout: '²' is not one of the indices 0 to 0, nor '*'"),
        ("decoder.layers.0", None, "decoder.layers.0: expected a table, got None"),
        ("decoder.first.*.dropout", 0.1, "decoder.first.*.dropout: the list has no element '*'; it is empty"),
        ("encoder.n_layers", 3, "encoder.n_layers: nothing stands at 'encoder'; did you mean 'decoder'?"),
        ("d_model.x", 3, "d_model.x: 'x' lies below the plain value 32"),
        ("*.dropout", 3, "*.dropout: nothing stands at '*'; choose one of "),
        ("decoder", None, "2 problems:\n  config: a model needs an encoder, a decoder, or both"),
        ("d_model", None, "d_model: required, but not given"),
        ("decoder.layers.0.attention.n_kv_heads", 3, "decoder.layers.0.attention.n_kv_heads: must divide n_heads (4)"),
    ],
)
def test_override_names_the_path_that_it_cannot_follow(path: str, value: Any, message: str) -> None:
    assert refusal(example("gpt2").override, {path: value}).startswith(message)


# A user's own member


@pytest.fixture
def ffn_members() -> Any:
    """Puts back the members of the union that a test adds to."""
    before = FeedForward.members
    yield before
    FeedForward.members = before


class Bilinear(FeedForward):
    """down(gate(x) * up(x)), without an activation (Dauphin 2016)."""

    kind: Literal["bilinear"] = "bilinear"
    d_ff: int

    def parameters(self, d_model: int) -> dict[str, Parameter]:
        return {"weight": Parameter((self.d_ff, d_model), "ffn_input")}


def test_a_registered_member_is_accepted_everywhere(ffn_members: tuple[type[Variant], ...]) -> None:
    plain = decoder_only(block(multi_head(), ffn={"kind": "bilinear", "d_ff": 5}))
    assert "decoder.layers.0.ffn: unknown kind 'bilinear'; " in refusal(ModelConfig.from_dict, plain)
    assert register(Bilinear) is Bilinear
    config = ModelConfig.from_dict(plain)
    assert config.decoder.layers[0].ffn == Bilinear(d_ff=5)
    assert ModelConfig.from_json(config.to_json()) == config == ModelConfig.from_toml(config.to_toml())
    assert config.parameters()["decoder.layers.1.ffn.weight"][0] == (5, 32)
    older = example("gpt2").override({"decoder.layers.0.ffn": {"kind": "bilinear", "d_ff": 5}})
    assert older.decoder.layers[0].ffn == Bilinear(d_ff=5)
    wrong = decoder_only(block(multi_head(), ffn={"kind": "bilinear", "d_f": 5}))
    assert "decoder.layers.0.ffn.d_f: unknown field; did you mean 'd_ff'?" in refusal(ModelConfig.from_dict, wrong)
    assert FeedForward.members == (*ffn_members, Bilinear)


def test_a_module_imported_twice_may_register_again(ffn_members: tuple[type[Variant], ...]) -> None:
    register(Bilinear)
    again = type("Bilinear", (Bilinear,), {"__module__": Bilinear.__module__, "__qualname__": Bilinear.__qualname__})
    register(again)
    assert FeedForward.members == (*ffn_members, again)
    register(again)
    assert FeedForward.members == (*ffn_members, again)


def test_a_kind_is_registered_once(ffn_members: tuple[type[Variant], ...]) -> None:
    other = type("Dense", (Bilinear,), {"kind": "dense", "__annotations__": {"kind": Literal["dense"]}})
    message = refusal(register, other)
    assert message == "FeedForward: kind 'dense' is already qkv.config.ffn.Dense; choose another kind"
    assert FeedForward.members == ffn_members


def test_a_member_without_a_kind_is_refused(ffn_members: tuple[type[Variant], ...]) -> None:
    class Nameless(FeedForward):
        """It has no kind."""

    assert refusal(register, Nameless) == 'Nameless: needs a field kind: Literal["name"] = "name" that names it'
    assert FeedForward.members == ffn_members


def test_a_registered_pattern_is_accepted_inside_another() -> None:
    before = Pattern.members

    class Nothing(Pattern):
        """Nobody sees anybody."""

        kind: Literal["nothing"] = "nothing"

    try:
        register(Nothing)
        nested = {"kind": "all-of", "patterns": [{"kind": "nothing"}, {"kind": "causal"}]}
        assert Pattern.from_dict(nested) == AllOf(patterns=(Nothing(), Causal()))
    finally:
        Pattern.members = before


def test_a_config_can_be_written_in_python() -> None:
    attention = MultiHead(n_heads=4, head_dim=8, pattern=Causal(), qkv_bias=True, o_bias=True)
    one = Block(attention=attention, ffn=Dense(d_ff=48, activation="gelu"), norm=LayerNorm(), residual=PreNorm())
    stack = Stack(n_layers=2, layers=[one], norm=LayerNorm())
    fields = {name: GPT[name] for name in ("embedding", "head", "init")}
    assert ModelConfig(vocab_size=96, d_model=32, max_seq_len=64, decoder=stack, **fields) == example("gpt2")
