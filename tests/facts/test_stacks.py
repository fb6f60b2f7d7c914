"""Encoder, decoder and what joins them: shapes, and who may know what."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import qkv
from qkv import config as c
from qkv.nn import Transformer, initialise

from .small import (
    Run,
    block,
    both,
    decoder,
    deviation,
    encoder,
    encoder_decoder,
    heads,
    nn,
    oracle,
    same,
    tokens,
    torch_model,
    watched,
    weights_of,
)

B, T, S = 2, 5, 7


def other_ids(ids: np.ndarray, place: int) -> np.ndarray:
    """The same rows with another token at `place`."""
    changed = ids.copy()
    changed[:, place] = (ids[:, place] + 1) % 23
    return changed


def pairs() -> tuple[np.ndarray, np.ndarray]:
    return tokens(B, T), tokens(B, S, seed=1)


# --- Panorama ---------------------------------------------------------------------------------------------------------


@both
def test_encoder_decoder_panorama_shapes(run: Run):
    cfg = encoder_decoder()
    target, source = pairs()
    out = run(cfg, weights_of(cfg), target, source=source)
    assert out.logits.shape == (B, T, 23)
    assert out.hidden.shape == (B, T, 16)


def test_encoder_decoder_panorama_shapes_inside():
    target, source = pairs()
    seen = watched(encoder_decoder(), target, source=source)
    assert seen["encoder.output"].shape == (B, S, 16)
    assert seen["encoder.layers.1.attention.weights"].shape == (B, 4, S, S)
    assert seen["decoder.layers.1.attention.weights"].shape == (B, 4, T, T)
    assert seen["decoder.layers.1.cross_attention.weights"].shape == (B, 4, T, S)
    assert seen["head.logits"].shape == (B, T, 23)
    assert same(encoder_decoder(), target, source=source) < 1e-12


@both
def test_encoder_sees_both_sides(run: Run):
    cfg, ids = encoder(), tokens(1, T)
    weights = weights_of(cfg)
    expected = run(cfg, weights, ids).hidden
    for place in range(T):
        moved = np.abs(run(cfg, weights, other_ids(ids, place)).hidden - expected).max(axis=(0, 2))
        assert (moved > 1e-6).all()


@pytest.mark.parametrize("padded", [T + 1, 2 * T, 30])
@both
def test_encoder_padding_does_not_change_the_result(run: Run, padded: int):
    cfg, ids = encoder(embedding=c.Embedding(positions=c.Learned())), tokens(1, T)
    weights = weights_of(cfg)
    valid = np.arange(padded)[None] < T
    filler = tokens(1, padded - T, seed=9)
    found = run(cfg, weights, np.concatenate([ids, filler], axis=1), valid=valid).hidden[:, :T]
    assert deviation(found, run(cfg, weights, ids).hidden) < 1e-13


@both
def test_decoder_position_does_not_know_later_targets(run: Run):
    """Neither in a decoder alone nor beside an encoder."""
    target, source = pairs()
    for cfg, given in ((decoder(), {}), (encoder_decoder(), {"source": source})):
        weights = weights_of(cfg)
        expected = run(cfg, weights, target, **given).logits
        for place in range(T):
            found = run(cfg, weights, other_ids(target, place), **given).logits
            assert place == 0 or deviation(found[:, :place], expected[:, :place]) < 1e-14
            assert (np.abs(found[:, place:] - expected[:, place:]).max(axis=(0, 2)) > 1e-6).all()


@both
def test_cross_attention_sees_every_real_source_token_from_every_target(run: Run):
    cfg = encoder_decoder()
    target, source = pairs()
    weights, valid = weights_of(cfg), np.arange(S)[None].repeat(B, 0) < S - 2
    expected = run(cfg, weights, target, source=source, source_valid=valid).logits
    for place in range(S):
        found = run(cfg, weights, target, source=other_ids(source, place), source_valid=valid).logits
        moved = np.abs(found - expected).max(axis=(0, 2))
        assert (moved > 1e-6).all() if place < S - 2 else (moved < 1e-13).all()


@both
def test_cross_attention_takes_keys_and_values_from_the_last_encoder_layer(run: Run):
    """Where the decoder's queries meet a source of equal vectors, every target gets the same from it."""
    cross_alone = block(
        cross_attention=heads(c.Bidirectional()), norm=c.NoNorm(), ffn=c.Dense(d_ff=1, activation="relu")
    )
    stacks = {"decoder": c.Stack(n_layers=1, layers=(cross_alone,)), "embedding": c.Embedding()}
    cfg = encoder_decoder(**stacks)
    weights = weights_of(cfg)
    for name in weights:
        if name.startswith("decoder.") and ".cross_attention." not in name:
            weights[name] = np.zeros_like(weights[name])
    target, source = tokens(1, T), np.full((1, S), 5)
    added = run(cfg, weights, target, source=source).hidden[0] - weights["embed.tokens.weight"][target[0]]
    memory_cfg = encoder(block(attention=heads(c.Bidirectional()), residual=c.PostNorm()), norm=c.NoNorm())
    kept = {name: w for name, w in weights.items() if name in memory_cfg.shapes()}
    memory = run(memory_cfg, kept, source).hidden[0]
    at = "decoder.layers.0.cross_attention."
    expected = weights[f"{at}o_proj.weight"] @ weights[f"{at}v_proj.weight"] @ memory[0]
    assert deviation(added, np.tile(expected, (T, 1))) < 1e-12


@both
def test_e66_the_decoder_embeds_its_own_input(run: Run):
    """The same table and positions as the encoder's; shifting the target right is the caller's."""
    cfg = encoder_decoder()
    target, source = pairs()
    weights = weights_of(cfg)
    names = [name for name in cfg.shapes() if "embed" in name]
    assert names == ["embed.tokens.weight"]
    equal_tokens = np.full((1, T), 3)
    rows = run(cfg, weights, equal_tokens, source=source[:1]).hidden[0]
    assert np.abs(np.diff(rows, axis=0)).max(axis=1).min() > 1e-3, "equal tokens differ by their positions"
    own = cfg.override({"sharing": "none"})
    assert [n for n in own.shapes() if "embed" in n] == ["embed.tokens.weight", "target_embed.tokens.weight"]
    untied = weights_of(own) | weights | {"target_embed.tokens.weight": weights["embed.tokens.weight"]}
    assert (
        deviation(run(own, untied, target, source=source).logits, run(cfg, weights, target, source=source).logits)
        < 1e-13
    )


@both
def test_e60_token_vectors_are_multiplied_by_the_root_of_d_model(run: Run):
    preset = qkv.preset("transformer-base").embedding
    assert (preset.scale, preset.factor(512)) == ("sqrt_d_model", 512**0.5)
    silent = block(norm=c.NoNorm())
    plain, scaled = (encoder(silent, norm=c.NoNorm(), embedding=c.Embedding(scale=s)) for s in (1.0, "sqrt_d_model"))
    weights = {name: np.zeros(shape) for name, (shape, _) in plain.parameters().items()}
    weights["embed.tokens.weight"] = weights_of(plain)["embed.tokens.weight"]
    assert np.array_equal(run(scaled, weights, tokens(1, T)).hidden, 4 * run(plain, weights, tokens(1, T)).hidden)


def test_e60_dropout_stands_after_sublayers_and_embeddings():
    cfg = qkv.preset("transformer-base")
    assert cfg.embedding.dropout == 0.1
    for stack in cfg.stacks.values():
        (layer,) = stack.layers
        assert (layer.dropout, layer.attention.dropout, layer.ffn.dropout) == (0.1, 0.0, 0.0)
    small = encoder(block(attention=heads(c.Bidirectional()), dropout=0.5))
    model, ids = torch_model(small, weights_of(small)), torch.from_numpy(tokens(1, T))
    with torch.no_grad():
        quiet = [model(ids).hidden for _ in range(2)]
        noisy = [model.train()(ids).hidden for _ in range(2)]
    assert torch.equal(*quiet)
    assert not torch.equal(*noisy)


# --- The modern block -------------------------------------------------------------------------------------------------


def modern() -> c.ModelConfig:
    """Lecture 3, section 6: RMS norm before each sublayer, rotary grouped heads, SwiGLU, nothing tied."""
    attention = heads(n_heads=4, n_kv_heads=2, head_dim=4, positions=c.Rotary())
    layer = block(attention=attention, ffn=c.Gated(d_ff=24), norm=c.RMSNorm(eps=1e-6))
    return decoder(layer, norm=c.RMSNorm(eps=1e-6), head=c.LanguageModel(tied=False))


@both
def test_modern_block_is_causal(run: Run):
    cfg, ids = modern(), tokens(1, 8)
    weights = weights_of(cfg)
    expected = run(cfg, weights, ids).logits
    found = run(cfg, weights, other_ids(ids, 4)).logits
    assert deviation(found[:, :4], expected[:, :4]) < 1e-14
    assert deviation(found[:, 4:], expected[:, 4:]) > 0.01


@both
def test_e32_rotary_positions_are_really_applied(run: Run):
    """Earlier tokens in another order: one layer without positions would give the same last row."""
    cfg = decoder(block(attention=heads(head_dim=4, positions=c.Rotary())), n_layers=1)
    weights = weights_of(cfg)
    one, other = (run(cfg, weights, np.array([row])).hidden[0, -1] for row in ([1, 2, 3, 4, 5, 6], [5, 3, 1, 2, 4, 6]))
    assert deviation(other, one) > 0.01


def test_e32_the_model_runs_and_every_gradient_is_finite():
    cfg = modern()
    model = Transformer(cfg)
    initialise(model, cfg, seed=0)
    ids = torch.from_numpy(tokens(2, 9))
    logits = model(ids[:, :-1]).logits
    functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_e32_positions_follow_the_tokens_device():
    """Nothing of the model is made on the CPU when it and its tokens are elsewhere; `meta` stands for any device."""
    cfg = modern()
    with torch.device("meta"):
        model = Transformer(cfg)
    out = model(torch.zeros(1, 5, dtype=torch.long, device="meta"))
    assert out.logits.device.type == "meta"
    assert out.logits.shape == (1, 5, 23)


def test_modern_block_is_that_of_the_llama_presets():
    for name in ("llama-7b", "llama-2-70b", "llama-3-8b"):
        (layer,) = qkv.preset(name).decoder.layers
        assert isinstance(layer.norm, c.RMSNorm)
        assert isinstance(layer.ffn, c.Gated)
        assert layer.ffn.activation == "silu"
        assert isinstance(layer.residual, c.PreNorm)
        assert isinstance(layer.attention.positions, c.Rotary)
        assert not any(key.endswith(".bias") for key in qkv.preset(name).shapes())


def test_three_paradigms_are_three_choices_of_stacks():
    """Understanding, generation, translation: an encoder, a decoder, or both."""
    kinds = {
        "bert-base-uncased": ({"encoder"}, c.Bidirectional()),
        "gpt2": ({"decoder"}, c.Causal()),
        "t5-small": ({"encoder", "decoder"}, c.Causal()),
    }
    for name, (stacks, pattern) in kinds.items():
        cfg = qkv.preset(name)
        assert set(cfg.stacks) == stacks
        assert list(cfg.stacks.values())[-1].layers[0].attention.pattern == pattern
        toy = cfg.toy()
        given = {"source": tokens(1, 4)} if len(stacks) == 2 else {}
        out = [run(toy, weights_of(toy), tokens(1, 5), **given).hidden for run in (nn, oracle)]
        assert deviation(*out) < 1e-11
