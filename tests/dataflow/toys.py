"""Small models and scenarios for worlds of real MPI ranks: no neural network, all the machinery."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from hpcflow.data.columns import Ragged, cat_rows, n_rows, slice_rows
from hpcflow.dataflow.world import World, member, rank_from_environment
from hpcflow.mpi.worker import catch_signals
from hpcflow.reshard.layout import Layout
from hpcflow.workers.host import serve
from hpcflow.workers.primitive import Context, Output, Rows, primitive

CAP = 8 << 30


def source(lo: int, hi: int, width: int = 3) -> dict[str, Any]:
    """Rows lo..hi-1 of an endless batch whose values follow from the row number; row i has i % 5 tokens."""
    ids = torch.arange(lo, hi)
    tokens = [[10 * i + j for j in range(i % 5)] for i in range(lo, hi)]
    return {
        "dense": (ids[:, None] * 100 + torch.arange(width)[None, :]).float(),
        "half": ids.to(torch.bfloat16)[:, None, None].expand(-1, 2, 2).contiguous(),
        "tokens": Ragged.from_lists(tokens, torch.int64),
        "flag": ids % 2 == 0,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Ragged):
        return torch.equal(a.values, b.values) and torch.equal(a.lengths, b.lengths)
    return a.dtype == b.dtype and torch.equal(a, b)


NAMES = ("dense", "half", "tokens", "flag")


class Toy:
    """A model that makes, passes on and changes columns, and can be told to misbehave."""

    def __init__(self, context: Context, delay: float = 0.0) -> None:
        self.context, self.delay, self.version = context, delay, 0

    @primitive("DP_PROTO", writes=NAMES)
    def make(self, rows: Rows, parts: dict[int, tuple[int, int]], width: int = 3) -> Output:
        lo, hi = parts[self.context.rank]
        return Output(source(lo, hi, width), ids=torch.arange(lo, hi))

    @primitive("DP_PROTO", reads=NAMES, writes=NAMES)
    def echo(self, rows: Rows) -> dict[str, Any]:
        time.sleep(self.delay)
        return dict(rows.columns)

    @primitive("3D_PROTO", reads=NAMES, writes=NAMES)
    def echo_3d(self, rows: Rows) -> dict[str, Any]:
        return dict(rows.columns)

    @primitive("3D_ALL_MICRO_DP", reads=NAMES, writes=NAMES)
    def echo_micro(self, rows: Rows) -> dict[str, Any]:
        return dict(rows.columns)

    @primitive("3D_PP_ONLY", reads=NAMES, writes=NAMES)
    def echo_stages(self, rows: Rows) -> dict[str, Any]:
        return dict(rows.columns)

    @primitive("ONE_TO_ALL", reads=NAMES, writes=NAMES)
    def echo_all(self, rows: Rows) -> dict[str, Any]:
        return dict(rows.columns)

    @primitive("ALL_TO_ALL", reads=NAMES, writes=NAMES)
    def echo_each(self, rows: Rows) -> dict[str, Any]:
        return dict(rows.columns)

    @primitive("DP_PROTO", reads=("dense",), writes=("sums",))
    def add(self, rows: Rows) -> dict[str, Any]:
        time.sleep(self.delay)
        return {"sums": rows["dense"].sum(1)}

    @primitive("DP_PROTO", reads=("dense",))
    def total(self, rows: Rows) -> float:
        return float(rows["dense"][:, 0].double().sum())

    @primitive("DP_PROTO", reads=("dense",), kind="advancing")
    def learn(self, rows: Rows) -> float:
        self.version += 1
        return float(len(rows))

    @primitive("ONE_TO_ALL")
    def ping(self, rows: Rows) -> None:
        return None

    @primitive("ONE_TO_ALL")
    def agree(self, rows: Rows, text: str = "") -> list[str]:
        payload = f"{text}{self.context.index}".encode() * (1 + self.context.index)
        return [each.decode() for each in self.context.exchange(payload)]

    @primitive("ONE_TO_ALL")
    def nap(self, rows: Rows, seconds: float, only: int = -1) -> None:
        if only in (-1, self.context.index):
            time.sleep(seconds)

    @primitive("ONE_TO_ALL")
    def tamper(self, rows: Rows, what: str, only: int = 0) -> None:
        """Break the contract on one rank."""
        if self.context.index == only and what == "version":
            self.version += 1

    @primitive("ONE_TO_ALL")
    def cpu_seconds(self, rows: Rows) -> float:
        return time.process_time()

    @primitive("DP_PROTO", writes=("big",))
    def make_big(self, rows: Rows, parts: dict[int, tuple[int, int]], width: int) -> Output:
        lo, hi = parts[self.context.rank]
        big = torch.arange(256, dtype=torch.uint8).repeat((hi - lo) * width // 256).view(hi - lo, width)
        return Output({"big": big}, ids=torch.arange(lo, hi))

    @primitive("DP_PROTO", reads=("big",))
    def check_big(self, rows: Rows) -> list[int]:
        big = rows["big"].view(-1, 256)
        wrong = int((big != torch.arange(256, dtype=torch.uint8)).any(0).sum()) if len(big) < 1000 else 0
        edges = big[[0, -1]].tolist() if len(big) else []
        return [
            big.numel(),
            wrong,
            int(all(edge == list(range(256)) for edge in edges)),
            int(big[:, 7].eq(7).all()),
        ]


class Rogue(Toy):
    """Fails in the ways in which real models fail."""

    @primitive("ONE_TO_ALL")
    def fail(self, rows: Rows, how: str, only: int = 0) -> None:
        if self.context.index != only:
            self.context.exchange(b"")  # the others wait in an agreement for ever
            return
        if how == "raise":
            raise KeyError("no such tensor")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "stop":
            os.kill(os.getpid(), 19)
        time.sleep(3600)

    @primitive("DP_PROTO", reads=("dense",), writes=("sums",))
    def short(self, rows: Rows) -> dict[str, Any]:
        """One row too few on the first rank."""
        return {"sums": rows["dense"][:-1, 0] if self.context.index == 0 else rows["dense"][:, 0]}

    @primitive("DP_PROTO", reads=("dense",), writes=("sums",))
    def swapped(self, rows: Rows) -> Output:
        """Right numbers, wrong ids."""
        return Output({"sums": rows["dense"][:, 0]}, ids=rows.ids.flip(0))


def run(
    scenario: Callable[[World], Any],
    pools: dict[str, list[int]],
    models: dict[str, dict[str, Any]],
    **options: Any,
):
    """Be one rank of a world with these pools and toy models; rank 0 runs the scenario and returns what it returns.

    ``models``: name -> {"pool", "layout": kwargs of Layout (default: pure data parallel), "cls", other arguments}.
    """
    if rank_from_environment():
        read_end, write_end = catch_signals(())
        code = serve(read_end)
        write_end.close()
        return code
    members = {}
    for name, spec in models.items():
        spec = dict(spec)
        pool, cls = spec.pop("pool"), spec.pop("cls", Toy)
        layout = Layout(**spec.pop("layout", {"d": len(pools[pool])}))
        members[name] = member(cls, pool, layout, **spec)
    world = World(
        {name: tuple(ranks) for name, ranks in pools.items()},
        members,
        watchdog=options.get("watchdog", 60.0),
        column_cap=options.get("cap", CAP),
    )
    result = scenario(world)
    world.close()
    return result


__all__ = ["NAMES", "Rogue", "Toy", "cat_rows", "n_rows", "run", "same", "slice_rows", "source"]
