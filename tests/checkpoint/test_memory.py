"""Loading maps the weights: what a second process holds in anonymous memory while it loads a model, watched from here.

Mapped pages do not count: they are the file's, and the system may drop them. What counts is memory that the loader
fills itself (`RssAnon`), from just before the load, with everything imported, to its highest point.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.checkpoint import huggingface, native, safetensors, torch_bin
from qkv.checkpoint.gguf import write_gguf
from qkv.checkpoint.gguf_blocks import as_bfloat16, as_half
from qkv.config import ModelConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc"),
]
BOUND = 0.15
"""Of the model's bytes in its file; of its float32 bytes for blocks, above the finished tensors."""

CHILD = """
import sys
import qkv
warm = qkv.load(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
lm = qkv.load(sys.argv[2])
print(sum(p.numel() * p.element_size() for p in lm.model.parameters()), *{str(p.dtype) for p in lm.model.parameters()},
      flush=True)
sys.stdin.readline()
"""

Tensors = dict[str, np.ndarray]


def large() -> ModelConfig:
    """200 MB in float32, in the proportions of Llama 3."""
    sizes = {"vocab_size": 4096, "d_model": 768, "decoder.n_layers": 7, "decoder.layers.*.ffn.d_ff": 2304}
    heads = {"n_heads": 12, "n_kv_heads": 4, "head_dim": 64}
    paths = {f"decoder.layers.*.attention.{name}": number for name, number in heads.items()}
    return qkv.preset("llama-3-8b").toy().override({**sizes, **paths})


def weights(config: ModelConfig) -> Tensors:
    generator = np.random.default_rng(0)
    # Numbers that 16 bits hold, as in published models: else their files would not be of one precision.
    drawn = {n: generator.standard_normal(p.shape, np.float32) for n, p in config.shapes().items()}
    return {name: np.float32(np.float16(array * 2)) / 2 for name, array in drawn.items()}


def one_file(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    huggingface.write_folder(folder, config, tensors)
    return folder


def shards(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    data, theirs = huggingface.to_folder(config, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    where = {name: f"model-{1 + number % 3:05}-of-00003.safetensors" for number, name in enumerate(theirs)}
    for file in set(where.values()):
        safetensors.write(folder / file, {name: array for name, array in theirs.items() if where[name] == file})
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


def pickled(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    data, theirs = huggingface.to_folder(config, tensors)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(data))
    torch.save({name: torch.from_numpy(np.array(array)) for name, array in theirs.items()}, folder / torch_bin.SINGLE)
    return folder


def ours(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    native.write(folder, config, tensors, None)
    return folder


def gguf(dtype: str) -> Callable[[Path, ModelConfig, Tensors], Path]:
    def write(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
        path = folder.with_suffix(".gguf")
        write_gguf(path, config, tensors, dtype)
        return path

    return write


def bf16_gguf(folder: Path, config: ModelConfig, tensors: Tensors) -> Path:
    """The package's own file: this type is read, not written."""
    import gguf as package

    from checkpoint.gguf_files import finish
    from qkv.checkpoint.gguf_file import File

    made = File(gguf("F32")(folder, config, tensors))
    path = folder.with_name(f"{folder.name}-bf16.gguf")
    writer = package.GGUFWriter(path, "llama")
    for key, value in made.metadata.items():
        if key.startswith("llama."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for name, array in made.items():
        if array.ndim == 1:
            writer.add_tensor(name, np.array(array))
        else:
            raw = as_bfloat16(array).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=package.GGMLQuantizationType.BF16)
    finish(writer)
    return path


KINDS: dict[str, tuple[Callable[[Path, ModelConfig, Tensors], Path], Callable[[np.ndarray], np.ndarray] | None]] = {
    "safetensors float32": (one_file, None),
    "safetensors float16": (one_file, as_half),
    "safetensors bfloat16": (one_file, as_bfloat16),
    "safetensors sharded": (shards, None),
    "safetensors sharded bfloat16": (shards, as_bfloat16),
    "bin float32": (pickled, None),
    "qkv float32": (ours, None),
    "qkv bfloat16": (ours, as_bfloat16),
    "gguf F32": (gguf("F32"), None),
    "gguf F16": (gguf("F16"), None),
    "gguf BF16": (bf16_gguf, lambda array: (as_bfloat16(array).astype(np.uint32) << 16).view(np.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_mapped_and_not_copied(kind: str, tmp_path: Path) -> None:
    write, change = KINDS[kind]
    config = large()
    tensors = weights(config)
    if change is not None:
        tensors = {name: change(array) for name, array in tensors.items()}
    peak, _, held, types = watched(made(write, tmp_path), write(tmp_path / "large", config, tensors))
    assert held == config.n_parameters * (2 if "16" in kind.lower() else 4)
    assert len(types) == 1
    assert peak < BOUND * held


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0"])
def test_blocks_become_float32_once(dtype: str, tmp_path: Path) -> None:
    config = large()
    write = gguf(dtype)
    peak, end, held, types = watched(made(write, tmp_path), write(tmp_path / "large", config, weights(config)))
    assert types == ["torch.float32"]
    assert held == config.n_parameters * 4
    assert end > 0.9 * held, "the finished tensors are anonymous memory: else this test watches nothing"
    assert peak - held < BOUND * held


def made(write: Callable[[Path, ModelConfig, Tensors], Path], folder: Path) -> Path:
    """A small model of the same kind: loading it imports all that loading the large one needs."""
    small = qkv.preset("llama-3-8b").toy()
    return write(folder / "small", small, weights(small))


def watched(small: Path, path: Path) -> tuple[int, int, int, list[str]]:
    """Bytes at the highest point and at the end, above those before; the parameters' bytes, and their types."""
    command = [sys.executable, "-c", CHILD, str(small), str(path)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        before, found, over = anonymous(child.pid), [0], threading.Event()

        def watch() -> None:
            while not over.wait(0.001):
                found.append(anonymous(child.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        child.stdin.write("\n")
        child.stdin.flush()
        held, *types = child.stdout.readline().split()
        end = anonymous(child.pid)
        over.set()
        watcher.join()
        return max(*found, end) - before, end - before, int(held), types
    finally:
        child.kill()
        child.communicate()


def anonymous(pid: int) -> int:
    """The bytes of a process that lie in memory and in no file."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon: a kernel before 4.5")
