"""`qkv presets`, `qkv schema` and `qkv generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


def test_generate_continues_the_prompt(command: Command, saved: Path) -> None:
    expected = qkv.load(saved).generate("The ", 9, temperature=0.5, seed=4)
    options = ("--max-new-tokens", "9", "--temperature", "0.5", "--seed", "4")
    assert command("generate", str(saved), "The ", *options).out == f"The {expected.text}\n"
    answer = json.loads(command("generate", str(saved), "The ", *options, "--json").out)
    assert answer == {"text": expected.text, "tokens": expected.tokens, "finish_reason": "length"}


def test_generate_refuses_an_empty_prompt_before_it_prints(command: Command, saved: Path) -> None:
    shown = command("generate", str(saved), "", "--max-new-tokens", "5")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == "qkv: prompt: empty; give at least one token to continue\n"


def test_generate_warns_beyond_the_trained_length(command: Command, saved: Path) -> None:
    limit = qkv.load(saved).config.max_seq_len
    assert command("generate", str(saved), "abcd", "--max-new-tokens", str(limit - 4)).err == ""
    beyond = command("generate", str(saved), "abcd", "--max-new-tokens", str(limit - 3))
    assert beyond.err == f"qkv: the model was trained on {limit} tokens at a time; what lies beyond may be poor\n"
    assert beyond.code == 0
