"""Pairs for recipes/copy.toml: random letters, to be copied or to be reversed, as lines with a tab.

python recipes/pairs.py > copy.tsv

=hello <tab> hello
<hello <tab> olleh
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterator


def pairs(count: int, longest: int, seed: int) -> Iterator[tuple[str, str]]:
    """Sources and targets; no text stands twice."""
    draw, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        text = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, longest)))
        if text in seen:
            continue
        seen.add(text)
        turned = draw.random() < 0.5
        yield ("<" + text, text[::-1]) if turned else ("=" + text, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="how many pairs (default 100000)")
    parser.add_argument("--longest", type=int, default=15, help="letters of the longest text (default 15)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for source, target in pairs(given.count, given.longest, given.seed):
        print(source, target, sep="\t")
