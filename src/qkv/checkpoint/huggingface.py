"""Hugging Face folders: config.json and safetensors, both ways, by the family's data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.rules import to_ours, to_theirs
from qkv.checkpoint.safetensors import SINGLE, Array, read_folder
from qkv.checkpoint.safetensors import write as write_file
from qkv.checkpoint.template import Family, Json, Keys, read, write
from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError

# Keys of every config.json that say nothing about what the model computes.
_FREE = (
    "_name_or_path", "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens", "bos_token_id",
    "chunk_size_feed_forward", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "eos_token_id", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
    "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
    "length_penalty", "max_length", "min_length", "model_type", "n_special", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "output_scores",
    "pad_token_id", "predict_special_tokens", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p",
    "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
)  # fmt: skip


def family_of(data: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json, by `model_type` and the fields that families differ in."""
    kind = data.get("model_type")
    families = [family for family in FAMILIES if kind in family.model_types]
    if not families:
        known = ", ".join(sorted({name for family in FAMILIES for name in family.model_types}))
        raise CheckpointError(f"{where}: model_type is {kind!r}; this qkv knows {known}")
    named = data.get("architectures") or [families[0].architecture]
    return next((family for family in families if family.architecture in named), families[0])


def read_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Our config from theirs; a key that is not understood is an error that names it."""
    family = family_of(data, where)
    keys = Keys(data, where)
    tree = read(family.template, keys)
    problems = []
    for key, value in family.must.items():
        found = keys.get(key, value)
        if found != value:
            problems.append(f"{key} is {found!r}, but {family.name} is understood with {value!r} only")
    keys.read.update(_FREE, family.free)
    problems += [f"{key} ({data[key]!r}) is not understood" for key in keys.unread()]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    try:
        return ModelConfig.from_dict(tree)
    except ConfigError as error:
        raise CheckpointError(f"{where}: describes no model that can exist: {error}") from None


def write_config(config: ModelConfig, family: Family) -> Json:
    """Their config from ours; refused if reading it again would give another model."""
    out: Json = {"architectures": [family.architecture], "model_type": family.model_types[0], **family.must}
    write(family.template, config.to_dict(), out)
    try:
        again = read_config(out)
    except CheckpointError as error:
        raise CheckpointError(f"{family.name} cannot express this model: {error}") from None
    if again != config:
        lost = ", ".join(_differences(config.to_dict(), again.to_dict()))
        raise CheckpointError(f"{family.name} cannot express this model: it would lose {lost}")
    return out


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
        tensors = to_ours(config, family.rules, read_folder(folder), ignored=family.ignored, tied=family.tied)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return config, tensors


def family_for(config: ModelConfig) -> Family:
    """The first family that can express this model."""
    reasons = []
    for family in FAMILIES:
        try:
            write_config(config, family)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return family
    raise CheckpointError(f"no family can express this model; save in qkv's own format ({reasons[0]})")


def to_folder(config: ModelConfig, tensors: Mapping[str, Array]) -> tuple[Json, dict[str, Array]]:
    """Their config.json and tensors of one of our models."""
    family = family_for(config)
    return write_config(config, family), to_theirs(config, family.rules, tensors)


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[str, Array]) -> None:
    """Save a model as a folder that `transformers` reads; refused if no family can express it."""
    data, theirs = to_folder(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    write_file(folder / SINGLE, theirs, {"format": "pt"})
