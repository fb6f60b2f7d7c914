"""Who speaks where torchrun has started several processes of one command: the first, unless only others know."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 3.0


def own_rank() -> int:
    """This process's number; 0 if it is alone."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 0


def complain(text: str) -> None:
    """An error on stderr. What goes wrong everywhere is said by the first process; torchrun ends the others then."""
    rank = own_rank()
    if rank:
        time.sleep(_PATIENCE)  # still here after it: only this process knows
        text = f"process {rank}: {text}"
    print(f"qkv: {text}", file=sys.stderr, flush=True)


@contextmanager
def silence() -> Iterator[None]:
    """Within the block, no warnings: the first process has the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
