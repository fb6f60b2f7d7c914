"""`qkv presets`: the published models that qkv knows."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the published models with their exact parameter counts."""
    from qkv.cli.table import aligned
    from qkv.config.presets import presets as names

    rows = [_row(name) for name in names()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    cells = [["name", "parameters", "d_model", "layers", "heads", "context"]]
    cells += [
        [
            row["name"],
            f"{row['n_parameters']:,}",
            f"{row['d_model']:,}",
            row["layers"],
            row["heads"],
            f"{row['context']:,}",
        ]
        for row in rows
    ]
    print(aligned(cells, right=(1, 2, 3, 4, 5)))


def _row(name: str) -> dict[str, Any]:
    from qkv.config import MultiHead
    from qkv.config.presets import preset

    config = preset(name)
    attention = next(iter(config.stacks.values())).block(0).attention
    heads = str(attention.n_heads)
    if isinstance(attention, MultiHead) and attention.kv_heads != attention.n_heads:
        heads += f"/{attention.kv_heads}"
    return {
        "name": name,
        "n_parameters": config.n_parameters,
        "d_model": config.d_model,
        "layers": "+".join(str(stack.n_layers) for stack in config.stacks.values()),
        "heads": heads,
        "context": config.max_seq_len,
    }
