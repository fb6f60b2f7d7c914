"""Meta's folders of Llama: params.json and consolidated.00.pth, .01 ...; also the names that llama2.c uses.

    params.json           {"dim": ..., "n_layers": ..., "n_heads": ..., "norm_eps": ..., ...}
    consolidated.NN.pth   {name: tensor}, one file per model-parallel rank: each holds a slice of every matrix

Rotary heads are in `pairs`; the config says so, and no row is moved. A single shard is mapped; several are joined,
which copies. The pickles are read with `weights_only`: no code that they may hold is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkv.checkpoint.layout import identical
from qkv.checkpoint.ops import Array
from qkv.checkpoint.rules import Ignored, Rule, Tied, to_ours
from qkv.checkpoint.template import Json, Key, Keys, Leaf, Quotient, read
from qkv.checkpoint.torch_bin import read_file
from qkv.config import ModelConfig
from qkv.errors import CheckpointError, ConfigError

PARAMS = "params.json"
_SHARD = re.compile(r"consolidated\.(\d+)\.pth")

RULES = (
    Rule("tok_embeddings.weight", "embed.tokens.weight"),
    Rule("norm.weight", "decoder.norm.weight"),
    Rule("output.weight", "head.weight"),
    *(
        Rule(f"layers.{{i}}.{theirs}.weight", f"decoder.layers.{{i}}.{ours}.weight")
        for theirs, ours in (
            ("attention_norm", "attention_norm"),
            ("attention.wq", "attention.q_proj"),
            ("attention.wk", "attention.k_proj"),
            ("attention.wv", "attention.v_proj"),
            ("attention.wo", "attention.o_proj"),
            ("ffn_norm", "ffn_norm"),
            ("feed_forward.w1", "ffn.gate_proj"),
            ("feed_forward.w2", "ffn.down_proj"),
            ("feed_forward.w3", "ffn.up_proj"),
        )
    ),
)
IGNORED = (Ignored(r"rope\.freqs", "computed from theta"),)
TIED = (Tied("output.weight", "tok_embeddings.weight"),)

_SPLIT_AXIS = {
    "wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0,  # each rank makes some of the outputs
    "wo": 1, "w2": 1,  # each rank reads some of the inputs
}  # fmt: skip
"""Along which axis ranks hold slices. Norms are whole in each; the embedding's axis is told by its shape."""


class Scaled(Leaf):
    """Llama 3.1's rotary scaling: a yes or no; 3.2 adds its factor."""

    def read(self, keys: Keys) -> Json:
        factor, high = keys.get("rope_scaling_factor", 8.0), keys.get("high_freq_factor", 4.0)
        if not keys.get("use_scaled_rope", False):
            return {"kind": "none"}
        fixed = {"low_freq_factor": 1.0, "original_max_seq_len": 8192}
        return {"kind": "llama3", "factor": float(factor), "high_freq_factor": float(high), **fixed}


NORM = {"kind": "rmsnorm", "eps": Key("norm_eps"), "unit_offset": False, "cast": "before"}
TEMPLATE = {
    "vocab_size": Key("@vocab_size"),
    "d_model": Key("dim"),
    "max_seq_len": Key("max_seq_len", 2048),  # most files do not say; Meta's code has this default
    "embedding": {},
    "decoder": {
        "n_layers": Key("n_layers"),
        "layers": [
            {
                "attention": {
                    "kind": "multi-head",
                    "n_heads": Key("n_heads"),
                    "n_kv_heads": Key("n_kv_heads", Key("n_heads")),
                    "head_dim": Quotient("dim", "n_heads"),
                    "pattern": {"kind": "causal"},
                    "positions": {
                        "kind": "rotary",
                        "theta": Key("rope_theta", 10_000.0),
                        "layout": "pairs",
                        "scaling": Scaled(),
                    },
                },
                "ffn": {"kind": "gated", "d_ff": Key("@d_ff"), "activation": "silu"},
                "norm": NORM,
                "residual": {"kind": "pre"},
            }
        ],
        "norm": NORM,
    },
    "head": {"kind": "lm", "tied": Key("@tied")},
}
"""Keys with an @ come from the tensors."""
_FREE = ("vocab_size", "multiple_of", "ffn_dim_multiplier", "max_batch_size")
"""The vocabulary may be -1 here, and the network's width is a formula: the tensors say both."""


def read_meta(folder: Path, max_seq_len: int | None = None) -> tuple[ModelConfig, dict[str, Array]]:
    """Config and tensors in our names. `max_seq_len` names the trained context, which most params.json leave out."""
    params = _params(folder / PARAMS)
    if max_seq_len is not None:
        params["max_seq_len"] = max_seq_len
    theirs = _joined(folder, params)
    try:
        config = config_of(params, theirs, str(folder / PARAMS))
        return config, to_ours(config, RULES, theirs, ignored=IGNORED, tied=TIED)
    except CheckpointError as error:
        raise CheckpointError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from None


def config_of(params: Mapping[str, Any], tensors: Mapping[str, Array], where: str) -> ModelConfig:
    """Our config of Meta's parameters and tensors."""
    table, up = "tok_embeddings.weight", "layers.0.feed_forward.w1.weight"
    missing = [name for name in (table, up) if name not in tensors or tensors[name].ndim != 2]
    if missing:
        raise CheckpointError(f"{where}: {', '.join(f'{name} is missing, or no matrix' for name in missing)}")
    untied = "output.weight" in tensors and not identical(tensors["output.weight"], tensors[table])
    facts = {"@vocab_size": tensors[table].shape[0], "@d_ff": tensors[up].shape[0], "@tied": not untied}
    keys = Keys({**params, **facts}, where)
    tree = read(TEMPLATE, keys)
    keys.read.update(_FREE)
    problems = [f"{key} ({params[key]!r}) is not understood" for key in keys.unread()]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    try:
        return ModelConfig.from_dict(tree)
    except ConfigError as error:
        raise CheckpointError(f"{where}: describes no model that can exist: {error}") from None


def _params(path: Path) -> Json:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); copy the whole folder") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not a table of parameters")
    return data


def _joined(folder: Path, params: Json) -> dict[str, Array]:
    """The whole tensors, from all shards."""
    ranks = sorted(int(found[1]) for path in folder.iterdir() if (found := _SHARD.fullmatch(path.name)))
    missing = sorted(set(range(max(ranks, default=0) + 1)) - set(ranks))
    if missing:
        names = ", ".join(f"consolidated.{rank:02}.pth" for rank in missing)
        raise CheckpointError(f"{folder}: {names} is missing; copy the whole folder")
    shards = [read_file(folder / f"consolidated.{rank:02}.pth") for rank in ranks]
    if len(shards) == 1:
        return shards[0]
    odd = sorted({name for shard in shards for name in shard.keys() ^ shards[0].keys()})
    if odd:
        raise CheckpointError(f"{folder}: {', '.join(odd[:8])} is not in every consolidated.*.pth; copy them again")
    return {name: _whole(name, [shard[name] for shard in shards], params) for name in shards[0]}


def _whole(name: str, slices: list[Array], params: Json) -> Array:
    """One tensor from the slices of all ranks."""
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer == "tok_embeddings":  # Llama 1 and 2 split the vector, Llama 3 the vocabulary
        axis = 0 if slices[0].shape[-1] == params.get("dim") else 1
    elif layer in _SPLIT_AXIS:
        axis = _SPLIT_AXIS[layer]
    elif all(np.array_equal(part, slices[0]) for part in slices):
        return slices[0]
    else:
        raise CheckpointError(f"{name}: differs between the consolidated.*.pth, of which each should hold it whole")
    try:
        return np.concatenate(slices, axis)
    except ValueError as error:
        raise CheckpointError(f"{name}: the consolidated.*.pth do not fit together ({error})") from None
