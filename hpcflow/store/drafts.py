"""What is recorded of iterations that are not committed yet, kept against a crash.

``RUN/drafts/<iteration, 9 digits>-<n>.h5`` is the n-th recording of an iteration: ids, some columns, their
stamps, in the layout of an iteration file (`hpcflow.store.schema`). Columns of a later recording take the
place of earlier ones. A commit writes the iteration's own file and removes its drafts. So there is never more
than one iteration's worth of them, and after a crash nothing that was generated, scored and recorded has to
be computed again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcflow.data.columns import Columns
from hpcflow.store import schema
from hpcflow.store.durable import fsync_folder, require_space, write_atomic

NAME = re.compile(r"(\d{9,})-(\d+)\.h5")
Stamp = tuple[int, str, int]


@dataclass
class Recording:
    """ids int64 [rows]; columns with these rows; column -> (iteration, model, weight version); column -> the
    call of the iteration that made it ("actor.generate_sequences#1")."""

    ids: torch.Tensor
    columns: Columns
    stamps: dict[str, Stamp]
    places: dict[str, str]

    def take(self, columns: Columns, stamps: dict[str, Stamp], places: dict[str, str]) -> None:
        """Add columns of the same rows, or put them in the place of earlier ones."""
        self.columns |= columns
        self.stamps |= stamps
        self.places |= places


class Drafts:
    """The drafts of a run. Only the recorder writes.

    skipped   {file name: why it does not count}, as of the last `load`
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / "drafts"
        self.skipped: dict[str, str] = {}

    def write(self, iteration: int, recording: Recording) -> None:
        """Make one recording durable. OSError (ENOSPC, ...) leaves no file."""
        self.folder.mkdir(exist_ok=True)
        number = max((n for i, n, _ in self._files() if i == iteration), default=-1) + 1
        facts = {"iteration": iteration, "stamps": recording.stamps, "places": recording.places}
        image = schema.encode(number, facts, recording.ids.cpu(), recording.columns)
        require_space(self.folder, len(image), f"a draft of iteration {iteration}")
        write_atomic(self.folder / f"{iteration:09d}-{number}.h5", image)

    def load(self, iteration: int) -> list[Recording]:
        """The recordings of an iteration, in order. From the first unreadable one on, none counts."""
        self.skipped, found = {}, []
        for _, number, path in [entry for entry in self._files() if entry[0] == iteration]:
            try:
                if number != len(found):
                    raise schema.Unreadable(
                        f"recording {len(found)} of iteration {iteration} is missing or damaged"
                    )
                with schema.opened(path) as file:
                    group = file[schema.group_name(number)]
                    schema.verify(group)
                    facts = schema.get_facts(group)
                    stamps = {name: tuple(stamp) for name, stamp in facts["stamps"].items()}
                    columns = {name: schema.get_column(group, name) for name in stamps}
                    found.append(Recording(schema.get_ids(group), columns, stamps, facts["places"]))
            except schema.Unreadable as error:
                self.skipped[path.name] = str(error)
        return found

    def trim(self, iteration: int, count: int) -> None:
        """Keep only the first ``count`` recordings of an iteration."""
        for i, number, path in self._files():
            if i == iteration and number >= count:
                path.unlink()

    def clear(self, first: int = 0, last: int | None = None) -> None:
        """Remove the drafts of iterations ``first`` to ``last`` (None: all later ones), newest first: what a
        kill leaves is a prefix."""
        doomed = [path for i, _, path in self._files() if i >= first and (last is None or i <= last)]
        for path in reversed(doomed):
            path.unlink()
        if doomed:
            fsync_folder(self.folder)

    def _files(self) -> list[tuple[int, int, Path]]:
        """(iteration, number, path), sorted."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        found = [(NAME.fullmatch(path.name), path) for path in paths]
        return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)
