"""Tokenizers from the metadata of a GGUF file.

`tokenizer.ggml.model` says which algorithm: `gpt2` byte-level BPE with merges, whose words `tokenizer.ggml.pre` cuts;
`llama` SentencePiece's BPE by scores; `bert` WordPiece, its word starts marked with ▁ and its "##" removed; `t5`
unigram. `tokenizer.ggml.token_type` says what each piece is (`sentencepiece.Kind`).

The metadata is a plain dictionary of keys and values, however the file was read; `to_metadata` makes one.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from qkv.errors import CheckpointError
from qkv.text.decoding import SPACE
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer, Specials, looks_like_control
from qkv.text.pretokenizers import PreTokenizer, pre_tokenizer
from qkv.text.sentencepiece import Kind, Pieces, SentencePieceTokenizer
from qkv.text.spec import added_token, bert, bpe, byte_level_bpe, template

Metadata = Mapping[str, Any]

ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",  # spelt so in the format
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Vocabulary:
    """What the four algorithms read alike: pieces, their kinds, roles, and what stands around a text."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.metadata, self.where = metadata, where
        self.texts: list[str] = [str(text) for text in self.need("tokens")]
        self.kinds = [int(kind) for kind in self.get("token_type", [Kind.NORMAL] * len(self.texts))]
        self._check()
        self.roles: dict[str, Any] = {role: self._token(key) for role, key in ROLES.items()}
        self._settle_kinds()
        self._all = len(self.texts)
        self._drop_fillers()

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `tokenizer.ggml.KEY`."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def need(self, key: str) -> Any:
        """The same, where there must be one."""
        if (value := self.get(key)) is None:
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{key} is missing")
        return value

    def specials(self) -> Specials:
        """The control tokens; the text of no other token can be taken for one."""
        controls = {self.texts[t]: t for t, kind in enumerate(self.kinds) if kind in (Kind.CONTROL, Kind.UNKNOWN)}
        ends = frozenset(token for key in _ENDS if (token := self._token(key)) is not None)
        return Specials(controls, **self.roles, ends=ends, chat_template=self.metadata.get("tokenizer.chat_template"))

    def around(self, bos: bool, eos: bool) -> tuple[list[int], list[int]]:
        """The tokens before and after a text; the arguments are the algorithm's habit where the file is silent."""
        wanted = {"bos": self.get("add_bos_token", bos), "eos": self.get("add_eos_token", eos)}
        if missing := [role for role, adds in wanted.items() if adds and self.roles[role] is None]:
            raise CheckpointError(f"{self.where}: adds {missing[0]} to a text, but names no {missing[0]}_token_id")
        before, after = (
            [token for token in (self.roles[role],) if adds and token is not None] for role, adds in wanted.items()
        )
        return before, after

    def pieces(self, *, unigram: bool) -> Pieces:
        """The vocabulary as SentencePiece has it."""
        scores = [float(score) for score in self.need("scores")]
        charsmap = bytes(int(byte) % 256 for byte in self.get("precompiled_charsmap", []))
        return Pieces(
            self.texts,
            scores[: len(self.texts)] if len(scores) == self._all else scores,
            self.kinds,
            add_space=bool(self.get("add_space_prefix", True)),
            collapse_spaces=bool(self.get("remove_extra_whitespaces", False)),
            charsmap=base64.b64encode(charsmap).decode(),
            unigram=unigram,
            space_after_control=bool(self.metadata.get("tokenizer.qkv.space_after_control", True)),
            space_before_space=bool(self.metadata.get("tokenizer.qkv.space_before_space", True)),
        )

    def _token(self, key: str) -> int | None:
        if (token := self.get(key)) is None:
            return None
        if not 0 <= token < len(self.texts):
            raise CheckpointError(f"{self.where}: tokenizer.ggml.{key} is {token} of {len(self.texts)} tokens")
        return int(token)

    def _check(self) -> None:
        if len(self.kinds) != len(self.texts):
            raise CheckpointError(f"{self.where}: {len(self.texts)} tokens, but {len(self.kinds)} token types")
        first: dict[str, int] = {}
        for token, text in enumerate(self.texts):
            if first.setdefault(text, token) != token:
                raise CheckpointError(f"{self.where}: tokens {first[text]} and {token} are both {text!r}")
        if unknown := set(self.kinds) - set(Kind):
            raise CheckpointError(f"{self.where}: unknown token type {min(unknown)}")

    def _settle_kinds(self) -> None:
        """Converters call user-defined what is a control token, and what only fills the table."""
        roles = set(self.roles.values()) - {None}
        for token, kind in enumerate(self.kinds):
            text = self.texts[token]
            if kind == Kind.USER_DEFINED and text == f"[PAD{token}]":
                self.kinds[token] = Kind.UNUSED
            elif kind == Kind.USER_DEFINED and (token in roles or looks_like_control(text)):
                self.kinds[token] = Kind.CONTROL

    def _drop_fillers(self) -> None:
        """What pads the table behind the last token is none: a model must not say it."""
        while self.texts and self.kinds[-1] == Kind.UNUSED and self.texts[-1] == f"[PAD{len(self.texts) - 1}]":
            self.texts.pop()
            self.kinds.pop()


def to_metadata(tokenizer: object, rows: int | None = None) -> dict[str, Any] | None:
    """`tokenizer.*` of a GGUF file, or None where the format cannot express it (`gguf_export.metadata_of` says why).

    rows: the rows of the model's token table.
    """
    from qkv.text.gguf_export import metadata_of  # which reads again what it has made

    try:
        return metadata_of(tokenizer, rows)
    except CheckpointError:
        return None


def from_metadata(metadata: Metadata, where: str = "GGUF") -> PieceTokenizer:
    """The tokenizer that the metadata of a GGUF file describes."""
    vocabulary = Vocabulary(metadata, where)
    model = vocabulary.need("model")
    if model == "gpt2":
        return _byte_level_bpe(vocabulary)
    if model in ("llama", "t5"):
        is_t5 = model == "t5"
        around = vocabulary.around(bos=not is_t5, eos=is_t5)
        return SentencePieceTokenizer(vocabulary.pieces(unigram=is_t5), vocabulary.specials(), around, where)
    if model == "bert":
        return _word_piece(vocabulary)
    raise CheckpointError(f"{where}: unknown tokenizer model {model!r}; this qkv knows bert, gpt2, llama, t5")


def _byte_level_bpe(vocabulary: Vocabulary) -> LibraryTokenizer:
    pre = pre_tokenizer(vocabulary.need("pre"), vocabulary.where)
    specials, texts = vocabulary.specials(), vocabulary.texts
    plain = {text: token for token, text in enumerate(texts) if vocabulary.kinds[token] == Kind.USER_DEFINED}
    spec = {
        "version": "1.0",
        "added_tokens": [
            *(added_token(token, text, special=True) for text, token in specials.controls.items()),
            *(added_token(token, text, special=False) for text, token in plain.items()),
        ],
        "normalizer": {"type": "NFC"} if vocabulary.get("normalizer.nfc", False) else None,
        "pre_tokenizer": byte_level_bpe(pre.patterns),
        "post_processor": _around_bpe(vocabulary, pre, specials),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": bpe(
            {text: token for token, text in enumerate(texts)},
            vocabulary.need("merges"),
            ignore_merges=pre.ignore_merges,
        ),
    }
    return LibraryTokenizer(spec, specials, vocabulary.where)


def _around_bpe(vocabulary: Vocabulary, pre: PreTokenizer, specials: Specials) -> dict[str, Any] | None:
    before, after = vocabulary.around(bos=pre.add_bos or pre.add_sep, eos=pre.add_sep)
    first, last = ([vocabulary.texts[token] for token in side] for side in (before, after))
    return template((first, last), specials.controls, between=last if pre.add_sep else ())


def _word_piece(vocabulary: Vocabulary) -> LibraryTokenizer:
    specials = vocabulary.specials()
    vocab = {_as_bert(text, text in specials.controls): token for token, text in enumerate(vocabulary.texts)}
    if len(vocab) != len(vocabulary.texts):
        raise CheckpointError(f"{vocabulary.where}: two tokens are the same WordPiece")
    lowercase = bool(vocabulary.get("normalizer.lowercase", True))
    accents = vocabulary.get("normalizer.strip_accents")
    return LibraryTokenizer(
        bert(vocabulary.where, vocab, specials.controls, lowercase=lowercase, strip_accents=accents),
        specials,
        vocabulary.where,
    )


def _as_bert(text: str, control: bool) -> str:
    if control or is_bracketed(text):
        return text
    return text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"


def is_bracketed(text: str) -> bool:
    """Whether a token of BERT stands for itself: [unused7]."""
    return len(text) > 1 and text.startswith("[") and text.endswith("]")
