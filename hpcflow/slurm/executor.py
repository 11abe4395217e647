"""A submitit executor of heterogeneous jobs, and a run's job as a submitit job.

Any function runs on all ranks of one MPI world over head and components, started by one srun; stock
submitit has one block of resources per job. Its conventions are kept: the folder with %j_submission.sh,
%j_%t_log.out and %j_%t_result.pkl, ``job.result()`` (the controller's), ``job.task(k).stdout()``, requeue
by ``checkpoint()``. Slurm's own names for a component are of no use here: in a heterogeneous step %j is the
component's id and %t is off by its index (22.05), so each task opens its own log; sacct and squeue call the
head ``83+0``.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from hpcflow.config import Config
from hpcflow.mpi.launch import container_flags
from hpcflow.slurm import client, script
from hpcflow.slurm.components import blocks


class HetInfoWatcher(slurm.SlurmInfoWatcher):
    """States of jobs, by the head component; from the queue where there is no accounting."""

    def update(self) -> None:
        waiting = sorted({job.split("_")[0] for job in self._registered - self._finished})
        self._num_calls += 1
        for job, state in client.states(waiting).items():
            self._info_dict[job] = {"JobID": job, "State": state}
        self._last_status_check = core._time.time()
        self._finished |= {
            job for job in self._registered - self._finished if self.is_done(job, mode="cache")
        }


class HetJob(slurm.SlurmJob):
    """A job whose result is that of its first task, the controller."""

    watcher = HetInfoWatcher(delay_s=2)

    def result(self) -> Any:
        return (self.task(0) if self._sub_jobs else self).results()[0]

    def done(self, force_check: bool = False) -> bool:
        return self.task(0).done(force_check) if self._sub_jobs else super().done(force_check)


class HetExecutor(slurm.SlurmExecutor):
    """Submits functions as heterogeneous jobs with the components, limits and site settings of ``config``.

    folder: where submitit keeps a job's files, may contain %j. Jobs are submitted one by one: Slurm has no
    arrays of heterogeneous jobs.
    """

    job_class = HetJob

    def __init__(self, folder: Path | str, config: Config, max_num_timeout: int = 3) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout)
        self.config = config

    @classmethod
    def name(cls) -> str:
        return "slurm"  # the environment that submitit looks for inside the job

    def _num_tasks(self) -> int:
        return sum(len(block.ranks) for block in blocks(self.config))

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[core.Job[Any]]:
        one_by_one = core.PicklingExecutor._internal_process_submissions
        return [job for submission in delayed_submissions for job in one_by_one(self, [submission])]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        slurm_config, count = self.config.cluster.slurm, len(blocks(self.config))
        paths = utils.JobPaths(folder=self.folder)
        names = {"%j": "${SLURM_JOB_ID}", "%t": "${SLURM_PROCID}"}
        out, err = (_replace(str(path), names) for path in (paths.stdout, paths.stderr))
        log = f'exec "$@" >>"{out}" 2>>"{err}"'
        groups = [f"--het-group=0-{count - 1}"] if count > 1 else []
        words = [
            "srun",
            *groups,
            f"--mpi={slurm_config.mpi}",
            "--kill-on-bad-exit=1",
            "--wait=60",
            "--unbuffered",
        ]
        words += [*slurm_config.srun_flags, *container_flags(slurm_config), "sh", "-c", log, "sh"]
        lines = script.directives(self.config, signal="USR2").replace(
            "--output=%x-%j.log", f"--output={_job_log(paths)}"
        )
        setup = "".join(line + "\n" for line in slurm_config.setup)
        start = "export SUBMITIT_EXECUTOR=slurm\n" + shlex.join(words)
        return f"#!/bin/bash\n{lines}set -euo pipefail\n{setup}{start} {command}\n"


def job_of(run: Path, job: str, ranks: int) -> HetJob:
    """The submitted job of a run directory, with submitit's ways to ask for state and logs and to cancel."""
    return HetJob(run / "job", job, list(range(ranks)))


def _job_log(paths: utils.JobPaths) -> str:
    return str(paths.folder / "%j_job.out")


def _replace(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text
