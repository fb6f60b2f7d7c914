"""What each process gets of a batch that all of them have drawn: some of its rows, and some columns of these.

    data ranks       rows 0 .. B/n - 1 to the first, and so on
    context ranks    2 n pieces of each row, of which rank r has numbers r and 2 n - 1 - r

The first piece of a causal row sees little, the last one all: with one from either end, each rank has the same work
(zigzag; Dubey 2024, section 3.3.2). Positions say where the tokens stood, so their order means nothing. A row whose
length is no multiple of 2 n is filled up with tokens that do not exist and that nobody sees.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.errors import ConfigError
from qkv.nn.inputs import Inputs
from qkv.train.batch import IGNORE, Batch, Ints

_FILL = {"tokens": 0, "valid": False, "positions": 0, "documents": -1, "segments": 0}
_WHOLE = {"prefix_length"}  # of a row, not of its tokens


def rows_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """The rows of a data rank. One without any gets the first row, of which nothing is asked: all compute in step."""
    if ranks == 1:
        return batch
    shares = batch.split(-(-batch.rows // ranks))
    if rank < len(shares):
        return shares[rank]
    first = batch.split(1)[0]
    return replace(first, targets=np.full_like(first.targets, IGNORE))


def columns_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """The columns of a context rank."""
    if ranks == 1:
        return batch
    tokens = batch.inputs["tokens"]
    if batch.targets.shape != tokens.shape:
        raise ConfigError("parallel.context: this objective asks about whole rows, which no process has: set it to 1")
    inputs = {**batch.inputs, "positions": _positions(batch)}
    short = -tokens.shape[1] % (2 * ranks)
    if short and "valid" not in inputs:
        inputs["valid"] = np.ones(tokens.shape, np.bool_)

    def cut(value: NDArray[np.generic], filler: int | bool) -> NDArray[np.generic]:
        return _cut(value, filler, short, rank, ranks)

    own = {name: value if name in _WHOLE else cut(value, _FILL[name]) for name, value in inputs.items()}
    return replace(batch, inputs=own, targets=cut(batch.targets, IGNORE).astype(np.int64))


def _positions(batch: Batch) -> Ints:
    """(B, T): where the tokens stand in their whole rows, as the model would count them."""
    given = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.inputs.items()}
    known = (given.get(name) for name in ("valid", "positions", "documents"))
    position = Inputs(given["tokens"], *known).coordinates(reads_global=False).position
    found: Ints = position.clamp(min=0).expand(given["tokens"].shape).numpy().copy()
    return found


def _cut(value: NDArray[np.generic], filler: int | bool, short: int, rank: int, ranks: int) -> NDArray[np.generic]:
    """The two pieces of (B, T, ...) that are a rank's."""
    room = np.full((len(value), short, *value.shape[2:]), filler, value.dtype)
    pieces = np.split(np.concatenate([value, room], 1), 2 * ranks, axis=1)
    return np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]], 1)
