"""What every generation engine gives back, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcflow.data.columns import Ragged


@dataclass
class Generated:
    """Responses in the order of the prompts.

    response_ids: ragged int64, what was sampled, with the end-of-sequence token where one was. log_probs:
    ragged float32, of each token under the distribution that it was drawn from: temperature, top_k and top_p
    applied (greedy: under the model's own distribution). They equal a training engine's log-probs at that
    temperature only for top_p=1 and top_k=0. truncated: bool [rows], stopped by max_tokens.
    """

    response_ids: Ragged
    log_probs: Ragged
    truncated: torch.Tensor

    @staticmethod
    def of(
        tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], truncated: list[bool]
    ) -> Generated:
        """From lists, one entry a response."""
        return Generated(
            Ragged.from_lists(tokens, torch.int64),
            Ragged.from_lists(log_probs, torch.float32),
            torch.tensor(truncated, dtype=torch.bool),
        )


def check_lengths(max_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """ValueError when a longest prompt and a longest response do not fit the engine together."""
    need = max_prompt_tokens + max_tokens
    if need > max_model_len:
        raise ValueError(
            f"data.max_prompt_tokens={max_prompt_tokens} + algorithm.sampling.max_tokens={max_tokens} > "
            f"protocol.generation.max_model_len={max_model_len}; max_model_len={need} works"
        )


def check_prompts(prompts: list[list[int]], max_tokens: int, max_model_len: int) -> None:
    """ValueError naming the first prompt that is empty or leaves no room for ``max_tokens`` more."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
        need = len(prompt) + max_tokens
        if need > max_model_len:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens, with algorithm.sampling.max_tokens={max_tokens} "
                f"more than protocol.generation.max_model_len={max_model_len}; max_model_len={need} works"
            )
