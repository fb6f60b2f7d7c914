"""The loss of a large vocabulary, in chunks and with whole logits: `python benchmarks/loss.py [--rounds 7]`.

Forward and backward of the head and its cross-entropy, float32, by default on one thread. Before anything is measured,
both must give the same loss and gradients. Times are medians of rounds in which both take turns, ratios are between
medians. Memory is what the process takes at most beyond what it had before, each case in a process of its own (Linux);
the gradients of hidden states and matrix, which both must leave behind, are in it, and the last column is without them.
`products` are the three matrix products alone, into memory that is there already: no way of computing the loss is
faster than that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from qkv.train.loss import Matrix, linear_cross_entropy

SIZES = [
    (49_152, 512, 256),
    (49_152, 512, 384),
    (49_152, 512, 576),
    (49_152, 2048, 384),
    (4096, 3072, 384),
    (1024, 3072, 384),
]  # vocabulary, tokens, width
EQUAL = 1e-5


class Case:
    """One size."""

    def __init__(self, size: int, tokens: int, width: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(tokens, width, generator=random).requires_grad_()
        self.weight = (torch.randn(size, width, generator=random) * 0.02).requires_grad_()
        self.targets = torch.randint(size, (tokens,), generator=random)
        self._logits = torch.empty(0)

    @property
    def gradients(self) -> float:
        """MB that the gradients take."""
        return (self.hidden.numel() + self.weight.numel()) * 4 / 1e6

    def plain(self) -> Tensor:
        """Whole logits."""
        loss = F.cross_entropy(F.linear(self.hidden, self.weight), self.targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def chunked(self) -> Tensor:
        """A chunk's logits at a time."""
        loss = linear_cross_entropy(self.hidden, Matrix(self.weight), self.targets, weight=1 / len(self.targets))
        torch.autograd.backward(loss)
        return loss.detach()

    def products(self) -> Tensor:
        """The least that either has to do."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        if not self._logits.numel():
            self._logits = torch.empty(len(hidden), len(weight))
            self._outputs = torch.empty_like(hidden), torch.empty_like(weight)
        torch.mm(hidden, weight.T, out=self._logits)
        torch.mm(self._logits, weight, out=self._outputs[0])
        return torch.mm(self._logits.T, hidden, out=self._outputs[1])

    def forget(self) -> None:
        """No gradients."""
        self.hidden.grad = self.weight.grad = None

    def check(self) -> None:
        """Both ways give the same."""
        found = []
        for run in (self.plain, self.chunked):
            self.forget()
            loss = run()
            assert self.hidden.grad is not None
            assert self.weight.grad is not None
            found.append((loss, self.hidden.grad.clone(), self.weight.grad.clone()))
        for one, other in zip(*found, strict=True):
            apart = float((one - other).abs().max() / one.abs().max())
            assert apart < EQUAL, f"they differ by {apart:.1e}"


def status(name: str) -> float:
    """MB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def peak(kind: str, size: int, tokens: int, width: int) -> float:
    """MB at most beyond what was there, measured in this process."""
    small = Case(256, 64, width)
    getattr(small, kind)()  # what libraries take once
    case = Case(size, tokens, width)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = status("VmRSS")
    getattr(case, kind)()
    return status("VmHWM") - before


def measured(kind: str, shape: tuple[int, int, int], threads: int) -> float:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", kind, *map(str, shape)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def times(case: Case, rounds: int) -> dict[str, float]:
    """Median milliseconds of each way."""
    ways: dict[str, Callable[[], Tensor]] = {"plain": case.plain, "chunked": case.chunked, "products": case.products}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            case.forget()
            start = time.perf_counter()
            run()
            found[name].append((time.perf_counter() - start) * 1e3)
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", nargs=4, metavar=("WAY", "VOCABULARY", "TOKENS", "WIDTH"), help="one case's memory")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        kind, *shape = given.peak
        print(peak(kind, *map(int, shape)))
        return
    print(f"{'V':>7}{'tokens':>8}{'D':>5}  {'plain ms':>9}{'chunked':>9}{'products':>9}{'ratio':>7}", end="")
    print(f"  {'plain MB':>9}{'chunked':>9}{'ratio':>7}{'without gradients':>19}")
    for shape in SIZES:
        case = Case(*shape)
        case.check()
        took = times(case, given.rounds)
        plain, chunked = (measured(kind, shape, given.threads) for kind in ("plain", "chunked"))
        print(f"{shape[0]:7}{shape[1]:8}{shape[2]:5}  ", end="")
        print(f"{took['plain']:9.0f}{took['chunked']:9.0f}{took['products']:9.0f}", end="")
        print(f"{took['chunked'] / took['plain']:7.2f}  {plain:9.0f}{chunked:9.0f}{chunked / plain:7.2f}", end="")
        print(f"{(chunked - case.gradients) / (plain - case.gradients):19.2f}", flush=True)


if __name__ == "__main__":
    main()
