"""What a training engine minimises: a sum of terms, each the aggregate of a loss per token over rows of its
own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcflow.data.columns import Columns, select_rows

Loss = Callable[[torch.Tensor, Columns], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""f(outputs float32 [T], rows) -> (loss per token [T], metrics: per token [T], or 0-dim sums over tokens).
T = response tokens of ``rows``, flat in row order; outputs are log-probs or values."""


@dataclass(frozen=True)
class Term:
    """``weight`` times the aggregate (``agg``) of ``loss`` over this rank's ``rows``.

    ``mini_batches``: int64 indices into ``rows``, as many on every rank. ``name``: of its metric, "" for the
    main term.
    """

    name: str
    rows: Columns
    mini_batches: list[torch.Tensor]
    loss: Loss
    agg: str = "token-mean"
    weight: float = 1.0

    def parts(self) -> list[Columns]:
        """The rows of each mini-batch."""
        return [select_rows(self.rows, index) for index in self.mini_batches]
