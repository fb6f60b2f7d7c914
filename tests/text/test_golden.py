"""Published vocabularies give the ids that their own tokenizers gave."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from qkv.text import gguf, llama2c
from qkv.text.pieces import PieceTokenizer

from .files import gguf_metadata

pytestmark = pytest.mark.data

NAMES = ("bert-bge", "deepseek-coder", "gpt-2", "llama-spm", "qwen2")
Load = Callable[[str], PieceTokenizer]


@pytest.fixture(scope="module")
def load(data: Path) -> Load:
    @lru_cache
    def loaded(name: str) -> PieceTokenizer:
        path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
        return gguf.from_metadata(gguf_metadata(path), path.name)

    return loaded


def golden(data: Path, name: str) -> list[tuple[str, list[int]]]:
    path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_exactly_those_of_the_file(data: Path, load: Load, name: str) -> None:
    cases = golden(data, name)
    assert len(cases) > 40
    assert {text: load(name).encode(text, add_special=False) for text, _ in cases} == dict(cases)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"bert-bge"}))
def test_texts_come_back(data: Path, load: Load, name: str) -> None:
    for text, tokens in golden(data, name):
        assert load(name).decode(tokens) == text
        assert load(name).decode(load(name).encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_never_breaks_a_character(data: Path, load: Load, name: str) -> None:
    for _, tokens in golden(data, name):
        pieces = list(load(name).stream(tokens))
        assert "".join(pieces) == load(name).decode(tokens)
        assert all(pieces)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_control_token_is_text_unless_it_is_meant(load: Load, name: str) -> None:
    tokenizer = load(name)
    controls = set(tokenizer.specials.controls.values())
    assert len(controls) >= 1
    for text, token in tokenizer.specials.controls.items():
        for around in (text, f"a{text}b", f"{text}{text}"):
            plain = tokenizer.encode(around, add_special=False)
            assert controls.isdisjoint(set(plain) - {tokenizer.specials.unk}), around
        meant = tokenizer.encode(f"a{text}b", add_special=False, parse_special=True)
        assert meant.count(token) == 1


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("bert-bge", ([101], [102])),
        ("deepseek-coder", ([32013], [])),
        ("gpt-2", ([], [])),
        ("llama-spm", ([1], [])),
        ("qwen2", ([], [])),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(load: Load, name: str, around: tuple[list[int], list[int]]) -> None:
    tokenizer = load(name)
    bare = tokenizer.encode("Hello", add_special=False)
    assert tokenizer.encode("Hello") == [*around[0], *bare, *around[1]]
    texts = {token: text for text, token in tokenizer.specials.controls.items()}
    for token in around[0]:
        # A text that brings its own BOS does not get a second one; [CLS] is no BOS.
        again = tokenizer.encode(f"{texts[token]}Hello", parse_special=True)
        assert again.count(token) == (2 if name == "bert-bge" else 1)


def test_fillers_of_the_table_are_no_text(load: Load) -> None:
    """The file's last 290 tokens only fill the table up to 151936 rows: they are none, so that no model says one."""
    tokenizer = load("qwen2")
    assert tokenizer.vocab_size == 151646
    assert tokenizer.piece(151645) == "<|im_end|>"
    assert tokenizer.piece(151646) is None
    assert max(tokenizer.encode("[PAD151646]", parse_special=True)) < 151643


def test_llama2c_ids_are_those_of_the_reference(data: Path) -> None:
    tokenizer = llama2c.read(data / "checkpoints" / "tok512.bin")
    reference = json.loads((data / "checkpoints" / "reference.json").read_text(encoding="utf-8"))["stories260K"]
    assert tokenizer.vocab_size == reference["config"]["vocab_size"]
    assert len(reference["cases"]) > 0
    for case in reference["cases"]:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["prompt_ids"]) == case["prompt"]
        whole = tokenizer.decode(case["prompt_ids"] + case["greedy_new_ids"])
        assert whole == case["prompt"] + tokenizer.decode(case["greedy_new_ids"], continues=True)
