"""What happened when and where: the nodes of an iteration, bytes moved, idle seconds by cause."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from hpcflow.mpi.messages import Call, Report

GENERATION = "generate_sequences"
VALUE_BYTES = 1 << 16


@dataclass
class Node:
    """One finished call. Times in unix seconds, ``busy`` in seconds per rank, ``bytes`` from other ranks, ``values`` by
    rank (none of calls that change weights or only make columns)."""

    call: int
    model: str
    method: str
    ranks: list[int]
    start: float
    end: float
    busy: dict[int, float]
    ends: dict[int, float]
    bytes: int
    held: int
    spans: list[tuple[str, int, float, float]]
    value: Any
    values: dict[int, Any]
    place: str
    advances: bool
    generates: bool

    def record(self) -> dict[str, Any]:
        """As the run directory keeps it."""
        keys = (
            "call",
            "place",
            "model",
            "method",
            "ranks",
            "start",
            "end",
            "busy",
            "bytes",
            "held",
            "spans",
            "values",
        )
        return {key: getattr(self, key) for key in keys}


def values_of(reports: dict[int, Report]) -> dict[int, Any]:
    """What each rank returned; nothing when it is not plain data of moderate size, which JSON can keep."""
    values = {rank: report.value for rank, report in reports.items() if report.value is not None}
    try:
        return values if len(json.dumps(values)) <= VALUE_BYTES else {}
    except (TypeError, ValueError):
        return {}


@dataclass
class Trace:
    """Nodes since the last `take`, and which calls are open."""

    nodes: list[Node] = field(default_factory=list)
    open: dict[int, Call] = field(default_factory=dict)

    def issued(self, call: Call) -> None:
        self.open[call.number] = call

    def done(self, call: Call, reports: dict[int, Report], advances: bool) -> None:
        del self.open[call.number]
        self.nodes.append(
            Node(
                call=call.number,
                model=call.model,
                method=call.method,
                ranks=list(call.ranks),
                start=min(report.start for report in reports.values()),
                end=max(report.end for report in reports.values()),
                busy={rank: report.end - report.start for rank, report in reports.items()},
                ends={rank: report.end for rank, report in reports.items()},
                bytes=sum(report.received for report in reports.values()),
                held=max(report.held for report in reports.values()),
                spans=[(n, rank, a, b) for rank, report in reports.items() for n, a, b in report.spans],
                value=reports[call.ranks[-1]].value,
                values={} if advances or call.writes else values_of(reports),
                place=call.place,
                advances=advances,
                generates=call.method == GENERATION,
            )
        )

    def running(self) -> str:
        """The oldest open call, for the progress line."""
        return next((f"{call.model}.{call.method}" for call in self.open.values()), "")

    def take(self) -> list[Node]:
        """The nodes since the last call, in the order of their start."""
        nodes, self.nodes = self.nodes, []
        return sorted(nodes, key=lambda node: (node.start, node.call))


def idle_seconds(
    nodes: list[Node], pools: dict[str, tuple[int, ...]], start: float, end: float
) -> dict[str, float]:
    """Rank-seconds in which the ranks of ``pools`` computed nothing between ``start`` and ``end``, by cause.

    ``straggler``: waiting for the slowest rank of the same call. A gap before a call is charged to what the call waited
    for: ``trainer_waits_for_batch`` (anything but generation), ``generator_waits_for_weights`` (generation). ``drained``:
    nothing was left to do for the rank in the interval.
    """
    idle: dict[str, float] = defaultdict(float)
    for ranks in pools.values():
        for rank in ranks:
            clock = start
            for node in nodes:
                if rank not in node.busy:
                    continue
                cause = "generator_waits_for_weights" if node.generates else "trainer_waits_for_batch"
                began = node.ends[rank] - node.busy[rank]
                idle[cause] += max(0.0, min(began, end) - max(clock, start))
                idle["straggler"] += max(0.0, min(node.end, end) - max(node.ends[rank], start))
                clock = max(clock, node.end)
            idle["drained"] += max(0.0, end - max(clock, start))
    return dict(idle)
