"""Functions that tests submit; each runs on every rank of a job."""

from __future__ import annotations

import os
import time
from typing import Any

import submitit


def world_of_ranks(crash: int | None = None) -> dict[str, Any]:
    """All ranks add up their numbers; ``crash``: the rank that dies instead."""
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    print(f"rank {world.rank} of {world.size} on {os.environ['SLURMD_NODENAME']}", flush=True)
    if world.rank == crash:
        os._exit(9)
    size, total = world.size, world.allreduce(world.rank)
    gpus = world.gather(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    MPI.Finalize()
    return {"total": total, "size": size, "gpus": gpus}


class Counts:
    """Counts to ten; interrupted, it goes on from where it was."""

    def __init__(self, start: int = 0) -> None:
        self.start = self.now = start

    def __call__(self) -> list[int]:
        for self.now in range(self.start, 10):
            time.sleep(0.5)
        return [self.start, self.now]

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        print(f"interrupted at {self.now}", flush=True)
        return submitit.helpers.DelayedSubmission(Counts(self.now))
