"""The journal of the iteration in progress, and the decision it allows after a failure: what to run again,
and why.

``RUN/journal.jsonl`` is begun afresh with each iteration (earlier ones are committed) and has one line per
event, each with its time:

    {"event": "begin", "iteration", "versions": {model: version}, "kept": {place: {rank: value}}}
    {"event": "started", "call", "place", "kind", "version", "ranks", "writes", "reads": {column: call that
    made it}} {"event": "finished", "call", "values": {rank: what it returned}} {"event": "recorded",
    "columns": {column: place}}

A place names a call within its iteration ("actor.generate_sequences#1"). "kept": what calls of an earlier
launch returned that are not made again.

A line is written before what it announces may happen: "started" before the command leaves the controller, so
that a call that is not in the journal has run nowhere, and the result of one that no started call reads was
seen by nobody. Lines reach the kernel at once, which is what survives when processes die. Before an advancing
call starts they reach the disk, and everything recorded has: when the node or the power goes, at most a tail
of pure and replayable calls is unknown, which are safe to run again.

``RUN/failures.jsonl`` keeps, for good, one line for each failure that a controller saw ("failure"), for each
decision acted on ("resume"), and for each failure that a call made good inside the living world ("in_world").
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcflow.mpi.messages import Call, CallState
from hpcflow.store.durable import read_lines, write_atomic

JOURNAL, FAILURES = "journal.jsonl", "failures.jsonl"
NODE_KEYS = ("call", "place", "kind", "version", "ranks", "writes", "reads")
Values = dict[str, dict[int, Any]]  # place -> rank -> what the call returned
Answers = Mapping[int, Mapping[int, CallState]]  # rank -> call -> state


class Journal:
    """The controller's end: appends to the journal of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / JOURNAL
        self._file: int | None = None
        self._open: set[int] = set()

    def begin(self, iteration: int, versions: dict[str, int], kept: Values) -> None:
        """A new iteration: the lines of the one before go."""
        self.close()
        first = {
            "event": "begin",
            "iteration": iteration,
            "versions": versions,
            "kept": kept,
            "time": time.time(),
        }
        write_atomic(self.path, json.dumps(first).encode() + b"\n")
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def started(self, call: Call) -> None:
        """Before the call is issued."""
        reads = {column: transfer.source for transfer in call.inputs for column in transfer.columns}
        self._open.add(call.number)
        self._write(
            event="started",
            call=call.number,
            place=call.place,
            kind=call.kind,
            version=call.version,
            ranks=call.ranks,
            writes=call.writes,
            reads=reads,
        )
        if call.kind == "advancing":
            os.fsync(self._file)

    def finished(self, number: int, values: dict[int, Any]) -> None:
        """All ranks of a call have answered, with these values."""
        if number in self._open:
            self._open.discard(number)
            self._write(event="finished", call=number, values=values)

    def recorded(self, places: Mapping[str, str]) -> None:
        """These columns are durable; ``places``: of the calls that made them."""
        self._write(event="recorded", columns=dict(places))

    def close(self) -> None:
        """Until the next `begin` nothing is journalled."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._open.clear()

    def _write(self, **entry: Any) -> None:
        if self._file is not None:
            os.write(self._file, json.dumps({**entry, "time": time.time()}).encode() + b"\n")

    @property
    def writing(self) -> bool:
        """Whether an iteration is in progress."""
        return self._file is not None


@dataclass
class Node:
    """A call of the iteration in progress, as the journal has it."""

    call: int
    place: str
    kind: str
    version: int
    ranks: list[int]
    writes: list[str]
    reads: dict[str, int]
    finished: bool = False
    values: dict[int, Any] = field(default_factory=dict)

    @property
    def advances(self) -> bool:
        return self.kind == "advancing"

    def __str__(self) -> str:
        """The place, without "#1"."""
        return self.place.removesuffix("#1")


@dataclass
class Progress:
    """What a journal says: the iteration in progress, its nodes in order of issue, the columns known to be
    durable and the places where they were made, values of calls that an earlier launch made, when it began and
    when the last event was (unix seconds)."""

    iteration: int
    nodes: list[Node]
    recorded: dict[str, str]
    kept: Values = field(default_factory=dict)
    begun: float = 0.0
    last: float = 0.0

    @property
    def values(self) -> Values:
        """What finished calls returned, of this launch and of those before it."""
        return self.kept | {node.place: node.values for node in self.nodes if node.values}

    def readers(self, node: Node) -> list[Node]:
        """The started nodes that read what ``node`` made: to them its result may have been visible."""
        return [other for other in self.nodes if node.call in other.reads.values()]


def read_progress(run: Path) -> Progress | None:
    """The journal of a run; None when there is none (or its first line is torn)."""
    entries = read_lines(run / JOURNAL)
    if not entries or entries[0].get("event") != "begin":
        return None
    kept = {place: _by_rank(values) for place, values in entries[0]["kept"].items()}
    begun, last = entries[0]["time"], entries[-1]["time"]
    progress = Progress(entries[0]["iteration"], [], {}, kept, begun, last)
    by_call: dict[int, Node] = {}
    for entry in entries[1:]:
        if entry["event"] == "started":
            node = Node(**{name: entry[name] for name in NODE_KEYS})
            progress.nodes.append(node)
            by_call[node.call] = node
        elif entry["event"] == "finished":
            node = by_call[entry["call"]]
            node.finished, node.values = True, _by_rank(entry["values"])
        elif entry["event"] == "recorded":
            progress.recorded |= entry["columns"]
    return progress


def _by_rank(values: dict[str, Any]) -> dict[int, Any]:
    return {int(rank): value for rank, value in values.items()}


@dataclass(frozen=True)
class Decision:
    """What is run again after a failure.

    replayed   committed iterations (first, last) whose training nodes run again from recorded columns, None
    if none iteration  the iteration that goes on node       its earliest node to run again; "" when the
    iteration had not begun kept       its nodes whose results are recorded: they do not run again why
    in words
    """

    replayed: tuple[int, int] | None
    iteration: int
    node: str
    kept: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        """Iterations count from 1 here, as everywhere in what people read."""
        where = f"iteration {self.iteration + 1}" + (f", {self.node}" if self.node else "")
        text = f"earliest node to run again: {where}: {self.why}"
        if self.kept:
            text += f"; kept, because recorded: {', '.join(self.kept)}"
        if self.replayed:
            first, last = self.replayed[0] + 1, self.replayed[1] + 1
            span = f"iteration {first}" if first == last else f"iterations {first} to {last}"
            text += f"; before it {span} replayed from recorded columns, training nodes only"
        return text

    def record(self) -> dict[str, Any]:
        """As ``failures.jsonl`` keeps it."""
        return dataclasses.asdict(self)


def decide(
    progress: Progress | None, durable: Mapping[str, str], answers: Answers, *, loaded: int, committed: int
) -> Decision:
    """The earliest node to run again.

    ``durable``: column -> place of what is recorded of the iteration in progress. ``answers``: what ranks
    said, none after the controller died. ``loaded``: iterations of which the last checkpoint holds the
    weights. ``committed``: iterations that are committed; their training nodes run again where the checkpoint
    is older.
    """
    replayed = (loaded, committed - 1) if loaded < committed else None
    if progress is None or progress.iteration != committed:
        return Decision(replayed, committed, "", (), "it had not begun")
    kept = [place.removesuffix("#1") for place in dict.fromkeys(durable.values())]
    for node in progress.nodes:
        if not node.advances and node.writes and durable.keys() >= set(node.writes):
            continue
        return Decision(replayed, committed, str(node), tuple(kept), _reason(progress, node, answers))
    why = "its first node had not begun" if not progress.nodes else "what came next had not begun"
    return Decision(replayed, committed, "", tuple(kept), why)


def _reason(progress: Progress, node: Node, answers: Answers) -> str:
    said = {rank: answers[rank][node.call] for rank in node.ranks if node.call in answers.get(rank, {})}
    parts = [_state(node, said)]
    begun = node.finished or not said or any(state.state != "waiting" for state in said.values())
    if node.advances and begun:
        safe = [rank for rank, state in said.items() if state.repeatable]
        parts.append(
            f"it changes weights (version {node.version} to {node.version + 1}), so it is never repeated in "
            "place"
            + (f" although ranks {safe} had not begun" if safe else "")
            + ": the weights come from the last checkpoint"
        )
    elif node.finished:
        parts.append("its result was in the ranks' memory only")
    if not node.advances and begun:
        parts.append("it is safe to repeat")
    seen = any(state.visible for state in said.values()) if said else bool(progress.readers(node))
    if node.writes:
        readers = ", ".join(str(reader) for reader in progress.readers(node))
        parts.append(
            f"its result was visible to {readers}" if seen and readers else "nobody has seen its result"
        )
    return ", ".join(parts)


def _state(node: Node, said: Mapping[int, CallState]) -> str:
    if node.finished:
        return "it had finished"
    if not said:
        return "it had started, and nobody could say how far it was"
    by_state: dict[str, list[int]] = {}
    for rank, state in said.items():
        by_state.setdefault(state.state, []).append(rank)
    parts = [
        f"{state} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for state, ranks in by_state.items()
    ]
    silent = sorted(set(node.ranks) - set(said))
    return (
        "it was "
        + ", ".join(parts)
        + (f", unknown on {', '.join(map(str, silent))} (dead)" if silent else "")
    )
