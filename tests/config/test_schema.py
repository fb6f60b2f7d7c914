"""The JSON Schema accepts what the config classes accept and refuses unknown kinds, fields and types."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from parity.cases import CASES
from qkv.config import UNIONS, Config, FeedForward, ModelConfig, Variant, register
from qkv.config.presets import preset, presets
from qkv.config.schema import json_schema
from qkv.errors import ConfigError

from .examples import EXAMPLES, block, decoder_only, example, multi_head
from .strategies import members, models

SCHEMA = json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def test_it_is_a_schema_of_plain_json() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert "x-qkv" not in json.dumps(SCHEMA)


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if "$ref" in node else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_every_reference_leads_to_a_definition_and_every_definition_is_used() -> None:
    assert references(SCHEMA) == {f"#/$defs/{name}" for name in SCHEMA["$defs"]}


@pytest.mark.parametrize("union", UNIONS, ids=lambda union: union.__name__)
def test_a_union_offers_every_member(union: type[Variant]) -> None:
    definition = SCHEMA["$defs"][union.__name__]
    assert list(definition["discriminator"]["mapping"]) == list(union.kinds())
    assert len(definition["oneOf"]) == len(union.members)
    assert definition["description"] == union.__doc__


@pytest.mark.parametrize("member", members(), ids=lambda member: member.__name__)
def test_a_member_is_described_as_its_class_is(member: type[Variant]) -> None:
    union, kind = member.__mro__[1].__name__, member.model_fields["kind"].default
    definition = SCHEMA["$defs"][f"{union}.{kind}"]
    assert definition["description"].split() == (member.__doc__ or "").split()
    assert set(definition["properties"]) == set(member.model_fields)
    required = {name for name, field in member.model_fields.items() if field.is_required()}
    assert set(definition["required"]) == required | {"kind"}
    assert definition["additionalProperties"] is False
    for name, field in member.model_fields.items():
        if field.description and name != "kind":
            assert definition["properties"][name]["description"] == field.description


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_accepts_the_examples_short_and_complete(name: str) -> None:
    VALIDATOR.validate(EXAMPLES[name])
    VALIDATOR.validate(example(name).to_dict())
    VALIDATOR.validate(example(name).toy().to_dict())


@pytest.mark.parametrize("name", CASES)
def test_it_accepts_every_toy(name: str) -> None:
    VALIDATOR.validate(CASES[name].to_dict())


@pytest.mark.parametrize("name", presets())
def test_it_accepts_every_published_model(name: str) -> None:
    VALIDATOR.validate(preset(name).to_dict())


@given(config=models())
def test_it_accepts_every_model(config: ModelConfig) -> None:
    VALIDATOR.validate(config.to_dict())


REFUSED: list[tuple[str, Any]] = [
    ("vocabsize", 3),
    ("vocab_size", 0),
    ("vocab_size", True),
    ("vocab_size", "96"),
    ("vocab_size", 1.5),
    ("sharing", "some"),
    ("head", {"kind": "lmm", "tied": True}),
    ("head", {"tied": True}),
    ("head", {"kind": "lm"}),
    ("head", {"kind": "lm", "tied": True, "softcapp": 3}),
    ("head", "lm"),
    ("head", None),
    ("decoder.layers", block(multi_head())),
    ("decoder.layers.0.droput", 0.1),
    ("decoder.layers.0.dropout", 1),
    ("decoder.layers.0.attention.window", 8),
    ("decoder.layers.0.attention.positions", {"kind": "rotery"}),
    ("decoder.layers.0.attention.positions", {"kind": "alibi", "theta": 1}),
    ("decoder.layers.0.attention.pattern", {"kind": "all-of", "patterns": [{"kind": "sliding-window", "window": 0}]}),
    ("embedding.scale", "sqrt"),
    ("embedding.scale", -1),
    ("init", {"kind": "gpt2", "std": 0}),
]


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_it_refuses_what_the_classes_refuse(path: str, value: Any) -> None:
    plain = json.loads(json.dumps(EXAMPLES["gpt2"]))
    *parents, last = path.split(".")
    node = plain
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    node[last] = value
    assert not VALIDATOR.is_valid(plain)
    with pytest.raises(ConfigError):
        ModelConfig.from_dict(plain)


class Schedule(Config):
    """A config of the user's own inside a member."""

    step: int


class Smooth(FeedForward):
    """A feed-forward network from a user's file (Nobody 2025)."""

    kind: Literal["smooth"] = "smooth"
    schedule: Schedule
    inner: FeedForward


def test_a_registered_member_is_included_with_what_it_holds() -> None:
    before = FeedForward.members
    inner = {"kind": "dense", "d_ff": 3, "activation": "relu"}
    plain = decoder_only(block(multi_head(), ffn={"kind": "smooth", "schedule": {"step": 3}, "inner": inner}))
    assert not VALIDATOR.is_valid(plain)
    try:
        register(Smooth)
        schema = json_schema()
        ModelConfig.from_dict(plain)
    finally:
        FeedForward.members = before
    validator = Draft202012Validator(schema)
    assert validator.is_valid(plain)
    assert schema["$defs"]["FeedForward.smooth"]["description"] == Smooth.__doc__
    plain["decoder"]["layers"][0]["ffn"]["schedule"]["stop"] = 4
    assert not validator.is_valid(plain)
    assert json_schema() == SCHEMA
