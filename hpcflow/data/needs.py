"""Which columns a configured function (an advantage, a loss) reads, written beside the function itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpcflow.data.resolve import resolve


@dataclass(frozen=True)
class Needs:
    """``always``: columns it cannot do without. ``optional``: columns it uses when the batch has them.
    ``writes``: columns it makes beside those that its caller expects."""

    always: tuple[str, ...]
    optional: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def reads(
    *always: str, optional: tuple[str, ...] = (), writes: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Declare the columns that a function reads, and any that it makes beside the usual ones."""

    def mark(function: Callable) -> Callable:
        function.needs = Needs(always, optional, writes)
        return function

    return mark


def needs_of(path: str) -> Needs:
    """The needs of the function named by a dotted path. ValueError when it declares none."""
    function: Any = resolve(path)
    if not isinstance(getattr(function, "needs", None), Needs):
        raise ValueError(
            f"{path} does not say which columns it reads; decorate it, e.g. "
            "@hpcflow.data.needs.reads('advantages')"
        )
    return function.needs
