"""pass@k and means of an evaluation, by enumeration and by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.data.ids import sample_id
from hpcflow.store.evaluation import pass_at, summary


def ids(draws: int, prompts: int) -> torch.Tensor:
    return torch.tensor([sample_id(0, p, d) for p in range(prompts) for d in range(draws)])


@given(data=st.data(), draws=st.integers(1, 6), prompts=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_draw(data, draws, prompts):
    reward = torch.tensor(
        data.draw(
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=draws * prompts, max_size=draws * prompts)
        )
    )
    found = pass_at(ids(draws, prompts), reward, torch.ones(len(reward), dtype=torch.bool), 0.5)
    assert f"pass@{draws}" in found
    for name, value in found.items():
        subsets = [
            any(reward[p * draws + d] >= 0.5 for d in chosen)
            for p in range(prompts)
            for chosen in itertools.combinations(range(draws), int(name[5:]))
        ]
        assert value == pytest.approx(sum(subsets) / len(subsets))


def test_failed_rewards_are_no_draws():
    reward, ok = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([False, True, True, True])
    found = pass_at(ids(2, 2), reward, ok, 1.0)
    assert found == {"pass@1": 0.25, "pass@2": 1.0}  # the first prompt has one draw, which does not pass
    told = summary(ids(2, 2), reward, ok)
    assert told["reward_mean"] == pytest.approx(1 / 3) and told["samples"] == 3 and told["failed"] == 1
    nothing = summary(ids(2, 2), reward, torch.zeros(4, dtype=torch.bool))
    assert (
        nothing["reward_mean"] is None
        and pass_at(ids(2, 2), reward, torch.zeros(4, dtype=torch.bool), 1.0) == {}
    )
