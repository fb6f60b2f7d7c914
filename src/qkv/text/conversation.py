"""A chat that grows, turn by turn, as ids: each turn's begin with those of the turn before and the model's own answer.

    chat = Conversation(tokenizer, [{"role": "system", "content": "Be brief."}])
    tokens = chat.ask("Hi")                 what the model reads; it goes on with its answer's ids
    text = chat.answered(answer)            they are kept as they are
    tokens = chat.ask("Why?")               begins with all of the above: a cache need not read it again

A template is free to write the history of a chat otherwise than it was said (it trims answers, drops thoughts, moves
what was said). Then the whole chat is written anew, and `kept` says how many ids at the beginning are still the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qkv.text.chat import Message, chat_parts, encode_chat, turn_ends
from qkv.text.pieces import Part, PieceTokenizer


class Conversation:
    """Messages, and the ids that stand for them."""

    def __init__(
        self,
        tokenizer: PieceTokenizer,
        messages: Sequence[Message] = (),
        *,
        template: str | None = None,
        **variables: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.messages: list[Message] = list(messages)
        """Everything said so far."""
        self.tokens: list[int] = []
        """Its ids, with those that the model gave."""
        self.kept = 0
        """How many of the ids before the last question still begin `tokens`."""
        self.ends = turn_ends(tokenizer, template, **variables)
        """The tokens with which an answer is over."""
        self._how: dict[str, Any] = {"template": template, **variables}
        self._parts: list[Part] = []

    def ask(self, content: str | Message) -> list[int]:
        """The ids of the chat with one more message of the user (or a whole message), up to where the answer begins."""
        message = {"role": "user", "content": content} if isinstance(content, str) else content
        messages = [*self.messages, message]
        parts = _merged(chat_parts(self.tokenizer, messages, **self._how))
        tokens = self._continued(parts)
        if tokens is None:
            tokens = encode_chat(self.tokenizer, messages, **self._how)
        self.kept = _shared(self.tokens, tokens)
        self.messages, self.tokens, self._parts = messages, tokens, parts
        return list(tokens)

    def answered(self, tokens: Iterable[int]) -> str:
        """Add the ids that the model gave, perhaps with the one that ends its turn; the text that they say."""
        given = list(tokens)
        body = given[:-1] if given[-1:] and given[-1] in self.ends else given
        text = self.tokenizer.decode(body, continues=True)
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.tokens = [*self.tokens, *given]
        self._parts = _merged([*self._parts, *self._spelled(given)])
        return text

    def _spelled(self, tokens: Sequence[int]) -> list[Part]:
        """Generated ids as text and control tokens."""
        names = {token: name for name, token in self.tokenizer.specials.controls.items()}
        parts: list[Part] = []
        start = 0
        for at, token in enumerate([*tokens, None]):
            if token is None or token in names:
                text = self.tokenizer.decode(tokens[start:at], continues=True)
                parts += [(text, False)] if text else []
                parts += [(names[token], True)] if token is not None else []
                start = at + 1
        return parts

    def _continued(self, parts: list[Part]) -> list[int] | None:
        """The ids of the parts, if they begin with what was said; an end that the template does not write may go."""
        said, tokens = self._parts, self.tokens
        ways = [(said, tokens)]
        if tokens and tokens[-1] in self.ends and said and said[-1][1]:
            ways.append((said[:-1], tokens[:-1]))
        for before, ids in ways:
            rest = parts[len(before) :]
            # What follows text must be a control token: the border of two texts is none between tokens.
            if before and before == parts[: len(before)] and (before[-1][1] or not rest or rest[0][1]):
                # A control token decides how the text behind it is written, so that it is encoded once more with it.
                last = [before[-1]] if before[-1][1] else []
                return [*ids, *self.tokenizer.encode_parts([*last, *rest], add_special=False)[len(last) :]]
        return None


def _merged(parts: Iterable[Part]) -> list[Part]:
    """Adjoining texts as one."""
    found: list[Part] = []
    for text, control in parts:
        if found and not control and not found[-1][1]:
            found[-1] = found[-1][0] + text, False
        else:
            found.append((text, control))
    return found


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids at the beginning are the same."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
