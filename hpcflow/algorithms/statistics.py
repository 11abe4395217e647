"""What the advantage estimators are made of: masks, groups, sums, whitening.

Statistics are taken over the whole batch, from one number per row, with exactly rounded sums (`math.fsum`),
and a row's numbers are computed in float64 without looking at other rows: every result is bitwise the same
however the rows are spread over ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hpcflow.algorithms.kl import estimate
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.ids import group_key

Gather = Callable[[torch.Tensor], list[torch.Tensor]]

WHITEN_EPS = 1e-8  # added to the variance, as in verl and TRL
EQUAL = 1e-6  # rewards of a group closer than this (relative to max(1, |reward|)) differ by rounding only


def usable(rows: Columns, also: str | None = None) -> torch.Tensor:
    """bool [rows]: the reward, and what column ``also`` marks, could be computed."""
    return rows["reward_ok"] & rows[also] if also else rows["reward_ok"]


def loss_mask(rows: Columns, also: str | None = None) -> Ragged:
    """The rows' loss_mask, false throughout for rows that are not `usable`."""
    mask = rows["loss_mask"]
    return mask.like(mask.values & usable(rows, also).repeat_interleave(mask.lengths))


def kl_column(rows: Columns, kl: str, required: bool) -> Ragged | None:
    """KL estimates of old against reference log-probs; None where there is no reference."""
    if "ref_log_probs" not in rows and not required:
        return None
    old, reference = rows["old_log_probs"], rows["ref_log_probs"]
    return old.like(estimate(kl, old.values.double(), reference.values.double()))


def padded(column: Ragged, mask: Ragged) -> torch.Tensor:
    """float64 [rows, longest], 0 where the mask is false."""
    return column.like(torch.where(mask.values, column.values.double(), 0.0)).to_padded(0.0)


def token_rewards(
    mask: Ragged, reward: torch.Tensor, divergence: Ragged | None, kl_coef: float
) -> torch.Tensor:
    """float64 [rows, longest]: -kl_coef * divergence at each kept token, ``reward`` [rows] added at the last
    one."""
    keep = mask.to_padded(False)
    rewards = torch.zeros(keep.shape, dtype=torch.float64)
    if kl_coef != 0:
        rewards -= kl_coef * padded(divergence, mask)
    if keep.shape[1]:
        position = torch.arange(keep.shape[1]).expand_as(keep)
        last = torch.where(keep, position, -1).amax(dim=1)
        has = last >= 0
        rewards[has, last[has]] += reward[has].double()
    return rewards


def returns_to_go(rewards: torch.Tensor, keep: torch.Tensor, gamma: float) -> torch.Tensor:
    """float64 [rows, width]: R_t = r_t + gamma * R_(next kept token); 0 at tokens that are not kept."""
    returns, ahead = torch.zeros_like(rewards), torch.zeros(rewards.shape[0], dtype=rewards.dtype)
    for t in reversed(range(rewards.shape[1])):
        here = rewards[:, t] + gamma * ahead
        returns[:, t] = torch.where(keep[:, t], here, 0.0)
        ahead = torch.where(keep[:, t], here, ahead)
    return returns


def whitened(values: torch.Tensor, keep: torch.Tensor, gather: Gather, unbiased: bool = True) -> torch.Tensor:
    """``values`` [rows, width] to mean 0 and variance 1 over the kept tokens of all ranks."""
    count = sum(torch.cat(gather(keep.sum(dim=1))).tolist())
    if count < 2:
        return torch.zeros_like(values)
    mean = total(values, keep, gather) / count
    variance = total((values - mean).square(), keep, gather) / (count - unbiased)
    return torch.where(keep, (values - mean) / math.sqrt(variance + WHITEN_EPS), 0.0)


def total(values: torch.Tensor, keep: torch.Tensor, gather: Gather) -> float:
    """Sum over the kept tokens of all ranks."""
    per_row = torch.zeros(values.shape[0], dtype=torch.float64)
    # one column after the other: torch.sum's order of additions would depend on the longest row of this rank
    for t in range(values.shape[1]):
        per_row += torch.where(keep[:, t], values[:, t], 0.0)
    return math.fsum(torch.cat(gather(per_row)).tolist())


@dataclass(frozen=True)
class Group:
    """The usable rewards of one prompt's draws, over all ranks."""

    rewards: list[float]

    @property
    def flat(self) -> bool:
        """Nothing but rounding tells the rewards apart; also for a single one."""
        scale = max(1.0, *map(abs, self.rewards))
        return max(self.rewards) - min(self.rewards) <= EQUAL * scale

    @property
    def mean(self) -> float:
        return math.fsum(self.rewards) / len(self.rewards)

    def centred(self, reward: float) -> float:
        """The reward less the group's mean; exactly 0 in a flat group."""
        return 0.0 if self.flat else reward - self.mean

    def deviation(self) -> float:
        """Unbiased standard deviation, exactly 0 in a flat group."""
        return 0.0 if self.flat else deviation(self.rewards)


def deviation(values: list[float]) -> float:
    """Unbiased standard deviation of two or more numbers."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def groups(ids: torch.Tensor, reward: torch.Tensor, ok: torch.Tensor, gather: Gather) -> list[Group | None]:
    """For each row of this rank the group of its prompt; None where its reward is not usable."""
    found: dict[int, list[float]] = defaultdict(list)
    everyone = (torch.cat(gather(part)).tolist() for part in (group_key(ids), ok, reward.double()))
    for key, good, value in zip(*everyone, strict=True):
        if good:
            found[key].append(value)
    made = {key: Group(rewards) for key, rewards in found.items()}
    keys = group_key(ids).tolist()
    return [made[key] if good else None for key, good in zip(keys, ok.tolist(), strict=True)]


def per_token(mask: Ragged, numbers: list[float]) -> torch.Tensor:
    """float64 [rows, longest]: each row's number at its kept tokens, 0 elsewhere."""
    return torch.where(mask.to_padded(False), torch.tensor(numbers, dtype=torch.float64)[:, None], 0.0)


def result(
    mask: Ragged, advantages: torch.Tensor, returns: torch.Tensor, divergence: Ragged | None = None
) -> Columns:
    """The columns of an estimator, float32."""
    columns: Columns = {
        "advantages": ragged(advantages, mask),
        "returns": ragged(returns, mask),
        "loss_mask": mask,
    }
    if divergence is not None:
        columns["kl"] = divergence.like(divergence.values.float())
    return columns


def ragged(values: torch.Tensor, mask: Ragged) -> Ragged:
    """float32, from [rows, longest]."""
    return Ragged.from_padded(values.float(), mask.lengths)
