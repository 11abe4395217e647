"""Checkpoints and digests of sharded tensors: safetensors files, one per rank, that any number of ranks can
read.

A folder holds ``NAME-of-RANKS.safetensors`` files. Each stores its rank's rows (dimension 0) of every tensor
under ``kind/name`` and, in the header's metadata, counters and where the rows begin, in the form of
torch.distributed.checkpoint (DCP). DCP reads the folder without this module (`HuggingFaceStorageReader`), and
makes whole tensors of it (`consolidate_safetensors_files`). Nothing is pickled. DCP loads but does not save:
its writer does not hash on the way and needs collectives, which a background thread must not make.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import (
    CUSTOM_METADATA_KEY,
    SAVED_OFFSETS_KEY,
    HuggingFaceStorageReader,
)
from torch.distributed.tensor import DTensor

Groups = dict[str, dict[str, DTensor]]
"""kind ("model", "exp_avg", ...) -> name -> tensor sharded over dimension 0 of a one-dimensional mesh."""


PIECE_BYTES = 1 << 24
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def first_row(tensor: DTensor) -> int:
    """Global index of the first row of this rank's part."""
    rows, ranks = tensor.shape[0], tensor.device_mesh.size()
    return min(rows, -(-rows // ranks) * tensor.device_mesh.get_local_rank())


def _local(groups: Groups) -> Iterator[tuple[str, DTensor, torch.Tensor]]:
    for kind, tensors in groups.items():
        for name, tensor in tensors.items():
            yield f"{kind}/{name}", tensor, tensor.to_local().detach()


@dataclass
class Snapshot:
    """This rank's part at one moment, copied to host memory: it can be written while training goes on."""

    name: str
    parts: dict[str, torch.Tensor]
    metadata: dict[str, str]

    def write(self, folder: Path) -> tuple[Path, str]:
        """Write this rank's file, flushed to the disk. Returns its path and the blake2b digest of its
        content.

        In pieces, hashed on the way: neither holds the interpreter lock for long, so heartbeats go on.
        """
        folder.mkdir(parents=True, exist_ok=True)
        digest, path = hashlib.blake2b(digest_size=16), folder / self.name
        with open(path, "wb", buffering=0) as file:
            for piece in self._pieces():
                digest.update(piece)
                while len(piece):
                    piece = piece[file.write(piece) :]
            os.fsync(file.fileno())
        return path, digest.hexdigest()

    def _pieces(self) -> Iterator[memoryview]:
        """The safetensors format: length of the header, header, the tensors' bytes."""
        entries: dict[str, Any] = {"__metadata__": self.metadata}
        end = 0
        for key, tensor in self.parts.items():
            begin, end = end, end + tensor.numel() * tensor.element_size()
            shape = list(tensor.shape)
            entries[key] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        yield memoryview(len(header).to_bytes(8, "little") + header)
        for tensor in self.parts.values():
            raw = tensor.reshape(-1).view(torch.uint8).numpy().data
            for begin in range(0, len(raw), PIECE_BYTES):
                yield raw[begin : begin + PIECE_BYTES]


@torch.no_grad()
def snapshot(groups: Groups, counters: dict[str, int]) -> Snapshot:
    """A copy of this rank's part. No communication."""
    parts, layout = {}, {}
    for key, tensor, local in _local(groups):
        if len(local):
            parts[key] = local.to("cpu", copy=True).contiguous()
            layout[key] = {SAVED_OFFSETS_KEY: [first_row(tensor), *[0] * (tensor.ndim - 1)]}
    name = f"{dist.get_rank():05d}-of-{dist.get_world_size():05d}.safetensors"
    return Snapshot(name, parts, {"counters": json.dumps(counters), CUSTOM_METADATA_KEY: json.dumps(layout)})


def save(folder: Path, groups: Groups, counters: dict[str, int]) -> None:
    """Write this rank's file, flushed to the disk; collective (returns when all ranks have written)."""
    snapshot(groups, counters).write(folder)
    dist.barrier()


@torch.no_grad()
def load(folder: Path, groups: Groups) -> dict[str, int]:
    """Read the tensors of ``groups`` in place and return the counters. No communication.

    ValueError when files are missing, or when a tensor is missing or has another shape.
    """
    first, reader = _files(folder)[0], HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    state = {key: tensor for key, tensor, _ in _local(groups)}
    for key, tensor in state.items():
        if key not in saved:
            raise ValueError(f"{folder} has no {key}; it was saved by another model or optimizer")
        if saved[key].size != tensor.shape:
            shapes = list(saved[key].size), list(tensor.shape)
            raise ValueError(f"{folder}: {key} has shape {shapes[0]}, this model {shapes[1]}")
        if sum(chunk.sizes.numel() for chunk in saved[key].chunks) != tensor.numel():
            raise ValueError(f"{folder} lacks rows of {key}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank plans for itself
        dcp.load(state, storage_reader=reader, no_dist=True)
    return json.loads(safe_open(first, "pt").metadata()["counters"])


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*-of-*.safetensors"))
    if not found:
        raise ValueError(f"{folder} holds no checkpoint (*-of-*.safetensors)")
    ranks = int(found[0].stem.split("-of-")[1])
    expected = [folder / f"{rank:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    if found != expected:
        names = ", ".join(path.name for path in sorted(set(expected) ^ set(found))[:4])
        raise ValueError(f"{folder} is not one complete checkpoint of {ranks} ranks; look at {names}")
    return found


@torch.no_grad()
def digest(tensors: dict[str, DTensor]) -> str:
    """Hex digest of names, shapes and bits: equal on all ranks and for every number of ranks. Collective.

    Each element's bits are mixed with its global index and summed modulo 2**64, so the sum does not depend on
    who holds which rows.
    """
    sums = torch.zeros(len(tensors), dtype=torch.int64)
    for index, tensor in enumerate(tensors.values()):
        local = tensor.to_local().cpu().contiguous()
        width = tensor.shape[1:].numel()
        integer = {2: torch.int16, 4: torch.int32}[local.element_size()]
        offset = first_row(tensor) * width
        for chunk in local.view(-1).view(integer).split(1 << 20):
            sums[index] += _mix(chunk.to(torch.int64), offset)
            offset += len(chunk)
    device = next(iter(tensors.values())).to_local().device
    total = sums.to(device)
    dist.all_reduce(total)
    text = [
        [name, list(tensor.shape), str(tensor.dtype), number]
        for (name, tensor), number in zip(tensors.items(), total.tolist(), strict=True)
    ]
    return hashlib.blake2b(json.dumps(text).encode(), digest_size=16).hexdigest()


def _mix(bits: torch.Tensor, offset: int) -> torch.Tensor:
    """Sum of a hash of (bits, index) over elements; int64 arithmetic wraps around."""
    index = torch.arange(offset, offset + len(bits), dtype=torch.int64)
    x = bits + index * 0x632BE59BD9B4E019
    x ^= x >> 29
    x *= 0x1CE4E5B9BF58476D
    x ^= x >> 32
    return (x * 0x14D049BB133111EB).sum()
