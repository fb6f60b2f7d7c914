"""From the config tree to a program: which instructions compute a decoder, in order.

    x = embed(tokens)
    per layer    n = norm(x);  q k v = n W;  turn;  store;  a = attend;  x += a W;  n = norm(x);  x += ffn(n)
    logits = norm(wanted rows of x) W

The residual kind says where the norms stand. Sums of sublayers are added to x by the products themselves where nothing
stands between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import singledispatchmethod

import numpy as np

from qkv import config as c
from qkv.cache.spec import retention
from qkv.engine.angles import waves
from qkv.engine.packing import Floats, Format
from qkv.engine.program import Matrix, Op, Program, matrix
from qkv.errors import EngineError

ACTIVATIONS = ("relu", "relu2", "gelu", "gelu-tanh", "quick-gelu", "silu", "sigmoid", "tanh")
"""In the runtime's order."""
Weights = Mapping[str, Floats]


@dataclass(frozen=True)
class Precision:
    """In which formats matrices are kept."""

    weights: Format = "fp32"
    head: Format = "fp32"
    """Of the head's matrix, which with tied weights is the token table, too."""

    @classmethod
    def of(cls, form: Format) -> Precision:
        """A format for a model: with 4 bits the head keeps 8, since it decides between tokens."""
        return cls(form, "int8" if form == "int4" else form)


def why_not(config: c.ModelConfig) -> str | None:
    """Why the engine cannot run the model, in words; None where it can."""
    return next(_obstacles(config), None)


def _obstacles(config: c.ModelConfig) -> Iterator[str]:
    if config.decoder is None or config.encoder is not None:
        yield "it runs decoders only"
        return
    if not isinstance(config.head, c.LanguageModel):
        yield f"it has no head of kind {config.head.kind!r}"
    embedding = config.embedding
    if not isinstance(embedding.tokens, c.FullTable):
        yield f"it has no token table of kind {embedding.tokens.kind!r}"
    if not isinstance(embedding.positions, c.NoPositions | c.Learned | c.Sinusoidal):
        yield f"it has no positions of kind {embedding.positions.kind!r} in the embedding"
    if embedding.n_segments:
        yield "it has no segments"
    for block in dict.fromkeys(config.decoder.blocks):
        yield from _block_obstacles(block)


def _block_obstacles(block: c.Block) -> Iterator[str]:
    attention = block.attention
    if not isinstance(attention, c.MultiHead):
        yield f"it has no attention of kind {attention.kind!r}"
        return
    if not isinstance(attention.pattern, c.Causal | c.SlidingWindow):
        yield f"it has no pattern {attention.pattern.kind!r}"
    scheme = attention.positions
    if isinstance(scheme, c.Rotary):
        if scheme.scaling.reads_length or isinstance(scheme.scaling, c.YarnScaling):
            yield f"it has no rotary scaling of kind {scheme.scaling.kind!r}"
    elif isinstance(scheme, c.Alibi):
        if scheme.rounded:
            yield "it has no rounded ALiBi"
    elif not isinstance(scheme, c.NoPositions):
        yield f"it has no positions of kind {scheme.kind!r}"
    features = {"clip": attention.clip, "sinks": attention.sinks, "log_n": attention.log_n}
    yield from (f"it has no attention with {name}" for name, value in features.items() if value)
    if not isinstance(block.ffn, c.Dense | c.Gated):
        yield f"it has no feed-forward network of kind {block.ffn.kind!r}"
    known = c.PreNorm | c.PostNorm | c.SandwichNorm | c.Parallel
    if not isinstance(block.residual, known):
        yield f"it has no residual of kind {block.residual.kind!r}"
    if not isinstance(block.norm, c.NoNorm | c.LayerNorm | c.RMSNorm):
        yield f"it has no norm of kind {block.norm.kind!r}"


def lower(config: c.ModelConfig, weights: Weights, precision: Precision, length: int) -> Program:
    """The program of a decoder; `length`: the positions that it can be asked for."""
    reason = why_not(config)
    if reason is not None:
        raise EngineError(f"engine: {reason}; choose torch")
    return _Lowering(config, weights, precision, length).program


class _Lowering:
    def __init__(self, config: c.ModelConfig, weights: Weights, precision: Precision, length: int) -> None:
        self.config, self.weights, self.precision, self.length = config, weights, precision, length
        self.program = Program()
        decoder, d = config.decoder, config.d_model
        assert decoder is not None
        self.x, self.n = self.program.buffer(d), self.program.buffer(d)
        self._shared: dict[tuple[str, int], int] = {}
        self._waves: dict[tuple[c.Rotary, int], tuple[Floats, Floats]] = {}
        self._groups: dict[object, int] = {}
        self.table = matrix([weights["embed.tokens.weight"]], precision.head)
        self._embed()
        for index, block in enumerate(decoder.blocks):
            self._layer(block.residual, block, index)
        self._head(decoder)

    def _scratch(self, use: str, width: int) -> int:
        """The buffer that all layers have for that use."""
        if (use, width) not in self._shared:
            self._shared[use, width] = self.program.buffer(width)
        return self._shared[use, width]

    def _matrix(self, *names: str) -> Matrix:
        return matrix([self.weights[f"{name}.weight"] for name in names], self.precision.weights)

    def _bias(self, *names: str) -> Floats | None:
        if f"{names[0]}.bias" not in self.weights:
            return None
        return np.concatenate([self.weights[f"{name}.bias"] for name in names]).astype(np.float32)

    def _embed(self) -> None:
        embedding, program = self.config.embedding, self.program
        program.do(Op.EMBED, self.x, x=(embedding.factor(self.config.d_model),), p=(self.table,))
        if isinstance(embedding.positions, c.Learned):
            learned = np.ascontiguousarray(self.weights["embed.positions.weight"], np.float32)
            program.do(Op.PLACE, self.x, n=(embedding.positions.offset,), p=(learned,))
        elif isinstance(embedding.positions, c.Sinusoidal):
            program.do(Op.PLACE, self.x, n=(0,), p=(_sinusoid(embedding.positions, self.config.d_model, self.length),))
        self._norm(embedding.norm, "embed.norm", self.x, self.x)

    def _norm(
        self, norm: c.Norm, name: str, read: int, out: int, *, at: int = 0, heads: int = 1, width: int = 0
    ) -> int:
        """The buffer that holds the normalised rows: `read` itself where there is no norm."""
        if isinstance(norm, c.NoNorm):
            return read
        assert isinstance(norm, c.LayerNorm | c.RMSNorm)
        weight, bias = (self.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
        if weight is not None:
            weight = np.ascontiguousarray(weight, np.float32)
            if isinstance(norm, c.RMSNorm) and norm.unit_offset:
                weight = weight + np.float32(1)
        bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        size = width or self.program.widths[read]
        centre = int(isinstance(norm, c.LayerNorm))
        self.program.do(Op.NORM, out, read, n=(heads, size, centre, at), x=(norm.eps,), p=(weight, bias))
        return out

    # Layers

    @singledispatchmethod
    def _layer(self, residual: c.Residual, block: c.Block, index: int) -> None:
        raise EngineError(f"engine: it has no residual of kind {residual.kind!r}; choose torch")

    @_layer.register
    def _(self, residual: c.PreNorm, block: c.Block, index: int) -> None:
        for name in block.sublayers:
            read = self._norm(block.norm, f"decoder.layers.{index}.{name}_norm", self.x, self.n)
            self._sublayer(name, block, index, read, self.x, add=True)

    @_layer.register
    def _(self, residual: c.PostNorm, block: c.Block, index: int) -> None:
        for name in block.sublayers:
            self._sublayer(name, block, index, self.x, self.x, add=True)
            self._norm(block.norm, f"decoder.layers.{index}.{name}_norm", self.x, self.x)

    @_layer.register
    def _(self, residual: c.SandwichNorm, block: c.Block, index: int) -> None:
        for name in block.sublayers:
            path = f"decoder.layers.{index}.{name}"
            read = self._norm(block.norm, f"{path}_norm", self.x, self.n)
            self._sublayer(name, block, index, read, self.n, add=False)
            self._norm(block.norm, f"{path}_post_norm", self.n, self.n)
            self.program.do(Op.ADD, self.x, self.n)

    @_layer.register
    def _(self, residual: c.Parallel, block: c.Block, index: int) -> None:
        path = f"decoder.layers.{index}"
        joined = self._scratch("joined", self.config.d_model)
        shared = self._norm(block.norm, f"{path}.norm", self.x, self.n) if residual.shared_norm else None
        for number, name in enumerate(block.sublayers):
            read = self._norm(block.norm, f"{path}.{name}_norm", self.x, self.n) if shared is None else shared
            self._sublayer(name, block, index, read, joined, add=number > 0)
        self.program.do(Op.ADD, self.x, joined)

    def _sublayer(self, name: str, block: c.Block, index: int, read: int, out: int, *, add: bool) -> None:
        path = f"decoder.layers.{index}.{name}"
        if name == "ffn":
            self._ffn(block.ffn, path, read, out, add=add)
        else:
            assert isinstance(block.attention, c.MultiHead)
            self._attention(block.attention, path, index, read, out, add=add)

    def _attention(self, a: c.MultiHead, path: str, index: int, read: int, out: int, *, add: bool) -> None:
        h, g, f, program = a.n_heads, a.kv_heads, a.head_dim, self.program
        projections = [f"{path}.{letter}_proj" for letter in "qkv"]
        qkv, mixed = self._scratch("qkv", (h + 2 * g) * f), self._scratch("mixed", h * f)
        program.linear(qkv, read, self._matrix(*projections), self._bias(*projections))
        self._norm(a.qk_norm, f"{path}.q_norm", qkv, qkv, at=0, heads=h, width=f)
        self._norm(a.qk_norm, f"{path}.k_norm", qkv, qkv, at=h * f, heads=g, width=f)
        if isinstance(a.positions, c.Rotary):
            turned, pairs = a.positions.width(f), int(a.positions.layout == "pairs")
            program.do(Op.ROTATE, qkv, n=(0, h + g, f, turned, pairs), p=self._turns(a.positions, f))
        kept = retention(a.pattern)
        group = self._groups.setdefault(kept, len(self._groups))
        program.do(Op.STORE, 0, qkv, n=(h * f, (h + g) * f, g, f, f, index, group))
        slopes = None
        if isinstance(a.positions, c.Alibi):
            slopes = alibi_slopes(h, a.positions.max_bias) * np.float32(a.score_scale if a.positions.scaled else 1)
        behind = -1 if kept.behind is None else kept.behind
        where = (0, h, g, f, f, index, group, behind, kept.sinks)
        program.do(Op.ATTEND, mixed, qkv, n=where, x=(a.score_scale, a.softcap or 0.0), p=(slopes,))
        program.linear(out, mixed, self._matrix(f"{path}.o_proj"), self._bias(f"{path}.o_proj"), add=add)

    def _turns(self, positions: c.Rotary, width: int) -> tuple[Floats, Floats]:
        """One pair of tables for all layers that turn alike."""
        key = (positions, width)
        if key not in self._waves:
            self._waves[key] = waves(positions, width, self.length)
        return self._waves[key]

    def _ffn(self, ffn: c.FeedForward, path: str, read: int, out: int, *, add: bool) -> None:
        assert isinstance(ffn, c.Dense | c.Gated)
        gated = isinstance(ffn, c.Gated)
        names = [f"{path}.gate_proj", f"{path}.up_proj"] if gated else [f"{path}.up_proj"]
        wide, narrow = self._scratch("wide", len(names) * ffn.d_ff), self._scratch("narrow", ffn.d_ff)
        program, kind = self.program, ACTIVATIONS.index(ffn.activation)
        program.linear(wide, read, self._matrix(*names), self._bias(*names))
        program.do(Op.ACT, narrow, wide, n=(kind, 0, ffn.d_ff if gated else -1, ffn.d_ff))
        program.linear(out, narrow, self._matrix(f"{path}.down_proj"), self._bias(f"{path}.down_proj"), add=add)

    def _head(self, decoder: c.Stack) -> None:
        head, program, d = self.config.head, self.program, self.config.d_model
        assert isinstance(head, c.LanguageModel)
        last, logits = program.buffer(d), program.buffer(self.config.vocab_size)
        program.do(Op.WANTED, last, self.x)
        self._norm(decoder.norm, "decoder.norm", last, last)
        if head.factor(d) != 1.0:
            program.do(Op.SCALE, last, x=(head.factor(d),))
        weight = self.table if head.tied else matrix([self.weights["head.weight"]], self.precision.head)
        program.linear(logits, last, weight, self._bias("head"))
        if head.softcap is not None:
            program.do(Op.CAP, logits, x=(head.softcap,))
        program.result = logits


def alibi_slopes(n_heads: int, max_bias: float) -> Floats:
    """2^(-max_bias (h + 1) / P) for the power of two P up to n_heads; then every other slope of 2P (Press 2021)."""
    power = 1 << (n_heads.bit_length() - 1)
    first = 2.0 ** (-max_bias * np.arange(1, power + 1) / power)
    rest = 2.0 ** (-max_bias * np.arange(1, 2 * (n_heads - power), 2) / (2 * power))
    return np.concatenate([first, rest]).astype(np.float32)


def _sinusoid(positions: c.Sinusoidal, width: int, length: int) -> Floats:
    angle = np.arange(length)[:, None] * positions.theta ** (-np.arange(0, width, 2) / width)
    waves = np.stack([np.sin(angle), np.cos(angle)], -1 if positions.layout == "pairs" else 1)
    return np.ascontiguousarray(waves.reshape(length, width), np.float32)
