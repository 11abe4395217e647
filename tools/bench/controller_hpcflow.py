"""The controller benchmark on hpcflow: one rank of the world, started by controller.py."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measure import COLUMNS, FLOAT_COLUMNS, INT_COLUMNS, ROW_TOKENS, measure, print_result

from hpcflow.dataflow.world import Member, World, rank_from_environment
from hpcflow.mpi.worker import catch_signals
from hpcflow.reshard.layout import Layout
from hpcflow.workers.host import serve
from hpcflow.workers.primitive import Context, Output, Rows, primitive, primitives_of


class Probe:
    """A model without a neural network."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.made: dict[int, dict[str, torch.Tensor]] = {}

    @primitive("ONE_TO_ALL")
    def ping(self, rows: Rows) -> None:
        return None

    @primitive("DP_PROTO", writes=COLUMNS)
    def make(self, rows: Rows, parts: dict[int, tuple[int, int]]) -> Output:
        lo, hi = parts[self.context.rank]
        if hi - lo not in self.made:
            shape = (hi - lo, ROW_TOKENS)
            self.made[hi - lo] = {
                **{name: torch.ones(shape, dtype=torch.int64) for name in INT_COLUMNS},
                **{name: torch.ones(shape) for name in FLOAT_COLUMNS},
            }
        return Output(dict(self.made[hi - lo]), ids=torch.arange(lo, hi))

    @primitive("DP_PROTO", reads=COLUMNS)
    def consume(self, rows: Rows) -> float:
        return float(rows["values"][:, 0].sum())


class Hpcflow:
    """See `measure.Backend`."""

    def __init__(self, workers: int, groups: int) -> None:
        starts = [1 + workers * k for k in range(groups)]
        pools = {name: tuple(range(s, s + workers)) for name, s in zip("ab", starts, strict=False)}
        made = primitives_of(Probe)
        members = {
            name.upper(): Member("controller_hpcflow:Probe", name, Layout(d=workers), made) for name in pools
        }
        self.world = World(pools, members)
        self.groups = [self.world.group(name) for name in members]

    def ping(self) -> None:
        self.groups[0].ping().wait()

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def move(self, rows: int) -> float:
        return sum(self.groups[1].consume(self.groups[0].make(rows=rows)).get())

    def stop(self) -> None:
        self.world.close()


def main() -> Any:
    parser = argparse.ArgumentParser()
    for name, kind in (("--workers", int), ("--calls", int), ("--repeats", int)):
        parser.add_argument(name, type=kind, required=True)
    parser.add_argument("--mb", type=float, nargs="*", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if rank_from_environment():
        read_end, write_end = catch_signals(())
        return serve(read_end)
    backend = Hpcflow(args.workers, 2 if args.mb else 1)
    print_result(measure(backend, args.calls, args.mb, args.repeats))
    backend.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
