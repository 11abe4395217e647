"""The controller's side of calls: commands go out at once, answers and faults come in while something is waited for.

There is no second thread here: the loop runs inside `wait`, which the controller's program enters whenever it needs an
answer. Batches never pass through this rank; it holds calls, counts and stamps.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpcflow.data.columns import Columns
from hpcflow.mpi.engine import Engine
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
    Part,
    Push,
    Report,
    ShowStack,
    Signal,
    Spread,
    Stack,
    Stop,
    Transfer,
)
from hpcflow.mpi.transfer import DataPlane

SILENT_SECONDS = 4.0  # several heartbeats: suspicious, when something hangs anyway
DEAD_SECONDS = 15.0
"""No heartbeat for so long: node lost, process stopped, or the interpreter lock never released."""
CHECK_SECONDS = 0.1  # how often ranks are looked over for silence and hanging calls
STACK_SECONDS = 1.0  # how long a hanging rank may take to answer where it is
ANSWER_SECONDS = 1.0  # how long the ranks may take to answer what became of their calls


class WorkerError(RuntimeError):
    """A rank raised, died or hangs; the message names model, method, rank, age and traceback."""


class Controller:
    """Rank 0. ``watchdog`` is the number of seconds that one call may run or wait on a rank."""

    def __init__(self, spread: Spread, signals: socket.socket, watchdog: float) -> None:
        self.engine = Engine(spread, signals)
        self.engine.deliver = self._deliver
        self.plane = DataPlane(self.engine)
        self.watchdog = watchdog
        self.reports: dict[int, dict[int, Report]] = {}
        self.open: dict[int, Call] = {}
        self.on_done: Callable[[Call, dict[int, Report]], None] = lambda call, reports: None
        self.on_turn: Callable[[], None] = lambda: None
        self._wanted: set[int] = set()
        self._faults: list[Failed | Lost] = []
        self._stacks: dict[int, str] = {}
        self._answers: dict[int, dict[int, CallState]] = {}
        self._beats: dict[int, tuple[float, Heartbeat | None]] = {}
        self._numbers, self._checked = 0, 0.0
        self.signals: list[int] = []
        now = time.monotonic()
        for rank in range(1, self.engine.size):
            self._beats[rank] = (now, None)

    def number(self) -> int:
        """A fresh number for a call or a transfer; numbers grow in the order of issue."""
        self._numbers += 1
        return self._numbers

    # -- issuing

    def issue(self, call: Call) -> None:
        """Send a call and start the transfers that it needs. Returns at once."""
        self.open[call.number] = call
        self._wanted.add(call.number)
        self.engine.send_down(call)
        for transfer in call.inputs:
            self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        senders = transfer.senders()
        others = tuple(rank for rank in senders if rank != self.engine.rank)
        if others:
            self.engine.send_down(Push(transfer, others))
        if self.engine.rank in senders:
            self.plane.push(transfer)

    def fetch(self, transfer: Transfer) -> tuple[torch.Tensor, Columns]:
        """Bring columns to the controller (readers = rank 0): for tests and tools, not for algorithms."""
        box: list[tuple[torch.Tensor, Columns]] = []
        self.plane.receive(transfer, lambda ids, columns, _: box.append((ids, columns)))
        self._start(transfer)
        self.wait(lambda: bool(box))
        return box[0]

    def drop(self, calls: Iterable[int], ranks: Iterable[int]) -> None:
        """Nobody holds the outputs of these calls any more."""
        calls, ranks = tuple(calls), tuple(sorted(ranks))
        for call in calls:
            self.plane.drop(call)
        workers = tuple(rank for rank in ranks if rank != self.engine.rank)
        if workers:
            self.engine.send_down(Drop(calls, workers))

    def forget(self, call: int) -> None:
        """Nobody will ask for this call's reports any more."""
        self._wanted.discard(call)
        if call not in self.open:
            self.reports.pop(call, None)

    # -- waiting

    def result(self, call: int, timeout: float | None = None) -> dict[int, Report]:
        """Wait for a call; its report per rank. TimeoutError after ``timeout`` seconds."""
        if not self.wait(lambda: call not in self.open, timeout):
            raise TimeoutError(f"{self.open[call]} has not finished after {timeout} s")
        return self.reports[call]

    def wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Work until ``condition`` holds. False on timeout. Raises WorkerError as soon as a fault is known."""
        until = None if timeout is None else time.perf_counter() + timeout
        while not condition():
            if until is not None and time.perf_counter() > until:
                return False
            self.plane.look()
            self._check()
            self.on_turn()
            if condition():
                break
            self.engine.turn(expecting=self.plane.expecting, until=until)
        self._check()
        return True

    def close(self) -> None:
        """Stop all ranks in order; every open call is waited for first."""
        self.wait(lambda: not self.open)
        self.engine.stopping = True
        self.engine.send_down(Stop(tuple(range(1, self.engine.size))))
        while self.engine.busy:
            self.engine.turn(expecting=False)
        self.engine.finish()

    # -- what comes in

    def _deliver(self, message: Any) -> None:
        if isinstance(message, Done):
            self._done(message)
        elif isinstance(message, Heartbeat):
            self._beats[message.rank] = (time.monotonic(), message)
        elif isinstance(message, Stack):
            self._stacks[message.rank] = message.text
        elif isinstance(message, Answer):
            self._answers[message.rank] = message.calls
        elif isinstance(message, Signal):
            self.signals.append(message.number)
        else:
            self._faults.append(message)

    def _done(self, message: Done) -> None:
        reports = self.reports.setdefault(message.number, {})
        reports.update(message.reports)
        call = self.open[message.number]
        if len(reports) == len(call.ranks):
            del self.open[message.number]
            self.on_done(call, reports)
            if message.number not in self._wanted:
                del self.reports[message.number]

    # -- faults

    def _check(self) -> None:
        if self._faults:
            raise WorkerError(self._describe_fault())
        if time.monotonic() - self._checked > CHECK_SECONDS:
            self._checked = time.monotonic()
            self._check_silence(DEAD_SECONDS)
            self._check_watchdog()

    def _check_silence(self, limit: float) -> None:
        now = time.monotonic()
        for rank, (seen, beat) in self._beats.items():
            silent = now - seen
            if silent > limit:
                open_calls = [str(call) for call in self.open.values() if rank in call.ranks]
                raise WorkerError(
                    f"rank {rank} has been silent for {silent:.0f} s (node lost, process stopped, or the interpreter "
                    f"lock never released); last known: {beat.activity if beat else 'no heartbeat yet'}; open on it: "
                    f"{', '.join(open_calls) or 'nothing'}"
                )

    def _check_watchdog(self) -> None:
        """A rank that runs one call for too long, or one that waits for too long while nobody runs anything."""
        now = time.monotonic()
        ages = {
            rank: (now - seen + beat.activity.seconds, beat.activity)
            for rank, (seen, beat) in self._beats.items()
            if beat and beat.activity.what
        }
        running = [rank for rank, (_, activity) in ages.items() if activity.state == "runs"]
        late = [rank for rank in running or ages if ages[rank][0] > self.watchdog]
        if late:
            self._hang({rank: ages[rank][1] for rank in late})

    def inquire(self) -> dict[int, dict[int, CallState]]:
        """After a fault: rank -> call number -> state, from the ranks that still answer within a second."""
        self._answers.clear()
        ranks = tuple(range(1, self.engine.size))
        self.engine.send_down(Inquire(ranks))
        until = time.perf_counter() + ANSWER_SECONDS
        while set(self._answers) | self.lost < set(ranks) and time.perf_counter() < until:
            self.engine.turn(expecting=False, until=until)
        return dict(self._answers)

    @property
    def lost(self) -> set[int]:
        """Ranks whose connection has ended."""
        return {fault.rank for fault in self._faults if isinstance(fault, Lost)}

    def _describe_fault(self) -> str:
        """The cause, not its consequences: an exception before a lost connection."""
        for fault in self._faults:
            if isinstance(fault, Failed):
                return f"rank {fault.rank} failed in {fault.what}:\n{fault.reason}"
        rank = self._faults[0].rank
        seen, beat = self._beats[rank]
        activity = beat.activity if beat else None
        doing = (
            f"last known: {activity}, {time.monotonic() - seen:.1f} s ago" if activity else "no heartbeat yet"
        )
        open_calls = [str(call) for call in self.open.values() if rank in call.ranks]
        return f"rank {rank} died (its connection closed); {doing}; open on it: {', '.join(open_calls) or 'nothing'}"

    def _hang(self, late: dict[int, Activity]) -> None:
        self._check_silence(SILENT_SECONDS)  # the others may only be waiting for a rank that was stopped
        self._stacks.clear()
        self.engine.send_down(ShowStack(tuple(late)))
        until = time.perf_counter() + STACK_SECONDS
        while len(self._stacks) < len(late) and time.perf_counter() < until:
            self.engine.turn(expecting=False, until=until)
        places = [
            f"rank {rank} hangs: {activity}. Its main thread:\n{self._stacks.get(rank, '(it does not answer)')}"
            for rank, activity in late.items()
        ]
        limit = f"The watchdog's limit is {self.watchdog:g} s (protocol.watchdog_s)."
        raise WorkerError("\n".join([*places, limit]))


def whole(rank: int, rows: int) -> tuple[Part, ...]:
    """All rows at one rank."""
    return (Part(rank, 0, rows),)
