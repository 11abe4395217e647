"""What was killed where, and what became of the run: one row a kill."""

from __future__ import annotations

ROWS: list[tuple[str, ...]] = []
HEAD = ("iteration", "node", "when", "killed", "goes on with iteration", "node", "kept", "replayed", "result")


def add(*row: object) -> None:
    ROWS.append(tuple(map(str, row)))


def table() -> list[str]:
    widths = [max(len(row[i]) for row in (HEAD, *ROWS)) for i in range(len(HEAD) - 1)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in (HEAD, *ROWS)
    ]
