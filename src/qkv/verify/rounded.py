"""Weights rounded to few bits, in groups of 32 along the inputs of every matrix of a linear layer.

    the codec's rounding = the oracle's, number by number, on some rows of every matrix
    float64              = float32, both with the rounded weights, which float32 holds exactly

How far that is from the weights as they are is no error but the price; the row tells it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from qkv.cache.codec import Codec, Int4, Int8
from qkv.nn import Transformer
from qkv.nn.codec import decode, encode
from qkv.reference.codec import through
from qkv.verify.certificate import Row, compare, worst
from qkv.verify.subject import Subject, view_of

CODECS = (Int8(), Int4())
TRIED = 2
"""Rows of a matrix that the oracle rounds too: it takes its time."""


def rounded_weights(subject: Subject) -> Iterator[Row]:
    """Weights in int8 and int4."""
    for codec in CODECS:
        weights = {name: _through(codec, module.weight) for name, module in _linear(subject.exact)}
        yield worst(_oracle_row(codec, name, module.weight, weights[name]) for name, module in _linear(subject.exact))
        expected = subject.inputs.run(_with(subject.exact, weights))
        found = subject.inputs.run(_with(subject.fast, weights))
        path, tolerance = f"float64 = float32, weights in {codec.name}", subject.bound(torch.float32)
        away = compare("", subject.expected, expected, 0.0).deviation
        yield replace(compare(path, expected, found, tolerance), note=f"{away:.1e} from no rounding")


def _linear(model: Transformer) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _through(codec: Codec, weight: Tensor) -> Tensor:
    """Rounded, as a layer that holds the codes would see it."""
    weight = weight.detach()
    return decode(codec, encode(codec, weight), weight.shape[-1], weight.dtype)


def _oracle_row(codec: Codec, name: str, weight: Tensor, found: Tensor) -> Row:
    rows = torch.linspace(0, len(weight) - 1, TRIED).long()
    expected = torch.from_numpy(through(codec.name, weight.detach()[rows].numpy()))
    row = compare(f"oracle = codec, weights in {codec.name}", expected, found[rows], 0.0)
    return replace(row, where=f"in {name}" if row.deviation else "")


def _with(model: Transformer, weights: dict[str, Tensor]) -> Transformer:
    """The model with these matrices; all else is shared."""
    view = view_of(model)
    for name, module in _linear(view):
        module.weight = nn.Parameter(weights[name].to(module.weight.dtype), requires_grad=False)
    return view
