"""One Slurm job of a run: checked, copied, submitted; or only written, or only tried."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hpcflow import run_folder
from hpcflow.check import check
from hpcflow.check_models import missing_models
from hpcflow.config import Config, dump
from hpcflow.schema import ConfigError
from hpcflow.slurm import client, script, site, snapshot

JOBS = "jobs.jsonl"
ANY_NUMBER_OF_NODES = 1 << 30


def refuse_problems(config: Config) -> None:
    """`ConfigError` naming everything that is wrong with the config, or with it on this cluster."""
    problems = check(config, nodes=ANY_NUMBER_OF_NODES)  # memory: by component, in `site`
    problems = problems or [*missing_models(config), *site.problems(config)]
    if problems:
        raise ConfigError(problems)


def submit(
    config: Config, words: Sequence[str], run: Path | None = None, branch: int | None = None
) -> tuple[str, Path]:
    """Submit a new run, or the continuation of ``run`` with ``config``; (job id, run directory).

    ``branch``: the job goes on as after this iteration; when it starts, those after it count no more.

    ``words`` are the overrides of which ``config`` was composed. ValueError when a live job uses ``run``
    already.
    """
    refuse_problems(config)
    text = script.text(config, list(words))
    if run is None:
        run = run_folder.create(config)
    else:
        refuse_live(run)
    name = config.experiment or config.name
    path = snapshot.make(run, text, name, config)
    run_folder.write_config(run, snapshot.moved(config, run))
    logs = run / "job"
    logs.mkdir(exist_ok=True)
    there = str(run) if branch is None else f"{run}@{branch}"
    job = client.sbatch(str(path), ["--as-submitted", there], [f"--output={logs}/%j_0_log.out"])
    with (run / JOBS).open("a") as file:
        file.write(
            json.dumps({"time": time.time(), "job": job, "script": str(path), "argv": sys.argv}) + "\n"
        )
    return job, run


def write(config: Config, text: str) -> Path:
    """The folder in which the script and the resolved config now are; nothing is submitted."""
    folder = Path(config.run.dir).expanduser().absolute() / "dry-run" / config.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    (folder / "job.sh").write_text(text)
    return folder


def try_out(config: Config, words: Sequence[str]) -> str:
    """What Slurm says about whether and when the job would start. `ConfigError`, `SlurmError` when it would
    not.
    """
    refuse_problems(config)
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script.text(config, list(words)))
        file.flush()
        return client.run("sbatch", "--test-only", file.name)


def jobs(run: Path) -> list[str]:
    """The ids of the Slurm jobs in which ``run`` was, or is to be, computed; the oldest first."""
    found = []
    for name, key in ((JOBS, "job"), ("launches.jsonl", "slurm_job")):
        found += [str(job) for entry in run_folder.log_entries(run / name) if (job := entry.get(key))]
    return list(dict.fromkeys(found))


def refuse_live(run: Path) -> None:
    """ValueError when a job that waits or runs uses ``run``, or a launch outside Slurm does."""
    me = os.environ.get("SLURM_JOB_ID")
    for job, state in client.states([job for job in jobs(run) if job != me]).items():
        if state not in client.ENDED:
            raise ValueError(f"{run} is in use by job {job} ({state}); works: scancel {job}, or a new run")
    with run_folder.locked(run):
        pass
