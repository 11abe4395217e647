"""One real Slurm for all tests of a session: 17 virtual nodes with 8 fake GPUs each."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.worlds import ROOT

SHAPE = {"NODES": "17", "GPUS": "8", "CPUS": "128", "MEM": "2000000", "SLURMD_TIMEOUT": "10"}


def local_slurm(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tools" / "local_slurm.sh"
    return subprocess.run(
        ["bash", str(script), command, str(folder)],
        env={**os.environ, **SHAPE},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="session")
def slurm_folder() -> Iterator[Path]:
    # Short: sockets have names of 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix="hpcflow-slurm-", dir="/tmp"))
    started = local_slurm("up", folder)
    if started.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        reason = f"no Slurm here: {started.stderr.strip().splitlines()[-1]}"
        if os.environ.get("HPCFLOW_NEED_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    yield folder
    local_slurm("down", folder)
    assert not folder.exists()


@pytest.fixture
def cluster(slurm_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The session's Slurm, with all nodes up; jobs that a test leaves are cancelled."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(slurm_folder / "etc" / "slurm.conf"))
    found = Cluster(slurm_folder)
    yield found
    found.cancel_all()
