"""The metrics of an iteration that follow from its recorded columns."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcflow.data.columns import Columns, Ragged


def summarise(columns: Columns, facts: dict[str, Any]) -> dict[str, float]:
    """Metrics computed from columns (float64, over samples) and from facts; what is missing is left out.

    reward, reward_se   mean over the samples whose reward could be computed (reward_ok), and the standard
                        error of that mean (from two samples on, draws counted as independent)
    reward_samples      how many those are
    reward_error_rate   share of samples whose reward failed
    reward_retry_rate   share of samples whose reward was asked for more than once
    kl                  mean of column "kl" over response tokens that count (loss_mask)
    response_length     mean tokens per response
    truncated_rate      share of responses cut off at the token limit
    tokens_per_s        facts: tokens / wall_s
    """
    metrics: dict[str, float] = {}
    if "reward" in columns and len(columns["reward"]):
        rewards = columns["reward"].double()
        if "reward_ok" in columns:
            metrics["reward_error_rate"] = 1 - columns["reward_ok"].double().mean().item()
            rewards = rewards[columns["reward_ok"]]
        if "reward_attempts" in columns:
            metrics["reward_retry_rate"] = (columns["reward_attempts"] > 1).double().mean().item()
        metrics["reward_samples"] = float(len(rewards))
        if len(rewards) > 0:
            metrics["reward"] = rewards.mean().item()
        if len(rewards) > 1:
            metrics["reward_se"] = rewards.std().item() / math.sqrt(len(rewards))
    if "kl" in columns:
        counted = _counted(columns["kl"], columns.get("loss_mask"))
        if len(counted):
            metrics["kl"] = counted.double().mean().item()
    if "response_ids" in columns and len(columns["response_ids"]):
        metrics["response_length"] = columns["response_ids"].lengths.double().mean().item()
    if "truncated" in columns and len(columns["truncated"]):
        metrics["truncated_rate"] = columns["truncated"].double().mean().item()
    if facts.get("wall_s", 0) > 0 and facts.get("tokens"):
        metrics["tokens_per_s"] = facts["tokens"] / facts["wall_s"]
    return metrics


def count_tokens(columns: Columns) -> int:
    """Prompt and response tokens of all samples: what HybridFlow's throughput counts."""
    return sum(len(columns[name].values) for name in ("prompt_ids", "response_ids") if name in columns)


def _counted(per_token: Ragged, mask: Ragged | None) -> torch.Tensor:
    return per_token.values if mask is None else per_token.values[mask.values]
