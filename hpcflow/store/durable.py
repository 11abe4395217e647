"""Bytes on disk that survive a kill at any instant: files by temp + fsync + rename, logs line by line."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

# Kept free on the file system whatever is written, so that logs can still be written afterwards.
MARGIN_BYTES = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the content of ``path`` durable, whoever wrote it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temp: Path, path: Path) -> None:
    """Give the file ``temp``, fully written, its name: visible whole or not at all, also after power loss."""
    fsync_file(temp)
    os.rename(temp, path)
    fsync_folder(path.parent)


def temp_name(path: Path) -> Path:
    """Where ``path`` is written before it gets its name; such a leftover never counts as data."""
    return path.with_name(path.name + ".tmp")


def write_atomic(path: Path, data: bytes) -> None:
    """Write or replace ``path``. OSError (ENOSPC, ...) leaves what was there, and no temporary file."""
    temp = temp_name(path)
    try:
        with open(temp, "wb") as file:
            file.write(data)
        publish(temp, path)
    except OSError:
        temp.unlink(missing_ok=True)
        raise


def require_space(folder: Path, needed: int, what: str) -> None:
    """OSError ENOSPC unless ``folder``'s file system has ``needed`` bytes (and a margin of 1 MiB) free."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < needed + MARGIN_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {megabytes(needed + MARGIN_BYTES)} in {folder}, but only {megabytes(free)} are "
            "free; make space there and resume, or start the run on another file system (run.dir=...)",
        )


def megabytes(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Append ``entry`` as one JSON line, durably. A line torn by an earlier kill stays a line of its own."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The entries of a file written by `append_line`; none when it is missing. Torn lines are left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return []
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
