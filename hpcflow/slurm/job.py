"""The life of a run inside a Slurm job: launch, launch again after a crash, queue again before the time is
up.

One process on the first node of the head component keeps a run alive. Each end of a launch is a line of
``RUN/attempts.jsonl``: {start, time, job, restart, queued_s, components, code, iterations}. An attempt
makes progress when more iterations are committed after it than ever before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hpcflow import run_folder
from hpcflow.config import Config
from hpcflow.dataflow.stopping import CONTINUE_LATER
from hpcflow.slurm import client
from hpcflow.slurm.components import blocks

REQUEUES_WITHOUT_PROGRESS = 2
KILLED_BY_USR2 = 140  # a rank that had not begun to listen

ATTEMPTS = "attempts.jsonl"


def inside() -> bool:
    """Whether this is the batch script of a Slurm job, or a shell in an allocation: not a rank."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


def in_batch() -> bool:
    """Whether this is the batch script of a Slurm job, which can be queued again."""
    return inside() and os.environ.get("SLURM_JOB_NAME") != "interactive" and "SLURM_TASK_PID" in os.environ


def restarted() -> bool:
    """Whether Slurm has queued this job again after it ran before."""
    return inside() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def environment(config: Config) -> dict[str, str]:
    """What ranks are told about their job: the time limit, and which of them have GPUs."""
    if not inside():
        return {}
    end = client.end_time()
    limit = {"HPCFLOW_END_TIME": str(end)} if end is not None else {}
    # By the rank, from what the job asked for; the config's components may not be those of this allocation.
    spans = ",".join(f"{len(block.ranks)}:{block.component.gpus}" for block in blocks(config))
    return limit | ({"HPCFLOW_GPUS": spans} if "SLURM_HET_SIZE" in os.environ else {})


def keep_alive(run: Path, config: Config, launch: Callable[[], int]) -> int:
    """Launch until the run is complete, was told to stop, or fails without progress. Returns the job's exit
    code.
    """
    slurm, failures, allocation = config.cluster.slurm, 0, _allocation(config)
    while True:
        start = time.time()
        code = launch()
        if code == KILLED_BY_USR2:
            code = CONTINUE_LATER
        progress = _record(run, {"start": start, **allocation, "code": code})
        if code == CONTINUE_LATER:
            return _queue_again(run, slurm.requeue)
        if code == 0 or code in (130, 143):
            return code
        failures = 0 if progress else failures + 1
        if failures > slurm.relaunches:
            say(f"giving up: launches in a row that failed without a new iteration: {failures}")
            return code
        say(f"launching again after exit code {code}, inside the same allocation")


def _allocation(config: Config) -> dict:
    """What this attempt holds, and for how long it had waited."""
    times = client.times()
    components = [
        {"name": block.name, "nodes": block.nodes, "ranks": len(block.ranks), "gpus": block.component.gpus}
        for block in blocks(config)
    ]
    return {
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "queued_s": times["StartTime"] - times["EligibleTime"]
        if {"StartTime", "EligibleTime"} <= times.keys()
        else None,
        "components": components,
    }


def _record(run: Path, facts: dict) -> bool:
    """Write the end of a launch down; whether it made progress."""
    from hpcflow import store  # h5py only now: this process waits for hours

    done = max(store.open(run).iterations, default=-1) + 1
    before = max((attempt["iterations"] for attempt in attempts(run)), default=0)
    entry = {"time": time.time(), **facts, "iterations": done}
    with (run / ATTEMPTS).open("a") as file:
        file.write(json.dumps(entry) + "\n")
    return done > before


def attempts(run: Path) -> list[dict]:
    """The ends of launches inside Slurm jobs so far, oldest first."""
    return run_folder.log_entries(run / ATTEMPTS)


def _queue_again(run: Path, wanted: bool) -> int:
    """Ask Slurm to start this job again later, unless that has not helped. Returns the exit code of this
    attempt.
    """
    if not (wanted and in_batch()):
        return CONTINUE_LATER
    idle = idle_attempts([attempt["iterations"] for attempt in attempts(run)])
    if idle > REQUEUES_WITHOUT_PROGRESS:
        say(
            f"not queued again: {idle} attempts in a row ended without a new iteration. "
            "The time limit may be too short"
        )
        return CONTINUE_LATER
    client.run("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    say("queued again; the run continues from its last committed iteration")
    return CONTINUE_LATER


def idle_attempts(done: list[int]) -> int:
    """How many attempts in a row, up to the last one, committed no iteration that was not committed before.

    ``done``: committed iterations after each attempt.
    """
    best = idle = 0
    for iterations in done:
        idle = 0 if iterations > best else idle + 1
        best = max(best, iterations)
    return idle


def find_run(parent: Path) -> Path | None:
    """The run directory in ``parent`` that this Slurm job began, before it was queued again."""
    begun = sorted(parent.glob("*/launches.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True)
    return next((path.parent for path in begun if launched(path.parent)), None)


def launched(run: Path) -> bool:
    """Whether this Slurm job has launched ``run`` before."""
    me = os.environ.get("SLURM_JOB_ID")
    return any(entry.get("slurm_job") == me for entry in run_folder.log_entries(run / "launches.jsonl"))


def say(text: str) -> None:
    print(f"hpcflow: {text}", file=sys.stderr, flush=True)
