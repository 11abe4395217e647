"""A local Slurm in tests: submit runs, watch them, and compare what they did."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcflow.slurm import client
from hpcflow.store import open as open_run
from tests.training.test_same_training import digests, equal
from tests.worlds import ROOT


def until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s; {what()}"
        time.sleep(0.1)


def hpcflow(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcflow", *words], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@dataclass
class Job:
    """A submitted run."""

    id: str
    run: Path

    @property
    def log(self) -> str:
        path = self.run / "job" / f"{self.id}_0_log.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, pattern: str, seconds: float = 90) -> None:
        """Wait until the log has ``pattern``."""
        until(
            lambda: re.search(pattern, self.log) is not None,
            seconds,
            lambda: f"no {pattern!r} in\n{self.log}",
        )

    @property
    def state(self) -> str | None:
        return client.states([self.id]).get(self.id)

    def ends(self, state: str, seconds: float = 180) -> None:
        until(lambda: self.state in client.ENDED, seconds, lambda: f"{self.state}:\n{self.log}")
        assert self.state == state, self.log

    def attempts(self) -> list[tuple[int, int, int]]:
        """(restart, exit code, iterations committed so far) of each launch that ended inside the job."""
        path = self.run / "attempts.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [(line["restart"], line["code"], line["iterations"]) for line in lines]


class Cluster:
    """The Slurm in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[str] = []

    def submit(self, *words: str) -> Job:
        done = hpcflow("submit", *words)
        found = re.search(r"submitted job (\d+)\nrun directory (.+)\n", done.stdout)
        assert found, done.stderr
        self.jobs.append(found[1])
        return Job(found[1], Path(found[2]))

    def signal(self, job: Job, name: str) -> None:
        client.run("scancel", "--batch", f"--signal={name}", job.id)

    def pid(self, daemon: str) -> int:
        return int((self.folder / "run" / f"{daemon}.pid").read_text())

    def cancel_all(self) -> None:
        for job in self.jobs:
            client.run("scancel", job)
        until(
            lambda: set(client.states(self.jobs).values()) <= set(client.ENDED),
            30,
            lambda: str(client.states(self.jobs)),
        )


def assert_same_training(run: Path, undisturbed: Path) -> None:
    """Exactly the same samples, columns and weights."""
    a, b = open_run(run), open_run(undisturbed)
    assert a.iterations == b.iterations
    for number in b.iterations:
        left, right = a.iteration(number), b.iteration(number)
        assert torch.equal(left.ids, right.ids)
        for name in ("response_ids", "rollout_log_probs", "reward", "values", "advantages"):
            assert equal(left.columns[name], right.columns[name]), (number, name)
    assert digests(a) == digests(b)
