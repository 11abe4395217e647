"""What the controller benchmark measures, the same for every system. Runs in each system's own
interpreter.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

ROW_TOKENS = 512
ROW_BYTES = ROW_TOKENS * (2 * 8 + 4 * 4)  # two int64 and four float32 columns
INT_COLUMNS = ("input_ids", "attention_mask")
FLOAT_COLUMNS = ("old_log_probs", "ref_log_prob", "values", "advantages")
COLUMNS = INT_COLUMNS + FLOAT_COLUMNS
PAUSE_S = 0.01


class Backend(Protocol):
    """A system under test: two groups A and B of ``workers`` worker processes each, and a controller."""

    def ping(self) -> None:
        """An empty call on every worker of A; returns when all have answered."""

    def pause(self, seconds: float) -> None:
        """Let the system idle."""

    def move(self, rows: int) -> float:
        """A batch of ``rows`` rows made by A goes to B, split by rows over its workers, all six columns;
        returns the sum of what they read of column ``values``."""

    def stop(self) -> None: ...


def rows_of(megabytes: float) -> int:
    return max(8, int(megabytes * 2**20 / ROW_BYTES) // 8 * 8)


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p10": ordered[len(ordered) // 10], "min": ordered[0]}


def timed(
    call: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None, warm: int = 2
) -> dict:
    taken = []
    for k in range(warm + repeats):
        before()
        start = time.perf_counter()
        call()
        if k >= warm:
            taken.append(time.perf_counter() - start)
    return quantiles(taken)


def measure(
    backend: Backend, calls: int, megabytes: list[float], repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds (median, p10, min) of each measurement, by its name."""
    found = {
        "empty call, hot": timed(backend.ping, calls, warm=20),
        f"empty call after {1000 * PAUSE_S:g} ms": timed(
            backend.ping, max(1, calls // 4), lambda: backend.pause(PAUSE_S)
        ),
    }
    for each in megabytes:
        rows = rows_of(each)
        assert backend.move(rows) == rows, "the batch was damaged on the way"
        move = partial(backend.move, rows)
        found[f"{each:g} MB from A to B"] = timed(move, repeats if each > 2 else 5 * repeats)
    return found


def print_result(found: dict) -> None:
    print("RESULT " + json.dumps({"load": os.getloadavg()[0], "seconds": found}), flush=True)


def read_result(output: str) -> dict:
    """What `print_result`, or another program in that manner, printed among other lines."""
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))
