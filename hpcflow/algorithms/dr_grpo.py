"""Dr. GRPO: GRPO without its two biases (Liu et al. 2025, arXiv:2503.20783, section 3.1).

A_i = r_i - mean of the group, not divided by its deviation; a response's loss is summed and divided by one
constant length, not by its own. No reference: its KL term is left out. See configs/algorithm/dr_grpo.yaml.
"""

from __future__ import annotations

from typing import Any


def dr_grpo(m: Any, prompts: Any) -> None:
    """One iteration. Models: actor, reward."""
    batch = m.actor.generate_sequences(prompts)
    batch |= m.reward.compute_reward(batch)
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
