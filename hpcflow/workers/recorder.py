"""The recorder: an ordinary reader of columns that makes them durable. The only rank that writes the run directory."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hpcflow.mpi.messages import Stamp
from hpcflow.store.checkpoint import CheckpointDir
from hpcflow.store.durable import append_line
from hpcflow.store.evaluation import pass_at, summary
from hpcflow.store.writer import RunWriter
from hpcflow.workers.primitive import Context, Output, Rows, primitive


class Recorder:
    """Writes one run directory."""

    version = 0

    def __init__(self, context: Context, *, run: str) -> None:
        self.run = Path(run)
        self.writer = RunWriter(self.run)
        self.checkpoints = CheckpointDir(self.run)

    @primitive("ONE_TO_ALL")
    def record(
        self,
        rows: Rows,
        iteration: int,
        names: dict[str, str],
        stamps: dict[str, Stamp],
        places: dict[str, str],
        restart: bool,
    ) -> None:
        """Make columns of an iteration durable, with stamps and places, those in ``names`` under another name.
        ``restart``: of other samples than before."""
        plain = {name: tuple(stamp) for name, stamp in stamps.items()}
        columns = {names.get(name, name): column for name, column in rows.columns.items()}
        self.writer.record(iteration, rows.ids, columns, plain, places=places, draft=True, restart=restart)

    @primitive("ONE_TO_ALL")
    def recorded(self, rows: Rows, iteration: int) -> tuple[int, dict[str, str]]:
        """What is recorded of an iteration, committed or by an earlier launch that did not commit it: number of rows,
        column -> place. (0, {}) when nothing is."""
        if iteration not in self.writer.iterations and not self.writer.recover(iteration):
            return 0, {}
        found = self.writer.recorded(iteration)
        return len(found.ids), found.places

    @primitive("ONE_TO_ALL")
    def replay(self, rows: Rows, iteration: int, prefix: str, parts: dict[int, tuple[int, int]]) -> Output:
        """The recorded columns of an iteration whose names begin with ``prefix`` ("": have none), without it. What it
        writes, the caller says."""
        found = self.writer.recorded(iteration)
        start = len(prefix)
        named = {name[start:]: column for name, column in found.columns.items() if name.startswith(prefix)}
        return Output({name: column for name, column in named.items() if "." not in name}, ids=found.ids)

    @primitive("ONE_TO_ALL")
    def commit(self, rows: Rows, iteration: int, facts: dict[str, Any]) -> dict[str, float]:
        """Make an iteration durable. Returns its metrics."""
        return self.writer.commit(iteration, facts)

    @primitive("ONE_TO_ALL")
    def go_on(self, rows: Rows, iteration: int) -> tuple[int, list[int]]:
        """(first, gone): the first iteration from ``iteration`` on that is not committed; later ones, which count no more."""
        committed = set(self.writer.iterations)
        while iteration in committed:
            iteration += 1
        later = [i for i in committed if i > iteration]
        return iteration, self.writer.rewind(iteration) if later else []

    @primitive("ONE_TO_ALL")
    def evaluation(self, rows: Rows, when: str, iteration: int, passing: float | None) -> dict[str, Any]:
        """Append the mean reward of held-out prompts to RUN/evals.jsonl, and with ``passing`` pass@k."""
        scores = (rows.ids, rows["reward"], rows["reward_ok"])
        place = {"when": when, "iteration": iteration, "sequence": self.writer.next_sequence}
        entry = {**place, **summary(*scores), "time": time.time()}
        if passing is not None:
            entry |= {"passing": passing, **pass_at(*scores, passing)}
        append_line(self.run / "evals.jsonl", entry)
        return entry

    @primitive("ONE_TO_ALL")
    def require_space(self, rows: Rows, needed: int, copies: int) -> int:
        """OSError when ``needed`` bytes for each of ``copies`` checkpoints, less those there, are not free. Returns the
        number of free bytes."""
        missing = max(1, copies - len(self.checkpoints.complete()))
        self.checkpoints.require_space(needed, missing)
        stat = os.statvfs(self.run)
        return stat.f_bavail * stat.f_frsize

    @primitive("ONE_TO_ALL")
    def begin_checkpoint(self, rows: Rows, iteration: int, needed: int) -> str:
        """An empty folder for all ranks to write into. OSError when ``needed`` bytes are not free."""
        self.checkpoints.require_space(needed)
        return str(self.checkpoints.begin(iteration))

    @primitive("ONE_TO_ALL")
    def finish_checkpoint(
        self, rows: Rows, iteration: int, meta: dict[str, Any], digests: dict[str, str], keep: int
    ) -> str:
        """Complete what was begun; older ones beyond ``keep`` go. ``digests``: of files, as their writers know them."""
        commit = self.writer.sequence_of(iteration)
        done = self.checkpoints.finish(iteration, meta, commit=commit, digests=digests)
        self.checkpoints.retain(keep)
        return str(done.folder)

    def close(self) -> None:
        self.writer.close()
