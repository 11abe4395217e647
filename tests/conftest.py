"""Session-wide set-up: the fork server from which tests start MPI ranks."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import worlds

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: real models or minutes; run by `bash tools/test.sh --all` only")


@pytest.fixture(scope="session", autouse=True)
def fork_servers() -> Iterator[None]:
    """Ends the fork servers that the session started."""
    yield
    worlds.stop_servers()


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> str:
    """Socket of the fork server, also in HPCFLOW_FORKSERVER: ranks of ``hpcflow train`` and ``launch`` start
    from it too.
    """
    socket = worlds.server().socket
    monkeypatch.setenv("HPCFLOW_FORKSERVER", socket)
    return socket


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", point], capture_output=True)
    if made.returncode:
        pytest.skip(f"mounting a tmpfs is not allowed here: {made.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", point], check=True)
