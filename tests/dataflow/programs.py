"""Scenarios that worlds of MPI ranks run; each returns what its test checks."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from pathlib import Path
from typing import Any

from hpcflow.dataflow.world import World
from tests.dataflow.toys import NAMES, Rogue, run, same, source

TWO = {"A": {"pool": "a"}, "B": {"pool": "b"}}


def pools(*sizes: int) -> dict[str, list[int]]:
    first, out = 1, {}
    for name, size in zip("abcd", sizes, strict=False):
        out[name] = list(range(first, first + size))
        first += size
    return out


def equal(batch: Any, rows: int, width: int = 3) -> bool:
    ids, columns = batch.fetch()
    wanted = source(0, rows, width)
    return ids.tolist() == list(range(rows)) and all(same(columns[name], wanted[name]) for name in NAMES)


def round_trips(sizes: list[int], rows: list[int], layout: dict[str, int]) -> Any:
    """Batches of several sizes from A to B and back to A, through every protocol."""

    def scenario(world: World) -> list[list[Any]]:
        a, b = world.models.A, world.models.B
        bad = []
        for count in rows:
            batch = a.make(rows=count)
            for method in ("echo", "echo_3d", "echo_micro", "echo_stages", "echo_all", "echo_each"):
                there = getattr(b, method)(batch)
                if not equal(a.echo(there), count):
                    bad.append([method, count])
        return bad

    models = {"A": {"pool": "a"}, "B": {"pool": "b", "layout": layout}}
    return run(scenario, pools(*sizes), models)


def stress(seed: int, calls: int, sizes: list[int], models: dict[str, str]) -> Any:
    """A random graph of asynchronous calls over models that share pools; every value is checked at the end."""

    def scenario(world: World) -> dict[str, int]:
        draw = random.Random(seed)
        rows, width = 12, 3
        groups = [world.group(name) for name in models]
        live = [groups[0].make(rows=rows)]
        sums, moved = [], 0
        for _ in range(calls):
            group, batch = draw.choice(groups), draw.choice(live)
            kind = draw.randrange(6)
            if kind == 0:
                live.append(group.make(rows=rows))
            elif kind < 4:
                live.append(getattr(group, draw.choice(("echo", "echo_3d", "echo_all", "echo_micro")))(batch))
            elif kind == 4:
                sums.append(group.add(batch | draw.choice(live)))
            else:
                sums.append(group.total(batch))
            if len(live) > 6:
                live.pop(draw.randrange(len(live)))
        wrong = sum(not equal(batch, rows, width) for batch in live)
        dense = source(0, rows)["dense"]
        for each in sums:
            if hasattr(each, "fetch"):
                wrong += not same(each.fetch()[1]["sums"], dense.sum(1))
            else:
                wrong += sum(each.get()) != float(dense[:, 0].double().sum())
        world.drain()
        moved = sum(node.bytes for node in world.trace.take())
        return {"wrong": wrong, "moved": moved}

    return run(scenario, pools(*sizes), {name: {"pool": pool} for name, pool in models.items()})


def control_bytes(rows: list[int]) -> Any:
    """Control bytes that the controller sends for the same graph at several batch sizes, and data bytes moved."""

    def scenario(world: World) -> list[list[int]]:
        a, b = world.models.A, world.models.B
        out = []
        for count in rows:
            world.drain()
            world.trace.take()
            before = world.controller.engine.control_bytes
            batch = a.make(rows=count)
            batch |= b.add(batch)
            total = sum(a.total(b.echo(batch)).get())
            world.drain()
            assert total == float(source(0, count)["dense"][:, 0].double().sum())
            sent = world.controller.engine.control_bytes - before
            out.append([sent, sum(node.bytes for node in world.trace.take())])
        return out

    return run(scenario, pools(2, 2), TWO)


def only_read_columns(rows: int) -> Any:
    """Bytes that reach B when it reads one column of four."""

    def scenario(world: World) -> list[int]:
        batch = world.models.A.make(rows=rows)
        world.models.B.total(batch).wait()
        world.models.B.add(batch).wait()
        return [
            node.bytes for node in world.trace.take() if node.model == "B" and node.method in ("total", "add")
        ]

    return run(scenario, pools(2, 2), TWO)


def freed(rows: int, turns: int) -> Any:
    """Bytes held on the owners after each of several iterations, and after everything was let go."""

    def scenario(world: World) -> dict[str, Any]:
        a, b = world.models.A, world.models.B
        held = []
        for _ in range(turns):
            batch = a.make(rows=rows, width=256)
            batch = b.echo(batch)
            b.total(batch).wait()
            world.drain()
            held.append(max(node.held for node in world.trace.take()))
        del batch
        gc.collect()
        a.ping().wait()
        b.ping().wait()
        world.drain()
        a.ping().wait(), b.ping().wait(), world.drain()
        return {"held": held, "after": max(node.held for node in world.trace.take() if node.method == "ping")}

    return run(scenario, pools(2, 2), TWO)


def over_cap(rows: int) -> Any:
    def scenario(world: World) -> None:
        keep = [world.models.A.make(rows=rows, width=256) for _ in range(4)]
        world.drain()
        del keep

    return run(scenario, pools(2, 2), TWO, cap=1 << 20)


def named_shared_memory() -> Any:
    """Files of MPI's shared memory that this rank has mapped, and of those the ones that still have a name."""

    def scenario(world: World) -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped = {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/mpich_shm_" in line}
        return len(mapped), sum(Path(name).exists() for name in mapped)

    return run(scenario, pools(2, 2), TWO)


def overlap(seconds: float) -> Any:
    """Two models in two pools, then the same two in one pool: do their calls overlap in time?"""

    def scenario(world: World) -> float:
        a, b = world.models.A, world.models.B
        a.ping(), b.ping()
        world.drain()
        world.trace.take()
        a.nap(seconds=seconds), b.nap(seconds=seconds)
        world.drain()
        first, second = [node for node in world.trace.take() if node.method == "nap"]
        return min(first.end, second.end) - max(first.start, second.start)

    return run(scenario, pools(1, 1), TWO)


def together(seconds: float) -> Any:
    def scenario(world: World) -> float:
        a, b = world.models.A, world.models.B
        a.nap(seconds=seconds), b.nap(seconds=seconds)
        world.drain()
        first, second = [node for node in world.trace.take() if node.method == "nap"]
        return min(first.end, second.end) - max(first.start, second.start)

    return run(scenario, pools(1), {"A": {"pool": "a"}, "B": {"pool": "a"}})


def agreements() -> Any:
    def scenario(world: World) -> list[Any]:
        a, b = world.models.A, world.models.B
        return [a.agree(text="x").get(), b.agree(text="y" * 100_000).get()[0] == ["y" * 100_000 + "0"]]

    return run(scenario, {"a": [1, 2, 3], "b": [4]}, TWO)


def own_protocol() -> Any:
    """A protocol of the user's own: all rows to the last rank."""
    from hpcflow.dataflow import protocols

    def scenario(world: World) -> list[Any]:
        a = world.models.A
        a.primitives["echo"] = dataclasses.replace(a.primitives["echo"], protocol="LAST_RANK")
        batch = a.echo(a.make(rows=7))
        return [equal(batch, 7), [tuple(part) for part in next(iter(batch.columns.values())).owners]]

    protocols.register(
        "LAST_RANK", lambda layout: 2, lambda layout, rank: (int(rank == layout.ranks - 1), rank in (0, 2))
    )
    return run(scenario, pools(3), {"A": {"pool": "a"}})


def breach(kind: str) -> Any:
    """Break the contract on data: the world must stop and name both values."""

    def scenario(world: World) -> None:
        a, b = world.models.A, world.models.B
        batch = a.make(rows=6)
        if kind == "swapped ids":
            b.primitives["total"] = dataclasses.replace(b.primitives["total"], reads=("dense", "sums"))
            b.total(batch | a.swapped(batch))
        elif kind == "rows":
            a.short(batch)
        elif kind == "stale weights":
            a.tamper(what="version", only=1)
            a.learn(batch)
        elif kind == "stale column":
            origin = batch.columns["dense"]
            origin.stamp = origin.stamp._replace(version=7)
            b.total(batch)
        elif kind == "missing column":
            a.add(a.add(batch))
        world.drain()

    return run(scenario, pools(2, 1), {"A": {"pool": "a", "cls": Rogue}, "B": {"pool": "b"}})


def fault(how: str, watchdog: float) -> Any:
    """One rank of A fails; the controller must say which and the world must end."""

    def scenario(world: World) -> None:
        world.models.A.ping().wait()
        # It waits behind a call that leaves columns: what a rank reports must be the call that it runs by then.
        before = world.models.A.echo(world.models.A.make(rows=4))
        world.models.A.fail(how=how, only=1)
        world.models.B.ping()
        world.drain()
        del before

    models = {"A": {"pool": "a", "cls": Rogue, "delay": 0.3}, "B": {"pool": "b"}}
    return run(scenario, pools(2, 1), models, watchdog=watchdog)


def latency(calls: int, pause: float, workers: int) -> Any:
    def scenario(world: World) -> list[float]:
        a = world.models.A
        for _ in range(10):
            a.ping().wait()
        times = []
        for _ in range(calls):
            time.sleep(pause)
            start = time.perf_counter()
            a.ping().wait()
            times.append(time.perf_counter() - start)
        return sorted(times)

    return run(scenario, pools(workers), {"A": {"pool": "a"}})


def idle(seconds: float, workers: int) -> Any:
    """CPU seconds that an idle world of ``workers`` costs all its ranks, the controller's waiting included."""

    def scenario(world: World) -> float:
        def total() -> float:
            return sum(world.models.A.cpu_seconds().get()) + time.process_time()

        total()
        before = total()
        world.controller.wait(lambda: False, timeout=seconds)
        return total() - before

    return run(scenario, pools(workers), {"A": {"pool": "a"}})


def beyond_two_gib(rows: int, width: int) -> Any:
    """A column of more than 2**31 bytes on one rank goes to other ranks."""

    def scenario(world: World) -> list[Any]:
        batch = world.models.A.make_big(rows=rows, width=width)
        return world.models.B.check_big(batch).get()

    return run(scenario, pools(1, 1), TWO)
