"""The paths that must agree, each as a function from a `Subject` to rows."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from qkv import reference
from qkv.config import AdaptiveTable, MixtureOfExperts, ModelConfig, NoHead, NoNorm
from qkv.errors import BackendError, CheckpointError, DataError
from qkv.nn import Transformer, capture
from qkv.nn.backends import BACKENDS
from qkv.verify.certificate import Row, compare, worst
from qkv.verify.sample import Sample, part_of, truncated
from qkv.verify.subject import BATCH, EXACT, LENGTH, Subject


def oracle(subject: Subject) -> Iterator[Row]:
    """The float64 model against the NumPy oracle; a difference is traced to the first layer that has it."""
    found = reference.run(subject.config, subject.weights, **subject.inputs.arrays())
    result = found.hidden if found.logits is None else found.logits
    row = compare("oracle = model, float64", torch.from_numpy(result), subject.expected, EXACT)
    if row.verdict == "DIFFERS":
        row = replace(row, where=f"{_traced(subject)}; largest at {row.where}")
    yield row


def _traced(subject: Subject) -> str:
    """Where the float64 model first leaves the oracle."""
    with torch.no_grad(), capture(subject.exact, "*.layers.*.output") as trace:
        subject.exact(subject.inputs.tokens, **subject.inputs.more)
    return first_deviation(subject, trace)


def first_deviation(subject: Subject, trace: Mapping[str, Tensor], codec: str = "raw") -> str:
    """The first layer whose output in `trace` differs from the oracle's, or the end of the model."""
    stack = "decoder" if subject.config.decoder is not None else "encoder"
    depth = subject.config.stacks[stack].n_layers
    for layers in range(1, depth + 1):
        bare = truncated(subject.config, layers) if stack == "encoder" or len(subject.config.stacks) == 1 else None
        if bare is None:  # cut the decoder alone: its layers all see the whole encoder
            cut = truncated(subject.config, layers).to_dict()[stack]
            bare = subject.config.override({stack: cut})
        bare = bare.override({"head": NoHead(), f"{stack}.norm": NoNorm()})
        weights = {name: subject.weights[name] for name in bare.shapes()}
        hidden = torch.from_numpy(reference.run(bare, weights, **subject.inputs.arrays(), codec=codec).hidden)
        if compare("", hidden, trace[f"{stack}.layers.{layers - 1}.output"], EXACT).verdict == "DIFFERS":
            return f"first in {stack}.layers.{layers - 1}"
    return "first after the last layer (final norm or head)"


def backends(subject: Subject) -> Iterator[Row]:
    """Every attention backend that can serve the model; those without float64 in float32."""
    tolerance = subject.bound(torch.float32)
    for name in BACKENDS:
        if name == "eager":
            continue
        for model, limit, word in ((subject.exact, EXACT, "float64"), (subject.fast, tolerance, "float32")):
            try:
                found = subject.inputs.run(model, backend=name)
            except BackendError as error:
                reason = str(error)
                continue
            expected = subject.inputs.run(model, backend="eager")
            yield compare(f"eager = {name}, {word}", expected, found, limit)
            break
        else:
            yield Row(f"eager = {name}", None, EXACT, note=reason.partition(": ")[2].partition("; capable")[0])


def precision(subject: Subject) -> Iterator[Row]:
    """float32 and bfloat16 against float64, within what rounding explains."""
    for dtype, model in ((torch.float32, subject.fast), (torch.bfloat16, copy.deepcopy(subject.model).bfloat16())):
        name = str(dtype).removeprefix("torch.")
        yield compare(f"float64 = {name}", subject.expected, subject.inputs.run(model), subject.bound(dtype))


def batching(subject: Subject) -> Iterator[Row]:
    """A row alone, padded on either side, and packed with another document."""
    length = LENGTH - 7
    alone = subject.inputs.row(0, length)
    expected = alone.run(subject.exact)
    per_token = expected.ndim > 2 and expected.shape[1] == length
    for side in ("right", "left"):
        valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        if side == "right":
            valid[0, length:] = False
            given = subject.inputs
        else:
            valid[0, : LENGTH - length] = False
            given = Sample(subject.inputs.tokens.clone(), {n: v.clone() for n, v in subject.inputs.more.items()})
            given.tokens[0, LENGTH - length :] = alone.tokens[0]
            for name in ("segments", "global_tokens"):
                if name in given.more:
                    given.more[name][0, LENGTH - length :] = alone.more[name][0]
        found = given.run(subject.exact, valid=valid)[:1]
        found = found[:, valid[0]] if per_token else found
        yield compare(f"alone = in a batch, padded on the {side}", expected, found, EXACT)
    yield from _packing(subject, alone, expected, per_token)
    yield from _prefixes(subject, per_token)


def _packing(subject: Subject, alone: Sample, expected: Tensor, per_token: bool) -> Iterator[Row]:
    path = "alone = packed with another document"
    if not per_token or len(subject.config.stacks) == 2:
        yield Row(path, None, EXACT, note="one row is one document for this model")
        return
    other = subject.inputs.row(1, LENGTH - alone.tokens.shape[1])
    tokens = torch.cat((alone.tokens, other.tokens), 1)
    more = {n: v if n == "prefix_length" else torch.cat((v, other.more[n]), 1) for n, v in alone.more.items()}
    documents = torch.arange(LENGTH)[None] // alone.tokens.shape[1]
    found = Sample(tokens, more).run(subject.exact, documents=documents)[:, : alone.tokens.shape[1]]
    yield compare(path, expected, found, EXACT)


def _prefixes(subject: Subject, per_token: bool) -> Iterator[Row]:
    """A causal model's answer for a text is its answer for every longer text that begins with it."""
    path = "whole = each of its beginnings"
    decoder = subject.config.decoder
    if decoder is None or not per_token or any(block.attention.pattern.reach().ahead != 0 for block in decoder.blocks):
        yield Row(path, None, EXACT, note="tokens of this model see what follows them")
        return
    if subject.regrown is not None:
        yield Row(path, None, EXACT, note=subject.regrown)
        return
    lengths = (1, 2, LENGTH // 3, LENGTH // 2, LENGTH - 1)
    cuts = {length: subject.inputs.part(0, length).run(subject.exact) for length in lengths}
    yield worst(compare(path, subject.expected[:, :length], found, EXACT) for length, found in cuts.items())


def compiled(subject: Subject) -> Iterator[Row]:
    """One graph through torch.compile, float32; at most two layers, since it compiles every one."""
    path = "eager = compiled, float32"
    sorts = _sorts_by_data(subject.config)
    if sorts is not None:
        yield Row(path, None, 0.0, note=f"{sorts} sort tokens by their data, which no single graph can")
        return
    part = part_of(subject.fast, truncated(subject.config, 2))
    torch._dynamo.reset()
    try:
        found = subject.inputs.run(torch.compile(part, fullgraph=True))  # type: ignore[arg-type]
    except torch._dynamo.exc.TorchDynamoException as error:
        yield Row(path, float("inf"), 0.0, note=f"does not compile: {str(error).strip().splitlines()[0]}")
        return
    yield compare(path, subject.inputs.run(part), found, subject.bound(torch.float32))


def _sorts_by_data(config: ModelConfig) -> str | None:
    """What in the model has shapes that depend on the data; None if nothing has."""
    blocks = [block for stack in config.stacks.values() for block in stack.blocks]
    if any(isinstance(block.ffn, MixtureOfExperts) for block in blocks):
        return "experts"
    if any("is_global" in block.attention.pattern.fields for block in blocks):
        return "global tokens"
    return "adaptive tables" if isinstance(config.embedding.tokens, AdaptiveTable) else None


def saving(subject: Subject) -> Iterator[Row]:
    """Saved and loaded again: the same bits."""
    from qkv.model import load, save

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model"
        try:
            save(subject.fast, target)
        except (CheckpointError, DataError) as error:
            yield Row("saved and loaded = itself", None, 0.0, note=str(error))
            return
        again: nn.Module = load(target).model
        assert isinstance(again, Transformer)
        yield compare("saved and loaded = itself", subject.inputs.run(subject.fast), subject.inputs.run(again), 0.0)
