"""Transfer protocols: how a call's input is spread over a group's ranks and its output collected (HybridFlow, Table 3).

Every protocol is one function of (layout, rank): which part of the split the rank gets, and whether its output is kept.
Composing two of them, the producer's collect and the consumer's distribute, gives the plan of a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcflow.mpi.messages import Part
from hpcflow.reshard.layout import Layout


@dataclass(frozen=True)
class Protocol:
    """``parts(layout)``: into how many parts rows are split. ``assign(layout, rank)``: (part, is the output kept)."""

    name: str
    parts: Callable[[Layout], int]
    assign: Callable[[Layout, int], tuple[int, bool]]


def bounds(rows: int, parts: int, part: int) -> tuple[int, int]:
    """Rows of one part: as even as possible, the first parts one longer; empty when there are fewer rows than parts."""
    size, longer = divmod(rows, parts)
    lo = part * size + min(part, longer)
    return lo, lo + size + (part < longer)


@dataclass(frozen=True)
class Plan:
    """A protocol on a group: ``readers`` (rows that each rank gets), ``owners`` (rows of the output each keeps; every
    row exactly once, in row order), ``keepers`` (ranks whose values the controller is given)."""

    readers: tuple[Part, ...]
    owners: tuple[Part, ...]
    keepers: tuple[int, ...]


def plan(protocol: Protocol, layout: Layout, ranks: Sequence[int], rows: int) -> Plan:
    """The plan for ``rows`` rows on ``ranks`` (in training order). ValueError when some part is kept by nobody."""
    parts = protocol.parts(layout)
    readers, keepers, owner = [], [], {}
    for place, rank in enumerate(ranks):
        part, kept = protocol.assign(layout, place)
        if not 0 <= part < parts:
            raise ValueError(
                f"protocol {protocol.name}: rank {place} is assigned part {part}; there are {parts} parts"
            )
        readers.append(Part(rank, *bounds(rows, parts, part)))
        if kept:
            keepers.append(rank)
            owner.setdefault(part, readers[-1])
    lost = sorted(set(range(parts)) - set(owner))
    if lost:
        raise ValueError(
            f"protocol {protocol.name}: the outputs of parts {lost} are kept by no rank; let one rank of each part keep"
        )
    return Plan(tuple(readers), tuple(owner[part] for part in range(parts)), tuple(keepers))


_registered: dict[str, Protocol] = {}


def register(
    name: str, parts: Callable[[Layout], int], assign: Callable[[Layout, int], tuple[int, bool]]
) -> Protocol:
    """Add a protocol of one's own. ValueError when the name is taken."""
    if name in _registered:
        raise ValueError(f"there is a transfer protocol {name!r} already; choose another name")
    _registered[name] = Protocol(name, parts, assign)
    return _registered[name]


def protocol(name: str) -> Protocol:
    """A protocol by name. ValueError lists those that exist."""
    if name not in _registered:
        raise ValueError(f"unknown transfer protocol {name!r}; there are {', '.join(sorted(_registered))}")
    return _registered[name]


def _last_stage_first_tensor(layout: Layout, rank: int) -> tuple[int, bool]:
    pp, tp, dp = layout.training(rank)
    return dp, pp == layout.p - 1 and tp == 0


def _micro_dp(layout: Layout, rank: int) -> tuple[int, bool]:
    """Table 3 collects from the first rank of every micro-DP group, which gives t_g*p_g copies of each response when
    t_g*p_g > 1. One part per generation replica, kept by one rank of that replica, has every row once."""
    pp, tp, replica = layout.generation(rank)
    return replica, pp == layout.p_g - 1 and tp == 0


def _stages(layout: Layout, rank: int) -> tuple[int, bool]:
    _, tp, dp = layout.training(rank)
    return 0, tp == 0 and dp == 0


register("ONE_TO_ALL", lambda layout: 1, lambda layout, rank: (0, True))
register("3D_PROTO", lambda layout: layout.d, _last_stage_first_tensor)
register("3D_ALL_MICRO_DP", lambda layout: layout.generation_replicas, _micro_dp)
register("3D_PP_ONLY", lambda layout: 1, _stages)
register("DP_PROTO", lambda layout: layout.ranks, lambda layout, rank: (rank, True))
register("ALL_TO_ALL", lambda layout: layout.ranks, lambda layout, rank: (rank, True))
