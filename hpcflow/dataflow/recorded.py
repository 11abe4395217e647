"""Recorded columns in place of the calls that made them: how an iteration is computed again without generating again.

The algorithm's function runs as always, and calls that change weights are made. A call that only makes columns is not:
its columns come from the recorder. Each call has a *place*, model, method and how many of these came before in the
iteration ("actor.generate_sequences#2"), which is the same whenever the same function runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcflow.dataflow.batch import Batch, Origin

if TYPE_CHECKING:
    from hpcflow.dataflow.group import WorkerGroup
    from hpcflow.workers.primitive import Primitive


class Recorded:
    """What is recorded of one iteration: ``rows``, ``places`` (column, see `Recovery`, -> place of the call that made
    it).

    ``values``: place -> {rank: value} of calls that only return a value; empty when not all columns that the
    iteration's updates read are recorded: then such calls are made, for what they may do besides.
    """

    def __init__(
        self,
        recorder: WorkerGroup,
        iteration: int,
        rows: int,
        places: dict[str, str],
        values: dict[str, dict[int, Any]],
    ) -> None:
        self.places, self.values, self.rows = places, values, rows
        self.skipped: list[str] = []  # places of calls that were not made
        self.columns: dict[str, Origin] = {}  # by the name under which it is recorded
        self._by_place: dict[tuple[str, str], Origin] = {}
        for prefix in sorted({name.rpartition(".")[0] for name in places}):
            stored = [name for name in places if name.rpartition(".")[0] == prefix]
            plain = {name: name.rpartition(".")[2] for name in stored}
            primitive = dataclasses.replace(recorder.primitives["replay"], writes=tuple(plain.values()))
            arguments = {"iteration": iteration, "rows": rows, "prefix": f"{prefix}." if prefix else ""}
            made = recorder.issue(primitive, None, arguments, "recorder.replay#1").columns
            self.columns |= {name: made[plain[name]] for name in stored}
            self._by_place |= {(places[name], plain[name]): made[plain[name]] for name in stored}

    def instead_of(
        self,
        group: WorkerGroup,
        primitive: Primitive,
        batch: Batch | None,
        rows: int,
        place: str,
        make: Callable[[], Any],
    ) -> Batch | KnownHandle | None:
        """What to give the caller instead of making this call (by ``make``); None: make it."""
        if primitive.kind == "advancing":
            return None
        if not primitive.writes:
            known = self.values.get(place)
            if known is not None:
                self.skipped.append(place)
            return KnownHandle(known, group.ranks) if known is not None else None
        later = Deferred(group, place, make)
        columns: dict[str, Origin | Deferred] = {
            name: self._by_place.get((place, name), later) if rows == self.rows else later
            for name in primitive.writes
        }
        if later not in columns.values():
            self.skipped.append(place)
        made = Batch(group.world.controller, rows, columns)
        return batch | made if primitive.joins and batch is not None else made


class KnownHandle:
    """A `Handle` of a call whose values are recorded."""

    def __init__(self, values: dict[int, Any], ranks: tuple[int, ...]) -> None:
        self._values, self._ranks = values, ranks

    def wait(self, timeout: float | None = None) -> KnownHandle:
        return self

    def get(self, timeout: float | None = None) -> list[Any]:
        return [self._values[rank] for rank in self._ranks if rank in self._values]


class Deferred:
    """The origin of columns that are not recorded: their call is made when somebody reads one of them.

    RuntimeError when the model's weights have changed meanwhile: it would no longer be the same call.
    """

    def __init__(self, group: WorkerGroup, place: str, make: Callable[[], Any]) -> None:
        self._group, self._place, self._make, self._version = group, place, make, group.version
        self._made: dict[str, Origin] | None = None

    def peek(self, name: str) -> Origin | Deferred:
        """The origin if the call has been made."""
        return self if self._made is None else self._made[name]

    def now(self, name: str) -> Origin:
        """The origin; makes the call if need be."""
        if self._made is None:
            if self._group.version != self._version:
                raise RuntimeError(
                    f"{self._place} is needed, is not recorded, and was computed by weight version {self._version}; "
                    f"{self._group.name} has version {self._group.version} now"
                )
            self._made = {column: origin.now(column) for column, origin in self._make().columns.items()}
        return self._made[name]
