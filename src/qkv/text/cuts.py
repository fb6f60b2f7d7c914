"""By which name GGUF files know how a tokenizer.json cuts a text into words.

The steps of most files are patterns, which are compared as they are written. Others say the same in other words (a set
of letters spelled out, digits by a step of their own); they have the name whose words are the same on a text in which
every character of Unicode stands beside letters, digits and spaces.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, models

from qkv.text.pretokenizers import PRE_TOKENIZERS
from qkv.text.spec import Spec, byte_level_bpe

_GPT2 = PRE_TOKENIZERS["gpt-2"].patterns[0]
_SKIPPED = {"Cn", "Cs", "Co"}
_EVERY = 61
"""Of the many letters of one script (CJK, Hangul) each 61st stands for the others."""


def cut_name(spec: Spec, *, add_sep: bool = False) -> str | None:
    """The first name in `pretokenizers` that means the same; None if there is none.

    add_sep: whether texts stand between BOS and EOS as in RoBERTa.
    """
    steps, whole = spec.get("pre_tokenizer"), bool(spec["model"].get("ignore_merges"))
    if steps is None or _puts_a_space(steps):
        return None
    written = _patterns(steps)
    named = [(name, one) for name, one in PRE_TOKENIZERS.items() if one.add_sep == add_sep]
    known = {one.patterns for _, one in named}
    same = {written} & known or {patterns for patterns in known if _cuts_alike(steps, patterns)}
    alike = [(name, one) for name, one in named if one.patterns in same]
    found = next((name for name, one in alike if one.ignore_merges == whole), None)
    if found is None and alike and not _needs_whole_words(spec):
        found = alike[0][0]  # whether words are looked up whole makes no difference to this vocabulary
    return found


def _patterns(steps: Spec | None) -> tuple[str, ...] | None:
    """The steps as patterns that are applied in turn, if each is one."""
    found: list[str] = []
    members = [] if steps is None else steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    for place, step in enumerate(members):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses} if place == len(members) - 1:
                found += [_GPT2] if uses else []
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                found.append(pattern)
            case {"type": "Digits", "individual_digits": single}:
                found.append(r"\p{N}" if single else r"\p{N}+")
            case _:
                return None
    return tuple(found)


def _puts_a_space(steps: Spec) -> bool:
    members = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    return any(step.get("add_prefix_space") for step in members)


def _needs_whole_words(spec: Spec) -> bool:
    """Whether some token is no result of the merges, so that it matters if words are looked up whole."""
    model = spec["model"]
    merges = [tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    added = {token["content"] for token in spec.get("added_tokens") or []}
    merging = models.BPE(model["vocab"], [(left, right) for left, right in merges])
    words = (word for word in model["vocab"] if word not in added)
    return any(len(merging.tokenize(word)) != 1 for word in words)


def _cuts_alike(steps: Spec, patterns: tuple[str, ...]) -> bool:
    ours, theirs = _cutter(json.dumps(steps)), _cutter(json.dumps(byte_level_bpe(patterns)))
    return all(ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text) for text in _texts())


@lru_cache(maxsize=64)
def _cutter(steps: str) -> Any:
    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": json.loads(steps)})).pre_tokenizer


@lru_cache(maxsize=1)
def _texts() -> tuple[str, ...]:
    return tuple(_shown())


def _shown() -> Iterator[str]:
    """A short text that most cuts differ on, then the characters of Unicode, some at a time."""
    yield "I'LL say \t\n\n 'Tis 1234567 for的人, naïve¿? <|x|>\r\n  CamelCase don't (((a))) 12.5% e\u0301\u0302  "
    shown: dict[str, int] = {}
    line = []
    for number in range(0x20, 0x30000):
        character = chr(number)
        category = unicodedata.category(character)
        if category in _SKIPPED:
            continue
        script = f"{category} {unicodedata.name(character, 'UNNAMED').split()[0]}"
        shown[script] = shown.get(script, 0) + 1
        if shown[script] > 300 and shown[script] % _EVERY:
            continue
        line.append(f"a{character}{character}b {character}1{character} {character}\n'{character}A ")
        if len(line) == 500:
            yield "".join(line)
            line = []
    yield "".join(line)
