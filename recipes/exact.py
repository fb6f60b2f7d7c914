"""How a run of recipes/copy.toml does on the pairs that it held out: whole answers, and where cross-attention looks.

    python recipes/exact.py runs/copy

The second figure is the best head's: for how many of the letters its largest weight is at the place in the source from
which the letter comes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import qkv
from qkv.config.recipe import Recipe
from qkv.nn import capture
from qkv.text.pieces import PieceTokenizer
from qkv.train.data import open_shards


def places(source: str) -> np.ndarray:
    """Where each letter of the answer stands in the source, whose first character says what to do."""
    forth = np.arange(1, len(source))
    return forth if source[0] == "=" else forth[::-1]


def measured(run: Path) -> tuple[int, int, float]:
    """Exact answers, pairs, and the best head's share."""
    lm, recipe = qkv.load(run / "model"), Recipe.read(run / "recipe.toml")
    held_out = open_shards(run / "data" / "valid", lm.tokenizer)
    assert isinstance(lm.tokenizer, PieceTokenizer)
    assert held_out.source is not None
    exact, letters, hits = 0, 0, dict[str, np.ndarray]()
    for number in range(len(held_out.tokens.lengths)):
        source, target = held_out.source.document(number), held_out.tokens.document(number)
        text, wanted = lm.tokenizer.decode(source[:-1].tolist()), lm.tokenizer.decode(target[:-1].tolist())
        exact += lm.generate(text, recipe.data.context, decoding=qkv.Greedy()).text == wanted
        read = torch.tensor([[*lm.tokenizer.specials.starts, *target[:-1].tolist()]])
        with torch.inference_mode(), capture(lm.model) as trace:
            lm.model(read, source=torch.from_numpy(source)[None])
        for name in trace:
            if name.endswith("cross_attention.weights"):
                largest = trace[name][0, :, : len(wanted)].argmax(-1).numpy()  # (H, letters)
                hits[name] = hits.get(name, 0) + (largest == places(text)).sum(-1)
        letters += len(wanted)
    return exact, len(held_out.tokens.lengths), max(head.max() for head in hits.values()) / letters


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    right, pairs, share = measured(Path(sys.argv[1]))
    print(f"exact answers {right} of {pairs} ({right / pairs:.2%}); best head at the right place {share:.2%}")
