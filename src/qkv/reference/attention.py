"""Attention, head by head. NumPy, float64.

    scores  = (q . k + relative terms) * scale + bias, then softcap tanh(scores / softcap)
    weights = softmax of the scores over the visible keys (and the head's sink, which carries no value)
    output  = o_proj(the heads' weighted sums of values, side by side)

Shapes: x (T, D) gives the queries, memory (S, D) the keys and values (x itself in self-attention); q (T, H, F),
k and v (S, G, F) with G key-value heads, of which head h reads number h // (H / G).

Whatever a cache would store of a token (`streams()` of the configuration) passes `View.stored` before it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from qkv.config import Attention, Coordinates, Latent, MultiHead, Pattern
from qkv.reference.codec import through
from qkv.reference.ops import Array, Mask, Weights, below, linear, norm, softcap, softmax
from qkv.reference.position import Scheme, scheme
from qkv.reference.registry import register


@dataclass(frozen=True)
class View:
    """Where the queries (T,) and the keys (S,) of one row stand, and how a cache keeps what belongs to the keys."""

    query: Coordinates
    key: Coordinates
    codec: str = "raw"

    def stored(self, stream: Array) -> Array:
        """A stream (..., width) as the cache gives it back."""
        return through(self.codec, stream)


def visible(pattern: Pattern, at: View) -> Mask:
    """(T, S): whether query and key exist, lie in one document, and the pattern lets the one see the other."""
    query, key = _reshaped(at.query, (-1, 1)), _reshaped(at.key, (1, -1))
    exist = (query.position >= 0) & (key.position >= 0)
    together = query.document == key.document
    mask: Mask = exist & together & pattern.allowed(query, key)
    return mask


def _reshaped(at: Coordinates, shape: tuple[int, int]) -> Coordinates:
    return Coordinates(**{field.name: getattr(at, field.name).reshape(shape) for field in fields(at)})


def attend(q: Array, k: Array, v: Array, at: View, positions: Scheme, config: Attention, sinks: Array | None) -> Array:
    """(T, H, width of v) from q (T, H, F), k (S, G, F), v (S, G, width); q and k are turned already."""
    n_heads, group = q.shape[1], q.shape[1] // k.shape[1]
    k = np.stack([k[:, h // group] for h in range(n_heads)], axis=1)
    v = np.stack([v[:, h // group] for h in range(n_heads)], axis=1)
    seen = visible(config.pattern, at)
    relative = positions.relative(q, k, at.query, at.key)
    bias = positions.bias(n_heads, at.query, at.key)
    cap = config.softcap if isinstance(config, MultiHead) else None

    weights = np.zeros((n_heads, len(q), len(k)))
    out = np.zeros((len(q), n_heads, v.shape[-1]))
    for h in range(n_heads):
        scores = (q[:, h] @ k[:, h].T + relative[h]) * config.score_scale + bias[h]
        scores = softcap(scores, cap)
        if sinks is None:
            weights[h] = softmax(scores, seen)
        else:
            with_sink = np.column_stack([scores, np.full(len(q), sinks[h])])
            weights[h] = softmax(with_sink, np.column_stack([seen, np.full(len(q), True)]))[:, :-1]
        out[:, h] = weights[h] @ v[:, h]
    return out + positions.values(weights, at.query, at.key, v.shape[-1])


def multi_head(config: MultiHead, weights: Weights, x: Array, memory: Array, at: View) -> Array:
    """Vaswani 2017, section 3.2, with every option of `MultiHead`."""
    out = _project_and_attend(config, weights, x, memory, at, "")
    if config.global_projections:  # Longformer: the rows of global queries have projections of their own
        own = _project_and_attend(config, weights, x, memory, at, "_global")
        out = np.where(at.query.is_global[:, None], own, out)
    return linear(below(weights, "o_proj"), out)


def _project_and_attend(config: MultiHead, weights: Weights, x: Array, memory: Array, at: View, kind: str) -> Array:
    """The heads' outputs side by side, (T, H F), through the projections q{kind}_proj, k{kind}_proj, v{kind}_proj."""
    positions = scheme(config.positions, below(weights, "positions"))
    limit = math.inf if config.clip is None else config.clip
    q = _heads(np.clip(linear(below(weights, f"q{kind}_proj"), x), -limit, limit), config.n_heads)
    k = _heads(np.clip(linear(below(weights, f"k{kind}_proj"), memory), -limit, limit), config.kv_heads)
    v = _heads(np.clip(linear(below(weights, f"v{kind}_proj"), memory), -limit, limit), config.kv_heads)
    q = norm(config.qk_norm, below(weights, "q_norm"), q)
    k = norm(config.qk_norm, below(weights, "k_norm"), k)
    if config.log_n is not None:
        for t, position in enumerate(at.query.position):
            q[t] = q[t] * max(1.0, math.log(max(position, 0) + 1) / math.log(config.log_n))
    q, k = positions.turn(q, at.query), positions.turn(k, at.key)
    k, v = at.stored(k), at.stored(v)
    out = attend(q, k, v, at, positions, config, weights["sinks"] if config.sinks else None)
    return out.reshape(len(x), -1)


def _heads(x: Array, n_heads: int) -> Array:
    """(T, H F) -> (T, H, F)."""
    return x.reshape(len(x), n_heads, -1)


def latent(config: Latent, weights: Weights, x: Array, memory: Array, at: View) -> Array:
    """DeepSeek-V2 2024, section 2.1.2: keys and values rebuilt from a latent, positions in a key that heads share."""
    positions = scheme(config.positions, below(weights, "positions"))
    if config.q_rank is None:
        q = linear(below(weights, "q_proj"), x)
    else:
        small = norm(config.norm, below(weights, "q_norm"), linear(below(weights, "q_down_proj"), x))
        q = linear(below(weights, "q_up_proj"), small)
    q = _heads(q, config.n_heads)
    q_nope, q_rope = q[:, :, : config.nope_dim], q[:, :, config.nope_dim :]

    down = linear(below(weights, "kv_down_proj"), memory)
    small = at.stored(norm(config.norm, below(weights, "kv_norm"), down[:, : config.kv_rank]))
    kv = _heads(linear(below(weights, "kv_up_proj"), small), config.n_heads)
    k_nope, v = kv[:, :, : config.nope_dim], kv[:, :, config.nope_dim :]
    k_rope = at.stored(positions.turn(down[:, None, config.kv_rank :], at.key))

    q = np.concatenate([q_nope, positions.turn(q_rope, at.query)], axis=2)
    k = np.concatenate([k_nope, np.repeat(k_rope, config.n_heads, axis=1)], axis=2)
    out = attend(q, k, v, at, positions, config, sinks=None)
    return linear(below(weights, "o_proj"), out.reshape(len(x), -1))


register(MultiHead, multi_head)
register(Latent, latent)
