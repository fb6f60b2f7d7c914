"""Gemma 1, 2 and 3 against the peer library, and their released config.json files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor

import qkv
from checkpoint.as_family import check_as, drawn, family
from checkpoint.harness import VOCAB, Peer, batch, deviation, logits, our_logits
from qkv.checkpoint.huggingface import read_config, read_model, write_config
from qkv.checkpoint.safetensors import File, write
from qkv.errors import CheckpointError

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
}  # fmt: skip
COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.42.4", "use_cache": True,
}  # fmt: skip
# As google/gemma-2b, google/gemma-2-2b and google/gemma-3-1b-it have them.
GEMMA = SMALL | COMMON | {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu", "rope_scaling": None,
    "rope_theta": 10000.0,
}  # fmt: skip
GEMMA2 = SMALL | COMMON | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "rope_theta": 10000.0, "sliding_window": 5,
    "sliding_window_size": 5,
}  # fmt: skip
GEMMA3 = SMALL | COMMON | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 5, "sliding_window_pattern": 6,
}  # fmt: skip
LOCAL, GLOBAL = "sliding_attention", "full_attention"
LINEAR = {"factor": 8.0, "rope_type": "linear"}


def eager_logits(model: Any, tokens: Tensor, valid: Tensor) -> Tensor:
    """The peer's logits by the one path that has Gemma 2's softcap."""
    model.set_attn_implementation("eager")
    return logits(model, tokens, valid)


def gemma(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, **changes}
    return Peer(lambda: t.GemmaForCausalLM(t.GemmaConfig(**settings)), logits, our_logits, {**GEMMA, **legacy})


def gemma2(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "sliding_window": 5, "query_pre_attn_scalar": 12, **changes}
    return Peer(lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**settings)), eager_logits, our_logits, {**GEMMA2, **legacy})


def gemma3(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "sliding_window": 5, "query_pre_attn_scalar": 12, **changes}
    return Peer(lambda: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**settings)), logits, our_logits, {**GEMMA3, **legacy})


PEERS = {
    "gemma": gemma({}),
    "gemma-untied-biased": gemma(
        {"tie_word_embeddings": False, "attention_bias": True}, tie_word_embeddings=False, attention_bias=True
    ),
    "gemma-every-head": gemma({"num_key_value_heads": 4, "rope_theta": 500.0}, num_key_value_heads=4, rope_theta=500.0),
    "gemma2": gemma2({}),
    "gemma2-27b": gemma2({"query_pre_attn_scalar": 7}, query_pre_attn_scalar=7),
    "gemma2-tight-caps": gemma2(
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma2-without-caps": gemma2(
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": gemma3({"num_hidden_layers": 8}, num_hidden_layers=8),
    "gemma3-large": gemma3(
        {"num_hidden_layers": 6, "query_pre_attn_scalar": 7, "rope_scaling": LINEAR, "rope_theta": 500.0},
        num_hidden_layers=6,
        query_pre_attn_scalar=7,
        rope_parameters={
            GLOBAL: {"rope_theta": 500.0, **LINEAR},
            LOCAL: {"rope_theta": 10000, "rope_type": "default"},
        },
    ),
    "gemma3-listed": gemma3(
        {"layer_types": [GLOBAL, LOCAL, LOCAL], "_sliding_window_pattern": 6, "use_bidirectional_attention": False},
        layer_types=[GLOBAL, LOCAL, LOCAL],
    ),
    "gemma3-local-only": gemma3({}),
    "gemma3-short-cycle-capped": gemma3(
        {"num_hidden_layers": 5, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
        num_hidden_layers=5,
        sliding_window_pattern=2,
        final_logit_softcapping=3.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_as(name.partition("-")[0], PEERS[name], tmp_path)


GEMMA_3_270M = {
    "_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640,
    "initializer_range": 0.02, "intermediate_size": 2048, "layer_types": ([LOCAL] * 5 + [GLOBAL]) * 3,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18,
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0", "use_bidirectional_attention": False,
    "use_cache": True, "vocab_size": 262144,
}  # fmt: skip


def test_the_released_config_is_the_preset_both_ways() -> None:
    preset = qkv.preset("gemma-3-270m")
    assert read_config(GEMMA_3_270M) == preset
    written = write_config(preset, family("gemma3"))
    assert {key: GEMMA_3_270M[key] for key in written if key in GEMMA_3_270M} == {
        key: value for key, value in written.items() if key in GEMMA_3_270M
    }
    derived = {key: value for key, value in GEMMA_3_270M.items() if key != "layer_types"}
    assert read_config(derived) == preset


VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TOLD = r"tensors \(.*\) are not loaded: they belong to the vision part"


def multimodal() -> Any:
    """A model that reads images as well. Of the vocabulary the last ids stand for images."""
    text = SMALL | {"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 12}
    tokens = {"boi_token_index": 93, "eoi_token_index": 94, "image_token_index": 95}
    config = t.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, **tokens)
    return drawn(t.Gemma3ForConditionalGeneration(config))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_one_is_read_and_the_rest_told(prefix: str, tmp_path: Path) -> None:
    # The releases write `language_model.model.layers`; those of some months `model.language_model.layers`.
    theirs = multimodal()
    theirs.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    held = {name: np.array(value) for name, value in File(file).items()}
    vision = "" if prefix.startswith("language_model") else "model."
    text = {name: array for name, array in held.items() if name.startswith("language_model.model.")}
    renamed = {name.replace("language_model.model.", prefix): array for name, array in text.items()}
    write(file, renamed | {f"{vision}{name}": array for name, array in held.items() if name not in text})
    with pytest.warns(UserWarning, match=f"{len(held) - len(text)} {TOLD}"):
        lm = qkv.load(tmp_path / "theirs")
    tokens, valid = batch("right")
    tokens = tokens.clamp(max=92)
    with torch.no_grad():
        expected = logits(theirs, tokens, valid)
        assert deviation(expected, our_logits(lm.model, tokens, valid), valid) < 1e-4
    lm.save(tmp_path / "ours", "hf")
    again = t.Gemma3ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        assert deviation(expected, logits(again, tokens, valid), valid) < 1e-5
    saved = File(tmp_path / "ours" / "model.safetensors")
    assert {name.removeprefix("language_model.") for name in text} == set(saved)
    assert all(np.array_equal(saved[name.removeprefix("language_model.")], text[name]) for name in text)


def test_unknown_tensors_of_a_multimodal_model_are_refused(tmp_path: Path) -> None:
    multimodal().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = {name: np.array(value) for name, value in File(file).items()}
    write(file, held | {"audio_tower.weight": np.ones(3, np.float32)})
    with pytest.warns(UserWarning, match=TOLD), pytest.raises(CheckpointError, match=r"audio_tower\.weight is not und"):
        read_model(tmp_path)


# As google/gemma-3-4b-it has it: what it leaves out is what the peer's config class says.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": LINEAR, "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


def test_a_released_multimodal_config_is_its_text_model() -> None:
    config = read_config(GEMMA_3_4B)
    peer = t.Gemma3Config(**{key: GEMMA_3_4B[key] for key in ("text_config", "vision_config")}).text_config
    assert config == read_config(peer.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    d, v = 2560, 262_208
    layer = 4 * d + 2 * 256 + d * (2 * 8 + 2 * 4) * 256 + 3 * d * 10_240
    assert config.n_parameters == v * d + 34 * layer + d == 3_880_263_168


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GEMMA_3_4B | {"audio_config": {}}, r"audio_config \({}\) is not understood"),
        (GEMMA_3_4B | {"text_config": {"hidden_sise": 1}}, r"text_config: hidden_sise \(1\) is not understood"),
        (GEMMA_3_4B | {"text_config": None}, "text_config must be a table"),
    ],
)
def test_what_a_multimodal_config_says_wrongly_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


@pytest.mark.parametrize(
    ("keys", "activation"),
    [
        ({}, "gelu-tanh"),
        ({"hidden_act": "gelu"}, "gelu-tanh"),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None}, "gelu-tanh"),
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu-tanh"),
        ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu"}, "gelu"),
    ],
)
def test_the_activation_of_gemma_1_has_two_keys(keys: dict[str, Any], activation: str) -> None:
    config = read_config({key: value for key, value in GEMMA.items() if key != "hidden_act"} | keys)
    assert config.decoder.block(0).ffn.activation == activation
    assert read_config(write_config(config, family("gemma"))) == config


def test_the_scale_is_ours_only_where_it_is_not_that_of_the_width() -> None:
    assert read_config(GEMMA2).decoder.block(0).attention.scale is None
    other = read_config(GEMMA2 | {"query_pre_attn_scalar": 144})
    assert other.decoder.block(0).attention.scale == pytest.approx(1 / 12, rel=1e-15)
    assert write_config(other, family("gemma2"))["query_pre_attn_scalar"] == 144
    with pytest.raises(CheckpointError, match=r"would lose decoder\.layers\.0\.attention\.scale"):
        write_config(other.override({"decoder.layers.*.attention.scale": 0.3}), family("gemma2"))


def test_a_missing_softcap_is_the_default_and_null_is_none() -> None:
    absent = {key: value for key, value in GEMMA2.items() if "softcapping" not in key}
    assert read_config(absent) == read_config(GEMMA2)
    without = read_config(GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert without.decoder.block(0).attention.softcap is None
    assert without.head.softcap is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters has no table 'sliding_attention'"),
        (GEMMA2 | {"query_pre_attn_scaler": 1}, "query_pre_attn_scaler"),
        (GEMMA | {"hidden_act": "gegelu"}, "hidden_act is 'gegelu'"),
    ],
)
def test_what_is_not_understood_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


def test_scaled_local_layers_cannot_be_written() -> None:
    config = read_config(GEMMA3)
    scaled = config.override({"decoder.layers.0.attention.positions.scaling": {"kind": "linear", "factor": 2.0}})
    with pytest.raises(CheckpointError, match=r"would lose decoder\.layers\.0\.attention\.positions\.scaling"):
        write_config(scaled, family("gemma3"))
