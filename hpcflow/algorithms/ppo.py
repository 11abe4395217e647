"""Proximal policy optimisation with a learned critic (Schulman et al. 2017), as RLHF uses it.

``m`` gives the models' worker groups by name; every call returns a handle at once, and ``a | b`` joins the
columns of two handles. What is computed inside a call is named by the config: configs/algorithm/ppo.yaml.
"""

from __future__ import annotations

from typing import Any


def ppo(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, critic, reference, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.critic.compute_values(batch)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.critic.update_critic(batch)
    m.actor.update_actor(batch)
