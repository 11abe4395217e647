"""Real MPI worlds for tests: ``run_world(5, "tests.mpi.programs:ring", {"turns": 3})``.

Every rank runs under mpiexec and hpcflow's guards exactly as in production, forked from the session's fork
server (tests/forkserver.py), and calls the named function. The function initialises MPI by itself
(``mpi4py.rc.initialize`` is False); what it returns, as JSON, is the rank's entry of ``Result.returned``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hpcflow.data.resolve import resolve
from hpcflow.mpi.guard import rank
from hpcflow.mpi.launch import Exit, rank_environment, read_exits, start

ROOT = Path(__file__).resolve().parents[1]
SERVERS: dict[str, ForkServer] = {}  # what is imported -> the session's server
BASE = ("mpi4py.MPI", "numpy", "torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama")
NO_SHARED_MEMORY = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}  # ranks of one host talk by TCP


@dataclasses.dataclass(frozen=True)
class Result:
    """How a world ended. ``returned[rank]`` is None for a rank that did not return; ``exits`` holds rank
    guards' records.
    """

    rc: int
    stdout: str
    stderr: str
    exits: list[Exit]
    returned: list[Any]

    def check(self) -> Result:
        """Itself; AssertionError with all output unless every rank ended well."""
        if self.rc:
            raise AssertionError(
                f"the world ended with {self.rc}: {', '.join(map(str, self.exits))}\n"
                f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
            )
        return self


class ForkServer:
    """A running tests/forkserver.py; ``socket`` is its path."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="hpcflow-fork-")
        self.socket = f"{self.folder.name}/socket"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", self.socket, *modules],
            cwd=ROOT,
            env=rank_environment(1, {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout and self.process.stdout.readline() == b"ready\n", (
            "the fork server did not start"
        )

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def server(vllm: bool = False) -> ForkServer:
    """The session's fork server, started at first use; with ``vllm`` the one that has imported vLLM too."""
    key = "vllm" if vllm else "base"
    if key not in SERVERS:
        SERVERS[key] = ForkServer((*BASE, *(("vllm",) if vllm else ())))
    return SERVERS[key]


def stop_servers() -> None:
    while SERVERS:
        SERVERS.popitem()[1].stop()


def run_world(
    n: int,
    function: str,
    args: dict | None = None,
    *,
    env: dict[str, str] | None = None,
    timeout: float = 60,
    threads: int = 1,
    grace_s: float = 2,
    vllm: bool = False,
    forked: bool = True,
) -> Result:
    """Run ``function`` ("package.module:name") with ``args`` on ``n`` MPI ranks and wait for the end of the
    world.

    ``env`` is added to every rank's environment. After a rank ended badly the others have ``grace_s`` seconds
    to end too. ``vllm``: fork from a server that has imported vLLM; ``forked=False``: start a fresh
    interpreter per rank instead. TimeoutError, with all output and every rank's stack, when it takes longer
    than ``timeout`` seconds; nothing survives.
    """
    with tempfile.TemporaryDirectory(prefix="hpcflow-world-") as name:
        folder = Path(name)
        (folder / "call.json").write_text(json.dumps({"function": function, "args": args or {}}))
        socket = server(vllm).socket if forked else ""
        environment = rank_environment(
            threads, {"HPCFLOW_FORKSERVER": socket, "PYTHONPATH": str(ROOT), **(env or {})}
        )
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            world = start(
                [sys.executable, "-m", "tests.worlds", name],
                n,
                exits=folder / "exits.jsonl",
                stdout=out,
                stderr=err,
                launcher="mpiexec",
                environment=environment,
                grace_s=grace_s,
            )
            try:
                rc = world.wait(timeout)
            except subprocess.TimeoutExpired:
                rc = None
            finally:
                if world.poll() is None:
                    show_stacks(folder)
                    world.send_signal(signal.SIGHUP)
                    world.wait()
        stdout, stderr = ((folder / each).read_text(errors="replace") for each in ("out", "err"))
        if rc is None:
            raise TimeoutError(
                f"{function} on {n} ranks took over {timeout} s\n--- stdout\n{stdout}\n--- stderr\n{stderr}"
            )
        results = [folder / f"returned_{r}.json" for r in range(n)]
        returned = [json.loads(each.read_text()) if each.exists() else None for each in results]
        return Result(
            rc if rc >= 0 else 128 - rc, stdout, stderr, read_exits(folder / "exits.jsonl"), returned
        )


def show_stacks(folder: Path) -> None:
    """Make every rank write the stacks of all its threads to stderr; it dies of that."""
    for path in folder.glob("pid_*"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(path.read_text()), signal.SIGABRT)
    time.sleep(0.5)


def main() -> None:
    """One rank: argv[1] is the folder of the world."""
    folder = Path(sys.argv[1])
    call = json.loads((folder / "call.json").read_text())
    faulthandler.enable()
    (folder / f"pid_{rank()}").write_text(str(os.getpid()))
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    value = resolve(call["function"])(**call["args"])
    part = folder / f"returned_{rank()}.part"
    part.write_text(json.dumps(value))
    os.replace(part, folder / f"returned_{rank()}.json")


if __name__ == "__main__":
    main()
