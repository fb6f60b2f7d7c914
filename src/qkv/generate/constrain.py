"""Constraints: a model may only say what a JSON schema or a regular expression allows.

After every token the constraint gives a mask (V,): the tokens with which the text so far can still become a whole one.
Tokens that end a text are in it when the text is whole; other control tokens never are.

The library `llguidance` runs the grammars: an Earley parser over the derivatives of regular expressions, walked along
a trie of the vocabulary (Koo 2024, arXiv 2407.08103, and Willard 2023, arXiv 2307.09702, describe such masks). It knows
tokens as bytes. What bytes a token stands for can depend on what stands before it (WordPiece puts a space before a word
unless the text begins there), so each such context has its own trie, and text is handed over as bytes.

JSON schemas are read as draft 2020-12. A keyword that cannot be enforced is refused by name, never ignored; so is one
that no draft knows, since it may be misspelt. Properties come in the order of the schema. Between the parts of a value,
and before it, at most one space is allowed: with more, a model could fill its whole length with them.

The mask knows what the grammar lets follow, not what the vocabulary can write. Where the two do not meet (WordPiece has
no quote without a space before it), a text can come to a point at which no token is left: an error, never a wrong text.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from qkv.errors import GenerationError
from qkv.text.bytes import ByteTokenizer
from qkv.text.decoding import Piece, Rule
from qkv.text.pieces import PieceTokenizer
from qkv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.bool_]


class Constraint(Protocol):
    """What one text must satisfy, and how far it has come."""

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow, or the text has ended."""

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole one; more may be able to follow."""

    def allowed(self) -> Mask:
        """The tokens that may come next (V,); none if the text has ended, or is finished and no token ends texts."""

    def advance(self, token: int) -> None:
        """Take up the next token of the text."""

    def fork(self) -> Constraint:
        """An independent copy."""


Factory = Callable[[], Constraint]
"""Makes the constraint of one more text."""


def json_schema(
    schema: Mapping[str, Any] | bool,
    tokenizer: Tokenizer,
    *,
    ends: frozenset[int] | None = None,
    vocab_size: int | None = None,
    continues: bool = True,
) -> Factory:
    """Texts that are JSON values satisfying `schema`; `regex` explains the other arguments."""
    what = "JSON schema"
    if not isinstance(schema, Mapping | bool):
        raise GenerationError(f"{what}: must be an object or a boolean, got {type(schema).__name__}")
    for problem in _problems(schema, ()):
        raise GenerationError(f"{what}{problem}")
    whole = {"allOf": [schema]} if isinstance(schema, bool) else {k: v for k, v in schema.items() if k != "$schema"}
    try:
        text = json.dumps({**whole, "x-guidance": _OPTIONS}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise GenerationError(f"{what}: is no JSON ({error})") from None
    return _factory(_Source(what, f'start: " "? value\nvalue: %json {text}'), tokenizer, ends, vocab_size, continues)


def regex(
    pattern: str,
    tokenizer: Tokenizer,
    *,
    ends: frozenset[int] | None = None,
    vocab_size: int | None = None,
    continues: bool = True,
) -> Factory:
    r"""Texts that `pattern` matches as a whole.

    The syntax is that of Rust's regular expressions, without \b and lookarounds; \d, \w and \s are Unicode's, . is not
    a line end.
    ends: the tokens that end a text; None: the tokenizer's.
    vocab_size: the width of the model's logits, if the tokenizer has fewer tokens.
    continues: the text follows a prompt, so that a space in front of it counts (as in `PieceTokenizer.decode`).
    """
    from llguidance import regex_to_lark

    source = _Source("regular expression", f"start: /{regex_to_lark(pattern, use_ascii='')}/")
    return _factory(source, tokenizer, ends, vocab_size, continues)


# The library's name for the options of a schema.
_OPTIONS = {"whitespace_pattern": " ", "lenient": False, "coerce_one_of": False}

_OF_SCHEMAS = {"items", "additionalProperties"}
_OF_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_OF_TABLES = {"properties", "patternProperties", "$defs", "definitions"}
_OF_VALUES = {
    "$ref", "const", "enum", "type", "required", "format", "pattern", "minItems", "maxItems", "minProperties",
    "maxProperties", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
}  # fmt: skip
_ENFORCED = _OF_SCHEMAS | _OF_LISTS | (_OF_TABLES - {"$defs", "definitions"}) | _OF_VALUES
_DESCRIBING = {
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator",
}  # fmt: skip


def _problems(schema: object, path: tuple[str, ...]) -> Iterator[str]:
    """What the library would ignore, or not hold to, in a schema and in those inside it."""
    where = f" at {'.'.join(path)}" if path else ""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where}: must be an object or a boolean, got {json.dumps(schema)[:60]}"
        return
    for key, value in schema.items():
        if key not in _ENFORCED | _DESCRIBING:
            yield f"{where}: keyword {key!r} is not supported; supported are {', '.join(sorted(_ENFORCED))}"
        elif key in _OF_SCHEMAS:
            yield from _problems(value, (*path, key))
        elif key in _OF_LISTS or key in _OF_TABLES:
            inner = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
            for name, one in inner:
                yield from _problems(one, (*path, key, str(name)))
    # A key that is no property of the schema can come twice, and two equal keys are one.
    least, required = schema.get("minProperties", 0), schema.get("required", [])
    if isinstance(least, int) and isinstance(required, list) and least > max(1, len(required)):
        yield f"{where}: keyword 'minProperties' is not supported above 1 and the number of required properties"


@dataclass(frozen=True)
class _Source:
    """A grammar in the library's language."""

    what: str
    text: str

    def compiled(self, index: LLTokenizer) -> LLMatcher:
        """A matcher at the beginning of a text."""
        from llguidance import LLMatcher

        # The library would put whole strings of tokens where only one text can follow, as its own tokenizer cuts it.
        matcher = LLMatcher(index, f'%llguidance {{"no_forcing": true}}\n{self.text}', log_level=0)
        if matcher.is_error():
            raise GenerationError(f"{self.what}: {_reason(matcher)}")
        return matcher


def _reason(matcher: LLMatcher) -> str:
    """The library's error in one line, without the place in its own grammar."""
    told = matcher.get_error().split("\n   1 |")[0].split("\n<state>")[0]
    if "coerce_one_of" in told:
        return (
            "oneOf is supported where no value can satisfy two of its schemas; use anyOf, or tell them apart by a const"
        )
    for place in ("failed to compile JSON schema: ", "): "):
        told = told.rpartition(place)[2] if told.startswith("at ") else told
    return " ".join(told.split())


class _Vocabulary:
    """The bytes that tokens stand for, by what comes before them, and the library's index of them."""

    PROBE = b" x"
    """A context is known by what becomes of this text in it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.vocab_size
        self._rule: Rule
        if isinstance(tokenizer, PieceTokenizer):
            known = tokenizer.specials
            never = {*known.controls.values(), *known.ends, known.unk}
            self._pieces = [None if token in never else tokenizer.piece(token) for token in range(self.size)]
            self._rule = tokenizer.rule
            self.ends = known.ends
        elif isinstance(tokenizer, ByteTokenizer):
            self._pieces = [bytes([token]) for token in range(self.size)]
            self._rule = _as_they_are
            self.ends = frozenset()
        else:
            raise GenerationError(f"constraint: cannot tell the bytes of the tokens of {type(tokenizer).__name__}")
        self._before: dict[bytes, tuple[tuple[Piece, ...], bool]] = {}
        self._indexes: dict[bytes, LLTokenizer] = {}

    def start(self, continues: bool) -> bytes:
        """The context of a text's first token."""
        return self._context((), continues)

    def after(self, token: int) -> bytes:
        """The context of what follows a token."""
        return self._context((self._pieces[token],), True)

    def written(self, token: int, context: bytes) -> bytes:
        """The bytes of a token; none if it is no text."""
        piece = self._pieces[token] if 0 <= token < self.size else None
        return b"" if piece is None else self._chunk(piece, *self._before[context])

    def spelt(self, text: bytes) -> list[int]:
        """A text as tokens of the index."""
        return [self.size + byte for byte in text]

    def index(self, context: bytes) -> LLTokenizer:
        """The library's index: the tokens, then the 256 bytes, then the end."""
        if context not in self._indexes:
            from llguidance import LLTokenizer, TokenizerWrapper

            texts = [self.written(token, context) for token in range(self.size)]
            tokens = _Tokens([*texts, *(bytes([byte]) for byte in range(256)), b"end"])
            self._indexes[context] = LLTokenizer(TokenizerWrapper(tokens))
        return self._indexes[context]

    def _context(self, before: tuple[Piece, ...], continues: bool) -> bytes:
        context = self._chunk(self.PROBE, before, continues)
        self._before.setdefault(context, (before, continues))
        return context

    def _chunk(self, piece: Piece, before: tuple[Piece, ...], continues: bool) -> bytes:
        return list(self._rule((*before, piece), continues))[-1]


class _Tokens:
    """A vocabulary as the library asks for it: bytes by id; the last one is the end, and the only control token."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("a grammar with no_forcing cuts no text")


def _as_they_are(pieces: Any, continues: bool) -> Iterator[bytes]:
    yield from pieces


_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, _Vocabulary] = weakref.WeakKeyDictionary()
"""To index a vocabulary takes as long as hundreds of masks."""


def _factory(
    source: _Source, tokenizer: Tokenizer, ends: frozenset[int] | None, vocab_size: int | None, continues: bool
) -> Factory:
    vocabulary = _VOCABULARIES.get(tokenizer) or _VOCABULARIES.setdefault(tokenizer, _Vocabulary(tokenizer))
    ends = vocabulary.ends if ends is None else ends
    width = vocabulary.size if vocab_size is None else vocab_size
    if width < vocabulary.size:
        raise GenerationError(f"vocab_size: {width}, but the tokenizer has {vocabulary.size} tokens")
    if wrong := [token for token in sorted(ends) if not 0 <= token < width]:
        raise GenerationError(f"ends: token {wrong[0]} is outside the vocabulary of {width} tokens")
    grammar = _Grammar(source, vocabulary, ends, width)
    start = vocabulary.start(continues)
    grammar.matcher(start)  # what is wrong with the grammar is told now
    return lambda: _Parse(grammar, start)


@dataclass(frozen=True)
class _Grammar:
    """A grammar over a vocabulary."""

    source: _Source
    vocabulary: _Vocabulary
    ends: frozenset[int]
    width: int
    _matchers: dict[bytes, LLMatcher] = field(default_factory=dict)

    def matcher(self, context: bytes) -> LLMatcher:
        """A matcher at the beginning of a text that tells the tokens of a context."""
        if context not in self._matchers:
            self._matchers[context] = self.source.compiled(self.vocabulary.index(context))
        return self._matchers[context].deep_copy()


class _Parse:
    """A text on its way through a grammar: a `Constraint`."""

    def __init__(self, grammar: _Grammar, context: bytes) -> None:
        self._grammar = grammar
        self._context = context
        self._text = b""
        self._ended = False
        self._matchers = {context: grammar.matcher(context)}
        self._known: Mask | None = None

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole one."""
        return self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow, or the text has ended."""
        return self._ended or (self.complete and not self._following[:-1].any())

    def allowed(self) -> Mask:
        """The tokens that may come next (V,)."""
        grammar = self._grammar
        mask = np.zeros(grammar.width, np.bool_)
        if self._ended:
            return mask
        mask[: grammar.vocabulary.size] = self._following[: grammar.vocabulary.size]
        mask[list(grammar.ends)] = self.complete
        if not mask.any() and not self.finished:
            raise GenerationError(f"constraint: no token of the vocabulary can follow {self._tail!r}")
        return mask

    def advance(self, token: int) -> None:
        """Take up the next token."""
        grammar = self._grammar
        written = b"" if token in grammar.ends else grammar.vocabulary.written(token, self._context)
        ends = token in grammar.ends and self.complete
        tokens = grammar.vocabulary.spelt(written)
        if self._ended or not (ends or (tokens and self._matcher.validate_tokens(tokens) == len(tokens))):
            raise GenerationError(f"constraint: token {token} ({written!r}) may not follow {self._tail!r}")
        self._known = None
        self._ended = ends
        if ends:
            return
        for matcher in self._matchers.values():
            matcher.consume_tokens(tokens)
            self._sound(matcher)
        self._text += written
        self._context = grammar.vocabulary.after(token)

    def fork(self) -> _Parse:
        """An independent copy."""
        copy = object.__new__(_Parse)
        copy.__dict__ |= self.__dict__
        copy._matchers = {context: matcher.deep_copy() for context, matcher in self._matchers.items()}
        return copy

    @property
    def _matcher(self) -> LLMatcher:
        """The one that knows the tokens as they are here; all have read the same text."""
        if self._context not in self._matchers:
            matcher = self._grammar.matcher(self._context)
            matcher.consume_tokens(self._grammar.vocabulary.spelt(self._text))
            self._matchers[self._context] = self._sound(matcher)
        return self._matchers[self._context]

    @property
    def _tail(self) -> str:
        return self._text[-40:].decode(errors="replace")

    @property
    def _following(self) -> Mask:
        """What the grammar lets follow: a token, a byte, or in the last place the end."""
        if self._known is None:
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._sound(self._matcher)
            size = self._grammar.vocabulary.size + 256 + 1
            self._known = np.unpackbits(packed, count=size, bitorder="little").astype(np.bool_)
        return self._known

    def _sound(self, matcher: LLMatcher) -> LLMatcher:
        """A matcher that has failed would let the text end anywhere."""
        if matcher.is_error():
            raise GenerationError(f"{self._grammar.source.what}: {_reason(matcher)} (after {self._tail!r})")
        return matcher
