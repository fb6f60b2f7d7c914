"""The native engine against the float64 model.

    float64 = native engine                                 float32 weights
    a row in a batch, in pieces, by several threads = alone bit for bit
    float64 = native engine, weights in bf16, int8, int4    both with the rounded weights; where products read codes of
                                                            their input, the float64 model's do, too

Two that round alike still differ where float32 falls on the other side of the middle between two codes. The bound is
what the rounding of inputs changes as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.engine import Format, why_not
from qkv.engine.lower import Precision
from qkv.engine.packing import GROUP, pack, quantised, unpack
from qkv.errors import EngineError
from qkv.generate.runners.native import NativeRunner
from qkv.nn import Transformer
from qkv.verify.certificate import Row, compare
from qkv.verify.subject import Subject, view_of

FORMS: tuple[Format, ...] = ("bf16", "int8", "int4")
THREADS, PIECE = 3, 5


def native_engine(subject: Subject) -> Iterator[Row]:
    """All formats."""
    path = "float64 = native engine"
    reason = why_not(subject.config)
    if reason is not None:
        yield Row(path, None, 0.0, note=reason)
        return
    try:
        plain = _runner(subject, "fp32")
    except EngineError as error:  # no compiler
        yield Row(path, None, 0.0, note=str(error))
        return
    texts = subject.inputs.tokens.tolist()
    found = _logits(plain, texts)
    yield compare(path, subject.expected, found, subject.bound(torch.float32))
    pieces = _runner(subject, "fp32", threads=THREADS, chunk=PIECE)
    alone = torch.cat([_logits(pieces, [text]) for text in texts])
    yield compare("native engine: in a batch = alone, in pieces, by 3 threads", found, alone, 0.0)
    for form in FORMS:
        yield _rounded(subject, form, texts)


def _runner(subject: Subject, form: Format, *, threads: int = 1, chunk: int = 512) -> NativeRunner:
    weights = {name: tensor.float().numpy() for name, tensor in subject.model.state_dict().items()}
    return NativeRunner.of(subject.config, weights, subject.config.vocab_size, form, threads=threads, chunk=chunk)


def _logits(runner: NativeRunner, texts: list[list[int]]) -> Tensor:
    state = runner.start(len(texts), len(texts[0]))
    return torch.stack([torch.from_numpy(logits) for logits in state.extend_all(texts)])


def _rounded(subject: Subject, form: Format, texts: list[list[int]]) -> Row:
    found = _logits(_runner(subject, form), texts)
    model = _with_rounded_weights(subject.exact, Precision.of(form))
    expected = subject.inputs.run(model)
    path, tolerance = f"float64 = native engine, weights in {form}", subject.bound(torch.float32)
    away = compare("", subject.expected, expected, 0.0).deviation
    if quantised(form):
        plain = expected
        _round_inputs(model)
        expected = subject.inputs.run(model)
        tolerance = max(tolerance, compare("", plain, expected, 0.0).deviation or 0.0)
    return replace(compare(path, expected, found, tolerance), note=f"weights {away:.1e} from no rounding")


def _with_rounded_weights(model: Transformer, precision: Precision) -> Transformer:
    """The model with what its packed matrices stand for; all else is shared."""
    view = view_of(model)
    ours = [(module, precision.weights) for module in view.modules() if isinstance(module, nn.Linear)]
    heads: list[tuple[nn.Module, Format]] = [(view.embed.get_submodule("tokens"), precision.head)]
    if "weight" in dict(view.head.named_parameters(recurse=False)):
        heads.append((view.head, precision.head))
    for module, form in [*ours, *heads]:
        weight = module.get_parameter("weight").detach()
        packed = pack(weight.float().numpy(), form)
        rows, columns = weight.shape
        rounded = torch.from_numpy(unpack(packed, rows, columns, form)).to(weight.dtype)
        module.register_parameter("weight", nn.Parameter(rounded, requires_grad=False))
    return view


def _round_inputs(model: Transformer) -> None:
    """From now on every product reads what the codes of its input stand for."""

    def hook(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_codes(given[0]), *given[1:])

    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.head:
            module.register_forward_pre_hook(hook)


def _codes(x: Tensor) -> Tensor:
    """8 bits in groups of 32 along the last axis, the largest 127."""
    width = x.shape[-1]
    padded = nn.functional.pad(x, (0, -width % GROUP))
    grouped = padded.view(*x.shape[:-1], -1, GROUP)
    step = grouped.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(step > 0, (grouped / step).round(), torch.zeros_like(grouped)) * step
    whole: Tensor = rounded.view(padded.shape)[..., :width]
    return whole
