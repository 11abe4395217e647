"""Guards, launcher and fork server: every end is known, signals arrive, nothing survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcflow.mpi import guard, launch
from tests.worlds import ROOT, run_world, server

PROGRAMS = "tests.mpi.launch_programs:"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def recorded_pids(folder: Path) -> list[tuple[int, int, int]]:
    """(rank's pid, its parent's, its child's) of each rank that wrote them down."""
    return [tuple(map(int, path.read_text().split())) for path in sorted(folder.glob("pids_*"))]


@pytest.mark.parametrize("forked", [True, False])
def test_five_ranks_add_up(forked: bool) -> None:
    result = run_world(5, PROGRAMS + "allreduce", forked=forked).check()
    assert result.returned == [[10, 5, 1]] * 5
    assert sorted((e.rank, e.exit, e.signal) for e in result.exits) == [(r, 0, None) for r in range(5)]


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize(
    "how, exit_status, by_signal",
    [
        ("raise", 1, None),
        ("exit", 3, None),
        ("kill", None, signal.SIGKILL),
        ("segfault", None, signal.SIGSEGV),
    ],
)
def test_a_bad_end_is_recorded_and_ends_all(
    tmp_path: Path, how: str, exit_status: int | None, by_signal: int | None, forked: bool
) -> None:
    arguments = {"how": how, "who": 2, "folder": str(tmp_path)}
    result = run_world(4, PROGRAMS + "end_badly", arguments, grace_s=0.2, forked=forked)
    assert result.rc != 0
    assert [(e.rank, e.exit, e.signal) for e in result.exits] == [(2, exit_status, by_signal)]
    pids = recorded_pids(tmp_path)
    assert result.exits[0].pid == pids[2][0] and len(pids) == 4
    assert not [pid for each in pids for pid in each if pid != server().process.pid and alive(pid)]


def test_a_rank_that_ends_before_mpi_does_not_leave_the_others_waiting() -> None:
    result = run_world(4, "tests.mpi.launch_programs:end_before_init", {"who": 2}, grace_s=1, timeout=30)
    assert result.rc != 0
    assert [(each.rank, each.exit) for each in result.exits if each.exit is not None] == [(2, 1)]


SPEAKS_PMI = """
import os, socket
manager = socket.socket(fileno=int(os.environ["PMI_FD"]))
for request in b"cmd=get_maxes", b"cmd=put key=a value=vallen_max=1024":
    manager.sendall(request + b"\\n")
    print(manager.recv(1024).decode(), end="")
"""


def test_a_rank_under_slurm_cuts_its_values_shorter_than_the_plugin_says(tmp_path: Path) -> None:
    """The guard changes that answer alone; what else is said passes through it, and the rank's end is seen."""
    manager, rank = socket.socketpair()
    environment = {"PMI_FD": str(rank.fileno()), "SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "1"}
    command = [sys.executable, "-I", "-S", guard.__file__, "--exits", str(tmp_path / "exits.jsonl"), "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", SPEAKS_PMI],
        env=environment,
        pass_fds=[rank.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        rank.close()
        assert manager.recv(1024) == b"cmd=get_maxes\n"
        manager.sendall(b"cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024\n")
        assert manager.recv(1024) == b"cmd=put key=a value=vallen_max=1024\n"
        manager.sendall(b"cmd=put_result rc=0 vallen_max=1024\n")
        said, _ = process.communicate(timeout=30)
    assert said.splitlines() == [
        "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=512",
        "cmd=put_result rc=0 vallen_max=1024",
    ]
    assert process.returncode == 0 and manager.recv(1024) == b""


def test_ends_that_cannot_be_written_are_printed() -> None:
    command = [sys.executable, "-I", "-S", guard.__file__, "--exits", "/dev/full", "--", "false"]
    done = subprocess.run(command, env={"PMI_RANK": "3", "PMI_SIZE": "4"}, capture_output=True, text=True)
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert '"rank": 3' in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == -signal.SIGKILL  # so that Hydra ends the ranks that have not called MPI_Init


def test_abort_gives_its_code(tmp_path: Path) -> None:
    result = run_world(3, PROGRAMS + "end_badly", {"how": "abort", "who": 1, "folder": str(tmp_path)})
    assert result.rc == 7


def test_the_grace_lets_the_others_end_with_their_own_status(tmp_path: Path) -> None:
    result = run_world(
        3, PROGRAMS + "end_badly", {"how": "all exit", "who": -1, "folder": str(tmp_path)}, grace_s=50
    )
    assert sorted((e.rank, e.exit) for e in result.exits) == [(0, 10), (1, 11), (2, 12)]


def test_a_hanging_world_is_killed_and_shows_its_stacks(tmp_path: Path) -> None:
    with pytest.raises(
        TimeoutError, match="end_badly on 3 ranks took over 10 s(.|\n)*time.sleep|in end_badly"
    ):
        run_world(3, PROGRAMS + "end_badly", {"how": "hang", "who": -1, "folder": str(tmp_path)}, timeout=10)
    pids = [pid for own, _, child in recorded_pids(tmp_path) for pid in (own, child)]
    assert len(pids) == 6
    wait_for(lambda: not any(map(alive, pids)))  # the fork server learns of it last


def start_hanging_world(folder: Path, n: int, forked: bool) -> subprocess.Popen:
    """A process that launches ``n`` ranks which wait for ever; returns when all of them are up."""
    call = {
        "function": PROGRAMS + "end_badly",
        "args": {"how": "hang", "who": -1, "folder": str(folder)},
    }
    program = f"""
import json, pathlib, sys
from hpcflow.mpi import guard, launch
folder = pathlib.Path({str(folder)!r})
(folder / "call.json").write_text(json.dumps({call!r}))
environment = launch.rank_environment(1, {{"HPCFLOW_FORKSERVER": {server().socket if forked else ""!r}}})
world = launch.start([sys.executable, "-m", "tests.worlds", str(folder)], {n}, exits=folder / "exits.jsonl",
                     launcher="mpiexec", environment=environment, grace_s=0.2)
(folder / "guard").write_text(str(world.pid))
sys.exit(world.wait() != 0)
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    wait_for(lambda: len(recorded_pids(folder)) == n and all(len(p) == 3 for p in recorded_pids(folder)))
    return process


@pytest.mark.parametrize("forked", [True, False])
@pytest.mark.parametrize("victim", ["launching process", "outer guard", "mpiexec", "guard of rank 1"])
def test_no_survivor_when_a_parent_is_killed(tmp_path: Path, victim: str, forked: bool) -> None:
    process = start_hanging_world(tmp_path, 2, forked)
    pids = recorded_pids(tmp_path)
    outer = int((tmp_path / "guard").read_text())
    mpiexec = children(outer)[0]
    guards = [pid for proxy in children(mpiexec) for pid in children(proxy)]
    kill = {
        "launching process": process.pid,
        "outer guard": outer,
        "mpiexec": mpiexec,
        "guard of rank 1": guards[1],
    }[victim]
    os.kill(kill, signal.SIGKILL)
    process.wait(30)
    # A rank's own children outlive it only where both guards above them are killed at once.
    orphans = [child for _, _, child in pids] if victim == "outer guard" and not forked else []
    others = {p for each in pids for p in each} - {server().process.pid, *orphans} | {*guards, mpiexec, outer}
    wait_for(lambda: not any(map(alive, others)))
    assert process.returncode != 0
    for pid in filter(alive, orphans):
        os.kill(pid, signal.SIGKILL)


def children(parent: int) -> list[int]:
    from hpcflow.mpi.guard import children as found

    return sorted(found(parent))


def test_launch_names_the_first_and_forwards_signals(tmp_path: Path, fork_server: str) -> None:
    program = f"""
import sys, pathlib
from hpcflow.mpi import guard, launch
run = pathlib.Path({str(tmp_path)!r})
sys.exit(launch.launch(run, 2, launcher="mpiexec", program="tests.mpi.launch_programs"))
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2)
    process.send_signal(signal.SIGUSR2)
    wait_for(lambda: all(p.read_text() == "SIGUSR2\n" for p in tmp_path.glob("ready_*")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "The first of 2 ranks to end badly: rank 1 (pid" in errors and "exited with status 5" in errors


def test_exits_of_earlier_launches_are_not_blamed(tmp_path: Path) -> None:
    path = tmp_path / "exits.jsonl"
    path.write_text('{"rank": 0, "pid": 1, "exit": 3, "signal": null, "time": 1.0, "host": "a"}\n')
    offset = path.stat().st_size
    with path.open("a") as file:
        file.write('{"rank": 1, "pid": 2, "exit": null, "signal": 11, "time": 3.0, "host": "a"}\n')
        file.write('{"rank": 2, "pid": 3, "exit": 4, "signal": null, "time": 2.0, "host": "b"}\n')
        file.write('{"rank": 3, "pid": 4, "exit": 0, "signal": null, "time": 1.5, "host": "b"}\n')
    found = launch.read_exits(path, offset)
    assert [e.rank for e in found] == [3, 2, 1]
    assert [e.status for e in found] == [0, 4, 139]
    assert (
        launch.blame(found, 5)
        == "The first of 5 ranks to end badly: rank 2 (pid 3 on b) exited with status 4."
    )
    assert "ranks [0, 1, 2, 4] were killed" in launch.blame(found[:1], 5)


def test_launcher_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch.launcher_command("auto", 3)[0].endswith("mpiexec")
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launch.launcher_command("auto", 3)[0].endswith("mpiexec")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launch.launcher_command("auto", 3)[0] == "srun"
    assert "--ntasks=3" in launch.launcher_command("auto", 3)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert launch.launcher_command("auto", 3)[0].endswith("mpiexec")
    with pytest.raises(ValueError, match="cluster.launcher='ssh' is not one of auto, mpiexec, srun"):
        launch.launcher_command("ssh", 3)


def test_environment_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("KEEP", "me")
    found = launch.rank_environment(2, {"VLLM_LOGGING_LEVEL": "INFO"})
    assert (found["OMP_NUM_THREADS"], found["KEEP"], found["VLLM_LOGGING_LEVEL"]) == ("2", "me", "INFO")
    assert found["HF_HUB_OFFLINE"] == "1" and found["OMP_WAIT_POLICY"] == "PASSIVE"
