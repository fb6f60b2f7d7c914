"""GGUF: LongRoPE's factors, experts as old files have them, models in several files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as t
from torch import Tensor, nn

from checkpoint.gguf_files import MAKERS, SMALL, build, convert, finish, llama
from checkpoint.harness import VOCAB, deviation, our_logits, randomised
from checkpoint.test_gguf import compare, llama_parts, ours, rotary
from qkv.checkpoint.gguf import read_gguf, write_gguf
from qkv.checkpoint.gguf_file import File
from qkv.checkpoint.huggingface import read_model, to_folder
from qkv.checkpoint.source import format_of, read_config, read_source
from qkv.config import LongRopeScaling, SlidingWindow
from qkv.errors import CheckpointError

# --- phi3 -------------------------------------------------------------------------------------------------------------

TRAINED = 16
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.2, 2.5, 6.0, 11.25]


def phi3(**changes: Any) -> nn.Module:
    """The peer's Phi-3 with LongRoPE: 64 positions, trained on 16."""
    scaling = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    settings = SMALL | {"num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-5, "sliding_window": None}
    settings |= {"original_max_position_embeddings": TRAINED, "rope_scaling": {**scaling, "rope_theta": 10_000.0}}
    return randomised(t.Phi3ForCausalLM(t.Phi3Config(**{**settings, **changes})))


def factors(path: Path, model: nn.Module, **keys: Any) -> None:
    """The model with its factors, as a converter writes them."""
    times = math.sqrt(1 + math.log(64 / TRAINED) / math.log(TRAINED))
    scaled = {"rope.scaling.original_context_length": TRAINED, "rope.scaling.attn_factor": times}
    tensors = {f"rope_factors_{n}.weight": np.array(v, np.float32) for n, v in (("long", LONG), ("short", SHORT))}
    plain = {k: v for k, v in MAKERS["phi3"].keys.items() if k != "attention.sliding_window"}
    convert("phi3", model, path, keys={**plain, **scaled, **keys}, extra=tensors)


@pytest.fixture
def long_tokens() -> dict[str, Tensor]:
    """Rows within the trained length, and beyond it."""
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randint(3, VOCAB, (1, n), generator=generator) for name, n in (("short", 12), ("long", 40))}


def test_longrope_is_read_from_its_two_tensors(long_tokens: dict[str, Tensor], tmp_path: Path) -> None:
    peer, path = phi3(), tmp_path / "model.gguf"
    factors(path, peer)
    config, tensors, _ = read_gguf(path)
    scaling = rotary(config).scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.short_factor, scaling.long_factor) == (tuple(SHORT), tuple(LONG))
    assert (scaling.factor, scaling.original_max_seq_len, scaling.attention_factor) == (64 / TRAINED, TRAINED, None)
    model = ours(config, tensors)
    with torch.no_grad():
        for tokens in long_tokens.values():
            valid = torch.ones_like(tokens, dtype=torch.bool)
            expected = peer(input_ids=tokens, attention_mask=valid.long(), use_cache=False).logits
            assert deviation(expected, our_logits(model, tokens, valid), valid) < 1e-5


def test_longrope_goes_there_and_back(tmp_path: Path) -> None:
    peer = phi3()
    factors(tmp_path / "theirs.gguf", peer)
    peer.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    config, tensors = read_model(tmp_path / "hf")
    write_gguf(tmp_path / "ours.gguf", config, tensors)
    mine, theirs = File(tmp_path / "ours.gguf"), File(tmp_path / "theirs.gguf")
    assert set(mine) == set(theirs)
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    assert all(mine.metadata[key] == value for key, value in theirs.metadata.items() if key.startswith("phi3."))
    again, back, _ = read_gguf(tmp_path / "ours.gguf")
    data, stored = to_folder(again, back, "phi3")
    assert data["rope_scaling"] == {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    assert all(np.array_equal(stored[name], value.numpy()) for name, value in peer.state_dict().items())


def test_factors_that_float32_rounds_are_written(tmp_path: Path) -> None:
    """1.118320672 lies between two numbers of float32; the peer computes with one of those."""
    config, tensors, _ = read_gguf(written_phi3(tmp_path))
    rounded = [1.118320672, 1.25, 1.5, 1.75]
    path = "decoder.layers.*.attention.positions.scaling.short_factor"
    write_gguf(tmp_path / "again.gguf", config.override({path: rounded}), tensors)
    found = rotary(read_gguf(tmp_path / "again.gguf").config).scaling
    assert isinstance(found, LongRopeScaling)
    assert np.array_equal(np.float32(found.short_factor), np.float32(rounded))


def written_phi3(folder: Path, **keys: Any) -> Path:
    factors(folder / "model.gguf", phi3(), **keys)
    return folder / "model.gguf"


def test_a_part_of_each_head_may_turn(long_tokens: dict[str, Tensor], tmp_path: Path) -> None:
    """Phi-4-mini."""
    peer = randomised(t.Phi3ForCausalLM(t.Phi3Config(
        **SMALL, num_key_value_heads=2, pad_token_id=0, rms_norm_eps=1e-5, sliding_window=None,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    )))  # fmt: skip
    keys = {"attention.head_count_kv": 2, "rope.freq_base": 10000.0, "rope.dimension_count": 4}
    convert("phi3", peer, tmp_path / "model.gguf", keys=keys)
    assert rotary(read_gguf(tmp_path / "model.gguf").config).fraction == 0.5
    assert compare(peer, tmp_path / "model.gguf") < 1e-5


def test_a_window_of_0_is_none(tmp_path: Path) -> None:
    convert("phi3", build("phi3"), tmp_path / "windowed.gguf")
    windowed = read_gguf(tmp_path / "windowed.gguf").config
    open_ = read_gguf(written_phi3(tmp_path, **{"attention.sliding_window": 0})).config
    assert windowed.decoder is not None
    assert open_.decoder is not None
    assert windowed.decoder.blocks[0].attention.pattern == SlidingWindow(window=5)
    assert open_.decoder.blocks[0].attention.pattern.kind == "causal"


def test_one_list_of_factors_without_the_other_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    extra = {"rope_factors_long.weight": np.array(LONG, np.float32)}
    convert("phi3", phi3(), path, extra=extra)
    with pytest.raises(CheckpointError, match=r"rope_factors_long\.weight beside .* not understood"):
        read_gguf(path)


def test_divisors_of_their_own_are_written_again(tmp_path: Path) -> None:
    """A file of llama's architecture with divisors that no published rule makes."""
    keys = MAKERS["llama"].keys
    convert("llama", build("llama"), tmp_path / "a.gguf", keys=keys, extra={"rope_freqs.weight": np.float32(SHORT)})
    config, tensors, _ = read_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", config, tensors)
    assert read_gguf(tmp_path / "b.gguf").config == config
    assert np.array_equal(File(tmp_path / "b.gguf")["rope_freqs.weight"], np.float32(SHORT))


# --- Experts as old files have them -----------------------------------------------------------------------------------


def old_mixtral(folder: Path, leave_out: str = "") -> tuple[nn.Module, Path]:
    """Our file of Mixtral, written anew by the library with a tensor for each expert."""
    settings = SMALL | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    peer = randomised(t.MixtralForCausalLM(t.MixtralConfig(**settings, sliding_window=None)))
    config, tensors = llama_parts(peer, folder)
    write_gguf(folder / "stacked.gguf", config, tensors)
    stacked = File(folder / "stacked.gguf")
    writer = gguf.GGUFWriter(folder / "old.gguf", "llama")
    for key, value in stacked.metadata.items():
        if key.startswith("llama."):
            add: Any = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(key, value)
    for name in stacked:
        each = {name: stacked[name]}
        if "_exps" in name:
            each = {name.replace("_exps", f".{e}"): np.ascontiguousarray(part) for e, part in enumerate(stacked[name])}
        for one, array in each.items():
            if one != leave_out:
                writer.add_tensor(one, np.array(array))
    finish(writer)
    return peer, folder / "old.gguf"


def test_experts_of_old_files_are_read(tmp_path: Path) -> None:
    peer, path = old_mixtral(tmp_path)
    assert "blk.1.ffn_down.3.weight" in File(path)
    assert not any("_exps" in name for name in File(path))
    assert compare(peer, path) < 1e-5
    old, stacked = read_gguf(path).tensors, read_gguf(tmp_path / "stacked.gguf").tensors
    assert all(np.array_equal(old[name], value) for name, value in stacked.items())


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    _, path = old_mixtral(tmp_path, leave_out="blk.1.ffn_up.2.weight")
    with pytest.raises(CheckpointError, match=r"old\.gguf: .*: blk\.1\.ffn_up\.2\.weight is missing$"):
        read_gguf(path)


# --- Several files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> tuple[nn.Module, list[Path]]:
    """A model in three files of the library."""
    peer = build("llama")
    convert("llama", peer, tmp_path / "model.gguf", per_file=8)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return peer, found


def test_a_model_in_several_files_is_read_by_any_of_them(parts: tuple[nn.Module, list[Path]]) -> None:
    peer, paths = parts
    first = read_gguf(paths[0])
    for path in paths:
        assert format_of(path) == "gguf"
        assert compare(peer, path) < 1e-5
        assert read_config(path) == first.config
        assert read_source(path).metadata == first.metadata
    assert not any(key.startswith("split.") for key in first.metadata)
    write_gguf(paths[0].parent / "whole.gguf", *first[:2], metadata=first.metadata)
    assert compare(peer, paths[0].parent / "whole.gguf") < 1e-5


def test_missing_parts_are_named(parts: tuple[nn.Module, list[Path]]) -> None:
    _, paths = parts
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"its other parts model-00002-of-00003\.gguf are missing"):
        read_gguf(paths[0])
    paths[0].unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.gguf, model-00002-of-00003\.gguf are missing"):
        read_gguf(paths[2])


def test_a_part_under_another_name_is_refused(parts: tuple[nn.Module, list[Path]]) -> None:
    _, paths = parts
    with pytest.raises(
        CheckpointError, match=r"is one part of 3, which are found by their names; call them NAME-00001"
    ):
        read_gguf(paths[0].rename(paths[0].with_name("model.gguf")))


def test_parts_of_other_models_are_refused(parts: tuple[nn.Module, list[Path]], tmp_path: Path) -> None:
    _, paths = parts
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf says that it is number 2 of 3.*is in model-00002"):
        read_gguf(paths[0])
    other = tmp_path / "other"
    other.mkdir()
    convert("llama", randomised(llama()()), other / "model.gguf", per_file=6)
    paths[1].write_bytes((other / "model-00002-of-00004.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"number 1 of 4, counted from 0; .* in model-00001.*should hold 21"):
        read_gguf(paths[0])
