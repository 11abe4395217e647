"""What a person sees while a run goes on: one line per iteration, and between them the node that is running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

NOTICE_SECONDS = 15.0  # without a terminal: a line about the running node this often
WIDE_GAP = 0.5
"""Mean difference of the engines' log-probs of a token beyond any rounding (bfloat16 stays below 0.1)."""


class Progress:
    """Writes to stdout. ``running()`` names the node that is being computed."""

    def __init__(self, iterations: int, running: Callable[[], str]) -> None:
        self.iterations, self.running = iterations, running
        self.terminal = os.environ.get("HPCFLOW_TERMINAL") == "1"
        self.iteration = 0
        self._seconds: list[float] = []
        self._start = self._noticed = time.monotonic()
        self._shown = 0

    def begin(self, iteration: int) -> None:
        self.iteration, self._start = iteration, time.monotonic()

    def tick(self) -> None:
        """Called often while waiting."""
        now = time.monotonic()
        if now - self._noticed < (0.5 if self.terminal else NOTICE_SECONDS):
            return
        self._noticed = now
        text = (
            f"iteration {self.iteration + 1}/{self.iterations}  {now - self._start:5.1f} s  {self.running()}"
        )
        if self.terminal:
            sys.stdout.write("\r" + text.ljust(self._shown))
            self._shown = len(text)
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def end(self, metrics: dict[str, float]) -> None:
        """The line of a committed iteration."""
        self._seconds.append(time.monotonic() - self._start)
        recent = self._seconds[-5:]
        left = (self.iterations - self.iteration - 1) * sum(recent) / len(recent)
        parts = [f"iteration {self.iteration + 1}/{self.iterations}"]
        for name, form in (("reward", "{:+.3f}"), ("kl", "{:.4f}"), ("tokens_per_s", "{:.1f}")):
            if name in metrics:
                parts.append(f"{name} {form.format(metrics[name])}")
        parts += [
            f"{name.removesuffix('/skipped')} skipped {100 * value:.0f} % of its steps"
            for name, value in metrics.items()
            if name.endswith("/skipped") and value > 0
        ]
        parts += [
            f"{name.removesuffix('/rollout_gap')}'s engines disagree by {value:.2f} per token's log-prob"
            for name, value in metrics.items()
            if name.endswith("/rollout_gap") and value > WIDE_GAP
        ]
        parts += [f"{self._seconds[-1]:.1f} s", f"left {_clock(left)}"]
        self.say("  ".join(parts))

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.terminal and self._shown:
            sys.stdout.write("\r" + " " * self._shown + "\r")
            self._shown = 0
        print(text, flush=True)
        self._noticed = time.monotonic()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
