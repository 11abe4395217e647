"""A pipeline of agents: one policy drafts and uses a tool, another judges the draft, the first revises it.

Nothing that a model does is particular to it: the same primitives, in another graph. The tool's output and
the judgement stand inside the proposer's response as observation tokens, which nobody sampled and no loss
counts. Both policies learn from the reward of the revision; the judge's advantage is that of its judgements
of the same prompt. See configs/experiment/propose_judge_revise.yaml.
"""

from __future__ import annotations

from typing import Any


def propose_judge_revise(m: Any, prompts: Any, *, uses: int = 1) -> None:
    """One iteration. Models: proposer, judge (policies), calculator, question, quote (tools), reward."""
    draft = m.proposer.generate_sequences(prompts)
    for use in range(uses):
        draft |= m.calculator.observe(draft)
        draft |= m.proposer.continue_sequences(draft, turn=1 + use)
    verdict = m.judge.generate_sequences(m.question.write_prompts(draft))
    draft |= m.quote.observe(verdict)
    draft |= m.proposer.continue_sequences(draft, turn=1 + uses)
    draft |= m.reward.compute_reward(draft)
    draft |= m.proposer.compute_advantages(draft)
    verdict |= draft.select(["reward", "reward_ok", "reward_error"])
    verdict |= m.judge.compute_advantages(verdict)
    m.proposer.update_actor(draft)
    m.judge.update_actor(verdict)
