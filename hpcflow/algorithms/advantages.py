"""Advantage estimators: from rewards, values and log-probs to a number per response token.

Called as ``f(ids, rows, gather, **params)`` on each data-parallel rank of the actor, with its own rows:

* ids: int64 [rows], sample ids;
* rows: columns reward (float32 [rows]), reward_ok (bool [rows]), loss_mask (Ragged bool), old_log_probs and,
  where used, ref_log_probs and values (Ragged float32), ragged ones over response tokens;
* gather(t): t of every rank in row order (``list[Tensor]``; dimension 0 may differ).

Returns advantages, returns (Ragged float32), loss_mask (Ragged bool) and, when there are ref_log_probs, kl
(Ragged float32). Rows whose reward failed (reward_ok false) get advantage 0 and an all-false loss_mask, and
enter no statistic. Tokens that loss_mask excludes (a tool's output inside a response) have advantage and
return 0, and are skipped: the kept token after them is their successor. Every result is bitwise the same
however rows are spread over ranks (`hpcflow.algorithms.statistics`). Estimators over groups are in
`hpcflow.algorithms.group_advantages`.

Parameters that several share: ``kl_coef`` times the KL estimate ``kl`` of old against reference log-probs is
taken off the reward of each token, the reward proper stands at the last token of the response; ``unbiased``
chooses the variance that whitening divides by (verl and TRL: unbiased; OpenRLHF: biased).
"""

from __future__ import annotations

import torch

from hpcflow.algorithms import statistics as s
from hpcflow.algorithms.statistics import Gather
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.needs import reads


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
    unbiased: bool = True,
) -> Columns:
    """Generalised advantage estimation (Schulman et al. 2016).

    delta_t = r_t + gamma * V_{t+1} - V_t; A_t = delta_t + gamma * lam * A_{t+1}; return_t = A_t + V_t, before
    whitening. Excluded tokens are skipped, as in verl; OpenRLHF decays once more per excluded token.
    ``whiten`` brings the advantages of all tokens of the batch to mean 0 and variance 1.
    """
    mask = s.loss_mask(rows)
    divergence = s.kl_column(rows, kl, required=kl_coef != 0)
    rewards = s.token_rewards(mask, rows["reward"], divergence, kl_coef)
    advantages, returns = _gae(mask, rewards, rows["values"], gamma, lam)
    if whiten:
        advantages = s.whitened(advantages, mask.to_padded(False), gather, unbiased)
    return s.result(mask, advantages, returns, divergence)


@reads(
    *("reward", "reward_ok", "cost", "cost_ok", "loss_mask", "old_log_probs", "values", "cost_values"),
    optional=("ref_log_probs",),
    writes=("cost_returns",),
)
def safe_gae(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    multiplier: float = 0.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coef: float = 0.0,
    kl: str = "k1",
    whiten: bool = True,
    unbiased: bool = True,
) -> Columns:
    """The advantage of PPO-Lagrangian (Dai et al. 2024, Safe RLHF, arXiv:2310.12773): (A_r - m * A_c) / (1 +
    m).

    A_r is `gae` of the reward, KL penalty included; A_c is GAE of the cost with the cost critic's values
    (column cost_values), without penalty; m >= 0 is the Lagrange multiplier. Dividing by 1 + m keeps the
    scale of the update. Whitened after the combination, so that m = 0 is exactly `gae`. Also writes
    cost_returns, what the cost critic learns. Rows whose reward or cost failed count nowhere.
    """
    mask = s.loss_mask(rows, "cost_ok")
    divergence = s.kl_column(rows, kl, required=kl_coef != 0)
    rewards = s.token_rewards(mask, rows["reward"], divergence, kl_coef)
    advantages, returns = _gae(mask, rewards, rows["values"], gamma, lam)
    costs = s.token_rewards(mask, rows["cost"], None, 0.0)
    cost_advantages, cost_returns = _gae(mask, costs, rows["cost_values"], gamma, lam)
    if multiplier != 0:
        advantages = (advantages - multiplier * cost_advantages) / (1 + multiplier)
    if whiten:
        advantages = s.whitened(advantages, mask.to_padded(False), gather, unbiased)
    return s.result(mask, advantages, returns, divergence) | {"cost_returns": s.ragged(cost_returns, mask)}


@reads(
    "reward", "reward_ok", "baseline", "baseline_ok", "loss_mask", optional=("old_log_probs", "ref_log_probs")
)
def remax(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    kl_coef: float = 0.0,
    kl: str = "k1",
) -> Columns:
    """The reward to come less the reward of the greedy response to the same prompt (Li et al. 2024, ReMax,
    arXiv:2310.10505, equation 4). Undiscounted; column baseline float32 [rows] holds the greedy reward."""
    mask = s.loss_mask(rows, "baseline_ok")
    divergence = s.kl_column(rows, kl, required=kl_coef != 0)
    rewards = s.token_rewards(mask, rows["reward"], divergence, kl_coef)
    keep = mask.to_padded(False)
    returns = s.returns_to_go(rewards, keep, 1.0)
    advantages = torch.where(keep, returns - rows["baseline"].double()[:, None], 0.0)
    return s.result(mask, advantages, returns, divergence)


@reads("reward", "reward_ok", "loss_mask", optional=("old_log_probs", "ref_log_probs"))
def reinforce_pp(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    gamma: float = 1.0,
    kl_coef: float = 0.0,
    kl: str = "k1",
    baseline: bool = False,
    unbiased: bool = True,
) -> Columns:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): discounted returns, whitened over the tokens of the
    whole batch.

    R_t = r_t + gamma * R_{t+1}; A = whiten(R). ``baseline`` first takes the mean reward of the prompt's draws
    off each reward (REINFORCE++-baseline); a prompt with one draw left then has 0 before whitening, where
    verl keeps its reward.
    """
    mask = s.loss_mask(rows)
    divergence = s.kl_column(rows, kl, required=kl_coef != 0)
    reward = rows["reward"].double()
    if baseline:
        found = s.groups(ids, reward, s.usable(rows), gather)
        pairs = zip(found, reward.tolist(), strict=True)
        reward = torch.tensor([group.centred(r) if group else 0.0 for group, r in pairs], dtype=torch.float64)
    keep = mask.to_padded(False)
    returns = s.returns_to_go(s.token_rewards(mask, reward, divergence, kl_coef), keep, gamma)
    return s.result(mask, s.whitened(returns, keep, gather, unbiased), returns, divergence)


def _gae(
    mask: Ragged, rewards: torch.Tensor, values: Ragged, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), float64 [rows, longest], of token rewards."""
    keep, value = mask.to_padded(False), s.padded(values, mask)
    advantages = torch.zeros_like(value)
    ahead_advantage, ahead_value = torch.zeros(len(mask)).double(), torch.zeros(len(mask)).double()
    for t in reversed(range(value.shape[1])):
        delta = rewards[:, t] + gamma * ahead_value - value[:, t]
        here = delta + gamma * lam * ahead_advantage
        advantages[:, t] = torch.where(keep[:, t], here, 0.0)
        ahead_advantage = torch.where(keep[:, t], here, ahead_advantage)
        ahead_value = torch.where(keep[:, t], value[:, t], ahead_value)
    return advantages, torch.where(keep, advantages + value, 0.0)
