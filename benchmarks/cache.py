"""What a cache saves, and a decode step beside a peer's: `python benchmarks/cache.py [--rounds 9] [--threads 1]`.

- `qkv bench cache` on its small model: a step against position, ways to run it, memory by kind of attention.
- If `transformers` is installed, the same steps of its Llama with the same weights and its own DynamicCache, in turn
  with ours in one run; before that, all must give the same logits.

A step is everything from tokens to logits in NumPy. Each figure is the median of its rounds, ratios are
between medians. One thread, since a step of one row has too little to share out.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkv import TextModel, build
from qkv.cli import app
from qkv.generate.runner import Logits
from qkv.lab.cache import Case, Setting, Step, Timing, interleaved, lengths_for, small
from qkv.nn import Transformer

EQUAL = 1e-4  # float32, over the largest logit


class Peer:
    """A `Step` of transformers' Llama."""

    def __init__(self, model: Any, texts: np.ndarray, cached: bool) -> None:
        from transformers import DynamicCache

        self.model, self.cached = model, cached
        names = inspect.signature(model.forward).parameters
        self.name = "cache" if "cache" in names else "past_key_values"  # as it was once called
        tokens = torch.from_numpy(texts)
        self.past, self.last, self.whole = DynamicCache(config=model.config), tokens[:, -1:], tokens
        if cached:
            with torch.inference_mode():
                model(tokens[:, :-1], logits_to_keep=1, **{self.name: self.past})

    def run(self) -> Logits:
        """The logits (B, V) after the last token."""
        with torch.inference_mode():
            if self.cached:
                output = self.model(self.last, use_cache=True, **{self.name: self.past})
            else:
                output = self.model(self.whole, use_cache=False, logits_to_keep=1)
            logits: Logits = output.logits[:, -1].float().numpy()
            return logits

    def reset(self) -> None:
        """Take the token back."""
        if self.cached:
            self.past.crop(-1)


def peer_of(model: Transformer) -> Any:
    """The same weights in transformers' model."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        TextModel(model, None).save(Path(folder) / "model", "hf")
        peer = LlamaForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
        return peer.eval().requires_grad_(False)


def compare(model: Transformer, peer: Any, position: int, batch: int, rounds: int) -> dict[str, Timing]:
    """A step of both, with a cache and, for one text, without."""
    cases: dict[str, Case] = {}
    logits: dict[bool, list[Logits]] = {True: [], False: []}
    for cached in (True, False) if batch == 1 else (True,):
        kind = "with" if cached else "without"
        fast = Step(model, Setting(cached=cached, batch=batch), position, position)
        slow = Step(model, Setting(cached=cached, batch=batch, deterministic=True), position, position)
        other = Peer(peer, fast.texts, cached)
        for name, case in (("qkv", fast), ("qkv, deterministic", slow), ("transformers", other)):
            logits[cached].append(case.run())
            case.reset()
            cases[f"{name}, {kind}"] = case
    found = [one for every in logits.values() for one in every]
    apart = max(float(np.abs(one - found[0]).max() / np.abs(found[0]).max()) for one in found)
    assert apart < EQUAL, f"the models differ by {apart:.1e}"
    return interleaved(cases, rounds, lambda name: None)


def print_comparison(rounds: int) -> None:
    """The second part."""
    import transformers

    model = build(small())
    peer = peer_of(model)
    print(f"\nThe same steps of transformers {transformers.__version__}, same weights; equal logits are checked\n")
    print(f"{'position':>8}{'batch':>7}  {'case':30}{'median ms':>10}{'range':>20}{'of the peer':>13}")
    for batch in (1, 8):
        for position in lengths_for(None, quick=False)[-4:]:
            times = compare(model, peer, position, batch, rounds)
            for name, one in times.items():
                base = times[f"transformers, {name.rsplit(', ', 1)[1]}"].median
                spread = f"{one.low:.2f} to {one.high:.2f}"
                print(f"{position:8}{batch:7}  {name:30}{one.median:10.2f}{spread:>20}{one.median / base:13.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    app(["bench", "cache", "--rounds", str(given.rounds), "--threads", str(given.threads)], standalone_mode=False)
    if importlib.util.find_spec("transformers") is None:
        print("\ntransformers is not installed, so no peer is measured; pip install 'qkv[peer]'")
        return
    torch.set_num_threads(given.threads)
    print_comparison(given.rounds)


if __name__ == "__main__":
    main()
