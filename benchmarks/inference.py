"""How fast a model generates: the native engine in every format, torch, and llama.cpp where it is installed.

    python benchmarks/inference.py smollm2-135m --threads 2 --rounds 5

Decode: 128 tokens after a prompt of 32, one text. Prompt: 512 tokens. Batch: 8 texts, 32 steps. Runs are interleaved,
and the median of the rounds is shown. GB/s: the bytes of packed weights that each decoded token reads, times tokens per
second. llama.cpp (`llama-cpp-python`) reads the file itself, so that its weights are as they are shipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import qkv
from qkv.checkpoint.pull import pulled
from qkv.generate.runner import Runner
from qkv.generate.runners.native import NativeRunner
from qkv.generate.runners.torch import Runtime, TorchRunner

DECODED, PROMPT, LONG, BATCH, STEPS = 128, 32, 512, 8, 32
Rates = dict[str, float]


def rates(runner: Runner, text: list[int]) -> Rates:
    """Tokens per second of one runner."""
    state = runner.start(1, PROMPT + DECODED)
    state.extend([text[:PROMPT]])
    decode = timed(lambda: [state.extend([[text[PROMPT + i]]]) for i in range(DECODED)], DECODED)
    whole = runner.start(1, LONG)
    prompt = timed(lambda: whole.extend([text[:LONG]]), LONG)
    many = runner.start(BATCH, PROMPT + STEPS)
    many.extend([text[b : b + PROMPT] for b in range(BATCH)])
    batch = timed(lambda: [many.extend([[text[b + i]] for b in range(BATCH)]) for i in range(STEPS)], BATCH * STEPS)
    return {"decode": decode, "prompt": prompt, "batch 8": batch}


def timed(work: Callable[[], object], tokens: int) -> float:
    """Tokens per second."""
    start = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - start)


def llama_cpp(path: Path, threads: int, text: list[int]) -> Callable[[], Rates] | None:
    """The same measures of llama.cpp on the file, or None where it is not installed or there is no file."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    if path.suffix != ".gguf":
        return None
    llama = Llama(str(path), n_ctx=1024, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)

    def run() -> Rates:
        llama.reset()
        llama.eval(text[:PROMPT])
        decode = timed(lambda: [llama.eval([text[PROMPT + i]]) for i in range(DECODED)], DECODED)
        llama.reset()
        return {"decode": decode, "prompt": timed(lambda: llama.eval(text[:LONG]), LONG)}

    return run


def weight_bytes(runner: NativeRunner) -> int:
    """What a decoded token reads of the packed matrices: all of them once."""
    parts = {id(p): p.data.nbytes for one in runner.engine.program.instructions for p in one.p if p is not None}
    return sum(parts.values())


def main() -> None:
    """Print a table, and JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lm = qkv.load(given.model)
    text = np.random.default_rng(0).integers(0, lm.config.vocab_size, LONG).tolist()
    weights = {name: tensor.float().numpy() for name, tensor in lm.model.state_dict().items()}
    runs: dict[str, Callable[[], Rates]] = {}
    sizes: dict[str, int] = {}
    for form in ("fp32", "bf16", "int8", "int4"):
        runner = NativeRunner.of(lm.config, weights, lm.config.vocab_size, form, threads=given.threads)
        runs[f"native {form}"] = lambda runner=runner: rates(runner, text)
        sizes[f"native {form}"] = weight_bytes(runner)
    if not given.without_torch:
        plain = TorchRunner(lm.model.float(), lm.config.vocab_size, Runtime(deterministic=False))
        runs["torch fp32"] = lambda: rates(plain, text)
    peer = llama_cpp(pulled(given.model) or Path(given.model), given.threads, text)
    if peer is not None:
        runs["llama.cpp, the file"] = peer
    found: dict[str, list[Rates]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            found[name].append(run())
    table = {
        name: {what: statistics.median(r[what] for r in rounds) for what in rounds[0]} for name, rounds in found.items()
    }
    if given.json:
        print(json.dumps({"model": given.model, "threads": given.threads, "rounds": given.rounds, "tokens/s": table}))
        return
    print(f"{'':22}{'decode':>9}{'GB/s':>8}{'prompt':>9}{'batch 8':>9}   tokens/s, {given.threads} threads")
    for name, one in table.items():
        speed = f"{sizes[name] * one['decode'] / 1e9:8.1f}" if name in sizes else " " * 8
        batch = f"{one['batch 8']:9.0f}" if "batch 8" in one else ""
        print(f"{name:22}{one['decode']:9.1f}{speed}{one['prompt']:9.0f}{batch}")


if __name__ == "__main__":
    main()
