"""What all configurations share: strict decoding, tagged unions, and one error that lists every problem.

`Config` is a frozen pydantic model. `Variant` is the base of a tagged union: a direct subclass of it is a union
("positions"), a subclass of that is a member ("rotary") whose field `kind` names it. Members carry only their own
fields. A union knows its members from one tuple, `members`, written below its last member; `register` adds a user's.

Values are finite numbers, strings, booleans, tuples and other configs, so that a config round-trips through JSON and
TOML. `None` appears only as a default, and is left out when written (TOML has no null).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from qkv.errors import ConfigError

T = TypeVar("T")
Tuple = Annotated[tuple[T, ...], Field(strict=False)]  # also accepts a list, as JSON and TOML give it
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]

UNION_KEY = "x-qkv-union"
"""In a class's JSON schema, the name of the union that stands there."""

Problem = tuple[str, str]  # dotted path below the config that reports it, and what is wrong there


class Config(BaseModel):
    """A frozen, strict piece of the configuration tree."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=False,
        use_attribute_docstrings=True,
    )

    def __init__(self, **fields: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
        except ValidationError as error:
            raise config_error(error) from None

    # Pydantic calls a custom __init__ for every nested config unless told that it is the ordinary one: nested problems
    # must reach the outermost config, which reports them together.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def problems(self) -> Iterator[Problem]:
        """Yield what is impossible in this config although each field alone is well formed."""
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _collect_problems(cls, data: Any, handler: Any) -> Any:
        if isinstance(data, Config):
            return handler(data)
        lines: list[InitErrorDetails] = []
        if isinstance(data, Mapping):
            unknown = [key for key in data if key not in cls.model_fields]
            lines += [_line((str(key),), f"unknown field{_hint(key, cls.model_fields)}", data[key]) for key in unknown]
            data = {key: value for key, value in data.items() if key not in unknown}
        try:
            config = handler(data)
            lines += [_line(tuple(path.split(".")) if path else (), what, None) for path, what in config.problems()]
        except ValidationError as error:
            lines += [_line(tuple(e["loc"]), _wording(e), e["input"]) for e in error.errors(include_url=False)]
        if lines:
            raise ValidationError.from_exception_data(cls.__name__, lines)
        return config

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Decode nested dicts and lists, as JSON or TOML give them. Raises ConfigError listing every problem."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise config_error(error) from None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode a JSON document."""
        try:
            data = json.loads(text, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            raise ConfigError(f"not JSON: {error}") from None
        return cls.from_dict(data)

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Decode a TOML document."""
        import tomllib

        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not TOML: {error}") from None
        return cls.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists with every field, defaults included, so that a saved config never changes meaning."""
        fields = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: _plain(value) for name, value in fields if value is not None}

    def to_json(self) -> str:
        """A JSON document that `from_json` turns back into an equal config."""
        return json.dumps(self.to_dict(), indent=2)

    def to_toml(self) -> str:
        """A TOML document that `from_toml` turns back into an equal config."""
        import tomli_w

        return tomli_w.dumps(self.to_dict())

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A new config with the values at dotted paths replaced, checked as a whole.

        `*` stands for every element of a tuple: `{"decoder.layers.*.attention.dropout": 0.1}`. A value may be a plain
        value, a dict, or a config; a union member is replaced whole, since its fields belong to its kind.
        """
        data = self.to_dict()
        for path, value in changes.items():
            _assign(data, path.split("."), value, path)
        return self.from_dict(data)


class Variant(Config):
    """Base of the tagged unions; see the module's docstring."""

    kind: str
    """Which member of the union this is."""

    members: ClassVar[tuple[type[Variant], ...]] = ()

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        if cls.is_union():
            raise ConfigError(f"{cls.__name__} is a union: construct one of its members, or use from_dict")
        return super().__new__(cls)

    @classmethod
    def is_union(cls) -> bool:
        """Whether this class is a union itself, not a member."""
        # By name: pydantic asks while Variant is still being made.
        return any(base.__name__ == "Variant" and base.__module__ == __name__ for base in cls.__bases__)

    @classmethod
    def kinds(cls) -> dict[str, type[Variant]]:
        """The members of this union by kind."""
        return {member.model_fields["kind"].default: member for member in cls.members}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        # A union is decoded by looking the kind up when a value arrives, not when the class is built, so that
        # registering a member needs no rebuilding and error paths carry no tags.
        if cls.is_union():
            return core_schema.no_info_plain_validator_function(cls._decode)
        return handler(source)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if cls.is_union():  # by name, since a pattern holds patterns; `qkv.config.schema` writes the definition
            return {UNION_KEY: cls.__name__}
        return handler(schema)

    @classmethod
    def _decode(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping) or "kind" not in data:
            hint = _hint("", cls.kinds())
            raise PydanticCustomError("qkv", f"expected a table with a 'kind'{hint}, got {_shown(data)}")
        member = cls.kinds().get(data["kind"]) if isinstance(data["kind"], str) else None
        if member is None:
            raise PydanticCustomError("qkv", f"unknown kind {_shown(data['kind'])}{_hint(data['kind'], cls.kinds())}")
        return member.model_validate(data)


def register(member: type[Variant]) -> type[Variant]:
    """Add a member that a user's own file defines to its union. Usable as a decorator; returns the class.

    Registering the same class again (a module imported twice) replaces it; another class of that kind is an error.
    """
    union = next(base for base in member.__mro__ if issubclass(base, Variant) and base.is_union())
    kind = member.model_fields["kind"].default
    if not isinstance(kind, str):
        raise ConfigError(f'{member.__name__}: needs a field kind: Literal["name"] = "name" that names it')
    held = union.kinds().get(kind)
    if held is not None and (held.__module__, held.__qualname__) != (member.__module__, member.__qualname__):
        held_name = f"{held.__module__}.{held.__qualname__}"
        raise ConfigError(f"{union.__name__}: kind {kind!r} is already {held_name}; choose another kind")
    union.members = (*(m for m in union.members if m is not held), member)
    return member


def config_error(error: ValidationError) -> ConfigError:
    """One ConfigError with every problem of a pydantic error, each with its path."""
    problems = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {_wording(e)}" for e in error.errors(include_url=False)]
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  ".join([f"{len(problems)} problems:", *problems]))


def _line(path: tuple[Any, ...], message: str, value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("qkv", message), loc=path, input=value)


_EXPECTED = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "string": "a string",
    "bool": "true or false", "tuple": "a list", "model": "a table", "dict": "a table",
}  # fmt: skip
_SHOWN = 100  # characters of a wrong value that a message repeats


def _wording(error: Any) -> str:
    """Our words for a pydantic error: what was required and what came."""
    kind, context, value = error["type"], error.get("ctx", {}), _shown(error["input"])
    if kind == "qkv":
        return str(error["msg"])
    if kind == "missing":
        return "required, but not given"
    bounds = {"greater_than_equal": "ge", "greater_than": "gt", "less_than": "lt", "less_than_equal": "le"}
    if kind in bounds:
        sign = {"ge": ">=", "gt": ">", "lt": "<", "le": "<="}[bounds[kind]]
        return f"must be {sign} {context[bounds[kind]]}, got {value}"
    if kind == "literal_error":
        options = [option.strip().strip("'") for option in context["expected"].replace(" or ", ", ").split(",")]
        return f"unknown value {value}{_hint(error['input'], options)}"
    expected = _EXPECTED.get(kind.split("_")[0])
    return f"expected {expected}, got {value}" if expected else f"{error['msg']}, got {value}"


def expecting(requirement: str) -> WrapValidator:
    """One problem for a field that takes a number or a word; pydantic reports each branch, with its tag in the path."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("qkv", f"expected {requirement}, got {_shown(value)}") from None

    return WrapValidator(check)


def _shown(value: object) -> str:
    """A value as it stands in a message, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _hint(name: object, options: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(str(name), list(options), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; choose one of {', '.join(sorted(options))}"


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON table; a repeated key is refused, where `json` would silently keep the last one."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"not JSON: the key {twice!r} stands twice in one table")
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _assign(data: Any, keys: list[str], value: Any, path: str) -> None:
    """Set the value at `keys` inside nested dicts and lists, in place."""
    key, rest = keys[0], keys[1:]
    if isinstance(data, list):
        if not data:
            raise ConfigError(f"{path}: the list has no element {key!r}; it is empty")
        if key == "*":
            places: list[Any] = list(range(len(data)))
        elif key in map(str, range(len(data))):
            places = [int(key)]
        else:
            raise ConfigError(f"{path}: {key!r} is not one of the indices 0 to {len(data) - 1}, nor '*'")
    elif isinstance(data, dict):
        places = [key]
        if rest and key not in data:
            raise ConfigError(f"{path}: nothing stands at {key!r}{_hint(key, data)}")
    else:
        raise ConfigError(f"{path}: {key!r} lies below the plain value {data!r}")
    for place in places:
        if rest:
            _assign(data[place], rest, value, path)
        elif value is None and isinstance(data, dict):
            data.pop(place, None)
        else:
            data[place] = _plain(value)  # a copy for each place: a later change may go inside one of them
