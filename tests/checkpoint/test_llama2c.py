"""llama2.c's `.bin`: the real model against its reference, and both versions of the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.checkpoint.gguf import read_gguf, write_gguf
from qkv.checkpoint.huggingface import to_folder
from qkv.checkpoint.layout import to_halves
from qkv.checkpoint.llama2c import read_llama2c
from qkv.config import ModelConfig
from qkv.errors import CheckpointError
from qkv.nn import Transformer

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, SEQ = SIZES = (16, 24, 2, 4, 2, 32, 64)
KV = KV_HEADS * DIM // HEADS
SHAPES = {
    "embed.tokens": (VOCAB, DIM), "attention_norm": (DIM,), "attention.q_proj": (DIM, DIM),
    "attention.k_proj": (KV, DIM), "attention.v_proj": (KV, DIM), "attention.o_proj": (DIM, DIM), "ffn_norm": (DIM,),
    "ffn.gate_proj": (HIDDEN, DIM), "ffn.down_proj": (DIM, HIDDEN), "ffn.up_proj": (HIDDEN, DIM),
    "decoder.norm": (DIM,), "head": (VOCAB, DIM),
}  # fmt: skip
ORDERS = {
    0: ["embed.tokens", "attention_norm", "attention.q_proj", "attention.k_proj", "attention.v_proj",
        "attention.o_proj", "ffn_norm", "ffn.gate_proj", "ffn.down_proj", "ffn.up_proj", "decoder.norm", "rotary",
        "head"],
    1: ["attention_norm", "ffn_norm", "decoder.norm", "embed.tokens", "attention.q_proj", "attention.k_proj",
        "attention.v_proj", "attention.o_proj", "ffn.gate_proj", "ffn.down_proj", "ffn.up_proj", "head"],
}  # fmt: skip


def model_of(config: ModelConfig, tensors: dict[str, np.ndarray]) -> Transformer:
    model = Transformer(config).eval()
    model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return model


def logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([tokens])).logits
    return result[0]


@pytest.fixture
def reference(data: Path) -> dict[str, Any]:
    text = (data / "checkpoints" / "reference.json").read_text(encoding="utf-8")
    (case,) = json.loads(text)["stories260K"]["cases"]
    return dict(case)


@pytest.mark.data
def test_the_real_model_gives_the_reference(data: Path, reference: dict[str, Any]) -> None:
    model = model_of(*read_llama2c(data / "checkpoints" / "stories260K.bin"))
    top = logits(model, reference["prompt_ids"])[-1].topk(5)
    assert top.indices.tolist() == reference["top5_ids"]
    assert (top.values - torch.tensor(reference["top5_logits"])).abs().max() < 1e-3
    tokens = list(reference["prompt_ids"])
    for expected in reference["greedy_new_ids"]:
        tokens.append(int(logits(model, tokens)[-1].argmax()))
        assert tokens[-1] == expected


@pytest.mark.data
def test_other_formats_hold_the_same_model(data: Path, reference: dict[str, Any], tmp_path: Path) -> None:
    config, tensors = read_llama2c(data / "checkpoints" / "stories260K.bin")
    expected = logits(model_of(config, tensors), reference["prompt_ids"])
    halves, turned = to_halves(config, tensors)
    assert to_folder(halves, turned)[0]["model_type"] == "llama"
    write_gguf(tmp_path / "stories.gguf", config, tensors)
    again, back, _ = read_gguf(tmp_path / "stories.gguf")
    for one in (model_of(halves, turned), model_of(again, back)):
        assert (logits(one, reference["prompt_ids"]) - expected).abs().max() < 1e-4
    moved = "decoder.layers.0.attention.k_proj.weight"
    assert not np.array_equal(turned[moved], tensors[moved])


def written(path: Path, version: int, *, tied: bool) -> dict[str, np.ndarray]:
    """A file with random tensors, and those tensors by our names."""
    generator, ours, stream = np.random.default_rng(0), {}, b""
    for name in ORDERS[version]:
        if name == "head" and tied:
            continue
        if name == "rotary":
            stream += bytes(4 * 2 * SEQ * (DIM // HEADS // 2))
            continue
        layered = name.startswith(("attention", "ffn"))
        for layer in range(LAYERS if layered else 1):
            array = generator.normal(0, 0.2, SHAPES[name]).astype(np.float32)
            ours[f"decoder.layers.{layer}.{name}.weight" if layered else f"{name}.weight"] = array
            stream += array.tobytes()
    if version == 0:
        sizes = [*SIZES]
        sizes[5] *= 1 if tied else -1
        head = struct.pack("<7i", *sizes)
    else:
        head = (struct.pack("<Ii7iB", 0x616B3432, 1, *SIZES, tied)).ljust(256, b"\0")
    path.write_bytes(head + stream)
    return ours


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lies_where_the_format_says(version: int, tied: bool, tmp_path: Path) -> None:
    expected = written(tmp_path / "model.bin", version, tied=tied)
    config, tensors = read_llama2c(tmp_path / "model.bin")
    assert set(tensors) == set(config.shapes()) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array), name
    assert config.decoder is not None
    attention = config.decoder.blocks[0].attention
    assert config.head.tied == tied  # type: ignore[attr-defined]
    assert attention.positions.layout == "pairs"  # type: ignore[attr-defined]
    assert attention.positions.theta == 10_000.0  # type: ignore[attr-defined]
    assert (config.vocab_size, config.max_seq_len) == (VOCAB, SEQ)
    assert config.decoder.norm.eps == 1e-5  # type: ignore[attr-defined]


def test_tensors_are_mapped_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    written(tmp_path / "model.bin", 0, tied=True)
    before = (tmp_path / "model.bin").read_bytes()
    _, tensors = read_llama2c(tmp_path / "model.bin")
    for array in tensors.values():
        assert not array.flags.owndata
        array[...] = 1.0
    assert (tmp_path / "model.bin").read_bytes() == before


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    written(path, 0, tied=True)
    whole = path.read_bytes()
    cases = {
        "cut short: it ends inside its header": whole[:20],
        "cut short: its header asks for": whole[:-4],
        "damaged, or no llama2.c file: its header asks for": whole + bytes(8),
        "no llama2.c file: its header reads 0, 24": b"\0\0\0\0" + whole[4:],
        "no llama2.c file: its header reads 16, 24, 2, 3": whole[:12] + b"\3" + whole[13:],
        "version 2 of llama2.c; this qkv reads 0 and 1": struct.pack("<Ii", 0x616B3432, 2) + bytes(300),
        r"cut short: its header asks for \d{12,} bytes": struct.pack("<7i", 16, 24, 2**31 - 1, 4, 2, 32, 64)
        + bytes(99),
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message) as caught:
            read_llama2c(path)
        assert str(caught.value).startswith(str(path))
    with pytest.raises(CheckpointError, match=r"nothing\.bin: cannot be read"):
        read_llama2c(tmp_path / "nothing.bin")
