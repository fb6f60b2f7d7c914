"""Runs of several processes are the run of one: the same losses, whatever is divided, and saved models that load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from qkv.config.recipe import Recipe
from qkv.train import Trainer
from qkv.train.parallel.pieces import local
from qkv.train.parallel.strategy import ALONE, strategy_of

from .. import runs
from .processes import together

Figures = dict[str, list[float]]
Cases = Callable[[Path], dict[str, dict[str, Any]]]
DRY = {"dropout": 0.0}
EXPERTS = {
    "kind": "mixture-of-experts",
    "n_experts": 4,
    "top_k": 2,
    "d_ff": 16,
    "shared_d_ff": 8,
}


def figures(text: str) -> Figures:
    """What a run says of its steps, and the loss of the model that it leaves."""
    torch.set_num_threads(1)
    trainer = Trainer.start(Recipe.from_toml(text))
    reports = list(trainer.run())
    return {
        "loss": [report.loss for report in reports],
        "norm": [report.gradient_norm for report in reports],
        "valid": [report.valid_loss for report in reports if report.valid_loss is not None],
        "final": [trainer.valid_loss()],
    }


def all_figures(texts: dict[str, str]) -> dict[str, Figures]:
    return {name: figures(text) for name, text in texts.items()}


def apart(found: Figures, expected: Figures) -> float:
    """The largest relative deviation of any figure."""
    assert found.keys() == expected.keys()
    pairs = [(a, b) for name in expected for a, b in zip(found[name], expected[name], strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def equal_runs(
    folder: Path, size: int, parallel: dict[str, Any], cases: dict[str, dict[str, Any]], bound: float = 1e-5
) -> None:
    """Each case in `size` processes, and in one; all processes say the same, and the saved model is the run's."""
    made: dict[str, Recipe] = {}
    for name, changes in cases.items():
        (place := folder / name.replace(" ", "-")).mkdir()
        base = {"run__steps": 4, "run__eval_every": 2, "run__save_every": 4, "run__clip": 0.5, "run__batch": 6}
        made[name] = runs.recipe(place, **(base | changes))
    divided = {name: runs.elsewhere(one, "many").override({"parallel": parallel}) for name, one in made.items()}
    answers = together(size, all_figures, {name: one.to_toml() for name, one in divided.items()})
    assert all(answer == answers[0] for answer in answers)
    expected = {name: figures(one.to_toml()) for name, one in made.items()}
    far = {name: apart(answers[0][name], expected[name]) for name in made}
    assert {name: deviation for name, deviation in far.items() if deviation >= bound} == {}
    for name, one in divided.items():
        lengths = [len(runs.log(made[name].run.folder)), len(runs.log(one.run.folder))]
        assert lengths == [4, 4]
        weights = qkv.load(Path(one.run.folder) / "model").model.state_dict()
        ours = qkv.load(Path(made[name].run.folder) / "model").model.state_dict()
        assert weights.keys() == ours.keys()
        assert max(float((weights[key] - ours[key]).abs().max()) for key in ours) < 1e-2  # what steps can move


def llama(**changes: Any) -> dict[str, Any]:
    return {"model": runs.tiny("llama-2-7b", **DRY, **changes)}


def experts(vocab_size: int = 256) -> dict[str, Any]:
    """Two layers of experts, with a balance loss, in micro-batches."""
    source = runs.tiny("llama-2-7b", vocab_size, **DRY, decoder__layers__0__ffn=EXPERTS)
    del source["overrides"]["decoder.layers.0.ffn.d_ff"]
    return {"model": source, "objective": {"kind": "next-token", "balance": 0.1}}


def grouped() -> dict[str, Any]:
    """Four heads over two, with norms of queries and keys."""
    attention = {"n_heads": 4, "n_kv_heads": 2, "qk_norm": {"kind": "rmsnorm"}}
    source = runs.tiny("llama-2-7b", **DRY)
    changes = {f"decoder.layers.0.attention.{name}": value for name, value in attention.items()}
    return {"model": {**source, "overrides": source["overrides"] | changes}}


def dropped_between_blocks() -> dict[str, Any]:
    source = runs.tiny("gpt2", dropout=0.1)
    return {**source, "overrides": source["overrides"] | {"decoder.layers.0.attention.dropout": 0.0}}


def masked(folder: Path) -> dict[str, Any]:
    """Hidden tokens in packed rows, of different lengths."""
    model = runs.tiny("bert-base-uncased", 300, **DRY, head={"kind": "masked-lm"})
    return {"model": model, "tokenizer": runs.tokenizer(folder), "objective": {"kind": "masked"}}


def both_stacks(folder: Path) -> dict[str, Any]:
    """Of the tokenizer that `masked` has made."""
    model, source = runs.tiny("transformer-base", 300, **DRY), str(folder / "tokenizer")
    return {"model": model, "tokenizer": source, "objective": {"kind": "span-corruption"}}


def ddp(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "llama": llama() | {"run__micro_batch": 2},
        "experts in parts": experts() | {"run__micro_batch": 1},
        "masked": masked(folder),
        "adapters": llama() | {"lora": {"rank": 2, "base": "int8"}},
    }


def more_ddp(folder: Path) -> dict[str, dict[str, Any]]:
    masked(folder)
    return {
        "a large vocabulary": {"model": runs.tiny("gpt2", 4096, **DRY), "run__ema": 0.5},
        "experts": experts(),
        "packed": llama() | {"data__documents": True, "data__separator": ""},
        "averaged": llama() | {"run__average_last": 2, "run__save_every": 1},
        "an encoder and a decoder": both_stacks(folder),
    }


def fsdp(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "llama": llama() | {"run__micro_batch": 2, "run__checkpoint_activations": True, "run__sample_every": 2},
        "a large vocabulary": {"model": runs.tiny("gpt2", 4096, **DRY), "run__ema": 0.5},
        "experts in parts": experts() | {"run__micro_batch": 1},
    }


def more_fsdp(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "masked": masked(folder) | {"optimizer": {"kind": "lion"}},
        "an encoder and a decoder": both_stacks(folder),
        "experts": experts(),
    }


def context(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "llama": llama() | {"run__micro_batch": 2, "data__context": 15, "run__sample_every": 2},
        "packed": llama() | {"data__documents": True, "data__separator": ""},
        "experts in parts": experts() | {"run__micro_batch": 1},
    }


def more_context(folder: Path) -> dict[str, dict[str, Any]]:
    window = {"kind": "sliding-window", "window": 5}
    return {
        "a window": {"model": runs.tiny("gpt2", **DRY, decoder__layers__0__attention__pattern=window)},
        "masked": masked(folder),
        "recomputed": {"model": runs.tiny("gpt2", 4096, **DRY), "run__checkpoint_activations": True},
    }


def tensor(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "norms of queries and keys": grouped() | {"run__micro_batch": 2, "run__ema": 0.5},
        "biases": {"model": runs.tiny("gpt2", 4096, **DRY), "run__checkpoint_activations": True},
        # What is alike on both processes is dropped alike.
        "dropout": {"model": dropped_between_blocks()},
    }


def more_tensor(folder: Path) -> dict[str, dict[str, Any]]:
    return {"llama": llama(), "masked": masked(folder), "an encoder and a decoder": both_stacks(folder)}


@pytest.mark.parametrize(
    ("cases", "parallel"),
    [
        (ddp, {"data": "ddp"}),
        (fsdp, {"data": "fsdp"}),
        (context, {"context": 2}),
        (tensor, {"tensor": 2}),
        pytest.param(more_ddp, {"data": "ddp"}, marks=pytest.mark.slow),
        pytest.param(more_fsdp, {"data": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(more_context, {"context": 2}, marks=pytest.mark.slow),
        pytest.param(more_tensor, {"tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_two_processes(cases: Cases, parallel: dict[str, Any], tmp_path: Path) -> None:
    equal_runs(tmp_path, 2, parallel, cases(tmp_path))


def seeds(texts: dict[str, str]) -> dict[str, int]:
    """What dropout draws from in the first step."""
    return {name: strategy_of(Recipe.from_toml(text)).seed(7, 1) for name, text in texts.items()}


def test_what_is_alike_is_dropped_alike_and_rows_are_not(tmp_path: Path) -> None:
    base = runs.recipe(tmp_path, **llama())
    kinds: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"data": "fsdp"}, "context": {"context": 2}}
    made = {
        name: base.override({"parallel": kind}).to_toml() for name, kind in (kinds | {"tensor": {"tensor": 2}}).items()
    }
    first, second = together(2, seeds, made)
    assert {name for name in made if first[name] == second[name]} == {"tensor"}
    assert first["tensor"] == ALONE.seed(7, 1)


def held(texts: dict[str, str]) -> dict[str, tuple[int, int, int]]:
    """After a step: numbers of the weights here and in all, and of the optimizer here."""
    found = {}
    for name, text in texts.items():
        trainer = Trainer.start(Recipe.from_toml(text))
        next(trainer.run())
        parameters = list(trainer.model.parameters())
        moments = [x for state in trainer.optimizer.state.values() for x in state.values() if x.dim()]
        here, there = (sum(local(x).numel() for x in tensors) for tensors in (parameters, moments))
        found[name] = here, sum(p.numel() for p in parameters), there
    return found


def test_what_is_divided_lies_on_each_once(tmp_path: Path) -> None:
    """Halves with fsdp; with tensor, halves of the matrices of blocks."""
    base = runs.recipe(tmp_path, **llama())
    kinds: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"data": "fsdp"}, "tensor": {"tensor": 2}}
    made = {name: runs.elsewhere(base, name).override({"parallel": kind}) for name, kind in kinds.items()}
    shapes = qkv.build(made["ddp"].model.architecture).state_dict()
    matrices = sum(x.numel() for name, x in shapes.items() if ".layers." in name and x.dim() == 2)
    for answer in together(2, held, {name: one.to_toml() for name, one in made.items()}):
        whole = answer["ddp"][1]
        assert {name: (here, all_) for name, (here, all_, _) in answer.items()} == {
            "ddp": (whole, whole),
            "fsdp": (whole // 2, whole),
            "tensor": (whole - matrices // 2, whole),
        }
        assert all(moments == 2 * here for here, _, moments in answer.values())


@pytest.mark.slow
@pytest.mark.unhooked
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_compiled_blocks(data: str, tmp_path: Path) -> None:
    equal_runs(tmp_path, 2, {"data": data}, {"llama": llama() | {"run__compile": True, "run__micro_batch": 2}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "parallel"),
    [
        ("bf16", {"data": "ddp"}),
        ("fp16", {"data": "ddp"}),
        ("bf16", {"data": "fsdp"}),
        ("bf16", {"context": 2}),
        ("fp16", {"context": 2}),
        ("bf16", {"tensor": 2}),
    ],
)
def test_short_numbers_stay_as_near_as_they_are(precision: str, parallel: dict[str, Any], tmp_path: Path) -> None:
    """Products of 8 or 11 bits, summed in another order."""
    cases = {
        "llama": llama() | {"run__precision": precision, "run__micro_batch": 2},
        "recomputed": {
            "model": runs.tiny("gpt2", 4096, **DRY),
            "run__precision": precision,
            "run__checkpoint_activations": True,
        },
    }
    equal_runs(tmp_path, 2, parallel, cases, bound=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (3, {"data": "ddp"}),
        (3, {"data": "fsdp"}),
        (3, {"context": 3}),
        (4, {"context": 2}),
        (4, {"data": "fsdp", "context": 2}),
        (4, {"data": "fsdp", "tensor": 2}),
        (4, {"data": "fsdp", "tensor": 2, "context": 2}),
        (8, {"data": "fsdp", "tensor": 2, "context": 2}),
    ],
)
def test_more_processes(size: int, parallel: dict[str, Any], tmp_path: Path) -> None:
    cases = {
        "grouped": grouped() | {"run__micro_batch": 2},
        "packed": llama() | {"data__documents": True, "data__separator": ""},
    }
    if "tensor" not in parallel:
        cases["experts"] = experts()
    equal_runs(tmp_path, size, parallel, cases)
