"""Session-wide set-up: the fork server from which tests start MPI ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
