"""The cache experiment: work is counted and not timed, and what is timed computes the same on both sides."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv import config as c
from qkv.cache.cache import Cache, Options
from qkv.cache.store import HostStore
from qkv.config.presets.llama import heads, llama
from qkv.errors import DataError, GenerationError
from qkv.lab import cache as lab
from qkv.lab import cache_figure as figure
from qkv.lab import cache_memory as memory
from qkv.lab.cache import Setting, Step, Timing
from qkv.nn import Transformer
from qkv.plan import kv_cache_bytes
from qkv.text import ByteTokenizer

DECODERS = ("llama-3-8b", "mistral-7b", "gemma-3-270m", "deepseek-v2", "gpt2", "bloom-176b", "prefix")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return qkv.build(qkv.preset("llama-3-8b").toy().override({"vocab_size": 256}), seed=1)


# --- the claim, counted


@pytest.mark.parametrize("n", [8, 16])
def test_n_tokens_take_n_rows_with_a_cache_and_half_n_squared_without(model: Transformer, n: int) -> None:
    """Generation as it is, from a prompt of one byte; the last token is written and not read."""
    lm = qkv.TextModel(model, ByteTokenizer())
    with lab.counted_rows(model) as rows:
        done = lm.generate("A", n, decoding=qkv.Greedy(ignore_eos=True))
    assert len(done.tokens) == n
    assert sum(rows) == n
    text = torch.tensor([[ord("A"), *done.tokens]])
    with lab.counted_rows(model) as rows, torch.inference_mode():
        chosen = [int(model(text[:, :length]).logits[0, -1].argmax()) for length in range(1, n + 1)]
    assert chosen == done.tokens
    assert sum(rows) == n * (n + 1) // 2


def test_the_curve_counts_what_steps_send_through_the_model(model: Transformer) -> None:
    points = lab.curve(model, (4, 8, 16), Setting(), 1, lambda what: None)
    assert [point.cached.step_rows for point in points] == [1, 1, 1]
    assert [point.cached.total_rows for point in points] == [4, 8, 16]
    assert [point.uncached.step_rows for point in points] == [4, 8, 16]
    assert [point.uncached.total_rows for point in points] == [10, 36, 136]


def test_a_batch_counts_every_row(model: Transformer) -> None:
    assert Step(model, Setting(batch=3), 5, 5).counted() == 3
    assert Step(model, Setting(cached=False, batch=3), 5, 5).counted() == 15
    assert not model.decoder._forward_pre_hooks  # nothing is left behind


# --- both sides are the same step


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("position", [5, 20])
def test_with_and_without_a_cache_the_logits_are_equal(name: str, position: int) -> None:
    """Also beyond a window (8 at toy size), and again after the token was taken back. In deterministic mode bitwise,
    except for latent attention, which multiplies in another order where latents are stored."""
    config = qkv.preset("llama-3-8b" if name == "prefix" else name).toy()
    if name == "prefix":
        config = config.override({"decoder.layers.*.attention.pattern": c.Prefix()})
    model = qkv.build(config, seed=2)
    for deterministic in (True, False):
        own, other = (Step(model, Setting(cached, deterministic, batch=2), position, 32) for cached in (True, False))
        wanted = other.run()
        exact = deterministic and name != "deepseek-v2"
        for _ in range(3):
            got = own.run()
            assert np.abs(got - wanted).max() <= (0 if exact else 1e-5 * np.abs(wanted).max())
            own.reset()


def test_a_step_sees_the_whole_text(model: Transformer) -> None:
    step = Step(model, Setting(cached=False), 6, 6)
    before = step.run()
    step.whole[0, 0] = (step.whole[0, 0] + 1) % model.config.vocab_size
    assert not np.array_equal(step.run(), before)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("layout", ["auto", "paged"])
def test_a_codec_and_a_layout_are_used(model: Transformer, codec: str, layout: str) -> None:
    plain = Step(model, Setting(), 16, 16)
    coded = Step(model, Setting(codec=codec, layout=layout), 16, 16)
    assert coded.state.cache.options.layout == layout
    assert coded.cache_bytes < plain.cache_bytes / 2
    assert 0 < np.abs(coded.run() - plain.run()).max() < 1


def test_ways_are_every_combination_beside_the_plain_one(model: Transformer) -> None:
    ticks: list[str] = []
    ways = lab.compare(model, 8, 2, ticks.append)
    assert len(ticks) == lab.visits_of_ways(2)
    assert len({way.setting for way in ways}) == len(ways) == 2 * 2 * 3 * 2
    assert all(way.ratio == 1 for way in ways if way.setting == Setting(batch=way.setting.batch))
    for way in ways:
        how = way.setting
        slots = 16 if how.layout == "paged" else 64 if how.deterministic else 8  # a page, a granule, the tokens
        expected = kv_cache_bytes(model.config, slots, batch=how.batch, codec=how.codec, bytes_per_element=4)
        assert way.cache_bytes == expected


# --- timing


class Told:
    """A case that takes as long as it is told, by the clock that it moves."""

    def __init__(self, name: str, clock: list[float], seconds: Sequence[float], log: list[str]) -> None:
        self.name, self.clock, self.seconds, self.log = name, clock, list(seconds), log

    def run(self) -> None:
        self.log.append(self.name)
        self.clock[0] += self.seconds.pop(0)

    def reset(self) -> None:
        self.log.append("reset")
        self.clock[0] += 1000  # is not timed


def test_cases_take_turns_and_medians_are_of_their_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log, ticks = [0.0], list[str](), list[str]()
    monkeypatch.setattr(lab, "perf_counter", lambda: clock[0])
    cases = {"a": Told("a", clock, (3, 1, 7), log), "b": Told("b", clock, (2, 2, 2), log)}
    found = lab.interleaved(cases, 3, ticks.append)
    assert log == ["a", "reset", "b", "reset"] * 3
    assert ticks == ["a", "b"] * 3
    assert found == {"a": Timing(3000, 1000, 7000), "b": Timing(2000, 2000, 2000)}


def test_a_short_case_runs_several_times_a_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(lab, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Told, "reset", lambda self: None)
    cases = {"cold first": Told("", clock, [0.009, *[0.004] * 9], [])}
    found = lab.interleaved(cases, 1, lambda what: None)["cold first"]
    assert found.median == pytest.approx(4)
    assert len(cases["cold first"].seconds) == 10 - 4  # 9 + 4 + 4 + 4 of 20 milliseconds


def test_a_curve_says_beforehand_how_often_it_ticks(model: Transformer) -> None:
    ticks: list[str] = []
    lab.curve(model, (2, 4), Setting(), 3, ticks.append)
    assert len(ticks) == lab.visits_of_curve((2, 4), 3) == 16


# --- totals and exponents


def test_totals_sum_the_line_through_what_was_measured() -> None:
    positions, costs = (3, 5, 9), (10.0, 14.0, 15.0)
    every = np.interp(range(1, 10), (1, *positions), (6.0, *costs))
    assert lab.totals(positions, costs) == pytest.approx([every[:n].sum() for n in positions], rel=1e-12)


@pytest.mark.parametrize(("costs", "start"), [((10.0, 14.0), 7.0), ((10.0, 9.0), 10.0), ((1.0, 9.0), 0.0)])
def test_what_precedes_the_first_position_costs_between_nothing_and_as_much(
    costs: tuple[float, float], start: float
) -> None:
    assert lab.totals((4, 8), costs)[0] == 4 * (start + costs[0]) / 2


@pytest.mark.parametrize("power", [0, 1, 2.5])
def test_exponents_of_powers(power: float) -> None:
    positions = (3, 10, 40, 200)
    assert lab.exponent(positions, [7 * n**power for n in positions]) == pytest.approx(power, abs=1e-12)


def test_exponents_are_those_of_the_later_half() -> None:
    def side(step: float, total: float) -> lab.Side:
        return lab.Side(Timing(step, step, step), 1, total, 1)

    def point(n: int) -> lab.Point:
        early = n < 64  # where overhead hides everything
        own, other = side(2, 3.0 * n), side(1 if early else n, 1 if early else n**2)
        return lab.Point(n, own, other)

    found = lab.exponents([point(n) for n in (8, 16, 32, 64, 128, 256)])
    assert (found.first, found.last) == (64, 256)
    slopes = (found.cached_step, found.uncached_step, found.cached_total, found.uncached_total)
    assert slopes == pytest.approx((0, 1, 1, 2), abs=1e-12)
    assert lab.exponents([point(64), point(128)]).uncached_total == pytest.approx(2)


# --- positions


@pytest.mark.parametrize(
    ("limit", "quick", "expected"),
    [
        (None, False, (64, 128, 256, 512, 1024, 2048)),
        (None, True, (32, 64, 128, 256)),
        (1024, False, (32, 64, 128, 256, 512, 1024)),
        (24, False, (3, 6, 12, 24)),
    ],
)
def test_positions_double_up_to_what_the_model_has(limit: int | None, quick: bool, expected: tuple[int, ...]) -> None:
    assert lab.lengths_for(limit, quick) == expected


@pytest.mark.parametrize("lengths", [(), (4,), (1, 4), (8, 4), (4, 4), (-2, 3)])
def test_positions_that_are_none_are_refused(model: Transformer, lengths: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="lengths: give two or more, ascending, from 2 on, not"):
        lab.check(model, lengths)


def test_learned_positions_have_an_end() -> None:
    model = qkv.build(qkv.preset("gpt2").toy())
    assert lab.longest(model) == 64
    lab.check(model, (32, 64))
    with pytest.raises(DataError, match="lengths: 65, but the model has 64 positions"):
        lab.check(model, (32, 65))


@pytest.mark.parametrize(("name", "has"), [("bert-base-uncased", "an encoder;"), ("t5-small", "an encoder too;")])
def test_only_a_decoder_alone_has_such_steps(name: str, has: str) -> None:
    with pytest.raises(GenerationError, match=has):
        lab.check_config(qkv.preset(name))


# --- memory


def test_memory_by_hand() -> None:
    """2 layers, 8 heads of 32: numbers of 16 bits for a token, and for 512, 4096 and 32768."""
    config = llama(256, 2, heads(8, head_dim=32), d_ff=64, vocab_size=96, max_seq_len=64)
    rows = memory.sizes(config, own="mine")
    token = {
        "mine": 2 * 2 * 256 * 2,
        "MHA, 8 heads": 2 * 2 * 256 * 2,
        "GQA, 2 key-value heads": 2 * 2 * 64 * 2,
        "MQA, 1 key-value head": 2 * 2 * 32 * 2,
        "MLA, latent 128 + 16": 2 * (128 + 16) * 2,
        "MHA, window 1024": 2 * 2 * 256 * 2,
    }
    assert {row.kind: row.token_bytes for row in rows} == token
    for row in rows:
        tokens = min(row.context, memory.WINDOW) if "window" in row.kind else row.context
        assert row.planned == row.made == tokens * token[row.kind]
        assert row.share == row.planned / (row.context * token["mine"])
    assert [row.context for row in rows] == list(memory.CONTEXTS) * 6


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_coded_sizes_are_those_of_caches(codec: str) -> None:
    config = llama(96, 2, heads(6, head_dim=16), d_ff=64, vocab_size=96, max_seq_len=64)
    rows = {(row.kind, row.context): row for row in memory.sizes(config, contexts=(64, 2000))}
    for kind, one in memory.variants(config).items():
        for context in (64, 2000):
            made = Cache(one, HostStore("float16"), 1, Options(context, codec)).nbytes
            assert rows[kind, context].coded[codec] == made


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "gpt2", "deepseek-v2", "gemma-3-270m", "bloom-176b"])
def test_every_decoder_has_its_kinds(name: str) -> None:
    """Also where heads are few, no power of two, or do not fill the model; each kind is a whole model."""
    config = qkv.preset(name)
    for one in memory.variants(config).values():
        assert one.d_model == config.d_model
        assert one.decoder.n_layers == config.decoder.n_layers
    shares = [row.share for row in memory.sizes(config, contexts=(4096,))]
    assert shares[0] == 1
    assert shares[2] <= shares[1] < 1


def test_a_cache_that_is_too_large_is_planned_only() -> None:
    rows = memory.sizes(qkv.preset("llama-2-7b"))
    assert rows[0].planned == 512 * 524_288
    assert rows[0].made == rows[0].planned
    assert (rows[2].planned, rows[2].made) == (16 * 2**30, None)


def test_published_models() -> None:
    """The figures that were published or follow from the configs that were; 2 GiB are the teaching text's."""
    found = {(row.kind, row.context): row.planned for row in memory.published()}
    assert found["llama-2-7b", 4096] == 2 * 2**30
    assert found["llama-3-8b", 131_072] == 16 * 2**30
    assert {found["mistral-7b", context] for context in memory.PUBLISHED_CONTEXTS} == {2**29}
    assert found["deepseek-v2", 4096] == 4096 * 69_120


# --- the figure


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.SVG", b"<?xml")])
def test_the_figure_is_drawn(model: Transformer, tmp_path: Path, name: str, begins: bytes) -> None:
    points = lab.curve(model, (2, 4, 8), Setting(), 1, lambda what: None)
    path = tmp_path / name
    figure.check(path)
    figure.draw(path, points, lab.exponents(points), memory.sizes(model.config, own="mine"))
    assert path.read_bytes().startswith(begins)
    with pytest.raises(DataError, match="exists already"):
        figure.check(path)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a.pdf", "is a .png or .svg file"), ("a", "is a .png"), ("no/a.png", "folder does not exist")],
)
def test_a_figure_that_cannot_be_written_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        figure.check(tmp_path / name)


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs matplotlib; run pip install 'qkv\[plot\]', or leave --plot out"):
        figure.check(tmp_path / "a.png")


def test_the_small_model_is_one_line_of_the_table() -> None:
    config = lab.small()
    assert (config.n_parameters, config.max_seq_len) == (3_475_712, 2048)
