"""Small runs for tests of the store and of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpcflow.data.columns import Column, Columns, Ragged, flat
from hpcflow.store import RunWriter

ROWS = 4


def assert_same(left: Column, right: Column) -> None:
    """Equal in type, shape and every bit (NaN included)."""
    assert type(left) is type(right)
    a, b = flat(left), flat(right)
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.numel() else True
    if isinstance(left, Ragged):
        assert left.lengths.equal(right.lengths)


def columns_of(iteration: int) -> Columns:
    """Four samples whose values tell the iteration."""
    base = 10 * iteration
    return {
        "response_ids": Ragged.from_lists([[base], [base, base + 1], [], [base + 2]], torch.int64),
        "reward": torch.tensor([base, base + 1, base + 2, base + 3], dtype=torch.float32),
        "reward_ok": torch.ones(ROWS, dtype=torch.bool),
    }


def ids_of(iteration: int) -> torch.Tensor:
    return torch.arange(ROWS) + ROWS * iteration


def write(writer: RunWriter, iteration: int, facts: dict[str, Any] | None = None) -> dict[str, float]:
    columns = columns_of(iteration)
    stamps = {name: (iteration, "actor", iteration) for name in columns}
    writer.record(iteration, ids_of(iteration), columns, stamps)
    return writer.commit(iteration, facts or {"versions": {"actor": iteration + 1}})


def assert_iteration(run: Any, number: int) -> None:
    """The iteration holds exactly what `write` wrote."""
    found = run.iteration(number)
    assert found.number == number and found.ids.equal(ids_of(number))
    wanted = columns_of(number)
    assert set(found.columns) == set(wanted)
    for name, column in wanted.items():
        assert_same(found.columns[name], column)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "iterations").iterdir() if path.suffix == ".h5")
