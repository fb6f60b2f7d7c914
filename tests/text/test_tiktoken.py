"""Files of tiktoken: the ids of the rule that defines them, and what is refused."""

from __future__ import annotations

import base64
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from qkv.errors import CheckpointError
from qkv.text import tiktoken
from qkv.text.decoding import byte_alphabet
from qkv.text.folder import read_folder
from qkv.text.pretokenizers import PRE_TOKENIZERS

from .files import SENTENCEPIECE, trained_bpe


def tokens_of_a_trained_vocabulary() -> list[bytes]:
    vocab, alphabet = trained_bpe([]).get_vocab(), byte_alphabet()
    return [bytes(alphabet[letter] for letter in text) for text in sorted(vocab, key=lambda one: vocab[one])]


TOKENS = tokens_of_a_trained_vocabulary()
RANKS = {token: rank for rank, token in enumerate(TOKENS)}


def write(path: Path, tokens: list[bytes]) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


def joined(word: bytes) -> list[int]:
    """Join the neighbours whose joint bytes have the lowest rank, until none have one."""
    parts = [bytes([byte]) for byte in word]
    while pairs := [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]:
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [RANKS[part] for part in parts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tiktoken.LibraryTokenizer:
    path = write(tmp_path_factory.mktemp("tiktoken") / "a.tiktoken", TOKENS)
    return tiktoken.read(path, "llama-bpe", ["<|begin|>", "<|end|>"])


@given(st.text("the else object statement\n'Sé的 ", max_size=40))
def test_ids_are_those_of_joining_by_rank(tokenizer: tiktoken.LibraryTokenizer, text: str) -> None:
    (pattern,) = PRE_TOKENIZERS["llama-bpe"].patterns
    words = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str(text)
    assert tokenizer.encode(text) == [token for word, _ in words for token in joined(word.encode())]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_follow_the_ranks(tokenizer: tiktoken.LibraryTokenizer) -> None:
    assert tokenizer.vocab_size == len(TOKENS) + 2
    assert tokenizer.encode("<|end|>", parse_special=True) == [len(TOKENS) + 1]
    assert len(tokenizer.encode("<|end|>")) > 1


def test_a_word_that_is_a_token_is_that_token(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tiktoken", [*TOKENS, b"qzqzq"])
    assert tiktoken.read(path, "gpt-2").encode("qzqzq") == [len(TOKENS)]
    assert len(joined(b"qzqzq")) == 5


def test_tokenizer_model_of_llama_3(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer.model", TOKENS)
    tokenizer = read_folder(tmp_path)
    size, controls = len(TOKENS), tokenizer.specials.controls
    assert tokenizer.vocab_size == size + 256
    # With 128,000 ranks these are 128000, 128001, 128009 and 128255.
    assert tokenizer.encode("") == [size] == [controls["<|begin_of_text|>"]]
    assert tokenizer.specials.eos == controls["<|end_of_text|>"] == size + 1
    assert controls["<|eot_id|>"] == size + 9
    assert controls["<|reserved_special_token_246|>"] == size + 255
    assert tokenizer.specials.ends == {size + 1, size + 8, size + 9}
    assert not tiktoken.is_tiktoken(SENTENCEPIECE / "bpe.model")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("IQ==\n", "line 1 is not a token"),
        ("IQ== 0\n!? 1\n", "line 2 is not a token"),
        ("IQ== 0\nIg== 2\n", "the ranks are not 0 to 1"),
        ("IQ== 0\nIg== 1\n", "254 of 256 bytes have no rank"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "b.tiktoken").write_text(content, encoding="ascii")
    with pytest.raises(CheckpointError, match=f"b.tiktoken: {problem}"):
        tiktoken.read(tmp_path / "b.tiktoken", "gpt-2")
    with pytest.raises(CheckpointError, match=r"none: cannot be read"):
        tiktoken.read(tmp_path / "none", "gpt-2")
