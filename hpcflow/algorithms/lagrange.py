"""The Lagrange multiplier of a constraint on the mean cost: a number that one update hands to the next.

maximise E[reward] subject to E[cost] <= limit is the saddle point of E[reward] - m * (E[cost] - limit) over
policies and m >= 0 (Dai et al. 2024, Safe RLHF, arXiv:2310.12773, equation 9). The policy ascends, m follows
the gradient of its own side.
"""

from __future__ import annotations

import math

import torch

from hpcflow.algorithms.statistics import Gather
from hpcflow.data.columns import Columns
from hpcflow.data.needs import reads


@reads("cost", "cost_ok")
def multiplier(
    state: dict[str, float],
    ids: torch.Tensor,
    rows: Columns,
    gather: Gather,
    *,
    limit: float,
    lr: float = 0.1,
    maximum: float = math.inf,
) -> dict[str, float]:
    """m <- min(maximum, max(0, m + lr * (mean cost of the batch - limit))).

    Projected gradient ascent: it can be exactly 0, where the paper's exp of a free parameter cannot. Costs
    that could not be computed do not count; without any, m stays. Bitwise the same however rows are spread
    over ranks.
    """
    cost, ok = torch.cat(gather(rows["cost"].double())), torch.cat(gather(rows["cost_ok"]))
    costs = cost[ok].tolist()
    if not costs:
        return state
    mean = math.fsum(costs) / len(costs)
    return {**state, "multiplier": min(maximum, max(0.0, state["multiplier"] + lr * (mean - limit)))}
