"""What deterministic mode costs: `python benchmarks/deterministic.py [--rounds 15] [--layers 6] [--threads N]`.

A random model of the shape of SmolLM2-135M (d_model 576, 9 query and 3 key-value heads of 64, d_ff 1536; a vocabulary
that is to the number of layers as 49152 to 30) reads a prompt of 128 tokens and makes steps of one token, in batches of
1 and 8. Compared, in turn within each round, medians of all rounds:

- plain: no mode, an ordinary cache;
- mode alone: a function mode that replaces nothing, which is what it costs that torch calls Python for every function;
- deterministic: `qkv.nn.invariant` and a canonical cache, as generation uses them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from qkv import build
from qkv import config as c
from qkv.cache.cache import Cache
from qkv.nn import Transformer
from qkv.nn.invariant import invariant, self_check

PROMPT = 128


class Nothing(TorchFunctionMode):
    """Passes every function on."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


WAYS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "plain": (nullcontext, False),
    "mode alone": (Nothing, False),
    "deterministic": (invariant, True),
}


def model(layers: int) -> Transformer:
    """SmolLM2-135M with fewer layers."""
    attention = c.MultiHead(n_heads=9, n_kv_heads=3, head_dim=64, pattern=c.Causal(), positions=c.Rotary())
    block = c.Block(attention=attention, ffn=c.Gated(d_ff=1536), norm=c.RMSNorm(), residual=c.PreNorm())
    stack = c.Stack(n_layers=layers, layers=(block,), norm=c.RMSNorm())
    vocab_size = 49152 * layers // 30 // 64 * 64
    head = c.LanguageModel(tied=True)
    return build(c.ModelConfig(vocab_size=vocab_size, d_model=576, max_seq_len=1024, decoder=stack, head=head))


def prompt(model: Transformer, batch: int, canonical: bool) -> Callable[[], object]:
    """Reading a prompt into an empty cache."""
    tokens = torch.randint(model.config.vocab_size, (batch, PROMPT))

    def run() -> Cache:
        cache = Cache.for_model(model, batch, 2 * PROMPT, canonical=canonical)
        model(tokens, cache=cache, logits_at=torch.full((batch, 1), PROMPT - 1))
        return cache

    return run


def steps(model: Transformer, batch: int, canonical: bool) -> Callable[[], object]:
    """Eight steps after the prompt, taken back."""
    cache = Cache.for_model(model, batch, 2 * PROMPT, canonical=canonical)
    with torch.inference_mode():
        model(torch.randint(model.config.vocab_size, (batch, PROMPT)), cache=cache)
    token = torch.randint(model.config.vocab_size, (batch, 1))

    def run() -> None:
        for _ in range(8):
            model(token, cache=cache)
        cache.truncate([PROMPT] * batch)

    return run


def measure(title: str, make: Callable[[bool], Callable[[], object]], calls: int, rounds: int) -> None:
    """Time the ways in turn, and print each with its ratio to the first."""
    work = {name: (mode, make(canonical)) for name, (mode, canonical) in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in work}
    with torch.inference_mode():
        for round_ in range(rounds + 1):
            for name, (mode, run) in work.items():
                with mode():
                    start = time.perf_counter()
                    run()
                    if round_:  # the first takes memory and chooses kernels
                        times[name].append(1e3 * (time.perf_counter() - start) / calls)
    base = statistics.median(times["plain"])
    print(f"\n{title}\n{'':16}{'median ms':>10}{'min':>9}{'max':>9}{'cost':>8}")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:16}{median:10.2f}{min(found):9.2f}{max(found):9.2f}{median / base:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    small = model(arguments.layers)
    print(f"{arguments.layers} layers, {torch.get_num_threads()} threads, float32")
    start = time.perf_counter()
    said = self_check(torch.float32, [(576, 576), (576, 192), (576, 1536), (1536, 576), (576, 49152)])
    print(f"self check: {said or 'kept'}, {time.perf_counter() - start:.2f} s")
    for batch in (1, 8):
        measure(f"one token, batch {batch}", partial(steps, small, batch), 8, arguments.rounds)
        measure(f"a prompt of {PROMPT}, batch {batch}", partial(prompt, small, batch), 1, arguments.rounds)


if __name__ == "__main__":
    main()
