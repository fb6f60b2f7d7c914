"""The numbers of docs/scale.md are those of its formulas and of the presets; its recipes are recipes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import qkv
from qkv.config import Gated
from qkv.config.parallel import Parallel
from qkv.config.recipe import Recipe

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (llama\S+) \| ([\d,]+) \| (\d+) x (\d+) x (\d+) \| ([\d,]+) \| (.*) \|$", PAGE, re.MULTILINE)


def predicted(name: str, sizes: tuple[int, int, int], tokens: int) -> list[float]:
    """State, gathered, between blocks, inside, together, sent by data ranks and by tensor ranks: in GB."""
    data, context, t = sizes
    model = qkv.preset(name)
    assert model.decoder is not None
    counts = {path: math.prod(tensor.shape) for path, tensor in model.shapes().items()}
    blocks = sum(count for path, count in counts.items() if ".layers." in path)
    rest, layers, ffn = sum(counts.values()) - blocks, model.decoder.n_layers, model.decoder.blocks[0].ffn
    assert isinstance(ffn, Gated)
    n, own, d = data * context, blocks / t + rest, model.d_model
    memory = [
        16 * own / n,
        10 * blocks / (layers * t) + 8 * rest,
        4 * d * layers * tokens / context,
        (24 * d + 8 * ffn.d_ff / t) * tokens / context,
    ]
    sent = [8 * own * (n - 1) / n, 16 * d * layers * tokens / context * 2 * (t - 1) / t]
    return [value / 1e9 for value in (*memory, sum(memory), *sent)]


def test_the_table_is_what_the_formulas_say() -> None:
    assert len(ROWS) == 4
    for name, processes, data, context, tensor, tokens, figures in ROWS:
        sizes = int(data), int(context), int(tensor)
        assert math.prod(sizes) == int(processes.replace(",", ""))
        expected = predicted(name, sizes, int(tokens.replace(",", "")))
        assert [float(figure) for figure in figures.split(" | ")] == pytest.approx(expected, abs=0.051)


def test_the_recipes_are_recipes() -> None:
    first, second = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    whole = Recipe.from_toml(first)
    assert whole.parallel == Parallel(data="fsdp")
    larger = whole.override({"model.preset": "llama-2-70b"}).to_toml()
    assert Recipe.from_toml(larger).override({"parallel": {"data": "fsdp", "tensor": 8}}).run.batch == 256
    assert "tensor = 8" in second
    assert Recipe.from_toml(larger).override({"parallel.context": 8, "model.preset": "llama-2-long-70b"})
