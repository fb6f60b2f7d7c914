"""The native engine behind `qkv.load` and the command line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import qkv
from qkv.engine.program import Matrix
from qkv.errors import EngineError, GenerationError
from qkv.generate.runners.native import NativeRunner
from qkv.generate.runners.torch import TorchRunner
from qkv.text import ByteTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 256, "max_seq_len": 128})
    qkv.TextModel(qkv.build(config, seed=0), ByteTokenizer()).save(tmp_path / "model")
    return tmp_path / "model"


def test_the_native_engine_writes_what_torch_writes(folder: Path) -> None:
    native = qkv.load(folder, runtime=qkv.Runtime(engine="native", threads=1))
    torch = qkv.load(folder)
    prompts = ["to be", "or not to be, that is"]
    found = native.generate(prompts, 20, decoding=qkv.Greedy())
    assert isinstance(native.runner, NativeRunner)
    assert isinstance(torch.runner, TorchRunner)
    assert [one.tokens for one in found] == [one.tokens for one in torch.generate(prompts, 20, decoding=qkv.Greedy())]
    drawn = qkv.Sampling(temperature=0.9, top_p=0.9, seed=4)
    assert native.generate("to", 20, decoding=drawn).tokens == torch.generate("to", 20, decoding=drawn).tokens


def test_beams_drafts_and_prefixes_run_on_it_too(folder: Path) -> None:
    native = qkv.load(folder, runtime=qkv.Runtime(engine="native", threads=1, prefix_bytes=2**20))
    plain = native.generate("to be or", 12, decoding=qkv.Greedy())
    assert native.generate("to be or", 12, decoding=qkv.Greedy(), draft="lookup").tokens == plain.tokens
    assert native.usage.reused_tokens > 0
    best = native.generate("to be or", 12, decoding=qkv.Beam(width=3))
    assert best.tokens == qkv.load(folder).generate("to be or", 12, decoding=qkv.Beam(width=3)).tokens


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_quantize_takes_the_native_engine(folder: Path, form: str) -> None:
    lm = qkv.load(folder, quantize=form)
    first = lm.generate("to be", 10, decoding=qkv.Greedy())
    assert isinstance(lm.runner, NativeRunner)
    parts = [part for one in lm.runner.engine.program.instructions for part in one.p]
    assert form in {part.form for part in parts if isinstance(part, Matrix)}
    assert lm.generate(["to be", "or"], 10, decoding=qkv.Greedy())[0].tokens == first.tokens


def test_auto_takes_torch_where_it_must_and_says_so_once(tmp_path: Path) -> None:
    config = qkv.preset("deepseek-v2").toy().override({"vocab_size": 256})
    lm = qkv.TextModel(qkv.build(config, seed=0), ByteTokenizer(), runtime=qkv.Runtime(engine="auto"))
    with pytest.warns(UserWarning, match="engine: torch runs this model.*'latent'"):
        lm.generate("to", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate("to", 2)
    assert isinstance(lm.runner, TorchRunner)
    lm.runtime = qkv.Runtime(engine="native")
    with pytest.raises(EngineError, match="engine: it has no attention of kind 'latent'; choose torch"):
        lm.generate("to", 2)


def test_contradictions_are_refused(folder: Path) -> None:
    with pytest.raises(GenerationError, match="quantize: torch runs the weights as they are"):
        qkv.load(folder, runtime=qkv.Runtime(quantize="int8")).generate("to", 2)
    with pytest.raises(GenerationError, match="threads: torch has its own setting"):
        qkv.load(folder, runtime=qkv.Runtime(threads=2)).generate("to", 2)
    with pytest.raises(GenerationError, match="deterministic: the native engine always is"):
        qkv.load(folder, runtime=qkv.Runtime(engine="native", deterministic=False)).generate("to", 2)
    with pytest.raises(GenerationError, match="engine: the native one keeps caches raw"):
        qkv.load(folder, runtime=qkv.Runtime(engine="native", codec="int8")).generate("to", 2)
