"""Breaking the contract on data inside a real run, on one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hpcflow import rank
from hpcflow.mpi.guard import rank as rank_number

CONTROLLER, WORKER = 0, 3


def be_rank(run: str, breach: str) -> int:
    """A rank of a run; the second worker rank (or the controller) breaks the contract in iteration 1."""
    if rank_number() in (CONTROLLER, WORKER):
        globals()[breach.replace(" ", "_")](rank_number())
    return rank.main(Path(run))


def _patch_method(node: str, change: Any, iteration: int = 1) -> None:
    """On this rank, in one iteration: ``change(model, rows, output)`` replaces the node's output."""
    from hpcflow.workers.host import Host
    from hpcflow.workers.primitive import Output, Rows

    execute = Host._execute

    def patched(self: Host, ready: Any) -> Any:
        call = ready.call
        if f"{call.model}.{call.method}" == node and call.iteration == iteration:
            model = self.models[call.model]
            original = getattr(model, call.method)

            def method(rows: Rows, **args: Any) -> Any:
                made = original(rows, **args)
                return change(
                    model, rows, made if isinstance(made, Output) or not call.writes else Output(made)
                )

            setattr(model, call.method, method)
        return execute(self, ready)

    Host._execute = patched


def stale_shard(mine: int) -> None:
    """One rank's shard of the critic is that of before the update."""
    if mine == WORKER:
        _patch_method("critic.update_critic", _goes_back, iteration=0)


def shard_that_changes_while_it_is_used(mine: int) -> None:
    if mine == WORKER:
        _patch_method("critic.compute_values", _goes_back)


def _goes_back(model: Any, rows: Any, made: Any) -> Any:
    model.engine.version -= 1
    return made


def stale_generation_weights(mine: int) -> None:
    """One rank's generation engine keeps the weights of before the update."""
    from hpcflow.engines.plain import PlainEngine

    load = PlainEngine.load_weights

    def patched(self: Any, weights: Any, version: int) -> None:
        if version == 1:
            list(weights)
        else:
            load(self, weights, version)

    if mine == WORKER:
        PlainEngine.load_weights = patched


def swapped_ids(mine: int) -> None:
    """Right numbers under the ids of other samples."""
    if mine == WORKER:
        _patch_method(
            "critic.compute_values", lambda model, rows, made: dataclasses.replace(made, ids=rows.ids.flip(0))
        )


def lost_column(mine: int) -> None:
    if mine == WORKER:
        _patch_method(
            "critic.compute_values", lambda model, rows, made: dataclasses.replace(made, columns={})
        )


def call_delivered_twice(mine: int) -> None:
    """The network, or whoever passes commands on, delivers a call a second time."""
    from hpcflow.mpi.messages import Call
    from hpcflow.mpi.worker import Worker

    obey = Worker._obey

    def patched(self: Worker, message: Any) -> None:
        obey(self, message)
        if isinstance(message, Call) and message.method == "compute_values" and message.iteration == 1:
            obey(self, message)

    if mine == WORKER:
        Worker._obey = patched


def update_issued_twice(mine: int) -> None:
    """The controller issues an update that it has issued already."""
    from hpcflow.dataflow.world import World

    issue = World.issue

    def patched(self: World, call: Any) -> None:
        issue(self, call)
        if call.method == "update_critic" and call.iteration == 1:
            issue(self, dataclasses.replace(call, number=self.controller.number(), inputs=()))

    if mine == CONTROLLER:
        World.issue = patched
