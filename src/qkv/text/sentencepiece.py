"""SentencePiece vocabularies: BPE by scores, and unigram.

A space is written ▁, and one is put before a text. A character without a piece becomes its UTF-8 bytes, <0xE4> <0xBD>
..., or the unknown token in vocabularies without bytes.

BPE      joins, as long as it can, the two neighbours whose joint piece has the best score, the leftmost among equals.
         The library's BPE ranks pairs of pieces, not joint pieces: where "ab" + "a" and "a" + "ba" overlap, it cannot
         take the leftmost. So this is our own code.
unigram  of all segmentations the one with the largest sum of scores: the library's.

Kudo and Richardson 2018, SentencePiece, arXiv 1808.06226; Sennrich, Haddow and Birch 2016, arXiv 1508.07909; Kudo 2018,
arXiv 1804.10959.

Text that holds ▁ (U+2581) itself comes back with a space; every other text survives, if the vocabulary has bytes and
normalizes nothing.
"""

from __future__ import annotations

import base64
import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import groupby
from typing import Any

from tokenizers import models, normalizers

from qkv.errors import CheckpointError, DataError
from qkv.text.decoding import SPACE, spaced
from qkv.text.pieces import Part, PieceTokenizer, Specials

_CACHED_LENGTH = 32


class Kind(IntEnum):
    """What a piece is, with the numbers of SentencePiece and GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Pieces:
    """A vocabulary, and how a text is prepared for it."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    add_space: bool = True
    """Put a space before the text."""
    collapse_spaces: bool = False
    """Remove spaces at the ends and all but one of several."""
    charsmap: str = ""
    """SentencePiece's compiled normalization, in base64."""
    unigram: bool = False
    """Whether the scores are those of a unigram model, not the order of BPE's joins."""
    space_after_control: bool = True
    """Put it also before a text that follows a control token."""
    space_before_space: bool = True
    """Put it also before a text that begins with one."""

    def of(self, *kinds: Kind) -> list[tuple[int, str]]:
        """The pieces of some kinds, with their ids."""
        return [(token, text) for token, text in enumerate(self.texts) if self.kinds[token] in kinds]

    def problems(self) -> list[str]:
        """What is wrong with the vocabulary."""
        found = []
        if not len(self.texts) == len(self.scores) == len(self.kinds):
            found.append(f"{len(self.texts)} pieces, {len(self.scores)} scores, {len(self.kinds)} types")
        byte = re.compile(r"<0x[0-9A-F]{2}>")
        wrong = [
            text
            for text, kind in zip(self.texts, self.kinds, strict=False)
            if kind == Kind.BYTE and not byte.fullmatch(text)
        ]
        found += [f"{wrong[0]!r} is called a byte"] if wrong else []
        return found


class SentencePieceTokenizer(PieceTokenizer):
    """A SentencePiece vocabulary at work."""

    kind = "sentencepiece"

    def __init__(
        self, pieces: Pieces, specials: Specials, around: tuple[list[int], list[int]], where: str = "tokenizer"
    ) -> None:
        if problems := pieces.problems():
            raise CheckpointError(f"{where}: {'; '.join(problems)}")
        self.pieces, self.specials, self.around = pieces, specials, around
        self.vocab_size = len(pieces.texts)
        self.rule = spaced(leading=pieces.add_space, restarts=pieces.space_after_control, bytes_too=False)
        self._ids = {text: token for token, text in pieces.of(Kind.NORMAL, Kind.UNUSED)}
        self._bytes = {int(text[3:5], 16): token for token, text in pieces.of(Kind.BYTE)}
        self._unused = {text for _, text in pieces.of(Kind.UNUSED)}
        # Converters write some of them with spaces, others with ▁.
        self._user_defined = {text.replace(" ", SPACE): token for token, text in pieces.of(Kind.USER_DEFINED)}
        if len(self._bytes) not in (0, 256):
            raise CheckpointError(f"{where}: {len(self._bytes)} of 256 byte pieces")
        if not self._bytes and specials.unk is None:
            raise CheckpointError(f"{where}: neither byte pieces nor an unknown token for what has no piece")
        self._split = _alternatives(self._user_defined)
        self._normalize = _normalizer(pieces)
        self._word = _words(self._ids)
        self._symbols = _unigram(pieces, self._ids) if pieces.unigram else self._join
        # Words recur; long ones do so rarely.
        self._cached: Callable[[str], list[int]] = lru_cache(1 << 16)(self._segment)

    def encode_parts(self, parts: Iterable[Part], *, add_special: bool = True) -> list[int]:
        """The ids of texts and control tokens in turn; after each control token a text begins anew."""
        tokens: list[int] = []
        for number, (control, group) in enumerate(groupby(parts, key=lambda part: part[1])):
            texts = [text for text, _ in group]
            if not control:
                spaced = self.pieces.add_space and (number == 0 or self.pieces.space_after_control)
                tokens += self._encode("".join(texts), spaced)
            elif unknown := [text for text in texts if text not in self.specials.controls]:
                raise DataError(f"{unknown[0]!r} is no control token of this tokenizer")
            else:
                tokens += [self.specials.controls[text] for text in texts]
        return self.surrounded(tokens) if add_special else tokens

    def piece(self, token: int) -> str | bytes | None:
        """How the vocabulary spells a token; a byte piece is that byte."""
        if not 0 <= token < self.vocab_size:
            return None
        text = self.pieces.texts[token]
        return bytes([int(text[3:5], 16)]) if self.pieces.kinds[token] == Kind.BYTE else text

    def to_dict(self) -> dict[str, Any]:
        """What a saved folder says of it: the whole vocabulary."""
        pieces = {
            name: value if isinstance(value, str | bool) else list(value) for name, value in vars(self.pieces).items()
        }
        return {"kind": self.kind, "pieces": pieces, "specials": self.specials.to_dict(), "around": list(self.around)}

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)

    def _encode(self, text: str, spaced: bool) -> list[int]:
        tokens: list[int] = []
        # User-defined pieces stand at the odd places: nothing is joined across them.
        for at, between in enumerate(self._split.split(self._prepare(text, spaced))):
            if at % 2:
                tokens.append(self._user_defined[between])
                continue
            for word in self._word.findall(between):
                tokens += self._cached(word) if len(word) <= _CACHED_LENGTH else self._segment(word)
        return tokens if self._bytes else _without_repeats(tokens, self.specials.unk)

    def _prepare(self, text: str, spaced: bool) -> str:
        kept = self._split.split(text)
        text = "".join(part if at % 2 else self._normalize(part) for at, part in enumerate(kept))
        if self.pieces.collapse_spaces:
            text = re.sub(" {2,}", " ", text.lstrip(" ")).rstrip(f" {SPACE}")
        spaced = spaced and (self.pieces.space_before_space or not text.startswith((" ", SPACE)))
        prefix = " " if text and spaced else ""
        return (prefix + text).replace(" ", SPACE)

    def _segment(self, word: str) -> list[int]:
        return [token for symbol in self._symbols(word) for token in self._tokens_of(symbol)]

    def _join(self, word: str) -> list[str]:
        """BPE: join neighbours from the best score on."""
        symbols, scores, ids = list(word), self.pieces.scores, self._ids
        before, after = list(range(-1, len(word) - 1)), [*range(1, len(word)), -1]
        made_of: dict[str, tuple[str, str]] = {}
        candidates: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            joint = symbols[left] + symbols[right]
            if (token := ids.get(joint)) is not None:
                heapq.heappush(candidates, (-scores[token], left, right, joint))
                if joint in self._unused:
                    made_of[joint] = symbols[left], symbols[right]

        def taken_apart(symbol: str) -> list[str]:
            """An unused piece helps to join, and falls into its parts in the end."""
            return [one for part in made_of[symbol] for one in taken_apart(part)] if symbol in made_of else [symbol]

        for left in range(len(word) - 1):
            offer(left, left + 1)
        while candidates:
            _, left, right, joint = heapq.heappop(candidates)
            # A candidate is out of date if one of the two has been joined to something else.
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joint:
                continue
            symbols[left], symbols[right] = joint, ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
                offer(left, after[left])
            if before[left] >= 0:
                offer(before[left], left)
        return [one for symbol in symbols if symbol for one in taken_apart(symbol)]

    def _tokens_of(self, symbol: str) -> list[int]:
        if (token := self._ids.get(symbol)) is not None:
            return [token]
        if self._bytes:
            return [self._bytes[byte] for byte in symbol.encode()]
        assert self.specials.unk is not None
        return [self.specials.unk]


def from_dict(saved: Mapping[str, Any]) -> SentencePieceTokenizer:
    """The tokenizer that `to_dict` described."""
    before, after = saved["around"]
    return SentencePieceTokenizer(Pieces(**saved["pieces"]), Specials.from_dict(saved["specials"]), (before, after))


def _words(texts: Iterable[str]) -> re.Pattern[str]:
    """What can be segmented on its own, since no piece goes over from one of them to the next.

    A word begins at a ▁ that follows another character, unless some piece holds these two in a row.
    """
    crossing = {character for text in texts for character in re.findall(f"([^{SPACE}]){SPACE}", text)}
    inside = f"[^{SPACE}]|(?<=[{re.escape(''.join(sorted(crossing)))}]){SPACE}+" if crossing else f"[^{SPACE}]"
    return re.compile(f"{SPACE}*(?:{inside})+|{SPACE}+", re.DOTALL)


def _unigram(pieces: Pieces, ids: Mapping[str, int]) -> Callable[[str], list[str]]:
    scored = [(text, pieces.scores[token]) for text, token in ids.items() if pieces.kinds[token] == Kind.NORMAL]
    # The library wants the unknown piece in the list; this one stands for itself, and is as good as the best.
    unknown = ("\ufdd0", max((score for _, score in scored), default=0.0))
    model = models.Unigram([unknown, *scored], 0, False)
    return lambda word: [token.value for token in model.tokenize(word)]


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    longest = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "((?!))")


def _normalizer(pieces: Pieces) -> Callable[[str], str]:
    if not pieces.charsmap:
        return str
    normalize: Callable[[str], str] = normalizers.Precompiled(base64.b64decode(pieces.charsmap)).normalize_str
    return normalize


def _without_repeats(tokens: list[int], unk: int | None) -> list[int]:
    """Neighbouring unknown characters are one unknown token."""
    return [token for at, token in enumerate(tokens) if token != unk or at == 0 or tokens[at - 1] != unk]
