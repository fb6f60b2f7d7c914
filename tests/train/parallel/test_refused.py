"""What several processes cannot do is said in a line that names the place and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from qkv.config.recipe import Recipe
from qkv.errors import ConfigError, TrainingError
from qkv.train import Trainer

from .. import runs
from .processes import together

LAYER = "decoder__layers__0"
DRY = {"dropout": 0.0}
NONE, XL = {"kind": "none"}, {"kind": "transformer-xl"}
MATRICES, ROWS, SHARES = {"tensor": 2}, {"context": 2}, {"data": "fsdp"}


def attention(**changes: Any) -> dict[str, Any]:
    return {"model": runs.tiny("gpt2", **DRY, **{f"{LAYER}__attention__{name}": to for name, to in changes.items()})}


def refused_by_recipe() -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """By name: the section, what else the recipe says, and what is said of it."""
    experts = runs.tiny("gpt2", **DRY)["overrides"] | {
        "decoder.layers.0.ffn": {"kind": "mixture-of-experts", "n_experts": 4, "top_k": 2, "d_ff": 8}
    }
    del experts["decoder.layers.0.ffn.d_ff"]
    odd = runs.tiny("gpt2", **DRY)["overrides"] | {"decoder.layers.0.ffn.d_ff": 33}
    sparse = {"encoder__layers__0__attention__pattern": {"kind": "bigbird"}, "head": {"kind": "masked-lm"}}
    graph = {"model": runs.tiny("bert-base-uncased", **DRY, **sparse), "objective": {"kind": "masked"}}
    dynamic = {"kind": "rotary", "scaling": {"kind": "dynamic-ntk", "factor": 2.0, "original_max_seq_len": 16}}
    both = {"model": runs.tiny("transformer-base", 300, **DRY), "objective": {"kind": "span-corruption"}}
    pooled = runs.tiny("bert-base-uncased", **DRY, head={"kind": "classifier", "n_classes": 2})
    classes = {"model": pooled, "objective": {"kind": "classify"}, "data__format": "labelled"}
    return {
        "heads": ({"tensor": 4}, attention(), "parallel.tensor: must divide the numbers of heads, 2 and 2"),
        "width": (MATRICES, {"model": {"preset": "gpt2", "overrides": odd}}, "must divide d_ff, 33"),
        "experts": (MATRICES, {"model": {"preset": "gpt2", "overrides": experts}}, "experts are divided by that only"),
        "alibi": (MATRICES, attention(positions={"kind": "alibi"}), "'alibi' positions have values for all heads"),
        "sinks": (MATRICES, attention(sinks=True), "only plain heads are divided"),
        "dropped weights": (MATRICES, {}, "set to 0 the dropout of attention weights"),
        "samples": (MATRICES, attention() | {"run__sample_every": 2}, "run.sample_every: .*set it to 0"),
        "compiled": (MATRICES, attention() | {"run__compile": True}, "run.compile: .*leave it out"),
        "dropped weights of a ring": (ROWS, {}, "set to 0 the dropout of attention weights"),
        "length": (ROWS, attention(positions=dynamic), "'dynamic-ntk' reads the length of whole rows"),
        "graph": (ROWS, graph, "reads more than positions"),
        "values": (ROWS, attention(positions={"kind": "shaw", "max_distance": 4}), "need all weights of a row"),
        "two stacks": (ROWS, both, "rows of an encoder-decoder are not divided"),
        "pooled": (ROWS, classes, "'classifier' reads whole rows"),
        "fp16": (SHARES, {"run__precision": "fp16"}, "run.precision: .*take bf16"),
        "averages": (SHARES, {"run__average_last": 1}, "run.average_last: .*take run.ema"),
        "adapters": (SHARES, {"lora": {"rank": 2}}, "lora: .*take 'ddp'"),
        "muon": (SHARES, {"optimizer": {"kind": "muon"}}, "optimizer.kind: .*take adamw or lion"),
    }


@pytest.mark.parametrize("name", refused_by_recipe())
def test_a_recipe_that_cannot_be_divided(name: str, tmp_path: Path) -> None:
    parallel, changes, said = refused_by_recipe()[name]
    runs.recipe(tmp_path, **changes)  # in one process it is a run
    with pytest.raises(ConfigError, match=said) as caught:
        runs.recipe(tmp_path, **changes, parallel=parallel)
    assert re.search("(^|\n  )(parallel|run|lora|optimizer)", str(caught.value))


def test_one_process_takes_the_recipe_of_several(tmp_path: Path) -> None:
    base = runs.recipe(tmp_path, model=runs.tiny("llama-2-7b", **DRY), run__steps=2)
    divided = runs.elsewhere(base, "divided").override({"parallel": {"data": "fsdp", "tensor": 2, "context": 2}})
    assert [r.loss for r in runs.finished(base)] == [r.loss for r in runs.finished(divided)]


def begin(texts: list[str]) -> list[str]:
    """What each run is refused with."""
    said = []
    for text in texts:
        with pytest.raises(ConfigError) as caught:
            Trainer.start(Recipe.from_toml(text))
        said.append(str(caught.value))
    return said


def broken(texts: list[str]) -> list[str]:
    """What ends each run."""
    said = []
    for text in texts:
        with pytest.raises(TrainingError) as caught:
            list(Trainer.start(Recipe.from_toml(text)).run())
        said.append(str(caught.value))
    return said


def test_a_loss_that_is_no_number_ends_all_with_the_same_words(tmp_path: Path) -> None:
    """Steps far too large, whether weights are whole or divided."""
    wild = runs.recipe(tmp_path, model=runs.tiny("llama-2-7b", **DRY), schedule__peak=1e30)
    kinds: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": SHARES, "tensor": MATRICES, "context": ROWS}
    made = [runs.elsewhere(wild, name).override({"parallel": kind}).to_toml() for name, kind in kinds.items()]
    first, second = together(2, broken, made)
    assert first == second
    for said in first:
        assert re.match(
            r"step 2: the loss is [^ ]+, (first in the output of|the weights|but not the gradient of) ", said
        )


def test_what_these_processes_cannot_do(tmp_path: Path) -> None:
    dry = runs.recipe(tmp_path, model=runs.tiny("llama-2-7b", **DRY))
    changes: dict[str, dict[str, Any]] = {
        "run.batch: 4 rows cannot be shared by 3 data ranks; take a multiple of it": {},
        "parallel: 3 processes cannot be divided by tensor 2 x context 1; start a multiple of 2": {
            "parallel": {"tensor": 2}
        },
        "objective.memory: what one step leaves to the next is in one process only; start one": {
            "objective": {"kind": "next-token", "memory": 4},
            "model": runs.tiny("gpt2", **DRY, embedding__positions=NONE, decoder__layers__0__attention__positions=XL),
            "run.batch": 3,
        },
    }
    made = [dry.override(change).to_toml() for change in changes.values()]
    for answers in together(3, begin, made):
        assert answers == list(changes)
    assert not (Path(dry.run.folder) / "recipe.toml").exists()  # nothing has begun
