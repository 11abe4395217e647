"""Per-token losses of policy and critic.

A loss function is called as ``f(predictions, rows, **params)`` with float32 [T] predictions over the response
tokens of ``rows`` (any micro-batch of whole rows) and returns (loss [T], metrics {name: [T]}), nothing
aggregated: the training engine multiplies by `hpcflow.engines.batching.token_weights` and sums. Tokens whose
``loss_mask`` is false have loss 0 and gradient 0, whatever stands in the columns there (NaN too). Rows
without a counted token are left out of means over rows, as in verl and OpenRLHF (TRL counts them).
"""

from __future__ import annotations

import torch

from hpcflow.algorithms.kl import estimate
from hpcflow.data.columns import Columns, Ragged, flat
from hpcflow.data.needs import reads

LOG_RATIO_LIMIT = 20.0  # as in verl: a ratio beyond exp(20) says no more, one beyond exp(88) is infinite
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


@reads("old_log_probs", "advantages", "loss_mask", optional=("ref_log_probs", "rollout_log_probs"))
def ppo_clip(
    log_probs: torch.Tensor,
    rows: Columns,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
    importance_cap: float | None = None,
    length: int = 1,
) -> Loss:
    """PPO's clipped surrogate, plus ``kl_coef`` times a KL estimate against the reference.

    With ratio = exp(log_probs - old_log_probs) and A = advantages: loss = (w * max(-A * ratio, -A *
    clip(ratio, 1 - clip, 1 + clip_high)) + kl_coef * KL) / length. ``clip_high`` defaults to ``clip`` (DAPO's
    clip-higher sets it apart). ``dual_clip`` = c > 1 bounds the loss by -c * A where A < 0 (Ye et al. 2020);
    off unless set, as in TRL and OpenRLHF, while verl's default is 3. ``kl``: see `hpcflow.algorithms.kl`.
    ``importance_cap`` = C: truncated importance sampling, w = min(C, exp(old_log_probs - rollout_log_probs)),
    corrects for a generation engine whose log-probs are not quite those of the training engine; else w = 1.
    ``length``: with agg=seq-mean-token-sum, what Dr. GRPO divides a response's sum by instead of its own
    length: the longest possible one.

    Metrics: approx_kl (old - new log-prob), clip_fraction, with kl_coef kl_loss (before the coefficient),
    with importance_cap importance_weight.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, e.g. 3, or null")
    mask = flat(rows["loss_mask"])
    advantages = _where(mask, flat(rows["advantages"]))
    log_ratio = _where(mask, log_probs - flat(rows["old_log_probs"]))
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    loss, clipped = _clipped(advantages, ratio, clip, clip if clip_high is None else clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    metrics = {"approx_kl": -log_ratio.detach(), "clip_fraction": clipped}
    return _corrected(loss, metrics, log_probs, rows, kl_coef, kl, importance_cap, length)


@reads("old_log_probs", "advantages", "loss_mask", optional=("ref_log_probs", "rollout_log_probs"))
def gspo(
    log_probs: torch.Tensor,
    rows: Columns,
    *,
    clip: float = 3e-4,
    clip_high: float | None = None,
    kl_coef: float = 0.0,
    kl: str = "k3",
    importance_cap: float | None = None,
) -> Loss:
    """The clipped surrogate with one ratio per response (Zheng et al. 2025, GSPO, arXiv:2507.18071, equation
    7).

    ratio = exp(mean over the response's counted tokens of log_probs - old_log_probs); in the token form of
    the paper (section 4.3), so that token t receives the gradient of its own log-prob. Meant for
    agg=seq-mean-token-mean. The paper's clip ranges are 3e-4 and 4e-4. Other parameters and metrics as in
    `ppo_clip`.
    """
    mask: Ragged = rows["loss_mask"]
    keep = mask.values
    log_ratio = _where(keep, log_probs - flat(rows["old_log_probs"]))
    row = torch.repeat_interleave(torch.arange(len(mask)), mask.lengths)
    counted = torch.zeros(len(mask)).index_add_(0, row, keep.float()).clamp(min=1)
    mean = torch.zeros(len(mask)).index_add_(0, row, log_ratio.detach()) / counted
    own = _where(keep, log_probs)
    ratio = torch.exp(mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[row] + own - own.detach())
    advantages = _where(keep, flat(rows["advantages"]))
    loss, clipped = _clipped(advantages, ratio, clip, clip if clip_high is None else clip_high)
    metrics = {"approx_kl": -log_ratio.detach(), "clip_fraction": clipped}
    return _corrected(loss, metrics, log_probs, rows, kl_coef, kl, importance_cap, 1)


@reads("loss_mask")
def negative_log_likelihood(log_probs: torch.Tensor, rows: Columns) -> Loss:
    """-log_probs: the loss of plain language modelling, e.g. of pretraining text beside a policy loss."""
    loss = _where(flat(rows["loss_mask"]), -log_probs)
    return loss, {}


@reads("values", "returns", "loss_mask")
def clipped_value(values: torch.Tensor, rows: Columns, *, clip: float | None = 0.2) -> Loss:
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


def _clipped(
    advantages: torch.Tensor, ratio: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the surrogate's loss, 1 where clipping made it worse)."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)


def _corrected(
    loss: torch.Tensor,
    metrics: dict[str, torch.Tensor],
    log_probs: torch.Tensor,
    rows: Columns,
    kl_coef: float,
    kl: str,
    importance_cap: float | None,
    length: int,
) -> Loss:
    """A policy loss with what may be added to any: importance weights, the KL term, a constant length."""
    mask = flat(rows["loss_mask"])
    if importance_cap is not None:
        gap = _where(mask, flat(rows["old_log_probs"]) - flat(rows["rollout_log_probs"]))
        weight = torch.exp(gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clamp(max=importance_cap)
        loss = loss * weight
        metrics["importance_weight"] = weight
    if kl_coef != 0:
        # masked before the estimate: exp of junk would turn a zero gradient into NaN
        divergence = estimate(kl, _where(mask, log_probs), _where(mask, flat(rows["ref_log_probs"])))
        loss = loss + kl_coef * divergence
        metrics["kl_loss"] = divergence.detach()
    return loss / length if length != 1 else loss, metrics


def _where(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype))
