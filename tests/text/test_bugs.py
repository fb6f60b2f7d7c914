"""Bugs that users of other implementations reported, row by row: B84 to B96."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors

from qkv.errors import CheckpointError
from qkv.text import gguf
from qkv.text.decoding import SPACE
from qkv.text.folder import Settings, finish, read_folder
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer

from .files import gguf_metadata, sentencepiece, trained_bpe

BPE = sentencepiece("bpe")


def vocabulary(data: Path, name: str) -> PieceTokenizer:
    path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    return gguf.from_metadata(gguf_metadata(path), path.name)


def bytes_of(tokens: list[int]) -> list[str | bytes | None]:
    return [BPE.piece(token) for token in tokens]


def test_b84_whitespace_without_a_piece_becomes_byte_tokens() -> None:
    assert bytes_of(BPE.encode("\n\t\n", add_special=False)) == [SPACE, b"\n", b"\t", b"\n"]
    assert BPE.decode(BPE.encode("\n\t\n")) == "\n\t\n"


@pytest.mark.data
def test_b84_in_the_vocabulary_of_llama_2(data: Path) -> None:
    assert vocabulary(data, "llama-spm").encode("\n\t\n", add_special=False) == [29871, 13, 12, 13]


@pytest.mark.parametrize("text", [" hello", "hello", "  hello", "hello ", " ", ""])
def test_b85_a_leading_space_survives(text: str) -> None:
    tokens = BPE.encode(text)
    assert BPE.decode(tokens) == text
    # The tokens of an answer follow a prompt: nothing in front of them was put there by encoding.
    assert BPE.decode(BPE.encode(text, add_special=False), continues=True) == (f" {text}" if text else "")


def test_b85_no_spaces_appear_around_control_tokens() -> None:
    tokens = BPE.encode("<s>hello</s> x", add_special=False, parse_special=True)
    assert BPE.decode(tokens, keep_special=True) == "<s>hello</s> x"
    assert BPE.decode(tokens) == "hello x"


def test_b87_no_space_is_put_before_a_text_whose_file_says_so(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", SPACE, "Hello", f"{SPACE}Hello", *"Helo"],
        "tokenizer.ggml.scores": [0.0, -9.0, -3.0, -4.0, -9.0, -9.0, -9.0, -9.0],
        "tokenizer.ggml.token_type": [2] + [1] * 7,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    # One more piece leads from the letters to the whole.
    for text, score in (("He", -5.0), ("Hel", -4.8), ("Hell", -4.6)):
        metadata["tokenizer.ggml.tokens"] += [text]
        metadata["tokenizer.ggml.scores"] += [score]
        metadata["tokenizer.ggml.token_type"] += [1]
    pieces = {}
    for add in (True, False):
        tokenizer = gguf.from_metadata({**metadata, "tokenizer.ggml.add_space_prefix": add})
        pieces[add] = [tokenizer.piece(token) for token in tokenizer.encode("Hello")]
        assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert pieces == {True: [f"{SPACE}Hello"], False: ["Hello"]}


@pytest.mark.parametrize(("add", "first"), [(True, "Ġ"), (False, "H")])
def test_b87_in_the_files_of_gpt_2(tmp_path: Path, add: bool, first: str) -> None:
    trained_bpe(["<|endoftext|>"]).model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": add}), encoding="utf-8")
    tokenizer = read_folder(tmp_path)
    piece = tokenizer.piece(tokenizer.encode("Hello")[0])
    assert isinstance(piece, str)
    assert piece[0] == first


def test_b89_a_newline_is_a_byte_and_the_name_of_a_byte_is_text() -> None:
    assert bytes_of(BPE.encode("\n", add_special=False)) == [SPACE, b"\n"]
    tokens = BPE.encode("<0x40>", add_special=False)
    assert BPE.specials.unk not in tokens
    assert BPE.decode(tokens) == "<0x40>"
    assert b"@" not in bytes_of(tokens)


@pytest.mark.data
def test_b89_in_the_vocabulary_of_llama_2(data: Path) -> None:
    tokenizer = vocabulary(data, "llama-spm")
    assert tokenizer.encode("\n", add_special=False) == [29871, 13]
    tokens = tokenizer.encode("<0x40>", add_special=False)
    assert 3 + 0x40 not in tokens
    assert tokenizer.decode(tokens) == "<0x40>"


@pytest.mark.parametrize("unk", [8, -1, 2**32 - 1])
def test_b89_an_unknown_token_out_of_range_is_refused(unk: int) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list("abcdefgh"),
        "tokenizer.ggml.scores": [0.0] * 8,
        "tokenizer.ggml.unknown_token_id": unk,
    }
    with pytest.raises(CheckpointError, match=f"unknown_token_id is {unk} of 8 tokens"):
        gguf.from_metadata(metadata)


# B94: WordPiece, against the reference algorithm of the BERT repository, written here from its description.


def reference_word_piece(text: str, vocab: dict[str, int], lowercase: bool) -> list[str]:
    spaced = ""
    for character in text:
        kind = unicodedata.category(character)
        if character in " \t\n\r" or kind == "Zs":
            spaced += " "
        elif ord(character) not in (0, 0xFFFD) and not kind.startswith("C"):
            spaced += f" {character} " if _is_chinese(character) else character
    pieces = []
    for word in spaced.split():
        if lowercase:
            word = "".join(c for c in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(c) != "Mn")
        split = "".join(f" {c} " if _is_punctuation(c) else c for c in word).split()
        pieces += [piece for part in split for piece in _longest_first(part, vocab)]
    return pieces


def _longest_first(word: str, vocab: dict[str, int]) -> list[str]:
    if len(word) > 100:
        return ["[UNK]"]
    found, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        fitting = [end for end in range(len(word), start, -1) if prefix + word[start:end] in vocab]
        if not fitting:
            return ["[UNK]"]
        found.append(prefix + word[start : fitting[0]])
        start = fitting[0]
    return found


def _is_punctuation(character: str) -> bool:
    ascii_ones = character.isascii() and character.isprintable() and not character.isalnum() and character != " "
    return ascii_ones or unicodedata.category(character).startswith("P")


def _is_chinese(character: str) -> bool:
    ranges = [
        (0x4E00, 0x9FFF),
        (0x3400, 0x4DBF),
        (0x20000, 0x2A6DF),
        (0x2A700, 0x2CEAF),
        (0xF900, 0xFAFF),
        (0x2F800, 0x2FA1F),
    ]
    return any(low <= ord(character) <= high for low, high in ranges)


WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cretaceous", "pale", "##og", "##ene", "–", "-", "ze", "że", "wysoka",
    "wysok", "##ą", "##a", "的", "人", "有", "a", "##aa", "Cretaceous", "'", "e", "##e",
]  # fmt: skip
VOCAB = {word: token for token, word in enumerate(WORDS)}


def bert(folder: Path, **config: Any) -> PieceTokenizer:
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_folder(folder)


@pytest.mark.parametrize(
    ("text", "lower", "cased"),
    [
        ("Cretaceous–Paleogene", "cretaceous – pale ##og ##ene", "Cretaceous – [UNK]"),
        ("że wysoką", "ze wysoka", "że wysok ##ą"),
        ("的人有", "的 人 有", "的 人 有"),
        ("a" * 101, "[UNK]", "[UNK]"),
        ("a" * 99, "a " + "##aa " * 49, "a " + "##aa " * 49),
        ("ax", "[UNK]", "[UNK]"),
        ("a\u00a0\u200b-\ta", "a - a", "a - a"),
    ],
)
def test_b94_word_pieces_are_those_of_the_reference(tmp_path: Path, text: str, lower: str, cased: str) -> None:
    for lowercase, expected in ((True, lower), (False, cased)):
        tokenizer = bert(tmp_path, do_lower_case=lowercase)
        tokens = tokenizer.encode(text, add_special=False)
        assert [WORDS[token] for token in tokens] == expected.split()
        assert reference_word_piece(text, VOCAB, lowercase) == expected.split()


@given(text=st.text(st.sampled_from("aeżą的人–-' \t\u00a0\u200béÉA\u0301xź"), max_size=30), lowercase=st.booleans())
def test_b94_on_any_text(tmp_path_factory: pytest.TempPathFactory, text: str, lowercase: bool) -> None:
    tokenizer = bert(tmp_path_factory.mktemp("bert"), do_lower_case=lowercase)
    found = [WORDS[token] for token in tokenizer.encode(text, add_special=False)]
    assert found == reference_word_piece(text, VOCAB, lowercase)


def test_b95_the_mask_of_roberta_takes_the_space_before_it() -> None:
    library = trained_bpe(["<s>", "<pad>", "</s>", "<unk>"])
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    library.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    tokenizer = finish(
        json.loads(library.to_str()), Settings({"mask_token": "<mask>"}, {}, frozenset(), None), "roberta"
    )
    mask = tokenizer.specials.mask
    assert tokenizer.encode("a <mask>", parse_special=True) == [
        0,
        *library.encode("a", add_special_tokens=False).ids,
        mask,
        2,
    ]
    assert tokenizer.encode("a <mask>", parse_special=True) == library.encode("a <mask>").ids
    assert mask not in tokenizer.encode("a <mask>")


def test_b95_in_the_files_of_roberta(tmp_path: Path) -> None:
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained_bpe(names).model.save(str(tmp_path))
    roles = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles), encoding="utf-8")
    tokenizer = read_folder(tmp_path)
    a = tokenizer.encode("a", add_special=False)
    assert tokenizer.encode("a <mask>", parse_special=True) == [0, *a, 4, 2]
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.encode_pair("a", "a") == ([0, *a, 2, 2, *a, 2], [0] * (4 + 2 * len(a)))


def test_b96_the_second_text_of_a_pair_is_segment_1(tmp_path: Path) -> None:
    tokenizer = bert(tmp_path)
    assert isinstance(tokenizer, LibraryTokenizer)
    tokens, segments = tokenizer.encode_pair("a e", "的人")
    assert [WORDS[token] for token in tokens] == ["[CLS]", "a", "e", "[SEP]", "的", "人", "[SEP]"]
    assert segments == [0, 0, 0, 0, 1, 1, 1]
    # What a text says between brackets is text in a pair too.
    assert tokenizer.encode_pair("[SEP]", "a")[0].count(VOCAB["[SEP]"]) == 2


@pytest.mark.data
def test_b96_in_the_vocabulary_of_bert(data: Path) -> None:
    tokenizer = vocabulary(data, "bert-bge")
    assert isinstance(tokenizer, LibraryTokenizer)
    tokens, segments = tokenizer.encode_pair("Hello world", "Hello")
    assert tokens == [101, 7592, 2088, 102, 7592, 102]
    assert segments == [0, 0, 0, 0, 1, 1]
