"""A worker rank's side of calls: commands in order, inputs gathered, results kept.

Why transfers cannot deadlock. The controller issues commands in one global order. (1) A worker starts calls strictly
in that order, and a call starts when its inputs are here. (2) An input is the output of a call issued earlier.
(3) Owners send an output as soon as the producing call has finished there; the communication thread sends and receives
while the main thread computes, so a send never waits for its rank's main thread. Take the earliest unfinished call in
the global order: by (1) nothing stands before it on its ranks, by (2) its inputs come from finished calls, by (3) they
arrive. So it runs, and by induction every call does. Collectives inside a call involve only ranks that all have that
same call as their earliest one eventually, for the same reason. The argument needs host buffers; device transfers
(rendezvous on a stream shared with compute kernels) will need theirs made separately.
"""

from __future__ import annotations

import collections
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcflow.data.columns import Columns, n_rows
from hpcflow.mpi.engine import HEARTBEAT_SECONDS, Engine
from hpcflow.mpi.messages import (
    Activity,
    Answer,
    Call,
    CallState,
    Done,
    Drop,
    Failed,
    Heartbeat,
    Inquire,
    Lost,
    Push,
    Report,
    ShowStack,
    Stack,
    Stamp,
    Stop,
)
from hpcflow.mpi.transfer import ContractError, DataPlane, Held

LOST_CONTROLLER = 70  # exit code of a worker whose controller is gone
REMEMBERED_CALLS = 256  # finished calls about which a worker can still be asked


@dataclass
class Ready:
    """A call whose inputs are here, on its way to the main thread."""

    call: Call
    ids: torch.Tensor
    columns: Columns
    received: int


@dataclass
class Outcome:
    """What the main thread made of a call: columns to keep and a small value for the controller."""

    ready: Ready
    version: int
    columns: Columns | None
    value: Any
    start: float
    end: float
    spans: tuple[tuple[str, float, float], ...] = ()
    ids: torch.Tensor | None = None


@dataclass
class _Pending:
    call: Call
    missing: int
    ids: list[torch.Tensor] = field(default_factory=list)
    columns: Columns = field(default_factory=dict)
    received: int = 0
    since: float = field(default_factory=time.time)


class Worker:
    """The communication thread of a worker. The main thread takes from `ready` and answers by `finished`."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.plane = engine, DataPlane(engine)
        self.column_cap = engine.spread.column_cap
        engine.deliver = self._deliver
        self.ready: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._order: collections.deque[_Pending] = collections.deque()
        self._outbox: collections.deque[Callable[[], None]] = collections.deque()
        self._running: tuple[Call, float] | None = None  # written by the main thread alone
        self._merged: dict[int, tuple[Call, dict[int, Report]]] = {}
        # In order of arrival: unfinished calls and the latest finished ones.
        self._known: dict[int, Call] = {}
        self._drops: list[tuple[int, tuple[int, ...]]] = []
        self._last_arrived = self._last_finished = 0
        self._next_heartbeat = 0.0

    # -- from the main thread

    def finished(self, outcome: Outcome) -> None:
        """The main thread has made this call. One that leaves nothing on this rank is answered from here, which saves
        a wake-up; what the communication thread books of it, in order with all other calls, can wait for its next turn.
        """
        call = outcome.ready.call
        if call.writes or self._drops or self.engine.routes.children(self.engine.rank):
            self._later(lambda: self._finish(outcome))
        else:
            self.engine.send_up(Done(call.number, {self.engine.rank: self._report(outcome)}))
            self._outbox.append(lambda: self._book(call))
        self._running = None  # last: a call is never neither running nor about to be booked as finished

    def failed(self, what: str, reason: str) -> None:
        self._later(lambda: self._fail(what, reason))

    def starts(self, call: Call) -> None:
        """The main thread begins this call."""
        self._running = (call, time.time())

    def exchange(self, group: str, payload: bytes) -> list[bytes]:
        """All-gather bytes over a group; blocks the main thread while the communication thread works."""
        answer: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._later(lambda: self.engine.exchange(group, payload, answer.put))
        return answer.get()

    def _later(self, action: Callable[[], None]) -> None:
        self._outbox.append(action)
        self.engine.wake()

    # -- the communication thread

    def loop(self) -> None:
        engine = self.engine
        while not (engine.stopping and not engine.busy and not self._order):
            self._book_all()
            self.plane.look()
            self._beat()
            engine.turn(expecting=self.plane.expecting)
        engine.finish()

    def _book_all(self) -> None:
        """Do what the main thread has left to do, in its order."""
        while self._outbox:
            self.engine.progress = True
            self._outbox.popleft()()

    def _beat(self) -> None:
        now = time.time()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self.engine.send_up(Heartbeat(self.engine.rank, self._activity(now)))

    def _activity(self, now: float) -> Activity:
        if running := self._running:
            call, since = running
            return Activity(call.number, str(call), "runs", now - since)
        if not self._order:
            return Activity(0, "", "idle", 0.0)
        waiting = self._order[0]
        ranks = sorted({r for t in waiting.call.inputs for r in self.plane.missing_from(t)})
        sources = ", ".join(f"call {t.source} ({t.stamp.model})" for t in waiting.call.inputs)
        state = f"waits for the output of {sources}" + (f" from ranks {ranks}" if ranks else "")
        return Activity(waiting.call.number, str(waiting.call), state, now - waiting.since)

    def _deliver(self, message: Any) -> None:
        if isinstance(message, (Call, Push, Drop, ShowStack, Inquire, Stop)):
            self.engine.send_down(message)
            if self.engine.rank in message.ranks:
                self._obey(message)
            elif isinstance(message, Call):
                self._merged[message.number] = (message, {})
        elif isinstance(message, Done):
            self._merge(message.number, message.reports)
        elif isinstance(message, Lost) and message.rank == self.engine.routes.parent(self.engine.rank):
            sys.stderr.write(
                f"rank {self.engine.rank}: the connection to rank {message.rank} is gone; leaving\n"
            )
            os._exit(LOST_CONTROLLER)
        else:
            self.engine.send_up(message)

    def _obey(self, message: Call | Push | Drop | ShowStack | Inquire | Stop) -> None:
        if isinstance(message, Call):
            self._arrive(message)
        elif isinstance(message, Push):
            self.plane.push(message.transfer)
        elif isinstance(message, Drop):
            self._drops.append((self._last_arrived, message.calls))
            self._apply_drops()
        elif isinstance(message, ShowStack):
            frame = sys._current_frames()[threading.main_thread().ident]
            self.engine.send_up(Stack(self.engine.rank, "".join(traceback.format_stack(frame)[-6:])))
        elif isinstance(message, Inquire):
            self._book_all()
            self.engine.send_up(
                Answer(self.engine.rank, {number: self._state(number) for number in self._known})
            )
        else:
            self.engine.stopping = True
            self.ready.put(None)

    def _state(self, number: int) -> CallState:
        running = self._running
        began = running is not None and running[0].number == number
        state = "finished" if number <= self._last_finished else "running" if began else "waiting"
        # Weights that an update has begun to change, or has changed, are not those that it expects.
        repeatable = self._known[number].kind != "advancing" or state == "waiting"
        return CallState(state, repeatable, number in self.plane.shown)

    def _remember(self, call: Call) -> None:
        self._known[call.number] = call
        oldest = next(iter(self._known))
        if len(self._known) > REMEMBERED_CALLS and oldest <= self._last_finished:
            del self._known[oldest]
            self.plane.shown.discard(oldest)

    def _arrive(self, call: Call) -> None:
        if call.number <= self._last_arrived:
            self._fail(
                str(call),
                f"ContractError: a call came twice or late: number {call.number} after {self._last_arrived}",
            )
            return
        self._last_arrived = call.number
        self._remember(call)
        self._merged[call.number] = (call, {})
        pending = _Pending(call, missing=len(call.inputs))
        self._order.append(pending)
        for transfer in call.inputs:
            self._guard(str(call), lambda t=transfer: self.plane.receive(t, self._taker(pending, t)))
        self._release()

    def _taker(self, pending: _Pending, transfer: Any) -> Callable[[torch.Tensor, Columns, int], None]:
        def take(ids: torch.Tensor, columns: Columns, received: int) -> None:
            if pending.ids and not torch.equal(pending.ids[0], ids):
                raise ContractError(
                    f"{pending.call}: columns {', '.join(transfer.columns)} belong to samples {_some(ids)}, "
                    f"columns {', '.join(pending.columns)} to samples {_some(pending.ids[0])}"
                )
            pending.ids.append(ids)
            pending.columns.update(columns)
            pending.received += received
            pending.missing -= 1
            self._release()

        return lambda *arrived: self._guard(str(pending.call), lambda: take(*arrived))

    def _release(self) -> None:
        """Hand over calls whose inputs are here, strictly in the order of issue."""
        while self._order and self._order[0].missing == 0:
            pending = self._order.popleft()
            ids = pending.ids[0] if pending.ids else torch.empty(0, dtype=torch.int64)
            self.ready.put(Ready(pending.call, ids, pending.columns, pending.received))

    def _finish(self, outcome: Outcome) -> None:
        call = outcome.ready.call
        part = next((p for p in call.outputs if p.rank == self.engine.rank), None)
        if part is not None and call.writes:
            self._guard(str(call), lambda: self._keep(outcome, part.hi - part.lo))
        self._last_finished = call.number
        self._apply_drops()
        self._merge(call.number, {self.engine.rank: self._report(outcome)})

    def _book(self, call: Call) -> None:
        """A call that has been answered already."""
        self._last_finished = call.number
        self._apply_drops()
        del self._merged[call.number]

    def _report(self, outcome: Outcome) -> Report:
        received, held = outcome.ready.received, self.plane.held_bytes
        return Report(outcome.value, outcome.start, outcome.end, received, held, outcome.spans)

    def _keep(self, outcome: Outcome, rows: int) -> None:
        call, columns = outcome.ready.call, outcome.columns or {}
        missing = [name for name in call.writes if name not in columns]
        if missing:
            raise ContractError(f"{call} must write {', '.join(missing)} but returned {sorted(columns)}")
        ids = outcome.ready.ids if outcome.ids is None else outcome.ids
        found = n_rows(columns)
        if found != rows or len(ids) != rows:
            raise ContractError(f"{call} returned {found} rows for {len(ids)} ids; {rows} were expected here")
        kept = {name: columns[name] for name in call.writes}
        self.plane.hold(call.number, Held(ids, kept, Stamp(call.iteration, call.model, outcome.version)))
        if self.plane.held_bytes > self.column_cap:
            raise MemoryError(
                f"{call}: columns held on this rank take {self.plane.held_bytes} bytes, above the cap of "
                f"{self.column_cap}; let go of batches earlier or raise protocol.column_cap_gib"
            )

    def _apply_drops(self) -> None:
        """Free what nobody holds, once every call that arrived before the drop has finished."""
        ready = [calls for last, calls in self._drops if last <= self._last_finished]
        self._drops = [entry for entry in self._drops if entry[0] > self._last_finished]
        for calls in ready:
            for call in calls:
                self.plane.drop(call)

    def _merge(self, number: int, reports: dict[int, Report]) -> None:
        """Join answers of this rank and the ranks below it; pass them up when all are here."""
        call, got = self._merged[number]
        got.update(reports)
        wanted = self.engine.routes.below(self.engine.rank).intersection(call.ranks)
        if len(got) == len(wanted):
            del self._merged[number]
            self.engine.send_up(Done(number, got))

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """A broken contract ends the run by name instead of killing the thread."""
        try:
            action()
        except (ContractError, MemoryError) as error:
            self._fail(what, f"{type(error).__name__}: {error}")

    def _fail(self, what: str, reason: str) -> None:
        self.engine.send_up(Failed(self.engine.rank, what, reason))


def _some(ids: torch.Tensor) -> str:
    shown = ", ".join(map(str, ids[:4].tolist()))
    return f"[{shown}{', ...' if len(ids) > 4 else ''}] ({len(ids)} rows)"


def catch_signals(numbers: tuple[signal.Signals, ...]) -> tuple[socket.socket, socket.socket]:
    """(read end, write end) of a socket that gets a byte for each signal at C level, also while Python computes.

    Keep the write end referenced: a collected one makes the loop spin on a hang-up.
    """
    read_end, write_end = socket.socketpair()
    read_end.setblocking(False)
    write_end.setblocking(False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    return read_end, write_end


def start_worker(signals: socket.socket) -> tuple[Worker, threading.Thread]:
    """Start the communication thread of this rank; returns when the world stands."""
    box: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            worker = Worker(Engine(None, signals))
            box.put(worker)
            worker.loop()
        except BaseException:  # a dead communication thread must never be silent
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    thread = threading.Thread(target=run, name="communication", daemon=True)
    thread.start()
    return box.get(), thread
