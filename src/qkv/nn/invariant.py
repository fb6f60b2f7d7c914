"""Deterministic mode: on a CPU, a row of a batch is bitwise the row alone, and a prefix of a text its own beginning.

    with torch.inference_mode(), invariant():
        model(tokens)

A sum of floating-point numbers depends on its order, and kernels choose an order by the shape of all their work: who
else is in the batch, how long the longest row is. `Invariant` replaces the few functions where torch does so. Measured
with torch 2.13 and its MKL 2024.2 on an AVX-512 processor of AMD, in float32, float64 and bfloat16, with 1 and 2
threads (products with 4, 8 and 16, too); "place" is where a row or an element stands:

| function | its result depends on | so here |
|---|---|---|
| `F.linear`, `mm` | rows modulo 4: the last 1 to 3 have their own kernel (bfloat16: a single row) | padded to 4 rows |
| | where rows begin in memory, if not at multiples of 16 bytes | widths padded to 16 |
| | float64, threads, 32 rows or more onto 128 widths or fewer: the inner sum is shared out | 16 rows at a time |
| `bmm`, `@` | the same; and columns modulo 16, in float64 24 | padded to 64 columns, or 192 |
| | float32: the inner sum has pieces of 192, but 256 is 128 + 128, 320 is 160 + 160 | blocks of 64, in order |
| `scaled_dot_product_attention` | the same, in blocks of 512 keys; heads no multiple of 4 wide | `key_slots`, a mask |
| `softmax` | the place of what it sums | finite scores side by side, then -inf |
| `silu`, `gelu`, `sigmoid`, `pow` | place: loops over vectors and over their rest differ | by exp, erf, tanh, log |

Measured to depend on neither: exp, tanh, erf, sin, cos, log, sqrt and arithmetic, sums and means over the last axis,
`layer_norm`, `log_softmax`, `embedding`, `index_add`. Other processors and other versions of MKL may choose otherwise:
`self_check` tries the promise on the machine at hand. It costs 1.7 times at one row of one token, 1.2 at eight of them,
1.1 at prompts (benchmarks/deterministic.py); 0.1 of that is what it costs to have a function mode at all.

What it asks of callers:

- Inference only: with gradients enabled a replaced function raises BackendError, as it does for tensors on a GPU. A
  compiled model runs uncompiled inside.
- The keys that a query sees stand in the same slots of a buffer, however the text came in. One exception: as many
  first queries as first keys that are padding, as in a batch padded on the left, are passed over.
- Backends "flash", "sdpa" and "eager" keep the promise. "window" cuts keys where its chunks of queries end: its rows
  are those of "window" alone, and not if padded on the left. "flex" is compiled, which torch refuses in a mode.
- Not covered: sums over the tokens of a row (mean pooling). Rotary rules that read the length of the text (dynamic
  NTK, Qwen's, LongRoPE) turn a prefix by other angles, and latent attention computes otherwise from a cache, by design.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkv.cache.spec import VIEWS, view_slots
from qkv.errors import BackendError

ROWS = 4
"""Rows of a product, and queries, come in multiples of this."""
ALIGNED = 16
"""Inner widths of a product, and heads, too: rows of whole cache lines in float32."""
BLOCK = 64
"""The inner axis of a batched product is summed in blocks of this many."""
_CACHE_LINE = 64  # bytes


def key_slots(n: int, dtype: torch.dtype) -> int:
    """The smallest number of key slots, `n` or more, with which attention keeps the promise.

    64, 128, 192, 384, 512 (float64: 192, 384, 512), and so on after each 512. Such a buffer is used as it is, others
    are copied into one.
    """
    slots = view_slots(n)
    return slots if dtype != torch.float64 else view_slots(max(slots, n // VIEWS[-1] * VIEWS[-1] + 192))


def invariant() -> Invariant:
    """The mode, for a `with` statement around calls of models."""
    return Invariant()


def active() -> bool:
    """Whether the mode is on in this thread."""
    return any(isinstance(mode, Invariant) for mode in torch.overrides._get_current_function_mode_stack())


class Invariant(TorchFunctionMode):
    """Replaces the functions of `_REPLACED` while it is open."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            raise BackendError("deterministic mode: does not reach into compiled code; leave out torch.compile")
        replacement = _REPLACED.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        _refuse(args)
        return replacement(*args, **(kwargs or {}))


def _refuse(args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        raise BackendError("deterministic mode: for inference only; call the model under torch.inference_mode()")
    device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
    if device != "cpu":
        raise BackendError(f"deterministic mode: works on a CPU, not on {device}; move the model, or leave the mode")


# --- products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) @ weight^T (K, N) + bias."""
    rows = x.reshape(-1, x.shape[-1])
    n, extra = len(rows), -x.shape[-1] % ALIGNED
    if extra:
        weight = F.pad(weight, (0, extra))
    rows = _pad(rows, -n % ROWS, extra)
    if not rows.is_contiguous() or rows.data_ptr() % _CACHE_LINE:
        rows = rows.clone(memory_format=torch.contiguous_format)
    if rows.dtype == torch.float64 and len(rows) > 16:
        out = torch.cat([F.linear(part, weight, bias) for part in rows.split(16)])
    else:
        out = F.linear(rows, weight, bias)
    return out[:n].view(*x.shape[:-1], out.shape[-1])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) @ b (..., K, N); a matrix `b` is a weight, whose inner width is the same in every call."""
    if b.ndim == 1:
        return linear(a, b[None]).squeeze(-1)
    if b.ndim == 2:
        return linear(a, b.mT)
    if a.ndim == 1:
        return matmul(a[None], b).squeeze(-2)
    # Not torch.broadcast_shapes, which imports sympy for most of a second.
    axes = zip_longest(reversed(a.shape[:-2]), reversed(b.shape[:-2]), fillvalue=1)
    batch = [y if x == 1 else x for x, y in axes][::-1]
    a, b = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return _batched(a, b).unflatten(0, batch)


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """a (n, M, K) @ b (n, K, N)."""
    rows, inner, columns = a.shape[1], a.shape[2], b.shape[2]
    if rows == inner:
        real = a != 0
        shift = _leading_padding(real.any(2), real.any(1))
        if shift is not None:
            a, b = _roll(a, shift, 2), _roll(b, shift, 1)
    panel = 192 if a.dtype == torch.float64 else 64
    a = _pad(a, -rows % ROWS, -inner % BLOCK)
    b = _pad(b, -inner % BLOCK, -columns % panel).contiguous()
    blocks = b.shape[1] // BLOCK
    a = a.unflatten(2, (blocks, BLOCK)).transpose(1, 2).flatten(0, 1).contiguous()
    # In float64, threads may share the inner sum of a product that is high and narrow, so there it is kept low.
    height = 16 if a.dtype == torch.float64 else a.shape[1]
    parts = [torch.bmm(part, b.view(-1, BLOCK, b.shape[2])) for part in a.split(height, 1)]
    by_block = torch.cat(parts, 1).unflatten(0, (-1, blocks))
    out = by_block[:, 0]
    for index in range(1, blocks):
        out = out + by_block[:, index]
    return out[:, :rows, :columns]


def _pad(x: Tensor, rows: int, columns: int, value: float = 0.0) -> Tensor:
    return F.pad(x, (0, columns, 0, rows), value=value) if rows or columns else x


# --- attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's kernel on q (B, H, Q, F), k and v (B, G, K, F), always with a mask, and with sizes that it likes."""
    if dropout_p or q.ndim != 4:
        raise BackendError("deterministic mode: attention takes (B, H, T, F) tensors and no dropout; leave the mode")
    queries, keys, width = q.shape[2], k.shape[2], v.shape[-1]
    mask = _full_mask(q, k, attn_mask, is_causal)
    shift = None
    if queries == keys and attn_mask is not None:
        pairs = (mask if mask.dtype == torch.bool else mask != -torch.inf).any(1)
        looks, is_seen = pairs.any(2), pairs.any(1)
        # Each token sees itself: without that, queries and keys are not the same tokens, though as many.
        shift = _leading_padding(looks, is_seen) if torch.equal(looks, is_seen) else None
    if shift is not None:
        mask = _roll(mask.expand(len(shift), -1, -1, -1), shift, 3)
        k, v = _roll(k.expand(len(shift), -1, -1, -1), shift, 2), _roll(v.expand(len(shift), -1, -1, -1), shift, 2)
    more_queries, more_keys = -queries % ROWS, key_slots(keys, q.dtype) - keys
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    wide = max(q.shape[-1], width) + -max(q.shape[-1], width) % ALIGNED
    mask = _pad(mask, more_queries, more_keys, 0.0 if mask.dtype == torch.bool else -math.inf)
    q = _pad(q, more_queries, wide - q.shape[-1])
    k, v = _pad(k, more_keys, wide - k.shape[-1]), _pad(v, more_keys, wide - width)
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return out[:, :, :queries, :width]


def _full_mask(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """(B or 1, H or 1, Q, K)."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:
        every = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
        return every.tril() if is_causal else every
    return mask[(None,) * (4 - mask.ndim)].expand(-1, -1, queries, keys)


def _leading_padding(looks: Tensor, is_seen: Tensor) -> Tensor | None:
    """(B,): how many first tokens neither look at any nor are seen by any, both (B, T); None if none in any row."""
    used = (looks | is_seen).int().cummax(1).values
    count = (used == 0).sum(1) % used.shape[1]  # a row without any real token stays as it is
    return count if bool(count.any()) else None


def _roll(x: Tensor, shift: Tensor, dim: int) -> Tensor:
    """Each x[b] moved by shift[b] to the beginning of the axis `dim`; what falls off comes in at the end."""
    size = x.shape[dim]
    index = (torch.arange(size) + shift[:, None]) % size
    shape = [1] * x.ndim
    shape[0], shape[dim] = index.shape
    return x.gather(dim, index.view(shape).expand(x.shape))


# --- elementwise functions and softmax


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """Only scores above -inf are summed, in their order, wherever they stand."""
    x = (x if dtype is None else x.to(dtype)).movedim(dim, -1)
    seen = x != -torch.inf
    place = torch.where(seen, seen.cumsum(-1) - 1, x.shape[-1])  # of the unseen: one slot behind all
    slots = x.shape[-1] + 1 + -(x.shape[-1] + 1) % 64
    side_by_side = x.new_full((*x.shape[:-1], slots), -torch.inf).scatter_(-1, place, x)
    return torch.softmax(side_by_side, -1).gather(-1, place).movedim(-1, dim)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.exp(-_wide(x)).add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    """x / (1 + exp(-x))."""
    wide = _wide(x)
    out = (wide / torch.exp(-wide).add_(1)).to(x.dtype)
    return x.copy_(out) if inplace else out


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x / 2 (1 + erf(x / sqrt 2)), or its approximation by tanh (Hendrycks 2016)."""
    wide = _wide(x)
    if approximate == "none":
        inner = torch.erf(wide * math.sqrt(0.5))
    else:
        inner = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    return (0.5 * wide * inner.add_(1)).to(x.dtype)


def power(base: Any, exponent: Any) -> Any:
    """exp(exponent log base) for two tensors. A number is a constant of the model, and its power a constant table."""
    if isinstance(base, Tensor) and isinstance(exponent, Tensor):
        return torch.exp(exponent * torch.log(base))
    return base**exponent


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# --- what is replaced, and what cannot be


def _not_covered(*args: Any, **kwargs: Any) -> Any:
    raise BackendError("deterministic mode: einsum, addmm and baddbmm are not covered; write the product as x @ y")


_NAMES: dict[Callable[..., Any], tuple[Callable[..., Any], ...]] = {
    linear: (F.linear,),
    matmul: (
        torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.mv, Tensor.__matmul__
    ),
    lambda b, a: matmul(a, b): (Tensor.__rmatmul__,),
    attention: (F.scaled_dot_product_attention,),
    softmax: (torch.softmax, Tensor.softmax, F.softmax),
    sigmoid: (torch.sigmoid, Tensor.sigmoid, F.sigmoid),
    silu: (F.silu,),
    gelu: (F.gelu,),
    power: (torch.pow, Tensor.pow, Tensor.__pow__),
    lambda exponent, base: power(base, exponent): (Tensor.__rpow__,),
    _not_covered: (torch.einsum, torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm),
}  # fmt: skip
_REPLACED = {func: replacement for replacement, functions in _NAMES.items() for func in functions}


# --- the check


def self_check(dtype: torch.dtype, widths: Iterable[tuple[int, int]], head_dim: int = 64) -> str | None:
    """Whether this processor keeps the promise: None, or a sentence that says what does not.

    Tried are products from width to width (outer ones up to 4096), attention with heads of `head_dim`, and what the
    elementwise functions are made from.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape).uniform_(-1, 1, generator=generator).to(dtype)

    with torch.inference_mode(), invariant():
        broken = [
            f"a product from {inner} to {outer}"
            for inner, outer in sorted({(inner, min(outer, 4096)) for inner, outer in widths})
            if not _linear_holds(random(55, inner), random(outer, inner))
        ]
        if not _attention_holds(random(3, 1, 2, 150, head_dim)):
            broken.append(f"attention with heads of {head_dim}")
        broken += [name for name, function in _ELEMENTWISE.items() if not _elements_hold(function, 8 * random(6, 77))]
    if not broken:
        return None
    return f"in {str(dtype)[6:]} a row depends on the number of rows or its place, in {', '.join(broken)}"


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sine and cosine": lambda x: x.double().sin() + x.double().cos(),
}


def _linear_holds(rows: Tensor, weight: Tensor) -> bool:
    parts = [F.linear(part, weight) for part in rows.split((1, 4, 17, len(rows) - 22))]
    return torch.equal(torch.cat(parts), F.linear(rows, weight))


def _attention_holds(qkv: Tensor) -> bool:
    """The last queries of a text, alone and in larger buffers."""
    q, k, v = qkv
    length = q.shape[2]
    together = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for slots in (length, 384, 512, 700, 1024):
        keys, values = (_pad(x, slots - length, 0) for x in (k, v))
        for n in (1, 7):
            mask = torch.ones(length, slots, dtype=torch.bool).tril()[-n:]
            out = F.scaled_dot_product_attention(q[:, :, -n:], keys, values, mask)
            if not torch.equal(out, together[:, :, -n:]):
                return False
    return True


def _elements_hold(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    return torch.equal(function(x), torch.cat([function(row[None].clone()) for row in x]))
