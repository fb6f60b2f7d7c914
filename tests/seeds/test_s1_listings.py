"""The listings of "Transformer architecture in detail": what holds, and what fails as the errata say (E..)."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn import functional

from .listings import (
    s1_causal_mask,
    s1_feed_forward,
    s1_layer_norm,
    s1_multi_head,
    s1_rope_pairs,
    s1_rope_torch,
    s1_self_attention,
    s1_sinusoidal,
    s1_sqrt_dk,
)
from .measure import causal, deviation, softmax


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)  # the listings draw from NumPy's global generator
    torch.manual_seed(0)


# --- causal mask ----------------------------------------------------------------------------------------------------


def test_e01_the_allowed_triangle_is_nan_and_with_it_every_softmax_row():
    with np.errstate(invalid="ignore"):
        mask = s1_causal_mask.demo()
    lower = np.tril_indices(5)
    assert np.isnan(mask[lower]).all()
    assert (mask[np.triu_indices(5, k=1)] == -np.inf).all()
    assert np.isnan(s1_sqrt_dk.softmax(np.zeros((5, 5)) + mask)).all()
    _, weights = s1_multi_head.MultiHeadAttention(8, 2).forward(np.ones((1, 5, 8)), mask=mask)
    assert np.isnan(weights).all()


def test_e01_where_gives_what_the_seed_prints():
    expected = """
        0. -inf -inf -inf -inf
        0. 0. -inf -inf -inf
        0. 0. 0. -inf -inf
        0. 0. 0. 0. -inf
        0. 0. 0. 0. 0."""
    assert causal(5).tolist() == [[float(word) for word in row.split()] for row in expected.split("\n")[1:]]
    weights = softmax(causal(5))
    assert np.allclose(weights.sum(-1), 1)
    assert weights[1].tolist() == [0.5, 0.5, 0, 0, 0]


def test_e61_position_i_sees_0_to_i_so_that_it_predicts_token_i_plus_1():
    with np.errstate(invalid="ignore"):
        forbidden = s1_causal_mask.create_causal_mask(5) == -np.inf
    for i in range(5):
        assert np.flatnonzero(~forbidden[i]).tolist() == list(range(i + 1))


# --- sqrt(d_k) ------------------------------------------------------------------------------------------------------


def test_softmax_listing_equals_the_definition_and_does_not_overflow():
    x = np.random.randn(3, 7)
    assert deviation(s1_sqrt_dk.softmax(x), np.exp(x) / np.exp(x).sum(-1, keepdims=True)) < 1e-14
    assert deviation(s1_sqrt_dk.softmax(x, axis=0).sum(0), np.ones(7)) < 1e-14
    assert s1_sqrt_dk.softmax(np.array([1000.0, -1000.0])).tolist() == [1.0, 0.0]


def test_sqrt_demo_gives_one_draw():
    raw, attn_raw, scaled, attn_scaled = s1_sqrt_dk.demo()
    assert raw.shape == (1, 10)
    assert deviation(scaled * 8, raw) < 1e-15
    assert deviation(attn_raw, softmax(raw)) < 1e-15
    assert deviation(attn_scaled, softmax(raw / 8)) < 1e-15
    assert attn_raw.max() > attn_scaled.max()


def draws(count: int, chunk: int = 5000):
    generator = np.random.default_rng(0)
    for _ in range(count // chunk):
        queries, keys = generator.standard_normal((chunk, 1, 64)), generator.standard_normal((chunk, 10, 64))
        yield (queries @ keys.transpose(0, 2, 1))[:, 0]


def test_e65_and_e48_distribution_of_the_demo_over_40_000_draws():
    scores = np.concatenate(list(draws(40_000)))
    variance = scores.var(axis=1)
    assert variance.mean() == pytest.approx(57.6, abs=0.5)  # 64 x 9/10: var() of ten values divides by ten
    assert np.percentile(variance, [5, 95]) == pytest.approx([20, 113], abs=1.5)
    assert ((variance >= 60) & (variance <= 70)).mean() == pytest.approx(0.116, abs=0.006)
    assert ((variance / 64 >= 0.8) & (variance / 64 <= 1.2)).mean() < 1 / 3
    assert s1_sqrt_dk.softmax(scores).max(1).mean() == pytest.approx(0.865, abs=0.005)
    top = s1_sqrt_dk.softmax(scores / 8).max(1)
    assert top.mean() == pytest.approx(0.32, abs=0.005)
    assert (top <= 0.18).mean() < 0.05, "the nearly flat row that the seed shows as typical"


# --- self-attention -------------------------------------------------------------------------------------------------


def test_e19_it_finds_itself():
    tokens, embeddings, output, weights = s1_self_attention.demo()
    it, cat = tokens.index("it"), tokens.index("cat")
    assert weights[it] == pytest.approx([0.071, 0.096, 0.028, 0.550, 0.068, 0.187], abs=6e-4)
    assert weights.argmax(1).tolist() == list(range(6)), "each token's own key wins"
    assert np.argsort(-weights[it])[2] == cat, "third, after itself and tired"
    assert deviation(output, softmax(embeddings @ embeddings.T / np.sqrt(8)) @ embeddings) < 1e-14


def test_e20_equivariant_and_not_invariant():
    x, order = np.random.randn(6, 8), np.array([3, 1, 5, 0, 2, 4])
    output, weights = s1_self_attention.self_attention(x, d_k=8)
    moved, moved_weights = s1_self_attention.self_attention(x[order], d_k=8)
    assert deviation(moved, output[order]) < 1e-12
    assert deviation(moved_weights, weights[order][:, order]) < 1e-12
    assert deviation(moved, output) > 0.1


def test_e20_scores_are_symmetric_only_when_query_and_key_share_their_matrix():
    x = np.random.randn(1, 5, 8)
    mha = s1_multi_head.MultiHeadAttention(8, 1)

    def scores():
        weights = np.log(mha.forward(x)[1][0, 0])  # scores up to a constant in each row
        return (
            weights - np.diag(weights)[:, None] + np.diag((x @ mha.W_Q @ (x @ mha.W_K).transpose(0, 2, 1))[0])[:, None]
        )

    assert deviation(scores(), scores().T) > 0.1
    mha.W_K = mha.W_Q
    both = (x @ mha.W_Q @ (x @ mha.W_K).transpose(0, 2, 1))[0]
    assert deviation(both, both.T) < 1e-14
    weights = s1_self_attention.self_attention(x[0], d_k=8)[1]
    assert deviation(weights, weights.T) > 0.1, (
        "the weights are not symmetric even then: each row has its own denominator"
    )


def test_e47_linear_in_v_for_fixed_weights_but_not_in_x():
    x = np.random.randn(4, 8)
    output, weights = s1_self_attention.self_attention(x, d_k=8)
    assert deviation(weights @ (2 * x), 2 * output) < 1e-14
    assert deviation(s1_self_attention.self_attention(2 * x, d_k=8)[0], 2 * output) > 0.01


# --- multi-head attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, causal(5)])
def test_multi_head_equals_head_by_head(mask):
    mha, x = s1_multi_head.MultiHeadAttention(8, 2), np.random.randn(3, 5, 8)
    output, weights = mha.forward(x, mask=mask)
    heads = []
    for head, columns in enumerate((slice(0, 4), slice(4, 8))):
        q, k, v = x @ mha.W_Q[:, columns], x @ mha.W_K[:, columns], x @ mha.W_V[:, columns]
        expected = softmax(np.einsum("btd,bsd->bts", q, k) / 2 + (0 if mask is None else mask))
        assert deviation(weights[:, head], expected) < 1e-14
        heads.append(expected @ v)
    assert deviation(output, np.concatenate(heads, -1) @ mha.W_O) < 1e-14


def test_multi_head_has_1048576_parameters():
    assert s1_multi_head.demo() == 1_048_576


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_e49_a_single_head_has_as_many(heads: int):
    mha = s1_multi_head.MultiHeadAttention(512, heads)
    assert mha.W_Q.size + mha.W_K.size + mha.W_V.size + mha.W_O.size == 1_048_576


def test_multi_head_refuses_a_width_that_the_heads_do_not_divide():
    with pytest.raises(AssertionError, match="must be divisible"):
        s1_multi_head.MultiHeadAttention(10, 3)


def test_e31_there_is_no_cross_attention_mode():
    assert list(inspect.signature(s1_multi_head.MultiHeadAttention.forward).parameters) == ["self", "x", "mask"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'encoder_output'"):
        s1_multi_head.MultiHeadAttention(8, 2).forward(np.ones((1, 3, 8)), encoder_output=np.ones((1, 4, 8)))


def test_e18_the_scale_is_he_and_not_xavier():
    he, xavier = 0.0625, 0.0442
    assert np.sqrt(2 / 512) == he
    assert np.sqrt(2 / (512 + 512)) == pytest.approx(xavier, abs=5e-5)
    mha = s1_multi_head.MultiHeadAttention(512, 8)
    for matrix in (mha.W_Q, mha.W_K, mha.W_V, mha.W_O):
        assert matrix.std() == pytest.approx(he, rel=0.01)


def test_e33_a_boolean_mask_given_to_the_additive_listing_forbids_nothing():
    mha, x = s1_multi_head.MultiHeadAttention(8, 2), np.random.randn(1, 4, 8)
    weights = mha.forward(x, mask=np.tril(np.ones((4, 4))))[1]
    assert (weights > 0).all()


def test_e30_a_row_masked_altogether_is_nan_with_infinity():
    mha, x, mask = s1_multi_head.MultiHeadAttention(8, 2), np.random.randn(1, 4, 8), causal(4)
    mask[2] = -np.inf
    with np.errstate(invalid="ignore"):
        output, _ = mha.forward(x, mask=mask)
    assert np.isnan(output[0, 2]).all()
    assert np.isfinite(output[0, [0, 1, 3]]).all()


# --- sinusoidal positions -------------------------------------------------------------------------------------------


def exact_encoding(positions: np.ndarray, d_model: int) -> np.ndarray:
    angle = positions[:, None] / 10000.0 ** (2 * (np.arange(d_model) // 2) / d_model)
    return np.where(np.arange(d_model) % 2 == 0, np.sin(angle), np.cos(angle))


def test_sinusoidal_equals_the_formula_in_float32():
    pe, _, _ = s1_sinusoidal.demo()
    assert pe.shape == (60, 128)
    assert pe[0].tolist() == [0, 1] * 64
    assert pe[5, :4] == pytest.approx([-0.959, 0.284, -0.928, -0.373], abs=6e-4)
    assert deviation(pe, exact_encoding(np.arange(60), 128)) < 1e-5  # float32 angles up to 59


def test_e03_the_first_pair_is_the_fastest_wave():
    pe = s1_sinusoidal.get_sinusoidal_positional_encoding(2, 128)
    angle = np.arctan2(pe[1, 0::2], pe[1, 1::2])  # turned by one position
    wavelength = 2 * np.pi / angle
    assert (np.diff(wavelength) > 0).all()
    assert wavelength[0] == pytest.approx(2 * np.pi, rel=1e-6)
    assert wavelength[-1] == pytest.approx(54_410, rel=1e-4)  # 10000^(126/128) x 2 pi


def test_e21_inner_products_are_equal_for_minus_k_as_well():
    pe, dot1, dot2 = s1_sinusoidal.demo()
    assert f"{dot1:.3f} {dot2:.3f} {pe[5] @ pe[2]:.3f}" == "52.186 52.186 52.186"
    assert 1e-7 < abs(dot1 - dot2) < 2e-6, "not 0: the angles are float32"
    exact = exact_encoding(np.arange(9), 128)
    assert abs(exact[0] @ exact[3] - exact[5] @ exact[8]) < 1e-13


def test_e21_the_linear_map_is_a_separate_fact():
    positions, shift = np.arange(60), 3
    theta = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    shifted = np.zeros((128, 128))
    for i, angle in enumerate(shift * theta):
        rows = slice(2 * i, 2 * i + 2)
        shifted[rows, rows] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    error = exact_encoding(positions, 128) @ shifted.T - exact_encoding(positions + shift, 128)
    assert np.abs(error).max() < 1e-14
    pe = s1_sinusoidal.get_sinusoidal_positional_encoding(63, 128)
    assert np.abs(pe[:60] @ shifted.T - pe[shift:]).max() < 1e-5, "the listing, in float32"


def test_e21_neither_survives_learned_projections():
    pe = exact_encoding(np.arange(9), 16)
    w_q, w_k = np.random.randn(16, 16), np.random.randn(16, 16)
    scores = (pe @ w_q) @ (pe @ w_k).T
    assert abs(scores[0, 3] - scores[5, 8]) > 0.1


def test_e22_defined_at_every_length():
    longer = s1_sinusoidal.get_sinusoidal_positional_encoding(4096, 16)
    assert np.abs(longer).max() <= 1
    assert np.array_equal(longer[:512], s1_sinusoidal.get_sinusoidal_positional_encoding(512, 16))


def test_e63_the_index_runs_to_255():
    pe = s1_sinusoidal.get_sinusoidal_positional_encoding(2, 512)
    denominator = 1 / np.arctan2(pe[1, 0::2], pe[1, 1::2])
    assert denominator.shape == (256,)
    assert denominator[[254, 255]].round().tolist() == [9306, 9647]


# --- rotary positions -----------------------------------------------------------------------------------------------


def tables(dim: int, length: int, base: float = 10000.0):
    return s1_rope_torch.RotaryEmbedding(dim, length, base)(None, length)


def test_pair_by_pair_golden_values_and_matrix():
    cos, sin = tables(4, 8)
    got = s1_rope_pairs.rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), 1, 4, cos, sin)
    assert got.numpy() == pytest.approx([-1.143, 1.922, 2.960, 4.030], abs=6e-4)
    cos, sin = tables(8, 50)
    x = torch.randn(8, dtype=torch.float64)
    blocks = [torch.stack([torch.stack([c, -s]), torch.stack([s, c])]) for c, s in zip(cos[7], sin[7], strict=True)]
    assert deviation(s1_rope_pairs.rotate(x, 7, 8, cos, sin), torch.block_diag(*blocks).double() @ x) < 1e-14


def test_e02_golden_values_of_the_two_layouts_and_of_their_mixture():
    x = torch.tensor([[[[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]]])
    cos, sin = tables(4, 2)
    mixed, _ = s1_rope_torch.apply_rotary_pos_emb(x, x, cos, sin)
    assert mixed[0, 0, 1].numpy() == pytest.approx([-1.984, -2.285, 3.010, 4.020], abs=6e-4)
    halves = x * torch.cat([cos, cos], -1) + s1_rope_torch.rotate_half(x) * torch.cat([sin, sin], -1)
    assert halves[0, 0, 1].numpy() == pytest.approx([-1.984, 1.960, 2.462, 4.020], abs=6e-4)
    pairs = torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)  # what the comment on rotate_half claims
    pairs = x * cos.repeat_interleave(2, -1) + pairs * sin.repeat_interleave(2, -1)
    assert pairs[0, 0, 1].numpy() == pytest.approx([-1.143, 1.922, 2.960, 4.030], abs=6e-4)


def test_e02_rotate_half_does_not_do_what_its_comment_says():
    assert s1_rope_torch.rotate_half(torch.tensor([0.0, 1, 2, 3])).tolist() == [-2, -3, 0, 1]  # not [-1, 0, -3, 2]


def test_e02_the_listing_is_no_rotation():
    q, k = torch.randn(1, 1, 1, 8).expand(1, 1, 64, 8), torch.randn(1, 1, 1, 8).expand(1, 1, 64, 8)
    q_rope, k_rope = s1_rope_torch.apply_rotary_pos_emb(q, k, *tables(8, 64))
    norms = q_rope[0, 0].norm(dim=-1)
    assert float((norms / norms[0] - 1).abs().max()) > 0.05, "the norm changes with the position"
    scores = [float(q_rope[0, 0, m] @ k_rope[0, 0, m + 3]) for m in (0, 1, 5, 50)]
    assert max(scores) - min(scores) > 0.5, "the score changes with the absolute position at one offset"


def test_e02_the_seeds_example_runs_and_so_hides_the_fault():
    q, k, q_rope, k_rope = s1_rope_torch.demo()
    assert q_rope.shape == k_rope.shape == (2, 32, 512, 128)
    assert torch.equal(q_rope[:, :, 0], q[:, :, 0])
    assert torch.equal(k_rope[:, :, 0], k[:, :, 0])
    assert deviation(q_rope.norm(dim=-1), q.norm(dim=-1)) > 0.01


def test_e59_the_tables_are_saved_with_the_model():
    module = s1_rope_torch.RotaryEmbedding(8, 16)
    assert set(module.state_dict()) == {"cos_cached", "sin_cached"}
    with pytest.raises(RuntimeError, match="size mismatch for cos_cached"):
        s1_rope_torch.RotaryEmbedding(8, 32).load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        torch.nn.Module().load_state_dict(module.state_dict())


def test_e59_a_cached_step_gets_the_angles_of_position_0():
    module = s1_rope_torch.RotaryEmbedding(8, 16)
    assert list(inspect.signature(module.forward).parameters) == ["x", "seq_len"]
    token = torch.randn(1, 1, 1, 8)
    alone, _ = s1_rope_torch.apply_rotary_pos_emb(token, token, *module(None, 1))
    in_sequence, _ = s1_rope_torch.apply_rotary_pos_emb(token.expand(1, 1, 5, 8), token, *module(None, 5))
    assert torch.equal(alone, token)
    assert deviation(in_sequence[:, :, 4:], alone) > 0.1


def test_e59_beyond_max_seq_len_it_fails_by_broadcasting():
    module = s1_rope_torch.RotaryEmbedding(8, 16)
    x = torch.randn(1, 1, 17, 8)
    cos, sin = module(None, 17)
    assert cos.shape == (16, 4), "no error here"
    with pytest.raises(RuntimeError, match=r"size of tensor a \(17\) must match the size of tensor b \(16\)"):
        s1_rope_torch.apply_rotary_pos_emb(x, x, cos, sin)


def theta_of(dim: int, base: float) -> np.ndarray:
    cos, sin = tables(dim, 2, base)
    return torch.atan2(sin[1], cos[1]).double().numpy()


def test_e10_e12_e13_values_of_theta_in_the_tables():
    theta = theta_of(128, 10000.0)
    assert theta[[0, 1, 2, 30]] == pytest.approx([1, 0.865964, 0.749894, 0.0133352], rel=1e-5)
    assert theta[[60, 63]] == pytest.approx([1.77828e-4, 1.15478e-4], rel=1e-5)  # 1.15e-4, far from base^-2 = 1e-8
    assert theta_of(64, 10000.0)[-1] == pytest.approx(1.334e-4, rel=1e-3)
    assert f"{theta[1]:.4f} {theta[63]:.5f}" == "0.8660 0.00012"  # the seed prints 0.8659 and 0.00011
    assert np.degrees(theta[0]) == pytest.approx(57.3, abs=0.01), "radians"


def test_e62_a_larger_base_leaves_the_first_pair_alone():
    ratio = theta_of(128, 500_000.0) / theta_of(128, 10000.0)
    assert ratio[0] == 1
    assert (np.diff(ratio) < 0).all()


# --- feed-forward, layer norm, residual -----------------------------------------------------------------------------


def test_feed_forward_equals_torch_and_has_2099712_parameters():
    ffn, total = s1_feed_forward.demo()
    assert (ffn.W1.size, ffn.W2.size, total) == (1_048_576, 1_048_576, 2_099_712)
    small, x = s1_feed_forward.FeedForward(6, 24), np.random.randn(2, 3, 6)
    small.b1, small.b2 = np.random.randn(24), np.random.randn(6)
    w1, w2, b1, b2, given = (torch.from_numpy(a) for a in (small.W1.T, small.W2.T, small.b1, small.b2, x))
    assert (
        deviation(small.forward(x), functional.linear(functional.relu(functional.linear(given, w1, b1)), w2, b2))
        < 1e-14
    )


def test_layer_norm_equals_torch():
    norm, x = s1_layer_norm.LayerNorm(12), 3 + np.random.randn(2, 5, 12)
    norm.gamma, norm.beta = np.random.randn(12), np.random.randn(12)
    gamma, beta = torch.from_numpy(norm.gamma), torch.from_numpy(norm.beta)
    assert deviation(norm.forward(x), functional.layer_norm(torch.from_numpy(x), (12,), gamma, beta, eps=1e-6)) < 1e-13
    sublayer = np.random.randn(2, 5, 12)
    assert np.array_equal(s1_layer_norm.add_and_norm(x, sublayer, norm), norm.forward(x + sublayer))


def test_e34_the_residual_demo_keeps_the_residual_and_drops_the_sublayer():
    x, sublayer, without, with_residual = s1_layer_norm.demo()
    assert without[0, 0] == pytest.approx([-1.342, -0.447, 0.447, 1.342], abs=6e-4)
    assert np.array_equal(without, s1_layer_norm.LayerNorm(4).forward(x)), "this is the residual alone"
    assert with_residual[0, 0] == pytest.approx([-1.256, -0.611, 0.542, 1.325], abs=6e-4)  # first value not near 1
    true_without = s1_layer_norm.LayerNorm(4).forward(sublayer)
    assert true_without[0, 0] == pytest.approx([1.153, -1.363, 0.734, -0.524], abs=6e-4)
