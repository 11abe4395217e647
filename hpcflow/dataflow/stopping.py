"""Stopping before the work is done: told by a signal, or because no further iteration fits before the time
limit.

What is committed is kept and the run continues from there, so stopping is always safe; the aim is to lose
little. At an iteration's end a checkpoint is written and the run stops. An iteration that does not end
within a grace is abandoned. Needs no torch: ranks listen before they import it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

CONTINUE_LATER = 75
"""Exit code (EX_TEMPFAIL) of a run that stopped because of SIGUSR2 or its time limit, to be continued."""

GRACE_SECONDS = {signal.SIGUSR2: 10.0, signal.SIGTERM: 3.0, signal.SIGINT: 3.0}
"""For the iteration to end by itself. After SIGTERM Slurm kills in KillWait seconds (30 by default)."""

MARGIN_SECONDS = 30.0
"""Between the end of the last checkpoint and the time limit."""

received: list[int] = []
"""Signals that came before the world stood."""


class Interrupted(RuntimeError):
    """The run was asked to stop. ``code`` is the exit code that says what is to happen next."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


def listen(controls: bool) -> None:
    """From now on no signal ends this rank: the controller remembers it, the others leave it to the
    controller.
    """
    for number in GRACE_SECONDS:
        signal.signal(number, (lambda n, _: received.append(n)) if controls else signal.SIG_IGN)


class Stopping:
    """Decides when a run stops. ``signals``: numbers received so far, in order; times in unix seconds."""

    def __init__(self, signals: Callable[[], list[int]], say: Callable[[str], None]) -> None:
        self.signals, self.say = signals, say
        self.limit = float(os.environ.get("HPCFLOW_END_TIME", "inf"))
        self.iteration_s = self.checkpoint_s = 0.0
        self._told: float | None = None

    def tick(self) -> None:
        """Called often. Raises `Interrupted` when a signal came and the grace is over."""
        number = self._signal()
        if number is None:
            return
        now = time.time()
        if self._told is None:
            self._told = now
            self.say(f"{signal.Signals(number).name}: stopping, at the latest in {GRACE_SECONDS[number]:g} s")
        if now > self._told + GRACE_SECONDS[number]:
            raise self._by_signal(number, "the iteration at hand is abandoned")

    def took(self, iteration_s: float) -> None:
        """An iteration took so many seconds."""
        self.iteration_s = max(self.iteration_s, iteration_s)

    def due(self) -> Interrupted | None:
        """At an iteration's end: why to stop now, once its checkpoint is written; None to go on."""
        number = self._signal()
        if number is not None:
            return self._by_signal(number, "after a checkpoint")
        left = self.limit - time.time()
        needed = 1.2 * self.iteration_s + 1.5 * self.checkpoint_s + MARGIN_SECONDS
        if left < needed:
            return Interrupted(
                f"stopped before the job's time limit, after a checkpoint: {left:.0f} s are left, "
                f"the next iteration and its checkpoint may take {needed:.0f}",
                CONTINUE_LATER,
            )
        return None

    def _signal(self) -> int | None:
        return next((n for n in [*received, *self.signals()] if n in GRACE_SECONDS), None)

    @staticmethod
    def _by_signal(number: int, how: str) -> Interrupted:
        code = CONTINUE_LATER if number == signal.SIGUSR2 else 128 + number
        return Interrupted(f"stopped by {signal.Signals(number).name}, {how}", code)
