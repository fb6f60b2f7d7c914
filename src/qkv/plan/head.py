"""The operations of a head: from hidden states `x` (B, T, D) to logits or a pooled vector."""

from __future__ import annotations

from functools import singledispatch

from qkv import config as c
from qkv.plan.norm import norm
from qkv.plan.program import Dim, Writer, number


@singledispatch
def head(config: c.Head, w: Writer, model: c.ModelConfig) -> None:
    """A registered kind, as one operation."""
    own = config.parameters(model.vocab_size, model.d_model)
    w.op("logits", f"logits = {config.kind}(x): see its class", ("x",), "logits", parameters=own)


@head.register
def _(config: c.NoHead, w: Writer, model: c.ModelConfig) -> None:
    """Hidden states are the answer."""


@head.register
def _(config: c.LanguageModel, w: Writer, model: c.ModelConfig) -> None:
    if config.factor(model.d_model) != 1.0:
        w.op("[scale]", f"x = x * {number(config.factor(model.d_model))}", ("x",), "x")
    _logits(config.tied, config.bias, w, model, "x")
    if config.softcap is not None:
        cap = number(config.softcap)
        w.op("[softcap]", f"logits = {cap} tanh(logits / {cap})", ("logits",), "logits")
    w.op("[softmax]", "p(next token) = softmax(logits)", ("logits",), "p(next token)")


@head.register
def _(config: c.MaskedLanguageModel, w: Writer, model: c.ModelConfig) -> None:
    own = config.parameters(model.vocab_size, model.d_model)
    w.linear("transform", "x", "h", Dim("D", model.d_model), own)
    w.op("[activation]", f"h = {config.activation}(h)", ("h",), "h")
    norm(config.norm, w, "norm", "h", "h")
    _logits(config.tied, True, w, model, "h")
    w.op("[softmax]", "p(masked token) = softmax(logits)", ("logits",), "p(masked token)")
    if config.next_sentence:
        b, _, d = w.shapes["x"]
        w.op("[pool]", "pooled = x of the first token", ("x",), "pooled", (b, d))
        w.linear("next_sentence.pooler", "pooled", "pooled", d, own)
        w.op("[activation]", "pooled = tanh(pooled)", ("pooled",), "pooled")
        w.linear("next_sentence.classifier", "pooled", "follows", Dim("classes", 2), own)


@head.register
def _(config: c.Pooler, w: Writer, model: c.ModelConfig) -> None:
    _pooled(w, model, "first token", "tanh", config)


@head.register
def _(config: c.NextSentence, w: Writer, model: c.ModelConfig) -> None:
    _pooled(w, model, "first token", "tanh", config)
    own = config.parameters(model.vocab_size, model.d_model)
    w.linear("classifier", "pooled", "logits", Dim("classes", 2), own)


@head.register
def _(config: c.Classifier, w: Writer, model: c.ModelConfig) -> None:
    what = "mean over real tokens" if config.pooling == "mean" else f"{config.pooling} real token"
    _pooled(w, model, what, config.hidden, config)
    own = config.parameters(model.vocab_size, model.d_model)
    w.linear("classifier", "pooled", "logits", Dim("classes", config.n_classes), own)


@head.register
def _(config: c.TokenClassifier, w: Writer, model: c.ModelConfig) -> None:
    own = config.parameters(model.vocab_size, model.d_model)
    w.linear("classifier", "x", "logits", Dim("classes", config.n_classes), own)


@head.register
def _(config: c.Span, w: Writer, model: c.ModelConfig) -> None:
    own = config.parameters(model.vocab_size, model.d_model)
    w.linear("classifier", "x", "logits", Dim("start, end", 2), own)


@head.register
def _(config: c.AdaptiveSoftmax, w: Writer, model: c.ModelConfig) -> None:
    own = config.parameters(model.vocab_size, model.d_model)
    shape = (*w.shapes["x"][:-1], Dim("V", model.vocab_size))
    source = " (matrices of embed.tokens)" if config.tied else ""
    formula = f"logits = log p(cluster) + log p(token in cluster), {len(config.cutoffs) + 1} clusters{source}"
    w.op("logits", formula, ("x",), "logits", shape, own)


def _logits(tied: bool, bias: bool, w: Writer, model: c.ModelConfig, read: str) -> None:
    own = model.head.parameters(model.vocab_size, model.d_model)
    own = {name: p for name, p in own.items() if name in ("weight", "bias")}
    table = "target_embed" if model.sharing == "none" else "embed"
    matrix = f"(table of {table})^T" if tied else "W^T"
    shape = (*w.shapes[read][:-1], Dim("V", model.vocab_size))
    w.op("logits", f"logits = {read} {matrix}{' + b' if bias else ''}", (read,), "logits", shape, own)


def _pooled(w: Writer, model: c.ModelConfig, what: str, activation: str, config: c.Head) -> None:
    b, _, d = w.shapes["x"]
    w.op("[pool]", f"pooled = x of the {what}", ("x",), "pooled", (b, d))
    if activation != "none":
        w.linear("pooler", "pooled", "pooled", d, config.parameters(model.vocab_size, model.d_model))
        w.op("[activation]", f"pooled = {activation}(pooled)", ("pooled",), "pooled")
