"""What is refused, and what is not, in a Hugging Face folder: one test per report of another implementation's bug."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.checkpoint.families import FAMILIES
from qkv.checkpoint.huggingface import read_config, read_model, token_ids, write_folder
from qkv.checkpoint.rules import Tied, to_ours, to_theirs
from qkv.checkpoint.safetensors import INDEX, SINGLE, File, write
from qkv.checkpoint.source import read_source
from qkv.config.presets import preset
from qkv.errors import CheckpointError

TIED, UNTIED = preset("llama-3.2-1b").toy(), preset("llama-3-8b").toy()
LLAMA = next(family for family in FAMILIES if family.name == "llama").rules
ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 42,
    "pad_token_id": 1, "type_vocab_size": 1,
}  # fmt: skip
Tensors = dict[str, np.ndarray]


def weights(config: qkv.ModelConfig) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=p.shape).astype(np.float32) for name, p in config.shapes().items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "m", UNTIED, weights(UNTIED))
    return tmp_path / "m"


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = {name: np.array(value) for name, value in File(folder / SINGLE).items()}
    change(tensors)
    write(folder / SINGLE, tensors)


def without(name: str) -> Callable[[Tensors], None]:
    """Leave a tensor out."""

    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def reconfigure(folder: Path, **changes: Any) -> None:
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_model(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_b67_a_copy_of_the_tied_head_is_accepted_if_equal(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, TIED, weights(TIED))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    config, tensors = read_model(folder)
    assert config == TIED
    assert "head.weight" not in tensors
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert "lm_head.weight is tied to model.embed_tokens.weight by the config, but differs from it" in refusal(folder)


def test_a_tied_tensor_may_stand_under_its_second_name_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, TIED, weights(TIED))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert np.array_equal(read_model(folder)[1]["embed.tokens.weight"], weights(TIED)["embed.tokens.weight"])


def test_a_copy_of_a_tensor_that_nobody_has_is_refused() -> None:
    # No rule of this map reads `shared.weight`: nothing would say whether the copy is right.
    config, tied = preset("llama-3.2-1b").toy(), (Tied("copy.weight", "shared.weight"),)
    own = to_theirs(config, LLAMA, weights(config))
    with pytest.raises(CheckpointError, match=r"copy\.weight is tied to shared\.weight, which is missing"):
        to_ours(config, LLAMA, own | {"copy.weight": np.ones(3, np.float32)}, tied=tied)


def test_token_ids_of_the_source_are_written_back(tmp_path: Path) -> None:
    source = {"eos_token_id": [2, 3], "pad_token_id": None, "vocab_size": 7}
    source |= {"text_config": {"bos_token_id": 1, "eos_token_id": 2}}
    write_folder(tmp_path / "m", UNTIED, weights(UNTIED), tokens=token_ids(source))
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (1, [2, 3])
    assert "pad_token_id" not in written
    assert written["vocab_size"] == UNTIED.vocab_size
    assert read_model(tmp_path / "m")[0] == UNTIED
    assert read_source(tmp_path / "m").token_ids == {"bos_token_id": 1, "eos_token_id": [2, 3]}


def test_token_ids_do_not_overrule_the_family(tmp_path: Path) -> None:
    # RoBERTa's positions start behind the row of the padding token.
    config = read_config(ROBERTA)
    write_folder(tmp_path / "m", config, weights(config), "roberta", tokens={"pad_token_id": 50, "bos_token_id": 0})
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (written["pad_token_id"], written["bos_token_id"]) == (1, 0)
    assert read_model(tmp_path / "m")[0] == config


def test_b69_a_tied_tensor_stays_one_storage(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", TIED, weights(TIED))
    lm = qkv.load(tmp_path / "m")
    assert [name for name, _ in lm.model.named_parameters() if "head" in name] == []
    lm.save(tmp_path / "again", "hf")
    assert "lm_head.weight" not in File(tmp_path / "again" / SINGLE)


def test_b71_a_file_cut_short_is_refused_when_it_is_opened(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-100])
    assert "damaged or cut short" in refusal(folder)


@pytest.mark.parametrize("header", [b"\xff" * 7 + b"\x7f", (2**40).to_bytes(8, "little"), b"\x00" * 8])
def test_a_header_that_claims_terabytes_is_refused_at_once(folder: Path, header: bytes) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(header + data[8:])
    assert "damaged or cut short" in refusal(folder)


def sharded(folder: Path) -> None:
    tensors = dict(File(folder / SINGLE))
    names = sorted(tensors)
    write(folder / "one.safetensors", {name: tensors[name] for name in names[::2]})
    write(folder / "two.safetensors", {name: tensors[name] for name in names[1::2]})
    where = {name: ("one" if i % 2 == 0 else "two") + ".safetensors" for i, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    (folder / SINGLE).unlink()


def test_shards_are_joined(folder: Path) -> None:
    whole = read_model(folder)[1]
    sharded(folder)
    parts = read_model(folder)[1]
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)


def test_b72_a_stray_file_is_not_looked_at(folder: Path) -> None:
    sharded(folder)
    write(folder / "stray.safetensors", {"model.norm.weight": np.zeros(3, np.float32)})
    assert np.array_equal(read_model(folder)[1]["decoder.norm.weight"], weights(UNTIED)["decoder.norm.weight"])


def test_b72_a_stale_index_is_refused(folder: Path) -> None:
    sharded(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.wieght"] = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    said = refusal(folder)
    assert "model.norm.wieght is not in" in said
    assert "model.norm.weight is in" in said


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder)
    (folder / "two.safetensors").unlink()
    assert "two.safetensors: missing" in refusal(folder)


def test_b73_computed_buffers_are_ignored_by_a_named_rule_and_nothing_else_is(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    read_model(folder)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.extra": np.ones(4, np.float32)}))
    assert "model.layers.0.self_attn.rotary_emb.extra is not understood" in refusal(folder)


def test_every_problem_comes_in_one_message(folder: Path) -> None:
    rewrite(folder, without("model.layers.0.mlp.up_proj.weight"))
    rewrite(folder, lambda t: t.update({"model.norm.weight": np.ones(7, np.float32)}))
    rewrite(folder, lambda t: t.update({"model.norm.bias": np.ones(32, np.float32)}))
    said = refusal(folder)
    for problem in (
        "model.layers.0.mlp.up_proj.weight is missing",
        "model.norm.weight gives shape (7,)",
        "model.norm.bias is not understood",
    ):
        assert problem in said


def test_an_absent_head_that_is_not_tied_is_missing(folder: Path) -> None:
    rewrite(folder, without("lm_head.weight"))
    assert "lm_head.weight is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_thetta": 1.0}, "rope_thetta (1.0) is not understood"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; this qkv knows"),
        ({"model_type": "lama"}, "model_type is 'lama'; this qkv knows"),
        ({"architectures": ["LlamaForTokenClassification"]}, "of model_type 'llama' this qkv knows LlamaForCausalLM"),
        ({"num_key_value_heads": 3}, "describes no model that can exist"),
        ({"rope_scaling": {"rope_type": "yarm"}}, "rope_type is 'yarm'; this qkv knows"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "fractor": 1}}, "has unknown fractor"),
        ({"num_attention_heads": 0}, "attention.n_heads: must be >= 1, got 0"),
        ({"vocab_size": 10**15}, "model.embed_tokens.weight gives shape"),
        ({"vocab_size": "many"}, "vocab_size: expected a whole number"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(folder: Path, changes: dict[str, Any], says: str) -> None:
    reconfigure(folder, **changes)
    assert says in refusal(folder)


def test_json_that_nests_without_end_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        qkv.load(folder)


def test_a_tokenizer_larger_than_the_table_is_refused(folder: Path) -> None:
    vocab = {"model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(200)}, "unk_token": "w0"}}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(CheckpointError, match="its tokenizer has 200 tokens, its table 96 rows"):
        qkv.load(folder)
