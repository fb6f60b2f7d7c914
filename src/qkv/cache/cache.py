"""`Cache`: what a model remembers of the texts that it has read, layout x codec.

    cache = Cache.for_model(model, batch=2, max_len=4096, codec="int8")
    model(tokens, cache=cache)           each call continues where the last one ended
    cache.truncate([7, 5])               forget the rest of each row
    cache.select([0, 0, 1])              rows repeated, reordered, dropped

The model moves the clock: `begin` works out a chunk's places for all layers, the layers write and look, `commit` makes
it count. If a forward pass fails in between, `abort` takes it back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from qkv.cache.codec import Codec
from qkv.cache.codec import codec as codec_of
from qkv.cache.layout import Layout
from qkv.cache.pages import Pages
from qkv.cache.slots import Slots, Static
from qkv.cache.spec import GRANULE, Retention, stored, why_not
from qkv.cache.step import Chunk, GroupStep, Ints
from qkv.cache.store import Array, Store
from qkv.config import ModelConfig, Rotary
from qkv.errors import CacheError

Bools = npt.NDArray[np.bool_]


class Model(Protocol):
    """What a cache is made for."""

    @property
    def config(self) -> ModelConfig:
        """Which streams it stores."""

    def cache_store(self) -> Store:
        """Where its arrays lie."""


@dataclass(frozen=True)
class Options:
    """How a cache is made."""

    max_len: int | None
    """How many tokens layers without a window have room for; None where every layer has one. A full window goes on."""
    codec: str = "raw"
    layout: Literal["auto", "paged"] = "auto"
    """`auto`: a ring for layers with a window, a slot per position for others; `paged`: all of them in pages."""
    slack: int = 0
    """How many tokens a window can take back; and one less than the longest chunk that it takes in canonical order."""
    page: int = 16
    pages: int | None = None
    """The size of the pool, if it is not to grow."""
    canonical: bool = False
    """Keys are looked at only where they are stored, and slots come in whole granules, so that sums over keys have one
    order for every chunk schedule."""


@dataclass(frozen=True)
class Step:
    """One forward pass: its chunk, and what it does in each group of layers."""

    chunk: Chunk
    groups: tuple[GroupStep, ...]
    marks: Bools | None
    """(B, max_len), by position: Longformer's global tokens; None where no pattern reads them."""
    prefix_length: Ints | None
    saved: tuple[Any, ...]
    """What `abort` needs of each group; None where forgetting the new tokens is enough."""
    later: list[Callable[[], None]] = field(default_factory=list)
    """Writes that wait for `commit`: those of chunks that look at what they overwrite."""


class Cache:
    """The memory of `batch` rows; `for_model` makes one."""

    def __init__(self, config: ModelConfig, store: Store, batch: int, options: Options) -> None:
        reason = why_not(config)
        if reason is not None:
            raise CacheError(f"cache: not for this model: {reason}")
        given = [one for one in (batch, options.max_len, options.page, options.pages) if one is not None]
        if min(given) < 1 or options.slack < 0:
            raise CacheError(
                "cache: batch, max_len, page and pages must be 1 or more and slack 0 or more, "
                f"got {batch} rows, {options}"
            )
        if options.layout not in ("auto", "paged"):
            raise CacheError(f"layout: {options.layout!r} does not exist; choose auto or paged")
        self.config, self.store, self.options = config, store, options
        self.codec: Codec = codec_of(options.codec, store.dtype)
        self._stored = {one.name: one for one in stored(config)}
        self._lengths: Ints = np.zeros(batch, np.int64)
        self._prefix: Ints | None = None
        self._marks: Bools | None = None
        if any("is_global" in one.pattern.fields for one in self._stored.values()):
            self._marks = np.zeros((batch, options.max_len or 0), np.bool_)
        own = [one.positions for one in self._stored.values() if not one.cross]
        self._rules = sorted({p.scaling for p in own if isinstance(p, Rotary) and p.scaling.reads_length}, key=repr)
        self._turned = self._regimes(self._lengths)
        """(B, rules): the regime that what is stored was turned in."""
        self._make_groups(batch)

    @classmethod
    def for_model(
        cls,
        model: Model,
        batch: int = 1,
        max_len: int | None = 4096,
        codec: str = "raw",
        *,
        layout: Literal["auto", "paged"] = "auto",
        slack: int = 0,
        page: int = 16,
        pages: int | None = None,
        canonical: bool = False,
    ) -> Cache:
        """An empty cache for `batch` rows of at most `max_len` tokens; `Options` says what each choice means."""
        options = Options(max_len, codec, layout, slack, page, pages, canonical)
        return cls(model.config, model.cache_store(), batch, options)

    def _make_groups(self, batch: int) -> None:
        names: dict[Retention, list[str]] = {}
        for one in self._stored.values():
            if not one.cross:
                names.setdefault(one.retention, []).append(one.name)
        o = self.options
        self.groups: list[Layout] = []
        for kept, own in names.items():
            if o.layout == "paged":
                self.groups.append(Pages(tuple(own), kept, batch, o.max_len, o.slack, o.page, o.pages))
            else:
                granule = GRANULE if o.canonical else 1
                self.groups.append(Slots(tuple(own), kept, batch, o.max_len, o.slack, granule))
        for group in self.groups:
            self._allocate(group)
        cross = tuple(one.name for one in self._stored.values() if one.cross)
        self.source = Static(cross, batch) if cross else None
        self.has_source = self._source_is_new = False
        self.group_of = {name: number for number, group in enumerate(self.groups) for name in group.names}

    def _allocate(self, group: Layout) -> None:
        lines, slots = group.lines()
        for name in group.names:
            for stream, (heads, width) in self._stored[name].streams.items():
                for part, (length, dtype) in self.codec.arrays(width).items():
                    group.arrays[f"{name}.{stream}.{part}"] = self.store.zeros((lines, heads, slots, length), dtype)

    @property
    def _all(self) -> list[Layout]:
        return self.groups if self.source is None else [*self.groups, self.source]

    @property
    def batch(self) -> int:
        """How many rows."""
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row holds."""
        result: list[int] = self._lengths.tolist()
        return result

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays; `qkv.plan.kv_cache_bytes` predicts them."""
        return sum(self.store.nbytes(array) for group in self._all for array in group.arrays.values())

    def streams(self, name: str) -> dict[str, tuple[int, int]]:
        """What the attention of that name stores: stream -> (heads, width)."""
        return self._stored[name].streams

    def parts(self, name: str, stream: str) -> dict[str, Array]:
        """The arrays of one stream, (line, head, slot, length), by the codec's parts."""
        group = self.groups[self.group_of[name]] if name in self.group_of else self.source
        assert group is not None
        width = self._stored[name].streams[stream][1]
        return {part: group.arrays[f"{name}.{stream}.{part}"] for part in self.codec.arrays(width)}

    def begin(
        self,
        size: int,
        valid: Bools | None = None,
        *,
        prefix_length: Ints | None = None,
        is_global: Bools | None = None,
    ) -> Step:
        """Find places for `size` new tokens per row, of which `valid` (B, size) exist.

        Raises CacheError, changing nothing, if they do not fit.
        """
        chunk = self._chunk(size, valid)
        prefix = self._checked_prefix(chunk, prefix_length)
        self._check_regime(chunk)
        for group in self.groups:
            group.check(chunk, self.options.canonical)
        saved = tuple(group.snapshot(chunk) for group in self.groups)
        try:
            steps = tuple(group.step(chunk, self.options.canonical, self.store) for group in self.groups)
        except CacheError:  # a pool without a free page
            self._take_back(chunk, saved)
            raise
        self._prefix = prefix
        if self._marks is not None and is_global is not None:
            rows, tokens = np.nonzero(is_global & (chunk.position >= 0))
            self._marks[rows, np.broadcast_to(chunk.position, is_global.shape)[rows, tokens]] = True
        return Step(chunk, steps, self._marks, prefix, saved)

    def _chunk(self, size: int, valid: Bools | None) -> Chunk:
        before = self._lengths
        if valid is None or valid.all():
            rows = 1 if (before == before[0]).all() else self.batch
            return Chunk(before[:rows, None] + np.arange(size), before, before + size)
        counted = valid.cumsum(1)
        position = np.where(valid, before[:, None] + counted - 1, -1)
        return Chunk(position, before, before + counted[:, -1])

    def _checked_prefix(self, chunk: Chunk, given: Ints | None) -> Ints | None:
        """A prefix is seen by all of itself, so it must come in one chunk; later calls need not repeat it."""
        prefix = self._prefix if given is None else given
        if prefix is None:
            return None
        if not chunk.fresh and (self._prefix is None or ((self._prefix != prefix) & (chunk.before > 0)).any()):
            raise CacheError(
                "prefix_length: given anew, but the cache began with another; leave it out after the first call"
            )
        short = np.flatnonzero((chunk.before == 0) & (chunk.after > 0) & (chunk.after < prefix))
        if short.size:
            row = int(short[0])
            raise CacheError(
                f"prefix_length: {prefix[row]} in row {row}, but the first call brings {chunk.after[row]} tokens; "
                "give the whole prefix at once, since its tokens see each other"
            )
        return prefix

    def _check_regime(self, chunk: Chunk) -> None:
        """Keys that were turned for a shorter row are wrong in a longer one, where the angles depend on its length."""
        for row, rule in self._turned_anew(chunk.before, chunk.after)[:1]:
            raise CacheError(
                f"cache: {self._rules[rule].kind!r} turns a row of {chunk.after[row]} tokens otherwise than what is "
                f"stored of row {row}; read the whole text again with a new cache"
            )

    def turns_anew(self, added: Sequence[int]) -> bool:
        """Whether, with so many more tokens in each row, angles change for those that are stored (dynamic scaling)."""
        return bool(self._turned_anew(self._lengths, self._lengths + np.asarray(added)))

    def turns_within(self, added: Sequence[int]) -> bool:
        """Whether angles change from one of the new tokens to another."""
        first, last = self._lengths + (np.asarray(added) > 0), self._lengths + np.asarray(added)
        return bool((self._regimes(first) != self._regimes(last)).any())

    def _turned_anew(self, before: Ints, after: Ints) -> list[tuple[int, int]]:
        """(row, rule) wherever what is stored was turned for another regime."""
        changed = (self._regimes(after) != self._turned) & ((before > 0) & (after > before))[:, None]
        return [(int(row), int(rule)) for row, rule in np.argwhere(changed)]

    def _regimes(self, lengths: Ints) -> Ints:
        """(B, rules): in which regime each rule turns rows of these lengths."""
        regimes = [[rule.regime(length) for rule in self._rules] for length in lengths.tolist()]
        return np.array(regimes, np.int64).reshape(len(lengths), len(self._rules))

    def commit(self, step: Step) -> None:
        """The step is done: its tokens count."""
        for write in step.later:
            write()
        before, after = step.chunk.before, step.chunk.after
        self._turned = np.where((after > before)[:, None], self._regimes(after), self._turned)
        self._lengths, self._source_is_new = after, False

    def abort(self, step: Step) -> None:
        """The step failed: all is as before, except that a window may have lost some of its slack."""
        self._take_back(step.chunk, step.saved)
        if self._source_is_new and self.source is not None:  # some layers may not have written theirs
            self.source = Static(self.source.names, self.batch)
            self.has_source = self._source_is_new = False

    def _take_back(self, chunk: Chunk, saved: tuple[Any, ...]) -> None:
        for group, former in zip(self.groups, saved, strict=True):
            if former is not None:
                group.rewind(former)
        self._rewind(chunk.before)

    def take_source(self, position: Ints) -> GroupStep:
        """Make room for the source, whose tokens stand at `position` (B, S), -1 where there is none."""
        assert self.source is not None
        if self.has_source:
            raise CacheError("source: the cache holds one already; leave it out after the first call")
        step = self.source.fill(np.broadcast_to(position, (self.batch, position.shape[1])))
        self._allocate(self.source)
        self.has_source = self._source_is_new = True
        return step

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget what comes after the first `lengths` tokens: of every row, or of each."""
        wanted = np.asarray(lengths, np.int64)
        if wanted.shape not in ((), (self.batch,)):
            raise CacheError(f"truncate: give one length, or one for each of {self.batch} rows, not {lengths}")
        wanted = np.broadcast_to(wanted, (self.batch,))
        if (wanted < 0).any() or (wanted > self._lengths).any():
            raise CacheError(f"truncate: lengths must be between 0 and {self.lengths}, got {wanted.tolist()}")
        if self._prefix is not None and ((wanted > 0) & (wanted < np.minimum(self._prefix, self._lengths))).any():
            raise CacheError(
                f"truncate: to {wanted.tolist()}, inside prefixes of {self._prefix.tolist()}, whose tokens have seen "
                "all of them; cut behind the prefix, or to 0"
            )
        for group in self.groups:
            group.need(wanted)
        self._rewind(wanted.copy())

    def _rewind(self, lengths: Ints) -> None:
        for group in self.groups:
            group.truncate(lengths)
        if self._marks is not None:
            self._marks[np.arange(self._marks.shape[1]) >= lengths[:, None]] = False
        self._lengths = lengths

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated or left out."""
        index = np.asarray(rows, np.int64)
        if index.ndim != 1 or not index.size or (index < 0).any() or (index >= self.batch).any():
            raise CacheError(f"select: rows must be one or more of 0 to {self.batch - 1}, got {list(rows)}")
        for group in self._all:
            group.select(index, self.store)
        self._lengths, self._turned = self._lengths[index], self._turned[index]
        self._prefix = None if self._prefix is None else self._prefix[index]
        self._marks = None if self._marks is None else self._marks[index]

    def fork(self) -> Cache:
        """An independent copy; pages are shared until one of the two writes into them."""
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other.groups = [group.fork(self.store) for group in self.groups]
        other.source = None
        if self.source is not None:
            copied = self.source.fork(self.store)
            assert isinstance(copied, Static)
            other.source = copied
        other._lengths = self._lengths.copy()
        other._marks = None if self._marks is None else self._marks.copy()
        return other

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a safetensors file, which `load` reads for the same model."""
        from safetensors.numpy import save_file

        tensors: dict[str, npt.NDArray[Any]] = {"lengths": self._lengths, "turned": self._turned}
        if self._prefix is not None:
            tensors["prefix"] = self._prefix
        if self._marks is not None:
            tensors["marks"] = self._marks
        for number, group in enumerate(self._all):
            tensors |= {f"groups.{number}.{name}": value for name, value in group.state().items()}
            tensors |= {name: self.store.to_numpy(array) for name, array in group.arrays.items()}
        about = {
            "config": self.config.to_json(),
            "options": json.dumps(self.options.__dict__),
            "dtype": self.store.dtype,
        }
        about["source"] = json.dumps(self.has_source)
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path, about)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Model) -> Cache:
        """A saved cache, for a model of the config and number format that it was saved with."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CacheError(f"{path}: not a saved cache ({error}); save one with cache.save") from None
        store = model.cache_store()
        if about.get("config") != model.config.to_json() or about.get("dtype") != store.dtype:
            raise CacheError(f"{path}: saved for another model or number format; make a new cache")
        try:
            cache = cls(model.config, store, len(tensors["lengths"]), Options(**json.loads(about["options"])))
            cache._restore(tensors, json.loads(about["source"]))
        except KeyError as missing:
            raise CacheError(f"{path}: lacks {missing}, so it is damaged; make a new cache") from None
        return cache

    def _restore(self, tensors: dict[str, npt.NDArray[Any]], has_source: bool) -> None:
        self._lengths, self._turned = tensors["lengths"].copy(), tensors["turned"].copy()
        self.has_source = has_source
        self._prefix, self._marks = tensors.get("prefix"), tensors.get("marks")
        for number, group in enumerate(self._all):
            if group is self.source and not has_source:
                continue
            start = f"groups.{number}."
            state = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
            if group is self.source:
                self.source.fill(state["positions"])
                self._allocate(self.source)
            for name in group.arrays:
                group.arrays[name] = self.store.from_numpy(tensors[name])
            group.restore(state)
