"""Lecture 3's listings: the sound ones against independent formulas, the broken ones failing as the errata say."""

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from .listings import s0_attention, s0_multi_head, s0_norm, s0_rope, s0_swiglu, s0_transformer, s1_causal_mask
from .measure import WithoutPositions, deviation, softmax


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def causal(length: int) -> torch.Tensor:
    return torch.tril(torch.ones(length, length))


# --- 1. attention ---------------------------------------------------------------------------------------------------


def test_projections_are_one_matrix_product_each():
    x, w_q, w_k, w_v = normal(5, 8), normal(8, 3), normal(8, 3), normal(8, 4)
    q, k, v = s0_attention.project(x, w_q, w_k, w_v)
    assert [q.shape, k.shape, v.shape] == [(5, 3), (5, 3), (5, 4)]
    assert deviation(v, np.einsum("td,de->te", x.numpy(), w_v.numpy())) < 1e-14


@pytest.mark.parametrize("mask", [None, causal(6)])
def test_attention_equals_row_by_row_formula(mask):
    q, k, v = normal(2, 6, 4), normal(2, 6, 4), normal(2, 6, 3)
    got = s0_attention.scaled_dot_product_attention(q, k, v, mask)
    expected = np.zeros((2, 6, 3))
    for b in range(2):
        for t in range(6):
            seen = range(6) if mask is None else range(t + 1)
            scores = np.array([float(q[b, t] @ k[b, s]) / 2.0 for s in seen])  # sqrt(d_k) = 2
            expected[b, t] = softmax(scores) @ v[b, list(seen)].numpy()
    assert deviation(got, expected) < 1e-14


def test_attention_equals_torch_with_a_boolean_mask():
    q, k, v = normal(2, 3, 7, 4), normal(2, 3, 7, 4), normal(2, 3, 7, 4)
    got = s0_attention.scaled_dot_product_attention(q, k, v, causal(7))
    assert deviation(got, functional.scaled_dot_product_attention(q, k, v, attn_mask=causal(7).bool())) < 1e-14


def test_scaling_brings_the_variance_of_scores_from_d_k_to_one():
    q, k = normal(20_000, 64), normal(20_000, 64)
    raw = (q * k).sum(-1)
    assert float(raw.var()) == pytest.approx(64, rel=0.05)
    assert float((raw / 64**0.5).var()) == pytest.approx(1, rel=0.05)


def test_e30_a_row_without_an_allowed_key_is_nan_not_zero():
    mask = causal(4)
    mask[2] = 0
    out = s0_attention.scaled_dot_product_attention(normal(1, 4, 4), normal(1, 4, 4), normal(1, 4, 4), mask)
    assert out[0, 2].isnan().all()
    assert not out[0, [0, 1, 3]].isnan().any()


def test_e33_the_other_seeds_mask_read_by_this_one_allows_exactly_the_future():
    q, k, v = normal(1, 5, 4), normal(1, 5, 4), normal(1, 5, 4)
    additive = torch.zeros(5, 5).masked_fill(causal(5) == 0, -math.inf)  # seed 1's intended values
    got = s0_attention.scaled_dot_product_attention(q, k, v, additive)
    future = s0_attention.scaled_dot_product_attention(q, k, v, 1 - causal(5))
    assert torch.equal(got[:, :4], future[:, :4])
    assert got[:, 4].isnan().all()  # the last position has no future


def test_e33_and_e01_the_seeds_two_mask_listings_do_not_fit_either():
    with np.errstate(invalid="ignore"):
        mask = torch.from_numpy(s1_causal_mask.create_causal_mask(5))
    q = normal(1, 5, 4)
    # NaN is not 0 and neither is -inf, so that nothing at all is masked
    got = s0_attention.scaled_dot_product_attention(q, q, q, mask)
    assert torch.equal(got, s0_attention.scaled_dot_product_attention(q, q, q))


def test_e33_pytorch_itself_has_both_conventions():
    x = normal(1, 3, 4)
    hide_last = torch.tensor([[False, False, True]])
    module = nn.MultiheadAttention(4, 1, batch_first=True, dtype=torch.float64)
    weights = module(x, x, x, key_padding_mask=hide_last)[1]
    assert bool((weights[..., 2] == 0).all()), "in MultiheadAttention True is ignored"
    only_last = functional.scaled_dot_product_attention(x, x, x, attn_mask=hide_last.expand(3, 3))
    assert torch.equal(only_last, x[:, 2:].expand(1, 3, 4)), "in scaled_dot_product_attention True is kept"


# --- 2. multi-head attention ----------------------------------------------------------------------------------------


def test_e32_multi_head_is_a_name_error():
    module = s0_multi_head.MultiHeadAttention(8, 2)
    with pytest.raises(NameError, match=r"^name 'causal_mask' is not defined$"):
        module(torch.zeros(1, 3, 8))


@pytest.fixture
def mask_of_six(monkeypatch):
    """The smallest repair of E32: the global that the listing reads."""
    monkeypatch.setattr(s0_multi_head, "causal_mask", causal(6), raising=False)


@pytest.mark.usefixtures("mask_of_six")
def test_multi_head_with_the_global_mask_equals_head_by_head():
    module = s0_multi_head.MultiHeadAttention(8, 2).double()
    x = normal(3, 6, 8)
    w_q, w_k, w_v = module.qkv_proj.weight.chunk(3)
    heads = []
    for rows in (slice(0, 4), slice(4, 8)):
        q, k, v = x @ w_q[rows].T, x @ w_k[rows].T, x @ w_v[rows].T
        heads.append(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert deviation(module(x), torch.cat(heads, -1) @ module.out_proj.weight.T) < 1e-14


@pytest.mark.parametrize("n_heads", [1, 8, 16])
def test_multi_head_has_four_square_matrices_for_any_number_of_heads(n_heads: int):
    module = s0_multi_head.MultiHeadAttention(512, n_heads)
    assert sum(p.numel() for p in module.parameters()) == 1_048_576


@pytest.mark.usefixtures("mask_of_six")
def test_e70_a_width_that_the_heads_do_not_divide_fails_late():
    module = s0_multi_head.MultiHeadAttention(10, 3)  # accepted: d_k is floored to 3, and 3 x 3 is not 10
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        module(torch.zeros(1, 6, 10))


def test_e32_no_listing_calls_apply_rope():
    names = {name for module in (s0_multi_head, s0_transformer) for name in names_used_by(module)}
    assert {"scaled_dot_product_attention", "attention", "arange"} <= names
    assert "apply_rope" not in names


def names_used_by(module):
    for _, cls in inspect.getmembers(module, inspect.isclass):
        for _, function in inspect.getmembers(cls, inspect.isfunction):
            yield from function.__code__.co_names if function.__module__ == module.__name__ else ()


# --- 3. rotary positions --------------------------------------------------------------------------------------------


def test_rope_golden_values():
    got = s0_rope.apply_rope(torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]), torch.tensor([1]))
    assert np.round(got[0, 0, 0].numpy(), 3).tolist() == pytest.approx([-1.143, 1.922, 2.960, 4.030], abs=1e-6)


def test_rope_equals_complex_and_matrix_forms():
    x, positions = normal(1, 1, 7, 8), torch.arange(7, dtype=torch.float64)
    got = s0_rope.apply_rope(x, positions)[0, 0].numpy()
    theta = (1 / 10000.0 ** (torch.arange(0, 8, 2).float() / 8)).double().numpy()  # the listing's own float32 angles
    pairs = x[0, 0].numpy().reshape(7, 4, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * np.outer(np.arange(7), theta))
    assert deviation(got, np.stack([turned.real, turned.imag], -1).reshape(7, 8)) < 1e-14
    for m in range(7):
        matrix = np.zeros((8, 8))
        for i, angle in enumerate(m * theta):
            c, s = np.cos(angle), np.sin(angle)
            matrix[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
        assert deviation(got[m], matrix @ x[0, 0, m].numpy()) < 1e-14


def test_rope_keeps_the_norm_and_the_score_depends_on_the_offset_only():
    q, k = normal(16), normal(16)

    def at(x, position):
        return s0_rope.apply_rope(x[None, None, None], torch.tensor([float(position)], dtype=torch.float64))[0, 0, 0]

    assert float(at(q, 1234).norm()) == pytest.approx(float(q.norm()), rel=1e-14)
    for offset in (-7, 0, 3):
        scores = [float(at(q, m) @ at(k, m + offset)) for m in (0, 1, 5, 50, 3000)]
        assert max(scores) - min(scores) < 1e-12 * float(q.norm() * k.norm())
    assert abs(float(at(q, 0) @ at(k, 1)) - float(at(q, 0) @ at(k, 2))) > 0.1


def test_e24_same_offset_same_score_but_not_the_same_weight():
    q, k = normal(16).expand(1, 1, 6, 16), normal(16).expand(1, 1, 6, 16)
    positions = torch.arange(6, dtype=torch.float64)
    scores = s0_rope.apply_rope(q, positions) @ s0_rope.apply_rope(k, positions).mT / 4
    one_back = scores[0, 0].diagonal(-1)
    assert float(one_back.max() - one_back.min()) < 1e-12
    weights = scores.masked_fill(causal(6) == 0, -math.inf).softmax(-1)[0, 0].diagonal(-1)
    assert (weights.diff() < -0.005).all(), "each further row shares its weight among more keys"


def test_e25_the_score_does_not_fall_with_distance():
    ones = torch.ones(1, 1, 4096, 128, dtype=torch.float64)
    scores = s0_rope.apply_rope(ones, torch.arange(4096, dtype=torch.float64))[0, 0].sum(-1).numpy()
    assert scores[0] == 128
    assert scores.min() == pytest.approx(-16.7, abs=0.05)
    theta = 10000.0 ** (-np.arange(0, 128, 2) / 128)
    exact = 2 * np.cos(np.outer(np.arange(4096), theta)).sum(1)
    assert int((np.diff(exact) > 0).sum()) == 1991
    assert abs(int((np.diff(scores) > 0).sum()) - 1991) <= 2, "float32 angles move a turning point by a step"


# --- 4. SwiGLU ------------------------------------------------------------------------------------------------------


def test_swiglu_equals_its_formula():
    module = s0_swiglu.SwiGLUFFN(6, 10).double()
    x = normal(2, 3, 6)
    gate = x @ module.w_gate.weight.T
    expected = (gate / (1 + (-gate).exp()) * (x @ module.w1.weight.T)) @ module.w2.weight.T
    assert deviation(module(x), expected) < 1e-14


def test_e27_swiglu_has_three_matrices():
    with torch.device("meta"):
        module = s0_swiglu.SwiGLUFFN(4096, 11008)
    assert [p.numel() for p in module.parameters()] == [4096 * 11008] * 3
    assert 256 * math.ceil(8 * 4096 // 3 / 256) == 11008


# --- 5. norms -------------------------------------------------------------------------------------------------------


def test_rmsnorm_equals_torch():
    module = s0_norm.RMSNorm(12).double()
    nn.init.normal_(module.weight)
    x = 3 + normal(2, 5, 12)
    assert deviation(module(x), functional.rms_norm(x, (12,), module.weight, eps=1e-6)) < 1e-14


def test_e46_rmsnorm_does_not_normalise_the_variance():
    out = s0_norm.RMSNorm(512).double()(3 + normal(4, 512))
    assert out.pow(2).mean(-1).tolist() == pytest.approx([1] * 4, abs=1e-6)
    assert (out.var(-1, correction=0) < 0.2).all(), "mean square 1, of which the mean takes 9 tenths"
    assert (out.mean(-1) > 0.9).all()


def test_placement_of_the_norm():
    norm, same = s0_norm.RMSNorm(8).double(), nn.Identity()
    x = 5 * normal(2, 8)

    def silent(hidden):
        return 0 * hidden

    assert torch.equal(s0_norm.pre_norm(x, norm, silent, silent), x), "the residual path of pre-norm meets no norm"
    assert torch.equal(s0_norm.post_norm(x, norm, silent, silent), norm(norm(x)))
    assert torch.equal(s0_norm.pre_norm(x, norm, same, silent), x + norm(x))
    assert torch.equal(s0_norm.post_norm(x, norm, same, silent), norm(norm(2 * x)))


# --- 6. block and model ---------------------------------------------------------------------------------------------


def repaired(n_layers: int) -> s0_transformer.Transformer:
    model = s0_transformer.Transformer(vocab_size=11, d_model=16, n_heads=2, n_layers=n_layers, d_ff=24).double()
    for layer in model.layers:
        layer.attention = WithoutPositions(layer.attention)
    return model


def test_e32_block_and_model_are_a_type_error():
    expected = r"^MultiHeadAttention\.forward\(\) takes 2 positional arguments but 3 were given$"
    with pytest.raises(TypeError, match=expected):
        s0_transformer.TransformerBlock(8, 2, 12)(torch.zeros(1, 3, 8), torch.arange(3))
    with pytest.raises(TypeError, match=expected):
        s0_transformer.Transformer(11, 8, 2, 2, 12)(torch.zeros(1, 3, dtype=torch.long))


def test_e32_positions_stay_on_the_cpu_and_rope_refuses_them():
    with torch.device("meta"):  # stands for any device that is not the CPU
        model = s0_transformer.Transformer(11, 8, 2, 1, 12)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.extend(value.device.type for value in inputs))
    with pytest.raises(TypeError):
        model(torch.zeros(1, 3, dtype=torch.long, device="meta"))
    assert seen == ["meta", "cpu"]
    with pytest.raises(RuntimeError, match="device"):
        s0_rope.apply_rope(torch.zeros(1, 1, 3, 8, device="meta"), torch.arange(3))


@pytest.mark.usefixtures("mask_of_six")
def test_repaired_model_runs_causally_and_every_gradient_is_finite():
    model = repaired(n_layers=2)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    logits = model(tokens)
    assert logits.shape == (1, 6, 11)
    other = model(torch.tensor([[1, 2, 3, 9, 8, 7]]))
    assert torch.equal(logits[:, :3], other[:, :3])
    assert deviation(logits[:, 3:], other[:, 3:]) > 0.01
    functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("n_layers", "blind"), [(1, True), (2, False)])
@pytest.mark.usefixtures("mask_of_six")
def test_e32_and_e69_without_positions_one_causal_layer_is_blind_to_order_and_two_are_not(n_layers, blind):
    model = repaired(n_layers)
    last = model(torch.tensor([[1, 2, 3, 4, 5, 6], [5, 3, 1, 2, 4, 6]]))[:, -1]
    assert (deviation(last[1], last[0]) < 1e-14) is blind
    assert blind or deviation(last[1], last[0]) > 1e-3


def count(vocab_size: int, d_model: int, n_heads: int, n_layers: int, d_ff: int) -> int:
    with torch.device("meta"):
        model = s0_transformer.Transformer(vocab_size, d_model, n_heads, n_layers, d_ff)
    return sum(p.numel() for p in model.parameters())


def test_the_model_has_the_exact_count_of_llama_7b():
    assert count(32_000, 4096, 32, 32, 11008) == 6_738_415_616
    assert count(32_000, 5120, 40, 40, 13824) == 13_015_864_320


def test_e27_a_layer_is_not_12_d_squared_and_an_untied_model_has_two_vocabulary_matrices():
    layer = count(32_000, 4096, 32, 2, 11008) - count(32_000, 4096, 32, 1, 11008) - 2 * 4096
    assert layer / 4096**2 == 12.0625
    assert count(32_000, 4096, 32, 0, 11008) == 2 * 32_000 * 4096 + 4096


@pytest.mark.usefixtures("mask_of_six")
def test_tying_saves_one_matrix_and_shares_its_gradient():
    model = repaired(n_layers=1)
    untied = sum(p.numel() for p in model.parameters())
    model.output.weight = model.embedding.weight  # the statement of the section on weight tying
    assert untied - sum(p.numel() for p in model.parameters()) == 11 * 16
    model(torch.tensor([[1, 2, 3, 4, 5, 6]])).sum().backward()
    assert model.output.weight.grad is model.embedding.weight.grad
