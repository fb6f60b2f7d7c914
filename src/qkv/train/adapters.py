"""Low-rank adapters: a frozen matrix, and a small learned difference beside it.

    y = W x + b + (alpha / rank) B A x          W (out, in) frozen,  A (rank, in),  B (out, rank)

Hu 2021, arXiv 2106.09685. A is random and B zero, so that training begins at the base model. With `rslora` the factor
is alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732). Dropout falls on the x that A reads.

    add_adapter(model, rank=8, targets=("q_proj", "v_proj"))      everything else is frozen
    merge(model)                                                  W becomes W + factor B A: no cost in generation
    unmerge(model)                                                the stored W is put back, bit for bit

Several adapters may lie beside one matrix; the active ones are summed. `model.state_dict()` speaks of the base alone,
by the names that it has without adapters, so that saving and loading go on as before; while merged, it holds the merged
matrices, and saving writes a model that needs no adapter. `adapter_files` reads and writes the adapters themselves.
What a cache holds was computed with the adapters of then: begin a new one after a change, and give a `TextModel` that
keeps prefixes its `runtime` anew.

`quantise_base` keeps chosen matrices as codes. Merging into codes means decoding, adding and rounding anew.

Stacked experts (E, a, b) are no linear layers and take no adapters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from qkv.config import Uniform
from qkv.errors import ConfigError
from qkv.nn import Transformer
from qkv.nn.ffn import Experts
from qkv.nn.init import draw
from qkv.train.adapter_layers import CODECS, PREFIX, Adapted, Adapter, Lora, Quantised

_NAME = re.compile(r"[A-Za-z0-9_-]+")

# --- which layers


def linear_layers(model: Transformer) -> dict[str, nn.Linear | Quantised | Adapted]:
    """What can have adapters: every linear layer of the stacks, by its name."""
    stacks = tuple(f"{stack}." for stack in model.config.stacks)
    inside = tuple(f"{name}." for name in _adapted(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Quantised | Adapted)
        and name.startswith(stacks)
        and not name.startswith(inside)
    }


def base_of(module: nn.Linear | Quantised | Adapted) -> nn.Linear | Quantised:
    """The layer that is adapted, or that could be."""
    return module.base if isinstance(module, Adapted) else module


def _adapted(model: Transformer) -> dict[str, Adapted]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def chosen_layers(model: Transformer, targets: Sequence[str]) -> list[str]:
    """The names that end as a target says, or fit it as a pattern: `q_proj`, `layers.0.*`, `*attention.?_proj`."""
    patterns = (targets,) if isinstance(targets, str) else tuple(targets)
    layers = linear_layers(model)
    stacked = [
        f"{name}.{tensor}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for tensor, _ in module.named_parameters()
    ]
    for pattern in patterns:
        experts = next((name for name in stacked if _fits(name, pattern)), None)
        if experts is not None:
            raise ConfigError(
                f"targets: {pattern!r} reaches {experts}, the stacked matrices of experts, which take no adapters; "
                "narrow it, such as to attention.*, or shared.up_proj"
            )
        if not any(_fits(name, pattern) for name in layers):
            known = dict.fromkeys(re.sub(r"^.*?layers\.\d+\.", "", name) for name in layers)
            raise ConfigError(f"targets: no linear layer is called {pattern!r}; there are {', '.join(known)}")
    if not patterns:
        raise ConfigError("targets: none given; name the layers that take an adapter, such as q_proj")
    return [name for name in layers if any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


# --- what is done with a model


def add_adapter(
    model: Transformer,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    dropout: float = 0.0,
    name: str = "default",
    rslora: bool = False,
    seed: int = 0,
) -> list[str]:
    """Put a new adapter beside the layers that `targets` choose, and make it the one that is active; their names.

    Everything else is frozen, and stays so when the adapter is removed.
    """
    layers = chosen_layers(model, targets)
    attach(model, name, Lora(rank, alpha, dropout, rslora), layers, seed)
    return layers


def attach(model: Transformer, name: str, lora: Lora, layers: Iterable[str], seed: int = 0) -> dict[str, Adapter]:
    """An adapter beside layers that are named in full; by layer."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"adapter: {name!r} is no name; use letters, digits, _ and -")
    if name in adapters(model):
        raise ConfigError(f"adapter: there is one called {name!r} already; remove it, or choose another name")
    _refuse_merged(model)
    made: dict[str, Adapter] = {}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    modules = linear_layers(model)
    for layer in layers:
        module = modules[layer]
        base = base_of(module)
        made[layer] = Adapter(lora, base).train(base.training)
        with torch.no_grad():
            bound = 1 / math.sqrt(base.in_features)
            made[layer].A.weight.copy_(draw(Uniform(bound), (lora.rank, base.in_features), seed, f"{layer}.{name}"))
            made[layer].B.weight.zero_()
        if not isinstance(module, Adapted):
            module = _replaced(model, layer, Adapted(module))
        module.add_module(PREFIX + name, made[layer])
    activate(model, name)
    return made


def _replaced(model: Transformer, name: str, module: nn.Module) -> Any:
    parent, _, leaf = name.rpartition(".")
    module.train(model.get_submodule(name).training)
    model.get_submodule(parent).add_module(leaf, module)
    return module


def adapters(model: Transformer) -> dict[str, Lora]:
    """The adapters of a model, by name."""
    return {name: one.lora for module in _adapted(model).values() for name, one in module.adapters.items()}


def active_adapters(model: Transformer) -> tuple[str, ...]:
    """The names of those that are computed with."""
    active = {name for module in _adapted(model).values() for name in module.active}
    return tuple(name for name in adapters(model) if name in active)


def adapter_of(model: Transformer, name: str) -> dict[str, Adapter]:
    """The parts of one adapter, by layer."""
    _check_names(model, (name,))
    return {layer: module.adapters[name] for layer, module in _adapted(model).items() if name in module.adapters}


def adapter_state(model: Transformer) -> dict[str, Tensor]:
    """The tensors of all adapters by their parameters' names, as a checkpoint of a training run keeps them.

    `model.load_state_dict(state, strict=False)` puts them back.
    """
    prefixes = tuple(f"{layer}.{PREFIX}" for layer in _adapted(model))
    return {name: tensor.detach() for name, tensor in model.named_parameters() if name.startswith(prefixes)}


def activate(model: Transformer, *names: str) -> None:
    """Compute with these adapters, summed, and no others; without a name, with the base alone. They alone learn."""
    _check_names(model, names)
    _refuse_merged(model)
    for module in _adapted(model).values():
        module.active = tuple(name for name in module.adapters if name in names)
        for name, one in module.adapters.items():
            one.requires_grad_(name in names)


def merge(model: Transformer) -> dict[str, float]:
    """Put the active adapters into the matrices, until `unmerge`; nothing learns meanwhile.

    The answer: how far each layer's matrix is from the exact sum, largest deviation over largest value. It is the
    rounding of the matrix's dtype, or that of the codes.
    """
    _refuse_merged(model)
    if not active_adapters(model):
        raise ConfigError("adapter: none is active, so that there is nothing to merge; add, load or activate one")
    for module in _adapted(model).values():
        for one in module.adapters.values():
            one.requires_grad_(False)
    return {layer: module.merge() for layer, module in _adapted(model).items()}


def unmerge(model: Transformer) -> None:
    """Put the stored matrices back, if any; the adapters that were merged learn again."""
    if any(module.stored is not None for module in _adapted(model).values()):
        for module in _adapted(model).values():
            module.unmerge()
        activate(model, *active_adapters(model))


def remove_adapter(model: Transformer, name: str) -> None:
    """Take an adapter away; a layer without any is what it was before."""
    _check_names(model, (name,))
    _refuse_merged(model)
    for layer, module in _adapted(model).items():
        if name in module.adapters:
            del module._modules[PREFIX + name]
            module.active = tuple(other for other in module.active if other != name)
        if not module.adapters:
            _replaced(model, layer, module.base)


def quantise_base(model: Transformer, codec: str, targets: Sequence[str]) -> list[str]:
    """Keep the matrices that `targets` choose as codes, "int8" or "int4", and frozen; the names of the layers."""
    if codec not in CODECS:
        raise ConfigError(f"codec: {codec!r} is not known; choose one of {', '.join(CODECS)}")
    _refuse_merged(model)
    layers, modules = chosen_layers(model, targets), linear_layers(model)
    for layer in layers:
        module = modules[layer]
        base = base_of(module)
        if isinstance(base, Quantised):
            raise ConfigError(f"{layer}: is kept as {base.codec.name} codes already; load the model anew")
        if isinstance(module, Adapted):
            module.base = Quantised(base, codec)
        else:
            _replaced(model, layer, Quantised(base, codec))
    return layers


def _check_names(model: Transformer, names: Iterable[str]) -> None:
    known = adapters(model)
    for name in names:
        if name not in known:
            raise ConfigError(f"adapter: none is called {name!r}; there are {', '.join(known) or 'none'}")


def _refuse_merged(model: Transformer) -> None:
    if any(module.stored is not None for module in _adapted(model).values()):
        raise ConfigError("adapter: the active ones are merged into the matrices; unmerge the model first")
