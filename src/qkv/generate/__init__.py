"""Generation: one token after another. No torch: a model is reached through the `Runner` protocol."""

from qkv.generate.beam import Hypothesis, beam_search
from qkv.generate.constrain import Constraint, json_schema, regex
from qkv.generate.loop import (
    Event,
    Generation,
    Request,
    Usage,
    collected,
    decode,
    generate,
)
from qkv.generate.prefix import PrefixCache
from qkv.generate.runner import Logits, Runner, State, Tokens
from qkv.generate.sampling import Choice, Chooser, draw
from qkv.generate.speculative import Acceptance, Draft, Drafter, DraftModel, Lookup, Speculation
from qkv.generate.stop import Spelling, StopText, stop_strings

__all__ = [
    "Acceptance",
    "Choice",
    "Chooser",
    "Constraint",
    "Draft",
    "DraftModel",
    "Drafter",
    "Event",
    "Generation",
    "Hypothesis",
    "Logits",
    "Lookup",
    "PrefixCache",
    "Request",
    "Runner",
    "Speculation",
    "Spelling",
    "State",
    "StopText",
    "Tokens",
    "Usage",
    "beam_search",
    "collected",
    "decode",
    "draw",
    "generate",
    "json_schema",
    "regex",
    "stop_strings",
]
