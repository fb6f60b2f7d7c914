"""What a model is measured by on the way: the held-out texts, each target once.

A model that recalls earlier segments reads them as one text from its beginning to its end, one segment after the other;
any other reads them in batches. Where the answer is a class, its accuracy is told besides the loss: the share of rows,
of words, or of spans (both ends right) whose likeliest answer is the right one; of preferences the share of prompts for
which the model leaves its reference towards the chosen answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch

from qkv.config import Classifier, Head, Span, TokenClassifier
from qkv.config.recipe import Recipe
from qkv.nn import Output, Transformer
from qkv.nn.recall import Recall
from qkv.train.batch import IGNORE, Batch, Example, Tensors
from qkv.train.data import Contiguous, every_row
from qkv.train.loss import Run, cross_entropy, pair_head, pair_logits, part_loss
from qkv.train.parallel.strategy import ALONE, Strategy
from qkv.train.parts import Parts
from qkv.train.preference import Reference, margins


@dataclass(frozen=True)
class Measured:
    """What came of it."""

    loss: float
    """Per real target, in nats; not a number where there is none."""
    accuracy: float | None = None
    """Of heads that answer with a class or a span."""
    pair_loss: float | None = None
    """Per row, of the head that tells whether two segments follow each other."""
    pair_accuracy: float | None = None


@dataclass
class _Sum:
    """A mean that is being made."""

    total: float = 0.0
    count: int = 0

    def add(self, total: float, count: int) -> None:
        self.total, self.count = self.total + total, self.count + count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class _Sums:
    loss: _Sum = field(default_factory=_Sum)
    hits: _Sum = field(default_factory=_Sum)
    pair_loss: _Sum = field(default_factory=_Sum)
    pair_hits: _Sum = field(default_factory=_Sum)

    def gather(self, strategy: Strategy) -> None:
        """Add what other processes found."""
        own = (self.loss, self.hits, self.pair_loss, self.pair_hits)
        found = strategy.sums([float(value) for one in own for value in (one.total, one.count)])
        for one, total, count in zip(own, found[::2], found[1::2], strict=True):
            one.total, one.count = total, int(count)


class HeldOut:
    """The held-out texts of a run."""

    def __init__(
        self, recipe: Recipe, parts: Parts, strategy: Strategy = ALONE, reference: Reference | None = None
    ) -> None:
        self.recipe, self.parts, self.memory, self.strategy = recipe, parts, parts.memory, strategy
        self.reference = reference

    def examples(self) -> Iterator[Example]:
        """Each row once, in the order of the data."""
        data, maker = self.recipe.data, self.parts.maker
        if self.memory:
            text = Contiguous(self.parts.valid, data.context, 1, ahead=maker.ahead)
            return (example for (example,) in islice(text, text.steps))
        return every_row(self.parts.valid, maker.raw_length(data.context), data.documents, ahead=maker.ahead)

    def batches(self) -> Iterator[Batch]:
        """The rows as they are read; what is drawn at random is the same each time."""
        run, maker = self.recipe.run, self.parts.maker
        random = np.random.Generator(np.random.Philox(key=run.seed))
        size = 1 if self.memory else max(maker.least, run.micro_batch or run.batch)
        examples = self.examples()
        rows = list(islice(examples, size))
        while rows:
            rest = list(islice(examples, size))
            if len(rest) < maker.least:  # too few for a batch of their own
                rows, rest = [*rows, *rest], []
            yield maker.batch(rows, random)
            rows = rest

    @torch.no_grad()
    def measured(self, model: Transformer, run: Run) -> Measured:
        """The model in evaluation mode, called by `run`."""
        model.eval()
        device, sums = next(model.parameters()).device, _Sums()
        recall = Recall.empty(self.memory) if self.memory else None
        for batch in self.batches():
            if not batch.count:
                continue
            whole = replace(batch, recall=recall) if self.reference is None else self.reference.beside(batch)
            tensors = self.strategy.share(whole).to(device)
            found = part_loss(model, tensors, run=run)
            recall = found.output.recall
            sums.loss.add(float(found.total), found.count)
            sums.hits.add(*hits(model.config.head, found.output, tensors))
            _add_pairs(sums, model, tensors, found.output)
        self.strategy.rest(model)
        sums.gather(self.strategy)
        loss = sums.loss.mean
        return Measured(math.nan if loss is None else loss, sums.hits.mean, sums.pair_loss.mean, sums.pair_hits.mean)


def hits(head: Head, output: Output, batch: Tensors) -> tuple[int, int]:
    """How many answers are right, and of how many; no answers of heads that choose among tokens."""
    logits, targets = output.logits, batch.targets
    if batch.reference is not None:
        return int((margins(output, batch) > 0).sum()), batch.count
    if not isinstance(head, Classifier | TokenClassifier | Span) or logits is None:
        return 0, 0
    if isinstance(head, Span) and (valid := batch.inputs.get("valid")) is not None:
        logits = logits.masked_fill(~valid[..., None], -torch.inf)
    right, real = logits.argmax(1 if isinstance(head, Span) else -1) == targets, targets != IGNORE
    if isinstance(head, Span):
        right, real = right.all(-1), real.all(-1)
    return int((right & real).sum()), int(real.sum())


def _add_pairs(sums: _Sums, model: Transformer, batch: Tensors, output: Output) -> None:
    read = pair_head(model)
    if batch.pairs is None or read is None:
        return
    logits = pair_logits(model, read, batch, output)
    sums.pair_loss.add(float(cross_entropy(logits, batch.pairs)), len(batch.pairs))
    sums.pair_hits.add(int((logits.argmax(-1) == batch.pairs).sum()), len(batch.pairs))
