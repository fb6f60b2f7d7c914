"""Losses: sums over real targets, so that a step may be cut into any parts.

    token:  (1 - s) (lse(x) - x_y) + s (lse(x) - mean(x)) + z lse(x)^2          lse(x) = log sum_v exp(x_v)

x: the V logits, y: the target, s: label smoothing, spread evenly over all V (Szegedy 2015; Vaswani 2017, 5.4),
z: what keeps the logits near 0 (Chowdhery 2022). Classifiers and spans have the same loss; a span is two decisions
among the tokens of its row that are real. An adaptive softmax gives log-probabilities, and only the clusters that hold
targets are computed.

A step divides the sum over all of its parts by the number of real targets in all of them, which is known before the
first part runs. `step_gradients` does that: its gradient is that of the step in one batch.

A head that is one matrix W (V, D) over a large vocabulary goes without (N, V) logits. The tokens come in chunks, and
while a chunk's logits are there, they are turned into their own gradient p - y, and that into those of hidden and W:

    dh = (p - y) W,    dW += (p - y)^T h

Three products, as in the plain way; what is saved are the passes over fresh memory between them, and the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qkv.config import MixtureOfExperts, ModelConfig
from qkv.config.training import Objective, Prefer, TokenLoss
from qkv.errors import DataError
from qkv.nn import Transformer, head
from qkv.nn.embedding import FullTable
from qkv.nn.model import Output
from qkv.nn.recall import Recall
from qkv.train.balance import Load, balance_loss, gather, load, masks_of
from qkv.train.batch import IGNORE, Batch, Tensors
from qkv.train.preference import preference_loss

LARGE = 4096
"""From this vocabulary on, the chunked loss is the faster one, too (benchmarks/loss.py)."""
_SPACE = 1 << 23  # logits of a chunk on a CPU; from 64 tokens on, products do not gain by more of them
_CACHE = 1 << 18  # logits that a CPU core keeps near: 1 MB of float32

Run = Callable[..., Output]
"""What calls the model: itself, or what wraps it (compiled, distributed)."""


@dataclass(frozen=True)
class Loss:
    """What is minimised besides the cross-entropy."""

    smoothing: float = 0.0
    """Label smoothing s."""
    z: float = 0.0
    """The weight of lse^2."""
    balance: float = 0.0
    """The weight of the balance loss of experts."""
    beta: float = 0.1
    """Of preferences: how dearly leaving the reference is paid for."""

    @classmethod
    def of(cls, objective: Objective, model: ModelConfig) -> Loss:
        """What an objective's config says, for a model that has experts or not."""
        experts = any(isinstance(b.ffn, MixtureOfExperts) for stack in model.stacks.values() for b in stack.blocks)
        balance = objective.balance if experts else 0.0
        if isinstance(objective, TokenLoss):
            return cls(objective.smoothing, objective.z_loss, balance)
        return cls(balance=balance, beta=objective.beta) if isinstance(objective, Prefer) else cls(balance=balance)


PLAIN = Loss()


@dataclass(frozen=True)
class Found:
    """The loss of one part."""

    total: Tensor
    """The sum over its real targets."""
    count: int
    """How many these are."""
    output: Output
    """What the model gave; without logits where the loss makes them itself."""


@dataclass(frozen=True)
class StepLoss:
    """The loss of a whole step."""

    mean: Tensor
    """() per real target, without the balance loss."""
    count: int
    balance: Tensor | None
    """() of experts, times its weight."""
    pairs: Tensor | None = None
    """() per row, of the second head."""
    recall: Recall | None = None
    """What all rows recall after the step, if they were given something to recall."""


@dataclass(frozen=True)
class Setting:
    """How a step is run, where it is not simply the model on one device."""

    run: Run | None = None
    """What calls the model, if not the model itself."""
    count: int | None = None
    """The real targets of the step, if other processes have more of them."""
    rows: int | None = None
    """And its rows."""
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    """Multiplies a loss before its backward (the scaler of fp16)."""
    begin: Callable[[bool], None] = lambda last: None
    """Is told before each part whether it is the last of the step."""
    together: Callable[[Load], Load] = lambda load: load
    """Adds to the load of experts what other processes have."""
    pair_head: head.NextSentence | None = None
    """Decides about `Batch.pairs`, beside the model's own head; its loss per row is added to that per target."""


ALONE = Setting()


def step_gradients(model: Transformer, parts: Sequence[Batch], how: Loss = PLAIN, setting: Setting = ALONE) -> StepLoss:
    """Add to the parameters' gradients those of the step's mean loss, and of its further losses."""
    count = sum(part.count for part in parts) if setting.count is None else setting.count
    if not count:
        raise DataError("batch: nothing to predict in the whole step; give rows with targets")
    device, run = next(model.parameters()).device, setting.run or model
    whole = None
    if how.balance and len(parts) > 1:
        whole = gather(lambda batch: _hidden(run, batch), model.config, (part.to(device) for part in parts), device)
        whole = setting.together(whole)
    rows = sum(part.rows for part in parts) if setting.rows is None else setting.rows
    losses: dict[str, list[Tensor]] = {"targets": [], "balance": [], "pairs": []}
    recalls = list[Recall]()
    for part in parts:
        setting.begin(part is parts[-1])
        batch = part.to(device)
        found = part_loss(model, batch, how, run=run, weight=1 / count)
        terms = {"targets": found.total}
        if how.balance:
            routing, masks = found.output.routing, masks_of(model.config, batch)
            whole = whole or setting.together(load(routing, masks))
            terms["balance"] = how.balance * balance_loss(routing, masks, whole)
        if setting.pair_head is not None:
            terms["pairs"] = _pair_loss(model, setting.pair_head, batch, found.output) / rows
        torch.autograd.backward(setting.scale(torch.stack(list(terms.values())).sum()))
        for name, term in terms.items():
            losses[name].append(term.detach())
        if found.output.recall is not None:
            recalls.append(found.output.recall)
    mean, balance, pairs = (torch.stack(terms).sum() if terms else None for terms in losses.values())
    assert mean is not None
    return StepLoss(mean, count, balance, pairs, Recall.joined(recalls) if recalls else None)


def _pair_loss(model: Transformer, read: head.NextSentence, batch: Tensors, output: Output) -> Tensor:
    if batch.pairs is None:
        raise DataError("batch: its rows are no pairs; set next_sentence in the objective")
    return cross_entropy(pair_logits(model, read, batch, output), batch.pairs)


def pair_logits(model: Transformer, read: head.NextSentence, batch: Tensors, output: Output) -> Tensor:
    """(B, 2): whether the second segment of each row follows its first (0), or not."""
    tokens = batch.inputs["tokens"]
    valid = batch.inputs.get("valid", torch.ones_like(tokens, dtype=torch.bool))
    logits, _ = read(output.hidden, table_of(model), valid)
    assert isinstance(logits, Tensor)
    return logits


def pair_head(model: Transformer) -> head.NextSentence | None:
    """What decides about pairs in this model."""
    return model.head.next_sentence if isinstance(model.head, head.MaskedLanguageModel) else None


def loss_sum(model: Transformer, batch: Tensors, how: Loss = PLAIN, *, run: Run | None = None) -> tuple[Tensor, int]:
    """The sum of the losses of the real targets, and how many these are."""
    found = part_loss(model, batch, how, run=run)
    return found.total, found.count


def part_loss(
    model: Transformer, batch: Tensors, how: Loss = PLAIN, *, run: Run | None = None, weight: float = 1.0
) -> Found:
    """The same, times `weight`, with what the model gave. The chunked loss makes its gradients with the weight."""
    run, read = run or model, model.head
    if batch.reference is not None:
        output = run(**batch.arguments)
        total = preference_loss(output, batch, how.beta)
    elif isinstance(read, head.AdaptiveSoftmax):
        output = _hidden(run, batch)
        total = adaptive_cross_entropy(read, _real(output.hidden, batch), table_of(model), _targets(batch), how)
    elif isinstance(read, head.LanguageModel | head.MaskedLanguageModel) and model.config.vocab_size >= LARGE:
        output = _hidden(run, batch)
        ready, matrix = matrix_of(model, _real(output.hidden, batch))
        total = linear_cross_entropy(ready, matrix, _targets(batch), how, weight)
        return Found(total, batch.count, output)
    else:
        output = run(**batch.arguments)
        if output.logits is None:
            raise DataError(f"head: {model.config.head.kind!r} has no logits to train; choose another head")
        if isinstance(read, head.Span):
            total = span_cross_entropy(output.logits, batch.targets, batch.inputs.get("valid"), how)
        else:
            total = cross_entropy(_real(output.logits, batch), _targets(batch), how)
    return Found(total if weight == 1.0 else total * weight, batch.count, output)


def _hidden(run: Run, batch: Tensors) -> Output:
    """The model without its logits."""
    tokens = batch.inputs["tokens"]
    return run(**batch.arguments, logits_at=tokens.new_empty((len(tokens), 0)))


def _real(values: Tensor, batch: Tensors) -> Tensor:
    """(B, T, n) or (B, n) -> (count, n): those that have a target."""
    flat = values.reshape(-1, values.shape[-1])
    return flat if batch.places is None else flat[batch.places]


def _targets(batch: Tensors) -> Tensor:
    flat = batch.targets.reshape(-1)
    return flat if batch.places is None else flat[batch.places]


# The plain losses


def cross_entropy(logits: Tensor, targets: Tensor, how: Loss = PLAIN) -> Tensor:
    """The sum over N rows of logits (N, V) whose target (N,) is not IGNORE, in float32 or better."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE, label_smoothing=how.smoothing)
    if how.z:
        total = total + how.z * (logits.logsumexp(-1).square() * (targets != IGNORE)).sum()
    return total


def span_cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor | None, how: Loss = PLAIN) -> Tensor:
    """Logits (B, T, 2) and targets (B, 2): the first and the last token of each row's span, padding left out.

    Smoothing spreads over the real tokens of the row.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
    real = torch.ones_like(scores, dtype=torch.bool) if valid is None else valid[:, None].expand_as(scores)
    lse = scores.masked_fill(~real, -torch.inf).logsumexp(-1)
    right = scores.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    mean = (scores * real).sum(-1) / real.sum(-1)
    losses = lse - (1 - how.smoothing) * right - how.smoothing * mean + how.z * lse.square()
    return (losses * (targets != IGNORE)).sum()


def adaptive_cross_entropy(
    read: head.AdaptiveSoftmax, hidden: Tensor, table: nn.Module, targets: Tensor, how: Loss = PLAIN
) -> Tensor:
    """The sum over N rows of hidden (N, D): -log p(cluster) - log p(token | cluster)."""
    if how.smoothing or how.z:  # these look at every entry
        whole, _ = read(hidden[None], table, torch.ones_like(targets, dtype=torch.bool)[None])
        return cross_entropy(whole[0], targets, how)
    frequent = read.cutoff_scores(hidden[None], table)[0]
    first = read.bounds[0][1]
    entry, total = targets, frequent.new_zeros(())
    for index, (start, stop, _) in list(enumerate(read.bounds))[1:]:
        inside = (targets >= start) & (targets < stop)
        entry = torch.where(inside, first + index - 1, entry)
        rows = inside.nonzero().squeeze(-1)
        inner = read.project(hidden[rows][None], index, table)[0]
        scores = F.linear(inner, read.matrix(index, table), read.biases[index])
        total = total + cross_entropy(scores, targets[rows] - start)
    picked = frequent.gather(1, entry.clamp(min=0)[:, None]).squeeze(1)
    return total - (picked * (targets != IGNORE)).sum()


# The chunked loss of a head that is one matrix


@dataclass(frozen=True)
class Matrix:
    """What makes logits of hidden states: softcap * tanh((hidden @ weight^T + bias) / softcap)."""

    weight: Tensor
    """(V, D)."""
    bias: Tensor | None = None
    softcap: float | None = None


def table_of(model: Transformer) -> nn.Module:
    """The token table that a tied head reads."""
    last = model.embed if model.target_embed is None else model.target_embed
    table = model.embed.tokens if last.tokens is None else last.tokens
    assert table is not None
    return table


def matrix_of(model: Transformer, hidden: Tensor) -> tuple[Tensor, Matrix]:
    """The head as one matrix, and what it multiplies."""
    read, table = model.head, table_of(model)
    if isinstance(read, head.MaskedLanguageModel):
        ready, softcap = read.norm(read.activation(read.transform(hidden))), None
    else:
        assert isinstance(read, head.LanguageModel)
        ready, softcap = (hidden if read.factor == 1.0 else hidden * read.factor), read.softcap
    if read.weight is not None:
        return ready, Matrix(read.weight, read.bias, softcap)
    assert isinstance(table, FullTable)
    return ready, Matrix(table.weight, read.bias, softcap)


def linear_cross_entropy(
    hidden: Tensor, matrix: Matrix, targets: Tensor, how: Loss = PLAIN, weight: float = 1.0, chunk: int | None = None
) -> Tensor:
    """`weight` times the sum over N rows of hidden (N, D) whose target (N,) is not IGNORE; the logits are never whole.

    weight: given here it costs nothing; a later factor copies the gradient of the matrix.
    chunk: tokens whose logits are there at once; by default what `chunk_size` says.
    """
    chunk = chunk_size(len(matrix.weight), hidden.device) if chunk is None else chunk
    chunks = _Chunks(how, matrix.softcap, weight, chunk, torch.is_grad_enabled(), matrix.weight.requires_grad)
    function: Any = _LinearCrossEntropy  # torch leaves it untyped
    total: Tensor = function.apply(hidden, matrix.weight, matrix.bias, targets, chunks)
    return total


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """256 tokens, or less (in steps of 64) where their logits take more than 32 MB; a GPU is filled by 2048."""
    if device.type != "cpu":
        return 2048
    return min(256, max(64, _SPACE // vocab_size // 64 * 64))


@dataclass(frozen=True)
class _Chunks:
    how: Loss
    softcap: float | None
    weight: float
    size: int
    learns: bool
    moves: bool
    """Whether the matrix learns, too: a frozen one (LoRA) needs no gradient of V x D numbers."""


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward pass, and multiplied in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: _Chunks
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            total, gradients = _run(hidden.to(dtype), weight.to(dtype), bias, targets, chunks)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        # In float32 or better until the scale of fp16 is in them.
        ctx.save_for_backward(*(g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        if outer.device.type == "cpu" and outer.item() == 1.0:  # a GPU would wait for the answer
            return *(g if g is None else g.to(dtype) for g, dtype in gradients), None, None
        return *(g if g is None else (g * outer).to(dtype) for g, dtype in gradients), None, None


def _run(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunks: _Chunks
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum, and the gradients of hidden (N, D), weight (V, D), bias (V,): in float32 or better."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    n, size = len(hidden), min(chunks.size, max(len(hidden), 1))
    total = hidden.new_zeros((), dtype=wide)
    space = hidden.new_empty((size, len(weight)), dtype=wide)
    d_hidden = torch.empty_like(hidden, dtype=wide)
    d_weight = torch.zeros_like(weight, dtype=wide) if chunks.learns and chunks.moves else None
    d_bias = torch.zeros_like(bias, dtype=wide) if chunks.learns and bias is not None else None
    for start in range(0, n, size):
        part, wanted = hidden[start : start + size], targets[start : start + size]
        logits = _logits(part, weight, bias, space[: len(part)])
        total += _losses(logits, wanted, chunks)
        if not chunks.learns:
            continue
        slope = logits.to(hidden.dtype)
        torch.mul(slope @ weight, chunks.weight, out=d_hidden[start : start + size])
        if d_weight is not None and hidden.dtype == wide:
            d_weight.addmm_(slope.T, part, alpha=chunks.weight)
        elif d_weight is not None:
            d_weight.add_(slope.T @ part, alpha=chunks.weight)
        if d_bias is not None:
            d_bias.add_(logits.sum(0), alpha=chunks.weight)
    return total * chunks.weight, [d_hidden, d_weight, d_bias]


def _logits(part: Tensor, weight: Tensor, bias: Tensor | None, space: Tensor) -> Tensor:
    if part.dtype == space.dtype:
        torch.mm(part, weight.T, out=space)
    else:
        space.copy_(part @ weight.T)
    return space if bias is None else space.add_(bias)


def _losses(logits: Tensor, targets: Tensor, chunks: _Chunks) -> Tensor:
    """The sum of the losses of a chunk; its logits are overwritten by their gradients."""
    # On a CPU a few rows at a time, so that they stay in the core's cache through all passes.
    rows = max(1, _CACHE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    cuts = [slice(start, start + rows) for start in range(0, len(logits), rows)]
    return torch.stack([_rows(logits[cut], targets[cut, None], chunks) for cut in cuts]).sum()


def _rows(x: Tensor, targets: Tensor, chunks: _Chunks) -> Tensor:
    how, cap, size = chunks.how, chunks.softcap, x.shape[1]
    real = (targets != IGNORE).to(x.dtype)
    place = targets.clamp(min=0)
    if cap is not None:
        x.div_(cap).tanh_()
    bend = None if cap is None else 1 - x.square()
    if cap is not None:
        x.mul_(cap)
    right = x.gather(1, place)
    mean = x.mean(1, keepdim=True) if how.smoothing else right
    top = x.amax(1, keepdim=True)
    sums = x.sub_(top).exp_().sum(1, keepdim=True)
    lse = top + sums.log()
    losses = lse - (1 - how.smoothing) * right - how.smoothing * mean + how.z * lse.square()
    if chunks.learns:
        x.mul_(real * (1 + 2 * how.z * lse) / sums)
        x.scatter_add_(1, place, real * (how.smoothing - 1))
        if how.smoothing:
            x.sub_(real * (how.smoothing / size))
        if bend is not None:
            x.mul_(bend)
    return (losses * real).sum()
