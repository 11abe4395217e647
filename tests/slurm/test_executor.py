"""Functions as heterogeneous jobs, with submitit's conventions, on a real Slurm."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import submitit

from hpcflow.config import compose
from hpcflow.slurm.executor import HetExecutor
from tests.slurm import functions
from tests.slurm.cluster import Cluster, until
from tests.worlds import ROOT

WORDS = [
    "experiment=tiny",
    "placement=split",
    "cluster=cpu_nodes",
    "cluster.components.workers.gpus=1",
    "cluster.slurm.time=00:05:00",
]


@pytest.fixture
def executor(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HetExecutor:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return HetExecutor(tmp_path / "%j", compose(WORDS))


def test_one_world_over_all_components(executor: HetExecutor) -> None:
    job = executor.submit(functions.world_of_ranks)
    assert job.result() == {"total": 6, "size": 4, "gpus": ["", "", "", "0"]}
    assert [job.task(k).stdout().count(f"rank {k} of 4 on n") for k in range(4)] == [1, 1, 1, 1]
    until(lambda: job.state == "COMPLETED", 20, lambda: job.state)
    assert job.paths.submission_file.name == f"{job.job_id}_submission.sh"


def test_a_rank_that_dies_fails_the_job(executor: HetExecutor) -> None:
    job = executor.submit(functions.world_of_ranks, crash=3)
    job._results_timeout_s = 1  # how long submitit waits for a result after the end
    with pytest.raises((submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError)):
        job.result()
    until(lambda: job.state == "FAILED", 20, lambda: job.state)


def test_checkpoint_and_requeue(executor: HetExecutor, cluster: Cluster) -> None:
    job = executor.submit(functions.Counts())
    until(lambda: "Loading pickle" in str(job.task(0).stdout()), 30, lambda: str(job.task(0).stdout()))
    time.sleep(1)  # submitit's handlers are set up after that line
    job._interrupt(timeout=False)
    start, last = job.result()
    assert last == 9 and 0 <= start < 9
    assert "interrupted at" in job.task(0).stdout()
