"""`qkv show`: what a model is, from its config alone; with `--trace`, what happens inside it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from qkv.config import ModelConfig
    from qkv.plan import Value


def command(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A preset, a saved folder, or a config file.")],
    show_all: Annotated[bool, typer.Option("--all", help="Also show settings that have their default value.")] = False,
    trace: Annotated[str | None, typer.Option(metavar="TEXT", help="Print every matrix of one forward pass.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a model: its config, its tensors, and the operations that it runs, with all shapes.

    With --trace, a small version of the model (or a saved folder's own) reads TEXT, and every matrix is printed.
    """
    from qkv.cli.source import config_of

    config = config_of(name)
    if trace is not None:
        from qkv.cli.trace import print_trace

        print_trace(name, config, trace, as_json)
    elif as_json:
        print(json.dumps(_described(config), indent=2))
    else:
        print("\n\n".join((_config(name, config, show_all), _tensors(config), _operations(config))))


def _config(name: str, config: ModelConfig, show_all: bool) -> str:
    from qkv.cli.tree import tree

    hint = "" if show_all else "; settings left at their default are hidden (--all shows them)"
    return f"{name}: {config.n_parameters:,} parameters{_cache(config)}{hint}\n\n{tree(config, show_all)}"


def _cache(config: ModelConfig) -> str:
    """What a KV cache costs, where there is one."""
    from qkv.plan import kv_cache_bytes

    context = config.max_seq_len
    size = kv_cache_bytes(config, context, source=context)
    if not size:
        return ""
    return f"; KV cache in 16 bits {kv_cache_bytes(config, 1):,} bytes a token, {size:,} at {context:,}"


def _tensors(config: ModelConfig) -> str:
    from qkv.cli.table import aligned
    from qkv.plan import tensor_groups

    groups = tensor_groups(config)
    rows = [[g.name, str(g.shape), f"{g.size:,}", f"x {g.copies}" if g.copies > 1 else ""] for g in groups]
    rows.append(["total", "", f"{config.n_parameters:,}", ""])
    return f"Tensors\n\n{aligned(rows, right=(2,), indent='  ')}"


def _operations(config: ModelConfig) -> str:
    from qkv.cli.table import aligned
    from qkv.plan import index_ranges, operations

    rows = [["", "", "result", "with sizes", "parameters"]]
    for section in operations(config):
        times = f"x {len(section.layers)}" if len(section.layers) > 1 else ""
        path = f"{section.path}.{index_ranges(section.layers)}" if section.layers else section.path
        rows.append([path, times, "", "", f"{section.parameters:,}"])
        for step in section.operations:
            count = f"{step.parameters:,}" if step.parameters else ""
            rows.append([f"  {step.name}", step.formula, _symbols(step.writes), _sizes(step.writes), count])
    return f"Operations\n\n{aligned(rows, right=(4,), indent='  ')}"


def _symbols(value: Value) -> str:
    return f"({', '.join(dim.symbol for dim in value.shape)})"


def _sizes(value: Value) -> str:
    return f"({', '.join(dim.shown for dim in value.shape)})"


def _described(config: ModelConfig) -> dict[str, Any]:
    from qkv.plan import kv_cache_bytes, operations, tensor_groups

    def value(v: Value) -> dict[str, Any]:
        return {"name": v.name, "shape": [d.symbol for d in v.shape], "sizes": [d.size for d in v.shape]}

    return {
        "config": config.to_dict(),
        "n_parameters": config.n_parameters,
        "kv_cache_bytes_per_token": kv_cache_bytes(config, 1),
        "tensors": [{"name": g.name, "shape": g.shape, "copies": g.copies} for g in tensor_groups(config)],
        "operations": [
            {
                "section": section.path,
                "layers": section.layers,
                "steps": [
                    {
                        "name": step.name,
                        "formula": step.formula,
                        "reads": [value(v) for v in step.reads],
                        "writes": value(step.writes),
                        "parameters": step.parameters,
                    }
                    for step in section.operations
                ],
            }
            for section in operations(config)
        ],
    }
