"""Checkpoints of a run: folders that count only when complete.

``RUN/checkpoints/iteration_N`` is the state after iteration N. Many ranks write into a temporary folder; then
one process makes all of it durable, adds ``complete.json`` (the meta data, and size and blake2b digest of
each file) last, and renames the folder. A second checkpoint of the same iteration becomes ``iteration_N.1``
and counts instead of the first. ``complete.json`` also names the commit (`hpcflow.store.schema`: sequence)
whose weights these are: when the run has gone back before it, the checkpoint counts no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from hpcflow.store.durable import fsync_file, fsync_folder, read_lines, require_space, write_atomic

COMPLETE = "complete.json"
NAME = re.compile(r"iteration_(\d+)(?:\.(\d+))?")
REWINDS = "iterations/rewinds.jsonl"
BLOCK = 1 << 24  # bytes hashed at once
LEFTOVERS = {".tmp": "unfinished", ".trash": "half deleted"}
SUPERSEDED = "superseded: the run has gone back before its iteration"


class Checkpoint(NamedTuple):
    """A complete checkpoint; ``meta`` is what `CheckpointDir.finish` was given; ``files``: path -> (bytes,
    digest).
    """

    iteration: int
    folder: Path
    meta: dict[str, Any]
    files: dict[str, tuple[int, str]]

    def damage(self) -> dict[str, str]:
        """{path: what is wrong}, after reading every byte."""
        wrong = {}
        for name, (_, written) in self.files.items():
            found = file_digest(self.folder / name)
            if found != written:
                wrong[name] = f"its content has digest {found}, written was {written}"
        return wrong


class CheckpointDir:
    """The checkpoints of a run. Only one process (the recorder) writes; anyone may read.

    skipped   {folder name: why it does not count}, as of the last `complete` or `latest`
    """

    def __init__(self, run: Path | str) -> None:
        self.run = Path(run)
        self.folder = self.run / "checkpoints"
        self.skipped: dict[str, str] = {}

    def require_space(self, needed: int, copies: int = 1) -> None:
        """OSError ENOSPC, with both numbers, unless there is room for ``copies`` checkpoints of ``needed``
        bytes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        require_space(
            self.folder, needed * copies, "a checkpoint" if copies == 1 else f"room for {copies} checkpoints"
        )

    def begin(self, iteration: int) -> Path:
        """An empty temporary folder for all ranks to write into; what a killed attempt left is removed."""
        temp = self._temp(iteration)
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        fsync_folder(self.folder.parent)
        return temp

    def finish(
        self,
        iteration: int,
        meta: dict[str, Any],
        *,
        commit: int | None = None,
        digests: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Complete what `begin` began, once every rank has written. ``meta`` must fit JSON. ``commit``:
        sequence of the iteration's commit. ``digests``: of files that their writers have hashed; the others
        are read again."""
        temp = self._temp(iteration)
        assert temp.is_dir(), f"finish({iteration}) without begin"
        for path in temp.rglob("*"):
            if path.is_dir():
                fsync_folder(path)
            else:
                fsync_file(path)
        digests = digests or {}
        files = {
            name: (size, digests.get(name) or file_digest(temp / name)) for name, size in _sizes(temp).items()
        }
        content = {"iteration": iteration, "commit": commit, "meta": meta, "files": files}
        write_atomic(temp / COMPLETE, json.dumps(content, indent=1).encode())
        folder = self._free_name(iteration)
        os.rename(temp, folder)
        fsync_folder(self.folder)
        return Checkpoint(iteration, folder, meta, files)

    def complete(self) -> list[Checkpoint]:
        """All complete checkpoints that count, oldest first: every file is there with its recorded size."""
        self.skipped = {}
        found = []
        rewinds = [(entry["sequence"], entry["iteration"]) for entry in read_lines(self.run / REWINDS)]
        for folder in self.folder.iterdir() if self.folder.is_dir() else ():
            match = NAME.fullmatch(folder.name)
            try:
                if match is None:
                    raise ValueError(LEFTOVERS.get(folder.suffix, "not a checkpoint's name"))
                content = _verify(folder)
                iteration, commit = int(match[1]), content["commit"]
                if commit is not None and any(
                    commit < before and iteration >= start for before, start in rewinds
                ):
                    raise ValueError(SUPERSEDED)
                files = {name: tuple(entry) for name, entry in content["files"].items()}
                found.append((int(match[2] or 0), Checkpoint(iteration, folder, content["meta"], files)))
            except (OSError, ValueError) as error:
                self.skipped[folder.name] = str(error)
        found.sort(key=lambda entry: (entry[1].iteration, entry[0]))
        return [checkpoint for _, checkpoint in found]

    def latest(self) -> Checkpoint | None:
        """The last complete checkpoint; what was passed over is in ``skipped``."""
        return (self.complete() or [None])[-1]

    def retain(self, keep: int) -> list[Path]:
        """Delete all complete checkpoints but the newest ``keep`` (at least 1), superseded and unfinished
        older ones.

        Returns what was deleted. Damaged ones are left for the user to look at. While no checkpoint counts,
        nothing is deleted.
        """
        assert keep >= 1, "the last complete checkpoint is never deleted"
        complete = self.complete()
        doomed = [checkpoint.folder for checkpoint in complete[:-keep]]
        if complete:
            newest = complete[-1].iteration
            doomed += [self.folder / name for name, why in self.skipped.items() if why == SUPERSEDED]
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


def file_digest(path: Path) -> str:
    """blake2b of a file's content, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
    """The content of ``complete.json``; ValueError says what is missing or of another size."""
    try:
        content = json.loads((folder / COMPLETE).read_text())
    except FileNotFoundError:
        raise ValueError(f"incomplete: no {COMPLETE}") from None
    sizes = _sizes(folder)
    for name, (size, _) in content["files"].items():
        if sizes.get(name) != size:
            raise ValueError(f"damaged: {name} has {sizes.get(name, 'no')} bytes, written were {size}")
    return content
