"""Going on after a crash, a kill, a preemption or a change of placement: one mechanism.

The last complete checkpoint is loaded; committed iterations after it are *replayed*, their updates computed again from
recorded columns, without generating or scoring anything; the iteration that was in progress goes on from the earliest
node that has to run again. What that is, and why, `hpcflow.dataflow.journal.decide` says.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcflow.dataflow.assemble import RECORDER
from hpcflow.dataflow.batch import Batch, Handle, Origin
from hpcflow.dataflow.group import WorkerGroup
from hpcflow.dataflow.journal import FAILURES, Decision, Journal, Progress, Values, decide, read_progress
from hpcflow.dataflow.recorded import Deferred, Recorded
from hpcflow.dataflow.trace import Node, values_of
from hpcflow.dataflow.world import World
from hpcflow.mpi.messages import Call, Report
from hpcflow.store import open as open_run
from hpcflow.store.checkpoint import Checkpoint, CheckpointDir
from hpcflow.store.durable import append_line
from hpcflow.workers.primitive import RECOVERED, Primitive


@dataclass(frozen=True)
class Point:
    """Where a run goes on: iterations ``loaded`` .. ``first`` - 1 are to be replayed, from ``first`` on computed.
    ``position``: of the next prompt after the loaded state."""

    loaded: int
    first: int
    position: int


class Recovery:
    """Journals, records and takes up again. ``say``: a line for the user; ``trained``: models with weights of their own."""

    def __init__(
        self, run: Path, world: World, trained: dict[str, WorkerGroup], say: Callable[[str], None]
    ) -> None:
        self.run, self.world, self.trained, self.say = run, world, trained, say
        self.recorder: WorkerGroup = world.group(RECORDER)
        self.journal = Journal(run)
        # What of the iteration is recorded, and where it came from.
        self._recorded: dict[str, Origin | Deferred] = {}
        self._places: dict[str, str] = {}  # the calls that made what is recorded
        self._taken_up: tuple[int, Progress | None] | None = None
        self.kept: Values = {}  # what calls of the iteration returned that an earlier launch made
        self.kept_metrics: dict[str, float] = {}  # of the iteration's nodes that an earlier launch computed
        world.before_issue = self._started
        world.after_done = self._finished
        world.before_advance = self._before_advance
        world.made = self._made

    # -- an iteration in progress

    def begin(self, iteration: int) -> None:
        """An iteration is computed from here on, with what an earlier launch recorded of it."""
        self._recorded, self._places = {}, {}
        self.world.begin(iteration)
        self.world.recorded = None
        progress = self._take_up(iteration)
        recorded = self.world.recorded
        self.kept = kept = progress.values if progress and recorded else {}
        self.journal.begin(iteration, {name: group.version for name, group in self.trained.items()}, kept)
        if recorded:
            self.journal.recorded(recorded.places)
        self.kept_metrics = _metrics_of(kept)

    def _take_up(self, iteration: int) -> Progress | None:
        if self._taken_up is None or self._taken_up[0] != iteration:
            return None
        (_, progress), self._taken_up = self._taken_up, None
        rows, places = self.recorder.recorded(iteration=iteration).get()[0]
        if not places:
            return None
        # Once an update has started, all that updates read is recorded, and what calls returned is in the journal.
        whole = progress is not None and any(node.advances for node in progress.nodes)
        values = progress.values if whole else {}
        self.world.recorded = Recorded(self.recorder, iteration, rows, places, values)
        self._recorded, self._places = dict(self.world.recorded.columns), dict(places)
        return progress

    def end(self) -> None:
        """The iteration is committed."""
        self.journal.close()
        self.world.recorded, self._recorded = None, {}

    def _started(self, call: Call) -> None:
        if call.model != RECORDER and self.journal.writing:
            self.journal.started(call)

    def _finished(self, call: Call, reports: dict[int, Report]) -> None:
        for report in reports.values():
            if isinstance(report.value, dict) and RECOVERED in report.value:
                self._recovered_inside(call, report.value[RECOVERED])
        if not self.journal.writing:
            return
        if call.model != RECORDER:
            self.journal.finished(call.number, values_of(reports))
        elif call.method == "record":
            self.journal.recorded(call.args["places"])

    def _recovered_inside(self, call: Call, text: str) -> None:
        """A failure that did not end the world is kept like one that did."""
        entry = {"event": "in_world", "time": time.time(), "iteration": call.iteration, "node": call.place}
        append_line(self.run / FAILURES, {**entry, "error": text})

    def _made(self, primitive: Primitive, batch: Batch) -> None:
        """What random numbers or the outside world had a part in, and carries its inputs along, is recorded at once."""
        if primitive.kind == "replayable" and primitive.joins and self.journal.writing:
            self._record(batch)

    def _before_advance(self, batch: Batch) -> None:
        """Before weights change, everything that the update reads is durable."""
        if self.journal.writing and (handle := self._record(batch)) is not None:
            handle.wait()

    def _record(self, batch: Batch) -> Handle | None:
        """Send to the recorder what it does not have; None when it has everything.

        Two batches of an iteration may have columns of one name, e.g. of two policies that answer each other: where
        another model made the one that is recorded, a column's name is preceded by its own model's.
        """
        known = self._recorded
        peeked = {name: origin.peek(name) for name, origin in batch.columns.items()}
        have = {(name.rpartition(".")[2], id(origin)) for name, origin in known.items()}
        names = tuple(name for name, origin in peeked.items() if (name, id(origin)) not in have)
        if not names:
            return None
        origins = {name: batch.columns[name].now(name) for name in names}
        stored = {name: _stored_name(name, origin, self._places) for name, origin in origins.items()}
        same = (
            not known or len(names) < len(batch.columns) or any(new != name for name, new in stored.items())
        )
        if not same:
            known.clear()
            self._places.clear()
        known.update({stored[name]: origin for name, origin in origins.items()})
        places = {stored[name]: origin.place for name, origin in origins.items()}
        self._places.update(places)
        primitive = dataclasses.replace(self.recorder.primitives["record"], reads=names)
        arguments = {
            "iteration": self.world.iteration,
            "names": {name: new for name, new in stored.items() if new != name},
            "stamps": {stored[name]: origin.stamp for name, origin in origins.items()},
            "places": places,
            "restart": not same,
        }
        return self.recorder.call(primitive, batch, arguments)

    # -- after a failure

    def failed(self, error: BaseException) -> str:
        """Ask the ranks that still answer, decide, and keep both. Returns what is run again, in words."""
        if not self.journal.writing:
            append_line(
                self.run / FAILURES, {"event": "failure", "time": time.time(), "error": _brief(str(error))}
            )
            return ""
        answers = self.world.controller.inquire()
        progress, committed = read_progress(self.run), self.world.iteration
        found = CheckpointDir(self.run).latest()
        loaded = 0 if found is None else found.iteration + 1
        decision = decide(progress, progress.recorded, answers, loaded=loaded, committed=committed)
        said = {
            rank: {call: tuple(state) for call, state in calls.items()} for rank, calls in answers.items()
        }
        died = sorted(self.world.controller.lost)
        seconds = time.time() - progress.begun if progress else None
        self._keep("failure", decision, error=_brief(str(error)), died=died, answers=said, seconds=seconds)
        return (f"ranks that died: {', '.join(map(str, died))}; " if died else "") + str(decision)

    def _keep(self, event: str, decision: Decision, **more: Any) -> None:
        entry = {
            "event": event,
            "time": time.time(),
            "decision": decision.record(),
            "text": str(decision),
            **more,
        }
        append_line(self.run / FAILURES, entry)

    # -- going on

    def resume(self) -> Point:
        """Load the last complete checkpoint that counts and decide what comes next."""
        directory = CheckpointDir(self.run)
        found = directory.latest()
        loaded = 0 if found is None else found.iteration + 1
        first, gone = self.recorder.go_on(iteration=loaded).get()[0]
        for name, why in directory.skipped.items():
            self.say(f"checkpoint {name} does not count: {why}")
        if gone:
            self.say(f"iterations {[i + 1 for i in gone]} do not count any more: an earlier one is missing")
        if found is not None:
            self._load(found)
        progress = read_progress(self.run)
        _, places = self.recorder.recorded(iteration=first).get()[0] if progress or first else (0, {})
        if first or progress:
            decision = decide(progress, places, {}, loaded=loaded, committed=first)
            self.say(str(decision))
            begun = progress is not None and progress.iteration == first
            self._keep("resume", decision, seconds=progress.last - progress.begun if begun else None)
        self._taken_up = (first, progress if progress and progress.iteration == first else None)
        return Point(loaded, first, 0 if found is None else found.meta["data_position"])

    def _load(self, found: Checkpoint) -> None:
        handles = {}
        for name, group in self.trained.items():
            digests = {
                path.removeprefix(f"{name}/"): digest
                for path, (_, digest) in found.files.items()
                if path.startswith(f"{name}/")
            }
            handles[name] = group.load(folder=str(found.folder / name), digests=digests)
        for name, handle in handles.items():
            expected = (found.meta["versions"][name], found.meta["digests"][name])
            version, digest = handle.get()[0]
            if (version, digest) != expected:
                raise ValueError(
                    f"{found.folder}: by its index {name} has weight version {expected[0]} and digest {expected[1]}, but "
                    f"what was loaded has version {version} and digest {digest}. Move this checkpoint away and resume: "
                    "then the one before it counts"
                )
            self.trained[name].version = version
        self.say(f"continuing from {found.folder}, the state after iteration {found.iteration + 1}")

    def replay(self, iteration: int, compute: Callable[[], None]) -> None:
        """Advance the weights by a committed iteration: ``compute`` runs the algorithm's function.

        What the updates return is compared to what is recorded of them.
        """
        facts = open_run(self.run).iteration(iteration).facts
        said = facts["kept"] | {node["place"]: node["values"] for node in facts["nodes"] if node["values"]}
        values = {
            place: {int(rank): value for rank, value in by_rank.items()} for place, by_rank in said.items()
        }
        start = time.time()
        self.world.begin(iteration)
        self.world.recorded = Recorded(self.recorder, iteration, facts["samples"], facts["places"], values)
        compute()
        self.world.drain()
        self.world.recorded = None
        nodes = [node for node in self.world.trace.take() if node.model != RECORDER]
        versions = {name: group.version for name, group in self.trained.items()}
        expected = {name: facts["versions"][name] for name in versions}
        if versions != expected:
            raise ValueError(
                f"iteration {iteration + 1} was replayed to weight versions {versions}; recorded are {expected}"
            )
        made = sum(not node.advances for node in nodes)
        self.say(
            f"iteration {iteration + 1} replayed in {time.time() - start:.1f} s instead of {facts['wall_s']:.1f} s"
            f"{f', {made} calls made besides the updates' if made else ''}: {_compared(nodes, facts['metrics'])}"
        )


def _stored_name(name: str, origin: Origin, places: dict[str, str]) -> str:
    """``name``, or "model.name" where the recorded column of that name was made by another model."""
    before = places.get(name)
    if before is None or before.partition(".")[0] == origin.stamp.model:
        return name
    return f"{origin.stamp.model}.{name}"


def _brief(error: str) -> str:
    """The beginning, which names the rank, and the end, which names the error, of a long traceback."""
    return error if len(error) <= 4000 else f"{error[:600]}\n...\n{error[-3400:]}"


def _metrics_of(kept: Values) -> dict[str, float]:
    """What calls of an earlier launch returned as metrics; those that are made again replace theirs."""
    metrics = {}
    for place, values in kept.items():
        value = values[max(values)]
        if isinstance(value, dict):
            model = place.split(".")[0]
            metrics |= {f"{model}/{name}": number for name, number in value.items() if name != RECOVERED}
    return metrics


def _compared(nodes: list[Node], metrics: dict[str, float]) -> str:
    """The updates' losses against those recorded, in words."""
    gap, count = 0.0, 0
    for node in nodes:
        if node.advances and isinstance(node.value, dict):
            for name, value in node.value.items():
                before = metrics.get(f"{node.model}/{name}", float("nan"))
                same = value == before or (value != value and before != before)
                gap = max(gap, 0.0 if same else abs(value - before) / max(abs(value), abs(before)))
                count += 1
    if gap == 0.0:
        return f"all {count} metrics of its updates as recorded"
    return f"metrics of its updates as recorded to {gap:.1e}"
