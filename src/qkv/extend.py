"""`register`: a variant of your own, from your own file, without touching the package.

    qkv.register(MyPositions, module=MyModule, reference=MyScheme)

enters three things: the config class into its union, so that configs and saved models may name its kind; the torch
module that runs it; and its reference, against which the module can be checked (`qkv.reference.registry` says what each
union expects). A pattern needs neither: its predicate is all there is. Import the file before you load a model that
uses it. As a decorator:

    @qkv.register
    class MyPattern(qkv.config.Pattern): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from qkv.config import Variant
from qkv.config import register as enter

if TYPE_CHECKING:
    from torch import nn

M = TypeVar("M", bound=type[Variant])


@overload
def register(member: M, *, module: type[nn.Module] | None = None, reference: Callable[..., Any] | None = None) -> M: ...


@overload
def register(
    *, module: type[nn.Module] | None = None, reference: Callable[..., Any] | None = None
) -> Callable[[M], M]: ...


def register(
    member: M | None = None,
    *,
    module: type[nn.Module] | None = None,
    reference: Callable[..., Any] | None = None,
) -> M | Callable[[M], M]:
    """Add `member` to its union, run by `module` and checked by `reference`; returns the class."""
    if member is None:
        return lambda decorated: register(decorated, module=module, reference=reference)
    enter(member)
    if module is not None:
        from qkv.nn import implements

        implements(member)(module)
    if reference is not None:
        from qkv.reference import register as register_reference

        register_reference(member, reference)
    return member
