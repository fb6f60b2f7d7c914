"""`capture`: what happens inside a forward pass, by name.

    with qkv.capture(model, "decoder.*.attention.weights") as trace:
        model(tokens)
    trace["decoder.layers.0.attention.weights"]    # (B, H, T, T)

Names are module paths and a point inside the module; `*` matches any run of characters. Points: attention `q k v`
(after positions), `weights`, `context` (before the output projection); feed-forward `hidden`, `routing`; blocks
`input`, `attention`, `cross_attention`, `ffn` (what each sublayer adds), `output`; stacks `input` (the embedding) and
`output`: `encoder.input`, `decoder.output`; `head.logits`.

Asking for weights never changes the output: they are computed anew from the same queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from qkv.errors import ConfigError

_ACTIVE: ContextVar[tuple[Trace, ...]] = ContextVar("qkv_capture", default=())


class Trace(Mapping[str, Tensor]):
    """The captured tensors by name, in the order in which they were computed; detached from the graph."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._patterns = patterns
        self._seen: set[str] = set()
        self._tensors: dict[str, Tensor] = {}

    def record(self, module: nn.Module, point: str, value: Callable[[], Tensor]) -> None:
        """Keep `value()` if its name is asked for."""
        name = f"{self._names[id(module)]}.{point}"
        self._seen.add(name)
        if any(fnmatchcase(name, pattern) for pattern in self._patterns):
            self._tensors[name] = value().detach()

    def belongs_to(self, model: nn.Module) -> bool:
        """Whether this trace watches `model`."""
        return id(model) in self._names

    def check(self) -> None:
        """Refuse patterns that matched nothing although the model ran."""
        for pattern in self._patterns:
            if self._seen and not any(fnmatchcase(name, pattern) for name in self._seen):
                example = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in self._seen}))
                raise ConfigError(
                    f"capture: nothing is called {pattern!r}; names are MODULE.POINT with points {example}"
                )

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@contextmanager
def capture(model: nn.Module, *patterns: str) -> Iterator[Trace]:
    """Record what matches `patterns` (all, if none is given) during calls of `model` inside the block."""
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or model._compiled_call_impl is not None:
        raise ConfigError("capture: a compiled model runs without its points; capture the model before torch.compile")
    trace = Trace(model, patterns or ("*",))
    token = _ACTIVE.set((*_ACTIVE.get(), trace))
    try:
        yield trace
    finally:
        _ACTIVE.reset(token)
    trace.check()


def active_trace(model: nn.Module) -> Trace | None:
    """The innermost open trace of this model, if any."""
    return next((trace for trace in reversed(_ACTIVE.get()) if trace.belongs_to(model)), None)
