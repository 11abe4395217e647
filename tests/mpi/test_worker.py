"""A worker's bookkeeping in the orders that two threads can bring about, step by step and without MPI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcflow.mpi.messages import Answer, Call, CallState, Done, Drop, Inquire, Part
from hpcflow.mpi.routes import Routes
from hpcflow.mpi.worker import Outcome, Ready, Worker


class Engine:
    """What a worker needs of its engine; ``sent``: what went up."""

    def __init__(self) -> None:
        self.rank, self.stopping, self.progress, self.sent = 1, False, False, []
        self.spread, self.routes = SimpleNamespace(column_cap=1 << 20), Routes({"a": [1]}, 2)

    def send_up(self, message: Any) -> None:
        self.sent.append(message)

    def send_down(self, message: Any) -> None:
        pass

    def wake(self) -> None:
        pass


def call(number: int, writes: tuple[str, ...] = (), kind: str = "pure") -> Call:
    outputs = (Part(1, 0, 1),) if writes else ()
    return Call(number, "a", f"method_{number}", 0, 0, (1,), {}, (), writes, outputs, kind=kind)


def outcome(made: Call) -> Outcome:
    columns = {name: torch.zeros(1) for name in made.writes}
    return Outcome(Ready(made, torch.tensor([7]), {}, 0), 0, columns, None, 0.0, 1.0)


@pytest.fixture
def worker() -> Worker:
    return Worker(Engine())


@pytest.mark.parametrize("writes", [(), ("x",)])
def test_a_call_that_follows_at_once_is_seen_to_run(worker: Worker, writes: tuple[str, ...]) -> None:
    """The end of one call is booked when the next one runs already: a hang in it must not look idle."""
    first, second = call(1, writes), call(2)
    for each in (first, second):
        worker._deliver(each)
    worker.starts(first)
    worker.finished(outcome(first))
    worker.starts(second)
    worker._book_all()
    activity = worker._activity(0.0)
    assert (activity.number, activity.state) == (2, "runs")


def test_a_drop_between_a_calls_end_and_its_booking_frees_its_columns(worker: Worker) -> None:
    """Call 1 leaves columns, call 2 nothing; nobody holds them any more before the first is booked."""
    first, second = call(1, ("x",)), call(2)
    for each in (first, second):
        worker._deliver(each)
        worker.starts(each)
        worker.finished(outcome(each))
    worker._deliver(Drop((1,), (1,)))
    worker._book_all()
    assert worker.plane.held == {}
    assert worker._state(1).state == worker._state(2).state == "finished"
    assert sorted(message.number for message in worker.engine.sent if isinstance(message, Done)) == [1, 2]


def test_a_call_that_leaves_nothing_is_answered_before_the_loop_turns(worker: Worker) -> None:
    worker._deliver(call(1))
    worker.starts(call(1))
    worker.finished(outcome(call(1)))
    assert [message.number for message in worker.engine.sent] == [1]


def test_an_update_that_has_ended_is_never_said_to_be_safe_to_repeat(worker: Worker) -> None:
    update = call(1, kind="advancing")
    worker._deliver(update)
    worker.starts(update)
    worker.finished(outcome(update))
    worker._deliver(Inquire((1,)))
    assert worker.engine.sent[-1] == Answer(1, {1: CallState("finished", repeatable=False, visible=False)})
