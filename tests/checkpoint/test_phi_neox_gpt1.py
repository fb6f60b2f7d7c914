"""Phi-3, GPT-NeoX and GPT-1 against the peer library, and their released config.json files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as t

import qkv
from checkpoint.as_family import check_as, drawn, family
from checkpoint.harness import VOCAB, Peer, logits, our_logits
from qkv.checkpoint.huggingface import read_config, read_model, write_config
from qkv.checkpoint.safetensors import SINGLE, File, write
from qkv.config import ModelConfig
from qkv.errors import CheckpointError

SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
# As microsoft/Phi-3-mini-4k-instruct has them. The whole vocabulary, since the peer's default padding token is 32000.
PHI3 = SMALL | {
    "vocab_size": 32064, "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "initializer_range": 0.02,
    "num_key_value_heads": 4, "original_max_position_embeddings": 64, "pad_token_id": 32000, "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True,
}  # fmt: skip
# As EleutherAI/pythia-70m has them. A quarter of a head of 16 makes two pairs: one alone would tell no theta.
WIDE = SMALL | {"num_attention_heads": 2}
NEOX = WIDE | {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-05, "rotary_emb_base": 10000,
    "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.24.0",
    "use_cache": True, "use_parallel_residual": True,
}  # fmt: skip
# As openai-community/openai-gpt has them.
GPT1 = {
    "afn": "gelu", "architectures": ["OpenAIGPTLMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "openai-gpt", "n_ctx": 64, "n_embd": 32,
    "n_head": 4, "n_layer": 3, "n_positions": 64, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": VOCAB,
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.5, 6.0, 11.0]}


def phi3(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**SMALL, "vocab_size": 32064, "sliding_window": 5, "original_max_position_embeddings": 64, **changes}
    return Peer(lambda: t.Phi3ForCausalLM(t.Phi3Config(**settings)), logits, our_logits, {**PHI3, **legacy})


def longrope(trained: int, **changes: Any) -> Peer:
    """A model of 64 positions, trained on `trained`."""
    legacy = {"original_max_position_embeddings": trained, "rope_scaling": {"type": "longrope", **FACTORS}, **changes}
    table = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
    return phi3(legacy, original_max_position_embeddings=trained, rope_parameters=table, **changes)


def neox(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {**WIDE, **changes}
    return Peer(lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**settings)), logits, our_logits, {**NEOX, **legacy})


def gpt1(legacy: dict[str, Any], **changes: Any) -> Peer:
    settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **changes}
    return Peer(lambda: t.OpenAIGPTLMHeadModel(t.OpenAIGPTConfig(**settings)), logits, our_logits, {**GPT1, **legacy})


PEERS = {
    "phi3 mini-4k": phi3({}),
    "phi3 medium-grouped": phi3({"num_key_value_heads": 2}, num_key_value_heads=2),
    "phi3 phi-4": phi3(
        {"num_key_value_heads": 2, "rope_theta": 250000, "sliding_window": None},
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 250000},
        sliding_window=None,
    ),
    # Both rows of the harness (13 and 9 tokens) lie on one side of the trained length: the peer has one for a batch.
    "phi3 mini-128k-short-rows": longrope(16),
    "phi3 mini-128k-long-rows": longrope(8),
    "phi3 phi-4-mini": phi3(
        {
            "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "full_attn_mod": 1, "interpolate_factor": 1,
            "lm_head_bias": False, "mlp_bias": False, "num_attention_heads": 2, "num_key_value_heads": 1,
            "original_max_position_embeddings": 8,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1, 1.5, 2, 3, 5, 9.5]},
        },
        tie_word_embeddings=True,
        num_attention_heads=2,
        num_key_value_heads=1,
        original_max_position_embeddings=8,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 6, "long_factor": [1, 1.5, 2, 3, 5, 9.5],
        },
    ),
    "gpt-neox pythia": neox({}),
    "gpt-neox 20b": neox(
        {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "layer_norm_eps": 1e-4}, layer_norm_eps=1e-4
    ),
    "gpt-neox sequential": neox({"use_parallel_residual": False}, use_parallel_residual=False),
    "gpt-neox whole heads, tied, unbiased": neox(
        {"rotary_pct": 1.0, "rotary_emb_base": 500, "tie_word_embeddings": True, "attention_bias": False},
        rope_parameters={"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        attention_bias=False,
    ),
    "gpt-neox linear": neox(
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "classifier_dropout": 0.1, "hidden_dropout": 0.1},
        rope_parameters={"rope_type": "linear", "rope_theta": 10000, "factor": 4.0, "partial_rotary_factor": 0.25},
        hidden_dropout=0.1,
    ),
    "gpt1": gpt1({}),
    "gpt1 relu, untied": gpt1(
        {"afn": "relu", "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
        afn="relu",
        layer_norm_epsilon=1e-2,
        tie_word_embeddings=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check_as(name.partition(" ")[0], PEERS[name], tmp_path)


def reads_as(folder: Path, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    """A file of these tensors in place of the folder's own is read as the expected model."""
    write(folder / "new", stored)
    (folder / "new").rename(folder / SINGLE)  # what is still mapped from the old file stays readable
    found = read_model(folder)[1]
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_the_masks_that_old_files_hold_are_no_parameters(tmp_path: Path) -> None:
    theirs = drawn(PEERS["gpt-neox pythia"].make())
    theirs.save_pretrained(tmp_path)
    expected = read_model(tmp_path)[1]
    old = dict(File(tmp_path / SINGLE))
    for layer in range(2):
        prefix = f"gpt_neox.layers.{layer}.attention"
        old[f"{prefix}.bias"] = np.tril(np.ones((1, 1, 64, 64), np.float32))
        old[f"{prefix}.masked_bias"] = np.array(-1e9, np.float32)
        old[f"{prefix}.rotary_emb.inv_freq"] = np.ones(1, np.float32)
    reads_as(tmp_path, old, expected)


def test_the_release_of_gpt_1_holds_the_bare_model(tmp_path: Path) -> None:
    theirs = drawn(PEERS["gpt1"].make())
    theirs.save_pretrained(tmp_path)
    expected = read_model(tmp_path)[1]
    bare = {name.removeprefix("transformer."): part for name, part in File(tmp_path / SINGLE).items()}
    bare |= {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32)) for layer in range(3)}
    reads_as(tmp_path, bare, expected)


def test_the_released_config_of_gpt_1_is_the_preset_both_ways() -> None:
    large = GPT1 | {"n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512, "vocab_size": 40478}
    assert read_config(large) == qkv.preset("gpt-1")
    written = write_config(qkv.preset("gpt-1"), family("gpt1"))
    assert {key: large.get(key, value) for key, value in written.items()} == written


def rotary(config: ModelConfig) -> dict[str, Any]:
    """The positions of the first layer."""
    return config.decoder.block(0).attention.positions.to_dict()


def test_longrope_is_written_as_the_releases_write_it() -> None:
    data = PHI3 | {"original_max_position_embeddings": 16, "rope_scaling": {"type": "su", **FACTORS}}
    config = read_config(data)
    assert rotary(config)["scaling"]["factor"] == 4.0
    written = write_config(config, family("phi3"))
    assert written["rope_scaling"] == {"type": "longrope", **FACTORS}
    assert written["original_max_position_embeddings"] == 16
    given = read_config(data | {"rope_scaling": {"type": "longrope", "factor": 3.0, **FACTORS}})
    assert write_config(given, family("phi3"))["rope_scaling"] == {"type": "longrope", "factor": 3.0, **FACTORS}


def test_the_names_of_neox_and_the_common_ones_say_the_same() -> None:
    common = {"rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert read_config(NEOX | common) == read_config(NEOX)
    only_common = {key: value for key, value in NEOX.items() if not key.startswith("rotary")} | common
    assert read_config(only_common | {"partial_rotary_factor": 0.5}) == read_config(NEOX | {"rotary_pct": 0.5})
    assert rotary(read_config(NEOX | {"rotary_pct": 0.5}))["fraction"] == 0.5
    assert read_config(NEOX | {"hidden_act": "gelu_fast"}).decoder.block(0).ffn.activation == "gelu-tanh"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (NEOX | {"rope_theta": 500}, "rope_theta is 500, but rotary_emb_base, its other name, is 10000"),
        (NEOX | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but rotary_pct"),
        (NEOX | {"attention_bais": True}, "attention_bais"),
        (PHI3 | {"rope_scaling": {"type": "yarn", **FACTORS}}, "rope_type is 'yarn'; Phi-3 has 'longrope' only"),
        (PHI3 | {"attention_bias": True}, "attention_bias is True"),
        (GPT1 | {"afn": "gelu_new"}, "afn is 'gelu_new'"),
    ],
)
def test_what_is_not_understood_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_config(data)


def test_phi3_has_no_other_scaling() -> None:
    config = read_config(PHI3).override(
        {"decoder.layers.0.attention.positions.scaling": {"kind": "linear", "factor": 2.0}}
    )
    with pytest.raises(CheckpointError, match="no 'linear' scaling"):
        write_config(config, family("phi3"))
