"""Writing a run's iterations. Only the recorder rank does, from one thread (HDF5 is not to be shared)."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import torch

from hpcflow.data.columns import Columns, select_rows
from hpcflow.data.ids import digest
from hpcflow.store import schema
from hpcflow.store.drafts import Drafts, Recording
from hpcflow.store.durable import append_line, fsync_folder, require_space, write_atomic
from hpcflow.store.reader import open_run
from hpcflow.store.segments import REWINDS, Segment, Segments, live_commits, read_rewinds
from hpcflow.store.summary import count_tokens, summarise

Stamp = tuple[int, str, int]


class RunWriter:
    """Records iterations under ``run / "iterations"``: buffered in memory, durable with `commit`.

    ValueError when another process records into the run, or a later hpcflow did.
    """

    def __init__(self, run: Path | str) -> None:
        self.run = Path(run)
        if not self.run.is_dir():
            raise ValueError(f"there is no run directory {self.run}")
        self.folder = self.run / "iterations"
        self.folder.mkdir(exist_ok=True)
        fsync_folder(self.run)
        self._lock = _lock(self.folder / "writer.lock")
        try:
            self._segments = Segments(self.folder)
        except BaseException:
            self.close()
            raise
        self._live = live_commits(self._segments.owners, read_rewinds(self.folder))
        self._pending: dict[int, Recording] = {}
        self.drafts = Drafts(self.run)
        self.drafts.clear(0, max(self._live, default=-1))  # of what was committed, then killed before this

    @property
    def iterations(self) -> list[int]:
        """The committed iterations that count, sorted."""
        return sorted(self._live)

    @property
    def next_sequence(self) -> int:
        """Sequence of the next commit."""
        return self._segments.next_sequence

    def sequence_of(self, iteration: int) -> int:
        """Sequence of a committed iteration's commit."""
        return self._live[iteration]

    def record(
        self,
        iteration: int,
        ids: torch.Tensor,
        columns: Columns,
        stamps: dict[str, Stamp],
        *,
        places: dict[str, str] | None = None,
        draft: bool = False,
        restart: bool = False,
    ) -> None:
        """Buffer columns of an iteration; several calls add up. Tensors must stay as they are until `commit`.

        ids      int64 [rows]: the samples of the rows; the same samples in each call, in any order
        columns  each with these rows; a later one of the same name takes the place of an earlier one
        stamps   for each column what computed it: (iteration, model, weight version)
        places   for each column which call of the iteration made it
        draft    also make them durable at once, see `recover`
        restart  these are other samples than those recorded of the iteration so far, which no longer count

        ValueError, with what is known and what came, when samples differ or a column of the same call comes twice.
        """
        assert set(stamps) == set(columns), f"stamps {sorted(stamps)} for columns {sorted(columns)}"
        assert all(len(column) == len(ids) for column in columns.values()), "columns and ids differ in length"
        assert all(name and "/" not in name and name != "." for name in columns), f"names {sorted(columns)}"
        places = places or {}
        if restart:
            self._pending.pop(iteration, None)
            self.drafts.clear(iteration, iteration)
        pending = self._pending.get(iteration)
        if pending is None:
            if len(ids.unique()) != len(ids):
                distinct = len(ids.unique())
                raise ValueError(f"iteration {iteration}: {len(ids)} rows, but {distinct} sample ids")
            pending = self._pending[iteration] = Recording(ids.cpu().contiguous(), {}, {}, {})
        known = set(columns) & set(pending.columns)
        twice = sorted(name for name in known if places.get(name) == pending.places.get(name))
        if twice:
            seen, came = pending.stamps[twice[0]], stamps[twice[0]]
            raise ValueError(f"iteration {iteration}: column {twice[0]!r} recorded twice, {seen} and {came}")
        columns = _aligned(iteration, pending.ids, ids.cpu(), columns)
        if draft:
            self.drafts.write(iteration, Recording(pending.ids, columns, stamps, places))
        pending.take(columns, stamps, places)

    def recover(self, iteration: int) -> dict[str, Stamp]:
        """Take up what an earlier process recorded as drafts of an iteration that is not committed.

        Returns the stamps of its columns, which count as recorded now; `recorded` gives them.
        """
        assert iteration not in self._live
        if iteration in self._pending:
            return dict(self._pending[iteration].stamps)
        recordings = self.drafts.load(iteration)
        self.drafts.trim(iteration, len(recordings))  # what could not be read is computed again
        for found in recordings:
            pending = self._pending.setdefault(iteration, Recording(found.ids, {}, {}, {}))
            pending.take(found.columns, found.stamps, found.places)
        return dict(self._pending[iteration].stamps) if iteration in self._pending else {}

    def recorded(self, iteration: int) -> Recording:
        """All that is recorded of an iteration, committed or not. ValueError when nothing is."""
        if iteration in self._pending:
            return self._pending[iteration]
        if iteration not in self._live:
            raise ValueError(f"nothing is recorded of iteration {iteration} in {self.run}")
        found = open_run(self.run).iteration(iteration)
        return Recording(found.ids, dict(found.columns), found.stamps, found.facts["places"])

    def commit(self, iteration: int, facts: dict[str, Any]) -> dict[str, float]:
        """Make what was recorded of ``iteration`` and ``facts`` (see `schema`) durable; returns its metrics.

        OSError (ENOSPC: says what is needed and free): nothing is committed, nothing recorded is lost, and
        commit may be called again. ValueError when the iteration is committed already: `rewind` first.
        """
        if iteration in self._live:
            raise ValueError(
                f"iteration {iteration} is already committed in {self.run}; rewind({iteration}) first"
            )
        pending = self._pending.get(iteration)
        if pending is None:
            pending = Recording(torch.empty(0, dtype=torch.int64), {}, {}, {})
        sequence = self._segments.next_sequence
        facts = {"tokens": count_tokens(pending.columns)} | facts
        metrics = facts.get("metrics", {}) | summarise(pending.columns, facts)
        own = {"iteration": iteration, "sequence": sequence, "time": time.time()}
        own |= {"metrics": metrics, "stamps": pending.stamps, "places": pending.places}
        own |= {"samples": len(pending.ids)}
        image = schema.encode(sequence, facts | own, pending.ids, pending.columns)
        require_space(self.folder, len(image), f"iteration {iteration}")
        segment = Segment(sequence, sequence, 0)
        path = self.folder / segment.name
        assert not path.exists(), f"{path} exists"
        write_atomic(path, image)
        self._segments.add(segment, iteration)
        self._live[iteration] = sequence
        self._pending.pop(iteration, None)
        self.drafts.clear(iteration, iteration)
        self._segments.compact()
        return metrics

    def rewind(self, iteration: int) -> list[int]:
        """Go back: committed iterations from ``iteration`` on count no more. Returns them; drops all buffers.

        Their files stay, so nothing that was paid for is lost, but readers leave them out from now on.
        """
        self._pending.clear()
        self.drafts.clear(iteration)
        gone = sorted(i for i in self._live if i >= iteration)
        if gone:
            entry = {"sequence": self._segments.next_sequence, "iteration": iteration, "time": time.time()}
            append_line(self.folder / REWINDS, entry)
            self._live = {i: sequence for i, sequence in self._live.items() if i < iteration}
        return gone

    def close(self) -> None:
        """Let another process record. What was not committed is dropped."""
        os.close(self._lock)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _aligned(iteration: int, known: torch.Tensor, ids: torch.Tensor, columns: Columns) -> Columns:
    """Columns with rows ``ids``, in the order ``known``."""
    if torch.equal(known, ids):
        return columns
    order, wanted = ids.argsort(), known.argsort()
    if len(known) != len(ids) or not torch.equal(ids[order], known[wanted]):
        raise ValueError(
            f"iteration {iteration}: columns {sorted(columns)} are of other samples than those recorded "
            f"before: {len(ids)} rows (digest {digest(ids)}) against {len(known)} (digest {digest(known)})"
        )
    index = torch.empty_like(order)
    index[wanted] = order
    return select_rows(columns, index)


def _lock(path: Path) -> int:
    """Hold the run for writing as long as this process lives; on file systems without locks, do without."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(f"another process is recording into {path.parent.parent}; end it first") from error
    except OSError:
        pass
    return descriptor
