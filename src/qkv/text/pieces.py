"""What the tokenizers of published models share: control tokens, and text from pieces.

A control token (`<s>`, `<|im_end|>`, `[CLS]`) structures the input of a model; it is no text. Text that only looks like
one is encoded as text, so that nobody can write the end of a turn into a message; whoever means the token says so
(`parse_special=True`, or `encode_parts`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from qkv.text.decoding import RESTART, Piece, Rule, utf8

Part = tuple[str, bool]
"""A text and whether it is the name of a control token."""

_BRACKETED = re.compile(r"<([|｜]).*\1>", re.DOTALL)


def looks_like_control(text: str) -> bool:
    """Whether a token that a file calls an ordinary added one has the name of a control token: `<|User|>`.

    Files differ in what they call special; names in these brackets are written by chat templates, never by people.
    """
    return _BRACKETED.fullmatch(text) is not None


@dataclass(frozen=True)
class Specials:
    """The control tokens of a vocabulary, by text, and the roles that some of them have."""

    controls: Mapping[str, int] = field(default_factory=dict)
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    pad: int | None = None
    sep: int | None = None
    cls: int | None = None
    mask: int | None = None
    ends: frozenset[int] = frozenset()
    """Every token that ends a generated text; `eos` is one of them."""
    chat_template: str | None = None
    starts: tuple[int, ...] = ()
    """What the decoder of an encoder-decoder begins with."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "ends": sorted(self.ends), "starts": list(self.starts)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Specials:
        """What `to_dict` gave."""
        sets = {"ends": frozenset(saved["ends"]), "starts": tuple(saved.get("starts", ()))}
        return cls(**{**saved, **sets})

    def names(self) -> dict[str, str]:
        """What chat templates call the tokens that have a role: {"bos_token": "<s>", ...}."""
        text_of = {token: text for text, token in self.controls.items()}
        roles = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
        given = {f"{role}_token": getattr(self, role) for role in roles}
        return {name: text_of[token] for name, token in given.items() if token in text_of}


class PieceTokenizer(ABC):
    """A tokenizer whose tokens are pieces of a vocabulary and control tokens."""

    vocab_size: int
    specials: Specials
    rule: Rule
    around: tuple[list[int], list[int]]
    """What the file puts before and after a text."""

    @abstractmethod
    def encode_parts(self, parts: Iterable[Part], *, add_special: bool = True) -> list[int]:
        """The ids of texts and control tokens in turn; adjoining texts are one text."""

    @abstractmethod
    def piece(self, token: int) -> str | bytes | None:
        """How the vocabulary spells a token (`bytes` if it is meant literally); None if there is no such token."""

    @abstractmethod
    def to_dict(self) -> Mapping[str, Any]:
        """What `tokenizer_from` needs to make it again; plain JSON values."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        add_special: put the tokens around it that the file asks for (BOS, EOS, [CLS], [SEP]), once.
        parse_special: text that spells a control token becomes that token; otherwise it stays text.
        """
        parts = self.split_controls(text) if parse_special else [(text, False)]
        return self.encode_parts(parts, add_special=add_special)

    def decode(self, tokens: Iterable[int], *, keep_special: bool = False, continues: bool = False) -> str:
        """The text of ids.

        keep_special: show control tokens by name; otherwise they are left out.
        continues: the tokens follow others, so that a space in front of them is kept.
        """
        return "".join(self.stream(tokens, keep_special=keep_special, continues=continues))

    def stream(self, tokens: Iterable[int], *, keep_special: bool = False, continues: bool = False) -> Iterator[str]:
        """The text piece by piece, as tokens arrive; a character is held back until its last byte is there."""
        return utf8(self.rule(self._pieces(tokens, keep_special), continues))

    def split_controls(self, text: str) -> list[Part]:
        """A text as texts and the control tokens in it: of those that begin first the longest."""
        parts, at = [], 0
        for match in self._control_pattern.finditer(text):
            parts += [(text[at : match.start()], False), (match[0], True)]
            at = match.end()
        return [part for part in [*parts, (text[at:], False)] if part[0]]

    def surrounded(self, tokens: list[int]) -> list[int]:
        """The ids with the tokens that the file puts around a text; a BOS or EOS that is there is not doubled."""
        before, after = self.around
        if before and tokens[:1] == [self.specials.bos] == before[-1:]:
            before = before[:-1]
        if after and tokens[-1:] == [self.specials.eos] == after[:1]:
            after = after[1:]
        return [*before, *tokens, *after]

    def _pieces(self, tokens: Iterable[int], keep_special: bool) -> Iterator[Piece]:
        for token in tokens:
            if (control := self._control_texts.get(token)) is not None:
                if keep_special:
                    yield control
                yield RESTART
            else:
                found = self.piece(token)
                # 0xFF stands in no UTF-8 text, so that an unknown id becomes U+FFFD.
                yield b"\xff" if found is None else found

    @cached_property
    def _control_texts(self) -> dict[int, bytes]:
        # The unknown token stands where text was: it is shown, or words would vanish without a trace.
        unk = self.specials.unk if self.specials.unk not in (self.specials.bos, self.specials.eos) else None
        return {token: text.encode() for text, token in self.specials.controls.items() if token != unk}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest = sorted(self.specials.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")
