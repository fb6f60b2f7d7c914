"""What objectives learn of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qkv.checkpoint.gguf_file import File
from qkv.text import ByteTokenizer, gguf
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import Specials
from qkv.text.spec import bert
from qkv.train.vocabulary import Frame, Vocabulary


def word_pieces() -> LibraryTokenizer:
    vocab = {
        text: at for at, text in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "a", "##a"])
    }
    roles = {text: at for text, at in vocab.items() if text.startswith("[")}
    spec = bert("here", vocab, roles, lowercase=True, strip_accents=None)
    return LibraryTokenizer(spec, Specials(roles, unk=1, pad=0, sep=3, cls=2, mask=4))


def test_a_tokenizer_says_what_objectives_need() -> None:
    vocabulary = Vocabulary.of(word_pieces())
    assert vocabulary.frame == Frame((2,), (3,), (3,))
    assert vocabulary.ordinary.tolist() == [5, 6, 7, 8]
    assert vocabulary.pad == 0
    assert vocabulary.words(np.array([5, 6, 7, 3, 6, 5])).tolist() == [0, 0, 1, 2, 3, 4]


def test_roberta_has_two_separators_between_texts() -> None:
    spec = json.loads(json.dumps(word_pieces().to_dict()["json"]))
    post = spec["post_processor"]
    post["pair"].insert(3, post["pair"][2])
    assert Vocabulary.of(LibraryTokenizer(spec, word_pieces().specials)).frame == Frame((2,), (3, 3), (3,))


def test_bytes_have_neither_frame_nor_special_tokens() -> None:
    vocabulary = Vocabulary.of(ByteTokenizer())
    assert vocabulary.frame == Frame()
    assert len(vocabulary.ordinary) == 256
    assert not len(vocabulary.sentinels)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert-bge", "the unbelievable play|##thing|##s , uber|##ras|##chen|##d !"),
        ("gpt-2", "The Ġunbelievable Ġplay|things|, ĠÃ|¼|ber|ras|che|nd|!"),
        ("llama-spm", "▁The ▁un|bel|iev|able ▁play|th|ings|, ▁über|ras|ch|end|!"),
    ],
)
def test_words_of_published_vocabularies(name: str, words: str, data: Path) -> None:
    path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    tokenizer = gguf.from_metadata(File(path).metadata, path.name)
    tokens = np.array(tokenizer.encode("The unbelievable playthings, überraschend!", add_special=False))
    numbers = Vocabulary.of(tokenizer).words(tokens)
    pieces = [str(tokenizer.piece(int(token))) for token in tokens]
    found = ["|".join(p for p, n in zip(pieces, numbers, strict=True) if n == word) for word in range(numbers[-1] + 1)]
    assert " ".join(found) == words


def test_controls_are_no_text() -> None:
    vocabulary = Vocabulary(6, Specials({"<a>": 4}, bos=0, ends=frozenset({5})))
    assert vocabulary.ordinary.tolist() == [1, 2, 3]
