"""Adapters as files, in the format of the `peft` package.

    adapter_config.json          rank, alpha, dropout, and the layers that are meant
    adapter_model.safetensors    base_model.model.<layer>.lora_A.weight (rank, in), ...lora_B.weight (out, rank)

Layers are called as in the model's own files: by the names of the family that it was read from, or is written as, or,
without a family, by ours. A family that keeps several of our matrices in one (GPT-2's c_attn, Phi-3's qkv_proj) has no
layer of its own for each, and an adapter there is refused. Where it stores a matrix (in, out), as GPT-2 does,
`fan_in_fan_out` says so; A and B are the same either way.

Reading is strict: an option that changes what is computed is understood or refused by its name. What is unknown may
stand there as long as it is switched off: null, false, or empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.ops import Transpose
from qkv.checkpoint.rules import Fallback, applications, respelled
from qkv.checkpoint.safetensors import Array, File
from qkv.checkpoint.safetensors import write as write_file
from qkv.checkpoint.template import Family
from qkv.checkpoint.whole_folder import whole_folder
from qkv.errors import CheckpointError, ConfigError
from qkv.model.weights import array, tensor
from qkv.nn import Transformer
from qkv.train.adapter_layers import Lora
from qkv.train.adapters import adapter_of, attach, base_of, linear_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")
# What says where the adapter comes from, or which layers it means, which the tensors say themselves.
_FREE = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
_CHOICES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (False, True),
    "fan_in_fan_out": (False, True),
    # Ways to begin that leave the base as it is; others (pissa, olora, corda, loftq) learn beside another base.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}


def save_adapter(
    model: Transformer, folder: str | PathLike[str], name: str = "default", family: str | None = None
) -> None:
    """Write one adapter; an older one at `folder` is replaced, anything else is refused."""
    folder = Path(folder)
    foreign = {path.name for path in folder.iterdir()} - {CONFIG, WEIGHTS} if folder.is_dir() else set()
    if folder.is_file() or foreign:
        raise CheckpointError(f"{folder}: holds something else than an adapter; choose another folder")
    if family is not None and _family(family).inside is not None:
        raise CheckpointError(f"family {family!r} is a part of a larger model, and only read; save without a family")
    parts, names = adapter_of(model, name), Names.of(model, family)
    called = {layer: names.theirs(layer) for layer in parts}
    lora = next(iter(parts.values())).lora
    tensors = {
        f"base_model.model.{called[layer]}.lora_{kind}.weight": array(factor.weight)
        for layer, part in parts.items()
        for kind, factor in (("A", part.A), ("B", part.B))
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.config.head.reads == "past" and model.encoder is None else None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": False,
        "fan_in_fan_out": names.fan_in_fan_out(parts),
        "bias": "none",
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": sorted(called.values()),
    }
    with whole_folder(folder) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_file(new / WEIGHTS, tensors, {"format": "pt"})


def load_adapter(
    model: Transformer, folder: str | PathLike[str], name: str = "default", family: str | None = None
) -> list[str]:
    """Read an adapter beside the layers that it names, and make it the active one; our names of the layers."""
    folder = Path(folder)
    config = _json(folder / CONFIG)
    lora, fan_in_fan_out = read_config(config, str(folder / CONFIG))
    names = Names.of(model, family)
    try:
        found = _pairs(dict(File(folder / WEIGHTS)), names)
        _check_shapes(model, found, lora)
        if fan_in_fan_out != names.fan_in_fan_out(found):
            raise CheckpointError(
                f"fan_in_fan_out is {fan_in_fan_out}, but {family or 'this model'} stores matrices the other way; "
                "give the family that the adapter was made for"
            )
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    made = attach(model, name, lora, found)
    with torch.no_grad():
        for layer, pair in found.items():
            made[layer].A.weight.copy_(tensor(pair["A"]))
            made[layer].B.weight.copy_(tensor(pair["B"]))
    return list(found)


def read_config(config: Mapping[str, Any], where: str) -> tuple[Lora, bool]:
    """Rank, alpha and so on, and `fan_in_fan_out`; one error names every option that is not understood."""
    known = _FREE | _CHOICES.keys() | {"r", "lora_alpha", "lora_dropout"}
    problems = [
        f"{key} is {value!r}, which qkv does not compute"
        for key, value in config.items()
        if key not in known and value not in (None, False, {}, [], "")
    ]
    problems += [f"{key} is missing" for key in ("peft_type", "r", "lora_alpha") if key not in config]
    for key, choices in _CHOICES.items():
        value = config.get(key, choices[0])
        if value not in choices:
            problems.append(f"{key} is {value!r}, but qkv reads {', '.join(map(repr, choices))} only")
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    try:
        lora = Lora(config["r"], config["lora_alpha"], config.get("lora_dropout", 0.0), config.get("use_rslora", False))
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    return lora, config.get("fan_in_fan_out", False)


@dataclass(frozen=True)
class Names:
    """What the files of a family call our layers."""

    alone: Mapping[str, tuple[str, bool]]
    """Our layer: theirs, and whether it is stored (in, out)."""
    fused: Mapping[str, str]
    """Our layer: the one of theirs that holds more than it."""
    spellings: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Transformer, family: str | None) -> Names:
        """Of a model; without a family, the names are ours."""
        layers = linear_layers(model)
        if family is None:
            return cls({layer: (layer, False) for layer in layers}, {})
        found = _family(family)
        made = list(applications(model.config, found.rules))
        left = model.config.shapes().keys() - {name for one in made for name in one.ours}
        if left:
            raise CheckpointError(f"family {family!r} has no place for {min(left)}; give the family of this model")
        alone: dict[str, tuple[str, bool]] = {}
        fused: dict[str, str] = {}
        for one in made:
            ops, theirs = one.rule.ops, [name.removesuffix(".weight") for name in one.theirs]
            single = len(one.ours) == len(theirs) and all(isinstance(op, Transpose) for op in ops)
            for at, name in enumerate(one.ours):
                layer = name.removesuffix(".weight")
                if layer in layers and name != layer and single:
                    alone[layer] = theirs[at], len(ops) % 2 == 1
                elif layer in layers and name != layer:
                    fused[layer] = theirs[0]
        ways = tuple(way for way in found.spellings if not isinstance(way, Fallback))
        return cls(alone, fused, ways)

    def theirs(self, layer: str) -> str:
        """Their name of one of our layers."""
        if layer in self.fused:
            raise CheckpointError(f"{layer}: {self._why(self.fused[layer])}; save without a family")
        return self.alone[layer][0]

    def ours(self, theirs: Mapping[str, Array]) -> dict[str, str]:
        """Our names of their layers, given with an array of each."""
        back = {name: layer for layer, (name, _) in self.alone.items()}
        found: dict[str, str] = {}
        problems = []
        for name in theirs:
            (spelled,) = respelled({f"{name}.weight": theirs[name]}, self.spellings)
            known = spelled.removesuffix(".weight")
            if known in back:
                found[name] = back[known]
            else:
                problems.append(self._why(known) if known in self.fused.values() else f"{name} is no layer here")
        if problems:
            known = ", ".join(list(back)[:3])
            raise CheckpointError(f"{'; '.join(problems[:8])} (layers of this model: {known} and so on)")
        return found

    def fan_in_fan_out(self, layers: Mapping[str, Any]) -> bool:
        """Whether their files hold these layers' matrices (in, out)."""
        return any(self.alone[layer][1] for layer in layers)

    def _why(self, theirs: str) -> str:
        held = [layer.rpartition(".")[2] for layer, name in self.fused.items() if name == theirs]
        return f"{theirs} holds {', '.join(held)} in one matrix, so that an adapter there is not one of ours"


def _family(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise CheckpointError(f"family {name!r} is not known; choose one of {', '.join(f.name for f in FAMILIES)}")


def _pairs(tensors: Mapping[str, Array], names: Names) -> dict[str, dict[str, Array]]:
    """A and B of each of our layers."""
    theirs: dict[str, dict[str, Array]] = {}
    unknown = []
    for key in tensors:
        match = _KEY.fullmatch(key)
        if match is None:
            unknown.append(f"{key} is not understood")
        else:
            theirs.setdefault(match["layer"], {})[match["part"]] = tensors[key]
    lacking = [
        f"{layer}.lora_{part}.weight is missing" for layer, pair in theirs.items() for part in {"A", "B"} - {*pair}
    ]
    problems = unknown + lacking or ([] if theirs else ["it holds no tensors"])
    if problems:
        raise CheckpointError(f"{WEIGHTS}: {'; '.join(problems[:8])}")
    called = names.ours({layer: pair["A"] for layer, pair in theirs.items()})
    if len(set(called.values())) < len(called):
        raise CheckpointError(f"{WEIGHTS}: it names a layer twice, in two spellings; remove one of them")
    return {called[layer]: pair for layer, pair in theirs.items()}


def _check_shapes(model: Transformer, found: Mapping[str, Mapping[str, Array]], lora: Lora) -> None:
    layers = linear_layers(model)
    problems = []
    for layer, pair in found.items():
        base = base_of(layers[layer])
        for part, shape in (("A", (lora.rank, base.in_features)), ("B", (base.out_features, lora.rank))):
            if pair[part].shape != shape:
                problems.append(f"{layer}: lora_{part} is {pair[part].shape}, but model and rank say {shape}")
    if problems:
        raise CheckpointError(f"the tensors do not fit: {'; '.join(problems[:8])}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give the folder of an adapter") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must be a table of options; copy it again")
    return found
