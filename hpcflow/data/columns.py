"""Columns: the only form in which data moves between models.

A column belongs to an ordered list of rows (samples). It is dense (a torch tensor, rows in dimension 0) or
ragged (rows of different lengths, stored flat). There is no padding: padding exists only inside an engine's
forward pass, so its content cannot matter anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Ragged:
    """Rows of different lengths: ``values`` [sum(lengths), ...] of any dtype, ``lengths`` int64 [rows]."""

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        assert self.lengths.dtype == torch.int64 and self.lengths.dim() == 1
        assert int(self.lengths.sum()) == self.values.shape[0], "lengths do not add up to the values"

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def rows(self, lo: int, hi: int) -> Ragged:
        """Rows lo..hi-1 as a view."""
        start = int(self.lengths[:lo].sum())
        stop = start + int(self.lengths[lo:hi].sum())
        return Ragged(self.values[start:stop], self.lengths[lo:hi])

    def select(self, index: torch.Tensor) -> Ragged:
        """The rows named by ``index`` (int64 [k]), in that order, copied."""
        pieces = self.split()
        picked = [pieces[i] for i in index.tolist()]
        values = torch.cat(picked) if picked else self.values[:0]
        return Ragged(values, self.lengths[index])

    def split(self) -> Sequence[torch.Tensor]:
        """One view per row."""
        return self.values.split(self.lengths.tolist()) if len(self) else ()

    def tolist(self) -> list[list]:
        return [row.tolist() for row in self.split()]

    def like(self, values: torch.Tensor) -> Ragged:
        """Other values over the same rows."""
        return Ragged(values, self.lengths)

    @staticmethod
    def from_lists(lists: Iterable[Sequence], dtype: torch.dtype) -> Ragged:
        rows = [torch.as_tensor(row, dtype=dtype) for row in lists]
        lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        return Ragged(torch.cat(rows) if rows else torch.empty(0, dtype=dtype), lengths)

    @staticmethod
    def from_padded(padded: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """From [rows, width, ...], right-padded; what stands in the padding is never read."""
        keep = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
        return Ragged(padded[keep], lengths)

    def to_padded(self, fill: float) -> torch.Tensor:
        """[rows, longest, ...], right-padded with ``fill``."""
        width = int(self.lengths.max()) if len(self) else 0
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        out[torch.arange(width)[None, :] < self.lengths[:, None]] = self.values
        return out


Column = torch.Tensor | Ragged
Columns = dict[str, Column]


def flat(column: Column) -> torch.Tensor:
    """The tensor that holds a column's values."""
    return column.values if isinstance(column, Ragged) else column


def n_rows(columns: Columns) -> int:
    """Number of rows, which all columns must share."""
    counts = {name: len(column) for name, column in columns.items()}
    assert len(set(counts.values())) == 1, f"columns of different length: {counts}"
    return next(iter(counts.values()))


def slice_column(column: Column, lo: int, hi: int) -> Column:
    return column.rows(lo, hi) if isinstance(column, Ragged) else column[lo:hi]


def slice_rows(columns: Columns, lo: int, hi: int) -> Columns:
    """Rows lo..hi-1 of every column, as views."""
    return {name: slice_column(column, lo, hi) for name, column in columns.items()}


def select_rows(columns: Columns, index: torch.Tensor) -> Columns:
    """The rows named by ``index`` (int64 [k]) of every column, in that order."""
    return {
        name: column.select(index) if isinstance(column, Ragged) else column[index]
        for name, column in columns.items()
    }


def cat_columns(parts: Sequence[Column]) -> Column:
    if isinstance(parts[0], Ragged):
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))
    return torch.cat(list(parts))


def cat_rows(parts: Sequence[Columns]) -> Columns:
    """The rows of several parts under each other; all parts have the same columns."""
    return {name: cat_columns([part[name] for part in parts]) for name in parts[0]}


def nbytes(column: Column) -> int:
    """Bytes of the values (and lengths)."""
    values = flat(column)
    size = values.numel() * values.element_size()
    return size + 8 * len(column) if isinstance(column, Ragged) else size


def text_column(texts: Iterable[str]) -> Ragged:
    """Strings as a ragged uint8 column (UTF-8)."""
    rows = [text.encode() for text in texts]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    joined = bytearray(b"".join(rows))
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return Ragged(values, lengths)


def texts(column: Ragged) -> list[str]:
    """The strings of a column made by `text_column`."""
    return [bytes(row.tolist()).decode() for row in column.split()]
