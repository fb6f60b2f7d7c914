"""Chats as a model was trained to read them: a list of messages becomes text by the Jinja template of its files.

    [{"role": "user", "content": "Hi"}]  ->  <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n

Templates come with a download, so they run in Jinja's immutable sandbox: no attribute beginning with an underscore, no
files, no changes to what they are given. What a message says stays text: if it spells a control token, it is set apart
before the template sees it, and only the control tokens that the template itself writes count (`encode_chat`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qkv.errors import CheckpointError, DataError
from qkv.text.pieces import Part, PieceTokenizer

Message = Mapping[str, Any]

# Noncharacters, which no text may hold: a control token's name in a message stands between the first two; the third
# keeps the end of one text from completing a name with the start of the next.
_OPEN, _CLOSE, _APART = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}{_APART}]")


class _RefusalError(TemplateError):
    """The template itself refuses the messages."""


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training; the text is the same."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **separators: Any) -> str:
    # Jinja's own escapes < and > for web pages.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **separators)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


@lru_cache(maxsize=32)
def _compiled_template(template: str) -> Template:
    return _environment().from_string(template)


def apply(messages: Sequence[Message], template: str, *, add_generation_prompt: bool = True, **variables: Any) -> str:
    """The text of a chat.

    variables: what else the template may read: `bos_token`, `tools`, `enable_thinking` ...
    add_generation_prompt: end with the start of the model's answer.
    """
    try:
        return _compiled_template(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )  # fmt: skip
    except _RefusalError as error:
        raise DataError(f"chat template refuses these messages: {_line(error)}") from None
    except TemplateError as error:
        raise CheckpointError(f"chat template cannot be applied: {_line(error)}") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise DataError(f"chat template cannot be applied to these messages: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def encode_chat(
    tokenizer: PieceTokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """The ids of a chat, with one BOS if the tokenizer's file wants one and no EOS behind it."""
    given: dict[str, Any] = {"template": template, "add_generation_prompt": add_generation_prompt, **variables}
    tokens = tokenizer.encode_parts(chat_parts(tokenizer, messages, **given), add_special=False)
    bos = tokenizer.specials.bos
    wants_bos = bos is not None and bos in tokenizer.around[0]
    return [bos, *tokens] if wants_bos and bos is not None and tokens[:1] != [bos] else tokens


def chat_parts(
    tokenizer: PieceTokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[Part]:
    """What the template makes of a chat: control tokens, which it alone can write, and the text between them."""
    template = template or tokenizer.specials.chat_template
    if template is None:
        raise CheckpointError("this model has no chat template; give one, or use generate with a plain prompt")
    names = sorted(tokenizer.specials.controls, key=len, reverse=True)
    given = {"messages": list(messages), **variables}
    safe = {key: _set_apart(value, names) for key, value in given.items()}
    text = apply(
        template=template, add_generation_prompt=add_generation_prompt, **{**tokenizer.specials.names(), **safe}
    )
    return _parts(text, names)


def turn_ends(tokenizer: PieceTokenizer, template: str | None = None, **variables: Any) -> frozenset[int]:
    """The tokens that end an answer: those that end any text, and what the template writes behind an answer.

    Files do not always name the latter among the former: a base model's EOS is not the `<|im_end|>` of its chats.
    """
    messages = [{"role": "user", "content": "A"}, {"role": "assistant", "content": _ANSWER}]
    given: dict[str, Any] = {"template": template, "add_generation_prompt": False, **variables}
    try:
        parts = chat_parts(tokenizer, messages, **given)
    except DataError:  # it wants other messages than these
        return tokenizer.specials.ends
    said = next((at for at, (text, control) in enumerate(parts) if not control and _ANSWER in text), len(parts))
    behind = [tokenizer.specials.controls[text] for text, control in parts[said:] if control]
    return tokenizer.specials.ends | frozenset(behind[:1])


_ANSWER = "an answer"


def _set_apart(value: Any, names: Sequence[str]) -> Any:
    """The value with every control token's name in it between marks."""
    if isinstance(value, str):
        if _MARKS.search(value):
            raise DataError("a message holds U+FDD0, U+FDD1 or U+FDD2, which are no characters; remove them")
        return _apart_at_end(_alternatives(names).sub(rf"{_OPEN}\g<0>{_CLOSE}", value), names)
    if isinstance(value, Mapping):
        return {key: _set_apart(inner, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_set_apart(inner, names) for inner in value]
    return value


def _apart_at_end(text: str, names: Sequence[str]) -> str:
    """A mark behind a text that ends as the name of a control token begins; templates may strip spaces off it."""
    bare, begins = text.rstrip(), _beginnings(tuple(names))
    longest = max(map(len, begins), default=0)
    if begins.isdisjoint(bare[-length:] for length in range(1, 1 + min(longest, len(bare)))):
        return text
    return f"{bare}{_APART}{text[len(bare) :]}"


@lru_cache(maxsize=8)
def _beginnings(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name[:length] for name in names for length in range(1, len(name)))


def _parts(text: str, names: Sequence[str]) -> list[Part]:
    """The control tokens that the template wrote, and the text between them without our marks."""
    either = re.compile(f"{_OPEN}.*?{_CLOSE}|{_alternatives(names).pattern}", re.DOTALL)
    parts, at = [], 0
    for match in either.finditer(text):
        if not match[0].startswith(_OPEN):
            parts += [(text[at : match.start()], False), (match[0], True)]
            at = match.end()
    parts.append((text[at:], False))
    return [(part, True) if control else (_MARKS.sub("", part), False) for part, control in parts if part]


@lru_cache(maxsize=8)
def _compiled(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)) if names else "(?!)")


def _alternatives(names: Sequence[str]) -> re.Pattern[str]:
    return _compiled(tuple(names))
