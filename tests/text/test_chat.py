"""Chats: templates in a sandbox, and messages that stay text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import CheckpointError, DataError
from qkv.text.chat import apply, encode_chat
from qkv.text.folder import Settings, finish
from qkv.text.pieces import PieceTokenizer
from qkv.text.spec import added_token

from .files import CHATML, sentencepiece, trained_bpe

NAMES = ["<s>", "<|im_start|>", "<|im_end|>"]


def chat_tokenizer(template: str | None = CHATML, **config: Any) -> PieceTokenizer:
    spec = json.loads(trained_bpe(NAMES).to_str())
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", **config}
    added = {name: added_token(token, name, special=True) for token, name in enumerate(NAMES)}
    return finish(spec, Settings(config, added, frozenset(), template), "test")


CHAT = chat_tokenizer()
BOS, START, END = (CHAT.specials.controls[name] for name in NAMES)


def test_a_chat_is_written_as_the_template_says() -> None:
    text = apply([{"role": "user", "content": " Hi "}], CHATML)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert apply([], CHATML, add_generation_prompt=False) == ""


def test_ids_of_a_chat_are_those_of_its_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokens = encode_chat(CHAT, messages)
    assert tokens == CHAT.encode(apply(messages, CHATML), add_special=False, parse_special=True)
    assert CHAT.decode(tokens, keep_special=True) == apply(messages, CHATML)
    assert [token for token in tokens if token in (BOS, START, END)] == [START, END, START, END, START]


ATTACKS = st.lists(st.sampled_from([*NAMES, "<|im_", "start|>", "end|>", "<", "|>", " ", "\n", "x", "s>"])).map("".join)


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), ATTACKS), max_size=3))
def test_no_message_writes_a_control_token(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in said]
    tokens = encode_chat(CHAT, messages)
    controls = [token for token in tokens if token in (BOS, START, END)]
    assert controls == [START, END] * len(messages) + [START]
    assert CHAT.decode(tokens, keep_special=True) == apply(messages, CHATML)


@pytest.mark.parametrize("first", ["<|im_", "<|im_   ", "<"])
def test_two_texts_do_not_complete_a_name(first: str) -> None:
    template = "{% for part in messages[0].content %}{{ part.text | trim }}{% endfor %}"
    rest = "<|im_end|>"[len(first.strip()) :]
    messages = [{"role": "user", "content": [{"type": "text", "text": first}, {"type": "text", "text": rest}]}]
    assert apply(messages, template) == "<|im_end|>"
    tokens = encode_chat(CHAT, messages, template=template)
    assert END not in tokens
    assert CHAT.decode(tokens) == "<|im_end|>"


def test_what_else_a_template_reads_stays_text_too() -> None:
    tokens = encode_chat(CHAT, [], template="{{ bos_token }}{{ tools | tojson }}", tools=[{"name": "<|im_end|>"}])
    assert tokens[0] == BOS
    assert END not in tokens
    assert CHAT.decode(tokens) == '[{"name": "<|im_end|>"}]'


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_there_is_exactly_one_bos(template: str) -> None:
    tokenizer = chat_tokenizer(template, add_bos_token=True)
    tokens = encode_chat(tokenizer, [{"role": "user", "content": "Hi <s>"}])
    assert tokens[0] == BOS
    assert tokens.count(BOS) == 1
    assert tokens[-1] != END


def test_sentencepiece_vocabularies_chat_too() -> None:
    tokenizer = sentencepiece("bpe")
    template = "{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}"
    tokens = encode_chat(tokenizer, [{"role": "user", "content": "a</s>b"}], template=template)
    assert [token for token in tokens if token in (1, 2)] == [1, 2]
    assert tokenizer.decode(tokens) == "a</s>b"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("    {% if true %}\nx{% endif %}\n", "x"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_have_what_those_of_published_models_use(template: str, expected: str) -> None:
    assert apply([], template) == expected


@pytest.mark.parametrize(
    ("template", "error", "problem"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", DataError, "refuses these messages: roles must alternate"),
        ("{% for %}", CheckpointError, "cannot be applied"),
        ("{{ nothing.at.all }}", CheckpointError, "'nothing' is undefined"),
        ("{{ messages.append(1) }}", CheckpointError, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", CheckpointError, "unsafe"),
        ("{{ messages[0].content + 1 }}", DataError, "cannot be applied to these messages"),
        ("{% include 'secret' %}", DataError, "no loader"),
        ("{{ range(10**9) | list }}", DataError, "[Rr]ange too big"),
    ],
)
def test_errors_are_one_line(template: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem) as caught:
        apply([{"role": "user", "content": "x"}], template)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        encode_chat(chat_tokenizer(None), [{"role": "user", "content": "Hi"}])


def test_our_marks_are_refused_in_messages() -> None:
    with pytest.raises(DataError, match=r"U\+FDD0"):
        encode_chat(CHAT, [{"role": "user", "content": "\ufdd0<|im_end|>\ufdd1"}])
