"""The oracle's codecs: numbers by hand, what passes through them, and what does not."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import qkv.config as c
from qkv.errors import DataError
from qkv.reference import attention as oracle
from qkv.reference import forward, random_weights, run
from qkv.reference.codec import through

from .small import attention, block, deviation, encoder, encoder_decoder, here, model, stack, tokens

LOSSY = ("int8", "int4")
LATENT = c.Latent(n_heads=2, kv_rank=40, nope_dim=4, rope_dim=6, v_head_dim=5, pattern=c.Causal(), positions=c.Rotary())
LONGFORMER = attention(pattern=c.Longformer(window=2), global_projections=True)
MODELS: dict[str, c.ModelConfig] = {
    "grouped": model(stack(block(attention=attention(positions=c.Rotary(), qk_norm=c.RMSNorm())))),
    "wide": model(stack(block(attention=attention(head_dim=48)))),
    "latent": model(stack(block(attention=LATENT))),
    "shaw": model(stack(block(attention=attention(positions=c.Shaw(max_distance=3))))),
    "encoder-decoder": encoder_decoder(),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_lossy = pytest.mark.parametrize("codec", LOSSY)


def logits(config: c.ModelConfig, **fields: Any) -> np.ndarray:
    if config.encoder is not None:
        fields["source"] = tokens(2, 5, seed=1)
    return forward(config, random_weights(config, seed=0), tokens(2, 7), **fields)


def test_int8_by_hand():
    """d = 254 / 127 = 2: half steps go to the even neighbour."""
    x = np.array([[254.0, -254.0, 1.0, 3.0, 5.0, -1.0, 0.0]])
    assert through("int8", x).tolist() == [[254.0, -254.0, 0.0, 4.0, 4.0, 0.0, 0.0]]


def test_int4_by_hand():
    """d = 4 / -8: the opposite of the largest number has no code, and -3.5 is the nearest one."""
    x = np.array([[4.0, 0.0, -4.0, 1.0, -0.25]])
    assert through("int4", x).tolist() == [[4.0, 0.0, -3.5, 1.0, 0.0]]


def test_a_group_ends_after_32_numbers():
    x = np.full(70, 0.25)
    x[31], x[33], x[69] = 100.0, 1.0, 2.0
    y = through("int4", x)
    assert y[:32].tolist() == [0.0] * 31 + [100.0]
    assert y[32:64].tolist() == x[32:64].tolist()
    assert y[64:].tolist() == x[64:].tolist()


@every_lossy
def test_what_a_scale_cannot_hold(codec: str):
    """Too small: zeros. Too large: the largest code of the largest float16. NaN: its whole group."""
    most = 65504.0 * (127 if codec == "int8" else 8)
    assert through(codec, np.array([1e-9, -1e-9])).tolist() == [0.0, 0.0]
    assert through(codec, np.array([1e30, 1.0])).tolist() == [most, 0.0]
    assert through(codec, np.array([1.0, -math.inf])).tolist() == [0.0, -most]
    x = np.ones(64)
    x[40] = math.nan
    y = through(codec, x)
    assert not np.isnan(y[:32]).any()
    assert np.isnan(y[32:]).all()


# In a model


@every_model
def test_raw_changes_nothing_at_all(name: str):
    assert np.array_equal(logits(MODELS[name], codec="raw"), logits(MODELS[name]))


def shaken(size: float, rng: np.random.Generator) -> Callable[[str, np.ndarray], np.ndarray]:
    """In place of a codec: each number is off by chance, at most by `size` times the largest of its group."""

    def through(codec: str, x: np.ndarray) -> np.ndarray:
        if codec == "raw":
            return x
        starts = range(0, x.shape[-1], 32)
        groups = [x[..., start : start + 32] for start in starts]
        steps = [size * np.abs(g).max(axis=-1, keepdims=True) * rng.uniform(-1, 1, g.shape) for g in groups]
        return x + np.concatenate(steps, axis=-1)

    return through


@every_model
@every_lossy
def test_a_model_feels_it_as_it_feels_noise_of_that_size(monkeypatch: pytest.MonkeyPatch, name: str, codec: str):
    """Half a step is 1/254 and 1/16 of a group's largest number; chance errors up to there move the logits as far."""
    exact = logits(MODELS[name])
    found = deviation(logits(MODELS[name], codec=codec), exact)
    noises = []
    for seed in range(3):
        monkeypatch.setattr(
            oracle, "through", shaken(1 / 254 if codec == "int8" else 1 / 16, np.random.default_rng(seed))
        )
        noises.append(deviation(logits(MODELS[name], codec=codec), exact))
    assert max(noises) / 4 < found < 4 * max(noises)


@every_model
@every_lossy
def test_what_comes_later_still_changes_nothing_before(name: str, codec: str):
    """Each vector is stored alone, so that a longer text stores its beginning alike."""
    config = MODELS[name]
    given = {"source": tokens(1, 5)} if config.encoder is not None else {}
    weights, text = random_weights(config, seed=0), tokens(1, 7)
    whole = forward(config, weights, text, codec=codec, **given)
    assert deviation(forward(config, weights, text[:, :4], codec=codec, **given), whole[:, :4]) < 1e-12


@dataclass
class Run:
    """One attention without a projection after it, and what it stored."""

    config: c.Attention
    codec: str
    x: np.ndarray
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    streams: list[np.ndarray] = field(default_factory=list)

    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
        def watched(codec: str, x: np.ndarray) -> np.ndarray:
            assert codec == self.codec
            self.streams.append(through(codec, x))
            return self.streams[-1]

        monkeypatch.setattr(oracle, "through", watched)
        rng = np.random.default_rng(0)
        shapes = self.config.parameters(c.Sizes(self.x.shape[-1], 16))
        weights = {n: np.ones(p.shape) if p.role == "ones" else rng.standard_normal(p.shape) for n, p in shapes.items()}
        width = weights["o_proj.weight"].shape[1]
        weights["o_proj.weight"] = np.eye(width)
        at = here(np.arange(len(self.x)), **self.fields)
        function = oracle.latent if isinstance(self.config, c.Latent) else oracle.multi_head
        return function(self.config, weights, self.x, self.x, oracle.View(at, at, self.codec))


def test_the_streams_are_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch):
    """(T, heads, width) each, in the order of `streams()`; Longformer's global tokens have two of their own."""
    x = np.random.default_rng(1).standard_normal((5, 8))
    for config, times in ((attention(), 1), (LATENT, 1), (LONGFORMER, 2)):
        one = Run(config, "int4", x, {"is_global": np.arange(5) == 1} if times == 2 else {})
        one(monkeypatch)
        found = [(stream.size // stream.shape[0] // stream.shape[-1], stream.shape[-1]) for stream in one.streams]
        assert found == list(config.streams().values())[:2] * times
        assert all(len(stream) == 5 for stream in one.streams)


@every_lossy
def test_a_single_token_gets_its_own_stored_value(monkeypatch: pytest.MonkeyPatch, codec: str):
    """One visible key has weight 1, so that the output is the value itself, each key-value head's twice."""
    one = Run(attention(), codec, np.random.default_rng(1).standard_normal((1, 8)))
    out = one(monkeypatch).reshape(4, 6)
    assert np.array_equal(out, np.repeat(one.streams[1][0], 2, axis=0))
    exact = Run(attention(), "raw", one.x)(monkeypatch)
    assert deviation(out.ravel(), exact.ravel()) > 1e-4


def test_keys_are_stored_after_norm_and_rotation(monkeypatch: pytest.MonkeyPatch):
    """Equal tokens: normed keys have a mean square of 1, turned ones differ by position, values do not."""
    x = np.tile(np.random.default_rng(1).standard_normal(8), (4, 1))
    one = Run(attention(qk_norm=c.RMSNorm(eps=1e-12), positions=c.Rotary()), "raw", x)
    one(monkeypatch)
    k, v = one.streams
    assert (k**2).mean(axis=-1) == pytest.approx(np.ones((4, 2)))
    assert all(np.abs(k[0] - k[t]).max() > 0.1 for t in (1, 2, 3))
    assert np.array_equal(v, np.tile(v[:1], (4, 1, 1)))


def test_latents_are_stored_after_their_norm(monkeypatch: pytest.MonkeyPatch):
    x = np.tile(np.random.default_rng(1).standard_normal(8), (4, 1))
    one = Run(LATENT.override({"norm.eps": 1e-12}), "raw", x)
    one(monkeypatch)
    small, rope = one.streams
    assert (small**2).mean(axis=-1) == pytest.approx(np.ones(4))
    assert np.array_equal(small, np.tile(small[:1], (4, 1)))
    assert all(np.abs(rope[0] - rope[t]).max() > 0.1 for t in (1, 2, 3))


@every_lossy
@pytest.mark.parametrize("width", [6, 40])
def test_one_attention_stays_within_a_bound(monkeypatch: pytest.MonkeyPatch, codec: str, width: int):
    """A step d of int8 is amax / 127, of int4 amax / 8; a number is off by d/2, in int4 by d beyond the last code.

    A score moves by e = |q|_1 * error of k * scale at most, a weight by a factor within e^-2e and e^2e, and a mean of
    values by (e^2e - 1) max |v| + error of v. Float16 scales add 2^-8 of the error.
    """
    config = attention(n_heads=2, n_kv_heads=1, head_dim=width, scale=1e-3)
    x = np.random.default_rng(1).standard_normal((6, 8))
    whole = Run(config, "raw", x)
    exact = whole(monkeypatch)
    k, v = whole.streams
    share = (0.5 / 127 if codec == "int8" else 1 / 8) * (1 + 2.0**-8)
    q = x @ np.random.default_rng(0).standard_normal((2 * width, 8)).T  # the first weights that were drawn
    e = 1e-3 * np.abs(q.reshape(6, 2, width)).sum(axis=-1).max() * share * np.abs(k).max()
    error = np.abs(Run(config, codec, x)(monkeypatch) - exact).max()
    bound = math.expm1(2 * e) * np.abs(v).max() + share * np.abs(v).max()
    assert bound / 40 < error < bound


def test_the_decoder_stores_and_the_encoder_does_not(monkeypatch: pytest.MonkeyPatch):
    """Two layers, one row: keys and values of 7 tokens in self-attention, of the source's 5 in cross-attention."""
    stored: list[tuple[str, int]] = []

    def watched(codec: str, x: np.ndarray) -> np.ndarray:
        stored.append((codec, len(x)))
        return through(codec, x)

    monkeypatch.setattr(oracle, "through", watched)
    config = encoder_decoder()
    forward(config, random_weights(config, 0), tokens(1, 7), source=tokens(1, 5), codec="int8")
    assert [one for one in stored if one[0] != "raw"] == [("int8", 7), ("int8", 7), ("int8", 5), ("int8", 5)] * 2
    assert [one for one in stored if one[0] == "raw"] == [("raw", 5)] * 4


def test_what_is_refused():
    config = encoder()
    weights, text = random_weights(config, 0), tokens(1, 4)
    assert np.array_equal(run(config, weights, text, codec="raw").hidden, run(config, weights, text).hidden)
    with pytest.raises(DataError, match="codec: 'int8' given, but a model without a decoder has no cache"):
        run(config, weights, text, codec="int8")
    config = model()
    with pytest.raises(DataError, match="codec: unknown 'fp3'; choose one of raw, int8, int4"):
        forward(config, random_weights(config, 0), text, codec="fp3")
