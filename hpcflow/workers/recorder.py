"""The recorder: an ordinary reader of columns that makes them durable. The only rank that writes the run directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from hpcflow.mpi.messages import Stamp
from hpcflow.store.checkpoint import CheckpointDir
from hpcflow.store.writer import RunWriter
from hpcflow.workers.primitive import Context, Rows, primitive


class Recorder:
    """Writes one run directory."""

    version = 0

    def __init__(self, context: Context, *, run: str) -> None:
        self.run = Path(run)
        self.writer = RunWriter(self.run)
        self.checkpoints = CheckpointDir(self.run)

    @primitive("ONE_TO_ALL")
    def record(self, rows: Rows, iteration: int, stamps: dict[str, Stamp]) -> None:
        """Buffer columns of an iteration with their stamps."""
        self.writer.record(iteration, rows.ids, rows.columns, {name: tuple(stamp) for name, stamp in stamps.items()})

    @primitive("ONE_TO_ALL")
    def commit(self, rows: Rows, iteration: int, facts: dict[str, Any]) -> dict[str, float]:
        """Make an iteration durable. Returns its metrics."""
        return self.writer.commit(iteration, facts)

    @primitive("ONE_TO_ALL")
    def rewind(self, rows: Rows, iteration: int) -> list[int]:
        """Committed iterations from this one on no longer count."""
        return self.writer.rewind(iteration)

    @primitive("ONE_TO_ALL")
    def evaluation(self, rows: Rows, when: str, iteration: int) -> dict[str, Any]:
        """Append the mean reward of held-out prompts to RUN/evals.jsonl."""
        good = rows["reward"][rows["reward_ok"]].double()
        spread = float(good.std() / len(good) ** 0.5) if len(good) > 1 else 0.0
        entry = {
            "when": when,
            "iteration": iteration,
            "reward_mean": float(good.mean()) if len(good) else None,
            "reward_se": spread,
            "samples": len(good),
            "failed": int((~rows["reward_ok"]).sum()),
            "time": time.time(),
        }
        with (self.run / "evals.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return entry

    @primitive("ONE_TO_ALL")
    def begin_checkpoint(self, rows: Rows, iteration: int, needed: int) -> str:
        """An empty folder for all ranks to write into. OSError when ``needed`` bytes are not free."""
        self.checkpoints.require_space(needed)
        return str(self.checkpoints.begin(iteration))

    @primitive("ONE_TO_ALL")
    def finish_checkpoint(self, rows: Rows, iteration: int, meta: dict[str, Any], keep: int) -> str:
        """Complete what was begun; older ones beyond ``keep`` go."""
        done = self.checkpoints.finish(iteration, meta)
        self.checkpoints.retain(keep)
        return str(done.folder)

    def close(self) -> None:
        self.writer.close()
