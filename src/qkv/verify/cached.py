"""The paths with a cache: a text read in pieces is the text read at once.

    raw            = the float64 model that has no cache, however the text is cut and wherever its keys lie
    int8, int4     = the oracle, which rounds keys and values as the codec does and has no cache either

All rows are listed for every model; one that cannot be run says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from qkv import reference
from qkv.cache.cache import Cache
from qkv.cache.spec import stored, why_not
from qkv.config import Learned, ModelConfig, Pattern
from qkv.errors import CacheError
from qkv.nn import Transformer
from qkv.nn.attention import AttentionModule
from qkv.verify.certificate import Row, compare, worst
from qkv.verify.paths import first_deviation
from qkv.verify.reading import Reading, at_once, held_against, in_pieces, joined
from qkv.verify.sample import sample
from qkv.verify.subject import BATCH, EXACT, LENGTH, Subject, view_of

ONES, PIECES = "no cache = token by token", "no cache = in random pieces, float64"
REORDERED, PAGED = "no cache = with rows reordered, float64", "no cache = in pages, float64"
WINDOWED = "no cache = past its windows, float64"
QUANTISED = {codec: f"oracle = cache in {codec}, float64" for codec in ("int8", "int4")}
ALL = (f"{ONES}, float64", f"{ONES}, float32", PIECES, REORDERED, PAGED, WINDOWED, *QUANTISED.values())

LONGEST = 512  # windows up to this are read past as they are; longer ones are made as short as SHORT for it
SHORT = 16
TAKEN_BACK = 5


def caches(subject: Subject) -> Iterator[Row]:
    """Every layout, codec and way to cut a text."""
    reason = why_not(subject.config) or subject.regrown
    if reason is not None:
        yield from (Row(path, None, EXACT, note=reason) for path in ALL)
        return
    expected = at_once(subject.exact, subject.inputs)
    rows: dict[str, Callable[[], Row]] = {
        ALL[0]: lambda: _pieced(subject, expected, ALL[0], _filled([_first(subject)], LENGTH)),
        ALL[1]: lambda: _in_float32(subject),
        PIECES: lambda: _pieced(subject, expected, PIECES, _pieces(subject)),
        REORDERED: lambda: _reordered(subject, expected),
        PAGED: lambda: _paged(subject, expected),
        WINDOWED: lambda: _windowed(subject),
        **{path: partial(_quantised, subject, codec, path, expected) for codec, path in QUANTISED.items()},
    }
    for path, run in rows.items():
        try:
            yield run()
        except CacheError as error:  # no text here is one that a cache may refuse
            yield Row(path, float("inf"), EXACT, note=str(error))


def _cache(subject: Subject, **options: Any) -> Cache:
    return Cache.for_model(subject.exact, BATCH, LENGTH, **options)


def _first(subject: Subject) -> int:
    """How many tokens the first piece must have: a prefix is seen by all of itself."""
    prefix = subject.inputs.more.get("prefix_length")
    return 1 if prefix is None else int(prefix.max())


def _pieces(subject: Subject) -> list[int]:
    """Random sizes, the same in every run, and single tokens between them."""
    draw = np.random.default_rng(0)
    pairs = [(1, size) for size in draw.integers(1, 8, LENGTH).tolist()]
    return _filled([_first(subject) + 2, *chain(*pairs)], LENGTH)


def _filled(sizes: list[int], length: int) -> list[int]:
    """These sizes as far as the text goes, then single tokens."""
    kept: list[int] = []
    for size in [*sizes, *[1] * length]:
        room = length - sum(kept)
        if room:
            kept.append(min(size, room))
    return kept


def _pieced(subject: Subject, expected: Reading, path: str, sizes: list[int]) -> Row:
    found = in_pieces(subject.exact, subject.inputs, _cache(subject), sizes)
    return held_against(path, expected, found, EXACT)


def _in_float32(subject: Subject) -> Row:
    model = subject.fast
    cache, sizes = Cache.for_model(model, BATCH, LENGTH), _filled([_first(subject)], LENGTH)
    found = in_pieces(model, subject.inputs, cache, sizes)
    return held_against(ALL[1], at_once(model, subject.inputs), found, subject.bound(torch.float32))


def _reordered(subject: Subject, expected: Reading) -> Row:
    """Half is read; then the rows change places, and one goes on twice."""
    rows, half, cache = [1, 0, 1], LENGTH // 2, _cache(subject)
    at_once(subject.exact, subject.inputs.part(0, half), cache=cache)
    cache.select(rows)
    found = in_pieces(subject.exact, subject.inputs.rows(rows), cache, _filled([1, 3], LENGTH - half), start=half)
    return held_against(REORDERED, expected.rows(rows).since(half), found, EXACT, start=half)


def _paged(subject: Subject, expected: Reading) -> Row:
    """A copy that shares all pages goes on with another text first, and must not write into them."""
    half, cache = LENGTH // 2, _cache(subject, layout="paged", page=5, slack=3)
    first = in_pieces(subject.exact, subject.inputs, cache, _filled([_first(subject), 1], half))
    copy = cache.fork()
    other = subject.inputs.rows([1, 0])
    in_pieces(subject.exact, other, copy, [2, 1], start=half)
    rest = in_pieces(subject.exact, subject.inputs, cache, _filled([1, 4], LENGTH - half), start=half)
    copy.truncate(half)
    again = in_pieces(subject.exact, subject.inputs, copy, [LENGTH - half], start=half)
    rows = (held_against(PAGED, expected, joined([first, late]), EXACT) for late in (rest, again))
    return worst(rows)


def _quantised(subject: Subject, codec: str, path: str, raw: Reading) -> Row:
    """The oracle rounds each key and value before anybody looks at it; the cache when it stores them."""
    found = in_pieces(subject.exact, subject.inputs, _cache(subject, codec=codec), _pieces(subject))
    out = reference.run(subject.config, subject.weights, **subject.inputs.arrays(), codec=codec)
    per_token = out.logits is not None and out.logits.ndim == 3
    row = compare(path, torch.from_numpy(out.logits if per_token else out.hidden), found.result, EXACT)
    if row.verdict == "DIFFERS":
        row = replace(row, where=f"{first_deviation(subject, found.layers, codec)}; largest at {row.where}")
    away = compare("", raw.result, found.result, 0.0).deviation
    return replace(row, note=f"{away:.1e} from no rounding")


# --- windows


def _windowed(subject: Subject) -> Row:
    """A ring without a slot to spare turns; and one with slack takes its last tokens back and reads them again."""
    model, note = subject.exact, ""
    positions = subject.config.embedding.positions
    longest = min(LONGEST, (subject.config.max_seq_len - 10) // 2) if isinstance(positions, Learned) else LONGEST
    windows = _windows(subject.config)
    if not windows:
        return Row(WINDOWED, None, EXACT, note="no layer has a window")
    if windows[-1] > longest:
        model = _narrowed(model, min(SHORT, longest))
        note = f"with windows of {min(SHORT, longest)} in place of {windows[-1]}"
        windows = _windows(model.config)
        if windows[-1] > longest:
            return Row(WINDOWED, None, EXACT, note=f"a window of {windows[-1]} tokens is too long to be passed here")
    rows = [row for window in windows for row in _past(model, window)]
    return replace(worst(rows), note=note)


def _windows(config: ModelConfig) -> list[int]:
    """How many positions windowed layers look at, the narrowest first."""
    behind = {one.retention.behind for one in stored(config) if not one.cross}
    return sorted(reach + 1 for reach in behind if reach is not None)


def _past(model: Transformer, window: int) -> Iterator[Row]:
    """Past the window twice: with a piece longer than it, and with single tokens before and after."""
    length = 2 * window + 10
    given = sample(model.config, 1, length, seed=1)
    least = int(given.more["prefix_length"].max()) if "prefix_length" in given.more else 1
    sizes = _filled([max(window - 1, least), 1, 1, 1, 3, window + 2], length)
    expected = at_once(model, given, hidden=True)
    tight = Cache.for_model(model, 1, length)
    yield held_against(WINDOWED, expected, in_pieces(model, given, tight, sizes, hidden=True), EXACT)
    slack = Cache.for_model(model, 1, length, slack=TAKEN_BACK)
    kept = length - TAKEN_BACK
    in_pieces(model, given, slack, _filled(sizes, kept), hidden=True)
    wrong = replace(given, tokens=given.tokens.flip(1))
    in_pieces(model, wrong, slack, [2, TAKEN_BACK - 2], start=kept, hidden=True)
    slack.truncate(kept)
    late = in_pieces(model, given, slack, [1, TAKEN_BACK - 1], start=kept, hidden=True)
    yield held_against(WINDOWED, expected.since(kept), late, EXACT, start=kept)


def _narrowed(model: Transformer, size: int) -> Transformer:
    """The same weights with windows of at most `size`."""
    view = view_of(model)
    view.config = ModelConfig.from_dict(_narrow(model.config.to_dict(), size))
    for module in view.modules():
        if isinstance(module, AttentionModule):
            pattern: Pattern = module.pattern
            module.pattern = type(pattern).from_dict(_narrow(pattern.to_dict(), size))
    return view


_SIZES = {"sliding-window": "window", "chunked": "chunk", "dilated": "window"}


def _narrow(data: Any, size: int) -> Any:
    """A config as dicts and lists, with narrower patterns."""
    if isinstance(data, list | tuple):
        return [_narrow(item, size) for item in data]
    if not isinstance(data, dict):
        return data
    data = {key: _narrow(value, size) for key, value in data.items()}
    field = _SIZES.get(data.get("kind", ""))
    return data if field is None else data | {field: min(data[field], size)}
