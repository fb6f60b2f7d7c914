"""The operations of an attention mechanism: from the value `read` (B, T, D) to `a` of the same shape.

Keys and values come from `memory`: `read` itself in self-attention, the encoder's output in cross-attention.
"""

from __future__ import annotations

from functools import singledispatch

from qkv import config as c
from qkv.config.parameter import Table
from qkv.plan.norm import norm
from qkv.plan.position import steps
from qkv.plan.program import Dim, Shape, Writer, number


@singledispatch
def attention(config: c.Attention, w: Writer, name: str, read: str, memory: str, sizes: c.Sizes) -> str:
    """A registered kind, as one operation."""
    formula = f"a = {config.kind}({read}, {memory}): see its class"
    w.op(name, formula, (read, memory), "a", w.shapes[read], config.parameters(sizes))
    return "a"


@attention.register
def _(config: c.MultiHead, w: Writer, name: str, read: str, memory: str, sizes: c.Sizes) -> str:
    table = c.under(name, config.parameters(sizes))
    h, g, f = Dim("H", config.n_heads), Dim("G", config.kv_heads), Dim("F", config.head_dim)
    kinds = ("", "_global") if config.global_projections else ("",)
    for kind in kinds:
        for letter, source, heads in (("q", read, h), ("k", memory, g), ("v", memory, g)):
            module, value = f"{name}.{letter}{kind}_proj", f"{letter}{kind}"
            w.linear(module, source, value, _product(heads, f), table)
            w.op("[split heads]", f"{value} = heads of {value}", (value,), value, _split(w, value, heads, f))
            if letter != "v":
                norm(config.qk_norm, w, f"{name}.{letter}_norm", value, value, owned=not kind)
    if config.log_n is not None:
        w.op("[log-n]", f"q = q * max(1, ln(position + 1) / ln({config.log_n}))", ("q",), "q")
    for kind in kinds:
        if turn := steps(config.positions).turn:
            for value in (f"q{kind}", f"k{kind}"):
                w.op(f"{name}.positions", f"{value} = {value}, {turn}", (value,), value)
    own = _below(table, f"{name}.positions")
    sinks = _below(table, f"{name}.sinks")
    _mix(w, config, name, own, sinks)
    if config.global_projections:
        reads = ("c", "q_global", "k_global", "v_global")
        w.op("[global rows]", "c = c, but for global tokens mixed anew from q_global, k_global, v_global", reads, "c")
    return _out(w, name, config.n_heads * config.head_dim, sizes.d_model, table)


@attention.register
def _(config: c.Latent, w: Writer, name: str, read: str, memory: str, sizes: c.Sizes) -> str:
    table = c.under(name, config.parameters(sizes))
    h, nope, rope = Dim("H", config.n_heads), Dim("nope", config.nope_dim), Dim("rope", config.rope_dim)
    q, kv, f = Dim("q_rank", config.q_rank), Dim("kv_rank", config.kv_rank), Dim("F", config.query_dim)
    fv = Dim("Fv", config.v_head_dim)
    if config.q_rank is None:
        w.linear(f"{name}.q_proj", read, "q", _product(h, f), table)
    else:
        w.linear(f"{name}.q_down_proj", read, "q", q, table)
        norm(config.norm, w, f"{name}.q_norm", "q", "q")
        w.linear(f"{name}.q_up_proj", "q", "q", _product(h, f), table)
    w.op("[split heads]", "q = heads of q, each nope and rope elements", ("q",), "q", _split(w, "q", h, f))
    w.linear(f"{name}.kv_down_proj", memory, "kv", _sum(kv, rope), table)
    w.op("[split]", "latent = first kv_rank elements of kv", ("kv",), "latent", (*w.shapes["kv"][:-1], kv))
    w.op("[split]", "k_rope = the rest, one for all heads", ("kv",), "k_rope", _split(w, "kv", Dim("1", 1), rope))
    norm(config.norm, w, f"{name}.kv_norm", "latent", "latent")
    w.linear(f"{name}.kv_up_proj", "latent", "kv", _product(h, _sum(nope, fv)), table)
    w.op("[split heads]", "k_nope = first nope elements of each head", ("kv",), "k_nope", _split(w, "kv", h, nope))
    w.op("[split heads]", "v = the other elements of each head", ("kv",), "v", _split(w, "kv", h, fv))
    turn = steps(config.positions).turn
    w.op(f"{name}.positions", f"q = q, its rope elements: {turn}", ("q",), "q")
    w.op(f"{name}.positions", f"k_rope = k_rope, {turn}", ("k_rope",), "k_rope")
    w.op("[join]", "k = k_nope, k_rope", ("k_nope", "k_rope"), "k", (*w.shapes["k_nope"][:-1], f))
    _mix(w, config, name, {}, {})
    return _out(w, name, config.n_heads * config.v_head_dim, sizes.d_model, table)


def _mix(w: Writer, config: c.Attention, name: str, positions: Table, sinks: Table) -> None:
    """Scores, softmax and weighted values: c (B, H, T, width of v)."""
    scheme, (b, h, queries, _) = steps(config.positions), w.shapes["q"]
    square = (b, h, queries, w.shapes["k"][2])
    w.op("[scores]", f"s = q k^T * {number(config.score_scale)}", ("q", "k"), "s", square)
    late = {key: p for key, p in positions.items() if scheme.values and key.endswith(".value")}
    if scheme.bias:
        early = {key: p for key, p in positions.items() if key not in late}
        reads = ("s", "bias") if config.positions.shared else ("s",)
        added = "bias" if config.positions.shared else scheme.bias
        w.op(f"{name}.positions", f"s = s + {added}", reads, "s", parameters=early)
    if isinstance(config, c.MultiHead) and config.softcap is not None:
        w.op("[softcap]", f"s = {number(config.softcap)} tanh(s / {number(config.softcap)})", ("s",), "s")
    w.op("[mask]", f"s = s where {config.pattern.kind} allows, else -inf", ("s",), "s")
    beside = ", with one more score per head that carries no value" if sinks else ""
    w.op("[softmax]" if not sinks else f"{name}.sinks", f"p = softmax(s){beside}", ("s",), "p", parameters=sinks)
    w.op("[mix]", "c = p v", ("p", "v"), "c", (b, h, queries, w.shapes["v"][-1]))
    if scheme.values:
        w.op(f"{name}.positions", f"c = c + {scheme.values}", ("c", "p"), "c", parameters=late)


def _out(w: Writer, name: str, width: int, d_model: int, table: Table) -> str:
    b, h, queries, f = w.shapes["c"]
    w.op("[join heads]", "c = heads side by side", ("c",), "c", (b, queries, _product(h, f)))
    w.linear(f"{name}.o_proj", "c", "a", Dim("D", d_model), table)
    return "a"


def _split(w: Writer, value: str, heads: Dim, width: Dim) -> Shape:
    """(B, heads, tokens, width) from (B, tokens, heads * width)."""
    b, tokens, _ = w.shapes[value]
    return (b, heads, tokens, width)


def _product(a: Dim, b: Dim) -> Dim:
    return Dim(f"{a.symbol}*{b.symbol}", _known(a) * _known(b))


def _sum(a: Dim, b: Dim) -> Dim:
    return Dim(f"({a.symbol}+{b.symbol})", _known(a) + _known(b))


def _known(dim: Dim) -> int:
    assert dim.size is not None, f"{dim.symbol} has no size"
    return dim.size


def _below(table: Table, path: str) -> Table:
    """The tensors at or below `path`."""
    return {name: p for name, p in table.items() if name == path or name.startswith(f"{path}.")}
