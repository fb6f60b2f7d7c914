"""Feed-forward networks, tying, and the rules by which sizes are chosen and parameters are estimated."""

import io
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import qkv
from qkv import config as c
from qkv.reference import minigpt

from .small import Run, array, block, both, decoder, deviation, nn, tokens, torch_model, weights_of

# --- Feed-forward -----------------------------------------------------------------------------------------------------


def through(run: Run, ffn: c.FeedForward, x: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """ffn(x) for vectors x (T, D): a model of one layer whose attention is silent, less the residual."""
    cfg = decoder(block(ffn=ffn, norm=c.NoNorm()), n_layers=1, norm=c.NoNorm(), vocab_size=len(x), d_model=x.shape[1])
    weights = {name: np.zeros(shape) for name, (shape, _) in cfg.parameters().items()}
    weights |= {f"decoder.layers.0.ffn.{name}": w for name, w in tensors.items()}
    weights["embed.tokens.weight"] = x
    return run(cfg, weights, np.arange(len(x))[None]).hidden[0] - x


def activated(run: Run, activation: str, x: np.ndarray) -> np.ndarray:
    """The activation of each number of x, through a network whose matrices are the identity."""
    identity = np.eye(2)
    tensors = {"up_proj.weight": identity, "down_proj.weight": identity}
    return through(run, c.Dense(d_ff=2, activation=activation), np.stack([x, 0 * x], axis=1), tensors)[:, 0]


def n_ffn(cfg: c.ModelConfig) -> int:
    return sum(p.size for name, p in cfg.shapes().items() if ".layers.0.ffn." in name)


def test_feed_forward_of_512_and_2048_has_2099712_parameters():
    for activation in ("relu", "gelu", "gelu-tanh"):
        cfg = decoder(block(ffn=c.Dense(d_ff=2048, activation=activation, bias=True)), d_model=512)
        assert n_ffn(cfg) == 2_099_712 == 2 * 512 * 2048 + 2048 + 512


@both
def test_feed_forward_is_its_formula(run: Run):
    rng = np.random.default_rng(0)
    x, up, down = rng.standard_normal((5, 6)), rng.standard_normal((10, 6)), rng.standard_normal((6, 10))
    up_bias, down_bias = rng.standard_normal(10), rng.standard_normal(6)
    tensors = {"up_proj.weight": up, "up_proj.bias": up_bias, "down_proj.weight": down, "down_proj.bias": down_bias}
    expected = np.maximum(x @ up.T + up_bias, 0) @ down.T + down_bias
    assert deviation(through(run, c.Dense(d_ff=10, activation="relu", bias=True), x, tensors), expected) < 1e-13


@both
def test_feed_forward_gelu_by_tanh_and_by_erf(run: Run):
    """The constants 0.044715 and sqrt(2/pi); the two forms differ by at most 5e-4."""
    x = np.linspace(-6, 6, 301)
    by_tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    by_erf = np.array([0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x])
    assert deviation(activated(run, "gelu-tanh", x), by_tanh) < 1e-13
    assert deviation(activated(run, "gelu", x), by_erf) < 1e-13
    assert 1e-4 < np.abs(by_tanh - by_erf).max() < 5e-4


@both
def test_feed_forward_swiglu_has_three_matrices(run: Run):
    rng = np.random.default_rng(0)
    x, gate, up, down = (rng.standard_normal(shape) for shape in ((5, 6), (10, 6), (10, 6), (6, 10)))
    tensors = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    swish = (x @ gate.T) / (1 + np.exp(-(x @ gate.T)))
    expected = (swish * (x @ up.T)) @ down.T
    assert deviation(through(run, c.Gated(d_ff=10), x, tensors), expected) < 1e-13
    assert n_ffn(decoder(block(ffn=c.Gated(d_ff=10)))) == 3 * 16 * 10


# --- Tying ------------------------------------------------------------------------------------------------------------


def test_weight_tying_is_one_storage_and_one_saved_tensor():
    tied, untied = (decoder(head=c.LanguageModel(tied=t)) for t in (True, False))
    assert untied.n_parameters - tied.n_parameters == 23 * 16, "saves V d"
    model = torch_model(tied, weights_of(tied))
    assert sum(p.numel() for p in model.parameters()) == tied.n_parameters
    assert [n for n in model.state_dict() if "head" in n or "embed" in n] == ["embed.tokens.weight"]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved.values()}
    assert sum(storages.values()) == 8 * tied.n_parameters


@both
def test_weight_tying_uses_one_matrix_at_both_ends(run: Run):
    tied, untied = (decoder(head=c.LanguageModel(tied=t)) for t in (True, False))
    weights, ids = weights_of(tied), tokens(1, 5)
    copied = weights | {"head.weight": weights["embed.tokens.weight"]}
    assert deviation(run(tied, weights, ids).logits, run(untied, copied, ids).logits) < 1e-14


def test_weight_tying_adds_both_gradients():
    """The one gradient is the sum of those that two matrices with the same numbers would have."""
    tied, untied = (decoder(head=c.LanguageModel(tied=t)) for t in (True, False))
    weights, ids = weights_of(tied), torch.from_numpy(tokens(1, 6))
    one = torch_model(tied, weights)
    two = torch_model(untied, weights | {"head.weight": weights["embed.tokens.weight"]})
    for model in (one, two):
        functional.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:]).backward()
    both_parts = two.embed.tokens.weight.grad + two.head.weight.grad
    assert deviation(one.embed.tokens.weight.grad, both_parts) < 1e-13
    assert not torch.equal(one.embed.tokens.weight.grad, two.head.weight.grad)


# --- Rules and estimates ----------------------------------------------------------------------------------------------

LECTURE_3 = {  # d_model, heads, layers, d_ff
    "gpt2": (768, 12, 12, 3072),
    "gpt2-xl": (1600, 25, 48, 6400),
    "llama-2-7b": (4096, 32, 32, 11_008),
    "llama-2-70b": (8192, 64, 80, 28_672),
    "llama-3-405b": (16_384, 128, 126, 53_248),
}


def shape(name: str) -> tuple[int, int, int, int]:
    cfg = qkv.preset(name)
    (layer,) = cfg.decoder.layers
    return cfg.d_model, layer.attention.n_heads, cfg.decoder.n_layers, layer.ffn.d_ff


def outside_embeddings(name: str) -> int:
    """Parameters without token and position tables and the head."""
    shapes = qkv.preset(name).shapes()
    return sum(p.size for key, p in shapes.items() if not key.startswith(("embed.", "head.")))


def estimate(name: str) -> int:
    """12 L d^2."""
    cfg = qkv.preset(name)
    return 12 * cfg.decoder.n_layers * cfg.d_model**2


def test_hyperparameter_rules_config_table():
    assert {name: shape(name) for name in LECTURE_3} == LECTURE_3
    millions = {"gpt2": 124, "gpt2-xl": 1_558, "llama-2-7b": 6_738, "llama-2-70b": 68_977, "llama-3-405b": 405_853}
    assert {name: round(qkv.preset(name).n_parameters / 1e6) for name in LECTURE_3} == millions


def test_hyperparameter_rules_heads_are_64_or_128_wide_in_the_table():
    widths = {name: d // heads for name, (d, heads, _, _) in LECTURE_3.items()}
    assert widths == {"gpt2": 64, "gpt2-xl": 64, "llama-2-7b": 128, "llama-2-70b": 128, "llama-3-405b": 128}


def test_e58_depth_and_vocabulary_are_habits():
    ratios = {name: d / n_layers for name, (d, _, n_layers, _) in LECTURE_3.items()}
    expected = {"gpt2": 64, "gpt2-xl": 33, "llama-2-7b": 128, "llama-2-70b": 102, "llama-3-405b": 130}
    assert {name: round(ratio) for name, ratio in ratios.items()} == expected
    assert qkv.preset("bloom-176b").vocab_size == 250_880


def test_e71_d_ff_is_8_thirds_of_d_only_in_some():
    found = {name: d_ff / d for name, (d, _, _, d_ff) in LECTURE_3.items()}
    assert found == {"gpt2": 4, "gpt2-xl": 4, "llama-2-7b": 2.6875, "llama-2-70b": 3.5, "llama-3-405b": 3.25}
    assert abs(2.6875 - 8 / 3) < 0.03


@pytest.mark.parametrize(
    ("name", "guess", "exact", "percent"),
    [("llama-2-7b", 6.4425, 6.4763, -0.5), ("llama-2-70b", 64.42, 68.45, -5.9), ("llama-3-405b", 405.87, 401.65, 1.05)],
)
def test_parameter_estimate_beside_the_exact_count(name: str, guess: float, exact: float, percent: float):
    assert estimate(name) / 1e9 == pytest.approx(guess, abs=0.005)
    assert outside_embeddings(name) / 1e9 == pytest.approx(exact, abs=0.005)
    assert 100 * (estimate(name) / outside_embeddings(name) - 1) == pytest.approx(percent, abs=0.05)


def test_parameter_estimate_with_the_embedding_of_gpt_2():
    cfg = qkv.preset("gpt2")
    assert estimate("gpt2") + cfg.vocab_size * cfg.d_model == 123_532_032
    assert cfg.n_parameters == 124_439_808


def test_e27_swiglu_has_three_matrices_of_8_thirds_d_and_untied_models_two_of_v_d():
    cfg = qkv.preset("llama-7b")
    layer = sum(p.size for name, p in cfg.shapes().items() if ".layers.0." in name) - 2 * 4096  # less two norms
    assert layer / 4096**2 == 12.0625
    assert n_ffn(cfg) == 3 * 11_008 * 4096
    assert cfg.n_parameters - outside_embeddings("llama-7b") == 2 * 32_000 * 4096
    plain = qkv.preset("gpt2")
    matrices = sum(p.size for n, p in plain.shapes().items() if ".layers.0." in n and n.endswith("proj.weight"))
    assert matrices == 12 * 768**2


def test_parameter_split_two_thirds_are_feed_forward():
    cfg = qkv.preset("gpt2")
    matrices = {n: p.size for n, p in cfg.shapes().items() if ".layers.0." in n and n.endswith("proj.weight")}
    ffn = sum(size for name, size in matrices.items() if ".ffn." in name)
    assert ffn == 2 * (sum(matrices.values()) - ffn)
    assert round(100 * ffn / sum(matrices.values())) == 67


# --- MiniGPT ----------------------------------------------------------------------------------------------------------


def mini_gpt_config() -> c.ModelConfig:
    """The sizes of the listing."""
    attention = c.MultiHead(n_heads=4, head_dim=16, pattern=c.Causal())
    layer = block(attention=attention, ffn=c.Dense(d_ff=256, activation="relu"), norm=c.LayerNorm(eps=1e-6))
    return decoder(
        layer,
        norm=c.LayerNorm(eps=1e-6),
        vocab_size=100,
        d_model=64,
        max_seq_len=16,
        embedding=c.Embedding(positions=c.Learned()),
        head=c.LanguageModel(tied=False),
    )


@both
def test_mini_gpt_is_a_model_of_the_tree(run: Run):
    config, cfg = minigpt.MiniGPTConfig(), mini_gpt_config()
    assert cfg.n_parameters == 112_768
    weights = minigpt.init(config, seed=0)
    assert {name: w.shape for name, w in weights.items()} == {n: s for n, (s, _) in cfg.parameters().items()}
    ids = tokens(2, 16, size=100)
    assert deviation(run(cfg, weights, ids).logits, minigpt.forward(config, weights, ids)) < 1e-12


def test_mini_gpt_learns():
    """Below ln 100 = 4.605, and a batch by heart: what it has learned, qkv.nn says as well."""
    config, ids = minigpt.MiniGPTConfig(), tokens(4, 17, size=100)
    weights = minigpt.init(config, seed=0)
    losses = minigpt.train(config, weights, [ids] * 120, minigpt.AdamW(learning_rate=3e-3))
    assert losses[0] == pytest.approx(math.log(100), rel=0.02)
    assert losses[-1] < 0.05
    logits = torch.from_numpy(nn(mini_gpt_config(), weights, ids[:, :-1]).logits)
    loss = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(ids[:, 1:]).flatten())
    assert float(loss) < 0.05


def test_e29_the_exact_count_of_mini_gpt_and_of_gpt_3():
    """The listing's counter prints 112,640: it leaves out the final norm."""
    shapes = minigpt.shapes(minigpt.MiniGPTConfig())
    total = sum(math.prod(s) for s in shapes.values())
    final = sum(math.prod(s) for name, s in shapes.items() if name.startswith("decoder.norm"))
    assert (total, total - final) == (112_768, 112_640)
    assert round(qkv.preset("gpt-3-175b").n_parameters / total, -4) == 1_550_000


def test_e29_gradients_by_hand_equal_those_of_the_model():
    config, cfg = minigpt.MiniGPTConfig(), mini_gpt_config()
    weights, ids = minigpt.init(config, seed=0), tokens(2, 9, size=100)
    _, gradients = minigpt.loss_and_gradients(config, weights, ids)
    model = torch_model(cfg, weights)
    there = torch.from_numpy(ids)
    functional.cross_entropy(model(there[:, :-1]).logits.flatten(0, 1), there[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert deviation(array(parameter.grad), gradients[name]) < 1e-10, name
