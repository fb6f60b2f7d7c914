"""Memory of earlier segments: what the layers recall, its gradients, and runs that carry it from step to step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import qkv
from parity.cases import CASES, V
from qkv.cache.cache import Cache
from qkv.config.recipe import Recipe
from qkv.config.training import NextToken
from qkv.errors import ConfigError, DataError
from qkv.nn import Transformer
from qkv.nn.recall import Recall
from qkv.train import Trainer
from qkv.train.batch import Batch
from qkv.train.data import Contiguous
from qkv.train.loss import step_gradients

from . import runs
from .small import apart, gradients

REMEMBERS = [name for name, config in CASES.items() if not list(NextToken(memory=4).misfits(config))]
CHECKED = [
    *("no-positions", "rotary-pairs-half", "rotary-yarn-mscale", "alibi", "t5-buckets-own", "shaw", "transformer-xl"),
    *("sliding-window", "chunked", "log-n", "latent", "norm-none", "sandwich", "parallel-two-norms"),
    *("adaptive-untied", "experts", "mixed-layers"),
]
"""Every kind of positions, residual and mechanism; the others differ where a memory has no part."""
T = 5
TOKENS = np.random.default_rng(0).integers(0, V, (2, 3 * T + 1))


def model_of(name: str) -> Transformer:
    return qkv.build(CASES[name], seed=1, dtype=torch.float64)


def segment(number: int, *, recall: Recall | None = None) -> Batch:
    start = number * T
    inputs: dict[str, Any] = {"tokens": TOKENS[:, start : start + T]}
    return Batch(inputs, TOKENS[:, start + 1 : start + T + 1], recall=recall)


@contextmanager
def without_gradient_before(model: Transformer, edge: int) -> Iterator[None]:
    """Within the block, every layer gets the tokens before `edge` as if they had been there before."""

    def cut(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = arguments
        return torch.cat((x[:, :edge].detach(), x[:, edge:]), 1), *rest

    assert model.decoder is not None
    handles = [layer.register_forward_pre_hook(cut) for layer in model.decoder.layers]
    yield
    for handle in handles:
        handle.remove()


def expected(model: Transformer, segments: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the last of so many segments, by one forward of all."""
    edge, end = (segments - 1) * T, segments * T
    model.zero_grad()
    with without_gradient_before(model, edge):
        logits = model(torch.from_numpy(TOKENS[:, :end])).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(
        logits[:, edge:].flatten(0, 1), torch.from_numpy(TOKENS[:, edge + 1 : end + 1]).flatten()
    )
    torch.autograd.backward(loss)
    return loss.detach(), gradients(model)


def test_many_kinds_of_model_remember() -> None:
    assert set(CHECKED) < set(REMEMBERS)
    kinds = {block.attention.positions.kind for name in CHECKED for block in CASES[name].stacks["decoder"].blocks}
    assert kinds >= {"transformer-xl", "rotary", "alibi", "t5-buckets", "shaw", "none"}
    residuals = {block.residual.kind for name in CHECKED for block in CASES[name].stacks["decoder"].blocks}
    assert residuals == {"pre", "post", "sandwich", "parallel"}
    assert any(block.attention.kind == "latent" for name in CHECKED for block in CASES[name].stacks["decoder"].blocks)


@pytest.mark.parametrize("name", CHECKED)
def test_a_segment_with_a_memory_is_the_end_of_the_whole_text(name: str) -> None:
    """Logits against the oracle, gradients against one forward in which every layer's past is detached."""
    model = model_of(name)
    recall = Recall.empty(2 * T)
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    oracle = qkv.reference.forward(CASES[name], weights, TOKENS[:, : 3 * T])
    for number in range(3):
        given = segment(number, recall=recall)
        with torch.no_grad():
            logits = model(**given.to("cpu").arguments).logits
        wanted = oracle[:, number * T : (number + 1) * T]
        assert logits is not None
        assert np.abs(logits.numpy() - wanted).max() < 1e-10 * np.abs(wanted).max()
        loss, slopes = expected(model, number + 1)
        model.zero_grad()
        found = step_gradients(model, given.split(1))
        assert found.recall is not None
        assert abs(float(found.mean) - float(loss)) < 1e-12 * float(loss)
        assert apart(gradients(model), slopes) < 1e-12
        recall = found.recall
    assert recall.length == 2 * T
    assert recall.seen == 3 * T


# Runs

RELATIVE = {
    "embedding__positions": {"kind": "none"},
    "decoder__layers__0__attention__positions": {"kind": "transformer-xl"},
}


def xl(folder: Path, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": runs.tiny("gpt2", **RELATIVE),
        "objective": {"kind": "next-token", "memory": 20},
    }
    return runs.recipe(folder, **(base | changes))


def test_ten_steps_are_six_then_kill_then_four_memory_included(tmp_path: Path) -> None:
    whole = xl(tmp_path, run__save_every=3, run__micro_batch=3)
    cut = runs.elsewhere(whole, "cut")
    runs.finished(whole)
    runs.killed(cut, 8)
    assert [report.step for report in Trainer.resume(cut).run()] == [7, 8, 9, 10]
    expected, found = runs.left_by(whole.run.folder), runs.left_by(cut.run.folder)
    assert [layer.shape for layer in found["training"]["recall"]["layers"]] == [(4, 20, 16)] * 2
    assert runs.differences(expected, found) == []


def test_micro_batches_and_recomputed_activations_recall_the_same(tmp_path: Path) -> None:
    found = {}
    for name, changes in {
        "whole": {},
        "micro": {"run__micro_batch": 3},
        "recomputed": {"run__checkpoint_activations": True},
    }.items():
        made = xl(tmp_path, run__steps=4, model=runs.tiny("gpt2", dropout=0.0, **RELATIVE), **changes)
        made = runs.elsewhere(made, name)
        found[name] = [report.loss for report in runs.finished(made)]
    assert found["micro"] == pytest.approx(found["whole"], rel=1e-5)
    assert found["recomputed"] == pytest.approx(found["whole"], rel=1e-6)


def test_a_resumed_run_needs_its_memory(tmp_path: Path) -> None:
    """The comparison above sees a memory that was lost."""
    made = xl(tmp_path, run__steps=6, run__save_every=3)
    losses = [report.loss for report in runs.finished(made)]
    for last in runs.saved(made.run.folder)[1:]:
        shutil.rmtree(Path(made.run.folder) / "checkpoints" / last)
    trainer = Trainer.resume(made)
    trainer.recall = Recall.empty(20)
    assert next(trainer.run()).loss != losses[3]


def test_each_reading_of_the_text_begins_without_a_memory(tmp_path: Path) -> None:
    trainer = Trainer.start(xl(tmp_path, run__steps=40, run__batch=8, data__context=24))
    assert isinstance(trainer.stream, Contiguous)
    steps, seen = trainer.stream.steps, []
    for report in trainer.run():
        assert trainer.recall is not None
        seen.append((report.step, trainer.recall.seen, trainer.recall.length))
    assert 2 < steps < 20
    for step, read, length in seen:
        turn = (step - 1) % steps + 1
        assert read == 24 * turn if turn < steps else 24 * (turn - 1) < read <= 24 * turn
        assert length == min(20, read)


def test_held_out_text_is_read_with_the_memory_each_token_once(tmp_path: Path) -> None:
    """Where the memory is as long as the window, segments make no difference: one forward of the whole text."""
    window = {"decoder__layers__0__attention__pattern": {"kind": "sliding-window", "window": 12}}
    made = xl(tmp_path, run__steps=3, model=runs.tiny("gpt2", **RELATIVE, **window))
    trainer = Trainer.start(made)
    valid = [report.valid_loss for report in trainer.run()][-1]
    text = trainer.parts.valid
    tokens = torch.from_numpy(text.tokens.read(0, text.n_tokens))
    with torch.no_grad():
        logits = trainer.model(tokens[None, :-1]).logits
    assert logits is not None
    assert valid == pytest.approx(float(torch.nn.functional.cross_entropy(logits[0], tokens[1:])), rel=1e-6)
    trainer.held_out.memory = 2
    assert trainer.valid_loss() != pytest.approx(valid, rel=1e-6)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": (
        r"model\.overrides\.embedding\.positions: 'learned' numbers each segment anew",
        {"model": runs.tiny("gpt2")},
    ),
    "dynamic": (
        r"model\.overrides\.decoder: scaling 'dynamic-ntk' turns by the length",
        {
            "model": runs.tiny(
                "llama-7b",
                decoder__layers__0__attention__positions={
                    "kind": "rotary",
                    "scaling": {"kind": "dynamic-ntk", "factor": 2.0, "original_max_seq_len": 16},
                },
            )
        },
    ),
    "documents": (r"data\.documents: objective\.memory is of one text", {"data__documents": True}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_remember_is_refused_with_the_reason(what: str, tmp_path: Path) -> None:
    message, changes = REFUSED[what]
    with pytest.raises(ConfigError, match=message):
        xl(tmp_path, **changes)


def test_a_recall_is_for_plain_rows_of_a_decoder() -> None:
    model, recall = model_of("transformer-xl"), Recall.empty(4)
    tokens = torch.from_numpy(TOKENS[:, :T])
    with pytest.raises(DataError, match="recall: takes whole rows"):
        model(tokens, recall=recall, valid=torch.arange(T).expand(2, T) > 0)
    with pytest.raises(DataError, match="recall: not beside a cache"):
        model(tokens, recall=recall, cache=Cache.for_model(model, 2))
    kept = model(tokens, recall=recall).recall
    with pytest.raises(DataError, match="recall: of 2 rows, but there are 1"):
        model(tokens[:1], recall=kept)
    with pytest.raises(DataError, match="recall: for a decoder alone"):
        model_of("encoder-decoder")(tokens, source=tokens, recall=recall)
    with pytest.raises(DataError, match="recall: 'learned' positions"):
        model_of("learned")(tokens, recall=recall)
