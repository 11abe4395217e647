"""Rewards from verifier functions, each call in a process that may fail without harm.

A function that raises, hangs, ends its process or returns no finite number costs its own sample only: that
sample is marked with the error, the process is replaced if need be, and all others get their rewards.

A call that gave no result, because it raised, took too long or its process ended, may have met something that
passes, so it is made again, after all that wait (after a hang or a crash in another process: the old one is
gone). A result that is no finite number is a result, and would come again.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from hpcflow.data import verifier_process as wire

Answer = tuple[Any, str]
"""What a function returned (None: nothing usable), and the error ("": none)."""
START_S = 120.0  # for a process to import its function: long, because file systems of clusters can be slow
FOREIGN = re.compile(
    r"(MPI|PMI|PMI2|PMIX|OMPI|PRTE|HYDRA|HYDI|I_MPI|MPICH|MPIR|UCX|FI|VLLM)_"
    r"|SLURM_(STEP|PROCID|LOCALID|NODEID|GTIDS|TASK|LAUNCH|SRUN|PMI|MPI|CPU_BIND|MEM_BIND)"
    r"|((LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|LD_PRELOAD|HPCFLOW_FORKSERVER)$"
)


def clean_environment(environment: dict[str, str]) -> dict[str, str]:
    """Without what belongs to one MPI rank, Slurm step or vLLM engine and would mislead another process."""
    return {name: value for name, value in environment.items() if not FOREIGN.match(name)}


class _Server:
    """The process that forks verifier processes (`hpcflow.data.verifier_process`)."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            # -P: the script's folder must not shadow modules. The hash seed decides the order of sets, and
            # with it perhaps a verifier's result.
            self.process = subprocess.Popen(
                [sys.executable, "-P", wire.__file__, str(self.owner)],
                stdin=theirs,
                env={"PYTHONHASHSEED": "0"} | clean_environment(dict(os.environ)),
                start_new_session=True,  # an interrupt from the terminal is the owner's to handle
            )
        atexit.register(self.close)

    def start(self, function: str, args: dict[str, Any], returns: str) -> tuple[int, socket.socket]:
        """Fork a verifier process: (pid, socket to it)."""
        path = [os.path.abspath(folder) for folder in sys.path]
        pid = self._ask({"start": {"function": function, "args": args, "path": path, "returns": returns}})[
            "pid"
        ]
        _, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        return pid, socket.socket(fileno=fds[0])

    def end(self, pid: int, grace: float) -> str:
        """How the process ended, in words; killed after ``grace`` seconds."""
        return self._ask({"end": pid, "grace": grace})["status"]

    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self.control.close()
        if self.owner == os.getpid():
            self.process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            wire.send(self.control, message)
            reply = wire.receive(self.control)
        except OSError:
            reply = None
        if reply is None:
            raise RuntimeError("the server of verifier processes has ended; its output tells why")
        return reply


_server: _Server | None = None


def prepare() -> None:
    """Start the server of verifier processes, once per process.

    To be called from the main thread before MPI_Init: forking later is unsafe, and the server would inherit
    what MPI put into the environment. The server ends with this process, however that ends.
    """
    global _server
    if _server is None or not _server.usable():
        _server = _Server()


class _Calls:
    """The calls of one batch of ``count`` samples: which wait, how often each was made, what came of it."""

    def __init__(self, count: int, retries: int) -> None:
        self.retries = retries
        self.waiting = deque(range(count))
        self.attempts = [0] * count
        self.answers: dict[int, Answer] = {}

    def next(self) -> int:
        """A waiting sample, whose call is now made."""
        sample = self.waiting.popleft()
        self.attempts[sample] += 1
        return sample

    def failed(self, sample: int, error: str) -> None:
        """The call gave no result."""
        if self.attempts[sample] <= self.retries:
            self.waiting.append(sample)
        else:
            self.answers[sample] = (None, error)


@dataclass(eq=False)
class _Process:
    """A verifier process: starting (not ready), idle (no sample) or at work."""

    pid: int
    connection: socket.socket
    deadline: float
    ready: bool = False
    sample: int | None = None

    def late(self) -> bool:
        """Over its time; not one that has just answered, or just become ready, at its end."""
        return (self.sample is not None or not self.ready) and self.deadline <= time.monotonic()


class VerifierPool:
    """``processes`` processes that call a reward function, each call for at most ``timeout_s`` seconds, and
    at most ``retries`` times again where it gives no result.

    function: dotted path of f(prompt: str, response: str, record: dict, **args) -> float (``returns="text"``:
    -> str), see `hpcflow.data.verifiers`. ValueError when it cannot be imported. Calls `prepare` if nobody
    has.
    """

    def __init__(
        self,
        function: str,
        *,
        processes: int,
        timeout_s: float,
        retries: int = 0,
        args: dict[str, Any] | None = None,
        returns: str = "number",
    ) -> None:
        assert processes >= 1 and timeout_s > 0 and retries >= 0 and returns in wire.RETURNS
        prepare()
        self.server = _server
        self.function, self.args, self.timeout_s = function, dict(args or {}), timeout_s
        self.retries, self.returns = retries, returns
        self.processes = [self._start() for _ in range(processes)]
        self.failed_starts = 0  # in a row
        first = self.processes[0]
        error = (
            self._start_error(first)
            if self._wait([first], first.deadline)
            else f"no start within {START_S:g} s"
        )
        if error:
            self.close()
            raise ValueError(f"function {function!r} cannot be used: {error}")

    def score(
        self, samples: Sequence[dict[str, Any]]
    ) -> tuple[torch.Tensor, torch.Tensor, list[str], torch.Tensor]:
        """Rewards of samples {"prompt": str, "response": str, "record": dict}, in their order.

        (reward float32 [n], ok bool [n], errors, attempts int32 [n]): where ok is false the reward is 0 and
        the error says what happened last; elsewhere it is "". ``attempts``: how often the call was made.
        RuntimeError when no verifier process can be started any more.
        """
        answers, errors, attempts = self.call(samples)
        ok = torch.tensor([not error for error in errors], dtype=torch.bool)
        rewards = [0.0 if error else answer for answer, error in zip(answers, errors, strict=True)]
        made = torch.tensor(attempts, dtype=torch.int32)
        return torch.tensor(rewards, dtype=torch.float32), ok, errors, made

    def call(self, samples: Sequence[dict[str, Any]]) -> tuple[list[Any], list[str], list[int]]:
        """(what the function returned or None, error or "", attempts) of each sample; see `score`."""
        calls = _Calls(len(samples), self.retries)
        try:
            while len(calls.answers) < len(samples):
                self._hand_out(samples, calls)
                busy = [p for p in self.processes if p.sample is not None or not p.ready]
                for process in self._wait(busy, min(p.deadline for p in busy)):
                    self._hear(process, calls)
                for process in [p for p in busy if p in self.processes and p.late()]:
                    self._give_up(process, calls)
        finally:
            for process in [p for p in self.processes if p.sample is not None]:  # an exception, an interrupt
                self._replace(process, grace=0.0)
        answers = [calls.answers[i] for i in range(len(samples))]
        return [answer for answer, _ in answers], [error for _, error in answers], calls.attempts

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.connection.close()
            self.server.end(process.pid, 0.0)
        self.processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> _Process:
        pid, connection = self.server.start(self.function, self.args, self.returns)
        connection.settimeout(self.timeout_s)  # for a reply that stops half way
        return _Process(pid, connection, deadline=time.monotonic() + START_S)

    def _hand_out(self, samples: Sequence[dict[str, Any]], calls: _Calls) -> None:
        """Give waiting samples to idle processes."""
        idle = [p for p in self.processes if p.ready and p.sample is None][: len(calls.waiting)]
        for process in self._wait(idle, 0.0):  # an idle process says nothing: it has ended
            self._replace(process, grace=1.0)
            idle.remove(process)
        for process in idle:
            process.sample = calls.next()
            process.deadline = time.monotonic() + self.timeout_s
            try:
                wire.send(process.connection, {"sample": process.sample, **samples[process.sample]})
            except OSError:
                pass  # it has just ended; the end of its stream will be read

    def _hear(self, process: _Process, calls: _Calls) -> None:
        """Take what a starting or working process has to say."""
        if not process.ready:
            error = self._start_error(process)
            if error:
                self._failed_start(process, error)
            else:
                self.failed_starts = 0
            return
        try:
            reply = wire.receive(process.connection)
        except (OSError, ValueError):
            reply = None
        sample, process.sample = process.sample, None
        if reply is None or reply.get("sample") != sample:
            calls.failed(sample, f"the verifier's process ended: {self._replace(process, grace=1.0)}")
        elif "raised" in reply:
            calls.failed(sample, reply["raised"])
        else:
            calls.answers[sample] = (reply.get("value"), reply.get("error", ""))

    def _give_up(self, process: _Process, calls: _Calls) -> None:
        """A process is over its time."""
        if not process.ready:
            self._failed_start(process, f"no start within {START_S:g} s")
            return
        calls.failed(process.sample, f"no answer within {self.timeout_s:g} s")
        self._replace(process, grace=0.0)

    def _start_error(self, process: _Process) -> str:
        """ "" and the process is ready, or why it could not start."""
        try:
            reply = wire.receive(process.connection)
        except (OSError, ValueError):
            reply = None
        if reply is None:
            return f"its process ended while starting: {self.server.end(process.pid, 1.0)}"
        process.ready = "ready" in reply
        return reply.get("error", "")

    def _failed_start(self, process: _Process, error: str) -> None:
        self.failed_starts += 1
        if self.failed_starts > 2 * len(self.processes):  # more than all at once by one passing cause
            raise RuntimeError(f"verifier processes for {self.function!r} do not start: {error}")
        self._replace(process, grace=0.0)

    def _replace(self, process: _Process, grace: float) -> str:
        """End a process, start another in its place; returns how it ended."""
        process.connection.close()
        status = self.server.end(process.pid, grace)
        self.processes[self.processes.index(process)] = self._start()
        return status

    @staticmethod
    def _wait(processes: Sequence[_Process], deadline: float) -> list[_Process]:
        """Those of the processes that have something to say by ``deadline`` (monotonic seconds)."""
        poll = select.poll()
        by_fd = {process.connection.fileno(): process for process in processes}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return [by_fd[fd] for fd, _ in ready]
