"""Advantage estimators without a critic: the draws of one prompt are each other's baseline.

Signature, columns and promises as in `hpcflow.algorithms.advantages`. One number per response, the same at
each of its tokens; returns repeat the advantages. A group of equal rewards gives exactly 0, rounding noise in
them included, and so does a group with one draw left: it has nothing to compare with (verl keeps the raw
reward there, save in its vectorised RLOO). Groups are over the draws whose reward did not fail. ``kl``
without ``kl_coef`` is only for the column of that name.
"""

from __future__ import annotations

import math

import torch

from hpcflow.algorithms import statistics as s
from hpcflow.algorithms.statistics import Gather
from hpcflow.data.columns import Columns, Ragged
from hpcflow.data.needs import reads

SCALES = ("group", "batch", "none")


@reads("reward", "reward_ok", "loss_mask", optional=("old_log_probs", "ref_log_probs"))
def grpo(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    scale: str = "group",
    eps: float = 1e-6,
    kl: str = "k3",
) -> Columns:
    """Group-normalised rewards (Shao et al. 2024, arXiv:2402.03300): (r - mean) / (deviation + ``eps``).

    ``scale``: the unbiased deviation is that of the prompt's draws ("group"), that of all rewards of the
    batch ("batch", an option of TRL), or there is no division ("none": Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783). ``eps``: 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.
    """
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is not known; it must be one of {', '.join(SCALES)}")
    return _grpo(ids, rows, rows["reward"], s.loss_mask(rows), gather, scale, eps, kl)


@reads("reward", "reward_ok", "loss_mask", "truncated", optional=("old_log_probs", "ref_log_probs"))
def dapo(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    max_tokens: int,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    mask_truncated: bool = False,
    eps: float = 1e-6,
    kl: str = "k3",
) -> Columns:
    """`grpo` with DAPO's shaping of overlong responses (Yu et al. 2025, arXiv:2503.14476, section 3.4).

    A response of n tokens loses ``overlong_penalty`` * min(1, (n - (max_tokens - overlong_buffer)) /
    overlong_buffer) of its reward where that is positive (equation 13); ``overlong_buffer`` 0: nothing.
    ``max_tokens``: the limit of sampling. ``mask_truncated`` leaves what the limit cut off out of the loss,
    though not out of the statistics.
    """
    reward, length = rows["reward"].double(), rows["loss_mask"].lengths
    if overlong_buffer:
        excess = (length - (max_tokens - overlong_buffer)).double() / overlong_buffer
        reward = reward - overlong_penalty * excess.clamp(0.0, 1.0)
    mask = s.loss_mask(rows)
    if mask_truncated:
        mask = mask.like(mask.values & ~rows["truncated"].repeat_interleave(mask.lengths))
    return _grpo(ids, rows, reward, mask, gather, "group", eps, kl)


@reads("reward", "reward_ok", "loss_mask", optional=("old_log_probs", "ref_log_probs"))
def rloo(
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    kl_coef: float = 0.0,
    kl: str = "k1",
    normalize: bool = False,
    eps: float = 1e-4,
) -> Columns:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740): the reward less the mean of the other
    draws.

    ``kl_coef`` takes the KL still to come off each token, as OpenRLHF does; then a flat group is not 0.
    ``normalize``: to mean 0 and deviation 1 over the responses of the batch, with ``eps`` (an option of TRL).
    """
    mask, reward, ok = s.loss_mask(rows), rows["reward"].double(), s.usable(rows)
    found = s.groups(ids, reward, ok, gather)
    numbers = [
        group.centred(r) * (len(group.rewards) / max(1, len(group.rewards) - 1)) if group else 0.0
        for group, r in zip(found, reward.tolist(), strict=True)
    ]
    if normalize:
        numbers = _normalized(numbers, ok, gather, eps)
    divergence = s.kl_column(rows, kl, required=kl_coef != 0)
    advantages = s.per_token(mask, numbers)
    if kl_coef != 0:
        penalty = s.token_rewards(mask, torch.zeros_like(reward), divergence, kl_coef)
        advantages = advantages + s.returns_to_go(penalty, mask.to_padded(False), 1.0)
    return s.result(mask, advantages, advantages, divergence)


def _grpo(
    ids: torch.Tensor,
    rows: Columns,
    reward: torch.Tensor,
    mask: Ragged,
    gather: Gather,
    scale: str,
    eps: float,
    kl: str,
) -> Columns:
    ok, reward = s.usable(rows), reward.double()
    found = s.groups(ids, reward, ok, gather)
    everything = [r for r, good in zip(*_everyone(reward, ok, gather), strict=True) if good]
    spread = s.deviation(everything) if len(everything) > 1 else 0.0
    numbers = []
    for group, value in zip(found, reward.tolist(), strict=True):
        centred = group.centred(value) if group else 0.0
        if centred and scale != "none":
            centred /= (group.deviation() if scale == "group" else spread) + eps
        numbers.append(centred)
    advantages = s.per_token(mask, numbers)
    return s.result(mask, advantages, advantages, s.kl_column(rows, kl, required=False))


def _everyone(reward: torch.Tensor, ok: torch.Tensor, gather: Gather) -> tuple[list[float], list[bool]]:
    return torch.cat(gather(reward.double())).tolist(), torch.cat(gather(ok)).tolist()


def _normalized(numbers: list[float], ok: torch.Tensor, gather: Gather, eps: float) -> list[float]:
    mine = torch.tensor(numbers, dtype=torch.float64)
    everything = [n for n, good in zip(*_everyone(mine, ok, gather), strict=True) if good]
    if len(everything) < 2:
        return [0.0] * len(numbers)
    mean, spread = math.fsum(everything) / len(everything), s.deviation(everything)
    return [
        (n - mean) / (spread + eps) if good else 0.0 for n, good in zip(numbers, ok.tolist(), strict=True)
    ]
