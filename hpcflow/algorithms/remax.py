"""ReMax: REINFORCE whose baseline is the reward of the greedy response (Li et al. 2024, arXiv:2310.10505,
algorithm 2).

As `hpcflow.algorithms.ppo` with one more generation in place of the critic; both generations are by the same
weights. See configs/algorithm/remax.yaml.
"""

from __future__ import annotations

from typing import Any


def remax(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reference, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.actor.generate_greedy(batch)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.reward.compute_baseline(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
