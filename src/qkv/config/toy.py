"""`toy`: the same architecture, small enough for a test of a few milliseconds.

Sizes are cut by the name of the field, wherever it stands in the tree; choices are never touched. What makes a big
model special survives: heads that fill the model exactly or do not, grouped or single keys, head counts that are no
power of two under ALiBi, a window shorter than the context, a scaling rule with something to scale (its trained length
is a quarter of the toy's), groups of experts of which some are out of reach, every distinct layer of a cycle.

    heads fill the model    d_model = n_heads * head_dim = 4 * 8
    they do not             d_model = 32, n_heads * head_dim = 4 * 16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from qkv.config.base import Config

C = TypeVar("C", bound=Config)

_CAPS: dict[str, int] = {
    "vocab_size": 96, "max_seq_len": 64, "d_ff": 48, "n_classes": 5,
    "q_rank": 12, "kv_rank": 16, "nope_dim": 12, "rope_dim": 8, "v_head_dim": 6,
    "top_k": 2, "n_groups": 4, "top_groups": 2,
    "window": 8, "dilation": 2, "chunk": 8, "block": 4, "sinks": 2, "random_blocks": 1,
    "original_max_seq_len": 16, "clamp": 12, "log_n": 16, "max_distance": 16, "n_buckets": 16,
}  # fmt: skip
_D_MODEL, _HEADS, _IRREGULAR_HEADS, _HEAD_DIM = 32, 4, 3, 8
_EXPERTS, _CUTOFFS, _CYCLE = 8, 3, 8


@dataclass(frozen=True)
class _Widths:
    """The widths that fields all over the tree depend on."""

    before: int
    """d_model of the original."""
    after: int
    """d_model of the toy."""
    vocab_size: int
    """Of the toy."""
    head_dim: int
    """The widest head of the toy."""


def toy(config: C) -> C:
    """A small config of the same architecture: d_model about 32, 96 tokens, one cycle of layers (at least two)."""
    data = config.to_dict()
    heads = [node for node in _nodes(data) if "n_heads" in node and "head_dim" in node]
    fill = bool(heads) and all(node["n_heads"] * node["head_dim"] == data["d_model"] for node in heads)
    head_dim = _HEAD_DIM if fill else 2 * _HEAD_DIM
    if fill:
        after = max(_n_heads(node) * min(node["head_dim"], head_dim) for node in heads)
        after += after % 2 if data["d_model"] % 2 == 0 else 0  # sinusoids need an even width
    else:
        after = min(data["d_model"], _D_MODEL)
    widths = _Widths(data["d_model"], after, min(data["vocab_size"], _CAPS["vocab_size"]), head_dim)
    return type(config).from_dict(_shrink(data, widths))


def _nodes(node: Any) -> list[dict[str, Any]]:
    """Every table of the tree."""
    if isinstance(node, list):
        return [found for item in node for found in _nodes(item)]
    if not isinstance(node, dict):
        return []
    return [node, *(found for value in node.values() for found in _nodes(value))]


def _shrink(node: Any, widths: _Widths) -> Any:
    if isinstance(node, list):
        return [_shrink(item, widths) for item in node]
    if not isinstance(node, dict):
        return node
    small = {key: _field(key, value, widths) for key, value in node.items()}
    if "n_heads" in node:
        small |= _attention(node, small)
    if "n_experts" in node:
        small |= _experts(node, small)
    if "cutoffs" in node:
        small |= _clusters(node, widths)
    if "layers" in node:
        small |= _stack(node, small)
    return small


def _field(key: str, value: Any, widths: _Widths) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return _shrink(value, widths)
    if key == "d_model":
        return widths.after
    if key == "head_dim":
        return min(value, widths.head_dim)
    if key == "d_ff" and value == 4 * widths.before:
        return 4 * widths.after
    return min(value, _CAPS.get(key, value))


def _n_heads(node: dict[str, Any]) -> int:
    """Four heads; three, or six over two, where ALiBi needs the slopes of a head count that is no power of two."""
    n_heads: int = node["n_heads"]
    if n_heads & (n_heads - 1) and node["positions"]["kind"] == "alibi":
        grouped = 1 < node.get("n_kv_heads", n_heads) < n_heads
        return 2 * _IRREGULAR_HEADS if grouped else _IRREGULAR_HEADS
    return min(n_heads, _HEADS)


def _attention(node: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Own keys stay own, a single key stays single, and groups become groups of two or three."""
    changes: dict[str, Any] = {"n_heads": _n_heads(node)}
    if "n_kv_heads" in node:
        own, single = node["n_kv_heads"] == node["n_heads"], node["n_kv_heads"] == 1
        changes["n_kv_heads"] = changes["n_heads"] if own else 1 if single else 2
    if node["positions"]["kind"] == "rotary":
        changes["positions"] = _rotary(small["positions"], small["rope_dim" if "rope_dim" in small else "head_dim"])
    return changes


def _rotary(small: dict[str, Any], width: int) -> dict[str, Any]:
    """An even number of elements turns; LongRoPE's factors are thinned out to their pairs."""
    turned = round(width * small["fraction"])
    if turned % 2 or not turned:
        turned = max(2, 2 * round(width * small["fraction"] / 2))
        small = small | {"fraction": turned / width}
    scaling = small["scaling"]
    lists = [name for name in ("short_factor", "long_factor") if name in scaling]
    pairs = turned // 2
    thinned = {name: [scaling[name][i * len(scaling[name]) // pairs] for i in range(pairs)] for name in lists}
    return small | {"scaling": scaling | thinned}


def _experts(node: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Eight experts in up to four equal groups; a shared network of once or twice an expert's width stays so."""
    groups = small["n_groups"]
    changes = {"n_experts": groups * min(node["n_experts"] // node["n_groups"], _EXPERTS // groups)}
    times, rest = divmod(node["shared_d_ff"], node["d_ff"])
    if node["shared_d_ff"]:
        changes["shared_d_ff"] = min(times, 2) * small["d_ff"] if not rest else min(node["shared_d_ff"], 40)
    return changes


def _clusters(node: dict[str, Any], widths: _Widths) -> dict[str, Any]:
    """Up to four clusters of equal size, each half as wide as the one before."""
    count = min(len(node["cutoffs"]), _CUTOFFS)
    changes: dict[str, Any] = {
        "cutoffs": [widths.vocab_size * (c + 1) // (count + 1) for c in range(count)],
        "divisor": min(node["divisor"], 1 if widths.after % 2**count else 2),
    }
    if "tied_projections" in node:
        changes["tied_projections"] = node["tied_projections"][: count + 1]
    return changes


def _stack(node: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Each distinct leading layer once, then one cycle."""
    first, layers = _distinct(small["first"]), small["layers"]
    if len(layers) > _CYCLE:
        layers = _distinct(layers)
    n_layers = min(node["n_layers"], max(2, len(first) + len(layers)))
    return {"first": first, "layers": layers, "n_layers": n_layers}


def _distinct(blocks: list[Any]) -> list[Any]:
    return [block for index, block in enumerate(blocks) if block not in blocks[:index]]
