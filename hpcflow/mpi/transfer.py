"""The data plane: rows of columns, straight from the rank that owns them to the rank that reads them.

For each (owner, reader, transfer) one small header and then raw buffers: ids, lengths of ragged columns, values, in
pieces of at most 1 GiB (MPI counts are 32-bit). Small slices ride inside the header. Tensors are never pickled.
A reader checks what it gets against what the controller expects: stamp, number of rows, ids, dtypes.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcflow.data.columns import Column, Columns, Ragged, flat, nbytes, slice_rows
from hpcflow.mpi.engine import MPI, Engine
from hpcflow.mpi.messages import Part, Stamp, Transfer

PIECE_BYTES = 1 << 30
INLINE_BYTES = 1 << 16


class ContractError(RuntimeError):
    """What arrived is not what the dataflow says it is: nothing may be trained on it."""


@dataclass
class Held:
    """One call's output at an owner: its rows, their ids (int64 [rows]) and their stamp."""

    ids: torch.Tensor
    columns: Columns
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.columns.values()))


@dataclass(frozen=True)
class _Header:
    stamp: Stamp
    # Name, ragged, dtype, shape of the values.
    layout: tuple[tuple[str, bool, torch.dtype, tuple[int, ...]], ...]
    rows: int
    inline: bytes | None


def memory(tensor: torch.Tensor) -> list[MPI.memory]:
    """A contiguous host tensor of any dtype as MPI buffers of at most `PIECE_BYTES`."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    size = tensor.numel() * tensor.element_size()
    start = tensor.data_ptr()
    return [
        MPI.memory.fromaddress(start + offset, min(PIECE_BYTES, size - offset))
        for offset in range(0, size, PIECE_BYTES)
    ]


def _buffers(ids: torch.Tensor, columns: Columns) -> list[torch.Tensor]:
    """All tensors of a slice, contiguous, in the order in which they travel."""
    tensors = [ids]
    for column in columns.values():
        if isinstance(column, Ragged):
            tensors.append(column.lengths)
        tensors.append(flat(column))
    return [tensor.contiguous() for tensor in tensors]


class DataPlane:
    """What this rank holds for others, and what it is about to receive."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.held: dict[int, Held] = {}
        self.shown: set[int] = set()  # calls of whose output a reader has got some
        self._waiting: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._incoming: dict[int, _Incoming] = {}

    # -- owner

    def hold(self, call: int, output: Held) -> None:
        """Keep a call's output until it is dropped; serve whoever waits for it."""
        self.held[call] = output
        for action in self._waiting.pop(call, ()):
            action()

    def when_held(self, call: int, action: Callable[[], None]) -> None:
        if call in self.held:
            action()
        else:
            self._waiting[call].append(action)

    def drop(self, call: int) -> None:
        self.held.pop(call, None)

    @property
    def held_bytes(self) -> int:
        return sum(output.nbytes for output in tuple(self.held.values()))

    def slice(self, transfer: Transfer, piece: Part) -> tuple[torch.Tensor, Columns, Stamp]:
        """This rank's rows of ``piece``, only the columns that the transfer names, as views."""
        output = self.held[transfer.source]
        self.shown.add(transfer.source)
        first = next(part.lo for part in transfer.owners if part.rank == self.engine.rank)
        lo, hi = piece.lo - first, piece.hi - first
        columns = {name: output.columns[name] for name in transfer.columns}
        return output.ids[lo:hi], slice_rows(columns, lo, hi), output.stamp

    def push(self, transfer: Transfer) -> None:
        """Send this rank's rows to every other reader, as soon as the source call has finished here."""
        self.when_held(transfer.source, lambda: self._push(transfer))

    def _push(self, transfer: Transfer) -> None:
        for reader in transfer.readers:
            for piece in transfer.pieces(reader.rank):
                if piece.rank == self.engine.rank and reader.rank != self.engine.rank:
                    self._send(transfer, piece, reader.rank)

    def _send(self, transfer: Transfer, piece: Part, reader: int) -> None:
        ids, columns, stamp = self.slice(transfer, piece)
        layout = tuple(
            (name, isinstance(column, Ragged), flat(column).dtype, tuple(flat(column).shape))
            for name, column in columns.items()
        )
        buffers = _buffers(ids, columns)
        pieces = [chunk for tensor in buffers for chunk in memory(tensor)]
        small = sum(len(chunk) for chunk in pieces) <= INLINE_BYTES
        inline = b"".join(map(bytes, pieces)) if small else None
        header = pickle.dumps(_Header(stamp, layout, len(ids), inline), 5)
        tag = 2 * (transfer.number % self.engine.tags)
        data = self.engine.data
        requests = [data.Isend([header, MPI.BYTE], reader, tag)]
        if not small:
            requests += [data.Isend([chunk, MPI.BYTE], reader, tag + 1) for chunk in pieces]
        self.engine.post(requests, (header, buffers))
        self.engine.ring(reader)

    # -- reader

    def receive(self, transfer: Transfer, done: Callable[[torch.Tensor, Columns, int], None]) -> None:
        """Collect this rank's part of a transfer; ``done(ids, columns, bytes received from other ranks)``."""
        incoming = _Incoming(self, transfer, done)
        if incoming.missing:
            self._incoming[transfer.number] = incoming
        for piece in incoming.pieces:
            if piece.rank == self.engine.rank:
                self.when_held(transfer.source, incoming.try_finish)

    @property
    def expecting(self) -> bool:
        return bool(self._incoming)

    def missing_from(self, transfer: Transfer) -> list[int]:
        """Ranks from which the headers of a transfer have not arrived yet."""
        incoming = self._incoming.get(transfer.number)
        return sorted(incoming.missing) if incoming else []

    def look(self) -> None:
        """Take the headers that have arrived."""
        for number in list(self._incoming):
            incoming = self._incoming[number]
            tag = 2 * (number % self.engine.tags)
            status = MPI.Status()
            for owner in list(incoming.missing):
                message = self.engine.data.Improbe(owner, tag, status)
                if message is not None:
                    box = bytearray(status.Get_count(MPI.BYTE))
                    message.Recv([box, MPI.BYTE])
                    incoming.headers[owner] = pickle.loads(box)
                    incoming.missing.discard(owner)
                    self.engine.progress = True
            if not incoming.missing:
                del self._incoming[number]
                incoming.try_finish()


class _Incoming:
    """One transfer on its way to this rank."""

    def __init__(
        self, plane: DataPlane, transfer: Transfer, done: Callable[[torch.Tensor, Columns, int], None]
    ):
        self.plane, self.transfer, self.done = plane, transfer, done
        self.me = plane.engine.rank
        self.pieces = transfer.pieces(self.me)
        self.headers: dict[int, _Header] = {}
        self.missing = {piece.rank for piece in self.pieces if piece.rank != self.me}
        self._local = any(piece.rank == self.me for piece in self.pieces)

    def try_finish(self) -> None:
        if self.missing or (self._local and self.transfer.source not in self.plane.held):
            return
        if self._local and len(self.pieces) == 1:  # all here already: views, nothing moves
            ids, columns, stamp = self.plane.slice(self.transfer, self.pieces[0])
            self._check(self.me, stamp)
            self.done(ids, columns, 0)
            return
        self._fill()

    def _check(self, owner: int, stamp: Stamp) -> None:
        expected = self.transfer.stamp
        if stamp != expected:
            names = ", ".join(self.transfer.columns)
            raise ContractError(f"columns {names}: expected {expected}, but rank {owner} holds {stamp}")

    def _fill(self) -> None:
        """Allocate once, receive in place."""
        slices = {}
        for piece in self.pieces:
            if piece.rank == self.me:
                ids, columns, stamp = self.plane.slice(self.transfer, piece)
                layout = [
                    (n, isinstance(c, Ragged), flat(c).dtype, tuple(flat(c).shape))
                    for n, c in columns.items()
                ]
                slices[self.me] = _buffers(ids, columns)
                self.headers[self.me] = _Header(stamp, tuple(layout), len(ids), None)
            self._check(piece.rank, self.headers[piece.rank].stamp)
        headers = [self.headers[piece.rank] for piece in self.pieces]
        for piece, header in zip(self.pieces, headers, strict=True):
            if header.rows != piece.hi - piece.lo:
                raise ContractError(
                    f"rank {piece.rank} sent {header.rows} rows instead of {piece.hi - piece.lo}"
                )
        ids = torch.empty(sum(header.rows for header in headers), dtype=torch.int64)
        columns, targets = self._allocate(headers)
        requests, received, base = [], 0, [0] * (1 + len(targets))
        for header, piece in zip(headers, self.pieces, strict=True):
            buffers = self._places(header, ids, targets, base)
            received += self._fetch(piece.rank, header, buffers, slices, requests)
        finish = lambda: self.done(ids, columns, received)
        if requests:
            self.plane.engine.post(requests, (ids, columns), finish)
        else:
            finish()

    def _allocate(self, headers: list[_Header]) -> tuple[Columns, list[torch.Tensor]]:
        """Empty columns for all pieces together, and the same tensors flat, in the order in which they travel."""
        columns: Columns = {}
        targets: list[torch.Tensor] = []
        for place, (name, ragged, dtype, shape) in enumerate(headers[0].layout):
            kinds = {header.layout[place][:3] + (header.layout[place][3][1:],) for header in headers}
            if len(kinds) > 1:
                raise ContractError(f"owners disagree about column {name}: {sorted(map(str, kinds))}")
            total = sum(header.layout[place][3][0] for header in headers)
            values = torch.empty((total, *shape[1:]), dtype=dtype)
            column: Column = values
            if ragged:
                lengths = torch.empty(sum(header.rows for header in headers), dtype=torch.int64)
                column = Ragged.__new__(Ragged)  # lengths are not here yet: the sum check would fail
                column.values, column.lengths = values, lengths
                targets.append(lengths)
            targets.append(values)
            columns[name] = column
        return columns, targets

    def _places(
        self, header: _Header, ids: torch.Tensor, targets: list[torch.Tensor], base: list[int]
    ) -> list[torch.Tensor]:
        """Where this piece's buffers belong; advances ``base``, the fill level of each target."""
        counts = [header.rows]
        for _, ragged, _, shape in header.layout:
            counts += [header.rows, shape[0]] if ragged else [shape[0]]
        places = []
        for index, (target, count) in enumerate(zip([ids, *targets], counts, strict=True)):
            places.append(target[base[index] : base[index] + count])
            base[index] += count
        return places

    def _fetch(
        self,
        owner: int,
        header: _Header,
        places: list[torch.Tensor],
        slices: dict[int, list[torch.Tensor]],
        requests: list[MPI.Request],
    ) -> int:
        """Copy, unpack or start receiving one piece. Returns the bytes that come from another rank."""
        if owner == self.me:
            for place, tensor in zip(places, slices[owner], strict=True):
                place.copy_(tensor)
            return 0
        chunks = [chunk for place in places for chunk in memory(place)]
        if header.inline is not None:
            offset = 0
            for chunk in chunks:
                chunk[:] = header.inline[offset : offset + len(chunk)]
                offset += len(chunk)
            return offset
        tag = 2 * (self.transfer.number % self.plane.engine.tags) + 1
        requests += [self.plane.engine.data.Irecv([chunk, MPI.BYTE], owner, tag) for chunk in chunks]
        return sum(len(chunk) for chunk in chunks)
