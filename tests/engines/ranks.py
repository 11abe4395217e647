"""Ranks for engine tests: processes forked from the test's own, so that torch and vLLM are imported once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 180) -> list[Any]:
    """``function(*args)`` on each of ``ranks`` processes with a gloo default group; the results in rank
    order.

    AssertionError with the ranks' tracebacks when one raises, dies, or does not end in time.
    """
    torch.set_num_threads(1)  # a forked OpenMP pool of the parent would hang
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, pipes[rank][1], function, args))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        deadline, outcomes = time.monotonic() + timeout_s, []
        try:
            for reader, _ in pipes:
                outcomes.append(_receive(reader, deadline))
                if not outcomes[-1][0]:
                    deadline = min(deadline, time.monotonic() + 10)  # the others may be waiting for this one
        finally:
            for process in processes:
                process.join(max(0.0, min(20.0, deadline - time.monotonic())))
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [f"rank {rank}: {what}" for rank, (fine, what) in enumerate(outcomes) if not fine]
    assert not failures, "\n".join(failures)
    return [result for _, result in outcomes]


def _receive(reader: Connection, deadline: float) -> tuple[bool, Any]:
    if not reader.poll(max(0.0, deadline - time.monotonic())):
        return False, "no result in time"
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        return False, "died"


def _rank(
    rank: int, ranks: int, folder: str, writer: Connection, function: Callable[..., Any], args: tuple
) -> None:
    try:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
        outcome = (True, function(*args))
        dist.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
    writer.send_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing of pytest may run twice
