"""What each process gets of a batch: everything once, as much for each, and as much work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qkv.errors import ConfigError
from qkv.train.batch import IGNORE, Batch
from qkv.train.parallel.share import columns_of, rows_of


def batch_of(rows: int, length: int) -> Batch:
    """Tokens that are all different, of two documents per row, with some padding."""
    tokens = np.arange(rows * length).reshape(rows, length)
    valid = np.arange(length) < np.array([[length], *[[length - 3]] * (rows - 1)])
    documents = np.where(valid, np.arange(length) * 2 // length, -1)
    inputs: dict[str, Any] = {"tokens": tokens, "valid": valid, "documents": documents}
    return Batch(inputs, np.where(valid, tokens + 1, IGNORE))


@pytest.mark.parametrize(("rows", "ranks"), [(4, 1), (4, 2), (4, 4), (5, 2), (3, 4), (1, 3)])
def test_every_row_comes_once(rows: int, ranks: int) -> None:
    whole = batch_of(rows, 6)
    shares = [rows_of(whole, rank, ranks) for rank in range(ranks)]
    real = [share for share in shares if share.count]
    assert np.concatenate([share.inputs["tokens"] for share in real]).tolist() == whole.inputs["tokens"].tolist()
    assert sum(share.count for share in shares) == whole.count
    assert all(share.rows for share in shares)  # those that have none compute along


@pytest.mark.parametrize("length", [12, 13, 5, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_token_comes_once_where_it_stood(length: int, ranks: int) -> None:
    whole = batch_of(2, max(length, 4))
    shares = [columns_of(whole, rank, ranks) for rank in range(ranks)]
    assert sum(share.count for share in shares) == whole.count
    assert len({share.targets.shape for share in shares}) == 1
    valid, found = whole.inputs["valid"], {}
    for share in shares:
        real = share.inputs["valid"]
        assert (share.targets[~real] == IGNORE).all()
        for name in ("documents", "positions"):
            values = share.inputs.get(name, np.zeros_like(share.targets))[real]
            found |= {(name, token): at for token, at in zip(share.inputs["tokens"][real], values, strict=True)}
    if ranks == 1:
        return
    documents = whole.inputs["documents"]
    for row, column in zip(*valid.nonzero(), strict=True):
        token = whole.inputs["tokens"][row, column]
        assert found["documents", token] == documents[row, column]
        assert found["positions", token] == (documents[row, :column] == documents[row, column]).sum()


def test_causal_work_is_shared_evenly() -> None:
    """Pairs of a query and a key before it: in pieces from both ends each has the same; in blocks the last has most."""
    plain = Batch({"tokens": np.arange(48)[None]}, np.arange(48)[None])
    for ranks in (2, 3, 4):
        pairs = [(columns_of(plain, rank, ranks).inputs["positions"] + 1).sum() for rank in range(ranks)]
        blocks = [(part + 1).sum() for part in np.array_split(np.arange(48), ranks)]
        assert max(pairs) == min(pairs)
        assert max(blocks) > 2 * min(blocks)


def test_what_is_asked_of_whole_rows_is_not_cut() -> None:
    rows = Batch({"tokens": np.zeros((2, 8), np.int64)}, np.zeros(2, np.int64))
    with pytest.raises(ConfigError, match=r"parallel.context: .* set it to 1"):
        columns_of(rows, 0, 2)
