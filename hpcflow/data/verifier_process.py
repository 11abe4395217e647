"""The other side of `hpcflow.data.rewards.VerifierPool`: a server that forks verifier processes.

Run as a script with a connected Unix socket as standard input. The server imports nothing but the standard
library and has one thread, so forking it is cheap and safe at any time, also long after its owner has called
MPI_Init and must not fork. Messages are a length (4 bytes, big endian) and JSON; nothing is unpickled.

Nothing survives the owner: the server ends when the socket closes (the owner died or was killed) or when the
kernel tells it of its parent's death, and takes each verifier's process group along; a verifier whose server
was killed is killed by the kernel.
"""

from __future__ import annotations

import ctypes
import json
import math
import numbers
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
ERROR_CHARACTERS = 2000
FLOAT32_MAX = 3.4028234663852886e38


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(struct.pack(">I", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end of the stream. ValueError for something that is not JSON."""
    head = _read(connection, 4)
    data = None if head is None else _read(connection, struct.unpack(">I", head)[0])
    return None if data is None else json.loads(data)


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def die_with(parent: int, signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent (pid) dies; ends now if it is dead."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os._exit(0)


def serve(control: socket.socket, parent: int) -> None:
    """Answer the owner until the socket closes. Requests:

    {"start": {"function", "args", "path", "returns"}} -> {"pid"}, then a byte with the process's socket as
    descriptor; {"end": pid, "grace": seconds} -> {"status": how it ended}, its group killed after the grace
    time.
    """
    me, running = os.getpid(), set()

    def end_all(*_: Any) -> None:
        for pid in running:
            _kill_group(pid)
        os._exit(0)

    signal.signal(signal.SIGTERM, end_all)
    die_with(parent, signal.SIGTERM)
    while True:
        try:
            request = receive(control)
        except OSError:
            request = None
        if request is None:
            end_all()
        elif "start" in request:
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                control.close()
                here.close()
                _verifier(there, me, **request["start"])
            there.close()
            running.add(pid)
            send(control, {"pid": pid})
            socket.send_fds(control, [b"."], [here.fileno()])
            here.close()
        else:
            pid = request["end"]
            status = _end(pid, request["grace"]) if pid in running else "ended before"
            running.discard(pid)
            send(control, {"status": status})


def _end(pid: int, grace: float) -> str:
    deadline = time.monotonic() + grace
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _kill_group(pid)  # what the verifier itself may have started
            code = os.waitstatus_to_exitcode(status)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if time.monotonic() >= deadline:
            break
        time.sleep(0.002)
    _kill_group(pid)
    os.waitpid(pid, 0)
    return "killed"


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the latter in the moment before the child has a group of its own
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _verifier(
    connection: socket.socket,
    server: int,
    function: str,
    args: dict[str, Any],
    path: list[str],
    returns: str,
) -> NoReturn:
    """A verifier process: says {"ready": true} or {"error"}, then answers samples until the socket closes:
    {"value"}, {"raised"} by the function, or {"error"} of what it returned."""
    os.setsid()  # a group of its own, so that whatever it starts can be killed with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with(server, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(0, True)
    os.dup2(2, 1)  # prints must not mix with the owner's output
    sys.path[:] = path
    try:
        from hpcflow.data.resolve import resolve

        verify = resolve(function)
        getattr(verify, "prepare", lambda **_: None)(**args)
    except BaseException as error:  # also SystemExit from a module that is imported
        send(connection, {"error": describe(error)})
        os._exit(1)
    try:
        send(connection, {"ready": True})
        _answer(connection, verify, args, RETURNS[returns])
    except ConnectionError:
        pass  # the owner has given this process up
    os._exit(0)


def _answer(
    connection: socket.socket, verify: Callable[..., Any], args: dict[str, Any], check: Callable[[Any], Any]
) -> None:
    me = os.getpid()
    while (sample := receive(connection)) is not None:
        what = "raised"
        try:
            found = verify(sample["prompt"], sample["response"], sample["record"], **args)
            what = "error"
            reply = {"value": check(found)}
        except BaseException as error:
            reply = {what: describe(error)}
        if os.getpid() != me:  # the function forked, and this is the copy
            os._exit(0)
        send(connection, reply | {"sample": sample["sample"]})


def as_reward(value: Any) -> float:
    """A finite number that float32 holds, from a Python number or an array scalar; else an error."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, numbers.Real):
        raise TypeError(f"the function returned {type(value).__name__} {str(value)[:100]!r}, not a number")
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
        raise ValueError(f"the function returned {number}, not a finite float32 number")
    return float(number)


def as_text(value: Any) -> str:
    """A text that can be encoded; else an error."""
    if not isinstance(value, str):
        raise TypeError(f"the function returned {type(value).__name__} {str(value)[:100]!r}, not a text")
    value.encode()
    return value


RETURNS = {"number": as_reward, "text": as_text}
"""What a function may return, and how it is checked."""


def describe(error: BaseException) -> str:
    """Type, message and place of an exception, in one line of bounded length."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be made)"
    return f"{type(error).__name__}: {message}".replace("\n", " ")[:ERROR_CHARACTERS] + place


if __name__ == "__main__":
    serve(socket.socket(fileno=0), parent=int(sys.argv[1]))
