"""Checkpoints at the controller: begun at an iteration's end, written while the next one is computed, then
completed.
"""

from __future__ import annotations

import math
from typing import Any

from hpcflow.dataflow.group import WorkerGroup


class Checkpoints:
    """The checkpoints of one launch; at most one is being written at a time. ``trained``: the models they
    hold.
    """

    def __init__(self, recorder: WorkerGroup, trained: dict[str, WorkerGroup], keep: int) -> None:
        self.recorder, self.trained, self.keep = recorder, trained, keep
        self._needed = 0
        self._written: tuple[int, dict[str, Any]] | None = None

    def require_space(self) -> str:
        """Before the first iteration: OSError unless there is room for the checkpoints that will be kept at a
        time, one more while it is written. Returns what was found, in words."""
        sizes = [sum(sizes.values()) for group in self.trained.values() for sizes in group.memory().get()]
        self._needed = math.ceil(1.05 * sum(sizes)) + (1 << 20)
        free = self.recorder.require_space(needed=self._needed, copies=self.keep + 1).get()[0]
        return (
            f"a checkpoint takes about {self._needed / 2**20:.0f} MiB, {self.keep} are kept; "
            f"{free / 2**30:.1f} GiB are free"
        )

    def begin(self, iteration: int, data_position: int) -> None:
        """The state after ``iteration``, which is committed: copied on return, written from now on."""
        self.finish()
        folder = self.recorder.begin_checkpoint(iteration=iteration, needed=self._needed).get()[0]
        saved = {name: group.save(folder=f"{folder}/{name}") for name, group in self.trained.items()}
        found = {name: handle.get()[0] for name, handle in saved.items()}
        meta = {
            "versions": {name: version for name, (version, _) in found.items()},
            "digests": {name: digest for name, (_, digest) in found.items()},
            "data_position": data_position,
        }
        self._written = iteration, meta

    def finish(self) -> None:
        """Complete what was begun, once every rank has written its part. OSError of a rank that could not."""
        if self._written is None:
            return
        (iteration, meta), self._written = self._written, None
        handles = [group.saved() for group in self.trained.values()]
        digests = {
            name: digest for handle in handles for said in handle.get() for name, digest in said.items()
        }
        self.recorder.finish_checkpoint(
            iteration=iteration, meta=meta, digests=digests, keep=self.keep
        ).wait()
