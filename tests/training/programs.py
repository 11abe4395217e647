"""Whole runs on worlds of MPI ranks, started from the fork server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcflow import run_folder
from hpcflow.config import Config, compose
from hpcflow.store import open as open_run
from hpcflow.store.reader import Run
from tests.worlds import Result, run_world

TINY = ["experiment=tiny", "models.reward.function=tests.training.judges:lower_half"]


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


def train(
    folder: Path, overrides: list[str], base: list[str] | None = None, **options: Any
) -> tuple[Run, Result]:
    """A complete run in ``folder``."""
    config = compose([*(TINY if base is None else base), f"run.dir={folder}", *overrides])
    run = run_folder.create(config)
    result = start(config, run, **options).check()
    return open_run(run), result
