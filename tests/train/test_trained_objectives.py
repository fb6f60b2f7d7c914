"""Every objective, from a recipe: its data, a fitting preset made small, and a loss that falls."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.train import Trainer

from . import runs


def parallel(folder: Path) -> dict[str, Any]:
    sides = {"en": ["the cat sat", "a red dog ran", "the old cat ran"], "fr": ["le chat", "un chien rouge", "le chat"]}
    for name, lines in sides.items():
        (folder / f"one.{name}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "two.tsv").write_text("the red cat sat\tle chat rouge\n", encoding="utf-8")
    return {
        "train": [f"{folder / 'one.en'}::{folder / 'one.fr'}"],
        "valid": [str(folder / "two.tsv")],
        "format": "parallel",
        "context": 24,
    }


def chats(folder: Path) -> dict[str, Any]:
    path = folder / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in (("the cat?", "sat on the mat."), ("a dog?", "ran to the barn."), ("who?", "the wind."))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return {"train": [str(path)], "valid": [str(path)], "format": "chat", "context": 40}


def text(folder: Path) -> dict[str, Any]:
    path = runs.corpus(folder, copies=2)
    return {"train": [path], "valid": [path], "context": 24}


HEAD = {"kind": "masked-lm"}
TASKS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "next-token": (runs.tiny("gpt2", 300), text, {"kind": "next-token"}),
    "masked": (runs.tiny("bert-base-uncased", 300, head=HEAD), text, {"kind": "masked", "whole_word": True}),
    "span-corruption": (runs.tiny("t5-small", 300), text, {"kind": "span-corruption"}),
    "seq2seq": (runs.tiny("transformer-base", 300), parallel, {"kind": "seq2seq"}),
    "seq2seq, a decoder alone": (runs.tiny("gpt2", 300), parallel, {"kind": "seq2seq"}),
    "answers": (runs.tiny("gpt2", 300), chats, {"kind": "answers"}),
    "next-token, chats": (runs.tiny("gpt2", 300), chats, {"kind": "next-token"}),
    "prefix": (
        runs.tiny("gpt2", 300, decoder__layers__0__attention__pattern={"kind": "prefix"}),
        text,
        {"kind": "prefix"},
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_objective_learns(task: str, tmp_path: Path) -> None:
    model, data, objective = TASKS[task]
    made = runs.recipe(
        tmp_path,
        model=model,
        tokenizer=runs.tokenizer(tmp_path),
        data=data(tmp_path),
        objective=objective,
        run__steps=20,
        run__eval_every=10,
        run__micro_batch=3,
        run__sample_every=20,
        schedule__peak=1e-2,
    )
    reports = runs.finished(made)
    assert all(math.isfinite(report.loss) and report.tokens > 0 for report in reports)
    valid = [report.valid_loss for report in reports if report.valid_loss is not None]
    assert [report.step for report in reports if report.sample] == ([] if task == "masked" else [20])
    assert len(valid) == 2
    assert valid[1] < valid[0] < math.log(300)
    assert qkv.load(Path(made.run.folder) / "model").config == Trainer.resume(made).model.config
