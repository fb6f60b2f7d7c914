"""What a position scheme does at each place where it may act, in words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from qkv import config as c
from qkv.plan.program import number


@dataclass(frozen=True)
class Steps:
    """What a position scheme does at each of its places, in words; empty where it does nothing."""

    embed: str = ""
    turn: str = ""
    bias: str = ""
    values: str = ""


@singledispatch
def steps(config: c.Positions) -> Steps:
    """A registered kind: what it does, its class says."""
    return Steps(**{"embed" if config.places == ("embedding",) else "bias": f"{config.kind}: see its class"})


@steps.register
def _(config: c.NoPositions) -> Steps:
    return Steps()


@steps.register
def _(config: c.Sinusoidal) -> Steps:
    return Steps(embed=f"sin and cos of position / {number(config.theta)}^(2i/D)")


@steps.register
def _(config: c.Learned) -> Steps:
    return Steps(embed="row of each position")


@steps.register
def _(config: c.Rotary) -> Steps:
    part = "" if config.fraction == 1.0 else f" of the first {config.fraction:.0%}"
    scaled = "" if config.scaling.kind == "none" else f", {config.scaling.kind} scaling"
    return Steps(turn=f"pairs{part} turned by position * {number(config.theta)}^(-2i/d){scaled}")


@steps.register
def _(config: c.Alibi) -> Steps:
    return Steps(bias="-slope of the head * distance")


@steps.register
def _(config: c.T5Buckets) -> Steps:
    return Steps(bias="row of the distance's bucket")


@steps.register
def _(config: c.Shaw) -> Steps:
    values = "weights * row of the distance" if config.values else ""
    return Steps(bias="q . row of the distance * scale", values=values)


@steps.register
def _(config: c.TransformerXL) -> Steps:
    return Steps(bias="(u . k + (q + v) . r of the distance) * scale")
