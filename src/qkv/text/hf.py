"""Tokenizers that the library `tokenizers` runs: everything that the format tokenizer.json can say.

A file is a dictionary: `model` (BPE, WordPiece, Unigram, WordLevel), `normalizer`, `pre_tokenizer`, `post_processor`
(the tokens around a text or a pair), `decoder`, `added_tokens`. Other formats are rewritten as such a dictionary
(`gguf`, `sentencepiece`, `folder`), so that one class serves them all.

The library finds control tokens in a text by their names. Here their names carry two secret marks inside the library,
so that no text can spell one; `encode_parts` writes the marks where a control token is meant. Decoding is our own rule
(`decoding`), since the library's needs the whole text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer as Library

from qkv.errors import CheckpointError, DataError
from qkv.text.decoding import SPACE, Rule, byte_level, spaced, word_ends, words
from qkv.text.pieces import Part, PieceTokenizer, Specials
from qkv.text.spec import Spec


class LibraryTokenizer(PieceTokenizer):
    """A tokenizer.json with its control tokens."""

    kind = "huggingface"

    def __init__(self, spec: Mapping[str, Any], specials: Specials, where: str = "tokenizer.json") -> None:
        self.specials = specials
        self.rule = rule_of(spec, where)
        self.vocab_size = _vocab_size(spec)
        self._joins = any(kind.endswith("Processing") for kind in _types(spec.get("post_processor")))
        # A hundred bits: nobody writes this by chance, or on purpose.
        self._mark = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(20))
        marked = _with_marks(spec, specials.controls, self._marked)
        with _Refused(where):
            self._library = Library.from_str(json.dumps(marked, ensure_ascii=False))
        self._literal = {
            token: added.content.encode()
            for token, added in self._library.get_added_tokens_decoder().items()
            if not added.content.startswith(self._mark)
        }
        wrong = [f"{text!r} is {self._library.token_to_id(self._marked(text))}, not {token}"
                 for text, token in specials.controls.items()
                 if self._library.token_to_id(self._marked(text)) != token]  # fmt: skip
        if wrong:
            raise CheckpointError(f"{where}: ids of control tokens disagree: {'; '.join(wrong)}")
        whole, bare = (self._library.encode("a", add_special_tokens=flag).ids for flag in (True, False))
        start = next(at for at in range(len(whole) + 1) if whole[at : at + len(bare)] == bare)
        self.around = whole[:start], whole[start + len(bare) :]

    def encode_parts(self, parts: Iterable[Part], *, add_special: bool = True) -> list[int]:
        """The ids of texts and control tokens in turn; adjoining texts are one text."""
        tokens: list[int] = self._library.encode(self._written(parts), add_special_tokens=False).ids
        return self.surrounded(tokens) if add_special else tokens

    def encode_pair(self, first: str, second: str, *, parse_special: bool = False) -> tuple[list[int], list[int]]:
        """The ids of two texts with the tokens between and around them, and the segment (0 or 1) of each id."""
        if not self._joins:
            raise DataError("this tokenizer does not say how two texts are joined; encode them one by one")
        if parse_special:
            first, second = (self._written(self.split_controls(text)) for text in (first, second))
        encoded = self._library.encode(first, second)
        return encoded.ids, encoded.type_ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text alone, and where each stands in it: its first character, and the one behind its last."""
        encoded = self._library.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def piece(self, token: int) -> str | bytes | None:
        """How the vocabulary spells a token; added tokens mean themselves."""
        if (literal := self._literal.get(token)) is not None:
            return literal
        if not 0 <= token < self.vocab_size:
            return None
        found: str | None = self._library.id_to_token(token)
        return None if found is None else found.replace(self._mark, "")

    def to_dict(self) -> dict[str, Any]:
        """What a saved folder says of it: the whole tokenizer.json."""
        return {
            "kind": self.kind,
            "specials": self.specials.to_dict(),
            "json": json.loads(self._library.to_str().replace(self._mark, "")),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)

    def _written(self, parts: Iterable[Part]) -> str:
        """Texts and control tokens as one text for the library."""
        parts = list(parts)
        if unknown := [text for text, control in parts if control and text not in self.specials.controls]:
            raise DataError(f"{unknown[0]!r} is no control token of this tokenizer")
        return "".join(self._marked(text) if control else text for text, control in parts)

    def _marked(self, text: str) -> str:
        return f"{self._mark}{text}{self._mark}"


def from_dict(saved: Mapping[str, Any]) -> LibraryTokenizer:
    """The tokenizer that `to_dict` described."""
    return LibraryTokenizer(saved["json"], Specials.from_dict(saved["specials"]))


class _Refused:
    """Inside, the library's refusal of a file becomes one line of ours.

    It raises bare `Exception`s. Catching that class would hide every bug, so the exact class is asked for.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"{self._where}: the tokenizer is not understood ({reason[:300]})") from None


def _vocab_size(spec: Mapping[str, Any]) -> int:
    vocab = spec["model"]["vocab"]
    ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
    return 1 + max([*ids, *(token["id"] for token in spec.get("added_tokens") or [])], default=-1)


def _with_marks(spec: Mapping[str, Any], controls: Mapping[str, int], mark: Callable[[str], str]) -> Spec:
    """The dictionary with marks around the names of control tokens wherever a text could reach them.

    What a file says of cutting and padding texts is about one use of its model, so it is left out.
    """
    model, vocab = dict(spec["model"]), spec["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = [[mark(p) if controls.get(p) == i else p, score] for i, (p, score) in enumerate(vocab)]
    else:
        model["vocab"] = {text: token for text, token in vocab.items() if text not in controls}
        model["vocab"] |= {mark(text): vocab[text] for text in controls if text in vocab}
    if model.get("unk_token") in controls:
        model["unk_token"] = mark(model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, controls)]
    added = [
        {**token, "content": mark(token["content"]), "normalized": False, "single_word": False}
        if token["content"] in controls
        else token
        for token in spec.get("added_tokens") or []
    ]
    return {**spec, "model": model, "added_tokens": added, "truncation": None, "padding": None}


def _touches(merge: str | list[str], controls: Mapping[str, int]) -> bool:
    """Whether a merge makes a control token, or needs one."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in controls or left in controls or right in controls


def rule_of(spec: Mapping[str, Any], where: str) -> Rule:
    """How the pieces of a tokenizer.json become text, from its `decoder`."""
    decoder = spec.get("decoder")
    if decoder is None:
        return words("", glue=False)
    members = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {member["type"]: member for member in members}
    rest = kinds.keys() - {"Fuse"}
    if rest == {"ByteLevel"}:
        return byte_level
    if rest == {"WordPiece"}:
        return words(kinds["WordPiece"]["prefix"], glue=kinds["WordPiece"]["cleanup"])
    if rest == {"BPEDecoder"}:
        return word_ends(kinds["BPEDecoder"]["suffix"])
    if rest and rest <= {"Replace", "ByteFallback", "Strip", "Metaspace"} and _is_space(kinds):
        metaspace, strip = kinds.get("Metaspace"), kinds.get("Strip")
        leading = metaspace is not None and _prepends(metaspace)
        leading = leading or (strip is not None and strip["start"] > 0)
        return spaced(
            leading=leading, restarts="Prepend" in _types(spec.get("normalizer")), bytes_too="ByteFallback" in kinds
        )
    raise CheckpointError(f"{where}: decoder {' + '.join(sorted(rest))} is not understood; known are ByteLevel, "
                          "WordPiece, BPEDecoder, Metaspace, and Replace of ▁ with ByteFallback and Strip")  # fmt: skip


def _is_space(kinds: Mapping[str, Any]) -> bool:
    replace, strip = kinds.get("Replace"), kinds.get("Strip")
    if replace is not None and (replace["pattern"].get("String"), replace["content"]) != (SPACE, " "):
        return False
    return strip is None or (strip["content"] == " " and strip["start"] <= 1 and strip["stop"] == 0)


def _prepends(metaspace: Mapping[str, Any]) -> bool:
    scheme = metaspace.get("prepend_scheme")
    return bool(metaspace.get("add_prefix_space", True)) if scheme is None else scheme != "never"


def _types(member: Mapping[str, Any] | None) -> set[str]:
    """The types of a normalizer or post-processor and of all that it consists of."""
    if member is None:
        return set()
    inner = [_types(one) for one in [*member.get("normalizers", []), *member.get("processors", [])]]
    return {member["type"]}.union(*inner)
