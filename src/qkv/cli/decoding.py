"""The options that generating commands share, each written once: how tokens are chosen, what guides them, how the model
is run. A command takes a group as one parameter, and `expanded` gives it the group's options:

    @expanded
    def command(model: Model, choosing: Choosing) -> None: ...        --temperature --top-k ... of `Choosing`
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from qkv.errors import DataError, GenerationError

if TYPE_CHECKING:
    from qkv.config.decoding import Beam, Greedy, Sampling
    from qkv.generate.constrain import Factory
    from qkv.model import TextModel

MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to write.")]
Stop = Annotated[list[str] | None, typer.Option(help="A text that ends the answer; may be given several times.")]
Width = Annotated[int | None, typer.Option("--beam", min=1, help="Search with a beam of this width.")]


class Codec(StrEnum):
    """How a cache stores keys and values."""

    RAW = "raw"
    INT8 = "int8"
    INT4 = "int4"


class Engine(StrEnum):
    """What computes."""

    TORCH = "torch"
    NATIVE = "native"
    AUTO = "auto"


class Quantized(StrEnum):
    """How the native engine keeps weights."""

    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True)
class Choosing:
    """How each token is chosen."""

    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the likeliest token; higher is more varied. By default 0.8.")
    ] = None
    greedy: Annotated[bool, typer.Option("--greedy", help="The same as --temperature 0.")] = False
    top_k: Annotated[int | None, typer.Option(help="Choose among this many of the likeliest tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Choose among the likeliest tokens with this share.")] = None
    min_p: Annotated[
        float | None, typer.Option(help="Choose among tokens this many times as likely as the likeliest.")
    ] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1, tokens seen before are less likely.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0

    def decoding(self, beam: int | None = None) -> Greedy | Sampling | Beam:
        """What the options say; those that contradict each other are refused by name."""
        from qkv.config.decoding import Beam, Greedy, Sampling

        shaping = {} if self.repetition_penalty is None else {"repetition_penalty": self.repetition_penalty}
        given = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        filters = {name: value for name, value in given.items() if value is not None}
        warm = [] if self.temperature is None else ["temperature"]
        if beam is not None:
            _refuse([*warm, *filters, *shaping, *(["greedy"] if self.greedy else [])], "--beam")
            return Beam(width=beam)
        if self.greedy or self.temperature == 0:
            _refuse([*(warm if self.temperature else []), *filters], "greedy decoding")
            return Greedy.from_dict(shaping)
        temperature = 0.8 if self.temperature is None else self.temperature
        return Sampling.from_dict({"temperature": temperature, "seed": self.seed, **filters, **shaping})


@dataclass(frozen=True)
class Guiding:
    """What guides the text besides the model."""

    beam: Width = None
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL|lookup", help="A smaller model that guesses ahead, or `lookup`.")
    ] = None
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The text is JSON that satisfies this schema.")
    ] = None
    regex: Annotated[str | None, typer.Option(help="The text matches this regular expression.")] = None

    def constraint(self, lm: TextModel) -> Factory | None:
        """What the text must satisfy."""
        from qkv.generate import json_schema, regex

        if self.json_schema is None and self.regex is None:
            return None
        if self.json_schema is not None and self.regex is not None:
            raise GenerationError("--json-schema and --regex: a text satisfies one of them; leave the other out")
        if lm.tokenizer is None:
            raise GenerationError("--json-schema, --regex: this model was saved without a tokenizer, which they need")
        width, continues = lm.config.vocab_size, lm.model.encoder is None
        if self.json_schema is not None:
            return json_schema(_json(self.json_schema), lm.tokenizer, vocab_size=width, continues=continues)
        return regex(self.regex or "", lm.tokenizer, vocab_size=width, continues=continues)

    def drafter(self, running: Running) -> TextModel | Literal["lookup"] | None:
        """What guesses ahead."""
        return "lookup" if self.draft == "lookup" else None if self.draft is None else running.load(self.draft)


@dataclass(frozen=True)
class Running:
    """How the model is run."""

    rope: Annotated[
        str | None, typer.Option(metavar="KIND:FACTOR", help="Read longer texts than in training: yarn:4.")
    ] = None
    cache: Annotated[Codec, typer.Option(help="How the cache stores keys and values.")] = Codec.RAW
    engine: Annotated[
        Engine | None, typer.Option(help="What computes; by default torch, and with --quantize the native CPU engine.")
    ] = None
    quantize: Annotated[Quantized | None, typer.Option(help="Keep weights in fewer bits, in the native engine.")] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Of the native engine; by default all cores.")] = None
    fast: Annotated[bool, typer.Option("--fast", help="Faster; last digits may depend on what runs beside.")] = False

    def load(self, model: str, prefix_bytes: int = 0) -> TextModel:
        """The model, ready to generate; `prefix_bytes`: how much of earlier texts is kept."""
        from qkv.generate.runners.torch import Runtime
        from qkv.model import load

        deterministic = False if self.fast else None
        runtime = Runtime(
            deterministic,
            self.cache.value,
            prefix_bytes=prefix_bytes,
            engine=self.engine.value if self.engine is not None else "torch" if self.quantize is None else "native",
            quantize=None if self.quantize is None else self.quantize.value,
            threads=self.threads,
        )
        return load(model, rope=self.rope, runtime=runtime)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its groups as parameters of their own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=own[field.name])
            for field in fields(groups[name])
        ]

    @wraps(command)
    def with_groups(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    with_groups.__dict__["__signature__"] = inspect.Signature(parameters)
    with_groups.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_groups


def _refuse(names: list[str], what: str) -> None:
    if names:
        option = names[0].replace("_", "-")
        raise GenerationError(f"--{option}: has no part in {what}; leave one of them out")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})") from None
