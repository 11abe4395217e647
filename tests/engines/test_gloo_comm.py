"""The collectives against sums and concatenations of what every rank holds, in one message and in many."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hpcflow.engines import gloo_comm
from tests.engines.ranks import run_ranks


def held(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def collect(sizes: list[int]) -> bool:
    """Whether every result is exactly the expected one."""
    ranks, own, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    gather, scatter = gloo_comm.BroadcastAllGather(), gloo_comm.PairwiseReduceScatter()
    fine = True
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            everyone = torch.cat([held(rank, size, dtype) for rank in range(ranks)])
            output = gather.allocate((ranks * size,), dtype=dtype, device=torch.device("cpu"))
            gather(output, held(own, size, dtype), group)
            fine &= torch.equal(output, everyone)
            in_place = torch.zeros_like(output)
            part = in_place[own * size : (own + 1) * size].copy_(held(own, size, dtype))
            gather(in_place, part, group)
            fine &= torch.equal(in_place, everyone)
        inputs = [held(rank, ranks * size, torch.float32) for rank in range(ranks)]
        total = inputs[0].clone()
        for other in inputs[1:]:
            total += other  # in rank order: the engine's sums are reproducible
        result = torch.empty(size)
        scatter(result, inputs[own].clone(), group, dist.ReduceOp.SUM)
        fine &= torch.equal(result, total[own * size : (own + 1) * size])
    return fine


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_are_exact(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(gloo_comm, "CHUNK", 7)  # forked ranks inherit it
    assert run_ranks(ranks, collect, [0, 1, 7, 8, 20]) == [True] * ranks
