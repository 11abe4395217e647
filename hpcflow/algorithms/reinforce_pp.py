"""REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): PPO's clipped loss without a critic, advantages whitened
globally.

The baseline variant takes the mean of the prompt's draws off each reward first:
configs/algorithm/reinforce_pp.yaml and reinforce_pp_baseline.yaml.
"""

from __future__ import annotations

from typing import Any


def reinforce_pp(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reference, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
