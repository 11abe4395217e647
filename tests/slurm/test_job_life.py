"""Runs on a real Slurm, disturbed in every way: each ends with the samples and weights of an undisturbed
run.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpcflow.slurm import client
from tests.slurm.cluster import Cluster, Job, assert_same_training, hpcflow, until
from tests.slurm.conftest import local_slurm
from tests.training.programs import train
from tests.worlds import ROOT

ITERATIONS = 8
COMMON = ["placement=split", f"iterations={ITERATIONS}", "run.eval=false"]
REWARD = "models.reward.function=tests.slurm.programs:slow_lower_half"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, by mpiexec and in one go."""
    words = ["experiment=tiny", REWARD, "models.reward.args={pause: 0}"]
    return train(tmp_path_factory.mktemp("undisturbed"), COMMON, words)[0].path


@pytest.fixture
def begin(cluster: Cluster, fork_server: str, tmp_path: Path):
    """Submit the slow run over head and two components; returns it when two iterations are committed."""

    def submit(*words: str, pause: float = 0.1) -> Job:
        job = cluster.submit(
            "experiment=tiny",
            "cluster=cpu_nodes",
            REWARD,
            f"models.reward.args={{pause: {pause}}}",
            f"run.dir={tmp_path}",
            "cluster.slurm.relaunches=1",
            *COMMON,
            *words,
        )
        job.says(r"iteration 2/")
        return job

    return submit


def test_usr2_stops_within_seconds_and_the_job_comes_back(cluster: Cluster, begin, undisturbed: Path) -> None:
    job = begin()
    cluster.signal(job, "USR2")
    job.says("hpcflow: queued again", 15)
    job.ends("COMPLETED")
    assert re.search(r"stopped by SIGUSR2, after a checkpoint", job.log)
    assert [a[:2] for a in job.attempts()] == [(0, 75), (1, 0)]
    assert len(re.findall(r"iteration \d+/8  reward", job.log)) == ITERATIONS  # nothing was computed twice
    assert_same_training(job.run, undisturbed)


def test_usr2_does_not_wait_for_a_call_that_takes_long(
    cluster: Cluster, begin, tmp_path: Path, undisturbed: Path
) -> None:
    """The iteration is abandoned after a grace of ten seconds, and computed again from its beginning."""
    job = begin(*bad_critic("hang", tmp_path / "once"))
    until((tmp_path / "once").exists, 30, lambda: job.log)
    start = time.monotonic()
    cluster.signal(job, "USR2")
    job.says("stopped by SIGUSR2, the iteration at hand is abandoned", 30)
    assert time.monotonic() - start < 20
    job.ends("COMPLETED")
    assert_same_training(job.run, undisturbed)


def bad_critic(how: str, once: Path | None) -> list[str]:
    env = {"MISBEHAVE": how} | ({"ONCE": str(once)} if once else {})
    words = ", ".join(f"{key}: {value}" for key, value in env.items())
    return ["models.critic.worker=tests.slurm.programs:BadCritic", f"cluster.env={{{words}}}"]


def test_requeue(begin, undisturbed: Path) -> None:
    job = begin()
    client.run("scontrol", "requeue", job.id)
    job.says("stopped by SIGTERM", 15)
    job.ends("COMPLETED")
    assert job.attempts()[-1][:2] == (1, 0)
    assert_same_training(job.run, undisturbed)


@pytest.mark.parametrize(
    "how, says",
    [
        ("kill", r"rank \d \(pid \d+ on .*\) was killed by SIGKILL"),
        ("raise", "ArithmeticError: the critic of this test fails"),
    ],
)
def test_a_failed_step_is_launched_again(
    begin, tmp_path: Path, undisturbed: Path, how: str, says: str
) -> None:
    job = begin(*bad_critic(how, tmp_path / "once"))
    job.says("launching again after exit code", 30)
    job.ends("COMPLETED")
    assert re.search(says, job.log), job.log
    assert [a[0] for a in job.attempts()] == [0, 0]  # one allocation
    assert_same_training(job.run, undisturbed)


def test_no_progress_is_not_launched_for_ever(begin) -> None:
    """The failure of a rank in the last component is the job's exit code."""
    job = begin(*bad_critic("raise", None))
    job.ends("FAILED")
    assert "giving up: launches in a row that failed without a new iteration: 2" in job.log
    done = [iterations for _, code, iterations in job.attempts() if code]
    assert len(done) == len(job.attempts()) <= 4 and done[-1] == done[-2] == done[-3]


@pytest.mark.slow
def test_time_limit(begin, undisturbed: Path) -> None:
    """The job stops half a minute before its limit of one, and comes back until the work is done."""
    job = begin("cluster.slurm.time=00:01:00", "cluster.slurm.signal_s=10", pause=1.2)
    job.says("stopped before the job's time limit, after a checkpoint", 60)
    job.ends("COMPLETED", 240)
    assert_same_training(job.run, undisturbed)


@pytest.mark.slow
def test_a_lost_node_brings_the_job_back(cluster: Cluster, begin, undisturbed: Path) -> None:
    job = begin(pause=0.5)
    node = client.run("squeue", "-h", "-o", "%i %N", "-j", job.id)
    node = dict(line.split() for line in node.splitlines())[f"{job.id}+2"]
    os.kill(cluster.pid(f"slurmd.{node}"), signal.SIGKILL)
    until(lambda: job.state == "PENDING", 60, lambda: str(job.state))
    assert local_slurm("up", cluster.folder).returncode == 0
    job.ends("COMPLETED")
    assert_same_training(job.run, undisturbed)


def test_a_job_runs_what_was_submitted(cluster: Cluster, tmp_path: Path) -> None:
    """Code of one's own, edited while the job waits, does not change the job."""
    source = tmp_path / "mine.py"
    source.write_text("def reward(prompt, response, record): return 0.25\n")
    words = ["experiment=tiny", "placement=colocate", "iterations=1", "models.reward.function=mine:reward"]
    hold = ["cluster.slurm.flags={hold: true}", f"run.dir={tmp_path}/runs"]
    os.environ["PYTHONPATH"] = str(ROOT)
    done = hpcflow("submit", *words, *hold, cwd=tmp_path)
    job = re.search(r"submitted job (\d+)\nrun directory (.+)\n", done.stdout)
    assert job, done.stderr
    cluster.jobs.append(job[1])
    source.write_text("raise SystemExit('edited')\n")
    for component in (0, 1):
        client.run("scontrol", "release", f"{job[1]}+{component}")
    submitted = Job(job[1], Path(job[2]))
    submitted.ends("COMPLETED")
    assert "reward +0.250" in submitted.log
