"""The world as the controller sees it: pools of ranks, worker groups on them, calls and what became of them."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hpcflow.dataflow.batch import Batch
from hpcflow.dataflow.group import WorkerGroup
from hpcflow.dataflow.recorded import Recorded
from hpcflow.dataflow.trace import Trace
from hpcflow.mpi import guard
from hpcflow.mpi.controller import Controller
from hpcflow.mpi.messages import Call, Part, Spread
from hpcflow.mpi.worker import catch_signals
from hpcflow.reshard.layout import Layout
from hpcflow.workers.host import BUILD
from hpcflow.workers.primitive import Primitive, primitives_of


@dataclass
class Member:
    """A model to be placed: its class (dotted path), the arguments of its constructor, its layout and primitives."""

    cls: str
    pool: str
    layout: Layout
    primitives: dict[str, Primitive]
    arguments: dict[str, Any] = field(default_factory=dict)


class World:
    """Worker groups on disjoint pools; ``models`` has one attribute per model."""

    def __init__(
        self,
        pools: dict[str, tuple[int, ...]],
        members: dict[str, Member],
        *,
        watchdog: float = 600.0,
        column_cap: int = 4 << 30,
    ) -> None:
        _check_pools(pools, members)
        self.iteration = 0
        spread = Spread(
            groups={name: pools[member.pool] for name, member in members.items()},
            pools=pools,
            secret=secrets.token_bytes(32),
            column_cap=column_cap,
        )
        read_end, self._signal_end = catch_signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2))
        self.controller = Controller(spread, read_end, watchdog)
        self.controller.on_done = self._done
        self.controller.on_turn = self._flush_drops
        self.trace = Trace()
        self.before_advance: Callable[[Batch], None] = lambda batch: None
        self.before_issue: Callable[[Call], None] = lambda call: None
        self.after_done: Callable[[Call, dict[int, Any]], None] = lambda call, reports: None
        self.made: Callable[[Primitive, Batch], None] = lambda primitive, batch: None
        self.recorded: Recorded | None = None  # in place of calls, while an iteration is computed again
        self._places: Counter[str] = Counter()
        self._drops: list[tuple[int, tuple[Part, ...]]] = []
        self.models = SimpleNamespace()
        for name, member in members.items():
            group = WorkerGroup(self, name, pools[member.pool], member.layout, dict(member.primitives))
            setattr(self.models, name, group)
        for name, member in members.items():
            group = getattr(self.models, name)
            arguments = {"cls": member.cls, **member.arguments}
            self.issue(Call(self.controller.number(), name, BUILD, 0, 0, group.ranks, arguments, (), (), ()))

    def group(self, name: str) -> WorkerGroup:
        return getattr(self.models, name)

    def begin(self, iteration: int) -> None:
        """What is issued from now on belongs to this iteration."""
        self.iteration = iteration
        self._places.clear()

    def place(self, node: str) -> str:
        """The place of the next call of ``node`` ("actor.update_actor") in the iteration."""
        self._places[node] += 1
        return f"{node}#{self._places[node]}"

    def issue(self, call: Call) -> None:
        self._flush_drops()
        self.before_issue(call)
        self.trace.issued(call)
        self.controller.issue(call)

    def drain(self) -> None:
        """Wait for every call issued so far."""
        self._flush_drops()
        self.controller.wait(lambda: not self.controller.open)

    def close(self) -> None:
        """Stop all ranks in order."""
        self.drain()
        self.controller.close()

    # -- columns that nobody holds

    def release(self, call: int, owners: tuple[Part, ...]) -> None:
        """Called when the last holder of a call's columns is gone, at any moment: freed at the next turn."""
        self._drops.append((call, owners))

    def _flush_drops(self) -> None:
        drops, self._drops = self._drops, []
        by_owners: dict[tuple[int, ...], list[int]] = {}
        for call, owners in drops:
            by_owners.setdefault(tuple(part.rank for part in owners), []).append(call)
        for ranks, calls in by_owners.items():
            self.controller.drop(calls, ranks)

    def _done(self, call: Call, reports: dict[int, Any]) -> None:
        group = self.group(call.model)
        advances = call.method in group.primitives and group.primitives[call.method].kind == "advancing"
        self.trace.done(call, reports, advances)
        self.after_done(call, reports)


def _check_pools(pools: dict[str, tuple[int, ...]], members: dict[str, Member]) -> None:
    owner: dict[int, str] = {}
    for name, ranks in pools.items():
        for rank in ranks:
            if rank in owner:
                raise ValueError(f"rank {rank} is in pools {owner[rank]} and {name}; pools must not overlap")
            owner[rank] = name
    for name, member in members.items():
        if member.pool not in pools:
            raise ValueError(f"model {name} is placed on pool {member.pool!r}; there are {', '.join(pools)}")
        if member.layout.ranks != len(pools[member.pool]):
            raise ValueError(
                f"model {name}: its layout has p*t*d={member.layout.ranks} ranks, pool {member.pool} has "
                f"{len(pools[member.pool])}"
            )


def member(cls: type, pool: str, layout: Layout, **arguments: Any) -> Member:
    """A `Member` for an importable class with its own primitives."""
    return Member(f"{cls.__module__}:{cls.__qualname__}", pool, layout, primitives_of(cls), arguments)


def rank_from_environment() -> int:
    """This process's rank in the MPI world before MPI is initialised. ValueError outside an MPI launch."""
    rank = guard.rank()
    if rank is None:
        raise ValueError(
            "this process was not started as an MPI rank; start it with `hpcflow train` or mpiexec"
        )
    return rank
