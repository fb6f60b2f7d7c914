"""Rotary positions: five ways to turn, what turning keeps, and what it does not promise."""

import numpy as np
import pytest

import qkv
from qkv import config as c

from .small import (
    Run,
    Turn,
    array,
    attention_matrix,
    block,
    both,
    decoder,
    deviation,
    encoder,
    frequencies,
    heads,
    mix,
    normal,
    same,
    tokens,
    torch_model,
    turns,
    watched,
    weights_of,
)

PAIRS, HALVES = c.Rotary(layout="pairs"), c.Rotary(layout="halves")
PLACES = np.array([0, 1, 2, 5, 50, 77, 300, 499])
TO_HALVES = {d: np.concatenate([np.arange(0, d, 2), np.arange(1, d, 2)]) for d in (2, 4, 8, 64)}


def theta(width: int, base: float = 10_000.0) -> np.ndarray:
    return base ** (-np.arange(0, width, 2) / width)


# --- Five forms -------------------------------------------------------------------------------------------------------


def by_plane_matrix(x: np.ndarray, m: int) -> np.ndarray:
    """One plane: [[cos, -sin], [sin, cos]] of m radians."""
    return np.array([[np.cos(m), -np.sin(m)], [np.sin(m), np.cos(m)]]) @ x


def by_block_diagonal(x: np.ndarray, m: int) -> np.ndarray:
    """A d x d matrix of such blocks, each with its own frequency."""
    matrix = np.zeros((len(x), len(x)))
    for i, w in enumerate(theta(len(x))):
        plane = slice(2 * i, 2 * i + 2)
        matrix[plane, plane] = [[np.cos(m * w), -np.sin(m * w)], [np.sin(m * w), np.cos(m * w)]]
    return matrix @ x


def by_complex_product(x: np.ndarray, m: int) -> np.ndarray:
    """Each pair as one complex number, times e^(i m theta)."""
    turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * m * theta(len(x)))
    return np.stack([turned.real, turned.imag], axis=-1).ravel()


def by_pair(x: np.ndarray, m: int) -> np.ndarray:
    """The seed's loop over pairs."""
    y = x.copy()
    for i, w in enumerate(theta(len(x))):
        cos, sin = np.cos(m * w), np.sin(m * w)
        y[2 * i] = x[2 * i] * cos - x[2 * i + 1] * sin
        y[2 * i + 1] = x[2 * i] * sin + x[2 * i + 1] * cos
    return y


def by_table(x: np.ndarray, m: int) -> np.ndarray:
    """Cosines and sines of all positions made beforehand, both elements of a pair having the same."""
    angle = np.outer(np.arange(500), np.repeat(theta(len(x)), 2))
    quarter = np.stack([-x[1::2], x[0::2]], axis=-1).ravel()
    return x * np.cos(angle)[m] + quarter * np.sin(angle)[m]


@pytest.mark.parametrize("form", [by_plane_matrix, by_block_diagonal, by_complex_product, by_pair, by_table])
@pytest.mark.parametrize("width", [2, 4, 64])
@turns
def test_rope_five_forms_agree(turn: Turn, width: int, form):
    if form is by_plane_matrix and width > 2:
        return  # one plane has two dimensions
    x = normal(len(PLACES), 3, width)
    expected = np.array([[form(head, m) for head in row] for row, m in zip(x, PLACES, strict=True)])
    assert deviation(turn(PAIRS, x, PLACES), expected) < 1e-12
    order = TO_HALVES[width]  # the fixed permutation from one layout to the other
    assert deviation(turn(HALVES, x[..., order], PLACES), expected[..., order]) < 1e-12


@both
def test_rope_layouts_give_one_model_after_the_permutation(run: Run):
    """Rows of q_proj and k_proj permuted inside each head: the same scores, hence the same output."""
    pairs, halves = (decoder(block(attention=heads(head_dim=8, positions=r))) for r in (PAIRS, HALVES))
    weights, ids = weights_of(pairs), tokens(2, 12)
    moved = dict(weights)
    for layer in range(2):
        for name in ("q_proj", "k_proj"):
            key = f"decoder.layers.{layer}.attention.{name}.weight"
            moved[key] = weights[key].reshape(4, 8, -1)[:, TO_HALVES[8]].reshape(32, -1)
    expected = run(pairs, weights, ids).logits
    assert deviation(run(halves, moved, ids).logits, expected) < 1e-12
    assert deviation(run(halves, weights, ids).logits, expected) > 0.01


@turns
def test_e02_goldens_of_both_layouts(turn: Turn):
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    assert turn(PAIRS, x, np.array([1]))[0, 0] == pytest.approx([-1.143, 1.922, 2.960, 4.030], abs=5e-4)
    assert turn(HALVES, x, np.array([1]))[0, 0] == pytest.approx([-1.984, 1.960, 2.462, 4.020], abs=5e-4)


# --- Frequencies ------------------------------------------------------------------------------------------------------


@turns
def test_rope_frequencies_of_width_128(turn: Turn):
    found, factor = frequencies(turn, PAIRS, 128)
    assert factor == 1
    assert deviation(found, theta(128)) < 1e-15
    assert found[[0, 1, 2, 30]] == pytest.approx([1, 0.865964, 0.749894, 0.0133352], rel=5e-6)
    assert found[[60, 63]] == pytest.approx([1.77828e-4, 1.15478e-4], rel=5e-6)


@turns
def test_e10_the_last_frequency_is_base_to_minus_d_minus_2_over_d(turn: Turn):
    assert frequencies(turn, PAIRS, 128)[0][-1] == pytest.approx(1.155e-4, abs=5e-8)
    assert frequencies(turn, PAIRS, 64)[0][-1] == pytest.approx(1.334e-4, abs=5e-8)
    assert frequencies(turn, PAIRS, 128)[0][-1] > 1e4 * 10_000.0**-2


@turns
def test_e12_frequencies_are_rounded_not_cut(turn: Turn):
    found, _ = frequencies(turn, PAIRS, 128)
    assert f"{found[1]:.4f} {found[63]:.5f}" == "0.8660 0.00012"  # the text prints 0.8659 and 0.00011


@turns
def test_e13_angles_are_radians(turn: Turn):
    x = np.array([[[1.0, 0.0]]])
    assert np.degrees(np.arctan2(*turn(PAIRS, x, np.array([1]))[0, 0, ::-1])) == pytest.approx(57.29578)


@turns
def test_e62_a_larger_base_leaves_the_first_pair_and_slows_the_others(turn: Turn):
    ratio = frequencies(turn, c.Rotary(theta=500_000.0), 128)[0] / frequencies(turn, c.Rotary(), 128)[0]
    assert ratio[0] == 1
    assert (np.diff(ratio) < 0).all()


def test_rope_base_table():
    """Theta of each family of the texts, as its configurations have it."""
    thetas = {
        "roformer-base": 1e4, "llama-7b": 1e4, "llama-65b": 1e4, "llama-2-7b": 1e4, "llama-2-70b": 1e4,
        "llama-2-long-70b": 5e5, "codellama-7b": 1e6, "codellama-34b": 1e6, "llama-3-8b": 5e5, "llama-3-70b": 5e5,
        "llama-3-405b": 5e5, "llama-3.1-8b": 5e5, "llama-3.2-1b": 5e5, "llama-3.2-3b": 5e5, "mistral-7b": 1e4,
        "mistral-7b-v0.3": 1e6, "qwen-7b": 1e4, "qwen2-0.5b": 1e6, "qwen2-7b": 1e6, "qwen2-72b": 1e6,
        "chatglm2-6b": 1e4, "chatglm3-6b": 1e4, "deepseek-llm-7b": 1e4, "deepseek-v2": 1e4, "deepseek-v3": 1e4,
        "yi-6b": 5e6, "yi-34b": 5e6, "palm-540b": 1e4,
    }  # fmt: skip
    for name, expected in thetas.items():
        (stack,) = qkv.preset(name).stacks.values()
        for layer in stack.blocks:
            assert isinstance(layer.attention.positions, c.Rotary), name
            assert layer.attention.positions.theta == expected, name


# --- Properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", [PAIRS, HALVES, c.Rotary(fraction=0.5, layout="pairs")])
@turns
def test_rope_property_1_the_score_depends_on_the_offset_alone(turn: Turn, rotary: c.Rotary):
    q, k = normal(16, seed=1), normal(16, seed=2)
    places = np.array([0, 1, 5, 50, 3000])

    def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return turn(rotary, np.tile(x, (len(positions), 1, 1)), positions)[:, 0]

    for offset in (0, 3, 7):
        scores = (turned(q, places) * turned(k, places + offset)).sum(-1)
        assert np.ptp(scores) < 1e-12 * np.linalg.norm(q) * np.linalg.norm(k)
    norms = np.linalg.norm(turned(q, places), axis=-1)
    assert np.ptp(norms) < 1e-13 * norms[0]


@both
def test_rope_property_1_positions_shifted_together_change_nothing(run: Run):
    cfg = decoder(block(attention=heads(head_dim=8, positions=HALVES)))
    weights, ids = weights_of(cfg), tokens(1, 8)
    start, apart = np.arange(8)[None], np.array([[0, 1, 2, 3, 4, 5, 6, 9]])
    expected = run(cfg, weights, ids).logits
    assert deviation(run(cfg, weights, ids, positions=start + 1000).logits, expected) < 1e-11
    assert deviation(run(cfg, weights, ids, positions=apart).logits, expected) > 1e-3


@turns
def test_rope_at_position_0_is_the_identity(turn: Turn):
    x = normal(1, 2, 8)
    assert np.array_equal(turn(PAIRS, x, np.array([0])), x)


@turns
def test_e25_decay_with_distance_is_a_bound_only(turn: Turn):
    """The score of two vectors of ones rises in 1991 of 4095 steps and goes down to -16.7."""
    scores = 2 * np.cos(np.outer(np.arange(4096), frequencies(turn, PAIRS, 128)[0])).sum(axis=1)
    assert scores[0] == 128
    assert int((np.diff(scores) > 0).sum()) == 1991
    assert scores.min() == pytest.approx(-16.7, abs=0.05)
    assert (np.diff(scores.reshape(4, 1024).mean(axis=1)) < 0).all(), "on average it does fall"


@turns
def test_e25_the_score_of_ones_is_the_sum_of_cosines(turn: Turn):
    places = np.array([0, 9, 700, 4095])
    turned = turn(PAIRS, np.ones((4, 1, 128)), places)[:, 0]
    expected = 2 * np.cos(np.outer(places, theta(128))).sum(axis=1)
    assert np.abs(turned @ turned[0] - expected).max() < 1e-10


@both
def test_e24_equal_offset_equal_score_but_not_equal_weight(run: Run):
    """All queries equal, all keys equal, one pair that never turns far: a row shares its weight among its keys."""
    rotary = c.Rotary(theta=10_000.0)
    q, k = (np.tile(normal(1, 1, 8, seed=s), (8, 1, 1)) for s in (1, 2))
    weights = mix(run, q, k, np.eye(8)[:, None], heads(n_heads=1, head_dim=8, positions=rotary))[:, 0]
    logarithms = np.log(weights[np.tril_indices(8)])
    assert np.isfinite(logarithms).all()
    one_back = np.diagonal(weights, -1)[:5]
    assert np.ptp(one_back) > 0.1
    assert (np.diff(one_back) < 0).all(), "each further row has one more key"
    scores = np.log(np.diagonal(weights, -1) / np.diagonal(weights)[1:])
    assert np.ptp(scores) < 1e-12, "the difference of the scores at distances 1 and 0 is one number"


def test_e59_rotary_tables_are_not_saved_and_have_no_end():
    cfg = decoder(block(attention=heads(head_dim=8, positions=HALVES)), max_seq_len=4)
    model = torch_model(cfg, weights_of(cfg))
    assert set(model.state_dict()) == set(cfg.parameters())
    assert not list(model.buffers())
    with_offset = watched(cfg, tokens(1, 3), "decoder.layers.0.attention.q", positions=np.array([[40, 41, 42]]))
    turned = array(with_offset["decoder.layers.0.attention.q"])
    from_zero = array(watched(cfg, tokens(1, 3), "decoder.layers.0.attention.q")["decoder.layers.0.attention.q"])
    assert deviation(turned, from_zero) > 0.1, "the same tokens later in a text have other angles"


@both
def test_e59_a_model_trained_on_4_positions_runs_on_40(run: Run):
    cfg = decoder(block(attention=heads(head_dim=8, positions=HALVES)), max_seq_len=4)
    assert np.isfinite(run(cfg, weights_of(cfg), tokens(1, 40)).logits).all()


@both
def test_e26_chatglm_turns_half_of_each_head(run: Run):
    """The first half as neighbouring pairs; scores over the second half alone do not know positions."""
    positions = qkv.preset("chatglm2-6b").decoder.layers[0].attention.positions
    assert (positions.fraction, positions.layout) == (0.5, "pairs")
    q, k = normal(6, 1, 8, seed=1), normal(6, 1, 8, seed=2)
    q[..., :4] = 0
    half, none = (heads(c.Bidirectional(), n_heads=1, head_dim=8, positions=p) for p in (positions, c.NoPositions()))
    v = normal(6, 1, 8, seed=3)
    assert np.array_equal(mix(run, q, k, v, half), mix(run, q, k, v, none))
    q[..., :4] = 1
    assert deviation(mix(run, q, k, v, half), mix(run, q, k, v, none)) > 0.01


def test_e26_deepseek_turns_a_part_of_its_own():
    for name in ("deepseek-v2", "deepseek-v3"):
        attention = qkv.preset(name).decoder.layers[0].attention
        assert isinstance(attention, c.Latent)
        assert (attention.kv_rank, attention.rope_dim, attention.nope_dim) == (512, 64, 128)


@both
def test_rope_is_what_brings_positions(run: Run):
    """The control of the tests above: without positions the matrix of weights only follows its tokens."""
    q, k, order = normal(6, 2, 4, seed=1), normal(6, 2, 4, seed=2), np.array([3, 1, 5, 0, 2, 4])
    plain = heads(c.Bidirectional(), n_heads=2, head_dim=4)
    moved = attention_matrix(run, q[order], k[order], plain)
    assert deviation(moved, attention_matrix(run, q, k, plain)[:, order][:, :, order]) < 1e-12


def test_rope_of_a_quarter_of_each_head_in_a_whole_model():
    cfg = encoder(block(attention=heads(c.Bidirectional(), head_dim=8, positions=c.Rotary(fraction=0.25))))
    assert same(cfg, tokens(2, 9)) < 1e-12
