"""The JSON Schema of `ModelConfig`, from which editors complete, explain and check a config while it is typed.

Each union becomes a definition of its own, `oneOf` its members, told apart by the constant `kind`; each member becomes
one below `<union>.<kind>`. The members are read when the schema is made, so registered ones are included. What no JSON
Schema can say (an odd rotary width, heads that the key-value heads do not divide) stays with `ModelConfig.check`.
"""

from __future__ import annotations

from typing import Any

from qkv.config import UNIONS
from qkv.config.base import UNION_KEY, Config, Variant
from qkv.config.model import ModelConfig

Schema = dict[str, Any]
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> Schema:
    """The JSON Schema (draft 2020-12) of a model's config file, all registered union members included."""
    definitions: Schema = {}
    root = _schema_of(ModelConfig, "", definitions)
    known = {union.__name__: union for union in (*Variant.__subclasses__(), *UNIONS)}
    # Members name further unions (a pattern holds patterns): go on until every named union is defined.
    while missing := sorted(_unions_named_in([root, definitions]) - definitions.keys()):
        for name in missing:
            definitions[name] = _union(known[name], definitions)
    return {"$schema": _DRAFT, **_with_references(root), "$defs": _with_references(definitions)}


def _union(union: type[Variant], definitions: Schema) -> Schema:
    """The definition of a union; those of its members join `definitions`."""
    references: Schema = {}
    for kind, member in union.kinds().items():
        name = f"{union.__name__}.{kind}"
        schema = _schema_of(member, f"{name}.", definitions)
        # The class itself knows its kind; in a file `kind` says which class is meant.
        schema["required"] = ["kind", *schema.get("required", [])]
        definitions[name] = schema
        references[kind] = f"#/$defs/{name}"
    return {
        "title": union.__name__,
        "description": (union.__doc__ or "").strip(),
        "type": "object",
        "discriminator": {"propertyName": "kind", "mapping": references},
        "oneOf": [{"$ref": reference} for reference in references.values()],
    }


def _schema_of(config: type[Config], prefix: str, definitions: Schema) -> Schema:
    """The class's own schema; the configs that it holds join `definitions` with `prefix` before their names."""
    schema = config.model_json_schema(ref_template=f"#/$defs/{prefix}{{model}}")
    for name, nested in schema.pop("$defs", {}).items():
        definitions[f"{prefix}{name}"] = nested
    return schema


def _unions_named_in(node: Any) -> set[str]:
    if isinstance(node, dict):
        here = {node[UNION_KEY]} if isinstance(node.get(UNION_KEY), str) else set()
        return here.union(*(_unions_named_in(value) for value in node.values()))
    return set().union(*(_unions_named_in(item) for item in node)) if isinstance(node, list) else set()


def _with_references(node: Any) -> Any:
    """The schema with every named union replaced by a reference to its definition."""
    if isinstance(node, list):
        return [_with_references(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _with_references(value) for key, value in node.items() if key != UNION_KEY}
    return {"$ref": f"#/$defs/{node[UNION_KEY]}"} | plain if UNION_KEY in node else plain
