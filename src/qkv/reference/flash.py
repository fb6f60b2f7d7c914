"""Tiled attention with an online softmax, forward and backward. NumPy, float64, one head.

    out = softmax(where(allowed, scale q k^T, -inf)) v        q (T, F), k (S, F), v (S, Fv) -> out (T, Fv)

is computed without ever holding the (T, S) scores: only one block x block tile of them exists at a time, so memory
grows with T + S and not with T S. It is no approximation. This is FlashAttention (Dao et al. 2022, arXiv 2205.14135,
algorithms 1 and 4) with the loop order and the backward formulas of FlashAttention-2 (Dao 2023, arXiv 2307.08691):
forward, a tile of queries visits all keys and is divided once at the end; backward, a tile of keys visits all queries.

**The online softmax** (Milakov and Gimelshein 2018, arXiv 1805.02867). A row of scores s arrives tile by tile. Keep

    m = max of the s seen so far,   total = sum e^(s - m),   mixed = sum e^(s - m) v.

A new tile may raise the maximum to m'. Then e^(s - m') = e^(s - m) e^(m - m'), so the old total and mixed are corrected
by the one factor e^(m - m') and the tile's own terms are added. At the end out = mixed / total and lse = m + log total,
the logarithm of the softmax's denominator. All weights can be recovered from it: w = e^(s - lse). So the backward pass
needs no weights from the forward pass, only out and lse, and computes each tile of scores again.

`allowed` is a boolean (T, S) array, True = may look, or a function of index arrays, rows (R, 1) and columns (1, C), so
that a mask such as `lambda row, column: column <= row` is never larger than a tile. A row with no allowed key gives
out 0, lse -inf and gradients 0.

`merge` joins two results over disjoint sets of keys: the same correction, applied to whole results. Ring attention
(Liu et al. 2023, arXiv 2310.01889) is this and nothing more: each rank holds some keys, and results travel.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Allowed = Mask | Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Mask]


def tiled_attention(q: Array, k: Array, v: Array, allowed: Allowed, *, scale: float, block: int) -> tuple[Array, Array]:
    """out (T, Fv) and lse (T,): the attention, and the logarithm of its softmax's denominator."""
    _check(q, k, v, allowed, block)
    out = np.zeros((len(q), v.shape[1]))
    lse = np.full(len(q), -np.inf)
    for rows in _blocks(len(q), block):
        m = np.full(rows.stop - rows.start, -np.inf)
        total = np.zeros_like(m)
        mixed = np.zeros((len(m), v.shape[1]))
        for columns in _blocks(len(k), block):
            scores = _score_tile(q, k, allowed, rows, columns, scale)
            if scores is None:
                continue
            m_new = np.maximum(m, scores.max(axis=1))
            shift = _finite(m_new)
            correction = np.exp(m - shift)  # 0 for a row that had seen no key yet
            terms = np.exp(scores - shift[:, None])  # 0 where forbidden
            total = correction * total + terms.sum(axis=1)
            mixed = correction[:, None] * mixed + terms @ v[columns]
            m = m_new
        out[rows], lse[rows] = _finish(mixed, total, m)
    return out, lse


def tiled_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    allowed: Allowed,
    out: Array,
    lse: Array,
    d_out: Array,
    *,
    scale: float,
    block: int,
) -> tuple[Array, Array, Array]:
    """d_q, d_k, d_v from d_out and the forward results out and lse.

    With w = e^(s - lse), s = scale q k^T and out = w v:

        d_v = w^T d_out        d_w = d_out v^T        d_s = w (d_w - delta)
        d_q = scale d_s k      d_k = scale d_s^T q

    where the softmax's delta_t = sum_j d_w_tj w_tj would need a whole row of weights; but d_w_tj = d_out_t . v_j, so
    delta_t = d_out_t . sum_j w_tj v_j = d_out_t . out_t, which is at hand before the first tile.

    k and v may be a part of the keys when out and lse belong to all of them: then d_k and d_v are that part's, and the
    d_q of all parts add up (the backward pass of ring attention).
    """
    _check(q, k, v, allowed, block)
    delta = (d_out * out).sum(axis=1)
    shift = _finite(lse)
    d_q, d_k, d_v = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for columns in _blocks(len(k), block):
        for rows in _blocks(len(q), block):
            scores = _score_tile(q, k, allowed, rows, columns, scale)
            if scores is None:
                continue
            w = np.exp(scores - shift[rows, None])
            d_s = w * (d_out[rows] @ v[columns].T - delta[rows, None]) * scale
            d_q[rows] += d_s @ k[columns]
            d_k[columns] += d_s.T @ q[rows]
            d_v[columns] += w.T @ d_out[rows]
    return d_q, d_k, d_v


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """The attention over keys a and b together, from the results over a and over b: out (..., T, Fv), lse (..., T).

    e^lse is the sum over a set of keys, so the sums of disjoint sets add, and each result counts by its share. A row
    that is dead on one side (lse -inf) takes the other side's result; dead on both, it stays 0 and -inf.
    """
    m = np.maximum(lse_a, lse_b)
    shift = _finite(m)
    share_a, share_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    return _finish(share_a[..., None] * out_a + share_b[..., None] * out_b, share_a + share_b, m)


def _blocks(length: int, block: int) -> Iterator[slice]:
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


def _score_tile(q: Array, k: Array, allowed: Allowed, rows: slice, columns: slice, scale: float) -> Array | None:
    """One tile of scores, -inf where forbidden; None if all are, as in half the tiles of a causal mask."""
    if callable(allowed):
        tile = allowed(np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)[None, :])
        if tile.dtype != np.bool_:
            raise ValueError(f"allowed: the function must return booleans (True = may look), got {tile.dtype}")
    else:
        tile = allowed[rows, columns]
    if not tile.any():
        return None
    scores: Array = np.where(tile, scale * (q[rows] @ k[columns].T), -np.inf)
    return scores


def _finite(x: Array) -> Array:
    """x with 0 for -inf. Scores are shifted by it, and -inf - -inf would be NaN; the shift 0 leaves e^-inf = 0."""
    shift: Array = np.where(np.isneginf(x), 0.0, x)
    return shift


def _finish(mixed: Array, total: Array, m: Array) -> tuple[Array, Array]:
    """out and lse from the running sums; 0 and -inf for a row without a key, whose total is 0 and whose m is -inf."""
    denominator = np.where(total == 0.0, 1.0, total)
    return mixed / denominator[..., None], m + np.log(denominator)


def _check(q: Array, k: Array, v: Array, allowed: Allowed, block: int) -> None:
    if q.ndim != 2 or k.ndim != 2 or v.ndim != 2 or q.shape[1] != k.shape[1] or len(k) != len(v):
        raise ValueError(
            f"q, k, v: need shapes (T, F), (S, F), (S, Fv), got {q.shape}, {k.shape}, {v.shape}; "
            "call once per head and sequence"
        )
    if block < 1:
        raise ValueError(f"block: must be at least 1, got {block}")
    if not callable(allowed) and (allowed.dtype != np.bool_ or allowed.shape != (len(q), len(k))):
        raise ValueError(
            f"allowed: need a boolean array of shape {(len(q), len(k))} (True = may look) or a function, "
            f"got {allowed.dtype} of shape {allowed.shape}"
        )
