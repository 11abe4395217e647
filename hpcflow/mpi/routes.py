"""The control tree: who passes commands on to whom.

Inside each pool commands fan out along a tree of fixed shape, so a worker has exactly one parent and all its commands
arrive in the order in which they were issued; answers are merged on the way up. Small pools hang directly below the
controller: on one host a tree costs more wake-ups than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

FAN_OUT = 16


class Routes:
    """``pools``: name -> ranks, disjoint. Ranks outside every pool hang directly below rank 0."""

    def __init__(self, pools: dict[str, Sequence[int]], size: int, fan_out: int = FAN_OUT) -> None:
        self._parent: dict[int, int] = {rank: 0 for rank in range(1, size)}
        for ranks in pools.values():
            if len(ranks) > fan_out:
                for place, rank in enumerate(ranks[1:], 1):
                    self._parent[rank] = ranks[(place - 1) // fan_out]
        self._children: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for rank, parent in sorted(self._parent.items()):
            self._children[parent].append(rank)
        self._below: dict[int, frozenset[int]] = {}
        for rank in range(size):
            self._below[rank] = frozenset(self._walk(rank))

    def _walk(self, rank: int) -> Iterable[int]:
        yield rank
        for child in self._children[rank]:
            yield from self._walk(child)

    def parent(self, rank: int) -> int | None:
        return self._parent.get(rank)

    def children(self, rank: int) -> list[int]:
        return self._children[rank]

    def below(self, rank: int) -> frozenset[int]:
        """``rank`` and all ranks that it passes messages on to."""
        return self._below[rank]

    def children_towards(self, rank: int, targets: Iterable[int]) -> list[int]:
        """The children of ``rank`` that lead to any of ``targets``."""
        if not self._children[rank]:
            return []
        wanted = set(targets)
        return [child for child in self._children[rank] if not wanted.isdisjoint(self._below[child])]
