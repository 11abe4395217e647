"""Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071): one importance ratio per
response.

s_i = (pi(y_i) / pi_old(y_i)) ** (1 / |y_i|), clipped as a whole (equations 5 to 7); the advantages are
GRPO's. See configs/algorithm/gspo.yaml.
"""

from __future__ import annotations

from typing import Any


def gspo(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
