"""A tokenizer as the metadata of a GGUF file: the inverse of `gguf`.

    byte-level BPE        model `gpt2`: merges, and the name under which readers know its cut of words
    BPE with byte pieces  model `llama`: SentencePiece's, whose scores follow the order of the merges
    unigram               model `t5`
    WordPiece             model `bert`

The format names what it knows and describes nothing, so much cannot be said in it: other cuts, other normalizations,
control tokens that take spaces along. What was made is read again and compared, ids on texts of many scripts and the
roles of all tokens; what differs is refused with the reason.

Where a text allows one piece in two overlapping ways ("ab" + "a", "a" + "ba"), SentencePiece takes the leftmost and
ranked merges the pair that was listed first: the two published forms of one vocabulary differ there, and so do ours.
They differ, too, on texts that hold ▁ itself.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from qkv.errors import CheckpointError
from qkv.text import gguf
from qkv.text.cuts import cut_name
from qkv.text.decoding import SPACE
from qkv.text.pieces import PieceTokenizer
from qkv.text.sentencepiece import Kind, SentencePieceTokenizer
from qkv.text.spec import Spec

Metadata = dict[str, Any]

PROBES = (
    "The quick brown fox's 2 jumps: it'll cost $1,234.56 (or 99%)!",
    "  two  spaces, three   , tabs\t\tand\n\nlines \r\n end ",
    "def f(x):\n    return x**2  # naïve café, Ünïcode, ﬁ ligature",
    "CamelCase snake_case IT'S McDonald's don't 'tis rock'n'roll https://a.b/c?d=e&f=g",
    "我的猫在2024年坐在垫子上。你好，世界！ こんにちは カタカナ 안녕하세요",
    "สวัสดี Привет, мир! Γειά नमस्ते",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663",  # from right to left
    "😀👩\u200d🔬 🇨🇭 e\u0301 \u1e9b\u0323 Ⅷ ½ ² ☃ \u00a0 \u3000 _ — “quotes”",
    "1 12 123 1234 12345 0.5e-7 a1b22c333 (((()))) ... ??? --- ~~~ ```",
    *("", " ", "a", "\n", "A"),
)  # fmt: skip


def metadata_of(tokenizer: object, rows: int | None = None) -> Metadata:
    """`tokenizer.*` of a GGUF file; a CheckpointError says why a tokenizer has none.

    rows: the rows of the model's token table: readers want a token for each, so that fillers are added.
    """
    if not isinstance(tokenizer, PieceTokenizer):
        _refuse(f"it has no words for {type(tokenizer).__name__}")
    found = _described(tokenizer)
    tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    for token in range(len(tokens), rows or 0):
        tokens.append(_filler(token))
        kinds.append(int(Kind.UNUSED))
        if "tokenizer.ggml.scores" in found:
            found["tokenizer.ggml.scores"].append(0.0)
    try:
        again = gguf.from_metadata(found, "read again")
    except CheckpointError as error:
        _refuse(str(error))
    if differs := next(_differences(tokenizer, again), None):
        _refuse(differs)
    return found


def _refuse(reason: str) -> NoReturn:
    raise CheckpointError(f"tokenizer: GGUF cannot express it: {reason}")


def _differences(tokenizer: PieceTokenizer, again: PieceTokenizer) -> Iterator[str]:
    """What reading again changed."""
    for name in ("vocab_size", "around"):
        if getattr(tokenizer, name) != getattr(again, name):
            yield f"{name} would become {getattr(again, name)} instead of {getattr(tokenizer, name)}"
    ours, theirs = tokenizer.specials.to_dict(), again.specials.to_dict()
    # Where a decoder beside an encoder starts is left out: no model that is written has both.
    yield from (f"its {name} would change" for name in ours if name != "starts" and ours[name] != theirs[name])
    names = list(tokenizer.specials.controls)
    for text in (*PROBES, *(f"x {name} y{name}z" for name in (*names[:40], *_literals(tokenizer)[:40]))):
        for parse in (False, True):
            if tokenizer.encode(text, parse_special=parse) != again.encode(text, parse_special=parse):
                yield f"{text!r} would have other ids"


def _literals(tokenizer: PieceTokenizer) -> list[str]:
    """Tokens that were added to the vocabulary as text."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return [text for _, text in tokenizer.pieces.of(Kind.USER_DEFINED)]
    return [token["content"] for token in _added(tokenizer) if token["content"] not in tokenizer.specials.controls]


def _added(tokenizer: PieceTokenizer) -> list[Spec]:
    return tokenizer.to_dict()["json"].get("added_tokens") or []


def _described(tokenizer: PieceTokenizer) -> Metadata:
    if isinstance(tokenizer, SentencePieceTokenizer):
        pieces = tokenizer.pieces
        after, before = pieces.space_after_control, pieces.space_before_space
        spaces = Spaces(pieces.add_space, pieces.collapse_spaces, pieces.charsmap, after, before)
        table = _table(tokenizer, list(pieces.texts), [int(kind) for kind in pieces.kinds])
        return table | _sentencepiece(list(pieces.scores), spaces, unigram=pieces.unigram)
    spec = tokenizer.to_dict()["json"]
    strips = [t["content"] for t in _added(tokenizer) if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if strips:
        _refuse(f"token {strips[0]!r} takes spaces along, or stands for whole words only")
    model = spec["model"]
    if model["type"] == "WordPiece":
        return _word_piece(tokenizer, spec)
    if model["type"] == "Unigram":
        return _unigram(tokenizer, spec)
    if model["type"] == "BPE" and not model.get("end_of_word_suffix") and not model.get("continuing_subword_prefix"):
        cuts_bytes = "ByteLevel" in {one["type"] for one in _members(spec.get("pre_tokenizer"), "pretokenizers")}
        return _byte_level(tokenizer, spec) if cuts_bytes else _merged(tokenizer, spec)
    _refuse(f"its model is a {model['type']} of another kind")


# --- What all have ----------------------------------------------------------------------------------------------------


def _table(tokenizer: PieceTokenizer, texts: list[str], kinds: list[int]) -> Metadata:
    """Tokens, what each is, and the roles of some."""
    specials, (before, after) = tokenizer.specials, tokenizer.around
    keys: Metadata = {"tokens": texts, "token_type": kinds}
    keys |= {gguf.ROLES[role]: getattr(specials, role) for role in gguf.ROLES}
    others = sorted(specials.ends - {specials.eos})
    if len(others) > 2:
        _refuse(f"{len(others)} tokens end a text besides its eos, and there are words for two")
    keys |= dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
    keys |= {"add_bos_token": before != [], "add_eos_token": after != []}
    if before not in ([], [specials.bos], [specials.cls]) or after not in ([], [specials.eos], [specials.sep]):
        _refuse(f"it puts {before} before and {after} behind a text")
    found = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    template = {"tokenizer.chat_template": specials.chat_template}
    return found | {key: value for key, value in template.items() if value is not None}


def _listed(tokenizer: PieceTokenizer, spec: Spec, *, bytes_too: bool = False) -> tuple[list[str], list[int]]:
    """The text of every token by its id, and what it is; ids that no token has are filled."""
    vocab = spec["model"]["vocab"]
    ids = {text: token for token, (text, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    texts = [_filler(token) for token in range(tokenizer.vocab_size)]
    kinds = [int(Kind.UNUSED)] * len(texts)
    for text, token in ids.items():
        is_byte = bytes_too and gguf.BYTE.fullmatch(text) is not None
        texts[token], kinds[token] = text, int(Kind.BYTE if is_byte else Kind.NORMAL)
    for one in spec.get("added_tokens") or []:
        texts[one["id"]], kinds[one["id"]] = one["content"], int(Kind.USER_DEFINED)
    for text, token in tokenizer.specials.controls.items():
        texts[token], kinds[token] = text, int(Kind.CONTROL)
    return texts, kinds


def _filler(token: int) -> str:
    return f"[PAD{token}]"


def _members(part: Spec | None, inner: str) -> list[Spec]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if part is None:
        return []
    return [one for step in part[inner] for one in _members(step, inner)] if part["type"] == "Sequence" else [part]


# --- The four algorithms ----------------------------------------------------------------------------------------------


def _byte_level(tokenizer: PieceTokenizer, spec: Spec) -> Metadata:
    normal = [step["type"] for step in _members(spec.get("normalizer"), "normalizers")]
    if normal not in ([], ["NFC"]):
        _refuse(f"it normalizes texts by {', '.join(normal)}")
    joined = tokenizer.around[0] != [] and tokenizer.around[1] != []
    merges = [one.split(" ", 1) if isinstance(one, str) else one for one in spec["model"]["merges"]]
    if spaced := [pair for pair in merges if " " in "".join(pair)]:
        _refuse(f"the merge of {spaced[0]} has a space in it")
    name = cut_name(spec, add_sep=joined)
    if name is None:
        _refuse("no name stands for its cut of texts into words")
    texts, kinds = _listed(tokenizer, spec)
    keys: Metadata = {"model": "gpt2", "pre": name, "merges": [" ".join(pair) for pair in merges]}
    keys |= {"normalizer.nfc": True} if normal else {}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _table(tokenizer, texts, kinds)


def _merged(tokenizer: PieceTokenizer, spec: Spec) -> Metadata:
    """SentencePiece's BPE as ranked merges: a piece's score follows from the rank of the merge that makes it."""
    model = spec["model"]
    texts, kinds = _listed(tokenizer, spec, bytes_too=True)
    if not model.get("byte_fallback") or kinds.count(Kind.BYTE) != 256 or model.get("ignore_merges"):
        _refuse("its BPE has neither the letters nor the pieces of bytes")
    spaces = _spaces(spec)
    if spaces.collapse or spaces.charsmap:
        _refuse("its BPE normalizes texts")
    unk = tokenizer.specials.unk
    kinds = [int(Kind.UNKNOWN) if token == unk else kind for token, kind in enumerate(kinds)]
    ranks: dict[str, int] = {}
    merges = [tuple(one.split(" ", 1)) if isinstance(one, str) else tuple(one) for one in model["merges"]]
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    _check_merges(merges, {text for text, kind in zip(texts, kinds, strict=True) if kind == Kind.NORMAL})
    scores = [-float(ranks.get(text, len(merges))) for text in texts]
    return _table(tokenizer, texts, kinds) | _sentencepiece(scores, spaces, unigram=False)


def _check_merges(merges: Sequence[tuple[str, ...]], pieces: set[str]) -> None:
    """SentencePiece joins any two neighbours whose joint is a piece: merges must say the same, piece by piece."""
    given, last, closed = set(merges), "", set[str]()
    for left, right in merges:
        joint = left + right
        if joint in closed:
            _refuse(f"the merges that make {joint!r} do not stand together")
        if joint != last:
            closed.add(last)
        last = joint
    made = closed | {last}
    for piece in pieces:
        if len(piece) > 1 and piece not in made:
            _refuse(f"no merge makes {piece!r}")
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair not in given and pair[0] in pieces and pair[1] in pieces:
                _refuse(f"{piece!r} is made of some of its parts only, and not of {pair[0]!r} and {pair[1]!r}")


def _unigram(tokenizer: PieceTokenizer, spec: Spec) -> Metadata:
    texts, kinds = _listed(tokenizer, spec, bytes_too=bool(spec["model"].get("byte_fallback")))
    unk = tokenizer.specials.unk
    kinds = [int(Kind.UNKNOWN) if token == unk else kind for token, kind in enumerate(kinds)]
    scores = [float(score) for _, score in spec["model"]["vocab"]]
    scores += [0.0] * (len(texts) - len(scores))
    return _table(tokenizer, texts, kinds) | _sentencepiece(scores, _spaces(spec), unigram=True)


def _word_piece(tokenizer: PieceTokenizer, spec: Spec) -> Metadata:
    normal = spec.get("normalizer") or {"type": "nothing"}
    expected = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    if not expected.items() <= normal.items() or (spec.get("pre_tokenizer") or {}).get("type") != "BertPreTokenizer":
        _refuse("it prepares texts unlike BERT")
    model = spec["model"]
    if model["continuing_subword_prefix"] != "##" or model["max_input_chars_per_word"] != 100:
        _refuse("it marks the inside of words unlike BERT, or takes longer ones")
    texts, kinds = _listed(tokenizer, spec)
    bracketed = {text for text, kind in zip(texts, kinds, strict=True) if kind != Kind.NORMAL}
    marked = [text if text in bracketed or gguf.is_bracketed(text) else _marked(text) for text in texts]
    keys: Metadata = {"model": "bert", "normalizer.lowercase": normal["lowercase"]}
    if normal["strip_accents"] is not None:
        keys["normalizer.strip_accents"] = normal["strip_accents"]
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _table(tokenizer, marked, kinds)


def _marked(text: str) -> str:
    return text.removeprefix("##") if text.startswith("##") else f"{SPACE}{text}"


class Spaces(NamedTuple):
    """What SentencePiece does to a text before it is cut, in the words of `sentencepiece.Pieces`."""

    add_space: bool = False
    collapse: bool = False
    charsmap: str = ""
    space_after_control: bool = True
    space_before_space: bool = True


def _sentencepiece(scores: list[float], spaces: Spaces, *, unigram: bool) -> Metadata:
    keys: Metadata = {
        "ggml.model": "t5" if unigram else "llama",
        "ggml.pre": "default",
        "ggml.scores": scores,
        "ggml.add_space_prefix": spaces.add_space,
        "ggml.remove_extra_whitespaces": spaces.collapse,
    }
    if spaces.charsmap:
        keys["ggml.precompiled_charsmap"] = np.frombuffer(base64.b64decode(spaces.charsmap), np.uint8)
    if spaces.add_space:  # keys of our own: other readers know no such tokenizers
        keys |= {} if spaces.space_after_control else {"qkv.space_after_control": False}
        keys |= {} if spaces.space_before_space or spaces.collapse else {"qkv.space_before_space": False}
    return {f"tokenizer.{key}": value for key, value in keys.items()}


def _spaces(spec: Spec) -> Spaces:
    """How a tokenizer.json writes spaces."""
    found = Spaces()
    steps = [*_members(spec.get("normalizer"), "normalizers"), *_members(spec.get("pre_tokenizer"), "pretokenizers")]
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                found = found._replace(add_space=True)
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "Split", "pattern": {"String": " "}}:
                pass  # Gemma's: no space is left to cut at
            case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
                found = found._replace(charsmap=charsmap or "")
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}} | {"type": "Strip"} | {"type": "WhitespaceSplit"}:
                found = found._replace(collapse=True)
            case {"type": "Metaspace", "replacement": "\u2581"}:
                scheme = _scheme(step)
                found = found._replace(
                    add_space=scheme != "never", space_after_control=scheme != "first", space_before_space=False
                )
            case _:
                _refuse(f"it prepares texts by {step['type']}")
    return found


def _scheme(metaspace: Mapping[str, Any]) -> str:
    given = metaspace.get("prepend_scheme")
    usual = "always" if metaspace.get("add_prefix_space", True) else "never"
    return usual if given is None else str(given)
