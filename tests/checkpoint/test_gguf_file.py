"""The container of GGUF: every kind of metadata, damage at every byte, mapping, and time."""

from __future__ import annotations

import mmap
import re
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from qkv.checkpoint.gguf import read_gguf, write_gguf
from qkv.checkpoint.gguf_blocks import BY_NAME
from qkv.checkpoint.gguf_file import File, write_file
from qkv.config.presets import preset
from qkv.errors import CheckpointError

F32 = BY_NAME["F32"]
TOKENS = ["<s>", "", "é", "日本", "a b\n", "\u0000", "x" * 300]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny llama with a vocabulary."""
    config = preset("llama-3.2-1b").toy()
    generator = np.random.default_rng(0)
    tensors = {name: generator.normal(0, 0.1, p.shape).astype(np.float32) for name, p in config.shapes().items()}
    metadata = {"general.name": "tiny", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [0.5] * len(TOKENS)}
    write_gguf(tmp_path / "model.gguf", config, tensors, metadata=metadata)
    return tmp_path / "model.gguf"


VALUES: dict[str, Any] = {
    "u8": np.uint8(200), "i8": np.int8(-3), "u16": np.uint16(60_000), "i16": np.int16(-300), "u32": np.uint32(4e9),
    "i32": np.int32(-70_000), "u64": np.uint64(2**63), "i64": np.int64(-(2**40)), "f64": np.float64(0.1),
    "bool": True, "text": "Füße 日本", "nothing": "", "int": 7, "negative": -7, "large": 2**40, "float": 1e-5,
    "strings": TOKENS, "ints": [1, -2, 3], "floats": [0.5, -1.25], "bools": [True, False],
    "bytes": np.arange(5, dtype=np.uint8), "wide": np.array([2**50, -1]),
}  # fmt: skip


def test_metadata_is_read_by_the_library_and_by_us(tmp_path: Path) -> None:
    write_file(tmp_path / "x.gguf", {"general.architecture": "llama", **VALUES}, {})
    library, found = gguf.GGUFReader(tmp_path / "x.gguf").fields, File(tmp_path / "x.gguf").metadata
    assert list(found) == ["general.architecture", *VALUES]
    for key, value in VALUES.items():
        theirs, mine = library[key].contents(), found[key]
        expected = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        assert (theirs == pytest.approx(expected, rel=1e-7)) if "float" in key else (theirs == expected), key
        assert (mine.tolist() if isinstance(mine, np.ndarray) else list(mine) if key == "strings" else mine) == expected
    assert found["wide"].dtype == np.int64
    assert found["bytes"].dtype == np.uint8


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("tokens", TOKENS)
    writer.add_array("types", [1, 2, 3])
    writer.add_float32("eps", 1e-6)
    writer.add_custom_alignment(64)
    one, other = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float16)
    writer.add_tensor("one", one)
    writer.add_tensor("other", other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = File(tmp_path / "x.gguf")
    assert list(file.metadata["tokens"]) == TOKENS
    assert file.metadata["tokens"][2:4] == ["é", "日本"]
    assert file.metadata["types"].tolist() == [1, 2, 3]
    assert file.metadata["eps"] == 1e-6, "the decimal that was meant, not float32's expansion"
    assert np.array_equal(file["one"], one)
    assert np.array_equal(file["other"], other)
    assert file["other"].dtype == np.float16


def test_version_2_is_read(model: Path) -> None:
    data = bytearray(model.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    before = read_gguf(model)
    model.write_bytes(data)
    after = read_gguf(model)
    assert after.config == before.config
    assert all(np.array_equal(after.tensors[name], array) for name, array in before.tensors.items())


def header_length(path: Path) -> int:
    return min(entry.start for entry in File(path).entries.values())


def test_a_file_cut_anywhere_in_its_header_is_refused(model: Path) -> None:
    whole, length = model.read_bytes(), header_length(model)
    end = max(entry.start + entry.size for entry in File(model).entries.values())
    for size in (*range(0, length, 3), length + 100, end - 1):
        model.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=re.escape(str(model))):
            File(model)


def test_a_damaged_byte_is_an_error_or_harmless(model: Path) -> None:
    """Whatever a byte of the header becomes, reading ends soon: in a model, or in our own error."""
    whole, length = model.read_bytes(), header_length(model)
    generator, outcomes = np.random.default_rng(5), {"read": 0, "refused": 0}
    for _ in range(600):
        data = bytearray(whole)
        for place in generator.integers(4, length, generator.integers(1, 3)):
            data[place] = generator.choice([0, 1, 127, 128, 255, int(generator.integers(256))])
        model.write_bytes(data)
        try:
            _, _, metadata = read_gguf(model)
            list(metadata.get("tokenizer.ggml.tokens", ()))  # unless the key itself was hit
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 50


def header(n_tensors: int, n_entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


BAD = {
    "empty": (b"", "is empty"),
    "other": (b"PK\x03\x04" + bytes(60), "not a GGUF file: it does not begin with 'GGUF'"),
    "short": (b"GGUF\x03\x00", "damaged or cut short: the version ends at byte 8 of 6"),
    "version 1": (header(0, 0, version=1), "is version 1; this qkv reads little-endian versions 2 and 3"),
    "big-endian": (b"GGUF\0\0\0\3" + bytes(16), "is big-endian; this qkv reads little-endian"),
    "many tensors": (header(2**60, 0), f"it claims {2**60} tensors"),
    "many entries": (header(0, 2**60), f"it claims {2**60} metadata entries"),
    "long name": (header(0, 1, struct.pack("<Q", 2**62) + bytes(32)), "metadata entry 0 ends at byte"),
    "value type": (header(0, 1, text(b"a") + struct.pack("<I", 99)), "metadata 'a' has the unknown value type 99"),
    "nested": (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "metadata 'a' has the unknown value type 9"),
    "many strings": (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 2**50)), f"claims {2**50} strings of a"),
    "long string": (
        header(0, 1, text(b"a") + struct.pack("<IIQQQ", 9, 8, 2, 2**63, 0) + bytes(8)), "a ends at byte"
    ),
    "many numbers": (header(0, 1, text(b"a") + struct.pack("<IIQ", 9, 6, 2**61)), "a ends at byte"),
    "twice": (header(0, 2, (text(b"a") + struct.pack("<IB", 0, 1)) * 2), "metadata 'a' stands twice"),
    "name": (header(0, 1, text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "metadata entry 0 is not UTF-8"),
    "axes": (header(1, 0, text(b"t") + struct.pack("<I", 2**31) + bytes(32)), f"tensor t has {2**31} axes"),
    "terabytes": (
        header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**20, 2**20, 0, 0)),
        rf"tensor t ends at byte {2**42 + 96} of 65",
    ),
    "blocks": (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 100, 8, 0)), "rows of 100 .* blocks of 32"),
    "offset": (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 3)), "begins at 3, which is no multiple of 32"),
    "alignment": (
        header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0; it must be"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        File(tmp_path / "x.gguf")
    assert str(caught.value).startswith(str(tmp_path / "x.gguf"))


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: missing; give the path"):
        File(tmp_path / "nothing.gguf")
    with pytest.raises(CheckpointError, match="cannot be read"):
        File(tmp_path)


def test_cut_data_names_every_tensor_that_is_lost(model: Path) -> None:
    data, entries = model.read_bytes(), File(model).entries
    last = max(entries, key=lambda name: entries[name].start)
    model.write_bytes(data[: entries[last].start + 4])
    with pytest.raises(CheckpointError, match=rf"cut short: tensor {re.escape(last)} ends at byte \d+ of \d+"):
        read_gguf(model)


def test_a_type_that_is_not_read_is_named_but_the_rest_is_open(model: Path) -> None:
    data = bytearray(model.read_bytes())
    for number, name in ((16, "IQ2_XXS"), (77, "number 77")):
        place = data.index(text(b"output_norm.weight")) + 8 + len("output_norm.weight") + 4 + 8
        data[place : place + 4] = struct.pack("<I", number)
        model.write_bytes(data)
        assert list(File(model).metadata["tokenizer.ggml.tokens"]) == TOKENS
        with pytest.raises(CheckpointError, match=f"output_norm.weight has type {name}; this qkv reads F32, F16"):
            read_gguf(model)
        with pytest.raises(CheckpointError, match=f"output_norm.weight has type {name}"):
            File(model)["output_norm.weight"]


def test_files_of_other_things_are_refused(tmp_path: Path) -> None:
    for architecture, message in (
        ("mamba", "general.architecture is 'mamba'; this qkv knows"),
        ("llama", "no tensors"),
    ):
        write_file(tmp_path / "x.gguf", {"general.architecture": architecture}, {})
        with pytest.raises(CheckpointError, match=message):
            read_gguf(tmp_path / "x.gguf")


def test_broken_strings_matter_only_to_those_who_use_them(model: Path) -> None:
    data = model.read_bytes().replace("日本".encode(), "日".encode() + b"\xff\xfe\xfd")
    model.write_bytes(data)
    metadata = read_gguf(model).metadata
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens: string 3 is not UTF-8"):
        metadata["tokenizer.ggml.tokens"][0]


def test_plain_tensors_are_mapped_and_the_file_stays_as_it_is(model: Path) -> None:
    before = model.read_bytes()
    tensors = read_gguf(model).tensors
    embedding = tensors["embed.tokens.weight"]
    base = embedding
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    assert isinstance(base, mmap.mmap)
    embedding[0] = 3.0
    assert (embedding[0] == 3.0).all()
    assert model.read_bytes() == before


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_loading_takes_little_memory_of_its_own(tmp_path: Path) -> None:
    config = preset("smollm2-135m").override({"decoder.n_layers": 4, "vocab_size": 8192})
    tensors = {name: np.full(p.shape, 0.5, np.float32) for name, p in config.shapes().items()}
    size = sum(array.nbytes for array in tensors.values())
    write_gguf(tmp_path / "model.gguf", config, tensors)
    read_gguf(tmp_path / "model.gguf")  # what is imported on the way
    before = anonymous()
    found = read_gguf(tmp_path / "model.gguf")
    assert anonymous() - before <= 0.15 * size
    assert sum(array.nbytes for array in found.tensors.values()) == size


VOCABULARIES = {"bert-bge": 30_522, "deepseek-coder": 32_256, "gpt-2": 50_257, "llama-spm": 32_000, "qwen2": 151_936}


@pytest.mark.data
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies(name: str, data: Path) -> None:
    path = data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    tokens = File(path).metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == VOCABULARIES[name]
    if name == "llama-spm":
        assert tokens[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
        theirs = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
        assert list(tokens) == theirs.contents()
    with pytest.raises(CheckpointError, match="holds no tensors, only a vocabulary"):
        read_gguf(path)


@pytest.mark.unhooked
@pytest.mark.data
def test_a_large_file_opens_at_once(data: Path, tmp_path: Path) -> None:
    """The largest vocabulary at hand, and 100 MB of tensors behind it."""
    metadata = File(data / "tokenizers" / "ggml-vocab-qwen2.gguf").metadata
    write_file(tmp_path / "x.gguf", metadata, {"big": (np.zeros((25, 1_000_000), np.float32), F32)})
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        File(tmp_path / "x.gguf")
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.5
