"""What the controller and the workers say to each other: a few small records, none of which grows with a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Part(NamedTuple):
    """Rows lo..hi-1 of a batch at one rank."""

    rank: int
    lo: int
    hi: int


class Stamp(NamedTuple):
    """Where a column comes from: iteration, producing model, that model's weight version."""

    iteration: int
    model: str
    version: int

    def __str__(self) -> str:
        return f"iteration {self.iteration}, model {self.model}, weight version {self.version}"


@dataclass(frozen=True)
class Transfer:
    """Move ``columns`` of the output of call ``source`` from the ranks that own its rows to those that read them."""

    number: int
    source: int
    columns: tuple[str, ...]
    stamp: Stamp
    owners: tuple[Part, ...]
    readers: tuple[Part, ...]

    def pieces(self, rank: int) -> list[Part]:
        """Which owner sends which rows to reader ``rank``; both sides compute this alike.

        A reader without rows still needs dtypes and shapes: the first owner sends it an empty slice.
        """
        mine = next(part for part in self.readers if part.rank == rank)
        found = [
            Part(owner.rank, max(owner.lo, mine.lo), min(owner.hi, mine.hi))
            for owner in self.owners
            if max(owner.lo, mine.lo) < min(owner.hi, mine.hi)
        ]
        first = self.owners[0]
        return found or [Part(first.rank, first.lo, first.lo)]

    def senders(self) -> list[int]:
        """Owners that have something to send to another rank."""
        return sorted({p.rank for r in self.readers for p in self.pieces(r.rank) if p.rank != r.rank})


@dataclass(frozen=True)
class Call:
    """Run ``model.method`` on ``ranks``. ``outputs``: the rows of its output that each owner must hold. ``kind``: what the
    primitive promises (`hpcflow.workers.primitive`). ``place``: the call among those of its iteration."""

    number: int
    model: str
    method: str
    iteration: int
    version: int
    ranks: tuple[int, ...]
    args: dict[str, Any]
    inputs: tuple[Transfer, ...]
    writes: tuple[str, ...]
    outputs: tuple[Part, ...]
    kind: str = "pure"
    place: str = ""

    def __str__(self) -> str:
        return f"{self.model}.{self.method} (call {self.number})"


@dataclass(frozen=True)
class Push:
    """To owners: send your rows of this transfer as soon as the source call has finished."""

    transfer: Transfer
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """To owners: nobody holds these calls' outputs any more."""

    calls: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ShowStack:
    """Ask ranks where their main thread is."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Inquire:
    """After a failure: ask ranks what became of their calls."""

    ranks: tuple[int, ...]


class CallState(NamedTuple):
    """One call at one rank. ``state``: "waiting", "running" or "finished". ``repeatable``: executing it (again) gives the
    same result and changes nothing else. ``visible``: some of its output was given to a reader."""

    state: str
    repeatable: bool
    visible: bool


@dataclass(frozen=True)
class Answer:
    """A rank's answer to `Inquire`: call number -> state, of its unfinished and its latest finished calls."""

    rank: int
    calls: dict[int, CallState]


@dataclass(frozen=True)
class Stop:
    """End of the world."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """One rank's account of a finished call: times are unix seconds, ``received`` and ``held`` are bytes."""

    value: Any
    start: float
    end: float
    received: int
    held: int
    spans: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True)
class Done:
    """A call has finished on these ranks."""

    number: int
    reports: dict[int, Report]


@dataclass(frozen=True)
class Failed:
    """A rank cannot go on: ``what`` it was doing and the traceback or reason."""

    rank: int
    what: str
    reason: str


@dataclass(frozen=True)
class Activity:
    """What a rank is doing (``state`` "runs", "waits for ..." or "idle"), and for how many seconds."""

    number: int
    what: str
    state: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} {self.state} for {self.seconds:.1f} s" if self.what else self.state


@dataclass(frozen=True)
class Heartbeat:
    rank: int
    activity: Activity


@dataclass(frozen=True)
class Lost:
    """The connection to a rank has ended."""

    rank: int


@dataclass(frozen=True)
class Stack:
    rank: int
    text: str


@dataclass(frozen=True)
class Signal:
    """A signal reached a rank."""

    rank: int
    number: int


@dataclass
class Spread:
    """The world's plan, spread by MPI from rank 0 at the start. ``column_cap``: bytes of columns one rank may hold."""

    groups: dict[str, tuple[int, ...]]
    pools: dict[str, tuple[int, ...]]
    secret: bytes
    column_cap: int
