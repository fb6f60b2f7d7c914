"""Small vocabularies of every kind, made on the spot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from qkv.text import ByteTokenizer, Tokenizer, language_reference, model_file
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer, Specials
from qkv.text.spec import added_token, bert, bpe
from qkv.text.training import train_bpe

TURN = "<|im_end|>"
LETTERS = ["a", "b", "c", "é", "😀"]


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        texts = [language_reference()[:20_000], *['{"name": "é😀", "ab": [1, 22], "é": null}'] * 300]
        return train_bpe(texts, 500, controls=("<|endoftext|>", TURN))
    if name in ("sentencepiece", "unigram"):
        file = {"sentencepiece": "bpe"}.get(name, name)
        return model_file.read(Path(__file__).parents[1] / "text" / "sentencepiece" / f"{file}.model")
    if name == "wordpiece":
        roles = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
        pieces = [*LETTERS, *(f"##{letter}" for letter in LETTERS), "ab", "##ab", ",", "."]
        vocab = roles | {piece: at for at, piece in enumerate(pieces, start=len(roles))}
        ends = frozenset({2})
        spec = bert("test", vocab, roles, lowercase=False, strip_accents=False)
        return LibraryTokenizer(spec, Specials(roles, unk=0, cls=1, sep=2, ends=ends))
    assert name == "word ends"
    pieces = ["<unk>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS), "ab", "ab</w>"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    spec = {
        "version": "1.0",
        "added_tokens": [added_token(0, "<unk>", special=True)],
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
        "model": bpe(vocab, [["a", "b"], ["a", "b</w>"]], end_of_word_suffix="</w>", unk_token="<unk>"),
    }
    return LibraryTokenizer(spec, Specials({"<unk>": 0}, unk=0))


def text_of(tokenizer: Tokenizer, tokens: list[int], continues: bool = True) -> str:
    return (
        tokenizer.decode(tokens, continues=continues)
        if isinstance(tokenizer, PieceTokenizer)
        else tokenizer.decode(tokens)
    )
