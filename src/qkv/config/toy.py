"""`toy`: the same architecture, small enough for a test of a few milliseconds.

Sizes are cut by the name of the field, wherever it stands in the tree; choices are never touched. A small model keeps
what makes the big one special: uneven heads, grouped keys, a window shorter than the context, a scaling rule that has
something to scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkv.config.model import ModelConfig

_CAPS: dict[str, int] = {
    "vocab_size": 96, "d_model": 32, "max_seq_len": 64, "d_ff": 48, "shared_d_ff": 40,
    "q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_head_dim": 6,
    "n_experts": 8, "top_k": 2, "n_groups": 4, "top_groups": 2,
    "window": 8, "chunk": 8, "block": 4, "sinks": 2, "random_blocks": 1,
    "original_max_seq_len": 16, "clamp": 12, "log_n": 16, "max_distance": 16, "n_buckets": 16,
}  # fmt: skip
_HEADS, _HEAD_DIM, _CUTOFFS = 4, 8, (24, 48, 72)


def toy(config: ModelConfig) -> ModelConfig:
    """A small `ModelConfig` of the same architecture: d_model 32, vocabulary 96, one cycle of layers (at least two)."""
    return type(config).from_dict(_shrink(config.to_dict()))


def _shrink(node: Any) -> Any:
    if isinstance(node, list):
        return [_shrink(item) for item in node]
    if not isinstance(node, dict):
        return node
    small = {key: _field(key, value) for key, value in node.items()}
    if "n_heads" in small and "kind" in small:
        small["n_heads"] = _heads(node)
        if "n_kv_heads" in small:
            small["n_kv_heads"] = {1: 1, node["n_heads"]: _HEADS}.get(node["n_kv_heads"], _HEADS // 2)
    if node.get("kind") == "longrope":
        pairs = _HEAD_DIM // 2
        small |= {name: node[name][:pairs] for name in ("short_factor", "long_factor")}
    if node.get("kind") in ("adaptive",):
        small["cutoffs"], small["divisor"] = list(_CUTOFFS[: len(node["cutoffs"])]), 2
    if "layers" in small:
        small["first"] = small["first"][:1]
        small["n_layers"] = min(node["n_layers"], max(2, len(small["first"]) + len(small["layers"])))
    return small


def _field(key: str, value: Any) -> Any:
    if key == "head_dim":
        return _HEAD_DIM
    if key in _CAPS and isinstance(value, int) and not isinstance(value, bool):
        return min(value, _CAPS[key])
    return _shrink(value)


def _heads(node: dict[str, Any]) -> int:
    """Four heads; three where the original's number is odd multiples of something (ALiBi's irregular slopes)."""
    irregular = node["n_heads"] & (node["n_heads"] - 1) and node.get("positions", {}).get("kind") == "alibi"
    return 3 if irregular and "n_kv_heads" not in node else _HEADS
