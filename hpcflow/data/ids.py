"""Sample ids and seeds: functions of what a sample is, never of where it is computed.

A sample id packs (epoch, prompt index, draw) into one non-negative int64, most significant first, so that ids sort
in data order and all draws of a prompt in an epoch are neighbours.
"""

from __future__ import annotations

import hashlib

import torch

DRAW_BITS, PROMPT_BITS, EPOCH_BITS = 12, 36, 15
LIMITS = {"epoch": 1 << EPOCH_BITS, "prompt_index": 1 << PROMPT_BITS, "draw": 1 << DRAW_BITS}


def sample_id(epoch: int, prompt_index: int, draw: int) -> int:
    """The id of one sample. ValueError when a part is outside its range (see `LIMITS`)."""
    for name, value in (("epoch", epoch), ("prompt_index", prompt_index), ("draw", draw)):
        if not 0 <= value < LIMITS[name]:
            raise ValueError(f"{name}={value} does not fit a sample id; it must be in [0, {LIMITS[name]})")
    return ((epoch << PROMPT_BITS) + prompt_index << DRAW_BITS) + draw


def unpack(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 ids [n] -> (epoch, prompt index, draw), int64 [n] each."""
    draw = ids & (LIMITS["draw"] - 1)
    prompt = (ids >> DRAW_BITS) & (LIMITS["prompt_index"] - 1)
    return ids >> (DRAW_BITS + PROMPT_BITS), prompt, draw


def group_key(ids: torch.Tensor) -> torch.Tensor:
    """int64 [n]: equal for the draws of one prompt in one epoch, different otherwise."""
    return ids >> DRAW_BITS


def seed_for(run_seed: int, sample: int, node: str, turn: int = 0) -> int:
    """A seed in [0, 2**63) for one sample at one node and turn."""
    text = f"{run_seed}/{sample}/{node}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def digest(ids: torch.Tensor) -> str:
    """Hex digest of an ordered list of ids (int64 [n])."""
    return hashlib.blake2b(ids.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
