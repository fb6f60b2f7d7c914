"""Which function computes which member of the configuration tree.

`register(ConfigClass, function)` is the one way in, for the members here and for a user's own. The signature belongs to
the union (x is one row of vectors (T, D), weights a dict of the tensors below that part, by their short names):

    Norm           (config, weights, x) -> x
    FeedForward    (config, weights, x, routing) -> x                 routing: a list; experts append to it
    Attention      (config, weights, x, memory, at: View) -> x        keys and values come from memory (S, D)
    Residual       (config, x, sublayers, norm) -> x                  sublayers: {name: x -> x}; norm: (name, x) -> x
    TokenTable     (config, weights, tokens, d_model) -> (T, D)
    Head           (config, weights, table, hidden, exists) -> (logits | None, pooled | None)
    Positions      a subclass of `qkv.reference.position.Scheme`
    RotaryScaling  (config, theta, width, length) -> (frequency of each pair, factor of cosine and sine)

Patterns need no function: their predicate in the configuration is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qkv.config import Variant
from qkv.errors import ConfigError

_FUNCTIONS: dict[type[Variant], Callable[..., Any]] = {}


def register(config_class: type[Variant], function: Callable[..., Any]) -> None:
    """Make `function` the oracle of `config_class`; registering again replaces it."""
    _FUNCTIONS[config_class] = function


def function_of(config: Variant) -> Callable[..., Any]:
    """The function registered for exactly this class: a subclass may mean something else than its parent."""
    if type(config) not in _FUNCTIONS:
        name = type(config).__name__
        raise ConfigError(
            f"the oracle has no function for {name} (kind {config.kind!r}): call reference.register({name}, function)"
        )
    return _FUNCTIONS[type(config)]
