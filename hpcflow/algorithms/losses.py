"""Per-token losses of policy and critic.

A loss function is called as ``f(predictions, rows, **params)`` with float32 [T] predictions over the response
tokens of ``rows`` (any micro-batch) and returns (loss [T], metrics {name: [T]}), nothing aggregated: the
training engine multiplies by `hpcflow.engines.batching.token_weights` and sums. Tokens whose ``loss_mask`` is
false have loss 0 and gradient 0, whatever stands in the columns there (NaN too).
"""

from __future__ import annotations

import torch

from hpcflow.algorithms.kl import estimate
from hpcflow.data.columns import Columns, flat
from hpcflow.data.needs import reads

LOG_RATIO_LIMIT = 20.0  # as in verl: a ratio beyond exp(20) says no more, one beyond exp(88) is infinite


@reads("old_log_probs", "advantages", "loss_mask", optional=("ref_log_probs",))
def ppo_clip(
    log_probs: torch.Tensor,
    rows: Columns,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate, plus ``kl_coef`` times a KL estimate against the reference.

    With ratio = exp(log_probs - old_log_probs) and A = advantages:
    loss = max(-A * ratio, -A * clip(ratio, 1 - clip, 1 + clip_high)) + kl_coef * KL.
    ``clip_high`` defaults to ``clip`` (DAPO's clip-higher sets it apart). ``dual_clip`` = c > 1 bounds the
    loss by -c * A where A < 0 (Ye et al. 2020); off unless set, as in TRL and OpenRLHF, while verl's default
    is 3. ``kl``: see `hpcflow.algorithms.kl`.

    Reads old_log_probs, advantages, loss_mask, and ref_log_probs when kl_coef is not 0. Metrics: approx_kl
    (old - new log-prob), clip_fraction, and with kl_coef kl_loss (before the coefficient).
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, e.g. 3, or null")
    mask = flat(rows["loss_mask"])
    advantages = _where(mask, flat(rows["advantages"]))
    log_ratio = _where(mask, log_probs - flat(rows["old_log_probs"]))
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    high = clip if clip_high is None else clip_high
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip, 1 + high)
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    metrics = {
        "approx_kl": -log_ratio.detach(),
        "clip_fraction": (clipped > plain).to(loss.dtype),
    }
    if kl_coef != 0:
        # masked before the estimate: exp of junk would turn a zero gradient into NaN
        divergence = estimate(kl, _where(mask, log_probs), _where(mask, flat(rows["ref_log_probs"])))
        loss = loss + kl_coef * divergence
        metrics["kl_loss"] = divergence.detach()
    return loss, metrics


@reads("values", "returns", "loss_mask")
def clipped_value(
    values: torch.Tensor, rows: Columns, *, clip: float | None = 0.2
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Half the squared error of the critic, the worse one of the new value and the new value clipped to the
    old one +- ``clip`` (null: no clipping).

    Reads values (old), returns, loss_mask. Metrics: value_clip_fraction, value_error (squared, before
    clipping).
    """
    mask = flat(rows["loss_mask"])
    returns, old = _where(mask, flat(rows["returns"])), _where(mask, flat(rows["values"]))
    values = _where(mask, values)
    error = (values - returns).square()
    worst = error
    if clip is not None:
        worst = torch.maximum(error, (torch.clamp(values, old - clip, old + clip) - returns).square())
    metrics = {"value_error": error.detach(), "value_clip_fraction": (worst > error).to(error.dtype)}
    return 0.5 * worst, metrics


def _where(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype))
