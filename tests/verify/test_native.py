"""The native engine in the certificate: a sound model passes, each injected fault fails the row that it should."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import qkv
from qkv.config import ModelConfig
from qkv.engine import Format, angles, lower, program
from qkv.engine import library as native
from qkv.engine.packing import pack
from qkv.errors import EngineError
from qkv.nn import Transformer
from qkv.verify.native import native_engine
from qkv.verify.subject import Subject

CONFIG = qkv.preset("llama-3-8b").toy()
PLAIN = "float64 = native engine"


def verdicts(config: ModelConfig = CONFIG) -> dict[str, str]:
    model: Transformer = qkv.build(config, seed=0).eval()
    return {row.path: row.verdict for row in native_engine(Subject(config, model))}


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "gemma-3-270m", "bloom-560m"])
def test_a_sound_model_passes(name: str) -> None:
    found = verdicts(qkv.preset(name).toy())
    assert len(found) == 5
    assert set(found.values()) == {"equal"}


def test_what_cannot_be_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(qkv.preset("deepseek-v2").toy()) == {PLAIN: "not run"}

    def nothing() -> None:
        raise EngineError("engine: needs a C++ compiler once")

    monkeypatch.setattr(native, "library", nothing)
    assert verdicts() == {PLAIN: "not run"}


def turned_late(monkeypatch: pytest.MonkeyPatch) -> None:
    waves = angles.waves
    monkeypatch.setattr(lower, "waves", lambda *given: tuple(np.roll(wave, 1, 0) for wave in waves(*given)))


def swapped_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The codes of 4 bits in the other half of each byte."""

    def packed(weight: np.ndarray, form: Format) -> np.ndarray:
        found = pack(weight, form)
        if form == "int4":
            codes = found.reshape(-1, 320)[:, 64:]
            codes[:] = codes >> 4 | codes << 4
        return found

    monkeypatch.setattr(program, "pack", packed)


def larger_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 8 bits by a fiftieth."""

    def packed(weight: np.ndarray, form: Format) -> np.ndarray:
        found = pack(weight, form)
        if form == "int8":
            scales = found.reshape(-1, 544)[:, :32].copy().view(np.float16) * np.float16(1.02)
            found.reshape(-1, 544)[:, :32] = scales.view(np.uint8)
        return found

    monkeypatch.setattr(program, "pack", packed)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "turned late": (turned_late, PLAIN),
    "swapped halves": (swapped_halves, f"{PLAIN}, weights in int4"),
    "larger scales": (larger_scales, f"{PLAIN}, weights in int8"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_its_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, path = FAULTS[name]
    inject(monkeypatch)
    assert verdicts()[path] == "DIFFERS"
