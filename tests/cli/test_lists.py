"""`qkv presets` and `qkv schema`."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
import pytest

import qkv

from .helpers import Result

Command = Callable[..., Result]


def test_presets_lists_every_model_with_its_exact_count(command: Command) -> None:
    header, *rows = (line.split() for line in command("presets").out.splitlines())
    assert header == ["name", "parameters", "d_model", "layers", "heads", "context"]
    assert [row[0] for row in rows] == list(qkv.presets())
    shown = {row[0]: row[1:] for row in rows}
    assert shown["transformer-base"] == ["63,045,632", "512", "6+6", "8", "256"]
    assert shown["llama-3-8b"] == ["8,030,261,248", "4,096", "32", "32/8", "8,192"]


def test_presets_as_json(command: Command) -> None:
    rows = json.loads(command("presets", "--json").out)
    assert {row["name"]: row["n_parameters"] for row in rows} == {
        name: qkv.preset(name).n_parameters for name in qkv.presets()
    }


def test_schema_accepts_a_config_and_refuses_a_wrong_one(command: Command) -> None:
    schema = json.loads(command("schema").out)
    config = qkv.preset("llama-3-8b").to_dict()
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"d_model": "wide"}, schema)
