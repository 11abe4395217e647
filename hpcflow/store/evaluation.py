"""Numbers of an evaluation on held-out prompts."""

from __future__ import annotations

import math
from collections import defaultdict

import torch

from hpcflow.data.ids import group_key


def summary(ids: torch.Tensor, reward: torch.Tensor, ok: torch.Tensor) -> dict[str, float | int | None]:
    """reward_mean and its standard error (draws counted as independent) over the samples whose reward could
    be computed, samples, failed. ids int64 [n], reward float32 [n], ok bool [n]."""
    good = reward[ok].double()
    return {
        "reward_mean": float(good.mean()) if len(good) else None,
        "reward_se": float(good.std() / len(good) ** 0.5) if len(good) > 1 else 0.0,
        "samples": len(good),
        "failed": int((~ok).sum()),
    }


def pass_at(ids: torch.Tensor, reward: torch.Tensor, ok: torch.Tensor, passing: float) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and the largest number of draws: mean over prompts of the unbiased estimate
    1 - C(n - c, k) / C(n, k) from n draws of which c pass (Chen et al. 2021, arXiv:2107.03374, equation 1).

    A draw passes when its reward is at least ``passing``. Failed rewards are no draws; prompts with fewer
    than k draws do not count for k.
    """
    groups: dict[int, list[bool]] = defaultdict(list)
    for key, value, good in zip(group_key(ids).tolist(), reward.tolist(), ok.tolist(), strict=True):
        if good:
            groups[key].append(value >= passing)
    most = max(map(len, groups.values()), default=0)
    sizes = sorted(
        {1 << power for power in range(most.bit_length()) if 1 << power <= most} | ({most} if most else set())
    )
    found = {}
    for k in sizes:
        parts = [
            1 - math.comb(len(g) - sum(g), k) / math.comb(len(g), k) for g in groups.values() if len(g) >= k
        ]
        found[f"pass@{k}"] = math.fsum(parts) / len(parts)
    return found
