"""What ranks do in test_launch.py."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def init():
    from mpi4py import MPI

    MPI.Init()
    return MPI


def allreduce() -> list[int]:
    """[sum of ranks, world size, CPU threads of torch]"""
    import torch

    MPI = init()
    total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
    MPI.Finalize()
    return [
        total,
        MPI.COMM_WORLD.size if not MPI.Is_finalized() else int(os.environ["PMI_SIZE"]),
        torch.get_num_threads(),
    ]


def end_badly(how: str, who: int, folder: str) -> None:
    """Rank ``who`` ends as ``how`` says while the others wait for ever, each with a child that outlives
    it.
    """
    MPI = init()
    rank = MPI.COMM_WORLD.rank
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    Path(folder, f"pids_{rank}").write_text(f"{os.getpid()} {os.getppid()} {child.pid}")
    MPI.COMM_WORLD.Barrier()
    if rank == who:
        if how == "raise":
            raise ValueError("deliberate")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "abort":
            MPI.COMM_WORLD.Abort(7)
    if how == "all exit":
        os._exit(10 + rank)
    time.sleep(1000)


def end_before_init(who: int) -> None:
    """Rank ``who`` ends well before MPI exists (a failing import, say); the others wait for it in MPI_Init."""
    if int(os.environ["PMI_RANK"]) == who:
        os._exit(1)
    init()


def note_signals(folder: Path) -> None:
    """Write the name of each signal to ``ready_<rank>`` until SIGTERM, then rank 1 ends with status 5."""
    rank = int(os.environ["PMI_RANK"])
    note = folder / f"ready_{rank}"
    signal.signal(signal.SIGUSR2, lambda number, _: note.write_text("SIGUSR2\n"))
    signal.signal(signal.SIGUSR1, lambda number, _: note.write_text("SIGUSR1\n"))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(5 * rank))
    note.touch()
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    note_signals(Path(sys.argv[1]))
