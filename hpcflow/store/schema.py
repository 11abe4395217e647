"""The layout of a run's iteration files, version 1.

A file holds one committed iteration or, after compaction, a run of them (`hpcflow.store.segments`). It is
plain HDF5, readable by h5py, h5dump or anything else:

    /                      attributes format="hpcflow iterations", schema=1
    /index                 int64 [n, 2]: (sequence, iteration) of each commit in the file, by sequence
    /<sequence, 9 digits>  one commit; attribute blake2b: hex digest of its content (`content_digest`)
        ids                int64 [rows], the sample ids, in the order of all rows below
        columns/<name>     dense: [rows, ...]; ragged: the values of all rows, concatenated
        lengths/<name>     int64 [rows]; present for ragged columns only
                           <name> is a column's own, or <model>.<own> where the iteration has another column
                           of that name, made by another model (two policies that answer each other)
        facts              uint8, UTF-8 JSON (NaN and Infinity written as Python does):
            iteration, sequence, time (unix s), samples
            stamps         {column: [iteration, model, weight version]} of what computed the column
            places         {column: the call of the iteration that made it, e.g. "critic.compute_values#1"}
            metrics        {name: float}; those of `hpcflow.store.summary` are computed from the columns
            versions       {model: weight version after this iteration}
            nodes          [{call, model, method, ranks, start, end, busy: {rank: s}, bytes, spans}]
            and whatever else the writer was given (wall_s, idle, tokens, accelerator_s, ...)

Element types without an HDF5 type (bfloat16, float8) are stored as unsigned integers of the same bits, with
an attribute ``torch_dtype`` on the dataset. Bool is HDF5's enum, as h5py writes it.

*Sequence* counts commits of the run; it equals the iteration unless a run went back to an earlier iteration.
Then `iterations/rewinds.jsonl` says {"sequence": s, "iteration": k}: commits numbered below s of iterations
from k on are superseded. They stay on disk, but no longer count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpcflow.data.columns import Column, Columns, Ragged, flat, nbytes

FORMAT, SCHEMA_VERSION = "hpcflow iterations", 1
RAW_VIEWS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


class Unreadable(ValueError):
    """A file that holds no iterations for this reader; the text says why."""


class NewerSchema(Unreadable):
    """A file written by a later hpcflow."""


def group_name(sequence: int) -> str:
    return f"{sequence:09d}"


def encode(sequence: int, facts: dict[str, Any], ids: torch.Tensor, columns: Columns) -> bytes:
    """The image of a file with one commit: made in memory (twice the data), HDF5 never sees a full disk.

    ``facts`` must hold "iteration". ValueError when a column or a fact has no representation.
    """
    text = json.dumps(facts, default=_plain).encode()
    size = sum(nbytes(column) for column in columns.values()) + len(text)
    # A block of the final size spares repeated growth; the image itself is as long as what was written.
    options = {"driver": "core", "backing_store": False, "block_size": size + (1 << 16)}
    with h5py.File("commit", "w", libver=("v110", "v110"), **options) as file:
        start_file(file, [(sequence, facts["iteration"])])
        group = file.create_group(group_name(sequence))
        group["ids"] = ids.numpy()
        group["facts"] = np.frombuffer(text, dtype=np.uint8)
        for name, column in columns.items():
            _put(group, name, column)
        group.attrs["blake2b"] = content_digest(group)
        file.flush()
        return file.id.get_file_image()


def start_file(file: h5py.File, index: list[tuple[int, int]]) -> None:
    """Mark an empty file as ours; ``index`` = (sequence, iteration) of the commits that it will hold."""
    file.attrs["format"] = FORMAT
    file.attrs["schema"] = SCHEMA_VERSION
    file["index"] = np.array(index, dtype=np.int64).reshape(-1, 2)


def content_digest(group: h5py.Group) -> str:
    """Digest of names, types, shapes and bytes of everything in a commit, independent of how HDF5 stores
    it."""
    names: list[str] = []
    group.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        values = group[name][()]
        digest.update(json.dumps([name, str(values.dtype), list(values.shape)]).encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()


def verify(group: h5py.Group) -> None:
    """`Unreadable`, with both digests, unless the content of a commit is what was written."""
    written, found = group.attrs["blake2b"], content_digest(group)
    if found != written:
        raise Unreadable(f"damaged: its content has digest {found}, written was {written}")


def _put(group: h5py.Group, name: str, column: Column) -> None:
    values = flat(column).detach().cpu().contiguous()
    raw = RAW_VIEWS.get(values.dtype)
    try:
        array = (values.view(raw) if raw else values).numpy()
    except TypeError as error:
        raise ValueError(f"column {name!r} is of {values.dtype}, which cannot be stored; cast it") from error
    dataset = group.create_dataset(f"columns/{name}", data=array)
    if raw:
        dataset.attrs["torch_dtype"] = str(values.dtype).removeprefix("torch.")
    if isinstance(column, Ragged):
        group.create_dataset(f"lengths/{name}", data=column.lengths.cpu().numpy())


def _plain(value: Any) -> Any:
    """numpy and torch scalars and arrays inside facts."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ValueError(f"a fact of type {type(value).__name__} cannot be recorded: {value!r}")


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """A committed file, read-only, without HDF5's locks (parallel file systems often have none).

    FileNotFoundError when it is gone (compaction), `Unreadable` when it is not ours or damaged, also when
    that shows only inside the ``with`` block.
    """
    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT:
                raise Unreadable("foreign: an HDF5 file, but not of hpcflow's iterations")
            version = int(file.attrs["schema"])
            if version > SCHEMA_VERSION:
                raise NewerSchema(
                    f"newer: schema {version}, this hpcflow reads up to {SCHEMA_VERSION}; update hpcflow"
                )
            yield file
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise Unreadable("no permission to read it") from error
    except (OSError, KeyError, RuntimeError) as error:
        if not path.exists():
            # This happened while HDF5 opened it.
            raise FileNotFoundError(f"{path} has just been merged into another file") from error
        if "signature not found" in str(error):
            raise Unreadable("foreign or empty: not an HDF5 file") from error
        truncated = "truncated" in str(error)
        raise Unreadable(f"{'truncated' if truncated else 'damaged'}: {error}") from error


def read_index(path: Path) -> list[tuple[int, int]]:
    """(sequence, iteration) of each commit in a file; errors as `opened`."""
    with opened(path) as file:
        return [(int(sequence), int(iteration)) for sequence, iteration in file["index"][()]]


def get_facts(group: h5py.Group) -> dict[str, Any]:
    """The facts of a commit; ranks as integers again."""
    try:
        facts = json.loads(group["facts"][()].tobytes())
    except ValueError as error:
        raise Unreadable(f"damaged: its facts are not JSON: {error}") from error
    for node in facts.get("nodes", ()):
        if "busy" in node:
            node["busy"] = {int(rank): seconds for rank, seconds in node["busy"].items()}
    return facts


def get_ids(group: h5py.Group) -> torch.Tensor:
    return torch.from_numpy(group["ids"][()])


def get_column(group: h5py.Group, name: str) -> Column:
    """One column, bit for bit as it was recorded."""
    dataset = group["columns"][name]
    values = torch.from_numpy(dataset[()])
    if "torch_dtype" in dataset.attrs:
        values = values.view(getattr(torch, dataset.attrs["torch_dtype"]))
    if "lengths" in group and name in group["lengths"]:
        return Ragged(values, torch.from_numpy(group["lengths"][name][()]))
    return values
