"""Sparse patterns against the same pattern as a mask, and as rows grow: `python benchmarks/attention.py [--rounds 9]`.

- A window of 256, Longformer (256 on each side, 1 global token) and BigBird (blocks of 64, 3 random ones) in 4096
  tokens: forward and backward of attention alone, 8 heads of 64, by the backend that is chosen and by masked SDPA; for
  the window full causal flash, too. Both must give the same output and gradients.
- The same at 2048, 4096 and 8192 tokens: the factors of time and of memory when the row doubles.
- A whole layer of 512 with a Longformer's own projections for global tokens, and one with BigBird's pattern, likewise.

All take turns in every round; figures are medians, ratios between medians, on one thread in the processor's time.
Memory is what a process of its own takes at most beyond what it had (Linux).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from qkv import build
from qkv import config as c
from qkv.config import Coordinates, ModelConfig
from qkv.nn.backends import Scoring, attend
from qkv.nn.context import AttentionPlan
from qkv.train.allocator import keep_freed_memory

HEADS, WIDTH = 8, 64
PATTERNS: dict[str, c.Pattern] = {
    "window": c.SlidingWindow(window=256),
    "longformer": c.Longformer(window=512),
    "bigbird": c.BigBird(block=64, random_blocks=3),
    "causal": c.Causal(),
}
EQUAL = 1e-4
Step = Callable[[], object]


class Core:
    """Attention alone."""

    def __init__(self, name: str, length: int, backend: str = "auto") -> None:
        random = torch.Generator().manual_seed(0)
        self.inputs = [
            torch.randn(1, length, HEADS, WIDTH, generator=random).transpose(1, 2).requires_grad_() for _ in range(3)
        ]
        self.pattern, self.backend, self.length = PATTERNS[name], backend, length

    def output(self) -> Tensor:
        """(1, H, T, F); who sees whom is worked out anew, as in every forward of a model."""
        position = torch.arange(self.length)[None]
        is_global = position == 0 if "is_global" in self.pattern.fields else None
        at = Coordinates(position, is_global=is_global, length=torch.full_like(position, self.length))
        cover = "partial" if is_global is not None else self.pattern.covers(self.length)
        plan = AttentionPlan(self.pattern, at, at, cover, True, self.backend)
        return attend(*self.inputs, plan, Scoring(WIDTH**-0.5))

    def __call__(self) -> list[Tensor]:
        """Forward and backward."""
        for x in self.inputs:
            x.grad = None
        output = self.output()
        output.square().mean().backward()
        return [output.detach(), *(x.grad for x in self.inputs if x.grad is not None)]


def layer(name: str, length: int) -> ModelConfig:
    """One encoder layer of 512."""
    attention = c.MultiHead(
        n_heads=HEADS, head_dim=WIDTH, pattern=PATTERNS[name], global_projections=name == "longformer"
    )
    ffn = c.Dense(d_ff=4 * HEADS * WIDTH, activation="gelu")
    block = c.Block(attention=attention, ffn=ffn, norm=c.LayerNorm(), residual=c.PostNorm())
    return ModelConfig(
        vocab_size=256, d_model=HEADS * WIDTH, max_seq_len=length, encoder=c.Stack(n_layers=1, layers=(block,))
    )


def whole(name: str, length: int) -> Step:
    """Forward and backward of the layer."""
    model = build(layer(name, length)).train()
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
    given = {"global_tokens": torch.arange(length)[None] == 0} if name == "longformer" else {}

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, **given).hidden.square().mean().backward()

    return step


def check(name: str, length: int) -> None:
    """Both ways give the same."""
    for one, other in zip(Core(name, length)(), Core(name, length, "sdpa")(), strict=True):
        apart = float((one - other).abs().max() / other.abs().max())
        assert apart < EQUAL, f"{name}: they differ by {apart:.1e}"


def times(cases: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, measured in turn."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()  # memory is taken, kernels are chosen
    for _ in range(rounds):
        for name, run in cases.items():
            start = clock()
            run()
            found[name].append((clock() - start) * 1e3)
    return {name: median(values) for name, values in found.items()}


def status(field: str) -> float:
    """MB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def peak(kind: str, name: str, length: int, backend: str) -> float:
    """MB at most beyond the inputs, measured in this process."""

    def made(n: int) -> Step:
        return Core(name, n, backend) if kind == "core" else whole(name, n)

    made(256)()  # what libraries take once
    step = made(length)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def memory(kind: str, name: str, length: int, backend: str, threads: int) -> float:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--threads", str(threads), "--peak", kind, name, str(length), backend]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def masked(rounds: int, threads: int) -> None:
    """The first table."""
    print(f"4096 tokens\n{'':12}{'ms':>8}{'masked':>9}{'times as fast':>15}{'MB':>9}{'masked':>9}")
    for name in ("window", "longformer", "bigbird"):
        check(name, 2048)
        cases: dict[str, Step] = {"ours": Core(name, 4096), "masked": Core(name, 4096, "sdpa")}
        if name == "window":
            cases["flash"] = Core("causal", 4096)
        took = times(cases, rounds)
        sizes = [memory("core", name, 4096, backend, threads) for backend in ("auto", "sdpa")]
        print(f"{name:12}{took['ours']:8.0f}{took['masked']:9.0f}{took['masked'] / took['ours']:15.1f}", end="")
        print(f"{sizes[0]:9.0f}{sizes[1]:9.0f}", flush=True)
        if "flash" in took:
            print(f"{'  causal':12}{took['flash']:8.0f}{'':9}{took['flash'] / took['ours']:15.1f}")


def growing(rounds: int, threads: int) -> None:
    """The second table."""
    lengths = (2048, 4096, 8192)
    print(f"\n{'':12}{'':7}" + "".join(f"{n:>8} ms" for n in lengths) + f"{'factors':>14}", end="")
    print("".join(f"{n:>8} MB" for n in lengths) + f"{'factors':>14}")
    for kind in ("core", "layer"):
        for name in ("window", "longformer", "bigbird"):
            made = {str(n): Core(name, n) if kind == "core" else whole(name, n) for n in lengths}
            took = list(times(made, rounds).values())
            sizes = [memory(kind, name, n, "auto", threads) for n in lengths]
            print(f"{name:12}{kind:7}", end="")
            for figures in (took, sizes):
                factors = " ".join(f"{b / a:.2f}" for a, b in pairwise(figures))
                print("".join(f"{x:11.0f}" for x in figures) + f"{factors:>14}", end="")
            print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", nargs=4, metavar=("KIND", "PATTERN", "LENGTH", "BACKEND"), help="one case's memory")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    keep_freed_memory()  # as training does
    if given.peak:
        kind, name, length, backend = given.peak
        print(peak(kind, name, int(length), backend))
        return
    print(f"torch {torch.__version__}, {given.threads} threads, {given.rounds} rounds")
    masked(given.rounds, given.threads)
    growing(given.rounds, given.threads)


if __name__ == "__main__":
    main()
