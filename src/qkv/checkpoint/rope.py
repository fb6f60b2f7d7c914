"""Rotary settings in a config.json: both forms in one leaf.

Release 5 of `transformers` writes `rope_parameters` (theta, type and its numbers together); older files have
`rope_theta` beside `rope_scaling`, whose type is called `rope_type` or `type`. The old form is written: both read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.template import Json, Keys, Leaf
from qkv.errors import CheckpointError

# Their name of each rule, ours, and their name of each of its numbers.
_ORIGINAL = {"original_max_position_embeddings": "original_max_seq_len"}
_YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_LONGROPE = ("short_factor", "long_factor", "factor", "attention_factor")
_RULES: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic-ntk", {"factor": "factor", **_ORIGINAL}),
    "yarn": ("yarn", {name: name for name in _YARN} | _ORIGINAL),
    "llama3": ("llama3", {name: name for name in _LLAMA3} | _ORIGINAL),
    "longrope": ("longrope", {name: name for name in _LONGROPE} | _ORIGINAL),
}
_NAMES = {"su": "longrope"}  # Phi-3's first files


@dataclass(frozen=True)
class Rope(Leaf):
    """Our `rotary` positions."""

    theta: float = 10_000.0
    """Where the file says nothing."""
    layout: str = "halves"
    fraction: str | None = None
    """Their key for the part of each head that turns, if the family has one."""
    default_fraction: float = 1.0

    def read(self, keys: Keys) -> Json:
        parameters = dict(keys.get("rope_parameters", None) or {})
        if not parameters:
            parameters = dict(keys.get("rope_scaling", None) or {})
            parameters.setdefault("rope_theta", keys.get("rope_theta", self.theta))
        else:
            keys.read |= {"rope_theta", "rope_scaling"}
        fraction = parameters.pop("partial_rotary_factor", None)
        if self.fraction is not None and fraction is None:
            fraction = keys.get(self.fraction, self.default_fraction)
        return self.from_parameters(parameters, keys, 1.0 if fraction is None else fraction)

    def from_parameters(self, parameters: Json, keys: Keys, fraction: float = 1.0) -> Json:
        """Positions from one table of theta, type and numbers."""
        theta = parameters.pop("rope_theta", self.theta)
        kind = parameters.pop("rope_type", None) or "default"
        kind = parameters.pop("type", kind)
        kind = _NAMES.get(kind, kind)
        if kind not in _RULES:
            raise CheckpointError(f"{keys.name}: rope_type is {kind!r}; this qkv knows {', '.join(_RULES)}")
        ours, names = _RULES[kind]
        unknown = sorted(name for name in parameters if name not in names)
        if unknown:
            raise CheckpointError(f"{keys.name}: rope scaling {kind!r} has unknown {', '.join(unknown)}")
        scaling = {names[name]: value for name, value in parameters.items() if value is not None}
        if "original_max_seq_len" in names.values():
            trained = keys.get("original_max_position_embeddings", None) or keys.get("max_position_embeddings")
            scaling.setdefault("original_max_seq_len", trained)
        if kind == "longrope":
            scaling.setdefault("factor", keys.get("max_position_embeddings") / scaling["original_max_seq_len"])
        if kind == "yarn" and not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
            # The peer reads mscale only together with mscale_all_dim.
            scaling = {name: value for name, value in scaling.items() if name not in ("mscale", "mscale_all_dim")}
        turned = {"theta": float(theta), "fraction": fraction, "layout": self.layout}
        return {"kind": "rotary", **turned, "scaling": {"kind": ours, **scaling}}

    def write(self, value: Any, out: Json) -> None:
        if value is None or value.get("kind") != "rotary":
            raise CheckpointError("their format turns queries and keys: positions must be 'rotary'")
        out["rope_theta"] = value["theta"]
        out["rope_scaling"] = self.to_scaling(value["scaling"])
        if self.fraction is not None:
            out[self.fraction] = value["fraction"]

    def to_scaling(self, scaling: Json) -> Json | None:
        """Their `rope_scaling` table."""
        theirs = [(kind, names) for kind, (ours, names) in _RULES.items() if ours == scaling["kind"]]
        if not theirs:
            raise CheckpointError(f"rope: their format has no {scaling['kind']!r} scaling; save in qkv's own format")
        kind, names = theirs[0]
        if kind == "default":
            return None
        numbers = {name: scaling[ours] for name, ours in names.items() if scaling.get(ours) is not None}
        return {"rope_type": kind, **numbers}
