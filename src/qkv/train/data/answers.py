"""A chat as tokens, and which of them the model says itself: the targets of finetuning on answers.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
                                                          ^^^^^^^^^^^^^^^^

An answer begins where the chat up to the question, ended with the start of an answer, parts from the chat with the
answer in it; it ends with the last token of those that end a turn. Both texts are the template's own, so that no name
of a model and no marker stands here. The header is encoded without its answer, as it is when the model is asked.

A template may write an answer otherwise once the chat has gone on (without its thoughts, say). What the model read when
it gave that answer is then no beginning of the whole chat, and the answer is taught in an example of its own:
`examples` gives several, in each of which the answers stand as they were given. What is said after the last answer is
left out: there is nothing in it to learn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from qkv.text.chat import Message, chat_parts, turn_ends
from qkv.text.pieces import Part, PieceTokenizer

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around a control token's name while a chat is one string: noncharacters, which `chat` lets no message hold."""
_CONTROL = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


@dataclass(frozen=True)
class Spoken:
    """The tokens of a chat, and for each whether the model says it."""

    tokens: list[int]
    answers: list[bool]


class AnswerMarker:
    """Makes examples of chats with one tokenizer and its template."""

    def __init__(self, tokenizer: PieceTokenizer, role: str = "assistant") -> None:
        self.tokenizer, self.role = tokenizer, role
        names = {token: text for text, token in tokenizer.specials.controls.items()}
        ends = [names[token] for token in turn_ends(tokenizer) if token in names]
        self._end = re.compile("|".join(re.escape(f"{_OPEN}{name}{_CLOSE}") for name in ends) or "(?!)")

    def examples(self, messages: Sequence[Message]) -> Iterator[Spoken]:
        """The chat, with its answers; more than one where the template rewrites what was said. None without answers."""
        text, spans = "", list[tuple[int, int]]()
        for said, start, stop in self._turns(messages):
            taught = spans[-1][1] if spans else 0
            if start < taught or not said.startswith(text[:taught]):
                yield self._spoken(text, spans)
                spans = []
            text = said
            spans.append((start, stop))
        if spans:
            yield self._spoken(text, spans)

    def _turns(self, messages: Sequence[Message]) -> Iterator[tuple[str, int, int]]:
        """For each answer: the chat that ends with it, and where in that the answer begins and ends."""
        for number, message in enumerate(messages):
            if message["role"] != self.role:
                continue
            said = self._written(messages[: number + 1], add_generation_prompt=False)
            if number == 0:
                start = self._header(message)
            else:
                start = _shared(self._written(messages[:number], add_generation_prompt=True), said)
            ends = [match.end() for match in self._end.finditer(said, start)]
            yield said, start, ends[-1] if ends else len(said)

    def _header(self, message: Message) -> int:
        """How much stands before the answer in a chat that begins with one; few templates can write an empty chat."""
        two = ({**message, "content": content} for content in ("0", "1"))
        return _shared(*(self._written([one], add_generation_prompt=False) for one in two))

    def _written(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        parts = chat_parts(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)
        return "".join(f"{_OPEN}{text}{_CLOSE}" if control else text for text, control in parts)

    def _spoken(self, text: str, spans: Sequence[tuple[int, int]]) -> Spoken:
        """Tokens piece by piece: between two control tokens nothing is joined with what is outside."""
        borders = sorted({0, len(text), *(border for span in spans for border in span)})
        starts = {start for start, _ in spans}
        tokens, answers = list[int](), list[bool]()
        control: list[Part] = []
        said, ids = "", list[int]()  # what has been encoded behind that control token
        inside = False
        for left, right in pairwise(borders):
            inside = left in starts
            for part in _parts(text[left:right]):
                if part[1]:
                    new = [self.tokenizer.specials.controls[part[0]]]
                    control, said, ids = [part], "", []
                else:
                    said, ids, new = self._continued(control, said, ids, part[0])
                tokens += new
                answers += [inside] * len(new)
        bos = self.tokenizer.specials.bos
        if bos is not None and bos in self.tokenizer.around[0] and tokens[:1] != [bos]:
            tokens, answers = [bos, *tokens], [False, *answers]
        return Spoken(tokens, answers)

    def _continued(self, control: list[Part], said: str, ids: list[int], more: str) -> tuple[str, list[int], list[int]]:
        """The text and ids behind a control token with more text, and the ids that this adds."""
        parts = [*control, (said + more, False)]
        joint = self.tokenizer.encode_parts(parts, add_special=False)[len(control) :]
        if joint[: len(ids)] == ids:
            return said + more, joint, joint[len(ids) :]
        # The border would vanish inside a token, which the model can never say: it reads the first part whole.
        added = self.tokenizer.encode_parts([(more, False)], add_special=False)
        return said + more, [*ids, *added], added


def _parts(text: str) -> list[Part]:
    """Control tokens and the texts between them."""
    return [(part, at % 2 == 1) for at, part in enumerate(_CONTROL.split(text)) if part]


def _shared(one: str, other: str) -> int:
    """How many characters at the beginning are the same, no control token cut in two."""
    length = len(one)
    if not other.startswith(one):
        length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), length)
        length = min(length, len(other))
    opened = one.rfind(_OPEN, 0, length)
    return opened if opened > one.rfind(_CLOSE, 0, length) else length
