"""Slurm's command-line tools, each call with a deadline: a client blocks for minutes when slurmctld is
gone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime

DEADLINE_SECONDS = 30.0
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED",
    "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "REVOKED",
)  # fmt: skip


class SlurmError(ValueError):
    """A tool of Slurm is missing, does not answer, or refuses; the message holds what it said."""


def available() -> bool:
    """Whether jobs can be submitted from here."""
    return shutil.which("sbatch") is not None


def run(*words: str, deadline: float = DEADLINE_SECONDS) -> str:
    """What ``words`` print to stdout and stderr. `SlurmError` when they fail or take too long."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=deadline, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise SlurmError(
            f"there is no {words[0]} on PATH: jobs are submitted from a login node of a cluster; "
            "on this machine works: hpcflow train, or a Slurm of its own by `bash tools/local_slurm.sh up`"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} did not answer within {deadline:g} s: is slurmctld up?") from None
    said = (done.stdout + done.stderr).strip()
    if done.returncode:
        raise SlurmError(f"{words[0]} refused: {said or f'exit status {done.returncode}'}")
    return said


def sbatch(script: str, arguments: Sequence[str] = (), options: Sequence[str] = ()) -> str:
    """Submit; the job's id (of the first component). `SlurmError` with Slurm's reason."""
    said = run("sbatch", *options, script, *arguments)
    found = re.search(r"Submitted batch job (\d+)", said)
    if not found:
        raise SlurmError(f"sbatch said: {said}")
    return found[1]


def states(jobs: Sequence[str]) -> dict[str, str]:
    """The state of each job that Slurm still knows, e.g. {"83": "RUNNING"}; a heterogeneous job's head
    speaks for it.

    Accounting where there is any, else the queue, which shows ended jobs for a while (MinJobAge).
    """
    if not jobs:
        return {}
    ids = ",".join(jobs)
    for words in (
        ["squeue", "-h", "-t", "all", "-o", "%i|%T", "-j", ids],
        ["sacct", "-n", "-P", "-X", "-o", "JobID,State", "-j", ids],
    ):
        try:
            said = run(*words)
        except SlurmError:
            continue
        found = {}
        for line in said.splitlines():
            name, _, state = line.partition("|")
            head, _, component = name.partition("+")
            if component in ("", "0") and state:
                found[head] = state.split()[0]
        if found:
            return found
    return {}


def times() -> dict[str, float]:
    """EligibleTime, StartTime, EndTime and the like of the job around this process, in unix seconds, as far
    as known.
    """
    try:
        said = run("scontrol", "show", "job", "-o", os.environ["SLURM_JOB_ID"]).splitlines()
    except (KeyError, SlurmError):
        return {}
    found = {}
    for name, text in re.findall(r"(\w+Time)=(\d{4}-\d\d-\d\dT\S+)", said[0] if said else ""):
        found[name] = datetime.fromisoformat(text).timestamp()
    return found


def end_time() -> float | None:
    """When the time limit of the job around this process ends it, in unix seconds; None without limit or
    job.
    """
    return times().get("EndTime")
