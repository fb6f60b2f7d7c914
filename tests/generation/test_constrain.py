"""Constraints: whatever a model would like to say, the text is valid; and nothing valid is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from qkv.checkpoint.gguf_file import File
from qkv.errors import GenerationError
from qkv.generate.constrain import Constraint, Factory, json_schema, regex
from qkv.text import ByteTokenizer, Tokenizer, gguf
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer

from .vocabularies import TURN, text_of, tokenizer

FOR_JSON = ["bytes", "bpe", "sentencepiece"]


def babble(make: Factory, rng: np.random.Generator, longest: int = 400) -> tuple[list[int], Constraint]:
    """Tokens of a model that likes any token as much as any other."""
    constraint, tokens = make(), []
    while not constraint.finished and len(tokens) < longest:
        tokens.append(int(rng.choice(np.flatnonzero(constraint.allowed()))))
        constraint.advance(tokens[-1])
    return tokens, constraint


def language(make: Factory, tokenizer: Tokenizer, continues: bool = True) -> set[str]:
    """Every text that the masks let come to an end."""

    def walk(constraint: Constraint, tokens: list[int]) -> Iterator[str]:
        if constraint.complete:
            yield text_of(tokenizer, tokens, continues)
        if constraint.finished:
            return
        try:
            allowed = constraint.allowed()
        except GenerationError:  # the vocabulary has no token for what must follow
            return
        for token in np.flatnonzero(allowed).tolist():
            further = constraint.fork()
            further.advance(token)
            yield from walk(further, [*tokens, token])

    return set(walk(make(), []))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", "青い", "😀"]}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "flat": {"type": ["integer", "null"]}},
            "required": ["zip"],
            "additionalProperties": False,
        },
        "not": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "integer", "multipleOf": 7}, "down": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
EVENT = {
    "oneOf": [
        {"type": "object", "properties": {"is": {"const": "a"}, "x": {"type": "number", "exclusiveMinimum": 0.5}},
         "required": ["is", "x"], "additionalProperties": False},
        {"type": "object", "properties": {"is": {"const": "b"}, "on": {"type": "string", "format": "date"}},
         "required": ["is", "on"], "additionalProperties": False},
    ],
}  # fmt: skip
OTHERS = [
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": {"type": "integer"},
     "minItems": 1, "maxItems": 4},
    {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]},
    {"type": "object", "patternProperties": {"^[ab]$": {"type": "integer"}}, "additionalProperties": False,
     "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"enum": [1, "é", None]}, "maxProperties": 2},
    {"anyOf": [{"type": "integer", "maximum": -5}, {"type": "string", "pattern": "x.?$", "maxLength": 3}]},
    {"const": {"é": [1.5, "a\"b\n", True]}},
    {"minimum": 3, "maxLength": 2, "maxItems": 1, "maxProperties": 1},
]  # fmt: skip


@pytest.mark.parametrize("schema", [PERSON, TREE, EVENT, *OTHERS], ids=lambda schema: "-".join(schema)[:30])
@pytest.mark.parametrize("name", FOR_JSON)
def test_random_logits_always_give_a_valid_value(name: str, schema: dict[str, Any]) -> None:
    tokens_of, validator = tokenizer(name), Draft202012Validator(schema)
    make, valid = json_schema(schema, tokens_of), 0
    for seed in range(12):
        tokens, constraint = babble(make, np.random.default_rng(seed))
        if constraint.complete:
            validator.validate(json.loads(text_of(tokens_of, tokens)))
            valid += 1
    assert valid >= 6


@pytest.mark.parametrize("name", FOR_JSON)
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 5}, "12345"),
        ({"type": "integer", "exclusiveMinimum": 8, "maximum": 11}, ["9", "10", "11"]),
        ({"type": "integer", "multipleOf": 4, "minimum": -5, "maximum": 8}, ["-4", "-0", "0", "4", "8"]),
        ({"enum": ["é", "😀😀", None, 7]}, ['"é"', '"😀😀"', "null", "7"]),
        ({"type": "string", "pattern": "^[a😀]*$", "minLength": 1, "maxLength": 2},
         ['"a"', '"😀"', '"aa"', '"a😀"', '"😀a"', '"😀😀"']),
        ({"type": "boolean"}, ["true", "false"]),
        ({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,1]"]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 3}, ["3"]),
    ],
)  # fmt: skip
def test_b135_exactly_the_values_of_the_schema(name: str, schema: dict[str, Any], values: list[str]) -> None:
    found = language(json_schema(schema, tokenizer(name)), tokenizer(name))
    assert {text.replace(" ", "") for text in found} == set(values)
    assert any(text.startswith(" ") for text in found)
    assert not any("  " in text for text in found)


@pytest.mark.data
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "qwen2", "deepseek-coder"])
def test_published_vocabularies(data: Path, name: str) -> None:
    tokens_of = gguf.from_metadata(File(data / "tokenizers" / f"ggml-vocab-{name}.gguf").metadata)
    make, valid = json_schema(PERSON, tokens_of), 0
    for seed in range(5):
        tokens, constraint = babble(make, np.random.default_rng(seed))
        if constraint.complete:  # a number may still be growing
            Draft202012Validator(PERSON).validate(json.loads(text_of(tokens_of, tokens)))
            valid += 1
    assert valid >= 3


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "keyword 'not' is not supported"),
    ({"type": "array", "uniqueItems": True}, "keyword 'uniqueItems'"),
    ({"type": "array", "contains": {"type": "null"}}, "keyword 'contains'"),
    ({"if": {}, "then": {}}, "keyword 'if'"),
    ({"dependentRequired": {"a": ["b"]}}, "keyword 'dependentRequired'"),
    ({"propertyNames": {"maxLength": 3}}, "keyword 'propertyNames'"),
    ({"type": "object", "unevaluatedProperties": False}, "keyword 'unevaluatedProperties'"),
    ({"$dynamicRef": "#x"}, "keyword '\\$dynamicRef'"),
    ({"type": "string", "minLenght": 3}, "keyword 'minLenght'"),
    ({"type": "string", "nullable": True}, "keyword 'nullable'"),
    ({"type": "string", "x-guidance": {"lenient": True}}, "keyword 'x-guidance'"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "at properties.a.items: keyword 'not'"),
    ({"anyOf": [{"type": "null"}, {"const": 1, "else": {}}]}, "at anyOf.1: keyword 'else'"),
    ({"$defs": {"a": {"minContains": 1}}, "$ref": "#/$defs/a"}, "at .defs.a: keyword 'minContains'"),
    ({"items": [{"type": "string"}]}, "at items: must be an object or a boolean"),
    ({"type": "object", "minProperties": 2}, "keyword 'minProperties' is not supported above 1"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties only supported when all"),
    ({"type": "string", "format": "lattice"}, "Unknown format: lattice"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is supported where no value"),
    ({"$ref": "https://example.org/schema"}, "'https://example.org/schema' is not present"),
    ({"$ref": "#/$defs/a"}, "Pointer '/.defs/a' does not exist"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around, .* is not supported"),
    ({"type": "text"}, "Invalid type: text"),
    ({"type": "string", "minLength": "3"}, "'minLength'"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
    ({"const": float("nan")}, "is no JSON"),
]


@pytest.mark.parametrize(("schema", "told"), UNSUPPORTED, ids=[told for _, told in UNSUPPORTED])
def test_b134_what_cannot_be_enforced_is_refused_by_name(schema: dict[str, Any], told: str) -> None:
    with pytest.raises(GenerationError, match=f"^JSON schema[^\n]*{told}[^\n]*$"):
        json_schema(schema, ByteTokenizer())


def test_schemas_that_are_no_objects() -> None:
    tokens, constraint = babble(json_schema(True, ByteTokenizer()), np.random.default_rng(2), 4000)
    assert constraint.complete
    json.loads(bytes(tokens))
    with pytest.raises(GenerationError, match="JSON schema: Unsatisfiable"):
        json_schema(False, ByteTokenizer())


def test_names_and_values_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"enum": [{"if": 1}]}, "uniqueItems": {"const": {"contains": 2}, "default": {"not": 3}}},
        "required": ["not", "uniqueItems"],
        "additionalProperties": False,
        "examples": [{"propertyNames": 4}],
    }
    tokens, _ = babble(json_schema(schema, ByteTokenizer()), np.random.default_rng(0))
    assert json.loads(bytes(tokens)) == {"not": {"if": 1}, "uniqueItems": {"contains": 2}}


def test_properties_keep_the_order_of_the_schema() -> None:
    make = json_schema(PERSON, ByteTokenizer())
    values = [json.loads(bytes(babble(make, np.random.default_rng(seed))[0])) for seed in range(8)]
    names = list(PERSON["properties"])
    assert all(list(value) == [name for name in names if name in value] for value in values)
    assert len({len(value) for value in values}) == 2


@pytest.mark.parametrize("name", FOR_JSON)
@pytest.mark.parametrize(
    "pattern",
    ["[0-9]{3}-[0-9]{4}", "(foo|bär|😀){1,3}!?", "a*", "(?i)yes|no", "^x/y\\\\z$",
     "[^a-z\n]{2}", ".{0,4}", "a\nb?", ""],
)  # fmt: skip
def test_a_regular_expression_matches_the_whole_text(name: str, pattern: str) -> None:
    make, whole = regex(pattern, tokenizer(name)), 0
    for seed in range(8):
        tokens, constraint = babble(make, np.random.default_rng(seed), 60)
        matches = re.fullmatch(pattern, text_of(tokenizer(name), tokens))
        assert (matches is not None) == constraint.complete
        whole += constraint.complete
    assert whole == 8


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", r"a\b", "[", "a^b"])
def test_a_pattern_beyond_the_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(GenerationError, match=r"^regular expression: [^\n]*$"):
        regex(pattern, ByteTokenizer())


WORDS = "( ?(ab|a|é)){1,2}"


@pytest.mark.parametrize("continues", [True, False])
@pytest.mark.parametrize("name", ["wordpiece", "word ends"])
def test_spaces_that_depend_on_the_neighbours_are_seen(name: str, continues: bool) -> None:
    tokens_of = tokenizer(name)
    assert isinstance(tokens_of, PieceTokenizer)
    plain = [token for token in range(tokens_of.vocab_size) if token not in tokens_of.specials.controls.values()]
    expected, sequences = set(), [[token] for token in plain]
    for _ in range(4):
        texts = [tokens_of.decode(sequence, continues=continues) for sequence in sequences]
        expected |= {text for text in texts if re.fullmatch(WORDS, text)}
        fitting = [sequence for sequence, text in zip(sequences, texts, strict=True) if text.strip(" abé") == ""]
        sequences = [[*sequence, token] for sequence in fitting for token in plain]
    found = language(regex(WORDS, tokens_of, continues=continues), tokens_of, continues)
    assert found == expected
    assert len(found) > 10


@pytest.mark.parametrize("name", ["bytes", "bpe", "sentencepiece", "unigram"])
@pytest.mark.parametrize("continues", [True, False])
def test_where_every_text_can_be_written_none_is_lost(name: str, continues: bool) -> None:
    words = ["ab", "a", "é"]
    ones = {space + word for space in ("", " ") for word in words}
    found = language(regex(WORDS, tokenizer(name), continues=continues), tokenizer(name), continues)
    expected = {one + two for one in ones for two in ones} | ones
    if name == "unigram":  # without bytes it has no é, and no space that stays in front of a text
        expected = {text for text in expected if "é" not in text and (continues or not text.startswith(" "))}
    assert found == expected


def test_the_mask_is_exact() -> None:
    tokens_of = tokenizer("bpe")
    assert isinstance(tokens_of, LibraryTokenizer)
    texts = [text.encode() for text in ('{"name": "é😀"}', '{"name": "ages"}', '{"n', "[1, 22]", "null")]
    make = regex("|".join(re.escape(text.decode()) for text in texts), tokens_of)
    spelt = [b"".join(tokens_of.rule([tokens_of.piece(token)], True)) for token in range(tokens_of.vocab_size)]
    controls = set(tokens_of.specials.controls.values())
    for seed in range(10):
        rng, constraint, text = np.random.default_rng(seed), make(), b""
        while not constraint.finished:
            expected = [
                any(whole.startswith(text + spelt[token]) for whole in texts) and token not in controls
                for token in range(tokens_of.vocab_size)
            ]
            for end in tokens_of.specials.ends:
                expected[end] = text in texts
            assert constraint.allowed().tolist() == expected
            token = int(rng.choice(np.flatnonzero(constraint.allowed())))
            constraint.advance(token)
            text += b"" if token in controls else spelt[token]
        assert text in texts


def test_control_tokens_are_never_text_and_ends_only_end_what_is_whole() -> None:
    tokens_of = tokenizer("bpe")
    assert isinstance(tokens_of, PieceTokenizer)
    end, turn = (tokens_of.specials.controls[text] for text in ("<|endoftext|>", TURN))
    assert tokens_of.specials.ends == {end}
    make = json_schema({"type": "string", "maxLength": 30}, tokens_of)
    for seed in range(5):
        rng, constraint = np.random.default_rng(seed), make()
        while not constraint.finished:
            allowed = constraint.allowed()
            assert not allowed[turn]
            assert allowed[end] == constraint.complete
            constraint.advance(int(rng.choice(np.flatnonzero(allowed))))
    both = json_schema({"const": 1}, tokens_of, ends=frozenset({end, turn}))()
    both.advance(tokens_of.encode("1")[0])
    assert np.flatnonzero(both.allowed()).tolist() == sorted({end, turn})


def test_text_that_spells_a_control_token_is_text() -> None:
    tokens_of = tokenizer("bpe")
    constraint = json_schema({"const": TURN}, tokens_of)()
    for token in tokens_of.encode(json.dumps(TURN)):
        assert constraint.allowed()[token]
        constraint.advance(token)
    assert constraint.finished


def test_an_end_closes_a_text_that_could_go_on() -> None:
    constraint = regex("a+", ByteTokenizer(), ends=frozenset({10}))()
    assert not constraint.complete
    assert np.flatnonzero(constraint.allowed()).tolist() == [97]
    constraint.advance(97)
    assert (constraint.complete, constraint.finished) == (True, False)
    assert np.flatnonzero(constraint.allowed()).tolist() == [10, 97]
    constraint.advance(10)
    assert (constraint.complete, constraint.finished) == (True, True)
    assert not constraint.allowed().any()
    with pytest.raises(GenerationError, match=r"token 97 .* may not follow 'a'"):
        constraint.advance(97)


def test_a_token_that_ends_texts_is_none_inside_them() -> None:
    constraint = regex("(a\n)+", ByteTokenizer(), ends=frozenset({10}))()
    constraint.advance(97)
    with pytest.raises(GenerationError, match="no token of the vocabulary can follow 'a'"):
        constraint.allowed()


def test_finished_without_an_end() -> None:
    constraint = regex("ab", ByteTokenizer())()
    for byte in b"ab":
        assert not constraint.finished
        constraint.advance(byte)
    assert constraint.finished
    assert not constraint.allowed().any()
    empty = regex("", ByteTokenizer())()
    assert (empty.complete, empty.finished) == (True, True)


@pytest.mark.parametrize("token", [98, 10, 255, 256, -1])
def test_a_forbidden_token_is_refused_and_changes_nothing(token: int) -> None:
    constraint = regex("[ac]d", ByteTokenizer(), ends=frozenset({10}))()
    with pytest.raises(GenerationError, match=f"constraint: token {token} .* may not follow ''"):
        constraint.advance(token)
    for byte in b"cd":
        constraint.advance(byte)
    assert constraint.finished


@pytest.mark.parametrize("name", ["bpe", "wordpiece", "word ends"])
def test_forks_and_texts_of_one_factory_are_independent(name: str) -> None:
    make = regex(" ?(ab)+", tokenizer(name))

    def after(constraint: Constraint, text: str) -> list[int]:
        allowed = np.flatnonzero(constraint.allowed()).tolist()
        constraint.advance(next(token for token in allowed if text_of(tokenizer(name), [token]).strip() == text))
        return np.flatnonzero(constraint.allowed()).tolist()

    one = make()
    fresh = np.flatnonzero(one.allowed()).tolist()
    fork = one.fork()
    begun = after(fork, "a")
    assert begun != fresh
    assert np.flatnonzero(one.allowed()).tolist() == fresh
    whole = after(one, "ab")
    assert whole != begun
    assert np.flatnonzero(fork.allowed()).tolist() == begun
    assert np.flatnonzero(make().allowed()).tolist() == fresh
    assert after(make(), "a") == begun


def test_a_model_may_have_more_rows_than_the_tokenizer_tokens() -> None:
    constraint = regex("[a-z]+", ByteTokenizer(), vocab_size=300, ends=frozenset({299}))()
    constraint.advance(100)
    assert constraint.allowed().shape == (300,)
    assert np.flatnonzero(constraint.allowed()).tolist() == [*range(97, 123), 299]
    with pytest.raises(GenerationError, match="vocab_size: 200, but the tokenizer has 256 tokens"):
        regex("a", ByteTokenizer(), vocab_size=200)
    with pytest.raises(GenerationError, match="ends: token 256 is outside the vocabulary of 256 tokens"):
        regex("a", ByteTokenizer(), ends=frozenset({256}))


def test_a_text_that_the_vocabulary_cannot_write_is_an_error() -> None:
    with pytest.raises(GenerationError, match="no token of the vocabulary can follow ''"):
        regex("z", tokenizer("wordpiece"))().allowed()


def test_a_grammar_too_large_for_the_library_is_an_error_and_no_end() -> None:
    one = {"type": "array", "minItems": 2, "items": False}
    schema = {"anyOf": [{**one, "prefixItems": [{"type": "integer"}, {"const": number}]} for number in range(2500)]}
    with pytest.raises(GenerationError, match=r"^JSON schema: Parser Error: .* items[^\n]*$"):
        babble(json_schema(schema, ByteTokenizer(), ends=frozenset({10})), np.random.default_rng(0))


def test_other_tokenizers_are_refused() -> None:
    class Letters:
        vocab_size = 3

    with pytest.raises(GenerationError, match="cannot tell the bytes of the tokens of Letters"):
        regex("a", cast(Any, Letters()))


def test_the_library_is_loaded_when_it_is_needed() -> None:
    code = (
        "import sys, qkv.generate.constrain; print([name for name in ('llguidance', 'torch') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
