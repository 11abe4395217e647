"""The files of RUN/iterations: their names, which of them count, and merging them in tiers.

A commit writes one file, ``000000012.h5`` (its sequence). Whenever `FAN` files of a tier exist, the oldest
are merged into one of the next tier, ``000000000-000000031.tier1.h5``: a new file is written and made
durable, and only then are the old ones removed. So a file that has its name never changes; a kill leaves at
worst both the merged file and some of its parts, which count once; n commits leave at most 31 files per tier,
and each byte is written once per tier (log32 n times).
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import h5py

from hpcflow.store.durable import fsync_folder, publish, read_lines, require_space, temp_name
from hpcflow.store.schema import NewerSchema, Unreadable, opened, read_index, start_file

FAN = 32
REWINDS = "rewinds.jsonl"
NAME = re.compile(r"(\d{9,})(?:-(\d{9,})\.tier(\d+))?\.h5")
log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class Segment:
    """A file of commits ``first`` to ``last`` (sequences, gaps possible)."""

    first: int
    last: int
    tier: int

    @property
    def name(self) -> str:
        if self.tier == 0:
            return f"{self.first:09d}.h5"
        return f"{self.first:09d}-{self.last:09d}.tier{self.tier}.h5"

    @staticmethod
    def parse(name: str) -> Segment | None:
        match = NAME.fullmatch(name)
        if match is None:
            return None
        first, last, tier = match.groups()
        return Segment(int(first), int(last or first), int(tier or 0))


def list_names(folder: Path) -> list[str]:
    """The names of all .h5 files, as of one moment.

    One pass over a folder can miss both a part (just removed) and the merged file (created behind the pass).
    Two equal passes cannot: the merged file was there before its part went.
    """
    names = None
    while True:
        again = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(".h5"))
        if names == again:
            return names
        names = again


def index_of(folder: Path, segment: Segment) -> list[tuple[int, int]]:
    """(sequence, iteration) of each commit in a file; errors as `schema.opened`, also if not as named."""
    index = read_index(folder / segment.name)
    sequences = [sequence for sequence, _ in index]
    if not sequences or (min(sequences), max(sequences)) != (segment.first, segment.last):
        raise Unreadable(f"damaged: it lists commits {sequences[:4]}, which its name does not")
    return index


def find_owners(indexes: dict[Segment, list[tuple[int, int]]]) -> dict[int, tuple[int, Segment]]:
    """sequence -> (iteration, the file to read it from); of several files with it, the most merged one."""
    owners = {}
    for segment in sorted(indexes, key=lambda segment: segment.tier):
        for sequence, iteration in indexes[segment]:
            owners[sequence] = (iteration, segment)
    return owners


def read_rewinds(folder: Path) -> list[tuple[int, int]]:
    """(sequence, iteration) of each rewind: earlier sequences of iterations from there on are void."""
    return [(entry["sequence"], entry["iteration"]) for entry in read_lines(folder / REWINDS)]


def live_commits(owners: dict[int, tuple[int, Segment]], rewinds: list[tuple[int, int]]) -> dict[int, int]:
    """iteration -> sequence of the commit that counts: not rewound, and the last one of its iteration."""
    return {
        iteration: sequence
        for sequence, (iteration, _) in sorted(owners.items())
        if not any(sequence < before and iteration >= start for before, start in rewinds)
    }


class Segments:
    """The writer's view of the folder. One process at a time may hold it (`RunWriter` sees to that)."""

    def __init__(self, folder: Path) -> None:
        """Reads every file's index, and removes what a killed predecessor left half done.

        `NewerSchema` when one is a later hpcflow's: which iterations exist is then unknown. Other unreadable
        files are left alone and listed in ``damaged``.
        """
        self.folder = folder
        self.files: set[Segment] = set()
        self.damaged: dict[Segment, str] = {}
        for leftover in folder.glob("*.tmp"):
            leftover.unlink()
        indexes = {}
        for segment in filter(None, map(Segment.parse, list_names(folder))):
            self.files.add(segment)
            try:
                indexes[segment] = index_of(folder, segment)
            except NewerSchema as error:
                raise NewerSchema(f"{folder / segment.name}: {error}") from error
            except Unreadable as error:
                self.damaged[segment] = str(error)
        self.owners = find_owners(indexes)
        needed = {segment for _, segment in self.owners.values()}
        self._remove([segment for segment in indexes if segment not in needed])

    @property
    def next_sequence(self) -> int:
        """One beyond every sequence ever used, readable or not."""
        return max((segment.last for segment in self.files), default=-1) + 1

    def add(self, segment: Segment, iteration: int) -> None:
        """Take note of a file just committed."""
        self.files.add(segment)
        self.owners[segment.first] = (iteration, segment)

    def compact(self) -> None:
        """Merge where a tier has `FAN` files. What cannot be merged now (no space) waits; nothing is lost."""
        for tier in itertools.count():
            if all(segment.tier < tier for segment in self.files):
                return
            ready = sorted(s for s in self.files if s.tier == tier and s not in self.damaged)
            if len(ready) >= FAN:
                self._merge(ready[:FAN])

    def _merge(self, parts: list[Segment]) -> None:
        merged = Segment(parts[0].first, max(part.last for part in parts), parts[0].tier + 1)
        path, temp = self.folder / merged.name, temp_name(self.folder / merged.name)
        try:
            # HDF5 may crash the process on a full disk, so it is never let near one.
            size = sum((self.folder / part.name).stat().st_size for part in parts)
            require_space(self.folder, size + size // 4, "merging iteration files")
            index = self._copy(parts, temp)
            publish(temp, path)
        except (OSError, Unreadable) as error:
            temp.unlink(missing_ok=True)
            bad = {} if getattr(error, "errno", None) == errno.ENOSPC else self._find_damage(parts)
            self.damaged |= bad
            log.warning("iteration files not merged for now: %s", "; ".join(bad.values()) or error)
            return
        self.files.add(merged)
        self.owners |= {sequence: (iteration, merged) for sequence, iteration in index}
        self._remove(parts)

    def _copy(self, parts: list[Segment], temp: Path) -> list[tuple[int, int]]:
        indexes = [index_of(self.folder, part) for part in parts]
        index = sorted(itertools.chain.from_iterable(indexes))
        with h5py.File(temp, "w", locking=False, libver=("v110", "v110")) as target:
            start_file(target, index)
            for part in parts:
                with opened(self.folder / part.name) as source:
                    for name in source:
                        if name != "index":
                            source.copy(name, target)
        assert read_index(temp) == index, "a merged file does not hold what its parts hold"
        return index

    def _find_damage(self, parts: list[Segment]) -> dict[Segment, str]:
        """Those of ``parts`` that cannot be read through, and why."""
        bad = {}
        for part in parts:
            try:
                with opened(self.folder / part.name) as file:
                    file.visititems(_read_through)
            except (Unreadable, FileNotFoundError) as error:
                bad[part] = f"{part.name}: {error}"
        return bad

    def _remove(self, segments: list[Segment]) -> None:
        for segment in segments:
            (self.folder / segment.name).unlink()
            self.files.discard(segment)
        if segments:
            fsync_folder(self.folder)


def _read_through(_: str, item: h5py.Dataset | h5py.Group) -> None:
    if isinstance(item, h5py.Dataset):
        item[()]
