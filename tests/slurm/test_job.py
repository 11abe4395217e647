"""Decisions inside a job, and what is read from Slurm's tools, without Slurm."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from hpcflow import run_folder
from hpcflow.config import compose
from hpcflow.dataflow import stopping
from hpcflow.dataflow.stopping import CONTINUE_LATER, Interrupted, Stopping
from hpcflow.mpi import launch, preflight
from hpcflow.slurm import client, job, usage


@pytest.mark.parametrize(
    "done, idle",
    [([3], 0), ([0], 1), ([0, 0], 2), ([2, 2], 1), ([2, 1, 2], 2), ([2, 2, 3], 0), ([5, 6, 6, 6, 6], 3)],
)
def test_attempts_without_progress(done: list[int], idle: int) -> None:
    assert job.idle_attempts(done) == idle


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run inside a batch job with tools that only write down how they are called; calls keep_alive."""
    calls = tmp_path / "calls"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("scontrol", "squeue"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_TASK_PID": "1", "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    config = compose(["experiment=tiny", f"run.dir={tmp_path}/runs", "cluster.slurm.relaunches=1"])
    run = run_folder.create(config)

    def keep_alive(*codes: int) -> tuple[int, bool]:
        """Exit codes of launches that commit nothing -> (the job's exit code, queued again or not)."""
        left = list(codes)
        calls.write_text("")
        code = job.keep_alive(run, config, lambda: left.pop(0))
        assert not left
        return code, "scontrol requeue 7" in calls.read_text()

    return keep_alive


def test_what_becomes_of_an_exit_code(batch) -> None:
    assert batch(0) == (0, False)
    assert batch(1, 1) == (1, False)  # one relaunch, no progress
    assert batch(1, 0) == (0, False)
    assert batch(143) == (143, False)  # SIGTERM: who sent it knows what is next


def test_a_job_without_progress_is_queued_again_only_twice(batch) -> None:
    assert [batch(CONTINUE_LATER) for _ in range(3)] == [(75, True), (75, True), (75, False)]


def test_a_rank_killed_by_usr2_before_it_listens_is_a_stop(batch) -> None:
    assert batch(128 + signal.SIGUSR2) == (CONTINUE_LATER, True)


def test_the_run_of_a_job_that_was_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("a", "6"), ("b", "7"), ("c", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "launches.jsonl").write_text(json.dumps({"slurm_job": number}) + "\n")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert job.find_run(tmp_path) == tmp_path / "b"
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert job.find_run(tmp_path) is None


def test_stopping_by_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[int] = []
    said: list[str] = []
    stop = Stopping(lambda: signals, said.append)
    stop.tick()
    assert stop.due() is None and not said
    signals.append(signal.SIGUSR2)
    stop.tick()
    assert said == ["SIGUSR2: stopping, at the latest in 10 s"]
    assert stop.due().code == CONTINUE_LATER
    now = time.time()
    monkeypatch.setattr(stopping.time, "time", lambda: now + 11)
    with pytest.raises(Interrupted, match="the iteration at hand is abandoned") as error:
        stop.tick()
    assert error.value.code == CONTINUE_LATER
    assert Stopping(lambda: [signal.SIGTERM], said.append).due().code == 143


def test_stopping_before_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCFLOW_END_TIME", "1000")
    monkeypatch.setattr(stopping.time, "time", lambda: 900.0)
    stop = Stopping(lambda: [], print)
    stop.took(50)
    assert stop.due() is None  # 60 + 30 s of 100
    stop.checkpoint_s = 10.0
    assert "100 s are left, the next iteration and its checkpoint may take 105" in str(stop.due())


def test_gpus_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [preflight.gpus_of(rank, "2:0,3:1,1:2") for rank in range(7)] == [0, 0, 1, 1, 1, 2, 0]
    for name, value in {"PMI_RANK": "3", "SLURM_LOCALID": "1", "HPCFLOW_GPUS": "2:0,4:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    preflight.check_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        ValueError, match=r"rank 3 \(the 2\. of its component .* needs 1 GPU .*VISIBLE_DEVICES=0:"
    ):
        preflight.check_gpus()


def test_srun_over_all_components(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for index, tasks in enumerate((2, 8, 4)):
        monkeypatch.setenv(f"SLURM_NTASKS_HET_GROUP_{index}", str(tasks))
    command = launch.launcher_command("srun", 14)
    assert {"--het-group=0-2", "--mpi=pmi2", "--kill-on-bad-exit=1"} <= set(command)
    assert not [word for word in command if word.startswith("--ntasks")]
    with pytest.raises(ValueError, match=r"2 \+ 8 \+ 4 = 14 tasks, placement and config need 4 ranks"):
        launch.launcher_command("srun", 4)


def test_containers() -> None:
    inside = "image: /i.sqsh, mounts: ['/a:/a', '/b:/b'], python: /opt/python"
    image = f"cluster.slurm.container={{runtime: %s, {inside}}}"
    pyxis = compose(["experiment=tiny", image % "pyxis"]).cluster.slurm
    assert launch.container_flags(pyxis) == ["--container-image=/i.sqsh", "--container-mounts=/a:/a,/b:/b"]
    assert launch.python_command("srun", pyxis) == ["/opt/python"]
    apptainer = compose(["experiment=tiny", image % "apptainer"]).cluster.slurm
    assert launch.container_flags(apptainer) == []
    expected = "apptainer exec --nv --bind /a:/a --bind /b:/b /i.sqsh /opt/python"
    assert " ".join(launch.python_command("srun", apptainer)) == expected


def test_states_of_heterogeneous_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue and sacct call the components 83+0, 83+1."""
    (tmp_path / "squeue").write_text("#!/bin/sh\nprintf '83+0|RUNNING\\n83+1|PENDING\\n90|COMPLETED\\n'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert client.states(["83", "90"]) == {"83": "RUNNING", "90": "COMPLETED"}


def test_used_and_lost() -> None:
    attempts = [
        {
            "start": 0,
            "time": 100,
            "code": 75,
            "components": [{"name": "head", "ranks": 2}, {"name": "gpu", "ranks": 8}],
        },
        {
            "start": 200,
            "time": 250,
            "code": 0,
            "components": [{"name": "head", "ranks": 2}, {"name": "gpu", "ranks": 4}],
        },
    ]
    assert usage.requested(attempts) == {"head": 300, "gpu": 1000}
    assert usage.lost(attempts, [{"time": 40}, {"time": 90}, {"time": 230}]) == 10
