"""Every member of every union has all that a variant needs: a described config class, a torch module, a reference
function, and a row in the parity table. A new variant that lacks one of them fails here."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from parity.cases import CASES
from qkv.config import (
    UNIONS,
    AllOf,
    AnyOf,
    Config,
    FullTable,
    Init,
    NoHead,
    NoNorm,
    NoScaling,
    Pattern,
    Variant,
)
from qkv.config.decoding import Decoding
from qkv.config.training import Objective, Optimizer, Schedule
from qkv.nn import implementation
from qkv.reference.registry import function_of

MEMBERS = [member for union in UNIONS for member in union.members]
FROM_NO_PAPER = {NoHead, NoNorm, NoScaling, FullTable, AllOf, AnyOf}
"""What adds nothing, or only combines others."""

every_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)


def members_in(value: Any) -> Iterator[Variant]:
    """Every union member inside a config."""
    if isinstance(value, Variant):
        yield value
    if isinstance(value, Config):
        for name in type(value).model_fields:
            yield from members_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from members_in(item)


IN_PARITY = {type(member): member for config in CASES.values() for member in members_in(config)}
"""Each class that some parity row uses, with one of its configs."""


def test_every_union_is_listed_and_every_member_is_in_one() -> None:
    ours = {union for union in Variant.__subclasses__() if union.__module__.startswith("qkv.config")}
    # Decoding is chosen per request and the others per training run: no part of the architecture.
    assert ours == {*UNIONS, Decoding, Objective, Optimizer, Schedule}
    for union in ours:
        below = {member for member in union.__subclasses__() if member.__module__.startswith("qkv.config")}
        assert below == set(union.members)


@pytest.mark.parametrize("union", UNIONS, ids=lambda union: union.__name__)
def test_a_union_is_described_and_its_kinds_differ(union: type[Variant]) -> None:
    assert vars(union).get("__doc__")
    kinds = [member.model_fields["kind"].default for member in union.members]
    assert len(set(kinds)) == len(kinds)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", kind) for kind in kinds), "kinds are lower case, with hyphens"


@every_member
def test_a_member_says_what_it_is_and_where_it_comes_from(member: type[Variant]) -> None:
    described = vars(member).get("__doc__") or ""
    assert described.strip().endswith((".", ")", "]"))
    from_a_paper = re.search(r"\b(19|20)\d\d\b", described) is not None
    assert from_a_paper != (member in FROM_NO_PAPER), "name the year of the paper or of the release"


@every_member
def test_a_member_has_a_torch_implementation(member: type[Variant]) -> None:
    if issubclass(member, Pattern):  # one predicate serves NumPy and torch
        assert "allowed" in vars(member)
    elif issubclass(member, Init):
        assert "table" in vars(member)
    else:
        assert implementation(member).__module__.startswith("qkv.nn")


@every_member
def test_a_member_has_a_parity_row(member: type[Variant]) -> None:
    assert member in IN_PARITY, f"add a row with {member.__name__} to CASES in tests/parity/cases.py"


@pytest.mark.parametrize(
    "member", [m for m in MEMBERS if not issubclass(m, Pattern | Init)], ids=lambda member: member.__name__
)
def test_a_member_has_a_reference_function(member: type[Variant]) -> None:
    function = function_of(IN_PARITY[member])
    assert function.__module__.startswith("qkv.reference")
