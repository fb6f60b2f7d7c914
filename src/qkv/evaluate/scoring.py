"""How likely a model finds given tokens where others are given: what every measure of a language model is made of.

    log p(targets | read) = sum over j of log softmax(logits of the model at the place before target j)[target j]

A `Window` is what is read in one forward pass and the targets, which its last places predict:

    read     a b c d          targets    d e         place of c predicts d, place of d predicts e

So the shift by one is in the window, and no logits are shifted. Of a masked model, `at` names the places that are
hidden. Windows are batched by length; the logits of a batch
are made a few hundred places at a time, since those of a whole one (places x vocabulary) may not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from qkv.errors import DataError
from qkv.nn import Transformer

_TOKENS = 4096  # read by one forward pass, padding included
_LOGITS = 1 << 23  # numbers: 32 MB of float32
_POOL = 256  # windows that are looked at together to find those of similar length


@dataclass(frozen=True)
class Window:
    """What is read at once, and what is to be predicted."""

    read: Sequence[int]
    targets: Sequence[int]
    """What one place of `read` each predicts."""
    at: Sequence[int] | None = None
    """The places; by default the last ones."""

    @property
    def places(self) -> Sequence[int]:
        """Where in `read` the targets are predicted."""
        return range(len(self.read) - len(self.targets), len(self.read)) if self.at is None else self.at


@dataclass(frozen=True)
class Found:
    """What the model thought of a window's targets."""

    index: int
    """The window's number in what was given."""
    logprobs: Tensor
    """(targets,) float64: of each target, in nats."""
    likeliest: Tensor
    """(targets,) bool: whether no token was likelier than it."""

    @property
    def logprob(self) -> float:
        """Of all targets."""
        return float(self.logprobs.sum())


@torch.inference_mode()
def scored(model: Transformer, windows: Iterable[Window]) -> Iterator[Found]:
    """Each window's targets; windows of similar length are read together, so that the order is not that given."""
    with evaluating(model):
        numbered = iter(enumerate(windows))
        while pool := sorted(islice(numbered, _POOL), key=lambda one: -len(one[1].read)):
            while pool:
                size = max(1, _TOKENS // len(pool[0][1].read))
                batch, pool = pool[:size], pool[size:]
                found = _forward(model, [window for _, window in batch])
                yield from (Found(index, *one) for (index, _), one in zip(batch, found, strict=True))


def check_reader(model: Transformer) -> None:
    """Refuse a model that does not predict a text's next token from the text alone."""
    if model.config.head.reads != "past":
        raise DataError(f"model: its head {model.config.head.kind!r} does not predict the next token; take a decoder")
    if model.encoder is not None:
        raise DataError("model: an encoder-decoder predicts a text from another; evaluate it on pairs, by translation")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block the model has no dropout; afterwards it is as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _forward(model: Transformer, batch: Sequence[Window]) -> Iterator[tuple[Tensor, Tensor]]:
    device, lengths = next(model.parameters()).device, [len(window.read) for window in batch]
    width = max(lengths)
    tokens = torch.tensor([[*window.read, *[0] * (width - len(window.read))] for window in batch], device=device)
    valid = None
    if min(lengths) < width:
        valid = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    blocks = [block for stack in model.config.stacks.values() for block in stack.blocks]
    reads_prefix = any("prefix_length" in block.attention.pattern.fields for block in blocks)
    prefix = torch.zeros(len(batch), dtype=torch.long, device=device) if reads_prefix else None
    nothing = tokens.new_empty((len(batch), 0))
    hidden = model(tokens, valid=valid, prefix_length=prefix, logits_at=nothing).hidden
    wanted = torch.cat([hidden[row, list(window.places)] for row, window in enumerate(batch)])
    targets = torch.tensor([target for window in batch for target in window.targets], device=device)
    logprobs, likeliest = judged(model, wanted, targets)
    sizes = [len(window.targets) for window in batch]
    return zip(torch.split(logprobs, sizes), torch.split(likeliest, sizes), strict=True)


def judged(model: Transformer, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target (N,) from hidden states (N, D), and whether it is the likeliest; on the host."""
    logprobs, likeliest = list[Tensor](), list[Tensor]()
    size = max(1, _LOGITS // model.config.vocab_size)
    for part, wanted in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
        exists = torch.ones(1, len(part), dtype=torch.bool, device=part.device)
        logits, _ = model.head(part[None], _table(model), exists)
        scores = logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        of_target = scores.gather(1, wanted[:, None])[:, 0]
        logprobs.append(of_target.double().cpu())
        likeliest.append((of_target == scores.max(-1).values).cpu())
    return torch.cat(logprobs), torch.cat(likeliest)


def _table(model: Transformer) -> nn.Module:
    """The token table that a tied head reads."""
    last = model.embed if model.target_embed is None else model.target_embed
    table = model.embed.tokens if last.tokens is None else last.tokens
    assert table is not None
    return table
