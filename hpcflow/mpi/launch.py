"""Starting a world of MPI ranks and learning how each of them ended.

    the caller -> guard -> mpiexec or srun -> one guard per rank -> the rank (hpcflow.rank)

The guards (hpcflow/mpi/guard.py) make three promises true whatever happens in between: no process survives
the launch, not even when a launcher is killed with SIGKILL; every rank's exit is in ``RUN/exits.jsonl`` even
when the process manager killed the controller before it could name the rank that died; and signals reach the
ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from hpcflow.config import Slurm

GUARD = Path(__file__).with_name("guard.py")
LAUNCHERS = ("auto", "mpiexec", "srun")

# Per rank, set before anything is imported there.
RANK_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning OpenMP threads starve the other ranks of shared cores
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # compute nodes have no network; models are local folders
    "TORCH_COMPILE_DISABLE": "1",  # vLLM's eager mode would still compile a helper: 18 s at first use
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank, where its weights can be replaced
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a line about NUMA for every engine
    "PYTHONFAULTHANDLER": "1",  # a rank that segfaults leaves its Python stack in the log
    "PYTHONUNBUFFERED": "1",
}


@dataclasses.dataclass(frozen=True)
class Exit:
    """How one rank ended: ``exit`` status, or the ``signal`` that killed it (the other is None). ``time`` in
    unix seconds.
    """

    rank: int
    pid: int
    exit: int | None
    signal: int | None
    time: float
    host: str

    @property
    def bad(self) -> bool:
        return self.exit != 0

    @property
    def status(self) -> int:
        """As a shell reports it: the exit status, or 128 + the signal."""
        return self.exit if self.exit is not None else 128 + (self.signal or 0)

    def __str__(self) -> str:
        how = (
            f"exited with status {self.exit}"
            if self.signal is None
            else f"was killed by {signal_name(self.signal)}"
        )
        return f"rank {self.rank} (pid {self.pid} on {self.host}) {how}"


def signal_name(number: int) -> str:
    """``"SIGSEGV"`` for 11; the number as text for one without a name (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_exits(path: Path, offset: int = 0) -> list[Exit]:
    """The exits recorded in ``path`` from byte ``offset`` on, in order of time. Empty when there is no such
    file.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        lines = [line for line in file.read().split(b"\n") if line]
    return sorted((Exit(**json.loads(line)) for line in lines), key=lambda e: e.time)


def rank_environment(threads_per_rank: int, env: Mapping[str, str]) -> dict[str, str]:
    """The environment of every rank: the caller's, then RANK_ENVIRONMENT and thread counts, then ``env``."""
    threads = {
        name: str(threads_per_rank) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    return {**os.environ, **RANK_ENVIRONMENT, **threads, **env}


def _terminal() -> dict[str, str]:
    """The controller writes into a pipe: whether a person's terminal is at its end it must be told."""
    return {"HPCFLOW_TERMINAL": "1"} if sys.stdout.isatty() else {}


def mpiexec_path() -> str:
    """The mpiexec beside this interpreter (wheel ``mpich``). ValueError when there is none there nor on
    PATH.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        raise ValueError(
            f"there is no mpiexec beside {sys.executable} nor on PATH; `pip install mpich` brings one, "
            "inside a Slurm allocation cluster.launcher=srun needs none"
        )
    return path


def chosen_launcher(launcher: str) -> str:
    """``mpiexec`` or ``srun``; ``auto`` is srun inside a Slurm allocation that is not already a job step.

    ValueError for another name.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"cluster.launcher={launcher!r} is not one of {', '.join(LAUNCHERS)}")
    if launcher != "auto":
        return launcher
    in_allocation = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    return "srun" if in_allocation and shutil.which("srun") else "mpiexec"


def launcher_command(launcher: str, world_size: int, slurm: Slurm | None = None) -> list[str]:
    """The first words of the command line that starts ``world_size`` ranks on the machines at hand.

    Inside a heterogeneous job it is one srun over all components, whose ranks form one MPI world. ValueError for
    an unknown launcher, and when the components have another number of tasks than the world has ranks.
    """
    if chosen_launcher(launcher) == "srun":
        slurm = slurm or Slurm()
        words = ["srun", f"--mpi={slurm.mpi}", "--kill-on-bad-exit=1", "--wait=60", *slurm.srun_flags]
        tasks = component_tasks()
        if len(tasks) < 2:
            # Ranks that hardly compute (controller, recorder) may share cores where the allocation has too few.
            return [*words, *(["--overcommit"] if sum(tasks) < world_size else []), f"--ntasks={world_size}"]
        if sum(tasks) != world_size:
            raise ValueError(
                f"the components of this job have {' + '.join(map(str, tasks))} = {sum(tasks)} tasks, placement and "
                f"config need {world_size} ranks; submit it with `hpcflow submit`, which asks for what is needed"
            )
        return [*words, f"--het-group=0-{len(tasks) - 1}"]
    # Hydra would otherwise look for a batch system by itself and start ranks through it.
    return [mpiexec_path(), "-rmk", "user", "-launcher", "fork", "-bind-to", "none", "-n", str(world_size)]


def component_tasks() -> list[int]:
    """Tasks of each component of the Slurm job around this process: one number when it is not heterogeneous."""
    count = int(os.environ.get("SLURM_HET_SIZE", "1"))
    if count < 2:
        return [int(os.environ.get("SLURM_NTASKS", "1"))]
    return [int(os.environ.get(f"SLURM_NTASKS_HET_GROUP_{i}", "1")) for i in range(count)]


def python_command(launcher: str, slurm: Slurm | None) -> list[str]:
    """How a rank's node starts Python: this interpreter, or that of the container which the config names."""
    container = slurm.container if slurm and chosen_launcher(launcher) == "srun" else None
    if container is None:
        return [sys.executable]
    if container.runtime == "pyxis":
        return [container.python]  # srun makes the container, see `container_flags`
    binds = [word for mount in container.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, container.image, container.python]


def container_flags(slurm: Slurm | None) -> list[str]:
    """Options of srun for a container of pyxis. Never sbatch's: inside a container there is no srun."""
    container = slurm.container if slurm else None
    if container is None or container.runtime != "pyxis":
        return []
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    return [f"--container-image={container.image}", *mounts]


def start(
    command: list[str],
    world_size: int,
    *,
    exits: Path,
    launcher: str = "auto",
    slurm: Slurm | None = None,
    environment: Mapping[str, str],
    grace_s: float = 5.0,
    stdout: int | IO | None = None,
    stderr: int | IO | None = None,
) -> subprocess.Popen:
    """Start ``world_size`` ranks of ``command``; returns the process that ends after the last of them, with
    mpiexec's status.

    Each rank's end is appended to ``exits``. After a bad end the world gets ``grace_s`` seconds to end by
    itself, so that the controller can say what happened, before the process manager kills it. Signals sent to
    the returned process are forwarded to the ranks (SIGUSR1 arrives as SIGUSR2), SIGHUP kills everything, as
    does the end of the calling thread.
    """
    python, guard = python_command(launcher, slurm), ["-I", "-S", str(GUARD)]
    inner = [*python, *guard, "--exits", str(exits.absolute()), "--grace", str(grace_s), "--", *command]
    starter = launcher_command(launcher, world_size, slurm)
    if starter[0] == "srun":
        starter += container_flags(slurm)
    # Ctrl-C on the terminal reaches the ranks through us alone.
    return subprocess.Popen(
        [sys.executable, *guard, "--parent", str(os.getpid()), "--", *starter, *inner],
        env={**environment, "HPCFLOW_WORLD": str(world_size)},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def launch(
    run: Path,
    world_size: int,
    *,
    launcher: str = "auto",
    slurm: Slurm | None = None,
    threads_per_rank: int = 1,
    env: Mapping[str, str] | None = None,
    grace_s: float = 5.0,
    program: str = "hpcflow.rank",
) -> int:
    """Run module ``program`` with argument ``run`` on ``world_size`` ranks (controller, recorder, workers) to
    its end.

    Returns 0, or the status (128 + the signal) of the rank that ended badly first, which is named on stderr
    too; when no rank could be recorded, the launcher's. SIGTERM, SIGUSR2 and the first SIGINT that this
    process receives meanwhile are forwarded to the ranks (SIGINT as SIGTERM), a second SIGINT kills them.
    Call from the main thread.
    """
    exits = run / "exits.jsonl"
    offset = exits.stat().st_size if exits.exists() else 0
    command = [python_command(launcher, slurm)[-1], "-m", program, str(run)]
    interrupts = 0
    process = start(
        command,
        world_size,
        exits=exits,
        launcher=launcher,
        slurm=slurm,
        grace_s=grace_s,
        environment=rank_environment(threads_per_rank, _terminal() | dict(env or {})),
    )

    def forward(number: int, frame: object) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            number = signal.SIGHUP  # the guard kills everything
        process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    assert threading.current_thread() is threading.main_thread(), "signals are handled in the main thread"
    previous = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if status == 0:
        return 0
    ended = read_exits(exits, offset)
    print(blame(ended, world_size), file=sys.stderr, flush=True)
    return next((e.status for e in ended if e.bad), status if status > 0 else 128 - status)


def blame(exits: list[Exit], world_size: int) -> str:
    """One line naming the rank that ended badly first."""
    bad = [e for e in exits if e.bad]
    if bad:
        return f"The first of {world_size} ranks to end badly: {bad[0]}."
    missing = sorted(set(range(world_size)) - {e.rank for e in exits})
    return f"No rank ended badly by itself; ranks {missing} were killed with their guard or never started."
