"""The main thread of a worker rank: takes calls in order, runs them, gives back what they made."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from hpcflow.data.resolve import resolve
from hpcflow.mpi.worker import Outcome, Ready, Worker, start_worker
from hpcflow.workers.primitive import Context, Output, Rows

BUILD = "build"  # the one method that a model answers before it exists


class StaleWeights(RuntimeError):
    """A model's weight version is not the one that the dataflow expects."""


class Host:
    """Owns the models of one rank. Colocated models run one after another in call order."""

    def __init__(self, worker: Worker, thread: threading.Thread) -> None:
        self.worker, self.thread = worker, thread
        self.models: dict[str, Any] = {}
        self._spans: list[tuple[str, float, float]] = []

    def run(self) -> int:
        """Serve until the controller stops the world. Returns the exit code."""
        code = 0
        while (ready := self.worker.ready.get()) is not None:
            if code:
                continue  # this rank has failed: the controller ends the world
            self.worker.starts(ready.call)
            self._spans = []
            try:
                outcome = self._execute(ready)
            except BaseException:
                code = 1
                self.worker.failed(str(ready.call), traceback.format_exc())
            else:
                self.worker.finished(outcome)
                del outcome
            del ready
        for model in self.models.values():
            close = getattr(model, "close", None)
            if close:
                close()
        self.thread.join()
        return code

    def _execute(self, ready: Ready) -> Outcome:
        call, start = ready.call, time.time()
        if call.method == BUILD:
            self.models[call.model] = self._build(call.model, **call.args)
            result: Any = None
        else:
            model = self.models[call.model]
            found = getattr(model, "version", 0)
            if found != call.version:
                raise StaleWeights(
                    f"{call}: expected weight version {call.version}, but this rank has {found}"
                )
            rows = Rows(ready.ids, ready.columns, call.iteration)
            result = getattr(model, call.method)(rows, **call.args)
        if not isinstance(result, Output):
            result = Output(columns=result) if call.writes else Output(value=result)
        version = getattr(self.models[call.model], "version", 0)
        return Outcome(
            ready, version, result.columns, result.value, start, time.time(), tuple(self._spans), result.ids
        )

    def _build(self, name: str, cls: str, **arguments: Any) -> Any:
        engine = self.worker.engine
        ranks = engine.spread.groups[name]
        context = Context(
            group=name,
            rank=engine.rank,
            index=ranks.index(engine.rank),
            size=len(ranks),
            exchange=lambda payload: self.worker.exchange(name, payload),
            span=self._span,
        )
        return resolve(cls)(context, **arguments)

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        finally:
            self._spans.append((name, start, time.time()))


def serve(signals: socket.socket) -> int:
    """Be a worker rank until the world ends. Returns the exit code."""
    worker, thread = start_worker(signals)
    code = Host(worker, thread).run()
    sys.stdout.flush()
    return code


def join_pool(context: Context, address: str | None = None) -> None:
    """Make this rank's pool the default torch.distributed group, by a store on a free port of the pool's first rank.

    The default group is the pool and never the world: vLLM builds its groups collectively over it.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    host = address or os.environ.get("HPCFLOW_HOST") or socket.gethostname()
    store = None
    if context.index == 0:
        store = dist.TCPStore(host, 0, context.size, is_master=True, wait_for_workers=False)
    port = context.exchange(store.port.to_bytes(4, "big") if store else b"")[0]
    if store is None:
        store = dist.TCPStore(host, int.from_bytes(port, "big"), context.size, is_master=False)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # all GPUs of the node are visible
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=context.index, world_size=context.size)
