"""Batches and handles: what the controller holds instead of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hpcflow.data.columns import Columns
from hpcflow.mpi.controller import whole
from hpcflow.mpi.messages import Part, Stamp, Transfer

if TYPE_CHECKING:
    from hpcflow.mpi.controller import Controller


class Handle:
    """One call: wait for it, ask what it returned. The call itself runs on whether or not anybody holds this."""

    def __init__(self, controller: Controller, number: int, keepers: tuple[int, ...]) -> None:
        self._controller, self.number, self._keepers = controller, number, keepers

    def wait(self, timeout: float | None = None) -> Handle:
        """Until all ranks have finished. TimeoutError after ``timeout`` seconds; WorkerError on a fault."""
        self._controller.result(self.number, timeout)
        return self

    def get(self, timeout: float | None = None) -> list[Any]:
        """The values of the ranks whose output the protocol keeps, in rank order."""
        reports = self._controller.result(self.number, timeout)
        return [reports[rank].value for rank in self._keepers]

    def __del__(self) -> None:
        self._controller.forget(self.number)


@dataclass(eq=False)
class Origin:
    """The columns that one call made: who owns which rows, and their stamp. Freed on the owners with the last holder.

    ``place``: the call among those of its iteration, "actor.generate_sequences#1".
    """

    handle: Handle
    owners: tuple[Part, ...]
    stamp: Stamp
    release: Callable[[int, tuple[Part, ...]], None]
    place: str = ""

    def now(self, name: str) -> Origin:
        """Itself; see `hpcflow.dataflow.recorded.Deferred`."""
        return self

    peek = now

    def __del__(self) -> None:
        self.release(self.handle.number, self.owners)


class Batch:
    """Columns over one ordered list of samples. Metadata only: names, origins, number of rows."""

    def __init__(self, controller: Controller, rows: int, columns: dict[str, Origin]) -> None:
        self._controller, self.rows, self.columns = controller, rows, columns

    def __len__(self) -> int:
        return self.rows

    def __or__(self, other: Batch) -> Batch:
        """Both batches' columns, joined by sample: the ranks that read them compare the ids. A column that both have
        is taken from the right. ValueError when the numbers of rows differ."""
        if self.rows != other.rows:
            raise ValueError(
                f"cannot join a batch of {self.rows} rows ({', '.join(self.columns)}) with one of {other.rows} rows "
                f"({', '.join(other.columns)}): both must be about the same samples"
            )
        return Batch(self._controller, self.rows, {**self.columns, **other.columns})

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns. ValueError names those that are missing."""
        names = list(names)
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise ValueError(
                f"the batch has no column {', '.join(missing)}; it has {', '.join(self.columns)}"
            )
        return Batch(self._controller, self.rows, {name: self.columns[name] for name in names})

    def stamps(self) -> dict[str, Stamp]:
        """Iteration, producing model and weight version of each column."""
        return {name: origin.now(name).stamp for name, origin in self.columns.items()}

    def wait(self, timeout: float | None = None) -> Batch:
        """Until every column has been computed."""
        for name, origin in self.columns.items():
            origin.now(name).handle.wait(timeout)
        return self

    def transfers(self, names: Iterable[str], readers: tuple[Part, ...]) -> tuple[Transfer, ...]:
        """The transfers that bring these columns to ``readers``, one per call that made some of them."""
        by_origin: dict[int, tuple[Origin, list[str]]] = {}
        for name in names:
            origin = self.columns[name].now(name)
            by_origin.setdefault(origin.handle.number, (origin, []))[1].append(name)
        return tuple(
            Transfer(self._controller.number(), source, tuple(columns), origin.stamp, origin.owners, readers)
            for source, (origin, columns) in by_origin.items()
        )

    def fetch(self, names: Iterable[str] | None = None) -> tuple[torch.Tensor, Columns]:
        """Bring columns here (ids int64 [rows], columns): for tests and tools; an algorithm never needs it."""
        columns: Columns = {}
        ids = torch.empty(0, dtype=torch.int64)
        chosen = self.select(self.columns if names is None else names)
        for transfer in chosen.transfers(chosen.columns, whole(0, self.rows)):
            ids, part = self._controller.fetch(transfer)
            columns.update(part)
        return ids, {name: columns[name] for name in chosen.columns}
