"""Absolute positions: sinusoids and learned tables."""

import numpy as np
import pytest
from matplotlib import colormaps, image, pyplot

from qkv import config as c
from qkv.errors import DataError

from .small import Run, block, both, decoder, deviation, encoder, tokens, weights_of

POSITIONS = np.arange(60)


def waves(run: Run, positions: np.ndarray, d_model: int = 128, **options) -> np.ndarray:
    """What sinusoidal positions add (T, d_model): the hidden states of a model whose tensors are all zero."""
    silent = block(norm=c.NoNorm())
    embedding = c.Embedding(positions=c.Sinusoidal(**options))
    cfg = encoder(silent, n_layers=1, norm=c.NoNorm(), vocab_size=1, d_model=d_model, embedding=embedding)
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    return run(cfg, weights, np.zeros((1, len(positions)), dtype=int), positions=positions[None]).hidden[0]


def frequencies_of(table: np.ndarray) -> np.ndarray:
    """The angle by which each pair turns from position 0 to 1, of a table whose row 1 is position 1."""
    return np.arctan2(table[1, 0::2], table[1, 1::2])


@both
def test_sinusoidal_position_encoding(run: Run):
    pe = waves(run, POSITIONS)
    assert pe[0].tolist() == [0, 1] * 64
    assert pe[5, :4] == pytest.approx([-0.959, 0.284, -0.928, -0.373], abs=5e-4)
    angles = POSITIONS[:, None] / 10_000 ** (np.arange(0, 128, 2) / 128)
    assert deviation(pe[:, 0::2], np.sin(angles)) < 1e-13
    assert deviation(pe[:, 1::2], np.cos(angles)) < 1e-13


@both
def test_sinusoidal_position_encoding_shifts_by_a_linear_map(run: Run):
    """M_k turns each pair by k times its frequency, whatever the position."""
    pe, w = waves(run, np.arange(80)), 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    for k in (1, 3, 17):
        shift = np.zeros((128, 128))
        for i in range(64):
            c_k, s_k = np.cos(k * w[i]), np.sin(k * w[i])
            shift[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c_k, s_k], [-s_k, c_k]]
        assert np.abs(pe[:60] @ shift.T - pe[k : k + 60]).max() < 1e-14


@both
def test_sinusoidal_position_encoding_halves_are_the_same_numbers_in_another_order(run: Run):
    pairs, halves = waves(run, POSITIONS), waves(run, POSITIONS, layout="halves")
    assert np.array_equal(halves, np.concatenate([pairs[:, 0::2], pairs[:, 1::2]], axis=1))


@both
def test_sinusoidal_position_encoding_heat_map_is_an_image_file(run: Run, tmp_path):
    """One pixel per number: positions downwards, dimensions to the right."""
    pe, file = waves(run, POSITIONS), tmp_path / "positions.png"
    pyplot.imsave(file, pe, cmap="RdBu", vmin=-1, vmax=1)
    pixels = image.imread(file)
    assert pixels.shape == (60, 128, 4)
    assert np.abs(pixels - colormaps["RdBu"]((pe + 1) / 2)).max() < 1 / 255
    assert np.ptp(pixels[:, 0, 0]) > 0.5, "the first column swings through all colours"
    assert np.ptp(pixels[:, 127, 0]) < 0.01, "the last hardly moves in 60 positions"


@both
def test_e03_sinusoid_frequencies_fall(run: Run):
    """Pair 0 is the fastest wave, with a length of 2 pi; the last has 10000^(126/128) 2 pi."""
    wavelength = 2 * np.pi / frequencies_of(waves(run, np.arange(2)))
    assert (np.diff(wavelength) > 0).all()
    assert wavelength[0] == pytest.approx(2 * np.pi, rel=1e-14)
    assert wavelength[-1] == pytest.approx(54_410, abs=0.5)


@both
def test_e21_equal_inner_products_are_stationarity_and_hold_for_minus_k(run: Run):
    pe = waves(run, np.arange(9))
    products = [pe[0] @ pe[3], pe[5] @ pe[8], pe[5] @ pe[2]]
    assert products == pytest.approx([52.186] * 3, abs=5e-4)
    assert np.ptp(products) < 1e-13
    w_q, w_k = np.random.default_rng(0).standard_normal((2, 128, 128)) / 128**0.5
    scores = (pe @ w_q.T) @ (pe @ w_k.T).T
    assert abs(scores[0, 3] - scores[5, 8]) > 0.1, "it does not survive projections of their own"


@both
def test_e22_sinusoids_are_defined_at_every_length_and_learned_tables_are_not(run: Run):
    far = waves(run, np.array([1_000_000, 0, 511, 512]))
    assert np.abs(far).max() <= 1
    assert deviation(far[1:3], waves(run, np.array([0, 511]))) < 1e-15
    cfg = decoder(embedding=c.Embedding(positions=c.Learned()), max_seq_len=8)
    with pytest.raises(DataError):
        run(cfg, weights_of(cfg), tokens(1, 9))


@both
def test_e63_the_index_of_the_pairs_runs_to_255(run: Run):
    denominators = 1 / frequencies_of(waves(run, np.arange(2), d_model=512))
    assert denominators.shape == (256,)
    assert denominators[[254, 255]].round().tolist() == [9306, 9647]


@pytest.mark.parametrize("offset", [0, 2])
@both
def test_learned_position_encoding_beyond_the_table_is_a_named_error(run: Run, offset: int):
    cfg = decoder(embedding=c.Embedding(positions=c.Learned(offset=offset)), max_seq_len=8)
    weights = weights_of(cfg)
    assert weights["embed.positions.weight"].shape == (8 + offset, 16)
    assert run(cfg, weights, tokens(1, 8)).logits.shape == (1, 8, 23)
    with pytest.raises(DataError, match="position"):
        run(cfg, weights, tokens(1, 9))
    with pytest.raises(DataError, match="position"):
        run(cfg, weights, tokens(1, 3), positions=np.array([[0, 1, 8]]))


@both
def test_learned_position_encoding_adds_the_row_of_the_position(run: Run):
    silent = block(norm=c.NoNorm())
    cfg = encoder(silent, norm=c.NoNorm(), embedding=c.Embedding(positions=c.Learned()))
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    for name in ("embed.tokens.weight", "embed.positions.weight"):
        weights[name] = weights_of(cfg)[name]
    places, ids = np.array([[4, 0, 31]]), tokens(1, 3)
    found = run(cfg, weights, ids, positions=places).hidden
    assert np.array_equal(found, weights["embed.tokens.weight"][ids] + weights["embed.positions.weight"][places])


@both
def test_learned_position_encoding_counts_real_tokens_only(run: Run):
    """A table of 8 positions holds 8 real tokens, wherever padding stands, and documents of 8 packed into one row."""
    cfg = decoder(embedding=c.Embedding(positions=c.Learned()), max_seq_len=8)
    weights, ids, other = weights_of(cfg), tokens(1, 8), tokens(1, 8, seed=1)
    alone = run(cfg, weights, ids).logits
    row = np.concatenate([other, ids], axis=1)
    padded = run(cfg, weights, row, valid=np.arange(16)[None] >= 8).logits[:, 8:]
    packed = run(cfg, weights, row, documents=np.arange(16)[None] // 8).logits
    assert deviation(padded, alone) < 1e-13
    assert deviation(packed[:, 8:], alone) < 1e-13
    assert deviation(packed[:, :8], run(cfg, weights, other).logits) < 1e-13
