"""Safe RLHF: PPO under a constraint on the mean cost, by a Lagrange multiplier (Dai et al. 2024,
arXiv:2310.12773).

maximise E[reward] - m * E[cost], with m >= 0 rising while the mean cost exceeds its limit (equations 9 to
11). Beside `hpcflow.algorithms.ppo` there are a cost model, a critic of its values, and the loss of
pretraining text. The multiplier is the actor's state: `hpcflow.algorithms.lagrange`. See
configs/algorithm/safe_rlhf.yaml.
"""

from __future__ import annotations

from typing import Any


def safe_rlhf(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, critic, cost_critic, reference, reward, cost."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.critic.compute_values(batch)
    batch |= m.cost_critic.compute_values(batch)
    batch |= m.reference.compute_log_prob(batch)
    batch |= m.reward.compute_reward(batch)
    batch |= m.cost.compute_cost(batch)
    batch |= m.actor.compute_advantages(batch)
    batch |= m.actor.compute_loss(batch)
    m.critic.update_critic(batch)
    m.cost_critic.update_critic(batch)
    m.actor.update_actor(batch)
