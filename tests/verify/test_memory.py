"""The rows of caches, generation and rounded weights: sound models pass, each injected fault fails the right rows.

A certificate calls small models a thousand times, which the checks of shapes make ten times slower: these tests run in
the process without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.models import EXTRA
from parity.cases import CASES, decoder
from parity.test_forward import float32_weights, model_with
from qkv import config as c
from qkv.cache.cache import Cache
from qkv.cache.codec import Codec
from qkv.cache.slots import Slots
from qkv.cache.spec import Retention, retention
from qkv.cache.store import HostStore
from qkv.config import ModelConfig
from qkv.generate import Choice, Chooser
from qkv.generate.prefix import _shared
from qkv.generate.sampling import log_probability
from qkv.nn import invariant
from qkv.nn.codec import decode
from qkv.nn.memory import _Group, _Indices
from qkv.verify import Row, verify
from qkv.verify.cached import ALL as CACHED
from qkv.verify.cached import ONES, PAGED, PIECES, QUANTISED, REORDERED, WINDOWED, caches
from qkv.verify.generated import ALL as GENERATED
from qkv.verify.generated import BATCHED, BEAM, DRAFTED, LOOKED_UP, REUSED, generation
from qkv.verify.rounded import rounded_weights
from qkv.verify.subject import Subject

from .test_verify import WINDOWED as MODEL

pytestmark = pytest.mark.unhooked

Path = Callable[[Subject], Iterator[Row]]
SLOW_ONES = tuple(f"{ONES}, {word}" for word in ("float64", "float32"))


def subject(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Subject:
    return Subject(config, model_with(config, float32_weights(config), dtype))


def rows(path: Path, config: ModelConfig) -> dict[str, Row]:
    return {row.path: row for row in path(subject(config))}


def wrong(found: dict[str, Row]) -> set[str]:
    return {path for path, row in found.items() if row.verdict == "DIFFERS"}


# --- sound models

SOUND = {
    **{
        name: CASES[name]
        for name in ("encoder-decoder", "latent", "prefix", "chunked", "adaptive", "shaw", "classifier-last", "all-of")
    },
    **{name: EXTRA[name] for name in ("gemma", "encoder-decoder-window", "longformer-in-causal", "window-learned")},
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_model_passes(name: str) -> None:
    by_path = [rows(path, SOUND[name]) for path in (caches, generation, rounded_weights)]
    for found in by_path:
        assert not wrong(found), found
    ran = {path for path, row in by_path[0].items() if row.deviation is not None}
    assert set(CACHED) - ran <= {WINDOWED}


def test_a_model_in_bfloat16_passes() -> None:
    model = subject(MODEL, torch.bfloat16)
    assert {row.verdict for path in (caches, generation, rounded_weights) for row in path(model)} == {"equal"}


def test_all_rows_run_where_a_model_has_everything() -> None:
    found = rows(caches, MODEL) | rows(generation, MODEL)
    assert list(found) == [*CACHED, *GENERATED]
    assert {row.verdict for row in found.values()} == {"equal"}


# --- rows that cannot be run are listed


@pytest.mark.parametrize(
    ("name", "reason"),
    [("masked-lm", "the model has no decoder"), ("bigbird", "the model has no decoder")],
)
def test_a_model_without_a_past_lists_every_row_with_the_reason(name: str, reason: str) -> None:
    found = rows(caches, CASES[name]) | rows(generation, CASES[name])
    assert list(found) == [*CACHED, *GENERATED]
    assert {row.verdict for row in found.values()} == {"not run"}
    assert all(reason in row.note for row in found.values())


def test_a_decoder_that_sees_ahead_says_so() -> None:
    found = rows(caches, decoder(head=c.NoHead()).override({"decoder.layers.*.attention.pattern": c.Bidirectional()}))
    assert {row.note for row in found.values()} == {
        "pattern 'bidirectional' lets earlier tokens look at later ones, which changes what was stored"
    }


def test_angles_that_change_with_the_length_are_no_fault() -> None:
    found = rows(caches, CASES["rotary-dynamic-ntk"])
    assert {row.note for row in found.values()} == {"'dynamic-ntk' turns a longer row by other angles"}
    assert not wrong(rows(generation, CASES["rotary-dynamic-ntk"]))


def test_a_prompt_that_is_read_both_ways_is_not_reused() -> None:
    found = rows(generation, CASES["prefix"])
    assert "both ways" in found[REUSED].note
    assert [path for path, row in found.items() if row.verdict == "not run"] == [REUSED]


def test_a_head_that_names_no_tokens_generates_nothing() -> None:
    found = rows(generation, CASES["classifier-last"])
    assert {row.note for row in found.values()} == {
        "needs a decoder with a language-model head, and this model has none"
    }


def test_a_processor_that_does_not_keep_the_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.generate.runners.torch.self_check", lambda *_: "rows depend on each other")
    found = rows(generation, MODEL)
    assert found[BATCHED].tolerance > 0
    assert "rows depend on each other" in found[BATCHED].note
    assert {row.verdict for row in found.values()} == {"equal"}


def windowed_by(window: int, **changes: Any) -> ModelConfig:
    return MODEL.override({"decoder.layers.0.attention.pattern.window": window, **changes})


def test_windows_too_long_to_be_passed_are_narrowed_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(caches, windowed_by(40))[WINDOWED].note == ""
    long = windowed_by(600)
    row = rows(caches, long)[WINDOWED]
    assert (row.verdict, row.note) == ("equal", "with windows of 16 in place of 600")
    ring_too_small(monkeypatch)
    assert wrong(rows(caches, long)) == {WINDOWED}


def test_windows_are_narrowed_where_the_model_has_few_positions() -> None:
    row = rows(caches, windowed_by(30, **{"embedding.positions": c.Learned(), "max_seq_len": 40}))[WINDOWED]
    assert (row.verdict, row.note) == ("equal", "with windows of 15 in place of 30")


# --- faults of caches


def ring_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(pattern: c.Pattern) -> Retention:
        kept = retention(pattern)
        return kept if kept.behind is None else replace(kept, behind=kept.behind - 1)

    monkeypatch.setattr("qkv.cache.spec.retention", less)


def wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    put = _Indices.put

    def beside(self: _Indices, array: Tensor, x: Tensor) -> None:
        right = self.slots
        self.slots = (right + 1) % array.shape[2]
        put(self, array, x)
        self.slots = right

    monkeypatch.setattr(_Indices, "put", beside)


def positions_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Cache.commit

    def forgets_one(self: Cache, step: Any) -> None:
        commit(self, step)
        if not step.chunk.fresh:
            self._lengths = self._lengths - 1

    monkeypatch.setattr(Cache, "commit", forgets_one)


def stored_keys(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(monkeypatch: pytest.MonkeyPatch) -> None:
        append = _Group.append

        def changed(self: _Group, name: str, streams: dict[str, Tensor]) -> dict[str, Tensor]:
            if self.mode == "stored" and "k" in streams:
                streams = streams | {"k": change(streams["k"])}
            return append(self, name, streams)

        monkeypatch.setattr(_Group, "append", changed)

    return inject


def turned(k: Tensor) -> Tensor:
    """One position further, in the fastest pair alone (the halves' first elements)."""
    first, second = k.chunk(2, -1)
    a, b = first[..., :1], second[..., :1]
    x = torch.cat((a * math.cos(1) - b * math.sin(1), first[..., 1:]), -1)
    y = torch.cat((a * math.sin(1) + b * math.cos(1), second[..., 1:]), -1)
    return torch.cat((x, y), -1)


def scale_off(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A tenth of a percent, the rounding of a float16."""

    def inject(monkeypatch: pytest.MonkeyPatch) -> None:
        def wider(codec: Codec, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
            if codec.name == name:
                parts = parts | {"scales": parts["scales"] * 1.001}
            return decode(codec, parts, width, dtype)

        monkeypatch.setattr("qkv.nn.memory.decode", wider)

    return inject


def pages_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStore, "move", lambda self, array, targets, sources: None)


def values_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change places, and their values stay."""
    select = Slots.select

    def keys_only(self: Slots, rows: np.ndarray, store: HostStore) -> None:
        values = {name: array for name, array in self.arrays.items() if ".v." in name}
        select(self, rows, store)
        for name, array in values.items():
            self.arrays[name] = array[np.arange(len(rows)) % len(array)]

    monkeypatch.setattr(Slots, "select", keys_only)


READ = {*SLOW_ONES, PIECES}
REST = {REORDERED, PAGED, WINDOWED, *QUANTISED.values()}
CACHE_FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str], str, str]] = {
    "ring": (ring_too_small, READ | REST, WINDOWED, "decoder.layers.0 at position 4"),
    "slot": (wrong_slot, READ | REST, SLOW_ONES[0], "decoder.layers.0 at position 1"),
    "positions": (positions_stand_still, READ | REST, SLOW_ONES[0], "decoder.layers.0 at position 2"),
    "unscaled": (stored_keys(lambda k: 2 * k), READ | REST, SLOW_ONES[0], "decoder.layers.0 at position 1"),
    "turned": (stored_keys(turned), READ | REST, SLOW_ONES[1], "decoder.layers.0 at position 1"),
    "int8": (scale_off("int8"), {QUANTISED["int8"]}, QUANTISED["int8"], "decoder.layers.0"),
    "int4": (scale_off("int4"), {QUANTISED["int4"]}, QUANTISED["int4"], "decoder.layers.0"),
    "pages": (pages_not_copied, {PAGED}, PAGED, "decoder.layers.0 at position 12"),
    "values": (values_forgotten, {REORDERED}, REORDERED, "decoder.layers.0 at position 12"),
}


@pytest.mark.parametrize("name", CACHE_FAULTS)
def test_a_fault_of_the_cache_is_caught_and_located(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, expected, path, where = CACHE_FAULTS[name]
    inject(monkeypatch)
    found = rows(caches, MODEL)
    assert wrong(found) == expected
    assert f"first in {where}" in found[path].where, found[path]
    assert (found[path].deviation or 0.0) > 10 * found[path].tolerance


def test_a_source_that_is_stored_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = _Group.stored

    def doubled(self: _Group, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {stream: 2 * x for stream, x in stored(self, name, dtype).items()}

    monkeypatch.setattr(_Group, "stored", doubled)
    found = rows(caches, CASES["encoder-decoder"])
    assert wrong(found) == READ | REST - {WINDOWED}
    assert "first in decoder.layers.0 at position 1;" in found[SLOW_ONES[0]].where


def test_a_cache_that_refuses_what_it_must_take_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.cache.layout.Layout.kept", property(lambda self: self.behind - 1 + self.slack))
    found = rows(caches, MODEL)[WINDOWED]
    assert found.verdict == "DIFFERS"
    assert "are gone" in found.note


# --- faults of generation


def rows_depend_on_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last bit or two, and where the runner's own check does not look."""

    def uneasy(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = invariant.linear(x, weight, bias)
        return out * (1 + 2e-7) if x.ndim == 3 and len(x) > 1 else out

    monkeypatch.setitem(invariant._REPLACED, torch.nn.functional.linear, uneasy)


def prefix_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.generate.prefix._shared", lambda one, other: _shared(one, other) + 1)


def prefix_not_cut_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positions that are forgotten are still seen."""
    truncate = Slots.truncate

    def kept(self: Slots, lengths: np.ndarray) -> None:
        seen = self.positions.copy()
        truncate(self, lengths)
        self.positions = np.where(seen >= lengths[:, None], 0, seen)

    monkeypatch.setattr(Slots, "truncate", kept)


def everything_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def believes(chooser: Chooser, logits: Any, generated: Any, allowed: Any, guess: Any) -> Choice:
        if guess[0] is None:
            return chooser.choose(logits, generated, allowed)
        return Choice(guess[0], log_probability(logits, guess[0]))

    monkeypatch.setattr("qkv.generate.loop.judge", believes)


def nothing_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkv.generate.prefix._shared", lambda one, other: 0)


def scores_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that mistakes its rows, whatever it asks."""
    monkeypatch.setattr("qkv.generate.beam.log_softmax", lambda logits: _log_softmax(logits[::-1]))


def _log_softmax(logits: Any) -> Any:
    return torch.from_numpy(logits.copy()).double().log_softmax(-1).numpy()


GENERATION_FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str], str]] = {
    "company": (rows_depend_on_company, {BATCHED}, "row "),
    "prefix": (prefix_too_long, {REUSED}, "row 0, position "),
    "cut": (prefix_not_cut_back, {REUSED, DRAFTED, LOOKED_UP}, "row 0, position "),
    "reuse": (nothing_reused, {REUSED}, ""),
    "values": (values_forgotten, {BEAM}, "hypothesis "),
    "rows": (scores_of_others, {BEAM}, "hypothesis "),
    "judge": (everything_accepted, {DRAFTED, LOOKED_UP}, "first token at position "),
}


@pytest.mark.parametrize("name", GENERATION_FAULTS)
def test_a_fault_of_generation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inject, expected, where = GENERATION_FAULTS[name]
    inject(monkeypatch)
    found = rows(generation, MODEL)
    assert wrong(found) == expected, found
    for path in expected:
        assert found[path].where.startswith(where), found[path]


def test_a_row_that_forgets_its_source_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams that share a source keep it when they change places; a batch gives each row its own."""
    select = Cache.take_source

    def swapped(self: Cache, position: np.ndarray) -> Any:
        return select(self, position[::-1])

    monkeypatch.setattr(Cache, "take_source", swapped)
    assert BATCHED in wrong(rows(generation, CASES["encoder-decoder"]))


# --- faults of rounded weights


def test_a_wrong_rounding_of_weights_is_caught_and_located(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_matrix(codec: Codec, parts: dict[str, Tensor], width: int, dtype: torch.dtype) -> Tensor:
        if codec.name == "int4" and width == 20:  # the feed-forward network's second
            parts = parts | {"scales": parts["scales"] * 1.001}
        return decode(codec, parts, width, dtype)

    monkeypatch.setattr("qkv.verify.rounded.decode", one_matrix)
    found = rows(rounded_weights, MODEL)
    assert wrong(found) == {"oracle = codec, weights in int4"}
    assert found["oracle = codec, weights in int4"].where.startswith("in decoder.layers.")
    assert found["oracle = codec, weights in int4"].where.endswith(".ffn.down_proj")


def test_a_float32_path_that_is_not_exact_is_caught() -> None:
    model = subject(MODEL)
    with torch.no_grad():
        model.fast.embed.tokens.weight.mul_(1 + 1e-4)
    found = {row.path: row for row in rounded_weights(model)}
    assert wrong(found) == {f"float64 = float32, weights in {name}" for name in ("int8", "int4")}


def test_rounding_leaves_the_model_as_it_was() -> None:
    model = subject(MODEL)
    before = {name: value.clone() for name, value in model.exact.state_dict().items()}
    notes = [row.note for row in rounded_weights(model)]
    assert all(torch.equal(value, before[name]) for name, value in model.exact.state_dict().items())
    prices = [float(note.split()[0]) for note in notes if note]
    assert 0 < prices[0] < prices[1]


def test_all_rows_are_in_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv.verify import PATHS

    monkeypatch.setattr(
        "qkv.verify.PATHS", tuple(path for path in PATHS if path in (caches, generation, rounded_weights))
    )
    listed = [row.path for row in verify(subject(CASES["masked-lm"]).model).rows]
    assert listed[-len(CACHED) - len(GENERATED) :] == [*CACHED, *GENERATED]
    assert len(listed) == len(CACHED) + len(GENERATED) + 4
