"""Perplexity by every protocol: equal to one token at a time, each token once, each byte once, and named."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qkv
from qkv.errors import DataError
from qkv.evaluate import Perplexity, Protocol, disjoint_windows, perplexity_of
from qkv.evaluate.perplexity import byte_ends, default_context, encoded
from qkv.model import Runtime
from qkv.text import ByteTokenizer

from .small import TEXT, led, of_bytes, of_pieces, opinionated

CONTEXT = 10
PROTOCOLS = [
    Protocol("disjoint", CONTEXT),
    Protocol("sliding", CONTEXT, 1),
    Protocol("sliding", CONTEXT, 4),
    Protocol("sliding", CONTEXT, CONTEXT),
    Protocol("half", CONTEXT),
    Protocol("half", CONTEXT + 1),
    Protocol("memory"),
    Protocol("disjoint", CONTEXT, skip=17),
    Protocol("sliding", CONTEXT, 3, skip=17),
    Protocol("memory", skip=17),
]
MODELS = {"bytes": of_bytes(), "pieces": of_pieces()}


def first_read(rule: Protocol, i: int, led: int) -> int | None:
    """Where the text that is read before token i begins, told by i alone; None if i does not count."""
    size = rule.context - led
    if i < (rule.skip or (0 if led else 1)):
        return None
    if rule.kind == "memory":
        return 0
    if rule.kind == "half":
        window, place = divmod(i + led, rule.context)
        return window * rule.context if place > rule.context // 2 else None
    stride = min(rule.step, size)
    begin = rule.skip if rule.skip > size else size + 1  # of the second window, or of the first that counts
    if i < begin:
        return 0
    window = (i - begin) // stride
    return max(0, begin + (window + 1) * stride - 1 - size)


def slow(lm: qkv.TextModel, text: str, rule: Protocol) -> list[float]:
    """-log p of every token that counts, each by a forward of its own."""
    assert lm.tokenizer is not None
    lead, tokens = encoded(lm.tokenizer, text)
    whole = (len(tokens) + len(lead)) // rule.context * rule.context - len(lead) if rule.kind == "half" else len(tokens)
    costs = []
    for i, token in enumerate(tokens[:whole]):
        start = first_read(rule, i, len(lead))
        if start is not None:
            with torch.no_grad():
                logits = lm.model(torch.tensor([[*lead, *tokens[start:i]]])).logits
            costs.append(-float(logits[0, -1].log_softmax(-1)[token]))
    return costs


@pytest.mark.parametrize("rule", PROTOCOLS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_one_token_at_a_time(name: str, rule: Protocol) -> None:
    lm, text = MODELS[name], TEXT[:64]
    costs = slow(lm, text, rule)
    found = perplexity_of(lm, [text], rule)
    assert found.tokens == len(costs) > 0
    assert found.nats == pytest.approx(sum(costs), rel=1e-5)
    assert str(rule) in found.protocol


def test_what_a_token_may_look_at_decides_the_figure() -> None:
    """The oracle would see a wrong window: no two protocols give the same figure."""
    figures = {str(rule): perplexity_of(MODELS["bytes"], [TEXT], rule).loss for rule in PROTOCOLS}
    same = [str(PROTOCOLS[0]), str(PROTOCOLS[3])]
    assert figures.pop(same[0]) == figures[same[1]]
    assert len({round(value, 5) for value in figures.values()}) == len(figures)


@given(n=st.integers(0, 70), context=st.integers(3, 12), data=st.data(), led=st.integers(0, 1))
def test_every_token_counts_once(n: int, context: int, data: st.DataObject, led: int) -> None:
    stride = data.draw(st.integers(1, context))
    text, lead = list(range(n)), [-1] * led
    for rule in (Protocol("disjoint", context), Protocol("sliding", context, stride)):
        counted: list[int] = []
        for begin, window in rule.windows(text, lead):
            assert len(window.read) <= context
            assert list(window.targets) == text[begin : begin + len(window.targets)]
            assert window.read[: len(lead)] == lead
            before = list(window.read)[len(lead) :]
            assert before == text[window.targets[-1] - len(before) : window.targets[-1]]
            if begin > context:
                assert len(window.read) - len(window.targets) + 1 >= context - rule.step
            counted += window.targets
        assert counted == text[1 - led :]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(2, 9))
def test_sliding_by_a_whole_window_is_disjoint(lengths: Sequence[int], context: int) -> None:
    for n in lengths:
        one, other = (Protocol("sliding", context, context), Protocol("disjoint", context))
        assert list(one.windows(range(n))) == list(other.windows(range(n)))


def test_longer_contexts_are_asked_for_the_same_tokens() -> None:
    for context in (8, 16, 32):
        windows = list(Protocol("sliding", context, 8, skip=32).windows(range(100)))
        assert [token for _, window in windows for token in window.targets] == list(range(32, 100))
        assert [window.read[0] for _, window in windows] == [begin + 8 - 1 - context for begin, _ in windows]


def test_texts_are_apart_from_each_other() -> None:
    lm, texts = MODELS["pieces"], [TEXT[:20], "", TEXT[20:60], "a"]
    rule = Protocol("disjoint", CONTEXT)
    alone = [perplexity_of(lm, [text], rule) for text in texts if text]
    together = perplexity_of(lm, texts, rule)
    assert together.nats == pytest.approx(sum(one.nats for one in alone), rel=1e-6)
    assert together.tokens == sum(one.tokens for one in alone)
    assert together.bytes == len("".join(texts).encode())
    assert together.texts == 4
    assert together.words == sum(len(text.split()) for text in texts)


def test_bytes_are_those_of_the_tokens_that_count() -> None:
    assert perplexity_of(MODELS["bytes"], [TEXT]).bytes == len(TEXT.encode()) - 1
    for rule in PROTOCOLS:
        found = perplexity_of(MODELS["bytes"], [TEXT], rule)
        assert found.bytes == found.tokens
        assert found.bits_per_byte == found.bits_per_token
    whole = perplexity_of(MODELS["pieces"], [TEXT])
    assert whole.bytes == len(TEXT.encode())
    assert whole.tokens < whole.bytes
    assert whole.bits_per_byte == pytest.approx(whole.nats / math.log(2) / whole.bytes)
    assert whole.word_perplexity == pytest.approx(math.exp(whole.nats / len(TEXT.split())))


def test_the_bytes_of_a_character_count_with_its_last_token() -> None:
    tokenizer = led()
    tokens = tokenizer.encode("a 東b", add_special=False)
    ends = byte_ends(tokenizer, tokens)
    assert ends[-1] == 6
    assert ends == sorted(ends)
    assert 2 + 3 in ends
    assert not {3, 4} & set(ends)
    assert byte_ends(ByteTokenizer(), [1, 2, 3]) == [1, 2, 3]
    assert byte_ends(tokenizer, []) == []


def test_a_limit_reads_no_more() -> None:
    lm = MODELS["bytes"]
    found = perplexity_of(lm, [TEXT, TEXT], Protocol("memory"), limit=30)
    assert (found.tokens, found.bytes, found.texts, found.words) == (29, 29, 1, None)
    assert found.nats == pytest.approx(sum(slow(lm, TEXT, Protocol("memory"))[:29]), rel=1e-5)
    assert perplexity_of(lm, ["abcd", "efgh"], limit=8).words == 2
    assert perplexity_of(lm, ["abcd", "efgh", "i"], limit=8).words is None


def test_a_windowed_model_reads_any_length_through_its_cache() -> None:
    config = qkv.preset("mistral-7b").toy().override({"vocab_size": 256})
    lm = qkv.TextModel(opinionated(config), ByteTokenizer())
    found = perplexity_of(lm, [TEXT[:40]], Protocol("memory"))
    assert found.nats == pytest.approx(sum(slow(lm, TEXT[:40], Protocol("memory"))), rel=1e-5)


def test_padding_between_texts_of_unlike_length_changes_nothing() -> None:
    lm = MODELS["bytes"]
    texts = [TEXT[:n] for n in (40, 3, 17, 2, 33)]
    together = perplexity_of(lm, texts, Protocol("disjoint", 64))
    assert together.nats == pytest.approx(sum(perplexity_of(lm, [text]).nats for text in texts), rel=1e-6)


def test_progress_ends_at_the_number_of_tokens() -> None:
    said: list[int] = []
    found = perplexity_of(MODELS["bytes"], [TEXT] * 3, Protocol("disjoint", 16), progress=said.append)
    assert said == sorted(said)
    assert said[-1] == found.tokens
    assert len(said) > 3


def test_the_default_is_the_trained_context() -> None:
    assert default_context(MODELS["bytes"].model) == 64
    assert perplexity_of(MODELS["bytes"], [TEXT]).protocol == "disjoint windows of 64 tokens"
    assert perplexity_of(MODELS["pieces"], [TEXT]).protocol.endswith("each behind 1 of the tokenizer's tokens")


# Bugs of other implementations


def test_b126_the_protocol_is_named_and_llama_cpps_can_be_asked_for() -> None:
    """Windows of n: llama.cpp scores places n/2 to n - 2, so n - 1 - n/2 tokens, and drops what is incomplete."""
    for n in (8, 9):
        text = list(range(3 * n + n - 1))
        windows = list(Protocol("half", n).windows(text))
        assert [list(window.targets) for _, window in windows] == [
            text[k * n + n // 2 + 1 : (k + 1) * n] for k in range(3)
        ]
        assert [list(window.read) for _, window in windows] == [text[k * n : (k + 1) * n - 1] for k in range(3)]
        # Its first token gives way to BOS in every window.
        led = [window.read for _, window in Protocol("half", n).windows(text[1:], [99])]
        assert led == [[99, *text[k * n + 1 : (k + 1) * n - 1]] for k in range(3)]
    found = perplexity_of(MODELS["bytes"], [TEXT], Protocol("half", 16))
    assert found.protocol == "second halves of windows of 16 tokens (llama.cpp)"
    assert len({str(rule) for rule in PROTOCOLS}) == len(PROTOCOLS)


def test_b128_perplexity_is_exp_of_the_loss_and_both_are_shifted() -> None:
    lm = MODELS["bytes"]
    tokens = torch.tensor(ByteTokenizer().encode(TEXT))[:60]
    with torch.no_grad():
        logits = lm.model(tokens[None]).logits[0].log_softmax(-1)
    shifted = -logits[:-1].gather(1, tokens[1:, None]).mean()
    unshifted = -logits.gather(1, tokens[:, None]).mean()
    found = perplexity_of(lm, [bytes(tokens.tolist()).decode()], Protocol("disjoint", 64))
    assert found.loss == pytest.approx(float(shifted), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss), rel=1e-12)
    assert abs(float(unshifted) - found.loss) > 0.1
    assert found.loss == pytest.approx(disjoint_windows(lm.model, tokens, 64).loss, rel=1e-6)
    assert found.loss == pytest.approx(lm.score(bytes(tokens.tolist()).decode()), rel=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "rolling"}, "protocol: 'rolling': choose one of disjoint, sliding, half, memory"),
        ({"context": 1}, "context: must be 2 or more, got 1"),
        ({"stride": 4}, "stride: protocol 'disjoint' has none"),
        ({"kind": "sliding", "context": 8, "stride": 9}, r"stride: must be 1 to context \(8\), got 9"),
        ({"kind": "sliding", "context": 8, "stride": 0}, "stride: must be 1"),
        ({"kind": "half", "skip": 3}, "skip: must be 0 or more, and 0 for half"),
    ],
)
def test_impossible_protocols(settings: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Protocol(**settings)


def test_what_cannot_be_measured_is_refused_by_name() -> None:
    lm = MODELS["bytes"]
    with pytest.raises(DataError, match="nothing to predict: no text has more than 1 tokens"):
        perplexity_of(lm, ["a", ""])
    with pytest.raises(DataError, match="no text has a whole window of 512 tokens"):
        perplexity_of(lm, [TEXT], Protocol("half", 512))
    with pytest.raises(DataError, match="saved without one"):
        perplexity_of(qkv.TextModel(lm.model), [TEXT])
    bert = qkv.TextModel(qkv.build(qkv.preset("bert-base-uncased").toy()), led())
    with pytest.raises(DataError, match="'pooler' does not predict the next token"):
        perplexity_of(bert, [TEXT])
    t5 = qkv.TextModel(qkv.build(qkv.preset("t5-small").toy()), ByteTokenizer())
    with pytest.raises(DataError, match="an encoder-decoder predicts a text from another"):
        perplexity_of(t5, [TEXT])
    learned = of_bytes(**{"embedding.positions": {"kind": "learned"}})
    with pytest.raises(DataError, match="context: 65 tokens, but the model has 64 positions"):
        perplexity_of(learned, [TEXT], Protocol("disjoint", 65))
    with pytest.raises(DataError, match="memory reads whole texts, but the model has 64 positions"):
        perplexity_of(learned, [TEXT], Protocol("memory"))
    assert perplexity_of(learned, [TEXT[:50]], Protocol("memory")).tokens > 40
    with pytest.raises(DataError, match="leave no room beside the 2"):
        list(Protocol("disjoint", 2).windows([1, 2, 3], [0, 0]))


def test_a_model_whose_past_changes_has_no_memory() -> None:
    prefix = of_bytes(**{"decoder.layers.*.attention.pattern": {"kind": "prefix"}})
    assert perplexity_of(prefix, [TEXT], Protocol("disjoint", 16)).nats == pytest.approx(
        perplexity_of(MODELS["bytes"], [TEXT], Protocol("disjoint", 16)).nats, rel=1e-6
    )
    with pytest.raises(DataError, match="memory would show this model, which sees prefixes whole"):
        perplexity_of(prefix, [TEXT], Protocol("memory"))


def test_a_quantised_cache_is_named() -> None:
    lm = of_bytes()
    lm.runtime = Runtime(codec="int4")
    found = perplexity_of(lm, [TEXT[:64]], Protocol("memory"))
    assert found.protocol == "whole texts through a cache of int4"
    exact = perplexity_of(MODELS["bytes"], [TEXT[:64]], Protocol("memory"))
    assert 1e-4 < abs(found.nats / exact.nats - 1) < 0.5
    assert perplexity_of(lm, [TEXT]).protocol == "disjoint windows of 64 tokens"


def test_what_is_infinite_is_no_number_in_json() -> None:
    assert Perplexity(1e6, 1, 1, None, 1, "").to_dict()["perplexity"] is None
    assert Perplexity(2.0, 2, 1, None, 1, "").to_dict()["perplexity"] == math.e
