"""Hugging Face folders: config.json and safetensors, both ways, by the family's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qkv.checkpoint import torch_bin
from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.rules import respelled, to_ours, to_theirs
from qkv.checkpoint.safetensors import INDEX, SINGLE, Array, read_folder
from qkv.checkpoint.safetensors import write as write_file
from qkv.checkpoint.template import Family, Json, Keys, read, write
from qkv.checkpoint.whole_folder import whole_folder
from qkv.config import Block, ModelConfig, MultiHead
from qkv.errors import CheckpointError, ConfigError

# Keys of every config.json that say nothing about what the model computes.
_FREE = (
    "_name_or_path", "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "mask_token_id", "max_length", "min_length", "model_type", "n_special", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "pad_token_id", "predict_special_tokens", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class",
    "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
)  # fmt: skip

_TOKEN_IDS = (
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "mask_token_id", "pad_token_id", "sep_token_id",
)  # fmt: skip


def family_of(data: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json, by `model_type` and the fields that families differ in."""
    kind = data.get("model_type")
    families = [family for family in FAMILIES if kind in family.model_types]
    if not families:
        known = ", ".join(sorted({name for family in FAMILIES for name in family.model_types}))
        raise CheckpointError(f"{where}: model_type is {kind!r}; this qkv knows {known}")
    named = data.get("architectures") or []
    found = [family for family in families if not named or {family.architecture, *family.also} & set(map(str, named))]
    if not found:
        known = ", ".join(dict.fromkeys(family.architecture for family in families))
        raise CheckpointError(f"{where}: architectures is {named!r}; of model_type {kind!r} this qkv knows {known}")
    return next(family for family in found if all(data.get(key) == value for key, value in family.where.items()))


def read_config(data: Mapping[str, Any], where: str = "config.json", family: Family | None = None) -> ModelConfig:
    """Our config from theirs; a key that is not understood is an error that names it."""
    family = family_of(data, where) if family is None else family
    keys, problems = Keys(data, where), []
    if family.inside is not None:
        keys.read.update(_FREE, family.beside)
        inner = keys.get(family.inside)
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{where}: {family.inside} must be a table, got {inner!r}")
        problems += _not_understood(keys)
        keys = Keys({**family.defaults, **inner}, f"{where}: {family.inside}")
    tree = read(family.template, keys)
    for key, value in family.must.items():
        found = keys.get(key, value)
        if found != value:
            problems.append(f"{key} is {found!r}, but {family.name} is understood with {value!r} only")
    keys.read.update(_FREE, family.free)
    problems += _not_understood(keys, family.inside)
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    try:
        return ModelConfig.from_dict(tree)
    except ConfigError as error:
        raise CheckpointError(f"{where}: describes no model that can exist: {error}") from None


def _not_understood(keys: Keys, within: str | None = None) -> list[str]:
    place = "" if within is None else f"{within}: "
    return [f"{place}{key} ({keys.data[key]!r}) is not understood" for key in keys.unread()]


def write_config(config: ModelConfig, family: Family) -> Json:
    """Their config from ours; refused if reading it again would give another model."""
    if family.inside is not None:
        raise CheckpointError(f"{family.name} cannot express this model: it would gain parts that qkv does not have")
    unlike = [name for name in ("encoder", "decoder") if (name in family.template) != (name in config.stacks)]
    if unlike:
        raise CheckpointError(f"{family.name} cannot express this model: it would lose or gain {', '.join(unlike)}")
    out: Json = {"architectures": [family.architecture], "model_type": family.model_types[0], **family.must}
    write(family.template, config.to_dict(), out)
    try:
        again = read_config(out, family=family)
    except CheckpointError as error:
        raise CheckpointError(f"{family.name} cannot express this model: {error}") from None
    lost = ", ".join(_differences(_canonical(config), _canonical(again)))
    if lost:
        raise CheckpointError(f"{family.name} cannot express this model: it would lose {lost}")
    return out


def _canonical(config: ModelConfig) -> Json:
    """The config with one spelling for each model: every layer written out, defaults of attention said."""
    tree = config.to_dict()
    for name, stack in config.stacks.items():
        tree[name] = {"norm": tree[name]["norm"], "layers": [_canonical_block(block) for block in stack.blocks]}
    return tree


def _canonical_block(block: Block) -> Json:
    tree = block.to_dict()
    for name in ("attention", "cross_attention"):
        attention = getattr(block, name)
        if attention is not None:
            tree[name]["scale"] = attention.score_scale
        if isinstance(attention, MultiHead):
            tree[name]["n_kv_heads"] = attention.kv_heads
    return tree


def _differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = [*ours, *(name for name in theirs if name not in ours)]
        return [d for n in names for d in _differences(ours.get(n), theirs.get(n), f"{path}.{n}".strip("."))]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [d for i, pair in enumerate(zip(ours, theirs, strict=True)) for d in _differences(*pair, f"{path}.{i}")]
    return [] if ours == theirs else [path]


def read_model(folder: Path) -> tuple[ModelConfig, dict[str, Array]]:
    """Config and tensors of a folder, in our names."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    family, config = family_of(data, str(path)), read_config(data, str(path))
    try:
        theirs = respelled(_stored(folder), family.spellings)
        if family.optional is not None and family.instead is not None and family.optional not in theirs:
            family = _named(family.instead)
            config = read_config(data, str(path), family)
        tensors = to_ours(config, family.rules, theirs, ignored=family.ignored, tied=family.tied)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return config, tensors


def _stored(folder: Path) -> dict[str, Array]:
    """The tensors of a folder: its safetensors, or, where there are none, its older `.bin` files."""
    has_safetensors = (folder / INDEX).is_file() or (folder / SINGLE).is_file()
    return torch_bin.read_folder(folder) if not has_safetensors and torch_bin.found(folder) else read_folder(folder)


def family_for(config: ModelConfig, name: str | None = None) -> Family:
    """The family of this name (or the one that it names instead), or the first one that can express this model."""
    reasons = []
    families: tuple[Family, ...] = tuple(family for family in FAMILIES if family.inside is None)
    if name is not None:
        family = _named(name)
        families = (family,) if family.instead is None else (family, _named(family.instead))
    for family in families:
        try:
            write_config(config, family)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return family
    nearest = min(reasons, key=len)  # the one that would lose least
    raise CheckpointError(f"no family can express this model; save in qkv's own format (nearest: {nearest})")


def _named(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise CheckpointError(f"family {name!r} is not known; choose one of {', '.join(f.name for f in FAMILIES)}")


def token_ids(data: Mapping[str, Any]) -> Json:
    """What a config.json says of control tokens: the model computes the same without, but generation needs it."""
    inside = {family.inside for family in FAMILIES if family.inside is not None}
    tables = [*(data[key] for key in inside if isinstance(data.get(key), Mapping)), data]
    return {name: table[name] for table in tables for name in _TOKEN_IDS if table.get(name) is not None}


def to_folder(
    config: ModelConfig, tensors: Mapping[str, Array], family_name: str | None = None
) -> tuple[Json, dict[str, Array]]:
    """Their config.json and tensors of one of our models."""
    family = family_for(config, family_name)
    return write_config(config, family), to_theirs(config, family.rules, tensors)


def write_folder(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, Array],
    family_name: str | None = None,
    also: Callable[[Path], object] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> None:
    """Save a model as a new folder that `transformers` reads, as the family it came from or the first that fits.

    What is there already is never replaced: the tensors may be mapped from it. All or nothing: the folder takes its
    place when it is complete. `also` writes more into it before that (a tokenizer). `tokens` are the `token_ids` that
    config.json says, unless the family itself speaks of them (RoBERTa's padding).
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already; choose another folder to save into")
    data, theirs = to_folder(config, tensors, family_name)
    data = {**token_ids(tokens or {}), **data}
    with whole_folder(folder) as new:
        (new / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        write_file(new / SINGLE, theirs, {"format": "pt"})
        if also is not None:
            also(new)
