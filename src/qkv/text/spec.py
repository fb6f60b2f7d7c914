"""The parts of a tokenizer.json that other formats are rewritten to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qkv.errors import CheckpointError

Spec = dict[str, Any]
"""The contents of a tokenizer.json, or of a part of it."""


def added_token(token: int, text: str, *, special: bool, lstrip: bool = False, normalized: bool = False) -> Spec:
    """A token that is found in a text as a whole; with `lstrip` it takes the spaces before it along."""
    return {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": lstrip,
        "rstrip": False,
        "normalized": normalized,
        "special": special,
    }


def template(
    around: tuple[Sequence[str], Sequence[str]], ids: Mapping[str, int], between: Sequence[str] = ()
) -> Spec | None:
    """What stands around a text. A pair is A, what follows a text, `between`, B, what follows a text.

    Segments: 0 for A and what surrounds it; 1 for B and what follows it, unless `between` says that the format has
    none (RoBERTa), and all are 0.
    """
    before, after = around
    if not before and not after:
        return None
    second = 0 if between else 1

    def special(texts: Iterable[str], segment: int) -> list[Spec]:
        return [{"SpecialToken": {"id": text, "type_id": segment}} for text in texts]

    def sequence(name: str, segment: int) -> Spec:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [*special(before, 0), sequence("A", 0), *special(after, 0)]
    pair = [*single, *special(between, 0), sequence("B", second), *special(after, second)]
    used = dict.fromkeys([*before, *after, *between])
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in used},
    }


def byte_level_bpe(patterns: Iterable[str]) -> Spec:
    """The `pre_tokenizer` of byte-level BPE: cut by each pattern in turn, then write bytes as characters."""
    cuts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*cuts, BYTE_LEVEL]}


BYTE_LEVEL: Spec = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def bpe(vocab: Mapping[str, int], merges: Sequence[str | list[str]], **settings: Any) -> Spec:
    """The `model` of BPE with ranked merges."""
    return {"type": "BPE", "vocab": dict(vocab), "merges": list(merges), **settings}


def word_piece(vocab: Mapping[str, int], unk: str) -> Spec:
    """The `model` of BERT: the longest piece first; a word of more than 100 characters is unknown."""
    return {
        "type": "WordPiece",
        "vocab": dict(vocab),
        "unk_token": unk,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }


def bert(
    where: str,
    vocab: Mapping[str, int],
    roles: Mapping[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None,
    chinese: bool = True,
) -> Spec:
    """A whole tokenizer.json as BERT has it; `roles` are its control tokens by text."""
    if missing := [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in roles]:
        raise CheckpointError(f"{where}: a WordPiece vocabulary needs {', '.join(missing)}")
    return {
        "version": "1.0",
        "added_tokens": [added_token(token, text, special=True) for text, token in roles.items()],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": chinese,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template((["[CLS]"], ["[SEP]"]), roles),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": word_piece(vocab, "[UNK]"),
    }
