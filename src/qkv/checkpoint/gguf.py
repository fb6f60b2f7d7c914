"""GGUF: llama.cpp's models, both ways.

    config, tensors, metadata = read_gguf(path)          tensors in our names; blocks become float32
    write_gguf(path, config, tensors, "Q8_0", metadata)  metadata: `general.*`, `tokenizer.*`

`gguf_file` reads and writes the container, `gguf_blocks` its number formats; `gguf_families` says as data what each
`general.architecture` means, in both directions. A model in several files is read by any of them (`gguf_parts`).
A file without `output.weight`, or with a copy of the token table there, has a tied head. What decides the computation
must be understood: an unknown key of the architecture is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv.checkpoint.gguf_blocks import (
    BY_NAME,
    TYPES,
    WRITTEN,
    Array,
    BlockType,
    as_bfloat16,
    as_float,
    as_half,
    type_name,
)
from qkv.checkpoint.gguf_families import ARCHITECTURES, Architecture
from qkv.checkpoint.gguf_file import File, write_file
from qkv.checkpoint.gguf_leaves import DIVISORS, SHAPES, TIED
from qkv.checkpoint.gguf_parts import Parts, open_gguf
from qkv.checkpoint.layout import identical, to_halves
from qkv.checkpoint.rules import Rule, applications, to_ours, to_theirs
from qkv.checkpoint.template import Json, Keys, read, write
from qkv.config import ModelConfig, MultiHead
from qkv.errors import CheckpointError, ConfigError

_HEAD, _TABLE = "output.weight", "token_embd.weight"
_ALWAYS_F32 = ("position_embd", "token_types", "ffn_gate_inp")
"""Matrices that stay float32 whatever the file's type: llama.cpp computes with them in that type."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7}
"""`general.file_type`: what most of a file's matrices are."""


class Gguf(NamedTuple):
    """What a file holds."""

    config: ModelConfig
    tensors: dict[str, Array]
    """By our names. Mapped where the file has plain numbers; BF16 as its bits in uint16."""
    metadata: dict[str, Any]
    """Every key of the file; arrays of strings are decoded when they are used."""


def read_gguf(path: Path) -> Gguf:
    """A model from one file. Raises one CheckpointError with everything that is wrong."""
    file = open_gguf(path)
    unknown = [f"{name} has type {type_name(e.number)}" for name, e in file.entries.items() if e.kind is None]
    if unknown:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise CheckpointError(f"{path}: {'; '.join(unknown[:8])}; this qkv reads {known}")
    architecture = _named(file)
    tied = _is_tied(file)
    if tied:
        file.entries.pop(_HEAD, None)
    config = _config(architecture, _facts(file, architecture, tied), str(path))
    try:
        tensors = to_ours(config, _rules(architecture, file), file, ignored=architecture.ignored)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    rounded = {name for one in applications(config, architecture.rules) if not one.rule.exact for name in one.ours}
    return Gguf(config, _of_one_type(file, tensors, rounded), file.metadata)


def _of_one_type(file: File | Parts, tensors: dict[str, Array], rounded: set[str]) -> dict[str, Array]:
    """Files of 16 bits have F32 for vectors: given in 16 bits too if that loses nothing, they make a model of one type.

    A model of two types would be turned into float32 when it is loaded, all of it, and its matrices no longer mapped.
    What arithmetic rounded on its way (`rounded`) may be off by what it was rounded by.
    """
    kinds = {entry.number for entry in file.entries.values()} - {BY_NAME["F32"].number}
    if kinds not in ({BY_NAME["F16"].number}, {BY_NAME["BF16"].number}):
        return tensors
    narrow = as_half if kinds == {BY_NAME["F16"].number} else as_bfloat16
    found = dict(tensors)
    for name, array in tensors.items():
        if array.dtype == np.float32:
            found[name] = narrow(array)
            if np.abs(as_float(found[name]) - array).max(initial=0.0) > (2**-24 if name in rounded else 0):
                return tensors
    return found


def _named(file: File | Parts) -> Architecture:
    name = file.metadata.get("general.architecture")
    found = [architecture for architecture in ARCHITECTURES if isinstance(name, str) and architecture.name == name]
    if not found:
        known = ", ".join(architecture.name for architecture in ARCHITECTURES)
        raise CheckpointError(f"{file.path}: general.architecture is {name!r}; this qkv knows {known}")
    if not file.entries:
        raise CheckpointError(f"{file.path}: holds no tensors, only a vocabulary")
    return found[0]


def _rules(architecture: Architecture, file: File | Parts) -> tuple[Rule, ...]:
    """The architecture's rules, with those of older files in place of the ones whose tensors the file has otherwise."""
    replaced: dict[tuple[str, ...], Rule] = {}
    for rule in architecture.older:
        name = re.compile(re.escape(rule.theirs[0]).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+"))
        if any(name.fullmatch(found) for found in file):
            replaced[rule.ours] = rule
    return tuple(replaced.get(rule.ours, rule) for rule in architecture.rules)


def _is_tied(file: File | Parts) -> bool:
    """Whether the head is the token table: no head of its own, or a copy to the bit."""
    head, table = file.entries.get(_HEAD), file.entries.get(_TABLE)
    if head is None or table is None:
        return True
    same = (head.shape, head.number) == (table.shape, table.number)
    return same and identical(file.raw(_HEAD), file.raw(_TABLE))


def _facts(file: File | Parts, architecture: Architecture, tied: bool) -> Json:
    """The keys of the architecture, and what its leaves want to know of the tensors."""
    prefix = architecture.name + "."
    facts = {k.removeprefix(prefix): _plain(v) for k, v in file.metadata.items() if k.startswith(prefix)}
    facts |= {key: value for key, value in file.metadata.items() if key.startswith("qkv.")}
    facts |= {SHAPES: {name: entry.shape for name, entry in file.entries.items()}, TIED: tied}
    return facts | {fact: file[tensor] for fact, tensor in DIVISORS.items() if tensor in file}


def _plain(value: Any) -> Any:
    """One number where a file repeats it for every layer; the pattern of layers is an array of truth values."""
    per_layer = isinstance(value, np.ndarray) and value.dtype != np.bool_ and value.size > 0
    return value[0].item() if per_layer and (value == value[0]).all() else value


_COUNTS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "rope.scaling.original_context_length",
)  # fmt: skip
_ARRAYS = ("attention.sliding_window_pattern",)
"""The keys that may differ between layers."""


def _implausible(facts: Json) -> Iterator[str]:
    """What no model has: the template computes with these numbers."""
    for key, value in facts.items():
        if key.startswith("@") or (key in _ARRAYS and isinstance(value, np.ndarray)):
            continue
        if not isinstance(value, str | int | float):
            yield f"{key} is not the same in every layer, which is not understood"
        elif key in _COUNTS and (not isinstance(value, int) or value < 1):
            yield f"{key} is {value!r}, but must be a positive whole number"
        elif key == "attention.sliding_window" and (not isinstance(value, int) or value < 0):
            yield f"{key} is {value!r}, but must be a whole number, 0 for none"
        elif key.startswith("rope.") and not key.endswith(("type", "finetuned")) and not _is_positive(value):
            yield f"{key} is {value!r}, but must be a positive number"
    if isinstance(facts.get("block_count"), int) and facts["block_count"] > len(facts[SHAPES]):
        yield f"block_count is {facts['block_count']}, but there are {len(facts[SHAPES])} tensors"


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _config(architecture: Architecture, facts: Json, where: str) -> ModelConfig:
    """Our config; a key that is not understood is an error that names it."""
    problems = list(_implausible(facts))
    if problems:
        raise CheckpointError(f"{where}: {architecture.name}: {'; '.join(problems)}")
    keys = Keys(facts, where)
    tree = read(architecture.template, keys)
    for key, value in architecture.must:
        found = keys.get(key, value)
        if found != value:
            problems.append(f"{key} is {found!r}, but {architecture.name} is understood with {value!r} only")
    keys.read.update(architecture.free, (SHAPES, TIED))
    problems += [f"{architecture.name}.{key} ({facts[key]!r}) is not understood" for key in keys.unread()]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    try:
        return ModelConfig.from_dict(tree)
    except ConfigError as error:
        raise CheckpointError(f"{where}: describes no model that can exist: {error}") from None


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Array],
    dtype: str = "F32",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save a model as one file; refused if no architecture of GGUF computes it.

    `dtype` is that of matrices; vectors stay F32, and a matrix whose rows are not whole blocks becomes F16. Dropout and
    initialisation have no place in the format. Norms of Gemma are stored as 1 + weight, which rounds (2^-24 of 1);
    everything else in F32 comes back to the bit.
    """
    if dtype not in WRITTEN:
        raise CheckpointError(f"dtype: GGUF is written as {', '.join(WRITTEN)}, got {dtype!r}")
    config, tensors = to_halves(config, tensors)
    architecture, keys, theirs = _for(config, tensors)
    stored = {name: (array, _stored_as(name, array, dtype)) for name, array in theirs.items()}
    given = {k: v for k, v in (metadata or {}).items() if not k.startswith((f"{architecture.name}.", "GGUF.", "qkv."))}
    head = {"general.architecture": architecture.name, "general.file_type": _FILE_TYPES[dtype]}
    if dtype.startswith("Q"):
        head["general.quantization_version"] = 2
    write_file(path, {**head, **given, **head, **keys}, stored)


def _for(config: ModelConfig, tensors: Mapping[str, Array]) -> tuple[Architecture, Json, dict[str, Array]]:
    """The first architecture that computes this model, with its keys and tensors."""
    reasons = []
    for architecture in ARCHITECTURES:
        try:
            keys, theirs = _exported(architecture, config, tensors)
        except CheckpointError as error:
            reasons.append(f"{architecture.name}: {error}")
        else:
            return architecture, keys, theirs
    nearest = min(reasons, key=len)  # it has the least to complain of
    raise CheckpointError(f"GGUF cannot express this model; save in qkv's own format (nearest: {nearest})")


def _exported(
    architecture: Architecture, config: ModelConfig, tensors: Mapping[str, Array]
) -> tuple[Json, dict[str, Array]]:
    """Keys and tensors; refused if reading them again would give another model."""
    facts: Json = dict(architecture.must)
    write(architecture.template, config.to_dict(), facts)
    facts = {key: value for key, value in facts.items() if value is not None}
    theirs = to_theirs(config, architecture.rules, tensors)
    theirs |= {tensor: facts[fact] for fact, tensor in DIVISORS.items() if fact in facts}
    shapes = {SHAPES: {name: array.shape for name, array in theirs.items()}, TIED: _HEAD not in theirs}
    again = _config(architecture, {key: _rounded(value) for key, value in facts.items()} | shapes, "reading it again")
    wanted, found = _computation(config), _computation(again)
    if wanted != found:
        lost = [key for key in wanted if wanted[key] != found.get(key)]
        raise CheckpointError(f"would lose {', '.join(lost)}")
    prefix = architecture.name
    keys = {k if k.startswith("qkv.") else f"{prefix}.{k}": v for k, v in facts.items() if not k.startswith("@")}
    return keys, theirs


def _rounded(value: Any) -> Any:
    """A number as the file will give it back: through float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _computation(config: ModelConfig) -> Json:
    """What a config says about the result, layer by layer, with defaults that depend on other fields filled in."""
    tree = config.to_dict() | {"init": None}
    tree["embedding"] = _undropped(tree["embedding"])
    for name, stack in config.stacks.items():
        del tree[name]
        for index, block in enumerate(stack.blocks):
            tree[f"{name}.layers.{index}"] = layer = _undropped(block.to_dict())
            if isinstance(block.attention, MultiHead):
                layer["attention"] |= {"n_kv_heads": block.attention.kv_heads, "scale": block.attention.score_scale}
        tree |= {f"{name}.norm": stack.norm.to_dict(), f"{name}.n_layers": stack.n_layers}
    return tree


def _undropped(tree: Any) -> Any:
    """Without dropout, and with divisors of rotary pairs as precise as files, and the peer, have them."""
    if isinstance(tree, list):
        return [_undropped(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {key: _undropped(value) for key, value in tree.items() if key != "dropout"}
    rounded = {key: np.float32(kept[key]).tolist() for key in ("short_factor", "long_factor") if key in kept}
    return kept | rounded


def _stored_as(name: str, array: Array, dtype: str) -> BlockType:
    if array.ndim < 2 or name.startswith(_ALWAYS_F32) or any(f".{part}." in name for part in _ALWAYS_F32):
        return BY_NAME["F32"]
    kind = BY_NAME[dtype]
    return kind if array.shape[-1] % kind.elements == 0 else BY_NAME["F16"]
