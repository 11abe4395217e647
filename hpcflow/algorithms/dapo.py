"""DAPO (Yu et al. 2025, arXiv:2503.14476): GRPO for long reasoning.

Dynamic sampling (equation 11): prompts whose draws all have the same reward teach nothing and are replaced by
the prompts that come next. Beside it a wider upper clip range (equation 10), a token-level loss (equation
12), shaping of overlong responses (equation 13) and no KL term, all by configs/algorithm/dapo.yaml.
"""

from __future__ import annotations

from typing import Any


def dapo(m: Any, prompts: Any, *, rounds: int = 4) -> None:
    """One iteration. Models: actor, reward. After ``rounds`` generations prompts that teach nothing fill the
    batch."""
    for _ in range(rounds):
        batch = m.actor.generate_sequences(prompts)
        batch |= m.reward.compute_reward(batch)
        if m.actor.keep_groups(batch).get()[0] == 0:
            break
        prompts = prompts.more()
    batch = m.actor.take_groups(rows=len(batch))
    batch |= m.actor.compute_advantages(batch)
    m.actor.update_actor(batch)
