"""Prompt files, as far as they can be judged without a tokenizer: readable, usable, none held out twice.

At most `LINES` lines of a file are read, so that a check of a huge file stays quick; `hpcflow.data.prompts`
reads the rest when the run starts.
"""

from __future__ import annotations

import contextlib
import difflib
import gzip
import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from hpcflow.config import Data
from hpcflow.data import verifiers
from hpcflow.schema import Problem, Problems

LINES = 20_000
JSON_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
BROKEN = (ValueError, OSError, EOFError, zlib.error)
"""What reading a file raises that cannot be used; the last two: one that ends early, or is damaged."""


def prompt_problems(data: Data) -> Problems:
    """Breaches of ``data.train`` and ``data.eval``."""
    train = yield from _texts("data.train", data.train)
    if data.eval is None:
        return
    held_out = yield from _texts("data.eval", data.eval)
    if data.eval == data.train:
        yield Problem("data.eval", data.eval, "is what is trained on", "data.eval=null, or other prompts")
        return
    shared = [text for text in held_out if text in set(train)]
    if shared:
        yield Problem(
            "data.eval",
            data.eval,
            f"{len(shared)} of its prompts are trained on, e.g. {shared[0][:60]!r}",
            "data.eval=null, or prompts that data.train does not have",
        )
    if 0 < len(held_out) < data.eval_prompts:
        yield Problem(
            "data.eval_prompts",
            data.eval_prompts,
            f"{data.eval} holds {len(held_out)}",
            f"data.eval_prompts={len(held_out)}",
        )


def _texts(key: str, path: str) -> Generator[Problem, None, list[str]]:
    """Yields problems; returns the prompts as text, in order (none if made on the fly, or unreadable)."""
    try:
        if path.startswith(verifiers.SCHEME):
            verifiers.ReasoningGymRecords(path)
            return []
        return [_text(place, record) for place, record in _records(Path(path).expanduser())]
    except ImportError as error:
        package = (error.name or "").replace("_", "-")
        yield Problem(key, path, f"the package {package} is not installed", f"pip install {package}")
    except BROKEN as error:
        yield Problem(key, path, str(error), _beside(key, Path(path).expanduser()))
    return []


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) of a file's first records. ValueError for what holds none."""
    if file.is_dir():
        raise ValueError("is a folder, not a file")
    if not file.is_file():
        raise ValueError("there is no such file")
    if file.suffix == ".parquet":
        yield from _parquet_records(file)
        return
    if not file.name.endswith(JSON_LINES):
        raise ValueError(f"the name must end in .parquet, {', '.join(JSON_LINES)}")
    found = False
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > LINES:
                break
            if line.strip():
                found = True
                try:
                    yield f"line {number}", json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from None
    if not found:
        raise ValueError("holds no prompts")


def _parquet_records(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(LINES)
        first = next(batches, None)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"is not a parquet file: {error}") from None
    if first is None:
        raise ValueError("holds no prompts")
    yield from ((f"row {i}", record) for i, record in enumerate(first.to_pylist()))


def _text(place: str, record: Any) -> str:
    """The record's prompt, as text that is equal for equal prompts."""
    content = record.get("messages", record.get("prompt")) if isinstance(record, dict) else None
    if isinstance(content, str) and content:
        return content
    if isinstance(content, list) and content and all(isinstance(m, dict) and "content" in m for m in content):
        return content[0]["content"] if len(content) == 1 else json.dumps(content, sort_keys=True)
    raise ValueError(f'{place} has no "prompt" (text) or "messages" (list of {{"role", "content"}})')


def _beside(key: str, file: Path) -> str:
    """The prompt file that was probably meant: one beside it, or in it, that can be used; else a shipped one."""
    with contextlib.suppress(OSError):
        within = file.is_dir()
        folder = file if within else file.parent
        found = [p for p in folder.iterdir() if p != file and p.name.endswith((*JSON_LINES, ".parquet"))]
        names = sorted(p.name for p in found)
        for name in names[:10] if within else difflib.get_close_matches(file.name, names, 3):
            if _usable(folder / name):
                return f"{key}={folder / name}"
    return f"{key}=configs/prompts/positivity_train.jsonl"


def _usable(file: Path) -> bool:
    try:
        return bool([_text(place, record) for place, record in _records(file)])
    except (ImportError, *BROKEN):
        return False
