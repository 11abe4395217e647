"""Reward functions that misbehave; what each sample does is written in its response."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def act(prompt: str, response: str, record: dict[str, Any], scale: float = 1.0) -> Any:
    kind, _, rest = response.partition(" ")
    return ACTIONS[kind](rest, scale)


def _raise(rest: str, scale: float) -> Any:
    raise KeyError(rest)


def _spawn_and_hang(rest: str, scale: float) -> Any:
    """A grandchild that would outlive a careless kill; its pid goes into the file ``rest``."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    Path(rest).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def _fork_twice(rest: str, scale: float) -> Any:
    os.fork()
    return 7.0


def _at_first(rest: str, scale: float) -> Any:
    """``rest``: file, n, action. The first n calls, counted in the file, do the action, later ones give 1."""
    file, times, action = rest.split(" ", 2)
    with open(file, "ab") as notes:
        notes.write(b".")
    return act("", action, {}) if Path(file).stat().st_size <= int(times) else 1.0


class _BadMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


def _bad_message(rest: str, scale: float) -> Any:
    raise _BadMessage


ACTIONS = {
    "number": lambda rest, scale: float(rest) * scale,
    "numpy": lambda rest, scale: np.float32(rest),
    "bool": lambda rest, scale: rest == "True",
    "raise": _raise,
    "bad_message": _bad_message,
    "sleep": lambda rest, scale: time.sleep(1000),
    "exit": lambda rest, scale: os._exit(int(rest)),
    "sysexit": lambda rest, scale: sys.exit("bye"),
    "segfault": lambda rest, scale: ctypes.string_at(0),
    "recurse": lambda rest, scale: _recurse(),
    "nan": lambda rest, scale: float("nan"),
    "inf": lambda rest, scale: float("inf"),
    "huge": lambda rest, scale: 1e300,
    "none": lambda rest, scale: None,
    "text": lambda rest, scale: "1.0",
    "long_error": lambda rest, scale: (_ for _ in ()).throw(ValueError("x" * 10**7)),
    "print": lambda rest, scale: print("noise on stdout") or 3.0,
    "close_files": lambda rest, scale: os.closerange(0, 100) or 1.0,
    "fork": _fork_twice,
    "environment": lambda rest, scale: float(sum(name in os.environ for name in rest.split(","))),
    "pid": lambda rest, scale: float(os.getpid()),
    "torch": lambda rest, scale: float("torch" in sys.modules),
    "stdin": lambda rest, scale: float(len(sys.stdin.read())),
    "spawn": _spawn_and_hang,
    "at_first": _at_first,
    "slow": lambda rest, scale: time.sleep(float(rest)) or 1.0,
    "socket": lambda rest, scale: float(socket.socket().fileno() >= 0),
}


def _recurse() -> Any:
    return _recurse()


def with_preparation(prompt: str, response: str, record: dict[str, Any], number: float) -> float:
    return number + PREPARED["extra"]


PREPARED: dict[str, float] = {}
with_preparation.prepare = lambda number: PREPARED.update(extra=number * 10)


def cannot_prepare(prompt: str, response: str, record: dict[str, Any]) -> float:
    return 0.0


cannot_prepare.prepare = lambda: os._exit(5)
