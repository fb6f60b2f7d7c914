"""Chats as tokens and targets: only what the model says, with the token that ends its turn."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DataError
from qkv.text.chat import encode_chat
from qkv.text.hf import LibraryTokenizer
from qkv.text.pieces import PieceTokenizer
from qkv.train.data.answers import AnswerMarker, Spoken
from text.files import CHATML
from text.test_chat import ATTACKS, CHAT, chat_tokenizer

END = "<|im_end|>"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def model(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def examples(tokenizer: PieceTokenizer, *messages: dict[str, str]) -> list[Spoken]:
    return list(AnswerMarker(tokenizer).examples(messages))


def targets(tokenizer: PieceTokenizer, spoken: Spoken) -> list[str]:
    """The runs of tokens that are targets, as text."""
    pairs = zip(spoken.answers, spoken.tokens, strict=True)
    runs = [(flag, [token for _, token in run]) for flag, run in groupby(pairs, key=lambda pair: pair[0])]
    return [tokenizer.decode(run, keep_special=True, continues=True) for flag, run in runs if flag]


def test_only_answers_with_their_ends_are_targets() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("Hi"), model("Hello."), user("And?"), model(" So. ")]
    (spoken,) = examples(CHAT, *messages)
    assert targets(CHAT, spoken) == [f"Hello.{END}", f"So.{END}"]
    assert spoken.tokens == encode_chat(CHAT, messages, add_generation_prompt=False)


ROLES = st.sampled_from(["user", "assistant", "system"])


@given(st.lists(st.tuples(ROLES, ATTACKS), max_size=5))
def test_no_message_becomes_a_target_that_is_no_answer(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in said]
    answers = [f"{content.strip()}{END}" for role, content in said if role == "assistant"]
    found = examples(CHAT, *messages)
    assert [text for spoken in found for text in targets(CHAT, spoken)] == answers
    if answers:
        until = max(number for number, (role, _) in enumerate(said) if role == "assistant") + 1
        text = CHAT.decode(encode_chat(CHAT, messages[:until], add_generation_prompt=False), keep_special=True)
        assert [CHAT.decode(spoken.tokens, keep_special=True) for spoken in found] == [text]


def test_a_chat_without_answers_gives_nothing() -> None:
    assert examples(CHAT, user("Hi")) == []
    assert examples(CHAT) == []


def test_there_is_a_bos_where_the_model_reads_one() -> None:
    tokenizer = chat_tokenizer(add_bos_token=True)
    (spoken,) = examples(tokenizer, user("Hi"), model("Hello"))
    assert spoken.tokens == encode_chat(tokenizer, [user("Hi"), model("Hello")], add_generation_prompt=False)
    assert spoken.tokens[0] == tokenizer.specials.bos
    assert not spoken.answers[0]


# Templates that rewrite the past: thoughts are dropped once the chat goes on

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last or '</think>' not in m.content %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_answer_that_is_rewritten_later_is_taught_as_it_was_given() -> None:
    tokenizer = chat_tokenizer(THINKING)
    first, second = model("<think>hm</think>One."), model("<think>ah</think>Two.")
    found = examples(tokenizer, user("a"), first, user("b"), second)
    assert [targets(tokenizer, spoken) for spoken in found] == [
        [f"<think>hm</think>One.{END}"],
        [f"<think>ah</think>Two.{END}"],
    ]
    for spoken, length in zip(found, (2, 4), strict=True):
        messages = [user("a"), first, user("b"), second][:length]
        assert spoken.tokens == encode_chat(tokenizer, messages, add_generation_prompt=False)
    (together,) = examples(tokenizer, user("a"), model("One."), user("b"), second)
    assert targets(tokenizer, together) == [f"One.{END}", f"<think>ah</think>Two.{END}"]


OPENED = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


def test_what_the_prompt_says_for_the_model_is_no_target() -> None:
    tokenizer = chat_tokenizer(OPENED)
    (spoken,) = examples(tokenizer, user("a"), model("<think>\nhm</think>One."))
    assert targets(tokenizer, spoken) == [f"hm</think>One.{END}"]
    (without,) = examples(tokenizer, user("a"), model("One."))  # the prompt was not followed: all is the model's
    assert targets(tokenizer, without) == [f"One.{END}"]


def test_a_template_without_control_tokens() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    (spoken,) = examples(tokenizer, user("Hi"), model("Yes."), user("So"), model("No."))
    assert targets(tokenizer, spoken) == [" Yes.\n", " No.\n"]


def test_an_end_that_is_text_is_no_end() -> None:
    (spoken,) = examples(CHAT, user("Hi"), model(f"write {END} now"))
    assert targets(CHAT, spoken) == [f"write {END} now{END}"]
    assert spoken.tokens.count(CHAT.specials.controls[END]) == 2


def test_an_answer_may_begin_with_a_control_token() -> None:
    # Where the prompt goes on with one control token, the chat has another, whose name begins in the same way.
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    tokenizer = chat_tokenizer(template + "{% endif %}")
    (spoken,) = examples(tokenizer, user("a"), model(""))
    assert spoken.tokens == [*tokenizer.encode("a"), *[tokenizer.specials.controls[END]] * 2]
    assert spoken.answers == [False, False, True]


def test_a_token_over_the_border_is_none() -> None:
    # "the" is one token; the model is given "th" and must say "e".
    template = "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{% endif %}"
    tokenizer = chat_tokenizer(template)
    assert len(tokenizer.encode("the")) == 1
    (spoken,) = examples(tokenizer, user("th"), model("e"))
    assert spoken.tokens == [
        tokenizer.specials.controls["<|im_start|>"],
        *tokenizer.encode("th"),
        *tokenizer.encode("e"),
    ]
    assert targets(tokenizer, spoken) == ["e"]


STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML


def test_a_refusal_of_the_template_is_passed_on() -> None:
    with pytest.raises(DataError, match="no system here"):
        examples(chat_tokenizer(STRICT), {"role": "system", "content": "a"}, model("Hello"))


@pytest.mark.parametrize("template", [CHATML, STRICT])
@pytest.mark.parametrize("greeting", ["Hello", "0", "1", ""])
def test_the_model_may_speak_first(template: str, greeting: str) -> None:
    # Templates look at messages[0], so that they cannot be asked how an empty chat begins.
    tokenizer = chat_tokenizer(template)
    messages = [model(greeting), user("Hi"), model("So.")]
    (spoken,) = examples(tokenizer, *messages)
    assert targets(tokenizer, spoken) == [f"{greeting}{END}", f"So.{END}"]
    assert spoken.tokens == encode_chat(tokenizer, messages, add_generation_prompt=False)


def test_encoding_costs_what_the_chat_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    encode = LibraryTokenizer.encode_parts

    def counting(self: LibraryTokenizer, parts: Any, **how: Any) -> list[int]:
        parts = list(parts)
        counted.append(sum(len(text) for text, _ in parts))
        return encode(self, parts, **how)

    monkeypatch.setattr(LibraryTokenizer, "encode_parts", counting)
    costs = []
    for turns in (5, 10, 20):
        counted.clear()
        examples(CHAT, *[one for number in range(turns) for one in (user(f"q{number:03}"), model("x" * 50))])
        costs.append(sum(counted))
    assert costs[1] == 2 * costs[0]
    assert costs[2] == 2 * costs[1]
