"""How per-token losses become one number, independent of micro-batches and of data parallelism.

A loss is sum(weight * loss per token) over all tokens of the mini-batch, wherever they are. The weights hold the
mini-batch's global counts, so partial sums of any split add up to the same loss.
"""

from __future__ import annotations

import torch

from hpcflow.data.columns import Ragged

AGGREGATIONS = ("token-mean", "seq-mean-token-mean")


def token_counts(loss_mask: Ragged) -> tuple[int, int]:
    """(tokens, rows) that count: true tokens of ``loss_mask`` (bool), and rows with at least one of them.

    To be summed over the data-parallel ranks for `token_weights`.
    """
    per_row = _tokens_of_rows(loss_mask)
    return int(per_row.sum()), int((per_row > 0).sum())


def token_weights(loss_mask: Ragged, agg: str, global_tokens: int, global_rows: int) -> torch.Tensor:
    """float32 [T] over the tokens of ``loss_mask`` (bool): what each token's loss is multiplied by.

    token-mean: 1 / global_tokens. seq-mean-token-mean: 1 / (tokens of its row * global_rows); rows without a
    true token count nowhere, as in verl and OpenRLHF. 0 where the mask is false. ValueError for another ``agg``.
    """
    if agg not in AGGREGATIONS:
        raise ValueError(f"agg={agg!r} is not known; it must be {' or '.join(AGGREGATIONS)}")
    mask = loss_mask.values.to(torch.float64)
    if agg == "token-mean":
        return (mask / max(1, global_tokens)).float()
    tokens = _tokens_of_rows(loss_mask).repeat_interleave(loss_mask.lengths)
    return (mask / (tokens.clamp(min=1) * max(1, global_rows))).float()


def _tokens_of_rows(loss_mask: Ragged) -> torch.Tensor:
    row = torch.arange(len(loss_mask)).repeat_interleave(loss_mask.lengths)
    counts = torch.zeros(len(loss_mask), dtype=torch.int64)
    return counts.index_add_(0, row, loss_mask.values.to(torch.int64))
