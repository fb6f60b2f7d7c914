"""Answers to lm-eval: log-likelihoods of one token at a time, truncation, stop strings; and the library itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import qkv
from qkv.errors import DataError
from qkv.evaluate.harness import harness_model

from .small import TEXT, of_bytes, of_pieces

MODELS = {"bytes": of_bytes(), "pieces": of_pieces()}
ROOM = 24
Make = Callable[..., Any]


@dataclass
class Asked:
    """The library's Instance, as far as it counts."""

    args: tuple[Any, ...]


@dataclass
class Hook:
    """The library's cache hook."""

    told: list[tuple[Any, ...]] = field(default_factory=list)

    def add_partial(self, *what: Any) -> None:
        self.told.append(what)


class StandIn:
    """The library's LM, as far as it counts."""

    def __init__(self) -> None:
        self.cache_hook = Hook()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """`harness_model` with a stand-in for the library."""
    module = ModuleType("lm_eval.api.model")
    module.__dict__["LM"] = StandIn
    for name in ("lm_eval", "lm_eval.api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", module)
    return harness_model


def one_by_one(lm: qkv.TextModel, before: list[int], tokens: list[int], room: int = 10_000) -> tuple[float, bool]:
    """log p(tokens | before), each by a forward of its own with at most `room` tokens."""
    total, greedy = 0.0, True
    for i, token in enumerate(tokens):
        with torch.no_grad():
            logits = lm.model(torch.tensor([[*before, *tokens[:i]][-room:]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


def greedy_continuation(lm: qkv.TextModel, context: str, n: int) -> str:
    return lm.generate(context, n, decoding=qkv.Greedy()).text


@pytest.mark.parametrize("name", MODELS)
def test_loglikelihoods_are_those_of_one_token_at_a_time(name: str, make: Make) -> None:
    lm, model = MODELS[name], make(MODELS[name])
    assert isinstance(model, StandIn)
    pairs = [
        (TEXT[:30], TEXT[30:37]),
        ("The", " quick brown"),
        ("a ", "b"),
        (TEXT[:8], TEXT[8:9]),
        ("", "fox"),
        (" ", "x"),
    ]
    found = model.loglikelihood([Asked(pair) for pair in pairs])
    for (context, continuation), answer in zip(pairs, found, strict=True):
        whole = model.encode(context + continuation)
        start = len(model.encode(context.rstrip()))
        before, tokens = whole[:start], whole[start:]
        if not context.strip():
            before, tokens = model.before, whole[len(whole) - len(tokens) :] if name == "bytes" else whole[1:]
        expected = one_by_one(lm, before, tokens)
        assert answer == (pytest.approx(expected[0], rel=1e-5), expected[1])
    assert [what[:2] for what in model.cache_hook.told] == [("loglikelihood", pair) for pair in pairs]
    assert [what[2] for what in model.cache_hook.told] == found


def test_greedy_continuations_are_known_as_such(make: Make) -> None:
    lm, model = MODELS["bytes"], make(MODELS["bytes"])
    tokens = torch.tensor([model.encode("The quick")])
    with torch.no_grad():
        best = int(lm.model(tokens).logits[0, -1, :128].argmax())
        truly = int(lm.model(tokens).logits[0, -1].argmax())
    answer = model.loglikelihood([Asked(("The quick", chr(best))), Asked(("The quick", "\0"))])
    assert [greedy for _, greedy in answer] == [best == truly, truly == 0]


def test_a_long_context_loses_its_beginning(make: Make) -> None:
    lm, model = MODELS["bytes"], make(MODELS["bytes"], max_length=ROOM)
    context, continuation = TEXT[:60], TEXT[60:66]
    ((logprob, _),) = model.loglikelihood([Asked((context, continuation))])
    # The window that predicts the last token holds ROOM tokens, and all of the continuation's are predicted in it.
    whole = model.encode(context + continuation)
    tokens = model.encode(continuation)
    before = whole[: -len(tokens)][-(ROOM + 1 - len(tokens)) :]
    assert logprob == pytest.approx(one_by_one(lm, before, tokens)[0], rel=1e-5)
    assert abs(logprob - make(lm).loglikelihood([Asked((context, continuation))])[0][0]) > 1e-3
    with pytest.raises(DataError, match="a continuation of 30 tokens; the model takes 24"):
        model.loglikelihood([Asked(("a", TEXT[:30]))])


@pytest.mark.parametrize("n", [1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, 2 * ROOM + 1, 90])
@pytest.mark.parametrize("name", MODELS)
def test_rolling_predicts_each_token_once_in_full_windows(name: str, n: int, make: Make) -> None:
    model = make(MODELS[name], max_length=ROOM)
    windows, (_, tokens) = list(model.rolling(TEXT[:n])), model.pair("", TEXT[:n])
    assert [token for window in windows for token in window.targets] == tokens
    assert windows[0].read[: len(model.before)] == model.before
    assert all(len(window.read) == ROOM for window in windows[1:])
    assert all(len(window.targets) <= len(window.read) <= ROOM for window in windows)
    found = model.loglikelihood_rolling([Asked((TEXT[:n],)), Asked(("",)), Asked((TEXT[:5],))])
    expected = sum(
        one_by_one(MODELS[name], list(w.read)[: len(w.read) - len(w.targets) + 1], list(w.targets))[0]
        for w in (windows if n < 30 else [])
    )
    assert found[1] == 0
    if n < 30:
        assert found[0] == pytest.approx(expected, rel=1e-5)
    assert found[2] == pytest.approx(model.loglikelihood([Asked(("", TEXT[:5]))])[0][0], rel=1e-5)


def test_writing_stops_where_it_is_told(make: Make) -> None:
    lm, model = MODELS["pieces"], make(MODELS["pieces"])
    free = [greedy_continuation(lm, context, 12) for context in ("The quick", "lazy dog")]
    stop = free[0][2:4]
    asked = [
        Asked(("The quick", {"until": [], "max_gen_toks": 12})),
        Asked(("The quick", {"until": [stop, ""], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0})),
        Asked(("lazy dog", {"until": "\0no", "max_gen_toks": 12})),
        Asked(("The quick", {"max_gen_toks": 2})),
    ]
    found = model.generate_until(asked)
    assert found[0] == free[0]
    assert found[1] == free[0][: free[0].index(stop)]
    assert found[2] == free[1]
    assert found[3] == greedy_continuation(lm, "The quick", 2)
    assert [what[2] for what in model.cache_hook.told] == found


def test_a_prompt_leaves_room_for_what_is_written(make: Make) -> None:
    model = make(MODELS["bytes"], max_length=ROOM)
    request = model.request(TEXT, {"max_gen_toks": 10})
    assert list(request.prompt) == model.encode(TEXT)[-(ROOM - 10) :]
    assert model.request("", {"max_gen_toks": 10}).prompt == model.before
    with pytest.raises(DataError, match="24 new tokens leave no room"):
        model.request("a", {"max_gen_toks": 24})
    assert model.request("a", {"max_gen_toks": 1, "do_sample": True, "temperature": 0.7}).decoding.temperature == 0.7
    assert isinstance(
        model.request("a", {"max_gen_toks": 1, "do_sample": False, "temperature": 0.7}).decoding, qkv.Greedy
    )


def test_what_cannot_be_asked_is_refused_by_name(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="does not predict the next token"):
        make(qkv.TextModel(qkv.build(qkv.preset("bert-base-uncased").toy()), MODELS["bytes"].tokenizer))
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(DataError, match="needs the library lm-eval; install it with: pip install lm-eval"):
        make(MODELS["bytes"])


# The library itself, where it is installed

library = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")

TASK = """
task: qkv_local
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
QUESTIONS = [
    {"question": TEXT[:12], "choices": ["fox", "dog", "well-known"], "answer": 0},
    {"question": "The end of", "choices": ["café", "the"], "answer": 1},
    {"question": "naïve", "choices": ["lazy", "Zoë"], "answer": 0},
]


@library
@pytest.mark.slow
def test_a_local_task_runs_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import simple_evaluate, utils
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "qkv_local.yaml").write_text(TASK.format(data=data))
    lm = MODELS["pieces"]
    model = harness_model(lm)
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    done = simple_evaluate(model=model, tasks=["qkv_local"], task_manager=manager, bootstrap_iters=0)
    chosen = []
    for one in QUESTIONS:
        scores = [one_by_one(lm, *model.pair(one["question"], f" {choice}"))[0] for choice in one["choices"]]
        chosen.append(scores.index(max(scores)))
    right = sum(choice == one["answer"] for choice, one in zip(chosen, QUESTIONS, strict=True))
    assert done["results"]["qkv_local"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    small = harness_model(lm, max_length=ROOM)
    for n in (1, ROOM - 1, ROOM, ROOM + 1, 90):
        tokens = small.pair("", TEXT[:n])[1]
        theirs = utils.get_rolling_token_windows(tokens, small.before[0], ROOM, 1)
        assert [(list(w.read), list(w.targets)) for w in small.rolling(TEXT[:n])] == [(*map(list, w),) for w in theirs]
