"""The list of operations against the model that runs: every product, every shape, every parameter."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import qkv
import qkv.config as c
from parity.cases import CASES, inputs, presets
from qkv.nn import Transformer, capture
from qkv.plan import Section, Value, operations, tensor_groups

MODELS = CASES | presets()
every_model = pytest.mark.parametrize("name", MODELS)

Shapes = dict[str, set[tuple[int, ...]]]


def numbers(value: Value, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of a value where B, T and S are known."""
    return tuple(sizes[dim.symbol] if dim.size is None else dim.size for dim in value.shape)


def listed(config: c.ModelConfig, sizes: dict[str, int]) -> Shapes:
    """The shapes that the list gives to the result of each module, by the module's name."""
    shapes: Shapes = defaultdict(set)
    for section in operations(config):
        paths = [f"{section.path}.{layer}" for layer in section.layers] or [section.path]
        for step in section.operations:
            for path in paths:
                shapes[f"{path}.{step.name}"].add(numbers(step.writes, sizes))
    return shapes


def observed(model: Transformer, given: dict[str, torch.Tensor]) -> tuple[Shapes, Shapes]:
    """The shapes of what modules return, and of what can be captured, in a real forward pass."""
    returned: Shapes = defaultdict(set)

    def watch(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                returned[name].add(tuple(output.shape))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    with torch.no_grad(), capture(model) as trace:
        model(**given)
    return returned, {name: {tuple(value.shape)} for name, value in trace.items()}


def dense_layers(model: Transformer) -> set[str]:
    """The modules that the list must name: all dense layers but those inside a table or a position scheme."""
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name for name in names if ".projections." not in name and ".positions." not in name}


@every_model
def test_shapes_are_those_of_the_running_model(name: str) -> None:
    config = MODELS[name]
    arrays = inputs(config, "plain")
    assert arrays is not None
    given = {key: torch.from_numpy(np.asarray(value)) for key, value in arrays.items()}
    sizes = {"B": given["tokens"].shape[0], "T": given["tokens"].shape[1]}
    if "source" in given:
        sizes["S"] = given["source"].shape[1]
    model = qkv.build(config)
    returned, captured = observed(model, given)
    shapes = listed(config, sizes)
    for module, expected in shapes.items():
        if module in returned:  # the source's table may serve the target too
            assert returned[module] >= expected if module == "embed.tokens" else returned[module] == expected, module
    assert dense_layers(model) <= shapes.keys()
    assert captured.get("head.logits", set()) == shapes.get("head.logits", set()) | shapes.get("head.classifier", set())
    for section in operations(config):
        weights = [numbers(step.writes, sizes) for step in section.operations if step.writes.name == "p"]
        for layer in section.layers:
            for attention, shape in zip(("attention", "cross_attention"), weights, strict=False):
                assert captured[f"{section.path}.{layer}.{attention}.weights"] == {shape}


@every_model
def test_parameters_add_up(name: str) -> None:
    config = MODELS[name]
    assert sum(section.parameters for section in operations(config)) == config.n_parameters
    assert sum(group.size * group.copies for group in tensor_groups(config)) == config.n_parameters


@every_model
def test_every_value_is_read_as_it_was_written(name: str) -> None:
    known: dict[str, Any] = {"tokens": None, "source": None, "targets": None}
    for section in operations(MODELS[name]):
        for step in section.operations:
            for value in step.reads:
                assert value.name in known, f"{section.path} {step.name} reads {value.name}"
                assert known[value.name] in (None, value.shape), f"{section.path} {step.name}: {value.name}"
            known[step.writes.name] = step.writes.shape


def steps(section: Section) -> list[str]:
    return [step.name for step in section.operations]


def test_the_three_topologies() -> None:
    def paths(name: str) -> list[str]:
        return [section.path for section in operations(qkv.preset(name))]

    assert paths("gpt2") == ["embed", "decoder.layers", "decoder", "head"]
    assert paths("bert-base-uncased") == ["embed", "encoder.layers", "head"]
    assert paths("transformer-base") == [
        "embed",
        "encoder.layers",
        "encoder",
        "decoder input",
        "embed",
        "decoder.layers",
        "head",
    ]


def test_norms_stand_where_the_residual_kind_says() -> None:
    def order(residual: c.Residual) -> list[str]:
        config = MODELS["llama-3-8b"].override({"decoder.layers.0.residual": residual})
        named = steps(operations(config)[1])
        return [name for name in named if "norm" in name or name in ("[scores]", "[activation]", "[add]")]

    assert order(c.PreNorm()) == ["attention_norm", "[scores]", "[add]", "ffn_norm", "[activation]", "[add]"]
    assert order(c.PostNorm()) == ["[scores]", "[add]", "attention_norm", "[activation]", "[add]", "ffn_norm"]
    assert order(c.Parallel()) == ["norm", "[scores]", "[activation]", "[add]"]
    assert order(c.Parallel(shared_norm=False)) == ["attention_norm", "[scores]", "ffn_norm", "[activation]", "[add]"]
    assert order(c.SandwichNorm())[:4] == ["attention_norm", "[scores]", "attention_post_norm", "[add]"]


def test_a_kind_of_ones_own_is_one_operation() -> None:
    before = c.FeedForward.members

    class Doubled(c.FeedForward):
        kind: Literal["doubled"] = "doubled"

        def parameters(self, d_model: int) -> dict[str, c.Parameter]:
            return {"weight": c.Parameter((d_model,), "ones")}

    try:
        qkv.register(Doubled)
        config = MODELS["llama-3-8b"].override({"decoder.layers.0.ffn": {"kind": "doubled"}})
    finally:
        c.FeedForward.members = before
    layer = operations(config)[1]
    (own,) = [step for step in layer.operations if step.name == "ffn"]
    assert own.formula == "f = doubled(n): see its class"
    assert own.parameters == config.d_model
    assert sum(section.parameters for section in operations(config)) == config.n_parameters
