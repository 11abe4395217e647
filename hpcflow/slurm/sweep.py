"""Sweeps: one run for each point, as one Slurm job each where there is Slurm, one after another on this
machine else.

A sweep's folder and the run directory of each point are named by what the user wrote, so the same sweep
started again goes on: finished points are skipped, others continue. The failure of a point concerns that
point only.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcflow import run_folder
from hpcflow.config import Config, compose, load
from hpcflow.slurm import client, submission

POLL_SECONDS = 2.0


@dataclass
class Point:
    """One combination of the swept values; ``state`` is what became of it."""

    words: list[str]
    name: str
    config: Config
    run: Path
    state: str = "waits"
    job: str | None = None
    process: subprocess.Popen | None = field(default=None, repr=False)


def points(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each point, in the order of Hydra's basic sweeper: the last key varies fastest."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_overrides(list(words))
    return [list(point) for batch in BasicSweeper.split_arguments(parsed, None) for point in batch]


def run(words: Sequence[str], config_dir: str | None = None, at_once: int = 4) -> int:
    """Run every point to its end and print the comparison; 0, or 1 when a point failed."""
    sweep = _begin(list(words), config_dir)
    drive(sweep, at_once)
    print(comparison(sweep))
    return int(any(point.state != "finished" for point in sweep))


def drive(sweep: list[Point], at_once: int) -> None:
    """Start the points, ``at_once`` at a time, and wait for all of them."""
    slurm = client.available()
    limit = at_once if slurm else 1
    while any(point.state in ("waits", "runs") for point in sweep):
        _look(sweep)
        free = limit - sum(point.state == "runs" for point in sweep)
        for point in [p for p in sweep if p.state == "waits"][: max(0, free)]:
            _start(point, slurm)
        # States are asked for: neither Slurm nor a process calls back.
        time.sleep(POLL_SECONDS if slurm else 0.2)


def _begin(words: list[str], config_dir: str | None) -> list[Point]:
    """All points, composed and checked before any of them starts; those that are finished already are
    marked.
    """
    found, swept = [], points(words)
    shared = set.intersection(*(set(point) for point in swept))
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
    for point in swept:
        name = re.sub(r"[^\w=.,+-]+", "_", ",".join(w for w in point if w not in shared)) or "only"
        config = compose(point, config_dir)
        folder = Path(config.run.dir).expanduser().absolute() / f"sweep-{config.name}-{digest}"
        found.append(Point(point, name, config, folder / name))
    print(f"{len(found)} points in {found[0].run.parent}", flush=True)
    for point in found:
        if (point.run / "config.yaml").is_file():
            point.config = load(point.run / "config.yaml")
            if run_folder.complete(point.run, point.config):
                point.state = "finished"
                print(f"{point.name}: finished before, skipped", flush=True)
        elif client.available():
            submission.refuse_problems(point.config)
    return found


def _start(point: Point, slurm: bool) -> None:
    begun = (point.run / "config.yaml").is_file()
    try:
        if not begun:
            run_folder.create(point.config, point.run)
        if slurm:
            live = next(
                (
                    job
                    for job, s in client.states(submission.jobs(point.run)).items()
                    if s not in client.ENDED
                ),
                None,
            )
            point.job = live or submission.submit(point.config, point.words, point.run)[0]
        else:
            words = [sys.executable, "-m", "hpcflow", "train", "--as-submitted", str(point.run)]
            with (point.run / "log").open("a") as log:
                point.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    except (ValueError, OSError) as error:
        point.state = "failed"
        print(f"{point.name}: not started: {error}", flush=True)
        return
    point.state = "runs"
    print(
        f"{point.name}: {'job ' + point.job if point.job else 'started'}{', continues' if begun else ''}",
        flush=True,
    )


def _look(sweep: list[Point]) -> None:
    """Find out which of the running points have ended, and how."""
    running = [point for point in sweep if point.state == "runs"]
    states = client.states([point.job for point in running if point.job])
    for point in running:
        if point.process is not None:
            ended = point.process.poll() is not None
        else:
            # A job that Slurm has forgotten ended long ago.
            ended = states.get(point.job or "", "COMPLETED" if states else "PENDING") in client.ENDED
        if ended:
            complete = run_folder.complete(point.run, point.config)
            point.state = "finished" if complete else "failed"
            print(f"{point.name}: {point.state}", flush=True)


def comparison(sweep: list[Point]) -> str:
    """A table of the points: state, iterations, reward, speed, and the cost of an update."""
    from hpcflow import report, store

    rows = [
        (
            "point",
            "state",
            "iterations",
            "reward, last quarter",
            "tokens/s",
            "s/iteration",
            "accelerator-s/update",
        )
    ]
    for point in sweep:
        history = store.open(point.run).history() if (point.run / "config.yaml").is_file() else []
        numbers = ["", "", "", ""]
        if history:
            last = report.quarters(history)[-1]
            wall = [facts["wall_s"] for facts in history if "wall_s" in facts]
            cost = [facts["accelerator_s"] for facts in history if "accelerator_s" in facts]
            numbers = [
                str(report.reward(last)),
                f"{report.rate(history):.1f}",
                f"{sum(wall) / max(1, len(wall)):.2f}",
                f"{sum(cost) / max(1, len(cost)):.2f}",
            ]
        rows.append((point.name, point.state, f"{len(history)}/{point.config.iterations}", *numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
