"""Samples of several generations, put together to one batch, in the same order for every number of ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcflow.data.columns import Columns, Ragged, cat_rows, select_rows
from hpcflow.data.ids import group_key
from hpcflow.workers.primitive import Output, Rows

COLLECTED = (
    *("prompt_ids", "record", "response_ids", "rollout_log_probs", "old_log_probs", "truncated", "loss_mask"),
    *("reward", "reward_ok", "reward_error", "reward_attempts"),
)
"""Columns that are kept."""


@dataclass
class _Round:
    """One generation: this rank's rows, which begin at row ``first`` of all; of all rows whether their group
    teaches."""

    rows: Rows
    first: int
    teaches: torch.Tensor
    groups: int


class Collector:
    """Rows of the rounds of one iteration. ``prompts``: how many a batch has; ``index``: this rank's
    place."""

    def __init__(self, prompts: int, index: int) -> None:
        self.prompts, self.index = prompts, index
        self._rounds: dict[bytes, _Round] = {}
        self._iteration = -1

    def add(
        self, rows: Rows, teaches: torch.Tensor, gather: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> int:
        """Keep one round (again: it replaces itself). ``teaches``: bool [rows], whether the row itself does;
        a group does if any of its rows does. Returns how many groups that teach are still missing."""
        if rows.iteration != self._iteration:
            self._rounds, self._iteration = {}, rows.iteration
        parts = gather(rows.ids)
        ids, marks = torch.cat(parts), torch.cat(gather(teaches))
        good = set(group_key(ids[marks]).tolist())
        whole = torch.tensor([key in good for key in group_key(ids).tolist()], dtype=torch.bool)
        first = sum(map(len, parts[: self.index]))
        self._rounds[ids.numpy().tobytes()] = _Round(rows, first, whole, len(good))
        return max(0, self.prompts - sum(each.groups for each in self._rounds.values()))

    def take(self, lo: int, hi: int, total: int, exchange: Callable[[bytes], list[bytes]]) -> Output:
        """Rows lo..hi-1 of a batch of ``total``, and forget all others.

        Groups that teach come first, then the rest, both in the order of rounds and of rows in them. Rows
        that move go to all ranks: a batch is small beside the weights.
        """
        rounds, self._rounds = list(self._rounds.values()), {}
        places = [(k, row) for k, each in enumerate(rounds) for row in range(len(each.teaches))]
        order = sorted(places, key=lambda place: not rounds[place[0]].teaches[place[1]])[:total]
        assert len(order) == total, f"{len(order)} rows were kept, {total} are asked for"
        position = {place: index for index, place in enumerate(order)}
        mine, found = [], []
        for k, each in enumerate(rounds):
            here = [position.get((k, each.first + row), -1) for row in range(len(each.rows))]
            chosen = torch.tensor([row for row, at in enumerate(here) if at >= 0], dtype=torch.int64)
            found += [at for at in here if at >= 0]
            mine.append({**select_rows(each.rows.columns, chosen), "id": each.rows.ids[chosen]})
        held = {**cat_rows(mine), "at": torch.tensor(found, dtype=torch.int64)}
        stays = (held["at"] >= lo) & (held["at"] < hi)
        moved = [
            _unpack(said) for said in exchange(_pack(select_rows(held, torch.nonzero(~stays).flatten())))
        ]
        everything = cat_rows([select_rows(held, torch.nonzero(stays).flatten()), *moved])
        wanted = (everything["at"] >= lo) & (everything["at"] < hi)
        columns = select_rows(everything, torch.nonzero(wanted).flatten())
        columns = select_rows(columns, columns.pop("at").argsort())
        ids = columns.pop("id")
        return Output(
            columns, ids=ids, value={"kept_groups": sum(r.groups for r in rounds), "rounds": len(rounds)}
        )


def _pack(columns: Columns) -> bytes:
    buffer = io.BytesIO()
    torch.save({n: (c.values, c.lengths) if isinstance(c, Ragged) else c for n, c in columns.items()}, buffer)
    return buffer.getvalue()


def _unpack(payload: bytes) -> Columns:
    columns = torch.load(io.BytesIO(payload), weights_only=True)
    return {n: Ragged(*c) if isinstance(c, tuple) else c for n, c in columns.items()}
