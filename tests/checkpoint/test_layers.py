"""Stacks of unlike layers: words to `first` and `layers`, and back."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.checkpoint.layers import Every, FirstThen, Layers, fold, unfold
from qkv.checkpoint.template import Key, Keys
from qkv.errors import CheckpointError

N = Key("n")
LAYERS = Layers(
    N,
    Key("order"),
    {"near": {"window": Key("window"), "kind": "local"}, "far": {"kind": "global"}},
    {"eps": Key("eps")},
)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_folding_loses_nothing_and_nothing_is_shorter(items: list[str]) -> None:
    first, cycle = fold(items)
    assert unfold(len(items), first, cycle) == items
    size = len(first) + len(cycle)
    if size <= 5:
        for shorter in range(1, size):
            for words in product("abc", repeat=shorter):
                for cut in range(shorter):
                    assert unfold(len(items), words[:cut], words[cut:]) != items


@pytest.mark.parametrize(
    ("items", "first", "cycle"),
    [
        ("SSSSSFSSSSSFSS", "", "SSSSSF"),
        ("DDDEEEE", "DDD", "E"),
        ("SFSFSF", "", "SF"),
        ("DE", "", "DE"),
        ("AAAA", "", "A"),
        ("DSFSFS", "D", "SF"),
        ("SSS", "", "S"),
        ("FSSSS", "F", "S"),
    ],
)
def test_folds_as_the_published_stacks_are_described(items: str, first: str, cycle: str) -> None:
    assert fold(items) == (list(first), list(cycle))


def stack(order: list[str], **more: Any) -> dict[str, Any]:
    return {"n": len(order), "order": order, "eps": 1e-5, "window": 4, **more}


@pytest.mark.parametrize("order", [["near"] * 3 + ["far"] + ["near"] * 2, ["far", "near", "near"], ["near"]])
def test_a_stack_is_read_and_written(order: list[str]) -> None:
    told = stack(order)
    out: dict[str, Any] = {}
    read = LAYERS.read(Keys(told, "file"))
    assert read["norm"] == {"eps": 1e-5}
    blocks = {"near": {"window": 4, "kind": "local"}, "far": {"kind": "global"}}
    assert unfold(len(order), read["first"], read["layers"]) == [blocks[word] for word in order]
    LAYERS.write(read, out)
    assert out == told


def test_a_kind_that_no_layer_has_is_not_read() -> None:
    assert LAYERS.read(Keys(stack(["far"], window=None), "file"))["layers"] == [{"kind": "global"}]


def test_wrong_words_are_named() -> None:
    with pytest.raises(CheckpointError, match="file: speaks of 1 layer types, but of 2 layers"):
        LAYERS.read(Keys(stack(["far"]) | {"n": 2}, "file"))
    with pytest.raises(CheckpointError, match="layers of type mamba; this qkv knows near, far"):
        LAYERS.read(Keys(stack(["far", "mamba"]), "file"))
    with pytest.raises(CheckpointError, match="no word for layer 1"):
        LAYERS.write({"n_layers": 2, "first": [], "layers": [{"kind": "global"}, {"kind": "chunked"}]}, {})


def test_orders_that_a_number_tells() -> None:
    keys = Keys({"n": 5, "dense": 2, "period": 3}, "file")
    assert Every(N, Key("period"), "s", "f").read(keys) == ["s", "s", "f", "s", "s"]
    rule = FirstThen(N, Key("dense"), "d", "e")
    out: dict[str, Any] = {}
    assert rule.read(keys) == ["d", "d", "e", "e", "e"]
    rule.write(["d", "d", "e", "e", "e"], out)
    assert out == {"dense": 2}
    assert rule.read(Keys({"n": 1, "dense": 28}, "file")) == ["d"]
