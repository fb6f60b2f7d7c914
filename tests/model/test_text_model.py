"""Text to text: what `TextModel` adds to generation. The parts have tests of their own in tests/generation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import qkv
from qkv.errors import GenerationError
from qkv.generate import json_schema
from qkv.text import ByteTokenizer
from qkv.text.training import train_bpe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_model(**changes: object) -> qkv.TextModel:
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256, "max_seq_len": 256, **changes})
    return qkv.TextModel(qkv.build(config, seed=3), ByteTokenizer())


@pytest.fixture(scope="module")
def lm() -> qkv.TextModel:
    return byte_model()


@pytest.fixture(scope="module")
def talker() -> qkv.TextModel:
    words = train_bpe(["hello there, how are you?"], 280, controls=("<|im_end|>", "<|im_start|>"))
    words.specials = replace(words.specials, chat_template=CHATML)
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": words.vocab_size, "max_seq_len": 256})
    return qkv.TextModel(qkv.build(config, seed=3), words)


def test_a_list_gives_what_each_prompt_gives_alone(lm: qkv.TextModel) -> None:
    prompts = ["a", "a longer prompt", "and one of middle size"]
    for decoding in (qkv.Greedy(), qkv.Sampling(temperature=0.9, top_p=0.8, seed=4)):
        together = lm.generate(prompts, 12, decoding=decoding)
        assert together == [lm.generate(prompt, 12, decoding=decoding) for prompt in prompts]


def test_samples_begin_with_that_of_generate_and_differ(lm: qkv.TextModel) -> None:
    decoding = qkv.Sampling(seed=2)
    drawn = lm.samples("one", 4, 16, decoding=decoding)
    assert drawn[0] == lm.generate("one", 16, decoding=decoding)
    assert len({tuple(one.tokens) for one in drawn}) == 4
    assert lm.usage.prompt_tokens == 3  # read once for all, and once again by generate


def test_the_stream_is_the_text(lm: qkv.TextModel) -> None:
    decoding = qkv.Sampling(seed=1)
    assert "".join(lm.stream("x", 30, decoding=decoding)) == lm.generate("x", 30, decoding=decoding).text


def test_generate_with_beams_gives_the_best(lm: qkv.TextModel) -> None:
    beam = qkv.Beam(width=3)
    found = lm.beams("ab", beam, 6)
    assert [one.score for _, one in found] == sorted((one.score for _, one in found), reverse=True)
    best = lm.generate("ab", 6, decoding=beam)
    assert (best.text, best.tokens) == (found[0][0], list(found[0][1].tokens))
    with pytest.raises(GenerationError, match="Beam takes no stop strings and no draft"):
        lm.generate("ab", 6, decoding=beam, draft="lookup")


def test_drafts_change_no_greedy_token(lm: qkv.TextModel) -> None:
    plain = lm.generate("abcabcabc", 24, decoding=qkv.Greedy())
    smaller = byte_model(**{"decoder.n_layers": 1})
    for draft in ("lookup", smaller, lm):
        assert lm.generate("abcabcabc", 24, decoding=qkv.Greedy(), draft=draft) == plain
    with pytest.raises(GenerationError, match="choose a model with the same tokenizer"):
        lm.generate("a", 2, draft=byte_model(vocab_size=300))
    with pytest.raises(GenerationError, match='choose "lookup"'):
        lm.generate("a", 2, draft="guess")  # type: ignore[call-overload]


def test_a_kept_prefix_gives_the_same_and_reads_less() -> None:
    fresh, keeping = byte_model(), byte_model()
    keeping.runtime = qkv.Runtime(prefix_bytes=1 << 24)
    for prompt in ("the same beginning, one", "the same beginning, two", "the same beginning, one"):
        assert keeping.generate(prompt, 8) == fresh.generate(prompt, 8)
    assert keeping.usage.reused_tokens == len("the same beginning, one")
    keeping.runtime = qkv.Runtime(codec="int8", prefix_bytes=1 << 24)
    assert keeping.generate("the same beginning, one", 8).tokens
    assert keeping.usage.reused_tokens == 0  # another runtime begins anew


def test_a_chat_is_the_written_conversation(talker: qkv.TextModel) -> None:
    messages = [{"role": "user", "content": "hello <|im_end|> there"}]
    said = talker.chat(messages, 12, decoding=qkv.Greedy())
    assert said.text == "".join(talker.stream_chat(messages, 12, decoding=qkv.Greedy()))
    tokenizer = talker.tokenizer
    assert tokenizer is not None
    control = tokenizer.specials.controls["<|im_end|>"]  # type: ignore[attr-defined]
    read, _ = talker._spoken(messages)
    assert read.count(control) == 1  # what the user wrote is text
    with pytest.raises(GenerationError, match="no control tokens"):
        byte_model().chat(messages)


def test_stops_and_constraints(talker: qkv.TextModel) -> None:
    lm = byte_model()
    text = lm.generate("q", 40, decoding=qkv.Sampling(seed=5)).text
    stop = text[10:12]
    assert lm.generate("q", 40, decoding=qkv.Sampling(seed=5), stop=stop).text == text[: text.index(stop)]
    kept = lm.generate("q", 40, decoding=qkv.Sampling(seed=5), stop=stop, include_stop=True)
    assert kept.text == text[: text.index(stop) + 2]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 5}}, "required": ["n"]}
    assert talker.tokenizer is not None
    made = talker.generate("x", 60, constraint=json_schema(schema | {"additionalProperties": False}, talker.tokenizer))
    assert json.loads(made.text)["n"] in range(1, 6)


def test_token_log_probabilities_are_the_models(lm: qkv.TextModel) -> None:
    done = lm.generate("abc", 5, decoding=qkv.Greedy())
    text = b"abc" + bytes(done.tokens)
    logits = lm._forward([list(text)]).logits
    assert logits is not None
    wanted = logits[0, 2:-1].log_softmax(-1).gather(-1, logits.new_tensor(done.tokens).long()[:, None])[:, 0]
    assert np.allclose(done.logprobs, wanted.numpy(), atol=1e-5)
