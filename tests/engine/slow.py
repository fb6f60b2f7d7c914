"""The program's oracle: its instructions one by one in NumPy, float64, for one text that is read whole."""

from __future__ import annotations

import numpy as np

from qkv.engine.lower import ACTIVATIONS
from qkv.engine.packing import GROUP, unpack
from qkv.engine.program import Instruction, Matrix, Program
from qkv.reference import ops


def as_codes(x: np.ndarray) -> np.ndarray:
    """What the codes of the activations stand for: 8 bits in groups of 32, the largest 127."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    largest = np.abs(padded).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(largest > 0, np.rint(padded * (largest.dtype.type(127) / largest)), 0)
    return (codes * (largest / largest.dtype.type(127))).reshape(len(x), -1)[:, : x.shape[1]]


class Slow:
    """One run of a program."""

    def __init__(self, program: Program, tokens: list[int], *, rounded: bool) -> None:
        """rounded: whether products read codes of their input, as formats of 8 and 4 bits do."""
        self.tokens, self.rounded = tokens, rounded
        self.buffers = [np.zeros((len(tokens), width)) for width in program.widths]
        self.stored: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for one in program.instructions:
            getattr(self, one.op.name.lower())(one)
        self.result = self.buffers[program.result]

    def embed(self, i: Instruction) -> None:
        self.buffers[i.out][:] = dense(i.p[0])[self.tokens] * i.x[0]

    def place(self, i: Instruction) -> None:
        self.buffers[i.out] += np.asarray(i.p[0], np.float64)[i.n[0] : i.n[0] + len(self.tokens)]

    def norm(self, i: Instruction) -> None:
        heads, width, centre, at = i.n
        x = self.buffers[i.read][:, at : at + heads * width].reshape(len(self.tokens), heads, width)
        x = x - x.mean(-1, keepdims=True) if centre else x
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + i.x[0])
        weight, bias = i.p
        y = y * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
        self.buffers[i.out][:, at : at + heads * width] = y.reshape(len(self.tokens), -1)

    def codes(self, i: Instruction) -> None:
        pass  # `linear` rounds what it reads

    def linear(self, i: Instruction) -> None:
        x, (w, bias) = self.buffers[i.read], i.p
        x = as_codes(x) if i.other >= 0 and self.rounded else x
        y = x @ dense(w).T + (0.0 if bias is None else bias)
        self.buffers[i.out] = self.buffers[i.out] + y if i.n[0] else y

    def rotate(self, i: Instruction) -> None:
        at, heads, width, turned, pairs = i.n
        x = self.buffers[i.out][:, at : at + heads * width].reshape(len(self.tokens), heads, width)
        cos, sin = (np.asarray(p, np.float64)[: len(self.tokens), None] for p in i.p)
        a, b = (
            (x[..., 0:turned:2], x[..., 1:turned:2]) if pairs else (x[..., : turned // 2], x[..., turned // 2 : turned])
        )
        u, v = a * cos - b * sin, b * cos + a * sin
        a[:], b[:] = u, v  # views of the buffer

    def store(self, i: Instruction) -> None:
        k_at, v_at, heads, kw, vw, layer, _ = i.n
        x = self.buffers[i.read]
        self.stored[layer] = tuple(
            x[:, at : at + heads * w].reshape(-1, heads, w).copy() for at, w in ((k_at, kw), (v_at, vw))
        )

    def attend(self, i: Instruction) -> None:
        at, heads, kv, width, value_width, layer, _, behind, sinks = i.n
        keys, values = self.stored[layer]
        t = len(self.tokens)
        q = self.buffers[i.read][:, at : at + heads * width].reshape(t, heads, width)
        distance = np.subtract.outer(np.arange(t), np.arange(t))
        seen = (distance >= 0) & ((behind < 0) | (distance <= behind) | (np.arange(t) < sinks))
        out = self.buffers[i.out].reshape(t, heads, value_width)
        for h in range(heads):
            scores = q[:, h] @ keys[:, h // (heads // kv)].T * i.x[0]
            scores = scores - (0.0 if i.p[0] is None else i.p[0][h]) * distance
            scores = ops.softcap(scores, i.x[1] or None)
            out[:, h] = ops.softmax(scores, seen) @ values[:, h // (heads // kv)]

    def act(self, i: Instruction) -> None:
        kind, gate, up, n = i.n
        x = self.buffers[i.read]
        y = ops.activation(ACTIVATIONS[kind], x[:, gate : gate + n])
        self.buffers[i.out][:] = y if up < 0 else y * x[:, up : up + n]

    def add(self, i: Instruction) -> None:
        self.buffers[i.out] = self.buffers[i.out] + self.buffers[i.read]

    def scale(self, i: Instruction) -> None:
        self.buffers[i.out] = self.buffers[i.out] * i.x[0]

    def cap(self, i: Instruction) -> None:
        self.buffers[i.out] = ops.softcap(self.buffers[i.out], i.x[0])

    def wanted(self, i: Instruction) -> None:
        self.buffers[i.out] = self.buffers[i.read].copy()


def dense(matrix: Matrix) -> np.ndarray:
    """What a packed matrix stands for."""
    return unpack(matrix.data, matrix.rows, matrix.columns, matrix.form).astype(np.float64)
