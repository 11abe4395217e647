"""Group relative policy optimisation (Shao et al. 2024): several draws of a prompt are each other's baseline.

As `hpcflow.algorithms.ppo`, without a critic; see configs/algorithm/grpo.yaml.
"""

from __future__ import annotations

from typing import Any


def grpo(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reference, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
