"""Chats that grow: each turn's ids begin with the last turn's and the model's answer, where the template allows it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import DataError
from qkv.text.chat import apply, chat_parts, encode_chat, turn_ends
from qkv.text.conversation import Conversation
from qkv.text.folder import Settings, finish
from qkv.text.pieces import PieceTokenizer
from qkv.text.spec import added_token
from qkv.text.spec import template as around

from .files import CHATML, sentencepiece, trained_bpe

NAMES = ["<s>", "<|im_start|>", "<|im_end|>", "<|other|>"]
UNTRIMMED = CHATML.replace(" | trim", "")
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' </s>' }}{% endif %}{% endfor %}"
)
TEXTS = st.text(st.sampled_from("abc the\n ,é的😀<|im_end|>'"), max_size=12)


def chat_tokenizer(template: str = UNTRIMMED, **config: Any) -> PieceTokenizer:
    spec = json.loads(trained_bpe(NAMES).to_str())
    spec["post_processor"] = around((["<s>"], []), {"<s>": 0})
    added = {name: added_token(token, name, special=True) for token, name in enumerate(NAMES)}
    return finish(spec, Settings({"bos_token": "<s>", **config}, added, frozenset(), template), "test")


CHAT = chat_tokenizer(eos_token="<|other|>")
BOS, START, END, OTHER = (CHAT.specials.controls[name] for name in NAMES)


def answer(text: str, end: int | None = END, tokenizer: PieceTokenizer = CHAT) -> list[int]:
    """What a model might generate: not always the ids that encoding the text would give."""
    ids = [token for character in text for token in tokenizer.encode(character, add_special=False)]
    return ids if end is None else [*ids, end]


def test_a_turn_begins_with_the_turn_before_and_the_answer() -> None:
    chat = Conversation(CHAT, [{"role": "system", "content": "Be brief."}])
    first = chat.ask("Hi")
    assert first == encode_chat(CHAT, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    said = answer("Hello the there")
    assert said != [*CHAT.encode("Hello the there", add_special=False), END], "its own ids, not those of its text"
    assert chat.answered(said) == "Hello the there"
    second = chat.ask("Why?")
    assert second[: len(first) + len(said)] == [*first, *said]
    assert chat.kept == len(first) + len(said)
    assert CHAT.decode(second, keep_special=True) == "<s>" + apply(chat.messages, UNTRIMMED)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user"]


@given(turns=st.lists(st.tuples(TEXTS, TEXTS, st.sampled_from([END, OTHER, None])), min_size=1, max_size=4))
def test_whatever_is_said_the_ids_spell_the_chat(turns: list[tuple[str, str, int | None]]) -> None:
    chat = Conversation(CHAT)
    for question, said, end in turns:
        tokens = chat.ask(question)
        assert tokens[0] == BOS
        assert tokens.count(BOS) == 1
        assert CHAT.decode(tokens, keep_special=True) == "<s>" + apply(chat.messages, UNTRIMMED)
        assert tokens.count(START) == tokens.count(END) + 1 == len(chat.messages) + 1
        before = tokens
        given_ = answer(said, end)
        assert chat.answered(given_) == said
        kept = [*before, *(given_ if end in (END, None) else given_[:-1])]
        assert chat.ask("next")[: len(kept)] == kept
        assert chat.kept == len(kept)
        chat.answered(answer("so"))


def test_a_template_that_changes_the_history_is_followed() -> None:
    """It trims the answer: the ids are those of the new text, and the part that changed is read again."""
    tokenizer = chat_tokenizer(CHATML)
    chat = Conversation(tokenizer)
    first = chat.ask("Hi")
    chat.answered(answer(" Hello ", tokenizer=tokenizer))
    second = chat.ask("Why?")
    assert second == encode_chat(tokenizer, chat.messages)
    assert chat.kept < len(first) + 8
    assert second[: chat.kept] == first[: chat.kept]
    assert tokenizer.decode(second, keep_special=True) == "<s>" + apply(chat.messages, CHATML)


def test_a_border_between_two_texts_is_no_border_of_tokens() -> None:
    """No control token follows the answer: the whole chat is written anew."""
    plain = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
    tokenizer = chat_tokenizer(plain)
    chat = Conversation(tokenizer)
    chat.ask("Hi")
    chat.answered(answer("ok", None, tokenizer))
    assert chat.ask("the") == encode_chat(tokenizer, chat.messages)


def test_sentencepiece_chats_keep_their_ids_too() -> None:
    tokenizer = sentencepiece("bpe")
    closed = LLAMA_2.replace(" </s>", "</s>")
    chat = Conversation(tokenizer, template=closed, bos_token="<s>")
    first = chat.ask("the king")
    eos = tokenizer.specials.eos
    assert eos in chat.ends
    said = [*tokenizer.encode("ab", add_special=False), eos]
    assert chat.answered(said) == " ab"
    # The template puts a space of its own before the answer, so that there are two now.
    assert chat.ask("and") == encode_chat(tokenizer, chat.messages, template=closed, bos_token="<s>")
    spaceless = closed.replace("' ' + m.content", "m.content")
    chat = Conversation(tokenizer, template=spaceless, bos_token="<s>")
    first = chat.ask("the king")
    chat.answered(said)
    second = chat.ask("and")
    assert second[: len(first) + len(said)] == [*first, *said]
    assert second == encode_chat(tokenizer, chat.messages, template=spaceless, bos_token="<s>")


def test_a_message_that_is_refused_changes_nothing() -> None:
    refusing = "{% if messages | length > 1 %}{{ raise_exception('enough') }}{% endif %}" + UNTRIMMED
    chat = Conversation(chat_tokenizer(refusing))
    tokens = chat.ask("Hi")
    with pytest.raises(DataError, match="enough"):
        chat.ask("again")
    assert chat.tokens == tokens
    assert len(chat.messages) == 1


def test_a_message_may_be_of_another_role() -> None:
    chat = Conversation(CHAT)
    tokens = chat.ask({"role": "tool", "content": "7"})
    assert CHAT.decode(tokens).startswith("tool\n7")


@pytest.mark.parametrize(
    ("template", "more"),
    [
        (UNTRIMMED, {END}),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", set()),
        ("{{ raise_exception('') }}", set()),
    ],
)
def test_what_ends_an_answer(template: str, more: set[int]) -> None:
    tokenizer = chat_tokenizer(template, eos_token="<|other|>")
    assert tokenizer.specials.ends == {OTHER}
    assert turn_ends(tokenizer) == {OTHER} | more


def test_parts_are_the_text_of_a_chat() -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    parts = chat_parts(CHAT, messages)
    assert "".join(text for text, _ in parts) == apply(messages, UNTRIMMED)
    assert [text for text, control in parts if control] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
