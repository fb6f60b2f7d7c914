"""The loop: what a step is, in every precision and cut in any way; what a run leaves behind, and when it stops."""

from __future__ import annotations

import errno
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv
from qkv.config.decoding import Greedy
from qkv.config.recipe import Recipe
from qkv.errors import CheckpointError, TrainingError
from qkv.train import Report, Trainer, checkpoints
from qkv.train.parts import parts_of

from . import runs
from .small import apart, gradients

DRY = {"dropout": 0.0}
HEAD = {"kind": "masked-lm"}


def steps(made: Recipe, count: int) -> tuple[Trainer, list[Report]]:
    """A run after its first steps."""
    trainer = Trainer.start(made)
    return trainer, list(islice(trainer.run(), count))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


# A step


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_micro_batches_make_the_step_of_the_whole_batch(rows: int, tmp_path: Path) -> None:
    source = runs.tokenizer(tmp_path)
    model = runs.tiny("bert-base-uncased", 300, **DRY, head=HEAD)
    whole = runs.recipe(
        tmp_path, model=model, tokenizer=source, objective={"kind": "masked"}, data__documents=True, run__steps=4
    )
    after = []
    for micro in (None, rows):
        made = runs.elsewhere(whole, f"micro-{micro}").override({"run.micro_batch": micro})
        parts = parts_of(made)
        parts.lm.model.double()
        trainer = Trainer(made, parts)
        reports = list(islice(trainer.run(), 3))
        after.append((weights(trainer), reports))
    (expected, first), (found, second) = after
    assert apart(found, expected) < 1e-12
    for a, b in zip(first, second, strict=True):
        assert a.tokens == b.tokens
        assert b.loss == pytest.approx(a.loss, rel=1e-13)
        assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-12)


def test_b120_rates_count_optimizer_steps(tmp_path: Path) -> None:
    """Four micro-batches per step, ten steps of warm-up: ten steps."""
    made = runs.recipe(
        tmp_path, run__steps=12, run__micro_batch=1, schedule={"kind": "constant", "peak": 1.0, "warmup": 10}
    )
    runs.finished(made.override({"optimizer": {"kind": "lion"}, "run.clip": 0.0, "schedule.peak": 1e-3}))
    rates = [entry["rate"] for entry in runs.log(made.run.folder)]
    assert rates == pytest.approx([1e-4 * min(step, 10) for step in range(1, 13)], rel=1e-12)


def test_b123_what_is_clipped_is_the_true_gradient_once(tmp_path: Path) -> None:
    """A scale of 65536 and four micro-batches; the norm is that of the plain gradient of the whole batch."""
    base = runs.recipe(tmp_path, model=runs.tiny("gpt2", **DRY), run__clip=0.01, optimizer={"kind": "lion"})
    found = {}
    for name, micro in (("plain", None), ("scaled", 1)):
        made = runs.elsewhere(base, name).override({"run.micro_batch": micro})
        trainer = Trainer.start(made)
        if name == "scaled":
            trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        report = next(trainer.run())
        found[name] = report.gradient_norm, gradients(trainer.model)
    (norm, expected), (scaled_norm, scaled) = found["plain"], found["scaled"]
    assert norm > 0.1  # there is something to clip
    assert scaled_norm == pytest.approx(norm, rel=1e-5)
    assert apart(scaled, expected) < 1e-5
    length = math.sqrt(sum(float(g.double().square().sum()) for g in scaled.values()))
    assert length == pytest.approx(0.01, rel=1e-4)


def test_no_clipping_leaves_the_gradient(tmp_path: Path) -> None:
    trainer, (report,) = steps(runs.recipe(tmp_path, run__clip=0.0), 1)
    length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(trainer.model).values()))
    assert report.gradient_norm == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_lowers_the_loss(precision: str, tmp_path: Path) -> None:
    made = runs.recipe(
        tmp_path, model=runs.tiny("gpt2", **DRY), run__precision=precision, run__steps=20, schedule__peak=1e-2
    )
    trainer, reports = steps(made, 20)
    assert reports[0].loss == pytest.approx(math.log(256), abs=0.15)
    assert reports[-1].loss < 3.6
    assert reports[-1].valid_loss is not None
    assert reports[-1].valid_loss < 3.6
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    if precision == "fp16":
        assert trainer.precision.state()["scale"] >= 1024


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_large_vocabulary_has_the_same_first_step(precision: str, tmp_path: Path) -> None:
    """Its loss makes gradients without logits; the scale of fp16 is taken out of them, too."""
    full = runs.recipe(tmp_path, model=runs.tiny("gpt2", 4096, **DRY), run__micro_batch=2)
    half = runs.elsewhere(full, "half").override({"run.precision": precision})
    (_, (expected,)), (_, (found,)) = steps(full, 1), steps(half, 1)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-2)


def test_products_are_in_the_precision_of_the_recipe(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, model=runs.tiny("gpt2", **DRY), run__precision="bf16")
    trainer = Trainer.start(made)
    seen = []
    layer = trainer.model.decoder.layers[0].ffn.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    next(trainer.run())
    assert set(seen) == {torch.bfloat16}


def test_a_step_that_overflows_fp16_is_left_out(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__precision="fp16", run__steps=2, run__ema=0.5)
    trainer = Trainer.start(made)
    trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before = weights(trainer)
    report = next(trainer.run())
    assert not math.isfinite(report.gradient_norm)
    assert runs.differences(before, weights(trainer)) == []
    assert trainer.precision.state()["scale"] == 2.0**59
    (entry,) = runs.log(made.run.folder)
    assert "gradient_norm" not in entry
    assert "Infinity" not in (Path(made.run.folder) / "log.jsonl").read_text()


CHECKPOINTED = {
    "dropout": runs.tiny("gpt2"),
    "shared table": runs.tiny("t5-small"),
    "tables of each layer": runs.tiny(
        "gpt2", decoder__layers__0__attention__positions={"kind": "shaw", "max_distance": 4}
    ),
    "experts": runs.tiny(
        "gpt2",
        decoder__layers__0__ffn={"kind": "mixture-of-experts", "n_experts": 4, "top_k": 2, "d_ff": 8},
    ),
    "recurrence": runs.tiny(
        "transformer-xl-wt103", head={"kind": "lm", "tied": True}, embedding__tokens={"kind": "full"}
    ),
    "alibi": runs.tiny("gpt2", decoder__layers__0__attention__positions={"kind": "alibi"}),
    "rope and windows": runs.tiny(
        "gpt2",
        decoder__layers__0__attention__positions={"kind": "rotary"},
        decoder__layers__0__attention__pattern={"kind": "sliding-window", "window": 4},
    ),
}


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("case", CHECKPOINTED)
def test_recomputed_activations_give_the_same_gradients(case: str, micro: int | None, tmp_path: Path) -> None:
    source = CHECKPOINTED[case]
    objective = {"kind": "span-corruption"} if source["preset"] == "t5-small" else {"kind": "next-token"}
    changes: dict[str, Any] = {"model": source, "objective": objective, "run__micro_batch": micro}
    if objective["kind"] == "span-corruption":
        source = {**source, "overrides": {**source["overrides"], "vocab_size": 300}}
        changes |= {"model": source, "tokenizer": runs.tokenizer(tmp_path)}
    plain = runs.recipe(tmp_path, **changes, run__clip=0.0)
    again = runs.elsewhere(plain, "again").override({"run.checkpoint_activations": True})
    found = []
    for made in (plain, again):
        trainer, reports = steps(made, 2)
        found.append((gradients(trainer.model), [report.loss for report in reports]))
    assert found[1][1] == found[0][1]
    assert runs.differences(found[0][0], found[1][0]) == []


def test_activations_are_recomputed(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__checkpoint_activations=True)
    trainer = Trainer.start(made)
    calls: list[bool] = []
    trainer.model.decoder.layers[1].ffn.register_forward_hook(lambda *_: calls.append(trainer.model.training))
    next(trainer.run())
    assert calls == [True, True]


@pytest.mark.slow
@pytest.mark.unhooked
def test_compiled_blocks_train_alike(tmp_path: Path) -> None:
    plain = runs.recipe(tmp_path, model=runs.tiny("gpt2", **DRY), run__steps=3)
    compiled = runs.elsewhere(plain, "compiled").override({"run.compile": True})
    losses = [[report.loss for report in runs.finished(made)] for made in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    expected, found = (runs.left_by(made.run.folder)["model"] for made in (plain, compiled))
    assert apart(found, expected) < 1e-3


# Numbers that are none


def stopped(trainer: Trainer) -> str:
    with pytest.raises(TrainingError) as caught:
        for _ in trainer.run():
            pass
    return str(caught.value)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__save_every=2)
    trainer, _ = steps(made, 4)
    last = checkpoints.folders(Path(made.run.folder))[-1]
    before = checkpoints.read(last)
    with torch.no_grad():
        trainer.model.decoder.layers[1].ffn.up_proj.weight[0, 0] = math.inf
    message = stopped(trainer)
    assert message.startswith("step 5: the loss is nan, ")
    assert "decoder.layers.1.ffn.up_proj" in message
    assert "examples 16 to 19" in message
    assert runs.saved(made.run.folder) == ["00000002", "00000004"]
    assert runs.differences(before.training, checkpoints.read(last).training) == []
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoints.weights(last).values())
    assert [report.step for report in Trainer.resume(made).run()] == list(range(5, 11))


def test_the_module_that_overflowed_first_is_named(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, model=runs.tiny("gpt2", **DRY), run__micro_batch=1)
    trainer = Trainer.start(made)
    with torch.no_grad():
        trainer.model.decoder.layers[1].attention.v_proj.weight.fill_(3e38)
    assert "first in the output of decoder.layers.1.attention" in stopped(trainer)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_no_number_stops_the_run_before_the_weights_move(clip: float, tmp_path: Path) -> None:
    trainer = Trainer.start(runs.recipe(tmp_path, run__clip=clip))
    before = weights(trainer)
    trainer.model.decoder.layers[0].ffn.down_proj.weight.register_hook(lambda gradient: gradient * math.inf)
    message = stopped(trainer)
    assert "but not the gradient of decoder.layers.0.ffn.down_proj.weight" in message
    assert runs.differences(before, weights(trainer)) == []


# What a run leaves


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__save_every=2, run__steps=9, run__keep=3)
    runs.finished(made)
    assert runs.saved(made.run.folder) == ["00000006", "00000008", "00000009"]


def test_the_final_model_is_the_mean_of_the_last_checkpoints(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__save_every=2, run__steps=8, run__keep=4, run__average_last=3)
    runs.finished(made)
    last = [checkpoints.weights(folder) for folder in checkpoints.folders(Path(made.run.folder))[-3:]]
    found = qkv.load(Path(made.run.folder) / "model").model.state_dict()
    for name, tensor in found.items():
        expected = sum(one[name].double() for one in last) / 3
        assert torch.equal(tensor, expected.float()), name
    assert not torch.equal(found["embed.tokens.weight"], last[-1]["embed.tokens.weight"])


def test_a_checkpoint_out_of_turn_is_in_no_average(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__save_every=2, run__steps=8, run__keep=3, run__average_last=3)
    runs.finished(runs.elsewhere(made, "whole"))
    trainer = Trainer.start(made)
    for report in trainer.run():
        if report.step in {4, 5}:
            trainer.save()
            trainer.save()
        if report.step == 5:
            break
    assert runs.saved(made.run.folder) == ["00000002", "00000004", "00000005"]
    trainer = Trainer.resume(made)
    assert trainer.step == 5
    list(trainer.run())
    assert runs.saved(made.run.folder) == ["00000004", "00000006", "00000008"]
    one, other = (
        qkv.load(folder / "model").model.state_dict() for folder in (Path(made.run.folder), tmp_path / "whole")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_moving_average_is_that_of_the_weights(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, run__steps=4, run__ema=0.75)
    result = qkv.train(runs.elsewhere(made, "whole"))
    trainer = Trainer.start(made)
    average = {name: p.double() for name, p in weights(trainer).items()}
    for _ in trainer.run():
        if trainer.step < 4:
            average = {name: 0.75 * average[name] + 0.25 * p.double() for name, p in weights(trainer).items()}
    last = checkpoints.weights(checkpoints.folders(Path(made.run.folder))[-1])
    average = {name: 0.75 * value + 0.25 * last[name].double() for name, value in average.items()}
    found = dict(qkv.load(Path(made.run.folder) / "model").model.named_parameters())
    assert apart({name: p.detach().double() for name, p in found.items()}, average) < 1e-6
    assert trainer.valid_loss() == result.valid_loss != runs.log(made.run.folder)[-1]["valid_loss"]


def test_the_final_model_loads_and_writes(tmp_path: Path) -> None:
    made = runs.recipe(
        tmp_path,
        model=runs.tiny("gpt2", 320, **DRY),
        tokenizer="train-bpe:320",
        run__steps=50,
        run__sample_every=25,
        schedule__peak=1e-2,
    )
    result = qkv.train(made)
    lm = qkv.load(result.folder / "model")
    assert lm.tokenizer is not None
    assert lm.tokenizer.vocab_size <= 320
    assert "sat on the mat" in lm.generate("the cat", 16, decoding=Greedy()).text
    assert result.steps == 50
    assert result.valid_loss == runs.log(result.folder)[-1]["valid_loss"]
    assert [entry["step"] for entry in runs.log(result.folder) if "sample" in entry] == [25, 50]
    assert Recipe.read(result.folder / "recipe.toml") == made


def test_a_run_goes_on_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    first = runs.recipe(tmp_path, run__steps=5)
    runs.finished(first)
    model = {"checkpoint": str(Path(first.run.folder) / "model")}
    more = runs.elsewhere(first, "more").override({"model": model, "tokenizer": "checkpoint", "run.steps": 2})
    trainer = Trainer.start(more)
    expected = qkv.load(Path(first.run.folder) / "model").model.state_dict()
    assert runs.differences(dict(expected), dict(trainer.model.state_dict())) == []
    assert len(list(trainer.run())) == 2


def test_evaluation_scores_each_target_once(tmp_path: Path) -> None:
    made = runs.recipe(tmp_path, model=runs.tiny("gpt2", **DRY))
    trainer = Trainer.start(made)
    lm, shards = trainer.parts.lm, trainer.parts.valid
    tokens = torch.from_numpy(shards.tokens.read(0, shards.n_tokens).astype("int64"))
    trainer.model.eval()
    total, count = 0.0, 0
    for end in [*range(16, len(tokens) - 1, 16), len(tokens) - 1]:
        window = tokens[end - 16 : end + 1]
        fresh = end - count  # the last window reaches back into the one before
        with torch.no_grad():
            logits = lm.model(window[None, :-1]).logits[0, -fresh:].double()
        total += float(torch.nn.functional.cross_entropy(logits, window[-fresh:], reduction="sum"))
        count += fresh
    assert count == len(tokens) - 1 != 16 * (len(tokens) // 16)
    assert trainer.valid_loss() == pytest.approx(total / count, rel=1e-6)


# A full disk


FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*arguments: Any, **options: Any) -> Any:
    raise FULL


@pytest.mark.parametrize("where", ["training", "torch", "model", "state"])
def test_a_full_disk_stops_the_run_and_the_last_checkpoint_stays(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runs.recipe(tmp_path, run__save_every=2, run__steps=6)
    whole = runs.elsewhere(made, "whole")
    runs.finished(whole)
    trainer, _ = steps(made, 3)
    with monkeypatch.context() as patch:
        if where == "training":
            patch.setattr(torch, "save", full)
        elif where == "torch":

            def failing(*_: Any) -> None:
                raise RuntimeError("[enforce fail at inline_container.cc:815] . PytorchStreamWriter failed\nfile write")

            patch.setattr(torch, "save", failing)
        elif where == "model":
            patch.setattr("qkv.checkpoint.native.write_file", full)
        else:
            patch.setattr("qkv.train.checkpoints.json.dumps", full)
            patch.setattr(trainer.journal, "write", lambda entry: None)
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*(No space left|failed file write)") as caught:
            list(trainer.run())
    assert "\n" not in str(caught.value)
    assert [path.name for path in (Path(made.run.folder) / "checkpoints").iterdir()] == ["00000002"]
    list(Trainer.resume(made).run())
    assert runs.differences(runs.left_by(whole.run.folder)["model"], runs.left_by(made.run.folder)["model"]) == []


def test_a_full_disk_under_the_log_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = steps(runs.recipe(tmp_path), 1)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(CheckpointError, match=r"log\.jsonl: cannot be written \(No space left"):
        list(trainer.run())
