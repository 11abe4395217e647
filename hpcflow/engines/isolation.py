"""Keeping a foreign engine's side effects to itself.

Building and running vLLM inside a worker reseeds and advances the process's random number generators,
replaces ``torch.set_num_threads``, writes environment variables that every later child process would inherit
(LD_PRELOAD among them), destroys the default process group when it ends, and names its shared memory alike
for every job on a node. `Sandbox` undoes all of it after each call.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")


class Sandbox:
    """``with sandbox.inside():`` around every call of the foreign code.

    environment: variables that the code sees, and only it. Variables that it sets itself are kept for its
    next call, and are gone from the process in between.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment: dict[str, str | None] = dict(environment)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before = dict(os.environ)
        _apply(self._environment)
        try:
            with random_state_kept(), threads_kept():
                yield
        finally:
            after = dict(os.environ)
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            self._environment = {name: after.get(name) for name in changed}
            _apply({name: before.get(name) for name in changed})


def _apply(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """The generators of random, numpy and torch (CPU) are afterwards as before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """torch.set_num_threads is afterwards the same function, and the number of threads the same."""
    function, number = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = function
        if torch.get_num_threads() != number:
            function(number)


@contextlib.contextmanager
def default_group_kept() -> Iterator[None]:
    """torch.distributed's default group cannot be destroyed inside; other groups can."""
    destroy = dist.destroy_process_group

    def destroy_others(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    with mock.patch.object(dist, "destroy_process_group", destroy_others):
        yield


def unlink_shared_memory(prefix: str) -> None:
    """Remove the names of shared memory segments that start with ``prefix``; processes that mapped them
    keep them."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)
