"""Killing ranks of a real run at a chosen point, from inside: the product knows nothing of it.

A fault is {"victim": "worker" | "recorder" | "controller" | "everything", "node": "critic.update_critic",
"when": "before" | "middle" | "after", "iteration": n}. A worker dies before the node begins, inside it (of an
update: between its mini-batches), or after it has computed, before it can say so. "everything": it takes all
other ranks along. With "seconds" instead of a node the victim dies so long after it began its first call (the
controller: to resume), with all models built.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcflow import rank
from hpcflow.mpi.guard import rank as rank_number

# What runs inside a node: (where, attribute, kill after it instead of before it)
INSIDE = {
    "load_prompts": ("hpcflow.data.prompts:PromptSet", "span_rows", True),
    "generate_sequences": ("hpcflow.engines.plain:PlainEngine", "generate", True),
    "compute_values": ("hpcflow.engines.fsdp:FSDPEngine", "values", True),
    "compute_log_prob": ("hpcflow.engines.fsdp:FSDPEngine", "log_probs", True),
    "compute_reward": ("hpcflow.data.rewards:VerifierPool", "score", True),
    "compute_advantages": ("hpcflow.workers.model:Model", "gather", True),
    "update_critic": ("hpcflow.engines.adamw:ShardedAdamW", "step", True),
    "update_actor": ("hpcflow.engines.adamw:ShardedAdamW", "step", True),
    "save": ("hpcflow.engines.sharded_state:Snapshot", "write", True),
    "record": ("hpcflow.store.durable:os", "rename", False),
    "commit": ("hpcflow.store.durable:os", "rename", False),
    "finish_checkpoint": ("hpcflow.store.checkpoint:os", "rename", False),
}
VICTIMS = {"controller": 0, "recorder": 1, "worker": 3}  # the second rank of the workers


def be_rank(run: str, fault: dict[str, Any] | None = None) -> int:
    """A rank of a run, with ``fault`` in it."""
    mine = rank_number()
    pids = Path(run) / "pids"
    pids.mkdir(exist_ok=True)
    (pids / str(mine)).write_text(str(os.getpid()))
    if fault:
        (_in_controller if mine == 0 else _in_worker)(fault, mine, pids)
    return rank.main(Path(run))


def _die(fault: dict[str, Any], pids: Path) -> None:
    if fault["victim"] == "everything":
        for path in pids.iterdir():
            pid = int(path.read_text())
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_victim(fault: dict[str, Any], mine: int) -> bool:
    home = "recorder" if fault.get("node", "").startswith("recorder.") else "worker"
    return mine == fault.get("rank", VICTIMS.get(fault["victim"], VICTIMS[home]))


def _in_worker(fault: dict[str, Any], mine: int, pids: Path) -> None:
    from hpcflow.workers.host import Host

    if not _is_victim(fault, mine):
        return
    die = functools.partial(_die, fault, pids)
    if "seconds" in fault:
        _later(fault["seconds"], Host, "_execute", die, lambda host, ready: ready.call.method != "build")
        return
    execute, armed = Host._execute, threading.Event()
    if fault["when"] == "middle":
        _inside(fault["node"].split(".")[1], armed, die)

    def patched(self: Any, ready: Any) -> Any:
        call = ready.call
        if f"{call.model}.{call.method}" != fault["node"] or call.iteration != fault["iteration"]:
            return execute(self, ready)
        if fault["when"] == "before":
            die()
        if fault["when"] == "middle":
            armed.set()
        outcome = execute(self, ready)
        if fault["when"] == "after":
            die()
        return outcome

    Host._execute = patched


def _inside(method: str, armed: threading.Event, die: Callable[[], None]) -> None:
    from hpcflow.data.resolve import resolve

    where, name, after = INSIDE[method]
    owner = resolve(where)
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        if armed.is_set() and not after:
            die()
        result = original(*args, **kwargs)
        if armed.is_set():
            die()
        return result

    setattr(owner, name, patched)


def _in_controller(fault: dict[str, Any], mine: int, pids: Path) -> None:
    from hpcflow.dataflow.recovery import Recovery
    from hpcflow.dataflow.world import World

    if not _is_victim(fault, mine):
        return
    die = functools.partial(_die, fault, pids)
    if "seconds" in fault:
        _later(fault["seconds"], Recovery, "resume", die, lambda recovery: True)
        return
    issue, done = World.issue, World._done

    def matches(call: Any) -> bool:
        return f"{call.model}.{call.method}" == fault["node"] and call.iteration == fault["iteration"]

    def patched_issue(self: Any, call: Any) -> None:
        if matches(call) and fault["when"] == "before":
            die()
        issue(self, call)
        if matches(call) and fault["when"] == "middle":
            time.sleep(0.05)
            die()

    def patched_done(self: Any, call: Any, reports: Any) -> None:
        if matches(call) and fault["when"] == "after":
            die()
        done(self, call, reports)

    World.issue, World._done = patched_issue, patched_done


def _later(
    seconds: float, owner: type, name: str, die: Callable[[], None], when: Callable[..., bool]
) -> None:
    """Die ``seconds`` after the first call of ``owner.name`` for which ``when`` holds."""
    original, timers = getattr(owner, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        if not timers and when(*args, **kwargs):
            timers.append(threading.Timer(seconds, die))
            timers[0].daemon = True
            timers[0].start()
        return original(*args, **kwargs)

    setattr(owner, name, patched)
