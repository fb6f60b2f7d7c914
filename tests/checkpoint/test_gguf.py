"""GGUF models both ways: against files that the `gguf` package writes of a peer, and against the peer's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from torch import nn
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from checkpoint.gguf_files import GROUPED, MAKERS, SMALL, build, convert, finish, llama
from checkpoint.harness import batch, deviation, our_logits, randomised
from qkv.checkpoint.gguf import read_gguf, write_gguf
from qkv.checkpoint.gguf_file import File
from qkv.checkpoint.huggingface import read_model, to_folder, write_folder
from qkv.checkpoint.safetensors import File as Safetensors
from qkv.config import Llama3Scaling, LongRopeScaling, ModelConfig, Rotary
from qkv.config.presets import preset
from qkv.errors import CheckpointError
from qkv.nn import Transformer

every_architecture = pytest.mark.parametrize("name", MAKERS)


def ours(config: ModelConfig, tensors: dict[str, np.ndarray]) -> Transformer:
    model = Transformer(config).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)).float() for name, value in tensors.items()})
    return model


def outputs(peer: nn.Module, model: Transformer, tokens: torch.Tensor, valid: torch.Tensor) -> tuple[Any, Any]:
    with torch.no_grad():
        theirs, mine = peer(input_ids=tokens, attention_mask=valid.long()), model(tokens, valid=valid)
    if model.config.head.kind == "none":
        return theirs.last_hidden_state, mine.hidden
    return theirs.logits, mine.logits


def compare(peer: nn.Module, path: Path) -> float:
    """The deviation of our model of a file from the peer's own."""
    config, tensors, _ = read_gguf(path)
    tokens, valid = batch("right")
    expected, found = outputs(peer, ours(config, tensors), tokens, valid)
    return deviation(expected, found, valid)


@every_architecture
def test_reads_what_a_converter_writes(name: str, tmp_path: Path) -> None:
    peer = build(name)
    convert(name, peer, tmp_path / "model.gguf")
    assert compare(peer, tmp_path / "model.gguf") < 1e-5


@every_architecture
def test_writes_what_a_converter_writes(name: str, tmp_path: Path) -> None:
    peer = build(name)
    convert(name, peer, tmp_path / "theirs.gguf")
    config, tensors, _ = read_gguf(tmp_path / "theirs.gguf")
    write_gguf(tmp_path / "ours.gguf", config, tensors)
    theirs, mine = gguf.GGUFReader(tmp_path / "theirs.gguf"), gguf.GGUFReader(tmp_path / "ours.gguf")
    kept = {tensor.name: (tensor.tensor_type, tensor.shape.tolist(), tensor.data.tobytes()) for tensor in mine.tensors}
    assert kept == {t.name: (t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in theirs.tensors}
    for key, entry in theirs.fields.items():
        if not key.startswith("GGUF.") and not key.endswith("pooling_type"):  # the config has no word for pooling
            assert mine.fields[key].contents() == entry.contents(), key
            assert mine.fields[key].types == entry.types, key


@pytest.mark.parametrize("name", [name for name, maker in MAKERS.items() if maker.peer_reads])
def test_the_peer_reads_what_we_write(name: str, tmp_path: Path) -> None:
    peer = build(name)
    peer.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    config, tensors = read_model(tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", config, tensors)
    held = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=MAKERS[name].make())
    expected = peer.state_dict()
    tied = {"lm_head.weight"} if peer.config.tie_word_embeddings else set()
    assert set(held["tensors"]) == set(expected) - tied
    for key, found in held["tensors"].items():
        bound = 2**-24 if "gemma" in name and key.endswith("norm.weight") else 0.0
        assert (found - expected[key]).abs().max() <= bound, key


@pytest.mark.parametrize("name", ["llama", "llama-8-over-2", "llama-biases-tied", "qwen2", "qwen3", "gpt2"])
def test_a_round_trip_keeps_every_bit(name: str, tmp_path: Path) -> None:
    assert round_trip(name, tmp_path) == {}


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_only_gemmas_norms_are_rounded(name: str, tmp_path: Path) -> None:
    changed = round_trip(name, tmp_path)
    assert changed
    assert all(key.endswith("norm.weight") for key in changed)
    assert max(changed.values()) <= 2**-24


def round_trip(name: str, folder: Path) -> dict[str, float]:
    """Hugging Face to GGUF and back: the tensors that changed, and by how much."""
    peer = randomised(MAKERS[name].make())
    norms = [value for key, value in peer.state_dict().items() if key.endswith("norm.weight")]
    # Below 1, so that Gemma's 1 + weight lies below 2, where float32 is rounded by 2^-24 at most.
    assert "gemma" not in name or all(value.abs().max() < 1 for value in norms)
    peer.save_pretrained(folder / "before")  # type: ignore[operator]
    config, tensors = read_model(folder / "before")
    write_gguf(folder / "model.gguf", config, tensors)
    again, back, _ = read_gguf(folder / "model.gguf")
    write_folder(folder / "after", again, back)
    before = Safetensors(folder / "before" / "model.safetensors")
    after = Safetensors(folder / "after" / "model.safetensors")
    assert set(after) == set(before)
    changed = [key for key in before if not np.array_equal(after[key], before[key])]
    return {key: float(np.abs(after[key] - before[key]).max()) for key in changed}


@pytest.mark.parametrize("stored", ["missing", "copied", "own"])
def test_a_head_is_tied_where_it_is_missing_or_a_copy(stored: str, tmp_path: Path) -> None:
    peer = randomised(llama(tie_word_embeddings=stored != "own")())
    config, tensors = llama_parts(peer, tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors)
    if stored == "copied":
        with_copy = {name: file_entry(path, name) for name in File(path)} | {
            "output.weight": file_entry(path, "token_embd.weight")
        }
        library_file(path, with_copy)
    assert ("output.weight" in File(path)) == (stored != "missing")
    found = read_gguf(path)
    assert found.config.head.tied == (stored != "own")  # type: ignore[attr-defined]
    assert ("head.weight" in found.tensors) == (stored == "own")
    assert compare(peer, path) < 1e-5


def llama_parts(peer: nn.Module, folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    peer.save_pretrained(folder / "hf")  # type: ignore[operator]
    return read_model(folder / "hf")


def file_entry(path: Path, name: str) -> np.ndarray:
    return np.array(File(path)[name])


def library_file(path: Path, tensors: dict[str, np.ndarray], **keys: Any) -> None:
    """The llama file at `path`, written anew by the library, with these tensors and changed keys."""
    writer, held = gguf.GGUFWriter(path, "llama"), File(path).metadata | keys
    for key, value in held.items():
        if key != "general.architecture" and not key.startswith("qkv."):
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    finish(writer)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"rope_type": "llama3", **LLAMA3},
}


THETA = 500_000.0


def scaled(scaling: dict[str, Any]) -> nn.Module:
    return randomised(llama(rope_parameters={"rope_theta": THETA, **scaling}, head_dim=16)())


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scaling_goes_there_and_back(kind: str, tmp_path: Path) -> None:
    peer = scaled(SCALINGS[kind])
    config, tensors = llama_parts(peer, tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    assert rotary(read_gguf(tmp_path / "model.gguf").config) == rotary(config)
    assert compare(peer, tmp_path / "model.gguf") < 1e-5


def rotary(config: ModelConfig) -> Rotary:
    assert config.decoder is not None
    positions = config.decoder.blocks[0].attention.positions
    assert isinstance(positions, Rotary)
    return positions


@pytest.mark.parametrize("trained", [8192, 16])
def test_divisors_of_frequencies_are_recognised_or_kept(trained: int, tmp_path: Path) -> None:
    """A converter writes divisors only: the published numbers are found again, others keep their effect."""
    peer = scaled(SCALINGS["llama3"] | {"original_max_position_embeddings": trained})
    config, tensors = llama_parts(peer, tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(path, config, tensors)
    plain = THETA ** -(np.arange(0, 16, 2) / 16)
    divisors = plain / peer.model.rotary_emb.inv_freq.numpy()  # type: ignore[union-attr, operator]
    assert np.allclose(File(path)["rope_freqs.weight"], divisors, rtol=1e-6)
    library_file(path, {name: file_entry(path, name) for name in File(path)})
    scaling = rotary(read_gguf(path).config).scaling
    assert isinstance(scaling, Llama3Scaling if trained == 8192 else LongRopeScaling)
    assert compare(peer, path) < 1e-5


def test_experts_are_stacked(tmp_path: Path) -> None:
    settings = SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    peer = randomised(t.MixtralForCausalLM(t.MixtralConfig(**settings, sliding_window=None)))
    config, tensors = llama_parts(peer, tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors)
    file, theirs = File(tmp_path / "model.gguf"), Safetensors(tmp_path / "hf" / "model.safetensors")
    assert file.metadata["llama.expert_count"] == 4
    assert file.metadata["llama.expert_used_count"] == 2
    for expert in range(4):
        for name, letter in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            stored = theirs[f"model.layers.1.block_sparse_moe.experts.{expert}.{letter}.weight"]
            assert np.array_equal(file[f"blk.1.ffn_{name}_exps.weight"][expert], stored)
    assert compare(peer, tmp_path / "model.gguf") < 1e-5


@pytest.mark.parametrize("dtype", ["F16", "Q8_0", "Q4_0"])
def test_matrices_are_stored_in_the_type_asked_for(dtype: str, tmp_path: Path) -> None:
    peer = build("llama")
    config, tensors = llama_parts(peer, tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors, dtype)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {kind for name, kind in kinds.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in kinds.items() if "norm" not in name} == {dtype}
    held = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=MAKERS["llama"].make())
    assert any((held["tensors"][key] != value).any() for key, value in peer.state_dict().items())
    peer.load_state_dict(held["tensors"])
    assert compare(peer, tmp_path / "model.gguf") < 1e-5


def test_rows_that_are_not_whole_blocks_become_f16(tmp_path: Path) -> None:
    config, tensors = llama_parts(randomised(llama(intermediate_size=100)()), tmp_path)
    write_gguf(tmp_path / "model.gguf", config, tensors, "Q8_0")
    kinds = {x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    down = read_gguf(tmp_path / "model.gguf").tensors["decoder.layers.0.ffn.down_proj.weight"]
    assert down.shape == (32, 100)
    assert np.array_equal(down, tensors["decoder.layers.0.ffn.down_proj.weight"].astype(np.float16))


def test_heads_in_pairs_are_written_as_they_are(tmp_path: Path) -> None:
    config = preset("llama-2-7b").toy()
    assert config.decoder is not None
    paired = config.override({"decoder.layers.*.attention.positions.layout": "pairs"})
    generator = np.random.default_rng(0)
    tensors = {n: generator.normal(0, 0.1, p.shape).astype(np.float32) for n, p in paired.shapes().items()}
    write_gguf(tmp_path / "model.gguf", paired, tensors)
    name = "decoder.layers.0.attention.q_proj.weight"
    assert np.array_equal(File(tmp_path / "model.gguf")["blk.0.attn_q.weight"], tensors[name])
    again, back, _ = read_gguf(tmp_path / "model.gguf")
    assert rotary(again).layout == "halves"
    tokens, valid = torch.arange(1, 9)[None], torch.ones(1, 8, dtype=torch.bool)
    with torch.no_grad():
        expected = our_logits(ours(paired, tensors), tokens, valid)
        assert deviation(expected, our_logits(ours(again, back), tokens, valid), valid) < 1e-5


def test_a_file_is_a_model_for_other_families(tmp_path: Path) -> None:
    peer = build("llama")
    convert("llama", peer, tmp_path / "model.gguf")
    config, tensors, _ = read_gguf(tmp_path / "model.gguf")
    data, theirs = to_folder(config, tensors)
    assert data["model_type"] == "llama"
    for name, value in peer.state_dict().items():
        assert np.array_equal(theirs[name], value.numpy()), name


@pytest.mark.parametrize("name", ["t5-small", "alibi", "pooler", "softcap"])
def test_what_gguf_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    base = preset("gpt2").toy() if name == "alibi" else preset("llama-2-7b").toy()
    config = {
        "t5-small": lambda: preset("t5-small").toy(),
        "pooler": lambda: preset("bert-base-uncased").toy().override({"head": {"kind": "pooler"}}),
        "softcap": lambda: base.override({"head.softcap": 30.0}),
        "alibi": lambda: base.override(
            {"embedding.positions": {"kind": "none"}, "decoder.layers.*.attention.positions": {"kind": "alibi"}}
        ),
    }[name]()
    tensors = {n: np.zeros(p.shape, np.float32) for n, p in config.shapes().items()}
    with pytest.raises(CheckpointError, match="GGUF cannot express this model; save in qkv's own format"):
        write_gguf(tmp_path / "model.gguf", config, tensors)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_file_that_fails(tmp_path: Path) -> None:
    config, tensors = llama_parts(build("llama"), tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"an older one")
    broken = tensors | {"head.weight": np.full_like(tensors["head.weight"], np.nan)}
    with pytest.raises(CheckpointError, match=r"output\.weight: holds nan, which Q8_0 cannot store"):
        write_gguf(tmp_path / "model.gguf", config, broken, "Q8_0")
    assert (tmp_path / "model.gguf").read_bytes() == b"an older one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "model.gguf"]
    with pytest.raises(CheckpointError, match="dtype: GGUF is written as F32, F16, Q8_0, Q4_0, got 'Q6_K'"):
        write_gguf(tmp_path / "model.gguf", config, tensors, "Q6_K")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"llama.attention.clamp_kqv": 3.0}, r"llama\.attention\.clamp_kqv \(3\.0\) is not understood"),
    "no layers": ({"llama.block_count": 0}, "block_count is 0, but must be a positive whole number"),
    "many layers": ({"llama.block_count": 4_000_000_000}, "block_count is 4000000000, but there are 21 tensors"),
    "text": ({"llama.embedding_length": "32"}, "embedding_length is '32', but must be a positive whole number"),
    "more layers": ({"llama.block_count": 3}, r"blk\.2\.attn_k\.weight is missing; .*blk\.2\.ffn_up\.weight is"),
    "fewer layers": ({"llama.block_count": 1}, r"blk\.1\.attn_k\.weight is not understood; .*ffn_up\.weight is not"),
    "heads": ({"llama.attention.head_count": 7}, r"n_kv_heads: must divide n_heads \(7\), got 2"),
    "widths": ({"llama.attention.value_length": 4}, "heads of 8 for keys and 4 for values"),
    "partial": ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count must be the width of a head \(8\)"),
    "scaling": ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk'; this qkv knows none, linear, yarn"),
    "theta": ({"llama.rope.freq_base": -1.0}, r"rope\.freq_base is -1\.0, but must be a positive number"),
    "split": ({"split.count": 2}, "is one part of 2, which are found by their names"),
    "width": ({"llama.feed_forward_length": 48}, r"blk\.0\.ffn_down\.weight gives shape \(32, 64\), but .* \(32, 48\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path) -> None:
    path, (changes, message) = tmp_path / "model.gguf", CHANGES[name]
    config, tensors = llama_parts(build("llama"), tmp_path)
    write_gguf(path, config, tensors)
    library_file(path, {name: file_entry(path, name) for name in File(path)}, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_arrays_that_repeat_one_number_are_that_number(tmp_path: Path) -> None:
    peer, path = build("llama"), tmp_path / "model.gguf"
    convert("llama", peer, path, keys=GROUPED | {"attention.head_count_kv": [2, 2]})
    assert compare(peer, path) < 1e-5
    convert("llama", peer, path, keys=GROUPED | {"attention.head_count_kv": [2, 4]})
    with pytest.raises(CheckpointError, match=r"attention\.head_count_kv is not the same in every layer"):
        read_gguf(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    convert("qwen2", build("qwen2"), tmp_path / "model.gguf", omitted=("blk.1.attn_k.bias", "output_norm.weight"))
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k\.bias is missing; output_norm\.weight is missing"):
        read_gguf(tmp_path / "model.gguf")
