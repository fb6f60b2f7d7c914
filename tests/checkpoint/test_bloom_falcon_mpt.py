"""BLOOM, Falcon and MPT against the peer library, and against the published files' own forms."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import qkv
from checkpoint.as_family import check_as
from checkpoint.harness import VOCAB, Peer, batch, check, deviation, load_ours, logits, our_logits, randomised
from qkv.checkpoint.families import falcon as falcon_family
from qkv.checkpoint.huggingface import read_config, read_model, write_config
from qkv.config import Alibi, ModelConfig
from qkv.errors import CheckpointError
from qkv.nn import Transformer

# config.json as published, with the sizes of bigscience/bloom-560m, tiiuae/falcon-7b and mosaicml/mpt-7b.
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "architectures": ["BloomForCausalLM"], "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024,
    "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "transformers_version": "4.20.0", "use_cache": True,
    "vocab_size": 250880,
}  # fmt: skip
FALCON = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
# As tiiuae/falcon-rw-1b has them.
FALCON_RW = FALCON | {
    "alibi": True, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048, "multi_query": False,
    "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304,
}  # fmt: skip
MPT_ATTENTION = {
    "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
}  # fmt: skip
MPT = {
    "architectures": ["MPTForCausalLM"], "attn_config": MPT_ATTENTION,
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "d_model": 4096, "emb_pdrop": 0,
    "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"init_std": 0.02, "name": "kaiming_normal_"},
    "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt",
    "n_heads": 32, "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "transformers_version": "4.28.1",
    "use_cache": False, "verbose": 0, "vocab_size": 50432,
}  # fmt: skip


def bloom(**changes: Any) -> Peer:
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, **changes}
    sizes = {"vocab_size": VOCAB, "n_embed": settings["hidden_size"], "n_layer": 2}
    # The published configs spell the heads either way; what a test changes is in the peer's own words.
    same = {key: value for key, value in changes.items() if key not in ("hidden_size", "n_head")}
    legacy = BLOOM | sizes | {"num_attention_heads": settings["n_head"]} | same
    return Peer(lambda: t.BloomForCausalLM(t.BloomConfig(**settings)), logits, our_logits, legacy)


def falcon(**changes: Any) -> Peer:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}
    legacy = FALCON | {key: value for key, value in sizes.items() if key != "rope_parameters"}
    if "rope_parameters" in changes:
        legacy["rope_theta"] = changes["rope_parameters"]["rope_theta"]
    return Peer(lambda: t.FalconForCausalLM(t.FalconConfig(**sizes)), logits, our_logits, legacy)


def falcon_rw(**changes: Any) -> Peer:
    """By the peer's default path: its eager one adds ALiBi twice in release 5, through the mask and to the scores."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}
    legacy = FALCON_RW | sizes
    settings = {key: legacy[key] for key in ("alibi", "bias", "multi_query", "parallel_attn")}
    return Peer(lambda: t.FalconForCausalLM(t.FalconConfig(**sizes | settings)), logits, our_logits, legacy)


class MptForCausalLM(t.MptForCausalLM):
    """The peer, made to heed `alibi_bias_max` as the published modelling code does; its own always takes 8."""

    def __init__(self, config: t.MptConfig) -> None:
        super().__init__(config)
        slopes = partial(build_mpt_alibi_tensor, alibi_bias_max=config.attn_config.alibi_bias_max)
        self.transformer.build_mpt_alibi_tensor = slopes


def mpt(model: type[nn.Module] = t.MptForCausalLM, attention: dict[str, Any] | None = None, **changes: Any) -> Peer:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, **changes}
    table = MPT_ATTENTION | (attention or {})
    legacy = MPT | sizes | {"attn_config": table}
    return Peer(lambda: model(t.MptConfig(**sizes, attn_config=dict(table))), logits, our_logits, legacy)


GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2}
PEERS = {
    "bloom": bloom(),
    "bloom-heads-no-power-of-two": bloom(hidden_size=48, n_head=6),
    "bloom-untied": bloom(tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "falcon-7b": falcon(),
    "falcon-7b-biases": falcon(bias=True, ffn_hidden_size=40),
    "falcon-own-heads": falcon(multi_query=False),
    "falcon-40b": falcon(**GROUPS),
    "falcon-11b": falcon(
        **GROUPS, num_ln_in_parallel_attn=1, ffn_hidden_size=64, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "falcon-rw": falcon_rw(),
    "falcon-rw-heads-no-power-of-two": falcon_rw(hidden_size=48, num_attention_heads=6),
    "falcon-rw-many-heads": falcon_rw(hidden_size=64, num_attention_heads=32),
    "falcon-rw-one-key": falcon_rw(multi_query=True, ffn_hidden_size=40),
    "falcon-rw-no-bias": falcon_rw(bias=False),
    "falcon-alibi-at-once": falcon_rw(parallel_attn=True),
    "mpt": mpt(),
    "mpt-heads-no-power-of-two": mpt(d_model=48, n_heads=6),
    "mpt-scale": mpt(attention={"softmax_scale": 0.3}),
    "mpt-storywriter-slopes": mpt(MptForCausalLM, {"alibi_bias_max": 16}),
    "mpt-clipped": mpt(attention={"clip_qkv": 0.4}),
}  # fmt: skip


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_peer_both_ways(name: str, tmp_path: Path) -> None:
    check(PEERS[name], tmp_path)


def test_steeper_slopes_change_the_result(tmp_path: Path) -> None:
    # Else the case of 16 above would show nothing: the library's own model takes 8 whatever the file says.
    theirs = randomised(mpt(attention={"alibi_bias_max": 16}).make())
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    tokens, valid = batch("none")
    with torch.no_grad():
        assert deviation(logits(theirs, tokens, valid), our_logits(ours, tokens, valid), valid) > 1e-3


def test_falcon_whose_branches_run_in_turn_with_angles(tmp_path: Path) -> None:
    # GPT-NeoX can say the same, so that it must be asked to stay Falcon.
    check_as("falcon-rw", falcon_rw(alibi=False), tmp_path)


@pytest.mark.parametrize("change", [{"scaled": False}, {"rounded": False}])
def test_each_peculiarity_of_falcon_rw_is_seen(change: dict[str, bool], tmp_path: Path) -> None:
    # Rounding shows where slopes are no powers of two; a few tokens are enough, since slopes are rounded as well.
    theirs = randomised(falcon_rw(hidden_size=64, num_attention_heads=32).make())
    theirs.save_pretrained(tmp_path)
    config, tensors, _ = load_ours(tmp_path)
    changes = {f"decoder.layers.*.attention.positions.{name}": value for name, value in change.items()}
    ours = Transformer(config.override(changes)).eval()
    ours.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    tokens, valid = batch("none")
    with torch.no_grad():
        assert deviation(logits(theirs, tokens, valid), our_logits(ours, tokens, valid), valid) > 2e-4


def test_falcon_rw_is_exact_where_rounding_is_coarse(tmp_path: Path) -> None:
    # Beyond position 256 bfloat16 skips positions: neighbours have one bias.
    theirs = randomised(falcon_rw(num_hidden_layers=1).make())
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    tokens = torch.randint(3, VOCAB, (1, 700), generator=torch.Generator().manual_seed(1))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        assert deviation(logits(theirs, tokens, valid), our_logits(ours, tokens, valid), valid) < 1e-4


def test_published_falcon_rw_has_its_size() -> None:
    config = read_config(FALCON_RW)
    assert config.decoder is not None
    assert config.decoder.block(0).attention.positions == Alibi(scaled=True, rounded=True)
    d, v = 2048, 50304
    assert config.n_parameters == v * d + 24 * (12 * d * d + 13 * d) + 2 * d == 1_311_625_216


def test_a_clip_changes_the_result(tmp_path: Path) -> None:
    theirs = randomised(mpt(attention={"clip_qkv": 0.4}).make())
    theirs.save_pretrained(tmp_path)
    config, tensors, _ = load_ours(tmp_path)
    ours = Transformer(config.override({"decoder.layers.*.attention.clip": None})).eval()
    ours.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    tokens, valid = batch("none")
    with torch.no_grad():
        assert deviation(logits(theirs, tokens, valid), our_logits(ours, tokens, valid), valid) > 1e-2


def alike(found: ModelConfig, preset: str) -> None:
    """The preset, up to how its weights were drawn."""
    assert found.override({"init": qkv.preset(preset).init}) == qkv.preset(preset)


def test_published_bloom_configs_are_the_presets() -> None:
    alike(read_config(BLOOM), "bloom-560m")
    big = {key: value for key, value in BLOOM.items() if key not in ("num_attention_heads", "n_inner")}
    big |= {"n_embed": 14336, "hidden_size": 14336, "n_head": 112, "n_layer": 70, "seq_length": 2048,
            "slow_but_exact": False, "pretraining_tp": 4}  # fmt: skip
    alike(read_config(big), "bloom-176b")


def test_published_falcon_7b_has_its_size() -> None:
    # 6,921,720,704 parameters: 65,024 * 4,544 + 32 * (2 * 4,544 + 4,544 * (4,544 + 128) + 4,544^2 + 8 * 4,544^2) + ...
    d, v, f = 4544, 65024, 4 * 4544
    layer = 2 * d + d * (d + 128) + d * d + 2 * d * f
    assert read_config(FALCON).n_parameters == v * d + 32 * layer + 2 * d == 6_921_720_704


def test_published_mpt_7b_has_its_size() -> None:
    assert read_config(MPT).n_parameters == 50432 * 4096 + 32 * (12 * 4096**2 + 2 * 4096) + 4096 == 6_649_286_656


def test_files_without_the_prefix_are_the_same_bloom(tmp_path: Path) -> None:
    # As published: `h.0.mlp...` and `word_embeddings.weight`, not `transformer.h.0.mlp...`.
    randomised(bloom().make()).save_pretrained(tmp_path)
    config, expected = read_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): array for name, array in load_file(file).items()}, file)
    again, found = read_model(tmp_path)
    assert again == config
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert set(found) == set(expected)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
        (BLOOM, {"hidden_size": 512}, "must be equal"),
        (BLOOM, {"n_head_kv": 4}, "n_head_kv"),
        (FALCON_RW, {"new_decoder_architecture": True}, "new_decoder_architecture True"),
        (FALCON_RW, {"alibi": "yes"}, "alibi is 'yes'"),
        (FALCON, {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3"),
        (MPT, {"attn_config": MPT_ATTENTION | {"alibi": False}}, "alibi is False"),
        (MPT, {"attn_config": MPT_ATTENTION | {"rope": True}}, "rope (True) is not understood"),
        (MPT, {"no_bias": False}, "no_bias is False"),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(published | changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_what_falcon_cannot_say_is_not_written() -> None:
    config = read_config(FALCON).override({"decoder.layers.0.residual": {"kind": "pre"}})
    with pytest.raises(CheckpointError, match="falcon cannot express this model"):
        write_config(config, falcon_family.FAMILIES[1])
