"""Advantage estimators: from rewards, values and log-probs to a number per response token.

Called as ``f(ids, rows, gather, **params)`` on each data-parallel rank of the actor, with its own rows:

* ids: int64 [rows], sample ids;
* rows: columns reward (float32 [rows]), reward_ok (bool [rows]), loss_mask (Ragged bool), old_log_probs and,
  where used, ref_log_probs and values (Ragged float32), ragged ones over response tokens;
* gather(t): t of every rank in row order (``list[Tensor]``; dimension 0 may differ).

Returns advantages, returns (Ragged float32), loss_mask (Ragged bool) and, when there are ref_log_probs, kl
(Ragged float32). Rows whose reward failed (reward_ok false) get advantage 0 and an all-false loss_mask, and
enter no statistic. Tokens that loss_mask excludes (a tool's output inside a response) have advantage and
return 0.

Statistics are taken over the whole batch, from one number per row, with exactly rounded sums (`math.fsum`),
and a row's numbers are computed in float64 without looking at other rows: every result is bitwise the same
however the rows are spread over ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch

from hpcflow.algorithms.kl import estimate
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.ids import group_key
from hpcflow.data.needs import reads

Gather = Callable[[torch.Tensor], list[torch.Tensor]]

WHITEN_EPS = 1e-8  # added to the variance, as in verl and TRL
EQUAL = 1e-6  # rewards of a group closer than this (relative to max(1, |reward|)) differ by rounding only


@reads("reward", "reward_ok", "loss_mask", "old_log_probs", "values", optional=("ref_log_probs",))
def gae(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.0,
    kl: str = "k1",
    whiten: bool = True,
) -> Columns:
    """Generalised advantage estimation (Schulman et al. 2016).

    The reward stands at the last token of the response; each token costs ``kl_coef`` times the KL estimate
    ``kl`` of old against reference log-probs. delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma *
    lam * A_{t+1}; return_t = A_t + V_t, before whitening. Excluded tokens are skipped: the token after them
    is the successor (as in verl; OpenRLHF decays once more per excluded token). ``whiten`` brings the
    advantages of all tokens of the batch to mean 0 and (unbiased) variance 1.
    """
    mask = _loss_mask(rows)
    divergence = _kl_column(rows, kl, required=kl_coef != 0)
    keep, values = mask.to_padded(False), _padded(rows["values"], mask)
    rewards = torch.zeros_like(values)
    if kl_coef != 0:
        rewards -= kl_coef * _padded(divergence, mask)
    _add_at_last(rewards, keep, rows["reward"].double())

    advantages = torch.zeros_like(values)
    ahead_advantage, ahead_value = torch.zeros(len(mask)).double(), torch.zeros(len(mask)).double()
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * ahead_value - values[:, t]
        here = delta + gamma * lam * ahead_advantage
        advantages[:, t] = torch.where(keep[:, t], here, 0.0)
        ahead_advantage = torch.where(keep[:, t], here, ahead_advantage)
        ahead_value = torch.where(keep[:, t], values[:, t], ahead_value)
    returns = torch.where(keep, advantages + values, 0.0)
    if whiten:
        advantages = _whitened(advantages, keep, gather)
    return _result(mask, advantages, returns, divergence)


@reads("reward", "reward_ok", "loss_mask", optional=("old_log_probs", "ref_log_probs"))
def grpo(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    std: bool = True,
    eps: float = 1e-6,
    kl: str = "k3",
) -> Columns:
    """Group-normalised rewards: (reward - mean) / (standard deviation + ``eps``) over the draws of a prompt.

    The same number at every token of a response; returns repeat the advantages. Mean and (unbiased) deviation
    are over the draws whose reward did not fail. ``std`` false leaves out the division (Dr. GRPO). A group of
    equal rewards gives exactly 0, rounding noise in them included, and so does a group with one draw left: it
    has nothing to compare with (verl would keep the raw reward). ``kl`` is only for the column of that name.
    """
    mask = _loss_mask(rows)
    reward, ok, keys = rows["reward"].double(), rows["reward_ok"], group_key(ids)
    groups = defaultdict(list)
    everyone = (torch.cat(gather(part)).tolist() for part in (keys, ok, reward))
    for key, good, value in zip(*everyone, strict=True):
        if good:
            groups[key].append(value)
    statistics = {key: _group_statistics(values) for key, values in groups.items()}
    advantage = []
    for key, good, value in zip(keys.tolist(), ok.tolist(), reward.tolist(), strict=True):
        mean, deviation = statistics[key] if good else (0.0, 0.0)
        if deviation == 0:
            advantage.append(0.0)
        else:
            advantage.append((value - mean) / (deviation + eps) if std else value - mean)
    per_row = torch.tensor(advantage, dtype=torch.float64)
    keep = mask.to_padded(False)
    advantages = torch.where(keep, per_row[:, None], 0.0)
    return _result(mask, advantages, advantages, _kl_column(rows, kl, required=False))


def _group_statistics(rewards: list[float]) -> tuple[float, float]:
    """(mean, unbiased standard deviation); deviation exactly 0 when nothing tells the rewards apart."""
    mean = math.fsum(rewards) / len(rewards)
    if max(rewards) - min(rewards) <= EQUAL * max(1.0, *map(abs, rewards)):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def _loss_mask(rows: Columns) -> Ragged:
    """The rows' loss_mask, false throughout for rows whose reward failed."""
    mask = rows["loss_mask"]
    return mask.like(mask.values & rows["reward_ok"].repeat_interleave(mask.lengths))


def _kl_column(rows: Columns, kl: str, required: bool) -> Ragged | None:
    if "ref_log_probs" not in rows and not required:
        return None
    old, reference = rows["old_log_probs"], rows["ref_log_probs"]
    return old.like(estimate(kl, old.values.double(), reference.values.double()))


def _padded(column: Ragged, mask: Ragged) -> torch.Tensor:
    """float64 [rows, longest], 0 where the mask is false."""
    return column.like(torch.where(mask.values, column.values.double(), 0.0)).to_padded(0.0)


def _add_at_last(rewards: torch.Tensor, keep: torch.Tensor, reward: torch.Tensor) -> None:
    """Add ``reward`` [rows] at the last kept token, if any, of each row of ``rewards`` [rows, width]."""
    if rewards.shape[1] == 0:
        return
    position = torch.arange(rewards.shape[1]).expand_as(keep)
    last = torch.where(keep, position, -1).amax(dim=1)
    has = last >= 0
    rewards[has, last[has]] += reward[has]


def _whitened(values: torch.Tensor, keep: torch.Tensor, gather: Gather) -> torch.Tensor:
    """``values`` [rows, width] to mean 0 and unbiased variance 1 over the kept tokens of all ranks."""
    counts = sum(torch.cat(gather(keep.sum(dim=1))).tolist())
    if counts < 2:
        return torch.zeros_like(values)
    mean = _total(values, keep, gather) / counts
    variance = _total((values - mean).square(), keep, gather) / (counts - 1)
    return torch.where(keep, (values - mean) / math.sqrt(variance + WHITEN_EPS), 0.0)


def _total(values: torch.Tensor, keep: torch.Tensor, gather: Gather) -> float:
    """Sum over the kept tokens of all ranks."""
    per_row = torch.zeros(values.shape[0], dtype=torch.float64)
    # one column after the other: torch.sum's order of additions would depend on the longest row of this rank
    for t in range(values.shape[1]):
        per_row += torch.where(keep[:, t], values[:, t], 0.0)
    return math.fsum(torch.cat(gather(per_row)).tolist())


def _result(
    mask: Ragged, advantages: torch.Tensor, returns: torch.Tensor, divergence: Ragged | None
) -> Columns:
    columns: Columns = {
        "advantages": Ragged.from_padded(advantages.float(), mask.lengths),
        "returns": Ragged.from_padded(returns.float(), mask.lengths),
        "loss_mask": mask,
    }
    if divergence is not None:
        columns["kl"] = divergence.like(divergence.values.float())
    return columns
