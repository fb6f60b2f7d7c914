"""T5 1.0, T5 1.1, Flan-T5 and mT5 against the peer library: whole, without the head, and the encoder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn

import qkv
from checkpoint.as_family import drawn
from checkpoint.harness import VOCAB, Peer, batch, deviation, load_ours
from qkv.checkpoint.huggingface import family_for, read_config, read_model, write_config
from qkv.checkpoint.safetensors import File, write
from qkv.errors import CheckpointError
from qkv.nn import Transformer

from .test_bert import check_own

SMALL = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
LEGACY = {
    **SMALL, "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "decoder_start_token_id": 0,
    "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6, "n_positions": 512, "output_past": True, "pad_token_id": 0,
    "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}},
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TARGET = 9


def pair(tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """The decoder's tokens (B, 9), other ones than the source's, and which of them are real."""
    target_valid = torch.ones(len(tokens), TARGET, dtype=torch.bool)
    if not bool(valid.all()):
        target_valid[0, -2:] = False  # the other row than the source's shorter one
    return (tokens.flip(1)[:, :TARGET] * 7 + 3) % VOCAB, target_valid


def peer_call(model: nn.Module, tokens: Tensor, valid: Tensor) -> Any:
    target, real = pair(tokens, valid)
    return model(
        input_ids=tokens, attention_mask=valid.long(), decoder_input_ids=target, decoder_attention_mask=real.long()
    )


def peer_logits(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return peer_call(model, tokens, valid).logits[pair(tokens, valid)[1]]


def peer_hidden(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return peer_call(model, tokens, valid).last_hidden_state[pair(tokens, valid)[1]]


def our_call(model: Transformer, tokens: Tensor, valid: Tensor) -> Any:
    target, real = pair(tokens, valid)
    return model(target, valid=real, source=tokens, source_valid=valid)


def our_logits(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    return our_call(model, tokens, valid).logits[pair(tokens, valid)[1]]


def our_hidden(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    return our_call(model, tokens, valid).hidden[pair(tokens, valid)[1]]


def encoded(model: nn.Module, tokens: Tensor, valid: Tensor) -> Tensor:
    return model(input_ids=tokens, attention_mask=valid.long()).last_hidden_state


def our_encoded(model: Transformer, tokens: Tensor, valid: Tensor) -> Tensor:
    return model(tokens, valid=valid).hidden


def with_own_head(model: nn.Module) -> nn.Module:
    """The peer ties every new model; the released ones of v1.1 are not tied."""
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))  # type: ignore[union-attr]
    return model


def t5(old: dict[str, Any] | None, **changes: Any) -> Peer:
    def make() -> nn.Module:
        model = t.T5ForConditionalGeneration(t.T5Config(**{**SMALL, **changes}))
        return with_own_head(model) if changes.get("tie_word_embeddings") is False else model

    return Peer(make, peer_logits, our_logits, {} if old is None else {**LEGACY, **old})


def mt5(old: dict[str, Any]) -> Peer:
    legacy = {**LEGACY, "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", **GATED, **old}
    return Peer(
        lambda: with_own_head(t.MT5ForConditionalGeneration(t.MT5Config(**SMALL))), peer_logits, our_logits, legacy
    )


def bare(name: str, old: dict[str, Any], **changes: Any) -> Peer:
    """The model without its head, or its encoder."""
    run, ours = (encoded, our_encoded) if "Encoder" in name else (peer_hidden, our_hidden)
    config = t.MT5Config if name.startswith("MT5") else t.T5Config
    legacy = {**LEGACY, "architectures": [name], **old}
    return Peer(lambda: getattr(t, name)(config(**{**SMALL, **changes})), run, ours, legacy)


PEERS = {
    "t5": t5({}),
    "t5-first-release": t5({"architectures": ["T5WithLMHeadModel"], "n_positions": 512}),
    "t5-uneven": t5({"num_decoder_layers": 2}, num_decoder_layers=2),
    "t5-default-buckets": t5(None, relative_attention_num_buckets=32, relative_attention_max_distance=128),
    "t5-gelu": t5({"feed_forward_proj": "gelu"}, feed_forward_proj="gelu"),
    "t5-gated-tied": t5({"feed_forward_proj": "gated-silu"}, feed_forward_proj="gated-silu"),
    "t5-v1.1": t5({**GATED, "num_decoder_layers": 3, "classifier_dropout": 0.0}, **GATED),
    "flan-t5": t5({**GATED, "dense_act_fn": "gelu_new", "is_gated_act": True}, **GATED),
    "mt5": mt5({"tokenizer_class": "T5Tokenizer"}),
    "t5-model": bare("T5Model", {}),
    "t5-encoder": bare("T5EncoderModel", {}),
    "t5-encoder-gated": bare("T5EncoderModel", GATED, **GATED),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_own(PEERS[name], tmp_path)


def test_mt5_encoder_equals_the_peer(tmp_path: Path) -> None:
    theirs = drawn(t.MT5EncoderModel(t.MT5Config(**SMALL)))
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    tokens, valid = batch("right")
    with torch.no_grad():
        assert deviation(encoded(theirs, tokens, valid), our_encoded(ours, tokens, valid), valid) < 1e-4


def held(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in File(folder / "model.safetensors").items()}


def test_a_new_model_of_v11_that_is_tied_reads_its_table_as_its_head(tmp_path: Path) -> None:
    """Release 5 writes such files: no head, `tie_word_embeddings` true, `scale_decoder_outputs` false."""
    theirs = drawn(t.T5ForConditionalGeneration(t.T5Config(**SMALL, **GATED)))
    theirs.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["tie_word_embeddings"] is True
    assert data["scale_decoder_outputs"] is False
    assert "lm_head.weight" not in held(tmp_path)
    config, tensors, ours = load_ours(tmp_path)
    assert not config.head.tied
    assert np.array_equal(tensors["head.weight"], tensors["embed.tokens.weight"])
    tokens, valid = batch("right")
    with torch.no_grad():
        assert deviation(peer_logits(theirs, tokens, valid), our_logits(ours, tokens, valid), valid) < 1e-4


def test_copies_and_leftovers_of_published_files(tmp_path: Path) -> None:
    drawn(t.T5ForConditionalGeneration(t.T5Config(**SMALL))).save_pretrained(tmp_path)
    tensors = held(tmp_path)
    _, expected = read_model(tmp_path)
    expected = {name: np.array(value) for name, value in expected.items()}
    copies = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), tensors["shared.weight"])
    idle = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.zeros((8, 4), np.float32)}
    write(tmp_path / "model.safetensors", {**tensors, **copies, **idle, "lm_head.weight": tensors["shared.weight"]})
    _, found = read_model(tmp_path)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    write(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": tensors["shared.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head.weight is tied to shared.weight by the config, but differs"):
        read_model(tmp_path)


def test_a_whole_file_gives_its_encoder(tmp_path: Path) -> None:
    theirs = drawn(with_own_head(t.T5ForConditionalGeneration(t.T5Config(**SMALL, **GATED))))
    theirs.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**data, "architectures": ["T5EncoderModel"]}))
    _, _, ours = load_ours(tmp_path)
    tokens, valid = batch("right")
    with torch.no_grad():
        expected = theirs.encoder(input_ids=tokens, attention_mask=valid.long()).last_hidden_state
        assert deviation(expected, our_encoded(ours, tokens, valid), valid) < 1e-4


SIZES = {
    "t5-small": (512, 64, 2048, 6, 8),
    "t5-base": (768, 64, 3072, 12, 12),
    "t5-large": (1024, 64, 4096, 24, 16),
    "t5-3b": (1024, 128, 16384, 24, 32),
    "t5-11b": (1024, 128, 65536, 24, 128),
    "t5-v1.1-base": (768, 64, 2048, 12, 12),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_configs_give_our_presets(name: str) -> None:
    sizes = dict(zip(("d_model", "d_kv", "d_ff", "num_layers", "num_heads"), SIZES[name], strict=True))
    released = {key: value for key, value in LEGACY.items() if key != "relative_attention_max_distance"}
    own = {**GATED, "num_decoder_layers": sizes["num_layers"]} if "v1.1" in name else {}
    data = {**released, **sizes, **own, "vocab_size": 32128, "relative_attention_num_buckets": 32}
    assert read_config(data) == qkv.preset(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-mish"}, "feed_forward_proj is 'gated-mish'"),
        ({**GATED, "dense_act_fn": "silu"}, "dense_act_fn is 'silu', but feed_forward_proj 'gated-gelu' means"),
        ({"is_gated_act": True}, "is_gated_act is True, but feed_forward_proj 'relu' means False"),
        ({"relative_attention_kind": "x"}, "relative_attention_kind .* is not understood"),
    ],
)
def test_what_is_not_t5_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config({**LEGACY, **change})


def test_every_config_here_is_written_as_it_was_read() -> None:
    for name, peer in PEERS.items():
        if peer.legacy:
            config = read_config(peer.legacy)
            assert read_config(write_config(config, family_for(config))) == config, name


def test_a_scaled_head_of_its_own_cannot_be_said() -> None:
    config = read_config({**LEGACY, **GATED}).override({"head.scale": "rsqrt_d_model"})
    with pytest.raises(CheckpointError, match="no family can express this model"):
        family_for(config)
