"""`attend`: one formula, several ways to compute it.

    out = softmax(softcap((q k^T) * scale + bias), where allowed) v

A backend says why it cannot serve a call; `attend` takes the first of the device's order that can, or the one that is
forced, which raises with the list of capable ones if it cannot. Nothing falls back silently to another meaning: all
backends compute the formula above, and tests hold them against `eager`.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from qkv.errors import BackendError
from qkv.nn.backends.base import Backend, Relative, Scoring
from qkv.nn.backends.eager import EAGER, attention_weights
from qkv.nn.backends.flex import FLEX
from qkv.nn.backends.sdpa import FLASH, SDPA
from qkv.nn.backends.tiles import TILES
from qkv.nn.backends.window import WINDOW
from qkv.nn.context import AttentionPlan

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (FLASH, WINDOW, SDPA, FLEX, EAGER, TILES)}

# Measured (benchmarks/attention.py): causal flash 38 ms, masked SDPA 63 ms (T 2048); in 4096 tokens a window of 256 by
# chunks and BigBird by tiles take a sixth of the time of their masks. FlexAttention compiles for 10 s and has no
# backward on a CPU: only when forced.
ORDER = {
    "cpu": ("flash", "window", "tiles", "sdpa", "eager"),
    "cuda": ("flash", "window", "flex", "sdpa", "eager"),
}


def attend(
    q: Float[Tensor, "B H Q F"],
    k: Float[Tensor, "B G K F"],
    v: Float[Tensor, "B G K Fv"],
    plan: AttentionPlan,
    scoring: Scoring,
) -> Float[Tensor, "B H Q Fv"]:
    """Scaled dot-product attention under the plan's pattern; query head h reads key-value head h // (H/G)."""
    if plan.backend != "auto":
        return _forced(plan.backend, q, k, v, plan, scoring).run(q, k, v, plan, scoring)
    for name in ORDER.get(q.device.type, ORDER["cuda"]):
        backend = BACKENDS[name]
        if backend.worthwhile(q, plan) and backend.refuses(q, k, v, plan, scoring) is None:
            return backend.run(q, k, v, plan, scoring)
    raise AssertionError("eager serves every call")


def _forced(name: str, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scoring: Scoring) -> Backend:
    if name not in BACKENDS:
        raise BackendError(f"backend {name!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].refuses(q, k, v, plan, scoring)
    if reason is None:
        return BACKENDS[name]
    capable = [other for other, backend in BACKENDS.items() if backend.refuses(q, k, v, plan, scoring) is None]
    raise BackendError(f"backend {name!r} cannot serve this attention: {reason}; capable: {', '.join(capable)}")


__all__ = ["BACKENDS", "ORDER", "Backend", "Relative", "Scoring", "attend", "attention_weights"]
