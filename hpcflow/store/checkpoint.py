"""Checkpoints of a run: folders that count only when complete.

``RUN/checkpoints/iteration_N`` is the state after iteration N. Many ranks write into a temporary folder; then
one process makes all of it durable, adds ``complete.json`` (the meta data and the size of each file) last,
and renames the folder. A second checkpoint of the same iteration becomes ``iteration_N.1`` and counts instead
of the first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from hpcflow.store.durable import fsync_file, fsync_folder, require_space, write_atomic

COMPLETE = "complete.json"
NAME = re.compile(r"iteration_(\d+)(?:\.(\d+))?")
LEFTOVERS = {".tmp": "unfinished", ".trash": "half deleted"}


class Checkpoint(NamedTuple):
    """A complete checkpoint; ``meta`` is what `CheckpointDir.finish` was given."""

    iteration: int
    folder: Path
    meta: dict[str, Any]


class CheckpointDir:
    """The checkpoints of a run. Only one process (the recorder) writes; anyone may read.

    skipped   {folder name: why it does not count}, as of the last `complete` or `latest`
    """

    def __init__(self, run: Path | str) -> None:
        self.folder = Path(run) / "checkpoints"
        self.skipped: dict[str, str] = {}

    def require_space(self, needed: int) -> None:
        """OSError ENOSPC, with both numbers, unless ``needed`` bytes are free where checkpoints go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        require_space(self.folder, needed, "a checkpoint")

    def begin(self, iteration: int) -> Path:
        """An empty temporary folder for all ranks to write into; what a killed attempt left is removed."""
        temp = self._temp(iteration)
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        fsync_folder(self.folder.parent)
        return temp

    def finish(self, iteration: int, meta: dict[str, Any]) -> Checkpoint:
        """Complete what `begin` began, once every rank has written. ``meta`` must fit JSON."""
        temp = self._temp(iteration)
        assert temp.is_dir(), f"finish({iteration}) without begin"
        for path in temp.rglob("*"):
            if path.is_dir():
                fsync_folder(path)
            else:
                fsync_file(path)
        content = {"iteration": iteration, "meta": meta, "files": _sizes(temp)}
        write_atomic(temp / COMPLETE, json.dumps(content, indent=1).encode())
        folder = self._free_name(iteration)
        os.rename(temp, folder)
        fsync_folder(self.folder)
        return Checkpoint(iteration, folder, meta)

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first. Every file must be there with its recorded size."""
        self.skipped = {}
        found = []
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            match = NAME.fullmatch(folder.name)
            try:
                if match is None:
                    raise ValueError(LEFTOVERS.get(folder.suffix, "not a checkpoint's name"))
                found.append((int(match[1]), int(match[2] or 0), folder, _verify(folder)))
            except (OSError, ValueError) as error:
                self.skipped[folder.name] = str(error)
        found.sort(key=lambda entry: entry[:2])
        return [Checkpoint(iteration, folder, meta) for iteration, _, folder, meta in found]

    def latest(self) -> Checkpoint | None:
        """The last complete checkpoint; what was passed over is in ``skipped``."""
        return (self.complete() or [None])[-1]

    def retain(self, keep: int) -> list[Path]:
        """Delete all complete checkpoints but the newest ``keep`` (at least 1), and unfinished older ones.

        Returns what was deleted. Damaged ones are left for the user to look at.
        """
        assert keep >= 1, "the last complete checkpoint is never deleted"
        complete = self.complete()
        doomed = [checkpoint.folder for checkpoint in complete[:-keep]]
        if complete:
            newest = complete[-1].iteration
            doomed += [path for path in self.folder.glob("*.tmp") if _iteration(path.stem) < newest]
        for folder in doomed:
            # Renamed first, so that a kill in the middle leaves nothing that looks complete.
            os.rename(folder, folder.with_name(f"{folder.name}.trash"))
            fsync_folder(self.folder)
        for trash in self.folder.glob("*.trash"):
            shutil.rmtree(trash)
        return doomed

    def _temp(self, iteration: int) -> Path:
        return self.folder / f"iteration_{iteration}.tmp"

    def _free_name(self, iteration: int) -> Path:
        folder, attempt = self.folder / f"iteration_{iteration}", 0
        while folder.exists():
            attempt += 1
            folder = self.folder / f"iteration_{iteration}.{attempt}"
        return folder


def latest(run: Path | str) -> Checkpoint | None:
    """The last complete checkpoint of ``run``."""
    return CheckpointDir(run).latest()


def _iteration(name: str) -> int:
    """The iteration in a folder's name; names of others count as newest, so that they are left alone."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match else 1 << 62


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


def _verify(folder: Path) -> dict[str, Any]:
    """The meta data of a complete checkpoint; ValueError says what is missing or of another size."""
    try:
        content = json.loads((folder / COMPLETE).read_text())
    except FileNotFoundError:
        raise ValueError(f"incomplete: no {COMPLETE}") from None
    sizes = _sizes(folder)
    for name, size in content["files"].items():
        if sizes.get(name) != size:
            raise ValueError(f"damaged: {name} has {sizes.get(name, 'no')} bytes, written were {size}")
    return content["meta"]
