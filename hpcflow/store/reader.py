"""Reading a run directory: finished, crashed, or while it is being written. Never writes, takes no locks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import h5py
import torch
import yaml

from hpcflow.data.columns import Column, Ragged, texts
from hpcflow.data.ids import unpack
from hpcflow.store import schema
from hpcflow.store.durable import read_lines
from hpcflow.store.schema import Unreadable
from hpcflow.store.segments import Segment, find_owners, index_of, list_names, live_commits, read_rewinds

T = TypeVar("T")
Stamp = tuple[int, str, int]
GENERATED = "response_ids"


@dataclass(frozen=True)
class Lineage:
    """Where a sample came from and went.

    generated_by  (model, weight version) that sampled the response; None when the run has no such column
    made_by       column -> (iteration, model, weight version)
    versions      model -> weight version after the iteration that trained on the sample
    """

    sample_id: int
    iteration: int
    generated_by: tuple[str, int] | None
    made_by: dict[str, Stamp]
    versions: dict[str, int]


class Iteration:
    """A committed iteration. ``facts`` as in `hpcflow.store.schema`; columns are read when asked for."""

    def __init__(self, run: Run, facts: dict[str, Any]) -> None:
        self.number: int = facts["iteration"]
        self.facts = facts
        self.metrics: dict[str, float] = facts["metrics"]
        self.versions: dict[str, int] = facts.get("versions", {})
        self.nodes: list[dict[str, Any]] = facts.get("nodes", [])
        self.stamps: dict[str, Stamp] = {name: tuple(stamp) for name, stamp in facts["stamps"].items()}
        self.columns: Mapping[str, Column] = _LazyColumns(run, facts["sequence"], self.stamps)
        self._run = run

    @cached_property
    def ids(self) -> torch.Tensor:
        """Sample ids, int64 [rows], in the order of the rows of all columns."""
        return self._run._read(self.facts["sequence"], schema.get_ids)


class _LazyColumns(Mapping[str, Column]):
    """The columns of one commit, each read from its file at every access."""

    def __init__(self, run: Run, sequence: int, names: Iterable[str]) -> None:
        self._run, self._sequence, self._names = run, sequence, sorted(names)

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(f"{name!r}; recorded are {', '.join(self._names)}")
        return self._run._read(self._sequence, lambda group: schema.get_column(group, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Run:
    """A run directory. ValueError when there is none at ``path``.

    config    the resolved configuration, {} when missing
    objects   {"algorithm" | "protocol" | "placement": {"sha256", "content"}}, {} when missing
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not any((self.path / name).exists() for name in ("config.yaml", "iterations")):
            raise ValueError(f"{self.path} is no run directory: it has neither config.yaml nor iterations/")
        self.folder = self.path / "iterations"
        self._bad_files: dict[str, str] = {}
        self._bad_content: dict[str, str] = {}
        self.config: dict[str, Any] = self._document("config.yaml", yaml.safe_load)
        self.objects: dict[str, dict[str, Any]] = self._document("objects.json", json.loads)
        self._indexes: dict[Segment, list[tuple[int, int]]] = {}
        self._owners: dict[int, tuple[int, Segment]] = {}

    @property
    def iterations(self) -> list[int]:
        """The committed iterations, sorted, as of now."""
        return sorted(self._commits())

    @property
    def skipped(self) -> dict[str, str]:
        """{path inside the run: why it could not be read}, as of now; damage inside a file once met."""
        self._commits()
        return self._bad_files | self._bad_content

    @property
    def superseded(self) -> list[tuple[int, int]]:
        """(iteration, sequence) of commits that no longer count because the run went back before them."""
        live = set(self._commits().values())
        return [(iteration, seq) for seq, (iteration, _) in sorted(self._owners.items()) if seq not in live]

    @property
    def launches(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "launches.jsonl")

    @property
    def exits(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "exits.jsonl")

    @property
    def failures(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "failures.jsonl")

    @property
    def evals(self) -> list[dict[str, Any]]:
        return read_lines(self.path / "evals.jsonl")

    def iteration(self, number: int) -> Iteration:
        """ValueError when it is not committed, naming those that are; `Unreadable` when damaged."""
        commits = self._commits()
        if number not in commits:
            known = f"{min(commits)} to {max(commits)}" if commits else "none"
            raise ValueError(f"iteration {number} is not in {self.path}; committed: {known}")
        return Iteration(self, self._read(commits[number], schema.get_facts))

    def history(self) -> list[dict[str, Any]]:
        """The facts of all committed iterations, in order. Damaged ones are left out (see ``skipped``)."""
        return list(self._scan(schema.get_facts))

    def samples(self, iteration: int | None = None, tokenizer: Any = None) -> list[dict[str, Any]]:
        """The samples of one iteration or of all, as plain Python values.

        Each has iteration, id, epoch, prompt_index, draw, generated_by (model, weight version) if known, and
        its value of each column: numbers, lists, and text for ragged uint8. With a tokenizer (anything with
        ``decode(list of ids)``), also prompt and response as text.
        """
        numbers = None if iteration is None else [self.iteration(iteration).number]
        tables = self._scan(lambda group: _samples(group, tokenizer), numbers)
        return [sample for table in tables for sample in table]

    def lineage(self, sample_id: int) -> Lineage:
        """Which weights made a sample, and which came of it. ValueError when no iteration has it."""
        for facts, ids in self._scan(lambda group: (schema.get_facts(group), schema.get_ids(group))):
            if bool((ids == sample_id).any()):
                found = Iteration(self, facts)
                return Lineage(
                    sample_id, found.number, _generated_by(found.stamps), found.stamps, found.versions
                )
        raise ValueError(f"sample {sample_id} is in no committed iteration of {self.path}")

    def samples_of(self, model: str, version: int) -> torch.Tensor:
        """Ids (int64 [n], in order of iterations) of the samples of which these weights made some column."""

        def pick(group: h5py.Group) -> torch.Tensor:
            makers = {tuple(stamp[1:]) for stamp in schema.get_facts(group)["stamps"].values()}
            ids = schema.get_ids(group)
            return ids if (model, version) in makers else ids[:0]

        return torch.cat([torch.empty(0, dtype=torch.int64), *self._scan(pick)])

    def damage(self) -> dict[str, str]:
        """{path inside the run, commit: what is wrong} of iteration files, after reading every byte of them."""
        self._commits()
        wrong = dict(self._bad_files)
        for sequence, (_, segment) in sorted(self._owners.items()):
            try:
                self._read(sequence, schema.verify)
            except Unreadable as error:
                wrong[f"iterations/{segment.name}, commit {sequence}"] = str(error)
        return wrong

    def _document(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        """A config-like file of the run; {} when it is missing or broken."""
        try:
            content = parse((self.path / name).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            self._bad_content[name] = f"damaged: {error}"
            return {}
        return content if isinstance(content, dict) else {}

    def _commits(self) -> dict[int, int]:
        """iteration -> sequence, of the folder as it is now."""
        while True:
            try:
                self._refresh()
                return live_commits(self._owners, read_rewinds(self.folder))
            except FileNotFoundError:
                if not self.folder.exists():
                    return {}
                # Merged into another file since the listing: list again.

    def _refresh(self) -> None:
        indexes, bad = {}, {}
        for name in list_names(self.folder):
            segment = Segment.parse(name)
            try:
                if segment is None:
                    raise Unreadable("foreign: not a name that hpcflow gives")
                indexes[segment] = self._indexes.get(segment) or index_of(self.folder, segment)
            except Unreadable as error:
                bad[f"iterations/{name}"] = str(error)
        self._indexes, self._bad_files = indexes, bad
        self._owners = find_owners(indexes)

    def _read(self, sequence: int, read: Callable[[h5py.Group], T]) -> T:
        """Apply ``read`` to a commit, wherever it is by now."""
        while True:
            _, segment = self._owners[sequence]
            try:
                with schema.opened(self.folder / segment.name) as file:
                    return read(file[schema.group_name(sequence)])
            except FileNotFoundError:
                self._commits()
                if sequence not in self._owners:
                    raise Unreadable(f"{segment.name} was removed from {self.folder}") from None
            except Unreadable as error:
                raise Unreadable(f"{self.folder / segment.name}, commit {sequence}: {error}") from error

    def _scan(self, read: Callable[[h5py.Group], T], numbers: Iterable[int] | None = None) -> Iterator[T]:
        """``read`` of each committed iteration (or those named), in order, opening each file about once."""
        commits = self._commits()
        todo = [commits[number] for number in sorted(commits if numbers is None else numbers)]
        while todo:
            if todo[0] not in self._owners:
                todo = todo[1:]
                continue
            segment = self._owners[todo[0]][1]
            here = list(takewhile(lambda seq: seq in self._owners and self._owners[seq][1] == segment, todo))
            results: list[T] = []
            try:
                with schema.opened(self.folder / segment.name) as file:
                    for sequence in here:
                        results.append(read(file[schema.group_name(sequence)]))
            except FileNotFoundError:
                self._commits()
            except Unreadable as error:
                damaged = here[len(results)]
                self._bad_content[f"iterations/{segment.name}, commit {damaged}"] = str(error)
                todo.remove(damaged)
            yield from results
            todo = todo[len(results) :]


def open_run(path: Path | str) -> Run:
    """Open a run directory for reading (`hpcflow.store.open`)."""
    return Run(path)


def _generated_by(stamps: Mapping[str, Stamp]) -> tuple[str, int] | None:
    return tuple(stamps[GENERATED][1:]) if GENERATED in stamps else None


def _is_text(column: Column) -> bool:
    return isinstance(column, Ragged) and column.values.dtype == torch.uint8 and column.values.dim() == 1


def _samples(group: h5py.Group, tokenizer: Any) -> list[dict[str, Any]]:
    facts, ids = schema.get_facts(group), schema.get_ids(group)
    table: dict[str, list] = {"iteration": [facts["iteration"]] * len(ids), "id": ids.tolist()}
    for name, part in zip(("epoch", "prompt_index", "draw"), unpack(ids), strict=True):
        table[name] = part.tolist()
    generated_by = _generated_by(facts["stamps"])
    if generated_by:
        table["generated_by"] = [generated_by] * len(ids)
    for name in sorted(facts["stamps"]):
        column = schema.get_column(group, name)
        table[name] = texts(column) if _is_text(column) else column.tolist()
    if tokenizer is not None:
        for text, name in (("prompt", "prompt_ids"), ("response", GENERATED)):
            if name in table:
                table[text] = [tokenizer.decode(row) for row in table[name]]
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
