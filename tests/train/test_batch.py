"""Rows become batches, and batches parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.errors import DataError
from qkv.train.batch import IGNORE, Batch, Row, collate

ROWS = [
    Row({"tokens": np.array([5, 6, 7]), "source": np.array([1]), "segments": np.array([0, 0, 1])}, np.array([6, 7, 8])),
    Row({"tokens": np.array([9]), "source": np.array([2, 3]), "segments": np.array([0])}, np.array([IGNORE])),
    Row({"tokens": np.array([4, 3]), "source": np.array([8]), "segments": np.array([1, 1])}, np.array([3, IGNORE])),
]


def test_rows_are_padded_to_the_longest() -> None:
    batch = collate(ROWS, pad=11)
    assert batch.inputs["tokens"].tolist() == [[5, 6, 7], [9, 11, 11], [4, 3, 11]]
    assert batch.inputs["valid"].tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert batch.inputs["source"].tolist() == [[1, 11], [2, 3], [8, 11]]
    assert batch.inputs["source_valid"].tolist() == [[True, False], [True, True], [True, False]]
    assert batch.inputs["segments"].tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]
    assert batch.targets.tolist() == [[6, 7, 8], [IGNORE] * 3, [3, IGNORE, IGNORE]]
    assert batch.count == 4


def test_rows_of_one_length_have_no_mask() -> None:
    row = Row({"tokens": np.array([1, 2]), "documents": np.array([0, 1])}, np.array([2, IGNORE]))
    assert set(collate([row, row]).inputs) == {"tokens", "documents"}


def test_padding_is_in_no_document() -> None:
    rows = [Row({"tokens": np.arange(n), "documents": np.zeros(n, np.int64)}, np.arange(n)) for n in (1, 2)]
    assert collate(rows).inputs["documents"].tolist() == [[0, -1], [0, 0]]


@pytest.mark.parametrize(("targets", "shape"), [(np.array(2), (3,)), (np.array([0, 1]), (3, 2))])
def test_one_decision_per_row_is_not_padded(targets: np.ndarray, shape: tuple[int, ...]) -> None:
    batch = collate([Row({"tokens": np.arange(n)}, targets) for n in (1, 2, 3)])
    assert batch.targets.shape == shape
    assert batch.targets.dtype == np.int64
    assert batch.count == np.prod(shape)


def test_a_row_that_knows_its_prefix() -> None:
    rows = [Row({"tokens": np.arange(3), "prefix_length": np.array(n)}, np.arange(3)) for n in (1, 2)]
    assert collate(rows).inputs["prefix_length"].tolist() == [1, 2]


def test_parts_have_the_rows_in_order() -> None:
    batch = collate(ROWS, pairs=np.array([0, 1, 0]))
    parts = batch.split(2)
    assert [part.rows for part in parts] == [2, 1]
    assert sum(part.count for part in parts) == batch.count
    for name in ("tokens", "segments"):
        assert np.array_equal(np.concatenate([part.inputs[name] for part in parts]), batch.inputs[name])
    assert [part.pairs.tolist() for part in parts if part.pairs is not None] == [[0, 1], [0]]
    assert "valid" not in batch.split(1)[0].inputs
    assert "source_valid" not in batch.split(1)[1].inputs
    assert "valid" in batch.split(1)[1].inputs


def test_tensors_know_where_targets_are() -> None:
    batch = collate(ROWS).to("cpu")
    assert batch.places is not None
    assert batch.places.tolist() == [0, 1, 2, 6]
    assert batch.inputs["valid"].dtype == torch.bool
    assert {value.dtype for name, value in batch.inputs.items() if "valid" not in name} == {torch.int64}
    assert Batch({"tokens": np.zeros((1, 2), np.int64)}, np.zeros((1, 2), np.int64)).to("cpu").places is None


def test_a_batch_has_rows() -> None:
    with pytest.raises(DataError, match="no rows"):
        collate([])
