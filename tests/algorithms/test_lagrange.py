"""The Lagrange multiplier: it follows the mean cost of the whole batch, and stays where a multiplier may be."""

from __future__ import annotations

import pytest
import torch

from hpcflow.algorithms.lagrange import multiplier


def step(before: float, costs: list[float], ok: list[bool] | None = None, ranks: int = 1, **args) -> float:
    """The multiplier after an update with these costs, computed by the last of ``ranks`` ranks."""
    rows = {"cost": torch.tensor(costs), "cost_ok": torch.tensor(ok or [True] * len(costs))}
    whole = {8: rows["cost"].double(), 1: rows["cost_ok"]}  # by the size of an element
    mine = {name: column.chunk(ranks)[-1] for name, column in rows.items()}
    gather = lambda part: list(whole[part.element_size()].chunk(ranks))
    state = {"multiplier": before, "other": 3.0}
    after = multiplier(state, torch.arange(len(costs)), mine, gather, limit=0.25, **args)
    assert state["multiplier"] == before and after["other"] == 3.0
    return after["multiplier"]


@pytest.mark.parametrize(
    ("costs", "expected"), [([0.5, 1.0], 2.0), ([0.25, 0.25], 1.0), ([0.0, 0.0], 0.5)], ids=str
)
def test_it_rises_above_the_limit_and_falls_below_it(costs: list[float], expected: float) -> None:
    assert step(1.0, costs, lr=2.0) == expected


def test_it_is_never_negative_nor_above_its_maximum() -> None:
    assert step(0.1, [0.0], lr=2.0) == 0.0
    assert step(0.0, [0.0], lr=2.0) == 0.0
    assert step(0.0, [0.5], lr=2.0) == 0.5, "from 0 it can rise again"
    assert step(9.0, [8.0], lr=2.0, maximum=10.0) == 10.0


def test_costs_that_could_not_be_computed_do_not_count() -> None:
    assert step(1.0, [0.5, 99.0], [True, False], lr=2.0) == 1.5
    assert step(1.0, [99.0, 99.0], [False, False], lr=2.0) == 1.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_bitwise_the_same_on_any_number_of_ranks(ranks: int) -> None:
    costs = torch.rand(11, generator=torch.Generator().manual_seed(0)).tolist()
    assert step(1.0, costs, ranks=ranks) == step(1.0, costs)
