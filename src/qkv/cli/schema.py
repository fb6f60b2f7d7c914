"""`qkv schema`: the JSON Schema of a model's config."""

from __future__ import annotations

import json


def command() -> None:
    """Print the JSON Schema of a model's config, for editors that complete and check it."""
    from qkv.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
