"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled.

With r = log_probs - ref_log_probs at a sampled token (Schulman 2020, "Approximating KL divergence"):

====  ================  =======================================  ==================================
name  formula           value                                    gradient with respect to the policy
====  ================  =======================================  ==================================
k1    r                 unbiased, may be negative                zero on average: of no use in a loss
k2    r^2 / 2           biased, small variance                   that of KL(policy || reference)
k3    exp(-r) - 1 + r   unbiased, never negative                 that of KL(reference || policy)
====  ================  =======================================  ==================================

(Averages over tokens sampled from the very policy that is differentiated.) k1 is the usual choice inside a
reward, k3 the usual one inside a loss. A "+" after the name keeps the value and takes the gradient of k2,
which is the right one for a loss (as in verl and OpenRLHF).

k3 clamps r to +-20, as verl does; verl also clamps its value to 10, and OpenRLHF clamps every value to +-10:
they differ from this only for tokens that the two policies judge e^10 times apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LIMIT = 20.0  # of |r| in k3, as in verl: exp(20) is far beyond any use, and exp(89) is infinite in float32


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r = (log_probs - ref_log_probs).clamp(-LIMIT, LIMIT)
    return torch.expm1(-r) + r  # exp(-r) - 1 would lose what matters for small r, the sign too


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimate(name: str, log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """The estimate of that name, float, any shape. ValueError for an unknown name."""
    base = name.removesuffix("+")
    if base not in ESTIMATORS:
        raise ValueError(
            f"kl={name!r} is not known; it must be {', '.join(ESTIMATORS)}, or one of them with a +"
        )
    value = ESTIMATORS[base](log_probs, ref_log_probs)
    if base == name:
        return value
    slope = k2(log_probs, ref_log_probs)
    return value.detach() + slope - slope.detach()
