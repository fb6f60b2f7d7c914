"""MiniGPT against torch autograd, torch.optim.AdamW, finite differences, and the seed text's own figures."""

import doctest
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from qkv.reference import minigpt
from qkv.reference.minigpt import AdamW, MiniGPTConfig, forward, generate, init, loss_and_gradients, train

SEED_SIZES = MiniGPTConfig()
SMALL = MiniGPTConfig(vocab_size=11, d_model=12, n_heads=3, n_layers=2, max_seq_len=7, d_ff=20)


def deviation(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over largest absolute value."""
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def random_weights(config: MiniGPTConfig, seed: int) -> dict[str, np.ndarray]:
    """Far from the initial values, where norms are the identity and attention is nearly uniform."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0.3 if len(shape) == 1 else 0.0, 0.5, shape) for name, shape in minigpt.shapes(config).items()
    }


def random_tokens(config: MiniGPTConfig, batch: int, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length))


# --- The independent model: torch's own functions and autograd --------------------------------------------------------


def torch_logits(config: MiniGPTConfig, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, (config.d_model,), w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    batch, length = tokens.shape
    linear = functional.linear
    x = functional.embedding(tokens, w["embed.tokens.weight"]) + w["embed.positions.weight"][:length]
    for i in range(config.n_layers):
        name = f"decoder.layers.{i}"
        h = norm(x, f"{name}.attention_norm")
        q, k, v = (
            linear(h, w[f"{name}.attention.{p}_proj.weight"]).view(batch, length, config.n_heads, -1).transpose(1, 2)
            for p in "qkv"
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(heads.transpose(1, 2).flatten(2), w[f"{name}.attention.o_proj.weight"])
        h = norm(x, f"{name}.ffn_norm")
        x = x + linear(linear(h, w[f"{name}.ffn.up_proj.weight"]).relu(), w[f"{name}.ffn.down_proj.weight"])
    return linear(norm(x, "decoder.norm"), w["head.weight"])


def torch_loss_and_gradients(
    config: MiniGPTConfig, weights: dict[str, np.ndarray], tokens: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    w = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    text = torch.tensor(tokens)
    logits = torch_logits(config, w, text[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(w.values()))
    return loss.item(), {name: gradient.numpy() for name, gradient in zip(w, gradients, strict=True)}


# --- Sizes, names, loss at the start ----------------------------------------------------------------------------------


def test_seed_sizes_have_112768_parameters() -> None:
    weights = init(SEED_SIZES, seed=0)
    assert sum(weight.size for weight in weights.values()) == 112_768
    without_final_norm = sum(w.size for name, w in weights.items() if not name.startswith("decoder.norm"))
    assert without_final_norm == 112_640  # what the seed's counter prints
    assert all(weight.dtype == np.float64 for weight in weights.values())
    assert {name: weight.shape for name, weight in weights.items()} == minigpt.shapes(SEED_SIZES)


@pytest.mark.parametrize("config", [SEED_SIZES, SMALL])
def test_parameter_formula_of_the_sheet(config: MiniGPTConfig) -> None:
    d, vocabulary = config.d_model, config.vocab_size
    per_layer = 4 * d * d + 2 * d * config.d_ff + 4 * d
    formula = 2 * vocabulary * d + config.max_seq_len * d + config.n_layers * per_layer + 2 * d
    assert sum(math.prod(shape) for shape in minigpt.shapes(config).values()) == formula


def test_init_depends_on_the_seed_only() -> None:
    a, b, c = init(SMALL, 1), init(SMALL, 1), init(SMALL, 2)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not np.array_equal(a["head.weight"], c["head.weight"])


def test_initial_loss_is_log_vocab() -> None:
    """A model that knows nothing is uniform over 100 tokens. Its logits have deviation 0.02 * sqrt(64) = 0.16."""
    loss, _ = loss_and_gradients(SEED_SIZES, init(SEED_SIZES, 0), random_tokens(SEED_SIZES, 32, 17, seed=1))
    assert loss == pytest.approx(math.log(100), rel=0.02)


# --- Against torch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, SEED_SIZES])
@pytest.mark.parametrize("length", [2, 5, None])
def test_every_gradient_equals_autograd(config: MiniGPTConfig, length: int | None) -> None:
    weights = random_weights(config, seed=3)
    tokens = random_tokens(config, 3, length or config.max_seq_len + 1, seed=4)
    loss, gradients = loss_and_gradients(config, weights, tokens)
    expected_loss, expected = torch_loss_and_gradients(config, weights, tokens)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert gradients.keys() == expected.keys() == minigpt.shapes(config).keys()
    wrong = {}
    for name in expected:
        # A lone input position attends to itself only: q and k then have no influence, in both implementations.
        if length == 2 and name.endswith(("q_proj.weight", "k_proj.weight")):
            assert np.abs(gradients[name]).max() < 1e-15
            assert np.abs(expected[name]).max() < 1e-15
        elif (error := deviation(gradients[name], expected[name])) > 1e-10:
            wrong[name] = error
    assert not wrong


@pytest.mark.parametrize("config", [SMALL, SEED_SIZES])
def test_logits_equal_torch(config: MiniGPTConfig) -> None:
    weights = random_weights(config, seed=5)
    tokens = random_tokens(config, 2, config.max_seq_len, seed=6)
    expected = torch_logits(config, {name: torch.tensor(w) for name, w in weights.items()}, torch.tensor(tokens))
    assert deviation(forward(config, weights, tokens), expected.numpy()) < 1e-12


def test_adamw_equals_torch() -> None:
    """Five steps; the gradients are those of five different batches, taken at the current weights."""
    weights = random_weights(SMALL, seed=7)
    theirs = {name: torch.tensor(weight) for name, weight in weights.items()}
    groups = [
        {"params": [w for w in theirs.values() if w.ndim == 2], "weight_decay": 0.1},
        {"params": [w for w in theirs.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.95), eps=1e-7)
    ours = AdamW(learning_rate=0.02, beta1=0.8, beta2=0.95, eps=1e-7, weight_decay=0.1)
    for step in range(5):
        _, gradients = loss_and_gradients(SMALL, weights, random_tokens(SMALL, 2, 8, seed=step))
        ours.step(weights, gradients)
        for name, tensor in theirs.items():
            tensor.grad = torch.tensor(gradients[name])
        reference.step()
        for name, tensor in theirs.items():
            assert deviation(weights[name], tensor.numpy()) < 1e-12, (step, name)


# --- Each backward against finite differences -------------------------------------------------------------------------


def assert_gradients(
    function: Callable[..., np.ndarray], backward: Callable[..., Any], inputs: list[np.ndarray], h: float = 1e-5
) -> None:
    """Move one input at a time in a random direction: sum(function . d_out) changes by sum(gradient . direction)."""
    rng = np.random.default_rng(99)
    d_out = rng.normal(size=np.shape(function(*inputs)))
    gradients = backward(d_out, *inputs)
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    assert len(gradients) == len(inputs)
    for index, gradient in enumerate(gradients):
        assert gradient.shape == inputs[index].shape
        direction = rng.normal(size=gradient.shape)
        values = []
        for sign in (1, -1):
            moved = list(inputs)
            moved[index] = inputs[index] + sign * h * direction
            values.append((d_out * function(*moved)).sum())
        measured = (values[0] - values[1]) / (2 * h)
        # Truncation is O(h^2) = 1e-10, rounding eps / h = 2e-11 (2e-9 at h = 1e-7), relative to the sum of the sizes.
        assert abs(measured - (gradient * direction).sum()) < 1e-7 * (1.0 + np.abs(gradient * direction).sum()), index


checked = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
lengths = st.integers(1, 6)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


@checked
@given(seeds, lengths, lengths, lengths)
def test_linear_backward(seed: int, length: int, inputs: int, outputs: int) -> None:
    x, weight = normal(seed, 2, length, inputs), normal(seed, outputs, inputs)
    assert_gradients(minigpt.linear, minigpt.linear_backward, [x, weight])


@checked
@given(seeds, lengths, st.integers(2, 9), st.sampled_from([0.01, 1.0, 100.0]))
def test_layernorm_backward(seed: int, length: int, width: int, size: float) -> None:
    """At size 0.01 eps is some percent of the variance. Features are kept 2 sizes apart, so that h is a small step."""
    x = size * (4.0 * np.arange(width) + np.random.default_rng(seed).uniform(-1, 1, (2, length, width)))
    assert_gradients(
        minigpt.layernorm,
        lambda d_out, x, weight, bias: minigpt.layernorm_backward(d_out, x, weight),
        [x, normal(seed, width), normal(seed + 1, width)],
        h=1e-5 * min(size, 1.0),
    )


def test_layernorm_of_a_constant_row_is_its_bias() -> None:
    x, weight, bias = np.full((1, 4), 7.0), np.full(4, 2.0), np.arange(4.0)
    assert np.array_equal(minigpt.layernorm(x, weight, bias), bias[None])
    assert np.isfinite(minigpt.layernorm_backward(np.ones((1, 4)), x, weight)[0]).all()


@checked
@given(seeds, lengths)
def test_relu_backward(seed: int, length: int) -> None:
    x = normal(seed, length, 5)
    x += np.where(x >= 0, 0.01, -0.01)  # a step over the kink would measure neither slope
    assert_gradients(minigpt.relu, minigpt.relu_backward, [x])


def test_relu_backward_at_the_kink_is_zero() -> None:
    assert minigpt.relu_backward(np.array([3.0, 3.0, 3.0]), np.array([-1.0, 0.0, 1.0])).tolist() == [0.0, 0.0, 3.0]


@checked
@given(seeds, lengths)
def test_softmax_backward(seed: int, length: int) -> None:
    scores = 3.0 * normal(seed, 2, length)
    assert_gradients(minigpt.softmax, lambda d_out, s: minigpt.softmax_backward(d_out, minigpt.softmax(s)), [scores])


@checked
@given(seeds, lengths, lengths, st.integers(1, 3))
def test_causal_attention_backward(seed: int, length: int, head_dim: int, n_heads: int) -> None:
    q, k, v = (normal(seed + i, 2, n_heads, length, head_dim) for i in range(3))
    assert_gradients(minigpt.causal_attention, minigpt.causal_attention_backward, [q, k, v])


@checked
@given(seeds, lengths, st.integers(1, 4))
def test_embedding_backward(seed: int, length: int, rows: int) -> None:
    """With four rows at most, most ids repeat: a gradient that forgets repeats fails."""
    ids = np.random.default_rng(seed).integers(0, rows, (2, length))
    assert_gradients(
        lambda table: minigpt.embedding(table, ids),
        lambda d_out, table: minigpt.embedding_backward(d_out, table, ids),
        [normal(seed, rows, 3)],
    )


@checked
@given(seeds, lengths, st.integers(1, 7))
def test_cross_entropy_backward(seed: int, length: int, vocab_size: int) -> None:
    targets = np.random.default_rng(seed).integers(0, vocab_size, (2, length))
    assert_gradients(
        lambda logits: np.asarray(minigpt.cross_entropy(logits, targets)),
        lambda d_out, logits: d_out * minigpt.cross_entropy_backward(logits, targets),
        [2.0 * normal(seed, 2, length, vocab_size)],
    )


def test_split_and_join_heads_are_inverse() -> None:
    x = normal(0, 2, 5, 12)
    heads = minigpt.split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4)
    assert np.array_equal(heads[:, 1], x[..., 4:8])
    assert np.array_equal(minigpt.join_heads(heads), x)


def test_large_scores_and_logits_stay_finite() -> None:
    q = 1e3 * normal(1, 1, 4, 8)
    assert np.isfinite(minigpt.causal_attention(q, q, q)).all()
    logits = np.array([[[1e4, -1e4]]])
    assert minigpt.cross_entropy(logits, np.array([[1]])) == 2e4


# --- What the model may see -------------------------------------------------------------------------------------------


def test_a_future_token_leaves_earlier_logits_exactly_unchanged() -> None:
    weights = random_weights(SEED_SIZES, seed=8)
    tokens = random_tokens(SEED_SIZES, 2, 16, seed=9)
    before = forward(SEED_SIZES, weights, tokens)
    for place in range(1, 16):
        changed = tokens.copy()
        changed[:, place] = (changed[:, place] + 1) % 100
        after = forward(SEED_SIZES, weights, changed)
        assert np.array_equal(after[:, :place], before[:, :place])
        assert not np.array_equal(after[:, place], before[:, place])


def test_first_position_sees_itself_only() -> None:
    """The seed's mask made NaN of the whole lower triangle; here the first row is 1, 0, 0, ... and nothing is NaN."""
    weights = minigpt.causal_weights(normal(1, 2, 5, 4), normal(2, 2, 5, 4))
    assert np.array_equal(weights[:, 0], np.tile([1.0, 0, 0, 0, 0], (2, 1)))
    assert np.array_equal(weights, np.tril(weights))
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-15)


def test_labels_are_shifted_exactly_once() -> None:
    weights, tokens = random_weights(SMALL, seed=10), random_tokens(SMALL, 3, 6, seed=11)
    logits = forward(SMALL, weights, tokens)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    terms = [-log_p[b, t, tokens[b, t + 1]] for b in range(3) for t in range(5)]
    assert loss_and_gradients(SMALL, weights, tokens)[0] == pytest.approx(sum(terms) / len(terms), rel=1e-12)


# --- Learning ---------------------------------------------------------------------------------------------------------


def test_overfits_one_batch_at_the_seed_sizes_and_recites_it() -> None:
    weights = init(SEED_SIZES, seed=0)
    tokens = random_tokens(SEED_SIZES, 4, 17, seed=12)
    tokens[:, 0] = [0, 1, 2, 3]  # different beginnings, so that each text can be told from the first token
    losses = train(SEED_SIZES, weights, [tokens] * 120, AdamW(learning_rate=3e-3))
    assert losses[0] == pytest.approx(math.log(100), rel=0.02)
    assert losses[-1] < 0.05
    assert np.array_equal(generate(SEED_SIZES, weights, tokens[:, :1], max_new_tokens=16), tokens)


def test_learns_a_random_process_down_to_its_entropy() -> None:
    """Each token is followed by itself + 1 or + 3 (mod 11), a fair coin: the least reachable loss is ln 2 = 0.693."""

    def sample(seed: int, batch: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        steps = rng.choice([1, 3], (batch, SMALL.max_seq_len + 1))
        steps[:, 0] = rng.integers(0, SMALL.vocab_size, batch)
        return steps.cumsum(1) % SMALL.vocab_size

    weights = init(SMALL, seed=0)
    losses = train(SMALL, weights, (sample(step, 16) for step in range(400)), AdamW(learning_rate=1e-2))
    assert losses[0] > 0.95 * math.log(SMALL.vocab_size)
    unseen, _ = loss_and_gradients(SMALL, weights, sample(10_000, 256))
    assert 0.98 * math.log(2) < unseen < 1.05 * math.log(2)


def test_train_updates_in_place_and_reports_the_loss_before_each_step() -> None:
    weights, tokens = init(SMALL, seed=0), random_tokens(SMALL, 2, 5, seed=13)
    first, gradients = loss_and_gradients(SMALL, weights, tokens)
    before = {name: weight.copy() for name, weight in weights.items()}
    losses = train(SMALL, weights, [tokens, tokens], AdamW())
    assert losses[0] == first > losses[1]
    moved = {name for name in weights if not np.array_equal(weights[name], before[name])}
    assert moved == weights.keys()
    unused = sorted(set(range(SMALL.vocab_size)) - set(tokens[:, :-1].ravel().tolist()))
    assert unused
    assert not gradients["embed.tokens.weight"][unused].any()


def test_generate_takes_the_most_likely_token_each_time() -> None:
    weights, prompt = random_weights(SMALL, seed=14), random_tokens(SMALL, 2, 3, seed=15)
    result = generate(SMALL, weights, prompt, max_new_tokens=5)
    assert result.shape == (2, 8)
    assert np.array_equal(result[:, :3], prompt)
    assert np.array_equal(forward(SMALL, weights, result[:, :-1]).argmax(-1)[:, 2:], result[:, 3:])


def test_examples_of_the_docstring() -> None:
    outcome = doctest.testmod(minigpt)
    assert outcome.attempted == 6
    assert outcome.failed == 0


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3, 11]], r"id 11 at \[1, 1\] is outside 0\.\.10 \(vocab_size is 11\)"),
        ([[-1, 2]], r"id -1 at \[0, 0\] is outside 0\.\.10"),
        ([[1] * 8], r"sequence of 8 is longer than 7 \(max_seq_len is 7\)"),
        ([1, 2], r"shape \(B, T\), got int64 of shape \(2,\)"),
        ([[1.0, 2.0]], r"got float64"),
    ],
)
def test_bad_tokens_are_named(tokens: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        forward(SMALL, init(SMALL, 0), np.array(tokens))


def test_loss_allows_one_token_more_than_the_context_and_needs_two() -> None:
    weights = init(SMALL, 0)
    loss_and_gradients(SMALL, weights, np.ones((1, 8), dtype=np.int64))
    with pytest.raises(ValueError, match=r"sequence of 9 is longer than 8 \(max_seq_len is 7\)"):
        loss_and_gradients(SMALL, weights, np.ones((1, 9), dtype=np.int64))
    for shape in [(1, 1), (0, 5)]:
        with pytest.raises(ValueError, match="need at least one row of 2 tokens"):
            loss_and_gradients(SMALL, weights, np.ones(shape, dtype=np.int64))


def test_generation_that_does_not_fit_is_refused_with_the_number_that_does() -> None:
    weights, prompt = init(SMALL, 0), np.ones((1, 3), dtype=np.int64)
    assert generate(SMALL, weights, prompt, max_new_tokens=5).shape == (1, 8)
    with pytest.raises(ValueError, match=r"prompt of 3 with max_new_tokens 6 .* max_seq_len 7; ask for at most 5"):
        generate(SMALL, weights, prompt, max_new_tokens=6)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(SMALL, weights, prompt[:, :0], max_new_tokens=1)


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="n_heads: must divide d_model, but 64 / 5 leaves 4"):
        MiniGPTConfig(n_heads=5)
    with pytest.raises(ValueError, match="n_layers: must be at least 1, got 0"):
        MiniGPTConfig(n_layers=0)


def test_weights_that_do_not_fit_are_all_named() -> None:
    tokens, weights = random_tokens(SMALL, 1, 4, seed=16), init(SMALL, 0)
    del weights["decoder.norm.bias"]
    weights["decoder.layers.2.attention_norm.bias"] = np.zeros(12)  # a third layer must not be dropped in silence
    weights["head.weight"] = weights["head.weight"].T
    weights["embed.tokens.weight"] = weights["embed.tokens.weight"].astype(np.float32)
    with pytest.raises(ValueError, match="weights do not fit the config") as caught:
        forward(SMALL, weights, tokens)
    for part in (
        "decoder.norm.bias is missing",
        "decoder.layers.2.attention_norm.bias is not part of the model",
        "head.weight is float64 (12, 11), must be float64 (11, 12)",
        "embed.tokens.weight is float32 (11, 12), must be float64 (11, 12)",
    ):
        assert part in str(caught.value)
