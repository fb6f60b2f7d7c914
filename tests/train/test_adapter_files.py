"""Files of adapters, in PEFT's format: read, written, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoint.safetensors import File
from qkv.checkpoint.safetensors import write as write_file
from qkv.config.presets import preset
from qkv.config.toy import toy
from qkv.errors import CheckpointError
from qkv.model.weights import skeleton
from qkv.nn import Transformer
from qkv.train.adapter_files import CONFIG, WEIGHTS, Names, load_adapter, read_config, save_adapter
from qkv.train.adapter_layers import Lora
from qkv.train.adapters import adapters

from .adapted import TOKENS, apart, learned, llama, logits


def saved(model: Transformer, folder: Path, family: str | None = None) -> tuple[dict[str, Any], set[str]]:
    save_adapter(model, folder, family=family)
    return json.loads((folder / CONFIG).read_text(encoding="utf-8")), set(File(folder / WEIGHTS))


@pytest.mark.parametrize("family", [None, "llama"])
def test_an_adapter_comes_back_from_its_files_bit_for_bit(tmp_path: Path, family: str | None) -> None:
    model = learned(llama(), dropout=0.1, rslora=True, alpha=6.5)
    config, names = saved(model, tmp_path / "a", family)
    layer = "model.layers.0.self_attn.q_proj" if family else "decoder.layers.0.attention.q_proj"
    assert f"base_model.model.{layer}.lora_A.weight" in names
    assert (config["r"], config["lora_alpha"], config["use_rslora"], config["fan_in_fan_out"]) == (4, 6.5, True, False)
    assert layer in config["target_modules"]
    again = llama()
    assert len(load_adapter(again, tmp_path / "a", "other", family)) == 14
    assert adapters(again) == {"other": Lora(4, 6.5, 0.1, True)}
    assert torch.equal(logits(again), logits(model))
    save_adapter(model, tmp_path / "a", family=family)  # an older adapter may be replaced


def gpt2() -> Transformer:
    return qkv.build(toy(preset("gpt2")), seed=3)


def test_fused_matrices_are_refused_and_stored_ones_of_the_other_order_are_said(tmp_path: Path) -> None:
    model = learned(gpt2(), targets=("down_proj", "o_proj"))
    config, names = saved(model, tmp_path / "a", "gpt2")
    assert config["fan_in_fan_out"] is True
    assert "base_model.model.transformer.h.1.mlp.c_proj.lora_B.weight" in names
    again = gpt2()
    load_adapter(again, tmp_path / "a", family="gpt2")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(CheckpointError, match="c_attn holds q_proj, k_proj, v_proj in one matrix"):
        save_adapter(learned(gpt2(), targets=("q_proj",)), tmp_path / "b", family="gpt2")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "family", "ours", "theirs"),
    [
        ("t5-v1.1-base", "t5", "decoder.layers.1.ffn.up_proj", "decoder.block.1.layer.2.DenseReluDense.wi_1"),
        ("deepseek-v2", "deepseek-v2", "decoder.layers.1.attention.kv_up_proj", "model.layers.1.self_attn.kv_b_proj"),
        (
            "bert-base-uncased",
            "bert-model",
            "encoder.layers.0.attention.o_proj",
            "encoder.layer.0.attention.output.dense",
        ),
    ],
)
def test_layers_are_called_as_in_the_files_of_the_family(name: str, family: str, ours: str, theirs: str) -> None:
    names = Names.of(skeleton(toy(preset(name))), family)
    assert names.theirs(ours) == theirs
    assert names.ours({theirs: np.zeros(1)}) == {theirs: ours}


def test_a_family_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    for family, said in (
        ("gpt2", r"'gpt2' has no place for decoder\.layers\.0\.ffn\.gate_proj\.weight"),
        ("phi3", "qkv_proj holds q_proj, k_proj, v_proj in one matrix"),
        ("gemma3-multimodal", "only read"),
        ("none", "is not known; choose one of gpt1, gpt2"),
    ):
        with pytest.raises(CheckpointError, match=said):
            save_adapter(learned(llama()), tmp_path / "a", family=family)
    assert list(tmp_path.iterdir()) == []


def test_names_are_read_in_every_spelling_of_the_family_but_only_once(tmp_path: Path) -> None:
    model = learned(gpt2(), targets=("down_proj",))
    save_adapter(model, tmp_path, family="gpt2")
    long = {name: np.array(value) for name, value in File(tmp_path / WEIGHTS).items()}
    short = {name.replace("transformer.", ""): value for name, value in long.items()}
    write_file(tmp_path / WEIGHTS, short)
    again = gpt2()
    load_adapter(again, tmp_path, family="gpt2")
    assert torch.equal(logits(again), logits(model))
    write_file(tmp_path / WEIGHTS, long | short)
    with pytest.raises(CheckpointError, match="names a layer twice"):
        load_adapter(gpt2(), tmp_path, family="gpt2")


def edited(folder: Path, **changes: Any) -> Path:
    """An adapter whose config says something else."""
    save_adapter(learned(llama()), folder, family="llama")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8")) | changes
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("alpha_pattern", {"q_proj": 2}),
        ("layer_replication", [[0, 1]]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("something_new", 3),
    ],
)
def test_an_option_that_is_not_computed_is_refused_by_its_name(tmp_path: Path, key: str, value: Any) -> None:
    model = llama()
    with pytest.raises(CheckpointError, match=key):
        load_adapter(model, edited(tmp_path / "a", **{key: value}), family="llama")
    assert adapters(model) == {}
    assert all(p.requires_grad for p in model.parameters())


def test_options_that_are_switched_off_or_say_where_it_comes_from_are_read(tmp_path: Path) -> None:
    off = {"something_new": None, "use_dora": False, "rank_pattern": {}, "peft_version": "0.18.0", "revision": "main"}
    load_adapter(llama(), edited(tmp_path / "a", **off), family="llama")
    assert read_config({"peft_type": "LORA", "r": 2, "lora_alpha": 4}, "here") == (Lora(2, 4), False)
    with pytest.raises(CheckpointError, match="here: r is missing; lora_alpha is missing"):
        read_config({"peft_type": "LORA"}, "here")
    for wrong in ({"r": 0}, {"r": 2.0}, {"r": "2"}, {"lora_alpha": "4"}, {"use_rslora": "yes"}, {"lora_dropout": 1}):
        with pytest.raises(CheckpointError, match=r"^here: "):
            read_config({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **wrong}, "here")


_OFF = (
    "alora_invocation_tokens", "arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config",
    "exclude_modules", "kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config",
    "megatron_config", "modules_to_save", "monteclora_config", "revision", "target_parameters",
    "trainable_token_indices", "use_bdlora", "velora_config",
)  # fmt: skip
_FALSE = ("ensure_weight_tying", "lora_bias", "use_dora", "use_qalora", "use_rslora", "fan_in_fan_out")
WRITTEN_BY_PEFT = {
    **dict.fromkeys(_OFF),
    **dict.fromkeys(_FALSE, False),
    **{"alpha_pattern": {}, "loftq_config": {}, "rank_pattern": {}, "inference_mode": True, "init_lora_weights": True},
    **{"megatron_core": "megatron.core", "peft_version": "0.21.2", "qalora_group_size": 16, "task_type": "CAUSAL_LM"},
    **{"bias": "none", "peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8, "lora_dropout": 0.1},
}
"""Every key that its release 0.21.2 writes."""


def test_a_plain_config_of_peft_is_read() -> None:
    assert read_config(WRITTEN_BY_PEFT, "here") == (Lora(4, 8, 0.1), False)
    for key in ("use_bdlora", "kasa_config", "arrow_config", "use_qalora"):
        with pytest.raises(CheckpointError, match=f"{key} is .*, which qkv does not compute"):
            read_config(WRITTEN_BY_PEFT | {key: {"nblocks": 2}}, "here")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_and_qkv_read_each_other(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft", reason="the peer is not installed")
    from transformers import AutoModelForCausalLM

    lm = qkv.TextModel(llama() if family == "llama" else gpt2(), family=family)
    lm.save(tmp_path / "base", format="hf")
    targets = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["mlp.c_fc", "mlp.c_proj"]}[family]
    asked = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", use_rslora=True)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), asked).eval()
    for name, tensor in theirs.named_parameters():
        if "lora_B" in name:
            tensor.data.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapter(lm.model, tmp_path / "theirs", family=family)
    with torch.no_grad():
        assert apart(logits(lm.model), theirs(TOKENS).logits.double()) < 1e-5
    model = learned(llama() if family == "llama" else gpt2(), targets=("o_proj", "ffn.*"), rslora=True)
    save_adapter(model, tmp_path / "ours", family=family)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    with torch.no_grad():
        assert apart(theirs(TOKENS).logits.double(), logits(model)) < 1e-5


_KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(_KEY), r"q_proj\.lora_A\.weight is missing"),
        (lambda t: t.update({"base_model.model.lm_head.weight": t[_KEY]}), r"lm_head\.weight is not understood"),
        (lambda t: t.update({_KEY: t[_KEY][:2]}), r"q_proj: lora_A is \(2, 32\).*\(4, 32\)"),
        (lambda t: t.clear(), "no tensors"),
        (
            lambda t: t.update({_KEY.replace("s.0", "s.9").replace("A.w", f"{x}.w"): t[_KEY] for x in "AB"}),
            r"layers\.9\.self_attn\.q_proj is no layer here",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], said: str
) -> None:
    folder = edited(tmp_path / "a")
    tensors = {name: np.array(value) for name, value in File(folder / WEIGHTS).items()}
    change(tensors)
    write_file(folder / WEIGHTS, tensors)
    with pytest.raises(CheckpointError, match=said):
        load_adapter(llama(), folder, family="llama")


def test_folders_that_are_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="give the folder of an adapter"):
        load_adapter(llama(), tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="something else"):
        save_adapter(learned(llama()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
