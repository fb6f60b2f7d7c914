"""Ratios of the foundation, measured interleaved in one run: `python benchmarks/foundation.py [--rounds 9]`.

- start-up: `qkv --help` against a bare `python -c pass`, whole processes.
- attention: a sliding window of 256 in 4096 tokens, forward and backward, by backend.
- training: forward and backward of a small Llama against the same model written out in plain torch.

Each row is the median of its rounds with the smallest and largest; ratios are between medians of the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkv import build
from qkv import config as c
from qkv.config import ModelConfig

Cases = dict[str, Callable[[], object]]


def measure(title: str, cases: Cases, rounds: int) -> None:
    """Time the cases in turn, and print each with its ratio to the last one, which is what they are compared with."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()  # memory is taken, kernels are chosen
    for _ in range(rounds):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    base = statistics.median(list(times.values())[-1])
    print(f"\n{title}\n{'':32}{'median ms':>10}{'min':>9}{'max':>9}{'speed-up':>10}")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:32}{median:10.1f}{min(found):9.1f}{max(found):9.1f}{base / median:10.2f}")


def startup() -> Cases:
    """Whole processes; the ratio says how many bare interpreters fit one `qkv --help`."""

    def process(*arguments: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    return {"qkv --help": process("-m", "qkv", "--help"), "python -c pass": process("-c", "pass")}


def decoder(n_layers: int, d_model: int, n_heads: int, pattern: c.Pattern, length: int) -> ModelConfig:
    """A Llama."""
    attention = c.MultiHead(n_heads=n_heads, head_dim=d_model // n_heads, pattern=pattern, positions=c.Rotary())
    ffn = c.Gated(d_ff=8 * d_model // 3 // 32 * 32)
    block = c.Block(attention=attention, ffn=ffn, norm=c.RMSNorm(), residual=c.PreNorm())
    stack = c.Stack(n_layers=n_layers, layers=(block,), norm=c.RMSNorm())
    head = c.LanguageModel(tied=True)
    return ModelConfig(vocab_size=256, d_model=d_model, max_seq_len=length, decoder=stack, head=head)


def window() -> Cases:
    """One layer of eight heads of 64; all of the cost is attention's."""
    model = build(decoder(1, 512, 8, c.SlidingWindow(window=256), 4096))
    causal = build(decoder(1, 512, 8, c.Causal(), 4096))
    tokens = torch.randint(256, (1, 4096))

    def step(model: nn.Module, backend: str) -> Callable[[], object]:
        return lambda: model(tokens, backend=backend).hidden.sum().backward()

    return {
        "window by chunks": step(model, "window"),
        "full causal (flash)": step(causal, "flash"),
        "window as a mask (sdpa)": step(model, "sdpa"),
    }


class Plain(nn.Module):
    """The same Llama as one would write it out for itself: fused projections, nothing configurable."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.decoder is not None
        layer = config.decoder.layers[0]
        assert isinstance(layer.attention, c.MultiHead)
        assert isinstance(layer.ffn, c.Gated)
        d, d_ff, self.heads = config.d_model, layer.ffn.d_ff, layer.attention.n_heads
        self.embed, self.norm = nn.Embedding(config.vocab_size, d), nn.RMSNorm(d)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [nn.RMSNorm(d), nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), nn.RMSNorm(d),
                 nn.Linear(d, 2 * d_ff, bias=False), nn.Linear(d_ff, d, bias=False)]
            )
            for _ in range(config.decoder.n_layers)
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        width = x.shape[-1] // self.heads
        angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
        cos, sin = (torch.cat((wave, wave), -1) for wave in (angle.cos(), angle.sin()))

        def turn(q: Tensor) -> Tensor:
            first, second = q.chunk(2, -1)
            return q * cos + torch.cat((-second, first), -1) * sin

        for norm, qkv, out, ffn_norm, gate_up, down in self.layers:  # type: ignore[misc]
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
            x = x + out(mixed.transpose(1, 2).flatten(-2))
            gate, up = gate_up(ffn_norm(x)).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        return F.linear(self.norm(x), self.embed.weight)


def training(n_layers: int, d_model: int, n_heads: int, length: int, batch: int) -> Cases:
    """Forward, loss, backward."""
    config = decoder(n_layers, d_model, n_heads, c.Causal(), length)
    ours, plain = build(config).train(), Plain(config)
    tokens = torch.randint(256, (batch, length))

    def step(forward: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        return lambda: F.cross_entropy(forward(tokens).flatten(0, 1), tokens.flatten()).backward()

    return {"qkv": step(lambda tokens: ours(tokens).logits), "plain torch": step(plain)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    measure("Start-up, whole processes", startup(), rounds)
    measure("Window 256 in 4096 tokens, forward and backward", window(), rounds)
    measure("Training step, 4 layers of 128, 12 x 64 tokens", training(4, 128, 4, 64, 12), rounds)
    measure("Training step, 6 layers of 384, 12 x 256 tokens", training(6, 384, 6, 256, 12), rounds)


if __name__ == "__main__":
    main()
