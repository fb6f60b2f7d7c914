"""Tiny runs: recipes, what a run leaves behind, and runs that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import qkv
from qkv.checkpoint import whole_folder
from qkv.config.recipe import Recipe
from qkv.text.folder import write_folder
from qkv.text.training import train_bpe
from qkv.train import Report, Trainer, checkpoints

SENTENCES = ("the cat sat on the mat.", "a dog ran to the old red barn.", "who has seen the wind and the rain?")
CONTROLS = ("</s>", "<pad>", "[CLS]", "[SEP]", "[MASK]", *(f"<extra_id_{number}>" for number in range(8)))
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def corpus(folder: Path, copies: int = 12) -> str:
    """A text file of a few sentences, over and over."""
    path = folder / "corpus.txt"
    path.write_text("\n".join(SENTENCES * copies) + "\n", encoding="utf-8")
    return str(path)


def tokenizer(folder: Path, vocab_size: int = 300) -> str:
    """A folder with a small vocabulary, roles for its control tokens, and a chat template."""
    found = train_bpe(SENTENCES, vocab_size, controls=CONTROLS)
    roles = {"eos": "</s>", "pad": "<pad>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    ids = {role: found.specials.controls[text] for role, text in roles.items()}
    found.specials = replace(found.specials, **ids, starts=(ids["pad"],), chat_template=TEMPLATE)
    target = folder / "tokenizer"
    target.mkdir()
    assert write_folder(target, found)
    return str(target)


def tiny(preset: str, vocab_size: int = 256, *, dropout: float = 0.1, **changes: Any) -> dict[str, Any]:
    """A preset as a model source, at a size that trains in an instant."""
    config = qkv.preset(preset)
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    changes |= {"vocab_size": vocab_size, "d_model": 16, "max_seq_len": 48, "embedding.dropout": dropout}
    for name, stack in config.stacks.items():
        layer = f"{name}.layers.0"
        changes |= {f"{name}.n_layers": 2, f"{layer}.dropout": dropout, f"{layer}.ffn.d_ff": 32}
        attentions = ["attention", "cross_attention"] if stack.layers[0].cross_attention is not None else ["attention"]
        for attention in attentions:
            changes |= {f"{layer}.{attention}.n_heads": 2, f"{layer}.{attention}.head_dim": 8}
            changes[f"{layer}.{attention}.dropout"] = dropout
    return {"preset": preset, "overrides": changes}


def recipe(folder: Path, **changes: Any) -> Recipe:
    """Ten steps on bytes, in `folder`/run; `changes` by names with __ for dots."""
    base = Recipe.from_dict(
        {
            "model": tiny("gpt2"),
            "data": {"train": [corpus(folder)], "context": 16, "valid_share": 0.2},
            "schedule": {"kind": "constant", "peak": 1e-3},
            "run": {"steps": 10, "batch": 4, "seed": 7, "folder": str(folder / "run")},
        }
    )
    return base.override({name.replace("__", "."): value for name, value in changes.items()})


def elsewhere(base: Recipe, name: str) -> Recipe:
    """The same run in another folder beside its own."""
    return base.override({"run.folder": str(Path(base.run.folder).with_name(name))})


def finished(made: Recipe) -> list[Report]:
    return list(Trainer.start(made).run())


def log(folder: Path | str) -> list[dict[str, Any]]:
    """The lines of a run's log, without the clock."""
    lines = (Path(folder) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def saved(folder: Path | str) -> list[str]:
    return [path.name for path in checkpoints.folders(Path(folder))]


def left_by(folder: Path | str) -> dict[str, Any]:
    """Everything that a run leaves: the last checkpoint, the final model, the log."""
    last = checkpoints.folders(Path(folder))[-1]
    found = checkpoints.read(last)
    return {
        "checkpoint": dict(qkv.load(last / checkpoints.MODEL).model.state_dict()),
        "model": dict(qkv.load(Path(folder) / "model").model.state_dict()),
        "training": found.training,
        "data": found.data,
        "step": found.step,
        "log": log(folder),
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values are not the same to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [path]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [*a.keys(), *(b.keys() - a.keys())]
        return [one for name in names for one in differences(a.get(name), b.get(name), f"{path}/{name}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [one for at, (x, y) in enumerate(zip(a, b, strict=True)) for one in differences(x, y, f"{path}/{at}")]
    return [] if type(a) is type(b) and a == b else [path]


# Runs that end at once

PLACES = ("model", "training", "half", "state", "rename", "delete")
"""In the middle of a save: before the model's folder is in place, before training.pt, in the middle of it, before
state.json, before the whole takes its place, and before older ones are deleted."""


def killed(made: Recipe, step: int, place: str | None = None) -> None:
    """Run in a process of its own that SIGKILL ends after `step`, or in the middle of its save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkv.train"])
    process = context.Process(target=_until_killed, args=(made.to_toml(), step, place))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def in_another_process(made: Recipe) -> None:
    """The whole run in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkv.train"])
    process = context.Process(target=_whole, args=(made.to_toml(),))
    process.start()
    process.join()
    assert process.exitcode == 0


def _whole(text: str) -> None:
    torch.set_num_threads(1)
    finished(Recipe.from_toml(text))


def _until_killed(text: str, step: int, place: str | None) -> None:
    torch.set_num_threads(1)
    trainer = Trainer.start(Recipe.from_toml(text))
    reports = trainer.run()
    while trainer.step < step - 1:
        next(reports)
    if place is not None:
        _set_trap(place)
    next(reports)
    _die()


def _die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half(content: dict[str, Any], path: Path) -> None:
    torch.save(content, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    _die()


def _set_trap(place: str) -> None:
    """Die at that place of the next save. The process ends with it: nothing needs to be put back."""
    swap, write, remove = whole_folder._swap, Path.write_text, shutil.rmtree

    def swapping(new: Path, target: Path, old: Path) -> None:
        if (target.name == checkpoints.MODEL) == (place == "model"):
            _die()
        swap(new, target, old)

    def writing(path: Path, *arguments: Any, **options: Any) -> int:
        if path.name == checkpoints.STATE:
            _die()
        return write(path, *arguments, **options)

    def removing(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name.isdecimal():
            _die()
        remove(path, *arguments, **options)

    match place:
        case "model" | "rename":
            whole_folder._swap = swapping
        case "training":
            checkpoints._save = _die
        case "half":
            checkpoints._save = _half
        case "state":
            Path.write_text = writing
        case "delete":
            shutil.rmtree = removing
