"""Norms, residuals, and what their order does to gradients."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from qkv import config as c
from qkv.nn import Transformer, implementation, initialise

from .small import Run, block, both, decoder, deviation, encoder, heads, normal, tokens, weights_of


def normed(run: Run, norm: c.Norm, x: np.ndarray, tensors: dict | None = None, residual: np.ndarray | None = None):
    """norm(x + residual) for vectors x (T, D): the final norm of a model whose only other tensor is a bias."""
    length, d_model = x.shape
    ffn = c.Dense(d_ff=1, activation="relu", bias=True)
    silent = block(attention=heads(c.Bidirectional()), ffn=ffn, norm=c.NoNorm())
    cfg = encoder(silent, n_layers=1, norm=norm, vocab_size=length, d_model=d_model)
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    if "encoder.norm.weight" in weights:
        weights["encoder.norm.weight"] += 1
    weights |= {"embed.tokens.weight": x} | {f"encoder.norm.{name}": w for name, w in (tensors or {}).items()}
    if residual is not None:
        weights["encoder.layers.0.ffn.down_proj.bias"] = residual
    return run(cfg, weights, np.arange(length)[None]).hidden[0]


# --- LayerNorm and RMSNorm --------------------------------------------------------------------------------------------


@both
def test_layer_norm_and_rms_norm_are_their_formulas(run: Run):
    x, weight, bias = 3 + normal(5, 12), normal(12, seed=1), normal(12, seed=2)
    centred = x - x.mean(1, keepdims=True)
    expected = weight * centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) + bias
    assert deviation(normed(run, c.LayerNorm(eps=1e-5), x, {"weight": weight, "bias": bias}), expected) < 1e-13
    expected = weight * x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)
    assert deviation(normed(run, c.RMSNorm(eps=1e-5), x, {"weight": weight}), expected) < 1e-13


@both
def test_layer_norm_and_rms_norm_have_eps_inside_the_root(run: Run):
    """Mean square and variance 1e-6 like eps: the result is 1/sqrt(2), not 1/2."""
    x = np.array([[1e-3, -1e-3, 1e-3, -1e-3]])
    for norm in (c.LayerNorm(eps=1e-6), c.RMSNorm(eps=1e-6)):
        assert np.abs(normed(run, norm, x)) == pytest.approx(np.full((1, 4), 0.5**0.5), rel=1e-12)


@both
def test_layer_norm_and_rms_norm_use_the_population_variance(run: Run):
    out = normed(run, c.LayerNorm(eps=1e-12), normal(3, 4))
    assert out.var(axis=1) == pytest.approx(np.ones(3))  # NumPy's var divides by the number of values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [c.LayerNorm(), c.RMSNorm(), c.RMSNorm(cast="after")], ids=["layer", "rms", "gemma"])
def test_layer_norm_and_rms_norm_accumulate_in_float32(norm: c.Norm, dtype: torch.dtype):
    """4096 numbers around 300, whose squares float16 cannot hold: only the result is rounded, by half a unit."""
    module = implementation(type(norm))(norm, 4096).to(dtype)
    for name, parameter in module.named_parameters():
        torch.nn.init.constant_(parameter, float(name == "weight"))
    x = torch.from_numpy(300 + 30 * normal(4, 4096)).to(dtype)
    wide = x.double()
    centred = wide - wide.mean(1, keepdim=True) if isinstance(norm, c.LayerNorm) else wide
    expected = centred / (centred.square().mean(1, keepdim=True) + norm.eps).sqrt()
    found = module(x)
    assert found.dtype == dtype
    assert deviation(found, expected) < 0.501 * torch.finfo(dtype).eps


@both
def test_e46_rms_norm_does_not_centre(run: Run):
    x = 3 + normal(4, 512)
    out = normed(run, c.RMSNorm(eps=1e-6), x)
    assert (out**2).mean(1) == pytest.approx(np.ones(4), abs=1e-6)
    assert (out.mean(1) > 0.9).all()
    assert (out.var(1) < 0.2).all(), "most of the mean square is the mean"
    shifted = normed(run, c.RMSNorm(eps=1e-6), x + 5)
    assert deviation(shifted, out) > 0.1
    assert deviation(normed(run, c.LayerNorm(), x + 5), normed(run, c.LayerNorm(), x)) < 1e-12


# --- Residuals --------------------------------------------------------------------------------------------------------

X, S = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([0.1, -0.2, 0.05, -0.1])


@both
def test_e34_with_without_and_only_the_residual(run: Run):
    norm = c.LayerNorm(eps=1e-6)
    without_sublayer = normed(run, norm, X)[0]
    assert without_sublayer == pytest.approx([-1.342, -0.447, 0.447, 1.342], abs=5e-4)
    both_parts = normed(run, norm, X, residual=S)[0]
    assert both_parts == pytest.approx([-1.256, -0.611, 0.542, 1.325], abs=5e-4)
    assert abs(both_parts[0] - 1) > 2, "the first value is not near the input's 1.000"
    without_residual = normed(run, norm, 0 * X, residual=S)[0]
    assert without_residual == pytest.approx([1.153, -1.363, 0.734, -0.524], abs=5e-4)


@pytest.mark.parametrize("residual", [c.PreNorm(), c.PostNorm(), c.SandwichNorm(), c.Parallel()], ids=lambda r: r.kind)
@both
def test_add_and_norm_places(run: Run, residual: c.Residual):
    """Sublayers that answer 0: pre-norm paths leave x alone, post-norm normalises it in each sublayer."""
    cfg = encoder(block(attention=heads(c.Bidirectional()), residual=residual), norm=c.NoNorm())
    weights, ids = weights_of(cfg), tokens(1, 4)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", "norm.bias")):
            weights[name] = np.zeros_like(weights[name])
        elif name.endswith("norm.weight"):
            weights[name] = np.ones_like(weights[name])
    x = weights["embed.tokens.weight"][ids[0]]
    found = run(cfg, weights, ids).hidden[0]
    if isinstance(residual, c.PostNorm):
        for _ in range(4):
            centred = x - x.mean(1, keepdims=True)
            x = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)
    assert deviation(found, x) < 1e-14


def one_token(residual: c.Residual) -> tuple[c.ModelConfig, dict[str, np.ndarray]]:
    """A layer for a single token, whose attention is then the linear map o_proj v_proj."""
    cfg = encoder(
        block(attention=heads(c.Bidirectional()), residual=residual), n_layers=1, norm=c.NoNorm(), vocab_size=1
    )
    return cfg, weights_of(cfg)


def jacobian(run: Run, cfg: c.ModelConfig, weights: dict[str, np.ndarray]) -> np.ndarray:
    """d hidden / d embedding by central differences."""
    columns, h = [], 1e-5
    for i in range(16):
        step = np.zeros((1, 16))
        step[0, i] = h
        moved = [weights | {"embed.tokens.weight": weights["embed.tokens.weight"] + sign * step} for sign in (1, -1)]
        up, down = (run(cfg, w, np.zeros((1, 1), dtype=int)).hidden[0, 0] for w in moved)
        columns.append((up - down) / (2 * h))
    return np.stack(columns, axis=1)


@both
def test_e45_one_layer_norm_jacobian_multiplies_both_branches(run: Run):
    """Post-norm: J = N2 (1 + F2) N1 (1 + F1), where N is a norm's Jacobian and F a sublayer's."""
    cfg, weights = one_token(c.PostNorm())
    at = "encoder.layers.0."
    w = {name.removeprefix(at): torch.from_numpy(value) for name, value in weights.items()}
    x = torch.from_numpy(weights["embed.tokens.weight"][0])
    linear = w["attention.o_proj.weight"] @ w["attention.v_proj.weight"]

    def ffn(h: torch.Tensor) -> torch.Tensor:
        return w["ffn.down_proj.weight"] @ (w["ffn.up_proj.weight"] @ h).relu()

    def norm(name: str, h: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(h, (16,), w[f"{name}.weight"], w[f"{name}.bias"])

    d, one = torch.func.jacrev, torch.eye(16, dtype=torch.float64)
    before = x + linear @ x
    middle = norm("attention_norm", before)
    n1, n2 = (d(lambda h, n=n: norm(n, h)) for n in ("attention_norm", "ffn_norm"))
    expected = n2(middle + ffn(middle)) @ (one + d(ffn)(middle)) @ n1(before) @ (one + linear)
    assert deviation(jacobian(run, cfg, weights), expected) < 1e-7


@both
def test_e45_pre_norm_leaves_the_residual_path_without_a_jacobian(run: Run):
    """Sublayers silenced: the derivative of the output is the identity."""
    cfg, weights = one_token(c.PreNorm())
    for name in ("attention.o_proj", "ffn.down_proj"):
        weights[f"encoder.layers.0.{name}.weight"] = np.zeros_like(weights[f"encoder.layers.0.{name}.weight"])
    assert deviation(jacobian(run, cfg, weights), np.eye(16)) < 1e-9


# --- Gradients at the start of training -------------------------------------------------------------------------------


def last_ffn_gradient(residual: c.Residual, n_layers: int, seeds: int = 16) -> float:
    """The norm of the gradient of the last feed-forward matrix at Xavier initialisation, averaged over seeds.

    The loss is that of one token, as in the theorem: deeper, tokens are more alike, and the gradients of many would add
    up where those of a shallow model cancel.
    """
    layer = block(attention=heads(head_dim=16), ffn=c.Dense(d_ff=256, activation="relu"), residual=residual)
    final = c.NoNorm() if isinstance(residual, c.PostNorm) else c.LayerNorm()
    own = c.LanguageModel(tied=False)
    cfg = decoder(layer, n_layers=n_layers, norm=final, d_model=64, head=own, init=c.XavierInit())
    norms = []
    for seed in range(seeds):
        model = Transformer(cfg)
        initialise(model, cfg, seed)
        ids = torch.from_numpy(tokens(1, 17, seed=seed))
        functional.cross_entropy(model(ids[:, :-1]).logits[0, -1:], ids[0, -1:]).backward()
        norms.append(float(model.decoder.layers[-1].ffn.down_proj.weight.grad.norm()))
    return float(np.mean(norms))


@pytest.fixture(scope="module")
def gradients() -> dict[tuple[str, int], float]:
    return {(r.kind, n): last_ffn_gradient(r, n) for r in (c.PreNorm(), c.PostNorm()) for n in (6, 24)}


def test_e44_post_norm_gradients_do_not_depend_on_depth_and_pre_norm_ones_shrink(gradients):
    """Xiong 2020, theorem 1: at the start, the last layer's gradient is O(1) or O(1/sqrt(L))."""
    assert 0.8 < gradients["post", 24] / gradients["post", 6] < 1.25
    assert 1.7 < gradients["pre", 6] / gradients["pre", 24] < 2.6


def test_e44_post_norm_gradients_are_the_larger_ones(gradients):
    assert gradients["post", 24] > 3 * gradients["pre", 24]
