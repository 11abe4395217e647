"""Primitives: methods of a model that the controller may call, and what they promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hpcflow.data.columns import Columns

Kind = Literal["pure", "replayable", "advancing"]


@dataclass(frozen=True)
class Primitive:
    """``protocol``: name of the transfer protocol. ``reads``, ``writes``: columns that move in and stay out.

    ``optional``: columns that move in when the batch has them; ``written_with``: (column, optional column): the first is
    written when the second was read. ``joins``: the batch that the caller gets also has its input's columns. ``kind``: ``pure`` (no state), ``replayable`` (same ids and seeds, same result) or ``advancing`` (changes weights;
    carries the version that it expects, so a second execution is refused).
    """

    name: str
    protocol: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kind: Kind
    optional: tuple[str, ...] = ()
    written_with: tuple[tuple[str, str], ...] = ()
    joins: bool = False


@dataclass
class Rows:
    """A rank's part of a call's input: ids int64 [rows] and the columns that the primitive reads."""

    ids: torch.Tensor
    columns: Columns
    iteration: int

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


RECOVERED = "recovered"
"""Key of a call's value, beside its metrics: what failed inside the call and was made good there, as text."""


@dataclass
class Output:
    """What a primitive returns when it is more than columns: new ids, or a small value besides."""

    columns: Columns | None = None
    value: Any = None
    ids: torch.Tensor | None = None


def primitive(
    protocol: str,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    kind: Kind = "pure",
    joins: bool = False,
) -> Callable[[Callable], Callable]:
    """Make a method callable from the controller.

    The method gets ``(self, rows: Rows, **arguments)`` and returns `Columns`, an `Output`, or a small picklable value.
    Its input columns are shared with other readers on the same rank: it must not change them in place.
    """

    def mark(method: Callable) -> Callable:
        method.primitive = Primitive(method.__name__, protocol, reads, writes, kind, joins=joins)
        return method

    return mark


def primitives_of(cls: type) -> dict[str, Primitive]:
    """All primitives of a class, by name."""
    found = {name: getattr(getattr(cls, name), "primitive", None) for name in dir(cls)}
    return {name: p for name, p in found.items() if isinstance(p, Primitive)}


@dataclass
class Context:
    """What a model knows of its place: its group, its rank in it (training order), and how to agree with the others.

    ``exchange(payload)`` all-gathers bytes over the group; ``span(name)`` times a part of a call for the trace.
    """

    group: str
    rank: int
    index: int
    size: int
    exchange: Callable[[bytes], list[bytes]]
    span: Callable[[str], Any]
