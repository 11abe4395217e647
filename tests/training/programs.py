"""Whole runs on worlds of MPI ranks, started from the fork server, and rewards for models that speak no language."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hpcflow import run_folder
from hpcflow.config import Config, compose
from hpcflow.store import open as open_run
from hpcflow.store.reader import Run
from tests.worlds import Result, run_world

TINY = ["experiment=tiny", "models.reward.function=tests.training.programs:lower_half"]


def lower_half(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Share of the tokens t0 ... t255 of 512: a random model has 0.5, and can learn 1."""
    numbers = [int(word[1:]) for word in response.split() if word[:1] == "t"]
    return sum(number < 256 for number in numbers) / max(1, len(numbers))


def upper_half(prompt: str, response: str, record: dict[str, Any], text: str = "") -> float:
    """Share of the tokens t256 ... t511: what `lower_half` is not."""
    return 1.0 - lower_half(prompt, response, record)


def echo_tool(prompt: str, response: str, record: dict[str, Any], form: str = "") -> str:
    """Says the response's first word again, to every other response (by its text)."""
    return response.split()[0] if response.split() and sum(map(ord, response)) % 2 else ""


def fails_sometimes(prompt: str, response: str, record: dict[str, Any], how: str) -> float:
    """Fails in one way for about a quarter of the responses, decided by their text."""
    score = lower_half(prompt, response, record)
    if sum(map(ord, response)) % 4 == 0:
        if how == "raise":
            raise ValueError("cannot judge this")
        if how == "hang":
            time.sleep(3600)
        if how == "crash":
            os._exit(11)
        return float("nan")
    return score


def start(
    config: Config,
    run: Path,
    *,
    vllm: bool = False,
    timeout: float = 180,
    fault: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Launch (or continue) a run; returns how the world ended. ``fault``: see `tests.training.faults`."""
    run_folder.record_launch(run, config, resumed=False)
    arguments = {"run": str(run), "fault": fault}
    function = "tests.training.faults:be_rank"
    return run_world(config.world_size, function, arguments, vllm=vllm, timeout=timeout, **options)


def train(folder: Path, overrides: list[str], base: list[str] | None = None, **options: Any) -> tuple[Run, Result]:
    """A complete run in ``folder``."""
    config = compose([*(TINY if base is None else base), f"run.dir={folder}", *overrides])
    run = run_folder.create(config)
    result = start(config, run, **options).check()
    return open_run(run), result
