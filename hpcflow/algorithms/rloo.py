"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740): the other draws of a prompt are the
baseline.

A_i = r_i - mean of r_j over the draws j != i (equation 6). See configs/algorithm/rloo.yaml.
"""

from __future__ import annotations

from typing import Any


def rloo(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reference, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
