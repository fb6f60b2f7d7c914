"""Default positions and lengths, and one clear line for every argument that does not fit."""

from typing import Any

import numpy as np
import pytest

import qkv.config as c
from qkv import reference
from qkv.errors import ConfigError, DataError
from qkv.reference.inputs import Inputs, rows

from .small import attention, block, encoder, encoder_decoder, model, stack, tokens

LM = model()


def test_default_positions_count_the_valid_tokens_before():
    row = rows(LM, LM.decoder, Inputs(tokens(1, 6), valid=np.array([[False, True, True, False, True, False]])))[0]
    assert row.at.position.tolist() == [-1, 0, 1, -1, 2, -1]
    assert row.at.length.tolist() == [3] * 6
    assert row.exists.tolist() == [False, True, True, False, True, False]


def test_default_positions_count_in_each_document():
    documents = np.array([[4, 4, 1, 1, 1, 4]])
    valid = np.array([[True, True, True, False, True, True]])
    row = rows(LM, LM.decoder, Inputs(tokens(1, 6), valid=valid, documents=documents))[0]
    assert row.at.position.tolist() == [0, 1, 0, -1, 1, 2]
    assert row.at.length.tolist() == [3, 3, 2, 2, 2, 3]


def test_given_positions_stand_and_padding_keeps_minus_one():
    given = Inputs(tokens(1, 4), valid=np.array([[True, True, False, True]]), positions=np.array([[5, 9, 10, 7]]))
    row = rows(LM, LM.decoder, given)[0]
    assert row.at.position.tolist() == [5, 9, -1, 7]
    assert row.at.length.tolist() == [10] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": tokens(4)}, r"tokens: expected a shape \(B, T\) that is not empty, got \(4,\)"),
        ({"tokens": np.zeros((1, 0), dtype=int)}, r"tokens: expected a shape \(B, T\) that is not empty, got \(1, 0\)"),
        ({"tokens": np.ones((1, 3))}, "tokens: expected integers, got dtype float64"),
        ({"tokens": np.array([[3, 20]])}, "tokens: must be from 0 to 19, got 20"),
        ({"tokens": np.array([[3, -1]])}, "tokens: must be from 0 to 19, got -1"),
        ({"valid": np.ones((1, 3), dtype=int)}, "valid: expected booleans, got dtype int64"),
        ({"valid": np.ones((1, 2), dtype=bool)}, r"valid: expected shape \(1, 3\), got \(1, 2\)"),
        ({"positions": np.array([[0, 1, -2]])}, "positions: must be 0 or more, got -2"),
        ({"documents": np.array([0, 0, 0])}, r"documents: expected shape \(1, 3\), got \(3,\)"),
        ({"segments": np.array([[0, 0, 0]])}, "segments: given, but the model has no table"),
        ({"prefix_length": np.array([2])}, "prefix_length: given, but no pattern of this model reads it"),
        ({"global_tokens": np.array([[True] * 3])}, "global_tokens: given, but no pattern of this model reads them"),
        ({"source": tokens(1, 3)}, "source: given, but the model is no encoder-decoder"),
    ],
)
def test_arguments_that_do_not_fit(fields: dict[str, Any], message: str):
    given = {"tokens": tokens(1, 3), **fields}
    with pytest.raises(DataError, match=message) as caught:
        reference.forward(LM, reference.random_weights(LM, seed=0), given.pop("tokens"), **given)
    assert "\n" not in str(caught.value)


def test_a_prefix_must_be_given_where_a_pattern_reads_it():
    nested = c.AnyOf(patterns=(c.SlidingWindow(window=2), c.Prefix()))
    cfg = model(stack(block(attention=attention(pattern=nested))))
    weights = reference.random_weights(cfg, seed=0)
    with pytest.raises(DataError, match="prefix_length: required"):
        reference.forward(cfg, weights, tokens(1, 3))
    with pytest.raises(DataError, match=r"prefix_length: expected shape \(1,\), got \(2,\)"):
        reference.forward(cfg, weights, tokens(1, 3), prefix_length=[1, 1])
    assert reference.forward(cfg, weights, tokens(1, 3), prefix_length=[1]).shape == (1, 3, 20)


def test_segments_have_a_range():
    cfg = encoder(embedding=c.Embedding(n_segments=2))
    with pytest.raises(DataError, match="segments: must be from 0 to 1, got 2"):
        reference.run(cfg, reference.random_weights(cfg, seed=0), tokens(1, 3), segments=[[0, 1, 2]])


def test_an_encoder_decoder_needs_its_source_and_refuses_documents():
    cfg = encoder_decoder()
    weights = reference.random_weights(cfg, seed=0)
    with pytest.raises(DataError, match="source: required"):
        reference.forward(cfg, weights, tokens(1, 3))
    with pytest.raises(DataError, match=r"source: expected as many rows as tokens has \(1\), got 2"):
        reference.forward(cfg, weights, tokens(1, 3), source=tokens(2, 3))
    with pytest.raises(DataError, match="source: must be from 0 to 19, got 20"):
        reference.forward(cfg, weights, tokens(1, 3), source=[[20]])
    with pytest.raises(DataError, match=r"source_valid: expected shape \(1, 3\), got \(1, 2\)"):
        reference.forward(cfg, weights, tokens(1, 3), source=tokens(1, 3), source_valid=[[True, False]])
    with pytest.raises(DataError, match="documents: an encoder-decoder cannot pack"):
        reference.forward(cfg, weights, tokens(1, 3), source=tokens(1, 3), documents=np.zeros((1, 3), dtype=int))


@pytest.mark.parametrize("n", [12, 13])
def test_positions_beyond_a_learned_table(n: int):
    cfg = model(embedding=c.Embedding(positions=c.Learned()))
    weights = reference.random_weights(cfg, seed=0)
    if n <= cfg.max_seq_len:
        assert reference.forward(cfg, weights, tokens(1, n)).shape == (1, n, 20)
    else:
        with pytest.raises(DataError, match="position 12 lies beyond the learned table, which ends at 11"):
            reference.forward(cfg, weights, tokens(1, n))


def test_weights_that_do_not_fit_are_all_named_in_one_line():
    weights: dict[str, Any] = reference.random_weights(LM, seed=0)
    del weights["head.weight"]
    weights["head.wieght"] = np.zeros((20, 16))
    weights["decoder.norm.weight"] = np.zeros(15)
    weights["embed.tokens.weight"] = np.zeros((20, 16), dtype=int)
    with pytest.raises(ConfigError) as caught:
        reference.forward(LM, weights, tokens(1, 3))
    assert str(caught.value) == (
        "weights do not fit the configuration: decoder.norm.weight has shape (15,) instead of (16,); "
        "embed.tokens.weight has dtype int64 instead of a float type; head.weight is missing; head.wieght is unexpected"
    )
