"""Ring attention is attention: forward and backward, in every number of processes, for whatever a row holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import qkv
from qkv.config import BigBird, Causal, Coordinates, ModelConfig
from qkv.nn.backends import BACKENDS, Scoring, attend
from qkv.nn.context import AttentionPlan
from qkv.train.batch import IGNORE, Batch
from qkv.train.loss import Setting, step_gradients
from qkv.train.parallel.ring import make_ring
from qkv.train.parallel.share import columns_of
from qkv.train.parallel.world import open_world

from ..small import apart, gradients
from .processes import together


def model_of(preset: str, stack: str = "decoder", **attention: Any) -> ModelConfig:
    """A preset with two small layers, and changes of their attention."""
    layer = f"{stack}.layers.0"
    attention |= {"n_heads": 4, "head_dim": 4, "dropout": 0.0}
    small = {"vocab_size": 64, "d_model": 16, "max_seq_len": 64, "embedding.dropout": 0.0}
    if stack == "encoder":
        small["head"] = {"kind": "masked-lm"}
    small |= {f"{stack}.n_layers": 2, f"{layer}.ffn.d_ff": 32, f"{layer}.dropout": 0.0}
    return qkv.preset(preset).override(small | {f"{layer}.attention.{name}": to for name, to in attention.items()})


CASES: dict[str, tuple[ModelConfig, str]] = {
    "causal": (model_of("gpt2"), "plain"),
    "length not divisible": (model_of("gpt2"), "odd"),
    "padding": (model_of("gpt2"), "padded"),
    "packed documents": (model_of("gpt2"), "packed"),
    "grouped heads": (model_of("llama-2-7b", n_kv_heads=2), "odd"),
    "one key-value head": (model_of("llama-2-7b", n_kv_heads=1), "packed"),
    "window": (
        model_of("gpt2", pattern={"kind": "sliding-window", "window": 5, "sinks": 2}),
        "odd",
    ),
    "window, packed": (
        model_of("llama-2-7b", pattern={"kind": "sliding-window", "window": 5}),
        "packed",
    ),
    "prefix": (model_of("gpt2", pattern={"kind": "prefix"}), "prefix"),
    "bidirectional": (model_of("bert-base-uncased", "encoder"), "padded"),
    "alibi": (model_of("gpt2", positions={"kind": "alibi"}), "packed"),
    "t5": (
        model_of("gpt2", positions={"kind": "t5-buckets", "bidirectional": False, "n_buckets": 8}),
        "odd",
    ),
    "shaw": (
        model_of("gpt2", positions={"kind": "shaw", "max_distance": 4, "values": False}),
        "odd",
    ),
    "transformer-xl": (model_of("gpt2", positions={"kind": "transformer-xl"}), "odd"),
    "softcap and sinks": (model_of("gpt2", softcap=2.0, sinks=True), "odd"),
}


def batch_of(kind: str) -> Batch:
    """Two rows of 24 tokens, or of 23."""
    random = np.random.default_rng(3)
    shape = (2, 24 if kind == "plain" else 23)
    inputs: dict[str, Any] = {"tokens": random.integers(0, 64, shape)}
    targets = random.integers(0, 64, shape)
    if kind == "padded":
        inputs["valid"] = np.arange(shape[1]) < np.array([[23], [15]])
        targets[~inputs["valid"]] = IGNORE
    if kind == "packed":  # five documents, which end inside the processes' pieces
        inputs["documents"] = np.searchsorted([4, 5, 13, 20], np.arange(shape[1]), side="right")[None].repeat(2, 0)
    if kind == "prefix":
        inputs["prefix_length"] = np.array([9, 2])
    return Batch(inputs, targets)


def both_ways(config: ModelConfig, kind: str, dtype: torch.dtype) -> tuple[float, float]:
    """How far the loss and the gradients of a ring of all processes are from those of one."""
    batch = batch_of(kind)
    model = qkv.build(config, seed=1).to(dtype)
    expected = step_gradients(model, [batch]).mean
    wanted = gradients(model)
    model.zero_grad(set_to_none=True)
    run = Setting(run=lambda **inputs: model(**inputs, backend="ring"), count=batch.count)
    found = step_gradients(model, [columns_of(batch, *place())], setting=run).mean
    for tensor in (found, *(p.grad for p in model.parameters() if p.grad is not None)):
        dist.all_reduce(tensor)
    return float((found - expected).abs() / expected.abs()), apart(gradients(model), wanted)


def place() -> tuple[int, int]:
    """This process's number in the ring of all, and how many there are."""
    world = open_world("cpu")
    assert dist.group.WORLD is not None
    make_ring(dist.group.WORLD)
    return world.rank, world.size


def all_cases(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    place()
    return {name: both_ways(config, kind, dtype) for name, (config, kind) in CASES.items()}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_ring_is_one_process_in_float64(size: int) -> None:
    for found in together(size, all_cases, torch.float64):
        assert found.keys() == CASES.keys()
        assert {name: apart for name, apart in found.items() if max(apart) >= 1e-12} == {}


@pytest.mark.slow
def test_a_ring_is_one_process_in_float32() -> None:
    for found in together(2, all_cases, torch.float32):
        assert {name: apart for name, apart in found.items() if max(apart) >= 1e-6} == {}


# Attention by itself


def ring_attention(length: int, documents: int, order: str) -> tuple[float, float, float]:
    """How far a causal ring is from dense attention, forwards and backwards, and from dense without documents.

    `order`: the tokens lie `zigzag`, or in `blocks` that follow each other.
    """
    rank, size = place()
    where = np.arange(length)[None]
    number = where * documents // length
    q, k, v, d_out = (
        torch.from_numpy(np.random.default_rng(s).normal(size=(1, h, length, 8))) for s, h in enumerate((2, 1, 1, 2))
    )
    dense = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = attend(*dense, plan(where, number, "eager"), Scoring(0.3))
    wanted = torch.autograd.grad(expected, dense, d_out)
    own = columns_of(Batch({"tokens": where, "documents": number}, where), rank, size)
    at, real = own.inputs["tokens"][0], own.inputs.get("valid", np.ones_like(own.targets, dtype=bool))[0]
    if order == "blocks":
        at = np.array_split(np.arange(length), size)[rank]
        real = np.ones_like(at, dtype=bool)
    mine = [x[:, :, at].requires_grad_() for x in (q, k, v)]
    position = np.where(real, at, -1)[None]
    found = attend(*mine, plan(position, number[:, at], "ring"), Scoring(0.3))
    got = torch.autograd.grad(found, mine, d_out[:, :, at] * torch.from_numpy(real)[:, None])
    blind = expected if documents == 1 else attend(q, k, v, plan(where, number * 0, "eager"), Scoring(0.3))
    forwards = deviation(found[:, :, real], expected[:, :, at[real]])
    backwards = max(deviation(a[:, :, real], b[:, :, at[real]]) for a, b in zip(got, wanted, strict=True))
    return forwards, backwards, deviation(blind, expected)


def plan(position: np.ndarray, document: np.ndarray, backend: str) -> AttentionPlan:
    at = Coordinates(torch.from_numpy(position), torch.from_numpy(document))
    return AttentionPlan(Causal(), at, at, "partial", contiguous=False, backend=backend)


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def test_b35_five_packed_documents_in_a_ring_of_two() -> None:
    for forwards, backwards, blind in together(2, ring_attention, 60, 5, "zigzag"):
        assert max(forwards, backwards) < 1e-12
        assert blind > 0.1  # what ignoring their ends would do


def test_b36_2999_tokens_in_a_ring_of_four() -> None:
    for forwards, backwards, _ in together(4, ring_attention, 2999, 1, "zigzag"):
        assert max(forwards, backwards) < 1e-12


@pytest.mark.parametrize("order", ["blocks", "zigzag"])
def test_b37_causal_across_the_blocks_of_two(order: str) -> None:
    for forwards, backwards, _ in together(2, ring_attention, 32, 1, order):
        assert max(forwards, backwards) < 1e-12


def refusals() -> list[str | None]:
    place()
    q, at = torch.ones(1, 2, 4, 8), np.arange(4)[None]
    plain = plan(at, at * 0, "ring")
    sparse = replace(plain, pattern=BigBird(block=2))
    calls = [
        (q, plain, Scoring(1.0)),
        (q, plain, Scoring(1.0, dropout=0.1)),
        (q, plain, Scoring(1.0, values=lambda weights: weights)),
        (q, sparse, Scoring(1.0)),
        (q[:, :, :2], plain, Scoring(1.0)),
    ]
    return [BACKENDS["ring"].refuses(queries, q, q, of, scoring) for queries, of, scoring in calls]


def test_what_a_ring_cannot_do_is_refused() -> None:
    (found,) = together(1, refusals)
    assert found == [
        None,
        "it has no dropout",
        "no process has all attention weights of a query",
        "pattern 'bigbird' reads more than positions",
        "queries and keys are not the same tokens",
    ]
