"""The whole model: one layer by hand, embeddings, stacks, sharing, routing, and members of one's own."""

from typing import Any

import numpy as np
import pytest

import qkv.config as c
from qkv import reference
from qkv.reference.attention import View, multi_head
from qkv.reference.ffn import dense, gated
from qkv.reference.ops import below, norm

from .small import EXPERTS, attention, block, deviation, encoder_decoder, here, model, stack, tokens


def one_layer(residual: c.Residual) -> tuple[Any, ...]:
    """Of a one-layer model: x and hidden, and its functions a, f and n: attention, feed-forward, a named norm."""
    cfg = model(stack(block(residual=residual), n_layers=1, norm=c.NoNorm()))
    weights = reference.random_weights(cfg, seed=1)
    layer, at = below(weights, "decoder.layers.0"), here([0, 1, 2])
    functions = (
        lambda x: multi_head(attention(), below(layer, "attention"), x, x, View(at, at)),
        lambda x: gated(c.Gated(d_ff=10), below(layer, "ffn"), x, []),
        lambda name, x: norm(c.RMSNorm(), below(layer, name), x),
    )
    hidden = reference.run(cfg, weights, np.array([[3, 1, 4]])).hidden[0]
    return weights["embed.tokens.weight"][[3, 1, 4]], hidden, *functions


def test_pre_norm():
    x, hidden, a, f, n = one_layer(c.PreNorm())
    x = x + a(n("attention_norm", x))
    assert deviation(hidden, x + f(n("ffn_norm", x))) < 1e-15


def test_post_norm():
    x, hidden, a, f, n = one_layer(c.PostNorm())
    x = n("attention_norm", x + a(x))
    assert deviation(hidden, n("ffn_norm", x + f(x))) < 1e-15


def test_sandwich_norm():
    x, hidden, a, f, n = one_layer(c.SandwichNorm())
    x = x + n("attention_post_norm", a(n("attention_norm", x)))
    assert deviation(hidden, x + n("ffn_post_norm", f(n("ffn_norm", x)))) < 1e-15


@pytest.mark.parametrize("shared", [True, False])
def test_parallel(shared: bool):
    x, hidden, a, f, n = one_layer(c.Parallel(shared_norm=shared))
    first, second = ("norm", "norm") if shared else ("attention_norm", "ffn_norm")
    assert deviation(hidden, x + a(n(first, x)) + f(n(second, x))) < 1e-15


def test_embedding_adds_positions_and_segments_and_then_normalises():
    embedding = c.Embedding(scale="sqrt_d_model", positions=c.Learned(offset=2), n_segments=2, norm=c.LayerNorm())
    cfg = model(stack(n_layers=1), embedding=embedding)
    weights = reference.random_weights(cfg, seed=3)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])  # the layer adds nothing
    out = reference.run(cfg, weights, [[7, 9]], segments=[[1, 0]])
    for t, (token, segment) in enumerate([(7, 1), (9, 0)]):
        x = 4 * weights["embed.tokens.weight"][token] + weights["embed.positions.weight"][t + 2]
        x = norm(c.LayerNorm(), below(weights, "embed.norm"), x + weights["embed.segments.weight"][segment])
        assert out.hidden[0, t] == pytest.approx(norm(c.RMSNorm(), below(weights, "decoder.norm"), x))
    assert np.array_equal(
        reference.forward(cfg, weights, [[7, 9]]), reference.forward(cfg, weights, [[7, 9]], segments=[[0, 0]])
    )


def test_a_cycle_of_blocks_repeats_after_the_first_ones():
    first, small, large = (block(ffn=c.Gated(d_ff=width)) for width in (7, 8, 9))
    cfg = model(c.Stack(n_layers=6, first=(first,), layers=(small, large)))
    weights = reference.random_weights(cfg, seed=4)
    widths = [weights[f"decoder.layers.{i}.ffn.up_proj.weight"].shape[0] for i in range(6)]
    assert widths == [7, 8, 9, 8, 9, 8]
    assert reference.forward(cfg, weights, tokens(1, 3)).shape == (1, 3, 20)


def test_layers_share_the_tensors_of_shared_positions_and_own_the_others():
    shared = c.T5Buckets(n_buckets=4, max_distance=6, bidirectional=False)
    own = c.T5Buckets(n_buckets=4, max_distance=6, bidirectional=False, shared=False)
    a = model(stack(block(attention=attention(positions=shared))))
    b = model(stack(block(attention=attention(positions=own))))
    weights = reference.random_weights(a, seed=5)
    copies = {f"decoder.layers.{i}.attention.positions.weight": weights["decoder.positions.0.weight"] for i in (0, 1)}
    separate = {n: w for n, w in weights.items() if not n.startswith("decoder.positions")} | copies
    assert np.array_equal(reference.forward(a, weights, tokens(1, 6)), reference.forward(b, separate, tokens(1, 6)))


def test_two_shared_schemes_keep_apart():
    first, second = (c.T5Buckets(n_buckets=4, max_distance=distance, bidirectional=False) for distance in (6, 9))
    blocks = [block(attention=attention(positions=positions)) for positions in (first, second)]
    cfg = model(stack(*blocks, n_layers=4))
    weights = reference.random_weights(cfg, seed=6)
    plain = reference.forward(cfg, weights, tokens(1, 6))
    for index in (0, 1):
        changed = weights | {f"decoder.positions.{index}.weight": weights[f"decoder.positions.{index}.weight"] + 1}
        changed[f"decoder.positions.{index}.weight"][0] -= 1.5
        assert deviation(reference.forward(cfg, changed, tokens(1, 6)), plain) > 1e-3


@pytest.mark.parametrize("sharing", ["all", "tokens", "none"])
def test_what_source_and_target_share(sharing: str):
    embedding = c.Embedding(positions=c.Learned(), norm=c.LayerNorm())
    cfg = encoder_decoder(sharing=sharing, embedding=embedding)
    weights, target, source = reference.random_weights(cfg, seed=22), tokens(1, 3), tokens(1, 3, seed=7)
    own = {name for name in weights if name.startswith("target_embed.")}
    positions = {"target_embed.positions.weight", "target_embed.norm.weight", "target_embed.norm.bias"}
    table = {"target_embed.tokens.weight"}
    assert own == {"all": set(), "tokens": positions, "none": positions | table}[sharing]
    plain = reference.forward(cfg, weights, target, source=source)
    copied = weights | {name: weights[name.replace("target_embed", "embed")] for name in own}
    everything = encoder_decoder(embedding=embedding)
    common = {name: w for name, w in weights.items() if name not in own}
    together = reference.forward(everything, common, target, source=source)
    assert np.array_equal(reference.forward(cfg, copied, target, source=source), together)
    assert (deviation(plain, together) > 1e-3) == (sharing != "all")


def test_routing_comes_per_layer_for_all_rows_in_order():
    cfg = model(stack(block(), block(ffn=EXPERTS), block(ffn=EXPERTS), n_layers=3))
    weights, batch = reference.random_weights(cfg, seed=23), tokens(2, 4)
    routing = reference.run(cfg, weights, batch).routing
    assert [(p.shape, e.shape) for p, e in routing] == [((8, 4), (8, 2))] * 2
    alone = reference.run(cfg, weights, batch[1:]).routing
    for (p, e), (q, f) in zip(routing, alone, strict=True):
        assert np.array_equal(p[4:], q)
        assert np.array_equal(e[4:], f)
        assert np.array_equal(np.sort(np.take_along_axis(p, e, axis=1)), np.sort(p)[:, 2:])
        assert p.sum(axis=1) == pytest.approx(np.ones(8))


def test_random_weights_are_all_of_them_and_each_matters():
    cfg = encoder_decoder(embedding=c.Embedding(n_segments=2, norm=c.LayerNorm()), head=c.LanguageModel(tied=True))
    weights, target, source = reference.random_weights(cfg, seed=24), tokens(1, 4), tokens(1, 4, seed=8)
    assert {n: w.shape for n, w in weights.items()} == {n: p.shape for n, p in cfg.shapes().items()}
    assert all(np.array_equal(w, reference.random_weights(cfg, seed=24)[n]) for n, w in weights.items())
    assert not np.array_equal(weights["embed.norm.weight"], reference.random_weights(cfg, seed=25)["embed.norm.weight"])
    plain = reference.forward(cfg, weights, target, source=source)
    for name, weight in weights.items():
        other = weights | {name: weight * np.linspace(0.5, 1.5, weight.size).reshape(weight.shape)}
        assert deviation(reference.forward(cfg, other, target, source=source), plain) > 1e-6, name


def test_weights_of_any_float_type_are_computed_in_float64():
    cfg = model()
    weights, row = reference.random_weights(cfg, seed=26), tokens(1, 4)
    half = {name: w.astype(np.float16) for name, w in weights.items()}
    out = reference.forward(cfg, half, row)
    assert out.dtype == np.float64
    assert np.array_equal(out, reference.forward(cfg, {n: w.astype(np.float64) for n, w in half.items()}, row))


def test_every_member_of_every_union_has_its_function():
    from qkv.reference.registry import function_of

    without = {c.Pattern, c.Init}  # a shared predicate; nothing to compute
    for union in c.UNIONS:
        for member in union.members:
            if union not in without:
                assert callable(function_of(member.model_construct())), member


def test_a_member_of_one_s_own_needs_one_registration():
    from qkv.errors import ConfigError

    class Doubled(c.Dense):
        """Twice a dense network."""

    cfg = model(stack(block(ffn=Doubled(d_ff=5, activation="relu"))))
    weights = reference.random_weights(cfg, seed=27)
    with pytest.raises(ConfigError, match=r"no function for Doubled .* call reference\.register\(Doubled, function\)"):
        reference.forward(cfg, weights, tokens(1, 3))
    reference.register(Doubled, lambda config, weights, x, routing: 2 * dense(config, weights, x, routing))
    plain = model(stack(block(ffn=c.Dense(d_ff=5, activation="relu"))))
    twice = {n: 2 * w if n.endswith("down_proj.weight") else w for n, w in weights.items()}
    assert np.array_equal(reference.forward(cfg, weights, tokens(1, 3)), reference.forward(plain, twice, tokens(1, 3)))


def test_a_position_scheme_of_one_s_own():
    class NearOnly(c.Positions):
        """Scores fall by one per position."""

        kind: str = "near-only"
        places = ("attention",)

    class NearOnlyScheme(reference.Scheme):
        def bias(self, n_heads: int, query: c.Coordinates, key: c.Coordinates) -> np.ndarray:
            return np.broadcast_to(-np.abs(query.position[:, None] - key.position), (n_heads, len(query.position), 6))

    reference.register(NearOnly, NearOnlyScheme)
    one_head = {"n_heads": 1, "n_kv_heads": 1}
    cfg = model(stack(block(attention=attention(positions=NearOnly(), **one_head))))
    alibi = model(stack(block(attention=attention(positions=c.Alibi(max_bias=1e-300), **one_head))))
    weights = reference.random_weights(cfg, seed=28)
    assert (
        deviation(reference.forward(cfg, weights, tokens(1, 6)), reference.forward(alibi, weights, tokens(1, 6)))
        < 1e-14
    )
