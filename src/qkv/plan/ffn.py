"""The operations of a feed-forward network: from the value `read` (B, T, D) to `f` of the same shape."""

from __future__ import annotations

from functools import singledispatch

from qkv import config as c
from qkv.plan.program import Dim, Writer, number


@singledispatch
def ffn(config: c.FeedForward, w: Writer, read: str, d_model: int) -> str:
    """A registered kind, as one operation."""
    w.op("ffn", f"f = {config.kind}({read}): see its class", (read,), "f", parameters=config.parameters(d_model))
    return "f"


@ffn.register
def _(config: c.Dense, w: Writer, read: str, d_model: int) -> str:
    table = c.under("ffn", config.parameters(d_model))
    w.linear("ffn.up_proj", read, "u", Dim("d_ff", config.d_ff), table)
    w.op("[activation]", f"u = {config.activation}(u)", ("u",), "u")
    w.linear("ffn.down_proj", "u", "f", Dim("D", d_model), table)
    return "f"


@ffn.register
def _(config: c.Gated, w: Writer, read: str, d_model: int) -> str:
    return _gated(config, w, "ffn", read, d_model)


@ffn.register
def _(config: c.MixtureOfExperts, w: Writer, read: str, d_model: int) -> str:
    table = c.under("ffn", config.parameters(d_model))
    e, k, wide = Dim("E", config.n_experts), Dim("k", config.top_k), Dim("d_ff", config.d_ff)
    own = {name: p for name, p in table.items() if name.startswith("ffn.router.")}
    b, tokens, d = w.shapes[read]
    w.op("ffn.router", f"r = {config.score}({read} W^T)", (read,), "r", (b, tokens, e), own)
    where = f" of the {config.top_groups} best of {config.n_groups} groups" if config.n_groups > 1 else ""
    corrected = " by r + correction" if config.correction else ""
    w.op("[choose]", f"e = the k best experts{where}{corrected}", ("r",), "e", (b, tokens, k))
    for module, write, before, width in (("gate", "g", read, wide), ("up", "u", read, wide), ("down", "f", "u", d)):
        name = f"ffn.experts.{module}_proj"
        if module == "down":
            w.op("[activation]", f"u = {config.activation}(g) * u", ("g", "u"), "u")
        own = {name: table[name]}
        w.op(name, f"{write} = {before} W_e^T for each chosen e", (before, "e"), write, (b, tokens, k, width), own)
    shares = "r_e / their sum" if config.normalize else "r_e"
    scale = "" if config.scale == 1.0 else f" * {number(config.scale)}"
    w.op("[mix experts]", f"f = sum of f_e * {shares}{scale}", ("f", "r", "e"), "f", (b, tokens, d))
    if config.shared is not None:
        w.op("[keep]", "m = f", ("f",), "m")
        _gated(config.shared, w, "ffn.shared", read, d_model)
        w.op("[add]", "f = m + f", ("m", "f"), "f")
    return "f"


def _gated(config: c.Gated, w: Writer, path: str, read: str, d_model: int) -> str:
    table, wide = c.under(path, config.parameters(d_model)), Dim("d_ff", config.d_ff)
    w.linear(f"{path}.gate_proj", read, "g", wide, table)
    w.linear(f"{path}.up_proj", read, "u", wide, table)
    w.op("[activation]", f"u = {config.activation}(g) * u", ("g", "u"), "u")
    w.linear(f"{path}.down_proj", "u", "f", Dim("D", d_model), table)
    return "f"
