"""The shell scripts: what they say when something is missing, and that sbatch and bash run the same thing."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    *ROOT.glob("sbatch/*.sh"),
    *(ROOT / name for name in ("tools/setup.sh", "tools/test.sh", ".ci/run")),
]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The parts of a checkout that the scripts use, in a folder with a blank in its name."""
    root = tmp_path / "my checkout"
    for name in ("tools", "sbatch", "requirements"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def setup(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HPCFLOW_EXTRA": "cpu", **env}
    environment = {name: value for name, value in environment.items() if value or name in env}
    return subprocess.run(
        ["bash", str(checkout / "tools/setup.sh")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def fake_environment(checkout: Path) -> str:
    """An environment without packages; returns the stamp that would make it complete."""
    bin_folder = checkout / ".venv/bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    (checkout / ".venv/pyvenv.cfg").write_text(f"version = {platform.python_version()}\n")
    hashed = "sha256sum -- requirements/*.txt pyproject.toml"
    sums = subprocess.run(
        ["bash", "-c", hashed], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout
    return f"{sums}version = {platform.python_version()}\n{checkout} cpu\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    commands = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert commands[0] == "set -euo pipefail"
    assert "sleep" not in text and "pkill" not in text
    assert not [line for line in text.splitlines() if line.startswith("#SBATCH") and "$" in line]


def test_no_python(checkout: Path) -> None:
    result = setup(checkout, HPCFLOW_PYTHON="/nowhere/python3")
    assert (result.returncode, result.stderr) == (
        1,
        "setup: HPCFLOW_PYTHON=/nowhere/python3 is no Python 3.11 or newer\n",
    )


def test_no_venv_module(checkout: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bare", "[[ $* == *ensurepip* ]] && exit 1; exit 0\n")
    result = setup(checkout, HPCFLOW_PYTHON=str(tmp_path / "bare"))
    assert result.returncode == 1
    assert (
        f"setup: {tmp_path}/bare has no venv module; on Debian and Ubuntu: apt install python3-venv"
        in result.stderr
    )


def test_little_disk(checkout: Path, tmp_path: Path) -> None:
    executable(tmp_path / "bin/df", "echo head; echo /dev/x 9 9 3145728 9% /\n")
    result = setup(checkout, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert f"setup: {checkout} has 3 GiB free and the environment needs 6" in result.stderr


@pytest.mark.slow
def test_no_network(checkout: Path) -> None:
    result = setup(
        checkout,
        HPCFLOW_PYTHON=sys.executable,
        PIP_CONFIG_FILE="/dev/null",
        PIP_FIND_LINKS="",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "setup: no network: the package index could not be reached."
    )
    assert not (checkout / ".venv/stamp").exists()


def test_nothing_is_installed_inside_a_job(checkout: Path) -> None:
    result = setup(checkout, SLURM_JOB_ID="7")
    assert result.returncode == 1
    assert "run 'bash tools/setup.sh' on the login node first" in result.stderr
    assert not (checkout / ".venv").exists()


def test_up_to_date_says_nothing_and_any_change_counts(checkout: Path) -> None:
    stamp = fake_environment(checkout)
    (checkout / ".venv/stamp").write_text(stamp)
    for job in ({}, {"SLURM_JOB_ID": "7"}):
        result = setup(checkout, **job)
        assert (result.returncode, result.stderr) == (0, "")
    (checkout / "pyproject.toml").write_text("[project]\n")
    assert setup(checkout, SLURM_JOB_ID="7").returncode == 1


def test_a_second_one_waits_for_the_first(checkout: Path) -> None:
    stamp = fake_environment(checkout)
    with (checkout / ".venv-setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            ["bash", str(checkout / "tools/setup.sh")],
            env={**os.environ, "HPCFLOW_EXTRA": "cpu"},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "another set-up of this checkout is running; waiting" in process.stderr.readline()
        (checkout / ".venv/stamp").write_text(stamp)  # the first one has finished
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize("under_slurm", [False, True])
def test_quickstart_from_any_folder(checkout: Path, tmp_path: Path, under_slurm: bool) -> None:
    """Under Slurm the script is a copy elsewhere, and scontrol knows where it came from."""
    executable(checkout / "tools/setup.sh", "echo set up\n")
    executable(checkout / ".venv/bin/python", 'printf "<%s>" "$@"\n')
    (checkout / "hpcflow").mkdir()
    script, env = checkout / "sbatch/ppo_quickstart.sh", {**os.environ}
    env.pop("SLURM_JOB_ID", None)
    if under_slurm:
        linked = tmp_path / "linked"
        linked.symlink_to(checkout)
        copy = tmp_path / "spool/job00007/slurm_script"
        copy.parent.mkdir(parents=True)
        shutil.copy(script, copy)
        command = f"{linked}/sbatch/ppo_quickstart.sh iterations=2"
        executable(tmp_path / "bin/scontrol", f'echo "JobId=7"; echo "   Command={command}"\n')
        env |= {"PATH": f"{tmp_path}/bin:{env['PATH']}", "SLURM_JOB_ID": "7"}
        script = copy
    arguments = ["iterations=2", "data.system=be kind"]
    done = subprocess.run(["bash", str(script), *arguments], cwd="/", env=env, capture_output=True, text=True)
    expected = "<-m><hpcflow><train><experiment=ppo_quickstart><iterations=2><data.system=be kind>"
    assert done.stdout == f"set up\n{expected}", done.stderr
