"""Training steps beside other libraries: `python benchmarks/train.py --size xs --style gpt [--compiled]`.

A step is everything from a batch to new weights: forward, loss, backward, the gradient's norm clipped to 1, AdamW in
torch's fused form. Ours is what `qkv train` runs; peers have the plain loop of their users, on the same data. Each
model has a process of its own. They take turns in every round, in another order each; a ratio is the median of the
rounds' own ratios, with the quartiles, so that what else the machine does falls on all alike. Memory is what the
process takes at most beyond its imports (Linux): weights, gradients, optimizer, activations, and for compiled models
the compiler.

Peers are measured where they are installed: `pip install transformers x-transformers litgpt`; nanoGPT is no package,
`--nanogpt FOLDER` says where its model.py lies. Compiled: ours by the block, as `run.compile`, the others whole.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from peers import STYLES, Data, Peer, Size, peers
from torch import nn

from qkv import build
from qkv.config import ModelConfig
from qkv.config.presets import preset
from qkv.config.recipe import Run
from qkv.config.training import AdamW
from qkv.train.allocator import keep_freed_memory
from qkv.train.batch import IGNORE, Batch
from qkv.train.loss import Setting, step_gradients
from qkv.train.optimizers import make_optimizer, set_rate
from qkv.train.precision import Precision

SIZES = {"xs": Size(4, 128, 4, 64, 12), "s": Size(6, 384, 6, 256, 12)}
RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1
OURS, MARK = "qkv", "benchmark: "
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One model and its step."""

    step: Step
    parameters: int


@dataclass(frozen=True)
class Found:
    """What was measured of one."""

    name: str
    parameters: int
    milliseconds: float
    tokens_per_second: float
    ratio: float
    """How many times as long as ours a step takes."""
    low: float
    high: float
    megabytes: float
    start_seconds: float
    """Of the model and its first three steps, in which compilers work."""


def config_of(style: str, size: Size) -> ModelConfig:
    """Ours: a published architecture in this size, without dropout."""
    names = {"gpt": "gpt-3-small", "llama": "llama-2-7b", "bert": "bert-base-uncased", "t5": "t5-small"}
    stacks = {"bert": ("encoder",), "t5": ("encoder", "decoder")}.get(style, ("decoder",))
    changes: dict[str, Any] = {
        "vocab_size": size.vocab_size, "d_model": size.d_model, "max_seq_len": size.length, "embedding.dropout": 0.0,
    }  # fmt: skip
    for stack in stacks:
        layer = f"{stack}.layers.*"
        changes |= {f"{stack}.n_layers": size.n_layers, f"{layer}.dropout": 0.0, f"{layer}.ffn.dropout": 0.0}
        changes[f"{layer}.ffn.d_ff"] = size.gated if style == "llama" else 4 * size.d_model
        for part in ("attention", "cross_attention") if (style, stack) == ("t5", "decoder") else ("attention",):
            at = f"{layer}.{part}"
            changes |= {f"{at}.n_heads": size.n_heads, f"{at}.head_dim": size.head_dim, f"{at}.dropout": 0.0}
    if style == "gpt":
        changes["decoder.layers.*.ffn.activation"] = "gelu"  # nanoGPT's
    if style == "llama":
        changes["head.tied"] = True
    if style == "bert":
        norm = {"kind": "layernorm", "eps": 1e-12}
        changes["head"] = {"kind": "masked-lm", "tied": True, "activation": "gelu", "norm": norm}
    return preset(names[style]).override(changes)


def data_of(style: str, size: Size) -> Data:
    """Random tokens; of BERT's, every seventh is asked for."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets, source = torch.randint(size.vocab_size, (3, size.batch, size.length), generator=generator)
    if style == "bert":
        targets = targets.where(torch.rand(targets.shape, generator=generator) < 0.15, IGNORE)
    return Data(tokens, targets, source if style == "t5" else None)


def ours(style: str, size: Size, data: Data, compiled: bool) -> Case:
    """The step of `qkv.train`'s loop."""
    keep_freed_memory()
    model = build(config_of(style, size)).train()
    precision = Precision.of(Run(steps=1, batch=size.batch, folder="", device="cpu", compile=compiled), model)
    optimizer = make_optimizer(model, AdamW(betas=BETAS, weight_decay=DECAY))
    inputs: dict[str, Any] = {"tokens": data.tokens.numpy()}
    if data.source is not None:
        inputs["source"] = data.source.numpy()
    batch, setting = Batch(inputs, data.targets.numpy()), Setting(run=precision.call, scale=precision.scaled)

    def step() -> float:
        set_rate(optimizer, RATE)
        optimizer.zero_grad(set_to_none=True)
        found = step_gradients(model, batch.split(size.batch), setting=setting)
        precision.update(optimizer, 1.0)
        return float(found.mean)

    return Case(step, sum(p.numel() for p in model.parameters()))


def theirs(peer: Peer, data: Data, compiled: bool) -> Case:
    """The step of a plain loop."""
    model, loss_of = peer
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=True)
    if compiled:
        model.compile()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return Case(step, sum(p.numel() for p in model.parameters()))


def make(name: str, given: argparse.Namespace) -> Case:
    """The case of that name; an ImportError where its library is missing."""
    size, style = size_of(given), given.style
    torch.manual_seed(0)
    data = data_of(style, size)
    if name == OURS:
        return ours(style, size, data, given.compiled)
    return theirs(peers(style, given.nanogpt)[name](size), data, given.compiled)


def size_of(given: argparse.Namespace) -> Size:
    """The size that was asked for."""
    size = SIZES[given.size]
    return replace(size, batch=given.batch or size.batch, vocab_size=given.vocab or size.vocab_size)


# Processes that take turns


class Worker:
    """A process with one model, which makes steps when told to."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, __file__, *arguments, "--worker", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name, self.made = name, self._answer()

    def ask(self, what: str) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """It ends."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):  # libraries print things, too
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"{self.name}: its process has ended")


def work(name: str, given: argparse.Namespace) -> None:
    """What a worker does: a line for a line."""

    def answer(value: object) -> None:
        print(MARK + json.dumps(value), flush=True)

    try:
        make(name, argparse.Namespace(**vars(given) | {"compiled": False, "batch": 1, "size": "xs"})).step()
    except ImportError as error:
        answer({"missing": str(error)})
        return
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak so far
    before, start = status("VmRSS"), time.perf_counter()
    case = make(name, given)
    for _ in range(3):
        case.step()
    answer({"parameters": case.parameters, "seconds": time.perf_counter() - start})
    # On one thread the processor's time, in which other programs that wait for the same core do not count.
    clock = time.process_time if given.threads == 1 else time.perf_counter
    for line in sys.stdin:
        if line.strip() == "memory":
            answer(status("VmHWM") - before)
            continue
        case.step()  # what the others left in the caches
        start = clock()
        for _ in range(given.steps):
            case.step()
        answer((clock() - start) * 1e3 / given.steps)


def status(field: str) -> float:
    """MB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


# The table


def collect(given: argparse.Namespace, arguments: list[str]) -> list[Found]:
    """Everything that is installed, measured in one run."""
    workers = []
    every = peers(given.style, given.nanogpt)
    for name in (OURS, *(name for name in every if name in (given.peers or every))):
        worker = Worker(name, arguments)
        if "missing" in worker.made:
            print(f"{name}: not measured: {worker.made['missing']}")
            worker.close()
        else:
            workers.append(worker)
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for _ in range(given.rounds):
        for worker in random.sample(workers, len(workers)):
            times[worker.name].append(worker.ask("steps"))
    size, found = size_of(given), []
    for worker in workers:
        ratios = [a / b for a, b in zip(times[worker.name], times[OURS], strict=True)]
        took, (low, _, high) = median(times[worker.name]), quantiles(ratios, n=4)
        rate, memory, made = size.batch * size.length / took * 1e3, worker.ask("memory"), worker.made
        found.append(
            Found(worker.name, made["parameters"], took, rate, median(ratios), low, high, memory, made["seconds"])
        )
        worker.close()
    return found


def print_table(found: list[Found]) -> None:
    """A line per model."""
    print(f"{'':16}{'parameters':>11}{'ms':>9}{'tokens/s':>10}{'of ours':>9}{'quartiles':>14}{'MB':>7}{'start s':>9}")
    for one in found:
        print(
            f"{one.name:16}{one.parameters:11,}{one.milliseconds:9.1f}{one.tokens_per_second:10.0f}{one.ratio:9.2f}"
            f"{f'{one.low:.2f} to {one.high:.2f}':>14}{one.megabytes:7.0f}{one.start_seconds:9.1f}"
        )


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--size", choices=SIZES, default="xs")
    made.add_argument("--style", choices=STYLES, default="gpt")
    made.add_argument("--compiled", action="store_true")
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--steps", type=int, default=3, help="steps in a row of each model in a round")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--batch", type=int, help="rows, if not the size's 12")
    made.add_argument("--vocab", type=int, help="tokens, if not 65, nanoGPT's characters")
    made.add_argument("--peers", nargs="+", metavar="NAME", help="only these")
    made.add_argument("--nanogpt", type=Path, help="a folder with nanoGPT's model.py")
    made.add_argument("--json", type=Path, help="write the figures there, too")
    made.add_argument("--worker", metavar="NAME", help=argparse.SUPPRESS)
    return made


def main() -> None:
    given = parser().parse_args()
    torch.set_num_threads(given.threads)
    if given.worker:
        work(given.worker, given)
        return
    how = "compiled" if given.compiled else "eager"
    print(f"{given.style}, {given.size}, {how}: {size_of(given)}, {given.threads} threads, torch {torch.__version__}")
    found = collect(given, sys.argv[1:])
    print_table(found)
    if given.json:
        text = json.dumps({**vars(given), "found": [asdict(one) for one in found]}, default=str, indent=1)
        given.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
