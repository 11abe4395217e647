"""A small parent process that knows how its child ended and lets nothing outlive it.

    python -I -S guard.py --parent PID -- mpiexec ...            around the launcher, one per launch
    python -I -S guard.py --exits FILE --grace S -- python ...   around each rank

Standard library only and no hpcflow import: one runs beside every rank. A guard

- is the *subreaper* of its descendants: whatever the child leaves behind becomes the guard's own child and is
  killed;
- ends when its parent dies (``PR_SET_PDEATHSIG``) or at SIGHUP, killing its descendants; its child dies with
  the guard;
- forwards SIGTERM, SIGINT, SIGUSR1 and SIGUSR2. Hydra's mpiexec dies of SIGUSR2 but passes SIGUSR1 on, so the
  outer guard sends SIGUSR1 for both and the rank's guard turns SIGUSR1 into SIGUSR2: a rank only ever sees
  SIGUSR2;
- appends one JSON line ``{rank, pid, exit, signal, time, host}`` to FILE *before* it ends in the same way as
  its child (``exit`` is null when ``signal`` is not). After a bad end it waits up to S seconds: the process
  manager kills every rank as soon as one ends badly, and the controller should have the time to name the one
  that did. It ends with the last rank;
- relays what a rank under Slurm says to its process manager: see `PmiRelay`.

With ``HPCFLOW_FORKSERVER=SOCKET`` in the environment a rank is not started but forked by the server listening
there, from a process in which torch is already imported (tests/forkserver.py holds the other end): same
arguments, environment, directory, standard streams and PMI descriptor.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
KILL_LIMIT_S = 30.0
ORPHANS_EVERY_S = 0.25
PMI_VALUE_BYTES = 512
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one argument; OSError when the kernel refuses."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


class ForkedRank:
    """The rank as a process forked by a fork server; the server waits for it and reports its end over the
    socket.
    """

    def __init__(self, path: str, command: list[str]) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        fds = [0, 1, 2] + ([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])
        request = {"command": command, "env": dict(os.environ), "cwd": os.getcwd()}
        body = json.dumps(request).encode()
        socket.send_fds(self.socket, [len(body).to_bytes(8, "little")], fds)
        self.socket.sendall(body)
        self.pid = int.from_bytes(self.socket.recv(4, socket.MSG_WAITALL), "little")

    def wait_status(self) -> int:
        """What waitpid(2) would say, once the socket is readable; a kill when the server itself is gone."""
        answer = self.socket.recv(4, socket.MSG_WAITALL)
        return int.from_bytes(answer, "little") if answer else signal.SIGKILL


class PmiRelay:
    """Stands between a rank and Slurm's pmi2 plugin, and tells the rank that values take `PMI_VALUE_BYTES`.

    MPICH's UCX transport publishes 4096 bytes from where its address lies, cut into values as long as the
    plugin says it takes. Where the memory behind the address holds few zeros, which are packed, the line with
    the key in front is longer than the 1024 bytes that the plugin reads, and the world fails in MPI_Init.
    """

    def __init__(self) -> None:
        self.manager = socket.socket(fileno=int(os.environ["PMI_FD"]))
        self.own, self.rank = socket.socketpair()
        self.manager.set_inheritable(False)
        self.rank.set_inheritable(True)
        os.environ["PMI_FD"] = str(self.rank.fileno())
        self.open = [self.own, self.manager]

    def started(self) -> None:
        """The rank has its end now; its death must be seen here."""
        self.rank.close()

    def pass_on(self, source: socket.socket) -> None:
        """One request or answer. The manager's end stays open as long as the guard: closing it would be taken
        for the rank's death.
        """
        try:
            line = source.recv(1 << 16)
            if line.startswith(b"cmd=maxes "):
                line = re.sub(rb"vallen_max=\d+", b"vallen_max=%d" % PMI_VALUE_BYTES, line)
            (self.own if source is self.manager else self.manager).sendall(line)
        except OSError:
            line = b""
        if not line:
            self.open = []


class Guard:
    """Runs one command; see the module's docstring. ``run()`` does not return: it ends as the command
    ended.
    """

    def __init__(self, command: list[str], *, parent: int | None, exits: str | None, grace: float) -> None:
        self.command, self.exits, self.grace = command, exits, grace
        self.parent = parent or os.getppid()
        self.offset = os.path.getsize(exits) if exits and os.path.exists(exits) else 0
        self.pid = 0
        self.forked: ForkedRank | None = None
        self.relay: PmiRelay | None = None
        self.ended: tuple[int | None, int | None] | None = None

    def run(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer)
        for number in (*FORWARDED, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wake-up pipe carries the number
        prctl(PR_SET_PDEATHSIG, signal.SIGHUP)
        if os.getppid() != self.parent:  # it died before prctl
            sys.exit(1)
        if self.exits and {"PMI_FD", "SLURM_STEP_ID"} <= os.environ.keys():
            self.relay = PmiRelay()
        server = os.environ.get("HPCFLOW_FORKSERVER")
        if self.exits and server:
            self.forked = ForkedRank(server, self.command)
            self.pid = self.forked.pid
        else:
            self._start()
        if self.relay:
            self.relay.started()
        while self.ended is None:
            sources = [self.forked.socket] if self.forked else []
            self._wait([wake, *sources, *(self.relay.open if self.relay else ())])
        if self.exits:
            self._record()
        self._kill_descendants()
        exit_status, by_signal = self.ended
        if self.exits and (by_signal is not None or exit_status) and not self._give_grace(wake):
            # Hydra ignores a bad status of a rank that ended before MPI_Init, and the others would wait for it
            # there for ever; a signal it heeds.
            self.ended = None, signal.SIGKILL
        self._end_like_child()

    def _start(self) -> None:
        numbers = {*FORWARDED, signal.SIGHUP}
        # One that arrives meanwhile is kept for the child's exec.
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        own = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (*numbers, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != own:
                    os._exit(1)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
                os.execvp(self.command[0], self.command)
            except OSError as error:
                print(f"cannot start {self.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def _wait(self, sources: list) -> None:
        ready, _, _ = select.select(sources, [], [], None if self.exits else ORPHANS_EVERY_S)
        if not ready:
            # Around a launcher: a process adopted meanwhile was left by a rank whose guard was killed. It
            # holds the launcher's output pipe, and the launcher waits for the end of that.
            for orphan in set(children(os.getpid())) - {self.pid}:
                self._kill(orphan, signal.SIGKILL)
            return
        if sources[0] in ready:
            for number in os.read(sources[0], 4096):
                self._on_signal(number)
        if self.forked and self.forked.socket in ready:
            self.ended = decode(self.forked.wait_status())
        for source in self.relay.open if self.relay else ():
            if source in ready:
                self.relay.pass_on(source)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif number == signal.SIGHUP:
            self._kill(self.pid, signal.SIGKILL)
        elif number in (signal.SIGUSR1, signal.SIGUSR2):
            self._kill(self.pid, signal.SIGUSR2 if self.exits else signal.SIGUSR1)
        else:
            self._kill(self.pid, number)

    def _kill(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended; its SIGCHLD is on the way

    def _reap(self) -> bool:
        """Collect every ended child. False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                self.ended = decode(status)

    def _record(self) -> None:
        exit_status, by_signal = self.ended or (None, None)
        line = {
            "rank": rank(),
            "pid": self.pid,
            "exit": exit_status,
            "signal": by_signal,
            "time": time.time(),
            "host": socket.gethostname(),
        }
        text = json.dumps(line)
        try:
            file = os.open(self.exits or "", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.write(file, f"{text}\n".encode())  # one write: lines of different ranks never mix
            os.close(file)
        except OSError as error:
            print(f"cannot write {self.exits}: {error.strerror}; {text}", file=sys.stderr, flush=True)

    def _kill_descendants(self) -> None:
        end = time.monotonic() + KILL_LIMIT_S
        while self._reap():
            for pid in children(os.getpid()):
                self._kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                left = ", ".join(map(str, children(os.getpid())))
                print(
                    f"processes {left} do not die (uninterruptible?); giving up on them",
                    file=sys.stderr,
                    flush=True,
                )
                return
            time.sleep(0.005)

    def _give_grace(self, wake: int) -> bool:
        """Wait for the other ranks' ends. False when the time is over and some have not ended."""
        try:
            os.read(wake, 4096)  # the SIGCHLDs so far
        except BlockingIOError:
            pass
        end = time.monotonic() + self.grace
        while time.monotonic() < end and not self._all_ended():
            if select.select([wake], [], [], 0.05)[0]:
                return True  # a signal means: end now
        return self._all_ended()

    def _all_ended(self) -> bool:
        """Whether every rank of this launch has its line in the file, so that nobody needs the rest of the
        grace.
        """
        if not os.path.exists(self.exits or ""):  # none could be written
            return False
        with open(self.exits or "", "rb") as file:
            file.seek(self.offset)
            return file.read().count(b"\n") >= int(os.environ.get("PMI_SIZE", sys.maxsize))

    def _end_like_child(self) -> None:
        exit_status, by_signal = self.ended or (1, None)
        if by_signal is not None:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has dumped one already, if it should
            signal.set_wakeup_fd(-1)
            if by_signal != signal.SIGKILL:
                signal.signal(by_signal, signal.SIG_DFL)
            os.kill(os.getpid(), by_signal)
        os._exit(exit_status if exit_status is not None else 1)


def decode(status: int) -> tuple[int | None, int | None]:
    """(exit status, None) or (None, signal) from what waitpid(2) reports."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def children(parent: int) -> list[int]:
    """Process ids of the direct children of ``parent``: by one file of /proc, or by all of it where a kernel
    lacks that.
    """
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rsplit(")", 1)[1].split()[1]) == parent:
                        found.append(int(name))
            except (OSError, IndexError):
                continue  # ended while we looked
    return found


def rank() -> int | None:
    """This process's rank in MPI_COMM_WORLD as the process manager announces it, None outside of MPI."""
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def main(argv: list[str]) -> None:
    split = argv.index("--")
    options = dict(zip(argv[:split:2], argv[1:split:2], strict=True))
    parent = int(options["--parent"]) if "--parent" in options else None
    Guard(
        argv[split + 1 :], parent=parent, exits=options.get("--exits"), grace=float(options.get("--grace", 0))
    ).run()


if __name__ == "__main__":
    main(sys.argv[1:])
