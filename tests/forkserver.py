"""A server that forks MPI ranks from a process in which the slow imports are done.

    python -m tests.forkserver SOCKET [module ...]

Importing torch costs 1.5 s a rank and vLLM some ten; a fork of a process that has them costs 20 ms.
hpcflow/mpi/guard.py holds the other end: one connection a rank, carrying the command (``[python, "-m",
module, argument ...]``), environment, directory, the standard streams and PMI's descriptor. The server
answers with the pid and, when the process ends, with its wait status, 4 bytes each. A rank whose guard hangs
up is killed; all die with the server, and the server with its parent.

hpcflow itself is never imported here: every rank imports the code as it is on disk.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable

from hpcflow.mpi.guard import PR_SET_PDEATHSIG, prctl


def serve(path: str) -> Callable[[], None]:
    """Serve for ever. Returns only in a forked rank, with the program to run there."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = selectors.DefaultSelector()
    poll.register(listener, selectors.EVENT_READ)
    poll.register(wake, selectors.EVENT_READ)
    ranks: dict[int, socket.socket] = {}  # pid -> its guard's connection
    print("ready", flush=True)
    while True:
        for key, _ in poll.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, fds = receive(connection)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    poll.close()
                    for each in (listener, connection, *ranks.values()):
                        each.close()
                    os.close(wake)
                    os.close(wake_writer)
                    return become(request, fds)
                for fd in fds:
                    os.close(fd)
                connection.sendall(pid.to_bytes(4, "little"))
                ranks[pid] = connection
                poll.register(connection, selectors.EVENT_READ, pid)
            elif key.fileobj == wake:
                os.read(wake, 4096)
                reap(ranks, poll)
            elif key.data in ranks:  # a guard has nothing more to say: it hung up
                kill(key.data)
                poll.unregister(key.fileobj)


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """One request of a guard and the descriptors that came with it."""
    head, fds, _, _ = socket.recv_fds(connection, 8, 8)
    size, body = int.from_bytes(head, "little"), b""
    while len(body) < size:
        body += connection.recv(size - len(body))
    return json.loads(body), fds


def reap(ranks: dict[int, socket.socket], poll: selectors.BaseSelector) -> None:
    """Report every ended rank to its guard, after killing what it left in its process group."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        kill(pid)
        connection = ranks.pop(pid)
        try:
            connection.sendall(status.to_bytes(4, "little"))
            poll.unregister(connection)
        except (OSError, KeyError):
            pass  # its guard is gone
        connection.close()


def kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def become(request: dict, fds: list[int]) -> Callable[[], None]:
    """Turn this forked process into the rank of ``request``; returns its program."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for target, fd in enumerate(fds[:3]):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    if len(fds) > 3:
        os.set_inheritable(fds[3], True)
        os.environ["PMI_FD"] = str(fds[3])
    os.chdir(request["cwd"])
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    python, dash_m, module, *arguments = request["command"]
    assert dash_m == "-m", f"the fork server runs modules only, not {request['command']}"
    sys.argv = [module, *arguments]
    sys.path[0] = request["cwd"]
    return lambda: run(module)


def run(module: str) -> None:
    """Run ``module`` as the main program; end as the interpreter would, without the second that freeing torch
    takes.

    C's exit handlers run down to torch's: MPICH tells its process manager there that MPI was finalised, and a
    rank that skips that (``os._exit``) counts as crashed.
    """
    libc = ctypes.PyDLL(None)
    # MPICH's handler comes later, so it runs before.
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # waits for the threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    libc.exit(status)


def main() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    path, *modules = sys.argv[1:]
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    for module in modules:
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"importing {modules} started threads; a fork would lose them"
    gc.freeze()  # a rank's collections leave the shared pages alone
    serve(path)()


if __name__ == "__main__":
    main()
