"""llama2.c's `.bin`: Llama as one stream of float32.

    seven little-endian int32: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len
    the tensors, each for all layers together, without names

A negative `vocab_size` says that the head's matrix follows at the end; else it is the token table. Version 1 of the
format begins with "ak42", says that in a byte of its own, starts its tensors at byte 256, and has the norms first.
Rotary heads are in `pairs`, with theta 10,000; epsilon is 1e-5.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkv.checkpoint.meta import RULES, config_of
from qkv.checkpoint.ops import Array
from qkv.checkpoint.rules import to_ours
from qkv.config import ModelConfig
from qkv.errors import CheckpointError

_SIZES, _MAGIC, _DATA_OF_1 = struct.Struct("<7i"), b"24ka", 256

# Names are Meta's; one with {i} stands for the tensors of all layers.
_ORDER_0 = (
    "tok_embeddings", "layers.{i}.attention_norm", "layers.{i}.attention.wq", "layers.{i}.attention.wk",
    "layers.{i}.attention.wv", "layers.{i}.attention.wo", "layers.{i}.ffn_norm", "layers.{i}.feed_forward.w1",
    "layers.{i}.feed_forward.w2", "layers.{i}.feed_forward.w3", "norm", "rotary cosines", "rotary sines", "output",
)  # fmt: skip
_ORDER_1 = (
    "layers.{i}.attention_norm", "layers.{i}.ffn_norm", "norm", "tok_embeddings", "layers.{i}.attention.wq",
    "layers.{i}.attention.wk", "layers.{i}.attention.wv", "layers.{i}.attention.wo", "layers.{i}.feed_forward.w1",
    "layers.{i}.feed_forward.w2", "layers.{i}.feed_forward.w3", "output",
)  # fmt: skip


@dataclass(frozen=True)
class _Header:
    """What stands before the tensors."""

    sizes: tuple[int, ...]
    tied: bool
    order: tuple[str, ...]
    start: int

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, by the last part of its name."""
        dim, hidden, _, heads, kv_heads, vocab, seq_len = self.sizes
        rows = kv_heads * (dim // heads)
        shapes = {
            "tok_embeddings": (vocab, dim), "output": (vocab, dim), "wq": (dim, dim), "wk": (rows, dim),
            "wv": (rows, dim), "wo": (dim, dim), "w1": (hidden, dim), "w2": (dim, hidden), "w3": (hidden, dim),
            "rotary cosines": (seq_len, dim // heads // 2), "rotary sines": (seq_len, dim // heads // 2),
        }  # fmt: skip
        return shapes.get(name.rpartition(".")[2], (dim,))

    @property
    def size(self) -> int:
        """The bytes of a file with this header."""
        names = [name for name in self.order if name != "output" or not self.tied]
        times = [self.sizes[2] if "{i}" in name else 1 for name in names]
        return self.start + 4 * sum(n * math.prod(self.shape(name)) for n, name in zip(times, names, strict=True))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor's name and shape in the order of the file."""
        for name in self.order:
            if name == "output" and self.tied:
                continue
            for layer in range(self.sizes[2]) if "{i}" in name else (0,):
                yield name.replace("{i}", str(layer)), self.shape(name)


def read_llama2c(path: Path) -> tuple[ModelConfig, dict[str, Array]]:
    """Config and tensors in our names, mapped copy-on-write."""
    try:
        data = np.asarray(np.memmap(path, np.uint8, "c")) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give the path of a llama2.c .bin") from None
    header = _header(path, data)
    if len(data) != header.size:
        what = "cut short" if len(data) < header.size else "damaged, or no llama2.c file"
        raise CheckpointError(f"{path}: {what}: its header asks for {header.size} bytes, and it has {len(data)}")
    numbers, theirs, place = data[header.start :].view("<f4"), {}, 0
    for name, shape in header.tensors():
        size = math.prod(shape)
        if not name.startswith("rotary"):  # computed from theta
            theirs[f"{name}.weight"] = numbers[place : place + size].reshape(shape)
        place += size
    dim, _, n_layers, n_heads, n_kv_heads, _, seq_len = header.sizes
    params = {"dim": dim, "n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    config = config_of(params | {"max_seq_len": seq_len, "norm_eps": 1e-5}, theirs, str(path))
    return config, to_ours(config, RULES, theirs)


def _header(path: Path, data: Array) -> _Header:
    """The header, checked as far as the sizes of tensors depend on it."""
    versioned = data[:4].tobytes() == _MAGIC
    first = 8 if versioned else 0
    if len(data) < (_DATA_OF_1 if versioned else _SIZES.size):
        raise CheckpointError(f"{path}: cut short: it ends inside its header; copy it again")
    sizes = _SIZES.unpack(data[first : first + _SIZES.size].tobytes())
    if versioned:
        version = int.from_bytes(data[4:8].tobytes(), "little")
        if version != 1:
            raise CheckpointError(f"{path}: version {version} of llama2.c; this qkv reads 0 and 1, which are float32")
        header = _Header(sizes, bool(data[first + _SIZES.size]), _ORDER_1, _DATA_OF_1)
    else:
        vocab = sizes[5]
        header = _Header((*sizes[:5], abs(vocab), sizes[6]), vocab > 0, _ORDER_0, _SIZES.size)
    dim, heads, kv_heads = header.sizes[0], header.sizes[3], header.sizes[4]
    if min(header.sizes) < 1 or dim % heads or heads % kv_heads:
        raise CheckpointError(f"{path}: no llama2.c file: its header reads {', '.join(map(str, sizes))}")
    return header
