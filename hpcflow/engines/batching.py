"""From ragged rows to the padded tensors of one forward pass, and back.

A row is a prompt followed by a response. The token at response position j is predicted from sequence position
``len(prompt) - 1 + j``: that is where log-probs and values are read, and only those positions go through a
head. Padding stands on the right, where causal attention cannot see it, so no attention mask is needed and
the content of the padding cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcflow.data.columns import Columns, Ragged

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


@dataclass(frozen=True)
class Padded:
    """One forward pass. T = response tokens of its rows, flat in row order.

    input_ids: int64 [rows, width]; read: int64 [T], indices into the flattened [rows * width] positions,
    where the token is predicted; targets: int64 [T], the tokens themselves; last: int64 [rows], the flattened
    position of the last token of each row.
    """

    input_ids: torch.Tensor
    read: torch.Tensor
    targets: torch.Tensor
    last: torch.Tensor

    def to(self, device: torch.device) -> Padded:
        return Padded(*(t.to(device, non_blocking=True) for t in vars(self).values()))


def pad(rows: Columns) -> Padded:
    """Columns prompt_ids and response_ids (ragged int64) -> one padded batch.

    No rows give a batch of one padding token and nothing to read: a rank without work takes part in
    collectives with it and contributes exactly zero. ValueError for an empty prompt, whose first response
    token nothing predicts.
    """
    prompt, response = rows["prompt_ids"], rows["response_ids"]
    if len(prompt) == 0:
        none = torch.zeros(0, dtype=torch.int64)
        return Padded(torch.zeros(1, 1, dtype=torch.int64), none, none, none)
    start = prompt.lengths[:, None]
    if int(start.min()) < 1:
        raise ValueError(f"row {int(start.argmin())} has an empty prompt; a prompt needs at least one token")
    stop = start + response.lengths[:, None]
    width = int(stop.max())
    place = torch.arange(width)[None, :]
    input_ids = torch.zeros(len(prompt), width, dtype=torch.int64)
    input_ids[place < start] = prompt.values
    input_ids[(place >= start) & (place < stop)] = response.values
    read = ((place >= start - 1) & (place < stop - 1)).flatten().nonzero()[:, 0]
    last = torch.arange(len(prompt)) * width + stop[:, 0] - 1
    return Padded(input_ids, read, response.values, last)


def micro_batches(rows: Columns, max_rows: int, max_tokens: int = 0) -> list[torch.Tensor]:
    """Row indices of each micro-batch, longest rows first: at most ``max_rows`` rows and, where
    ``max_tokens`` > 0, at most that many padded tokens (but at least one row).

    Sorted by length, so that little of a batch is padding and the largest allocation comes first.
    """
    length = rows["prompt_ids"].lengths + rows["response_ids"].lengths
    order = length.argsort(descending=True, stable=True)
    parts, begin = [], 0
    while begin < len(order):
        size = max_rows
        if max_tokens:
            size = min(size, max(1, max_tokens // max(1, int(length[order[begin]]))))
        parts.append(order[begin : begin + size])
        begin += size
    return parts


def to_row_order(
    parts: Sequence[torch.Tensor], values: Sequence[torch.Tensor], lengths: torch.Tensor
) -> Ragged:
    """Flat results of each micro-batch -> one ragged column in row order; ``lengths`` int64 [rows] in row
    order."""
    if not parts:
        return Ragged(torch.empty(0), lengths)
    order = torch.cat(list(parts))
    return Ragged(torch.cat(list(values)), lengths[order]).select(order.argsort())


def loss_mask(rows: Columns) -> Ragged:
    """The column loss_mask, or all true where there is none."""
    if "loss_mask" in rows:
        return rows["loss_mask"]
    response = rows["response_ids"]
    return response.like(torch.ones(response.values.shape[0], dtype=torch.bool))


def counts(mask: Ragged) -> tuple[int, int, int]:
    """(masked tokens, rows with at least one, rows)."""
    per_row = tokens_per_row(mask)
    return int(per_row.sum()), int((per_row > 0).sum()), len(mask)


def tokens_per_row(mask: Ragged) -> torch.Tensor:
    """int64 [rows]: how many tokens of each row count."""
    row = torch.repeat_interleave(torch.arange(len(mask)), mask.lengths)
    return torch.zeros(len(mask), dtype=torch.int64).index_add_(0, row, mask.values.long())


def token_weights(mask: Ragged, agg: str, tokens: int, rows: int) -> torch.Tensor:
    """float32 [T]: what each token's loss counts in the loss of a mini-batch, summed over all ranks and
    micro-batches.

    ``tokens`` and ``rows`` are the mini-batch's global counts (`counts`). "token-mean": every token the same;
    "seq-mean-token-mean": every row with a token the same, which its tokens share; "seq-mean-token-sum":
    every token 1 / rows, so that long rows count more. The first two sum to 1. ValueError for another
    ``agg``.
    """
    if agg == "token-mean":
        return mask.values.float() / max(tokens, 1)
    if agg == "seq-mean-token-sum":
        return mask.values.float() / max(rows, 1)
    if agg == "seq-mean-token-mean":
        per_row = tokens_per_row(mask).clamp(min=1).float() * max(rows, 1)
        return mask.values.float() / torch.repeat_interleave(per_row, mask.lengths)
    raise ValueError(f"agg={agg} is not one of {', '.join(AGGREGATIONS)}")
