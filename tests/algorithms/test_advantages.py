"""Advantage estimators: by hand and by brute force, the same however rows are spread over ranks."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.algorithms import statistics
from hpcflow.algorithms.advantages import gae, reinforce_pp, remax, safe_gae
from hpcflow.algorithms.group_advantages import dapo, grpo, rloo
from hpcflow.data.columns import Columns, Ragged, cat_rows, slice_rows
from hpcflow.data.ids import sample_id
from tests.algorithms import oracles

MASKS = ("mask_right", "mask_empty", "mask_holes")


def alone(part: torch.Tensor) -> list[torch.Tensor]:
    return [part]


def spread(estimator, ids: torch.Tensor, rows: Columns, cuts: list[int], **params) -> Columns:
    """The estimator on ranks holding the rows between ``cuts``, one thread a rank; their results together."""
    bounds = [0, *cuts, len(ids)]
    world = len(bounds) - 1
    posted: list[torch.Tensor | None] = [None] * world
    results: list[Columns | None] = [None] * world
    barrier = threading.Barrier(world, timeout=60)

    def run(rank: int) -> None:
        def gather(part: torch.Tensor) -> list[torch.Tensor]:
            posted[rank] = part
            barrier.wait()
            parts = [p.clone() for p in posted]
            barrier.wait()
            return parts

        lo, hi = bounds[rank], bounds[rank + 1]
        results[rank] = estimator(ids[lo:hi], slice_rows(rows, lo, hi), gather, **params)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cat_rows(results)


def equal_bits(a: Columns, b: Columns) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name].lengths, b[name].lengths) and torch.equal(a[name].values, b[name].values)
        for name in a
    )


def test_gae_by_hand():
    """Two tokens, gamma 0.5, lam 0.5: delta_1 = 2 - 1, delta_0 = 0.5 * 1 - 3."""
    rows = simple_rows([2], values=[[3.0, 1.0]], reward=[2.0])
    result = gae(torch.tensor([0]), rows, alone, gamma=0.5, lam=0.5, whiten=False)
    assert result["advantages"].tolist() == [[-2.5 + 0.25 * 1.0, 1.0]]
    assert result["returns"].tolist() == [[0.75, 2.0]]
    assert "kl" not in result


def simple_rows(
    lengths: list[int], values: list[list[float]] | None = None, reward: list[float] | None = None
) -> Columns:
    generator = torch.Generator().manual_seed(sum(lengths))
    n = torch.tensor(lengths, dtype=torch.int64)
    random = torch.randn(int(n.sum()), generator=generator)
    return {
        "values": Ragged(random, n) if values is None else Ragged.from_lists(values, torch.float32),
        "loss_mask": Ragged(torch.ones(int(n.sum()), dtype=torch.bool), n),
        "reward": torch.randn(len(n), generator=generator) if reward is None else torch.tensor(reward),
        "cost_values": Ragged(random, n),
        "cost": torch.zeros(len(n)),
        "baseline": torch.zeros(len(n)),
        "truncated": torch.zeros(len(n), dtype=torch.bool),
        **{f"{name}_ok": torch.ones(len(n), dtype=torch.bool) for name in ("reward", "cost", "baseline")},
    }


@st.composite
def batches(draw):
    """(ids, rows): prompts with some draws, ragged and empty responses, holes, failed rewards, any scale."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    draws = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    n = torch.tensor(lengths, dtype=torch.int64)
    tokens = int(n.sum())
    scale = draw(st.sampled_from([1e-6, 1.0, 1e6]))
    random = lambda: Ragged(torch.randn(tokens, generator=generator), n)
    rows = {name: random() for name in ("values", "cost_values", "old_log_probs", "ref_log_probs")}
    rows["loss_mask"] = Ragged(torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.5, 1.0])), n)
    for name in ("reward", "cost", "baseline"):
        rows[name] = torch.randn(len(n), generator=generator) * scale
        rows[f"{name}_ok"] = torch.rand(len(n), generator=generator) < draw(st.sampled_from([0.6, 1.0]))
    rows["truncated"] = torch.rand(len(n), generator=generator) < 0.3
    ids = torch.tensor([sample_id(3, i // draws, i % draws) for i in range(len(n))])
    return ids, rows


ESTIMATORS = [
    (gae, {"gamma": 0.97, "lam": 0.9, "kl_coef": 0.1, "kl": "k3"}),
    (gae, {"gamma": 1.0, "lam": 1.0, "whiten": False}),
    (safe_gae, {"multiplier": 0.7, "gamma": 0.97, "kl_coef": 0.1}),
    (safe_gae, {"multiplier": 0.7, "whiten": False}),
    (remax, {"kl_coef": 0.1}),
    (reinforce_pp, {"gamma": 0.97, "kl_coef": 0.1, "unbiased": False}),
    (reinforce_pp, {"baseline": True}),
    (grpo, {}),
    (grpo, {"scale": "none"}),
    (grpo, {"scale": "batch"}),
    (dapo, {"max_tokens": 9, "overlong_buffer": 4, "mask_truncated": True}),
    (rloo, {"kl_coef": 0.1}),
    (rloo, {"normalize": True}),
]
ALL = [gae, safe_gae, remax, reinforce_pp, grpo, dapo, rloo]
NEEDED = {dapo: {"max_tokens": 9}}


@pytest.mark.parametrize(("estimator", "params"), ESTIMATORS)
@given(batch=batches(), data=st.data())
@settings(max_examples=12, deadline=None)
def test_bitwise_equal_for_any_spread_over_ranks(estimator, params, batch, data):
    ids, rows = batch
    # cuts may coincide: a rank without rows takes part too
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    assert equal_bits(spread(estimator, ids, rows, cuts, **params), estimator(ids, rows, alone, **params))


@given(batch=batches())
@settings(max_examples=12, deadline=None)
def test_gae_is_the_recursion(batch):
    """Against the textbook sum over the kept tokens of each row: A_t = sum_k (gamma lam)^k delta_{t+k}."""
    ids, rows = batch
    result = gae(ids, rows, alone, gamma=0.97, lam=0.9, kl_coef=0.1, whiten=False)
    for i, keep in enumerate(map(np.array, rows["loss_mask"].tolist())):
        kept = np.flatnonzero(keep) if bool(rows["reward_ok"][i]) else np.array([], dtype=int)
        value, old, reference = (
            np.array(rows[c].tolist()[i]) for c in ("values", "old_log_probs", "ref_log_probs")
        )
        wanted = np.zeros(len(keep))
        for a, t in enumerate(kept):
            for k, s in enumerate(kept[a:]):
                last = s == kept[-1]
                reward = -0.1 * (old[s] - reference[s]) + (float(rows["reward"][i]) if last else 0.0)
                ahead = 0.0 if last else value[kept[a + k + 1]]
                wanted[t] += (0.97 * 0.9) ** k * (reward + 0.97 * ahead - value[s])
        np.testing.assert_allclose(result["advantages"].tolist()[i], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(result["loss_mask"].tolist()[i], np.isin(np.arange(len(keep)), kept))


@given(batch=batches())
@settings(max_examples=12, deadline=None)
def test_whitening(batch):
    ids, rows = batch
    result = gae(ids, rows, alone)
    kept = result["advantages"].values[result["loss_mask"].values].double()
    raw = gae(ids, rows, alone, whiten=False)["advantages"].values[result["loss_mask"].values].double()
    assert (result["advantages"].values[~result["loss_mask"].values] == 0).all()
    if len(kept) < 2:
        assert (kept == 0).all()
    elif raw.std() > 1e-2:
        assert abs(float(kept.mean())) < 1e-5
        assert float(kept.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_junk_in_excluded_tokens_and_padding_changes_nothing(estimator, mask, junk):
    keep = oracles.tensor(mask) > 0
    rows = oracles.rows(mask)
    params = NEEDED.get(estimator, {}) | ({} if estimator in (grpo, dapo) else {"kl_coef": 0.1})
    clean = estimator(oracles.ids("group_equal"), rows, alone, **params)
    for name in ("values", "cost_values", "old_log_probs", "ref_log_probs"):
        rows[name] = oracles.ragged(rows[name].to_padded(junk).masked_fill(~keep, junk), mask)
    spoilt = estimator(oracles.ids("group_equal"), rows, alone, **params)
    clean.pop("kl"), spoilt.pop("kl")  # a metric under loss_mask; it shows what is in the columns
    assert equal_bits(clean, spoilt)


@pytest.mark.parametrize("junk", [0.0, 50.0, float("nan")])
@pytest.mark.parametrize(("estimator", "params"), ESTIMATORS)
def test_failed_rewards_count_nowhere(estimator, params, junk):
    """Rows with a failed reward: advantage 0, no loss; the others as if they had not been there."""
    rows, ids = oracles.rows("mask_right"), oracles.ids("group_equal")
    failed = [1, 4]
    rows["reward_ok"][failed] = False
    rows["reward"][failed] = junk
    result = estimator(ids, rows, alone, **params)
    left = [0, 2, 3, 5]
    for i in failed:
        assert set(result["advantages"].tolist()[i]) == {0.0}
        assert not any(result["loss_mask"].tolist()[i])
    index = torch.tensor(left)
    others = {k: c.select(index) if isinstance(c, Ragged) else c[index] for k, c in rows.items()}
    expected = estimator(ids[index], others, alone, **params)
    assert equal_bits({k: c.select(index) for k, c in result.items()}, expected)


def test_all_rewards_failed():
    rows = simple_rows([3, 2])
    rows["reward_ok"][:] = False
    for estimator in ALL:
        result = estimator(torch.tensor([0, 1]), rows, alone, **NEEDED.get(estimator, {}))
        assert result["advantages"].values.tolist() == [0.0] * 5
        assert not result["loss_mask"].values.any()


@given(
    value=st.floats(-1e4, 1e4, width=32),
    noise=st.lists(st.integers(-4, 4), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_a_group_of_equal_rewards_gives_exactly_zero(value, noise):
    """Also when the rewards differ by some units in the last place of float32."""
    rewards = [np.float32(value)] * len(noise)
    for i, steps in enumerate(noise):
        for _ in range(abs(steps)):
            rewards[i] = np.nextafter(rewards[i], np.float32(math.copysign(np.inf, steps)))
    rows = simple_rows([2] * len(noise), reward=[float(r) for r in rewards])
    ids = torch.tensor([sample_id(0, 7, draw) for draw in range(len(noise))])
    for scale in ("group", "batch", "none"):
        assert set(grpo(ids, rows, alone, scale=scale)["advantages"].values.tolist()) == {0.0}
    assert set(rloo(ids, rows, alone)["advantages"].values.tolist()) == {0.0}
    assert set(dapo(ids, rows, alone, max_tokens=2)["advantages"].values.tolist()) == {0.0}
    assert set(reinforce_pp(ids, rows, alone, baseline=True)["advantages"].values.tolist()) == {0.0}


def test_a_tenth_ten_times_is_one():
    rows = simple_rows([1] * 3, reward=[sum([np.float32(0.1)] * 10, np.float32(0)).item(), 1.0, 0.1 * 10])
    assert rows["reward"].unique().numel() > 1, "the example needs rewards that differ by rounding"
    ids = torch.tensor([sample_id(0, 0, draw) for draw in range(3)])
    assert grpo(ids, rows, alone)["advantages"].values.tolist() == [0.0] * 3


def test_small_but_real_differences_count():
    rows = simple_rows([1, 1], reward=[0.0, 1e-4])
    ids = torch.tensor([sample_id(0, 0, 0), sample_id(0, 0, 1)])
    # the deviation of (0, d) is d / sqrt(2)
    assert grpo(ids, rows, alone)["advantages"].values.tolist() == pytest.approx([-0.6973, 0.6973], abs=1e-4)


def test_groups_are_per_epoch():
    rows = simple_rows([1, 1], reward=[0.0, 1.0])
    ids = torch.tensor([sample_id(0, 5, 0), sample_id(1, 5, 0)])
    assert grpo(ids, rows, alone)["advantages"].values.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ALL)
def test_no_rows(estimator):
    rows = simple_rows([])
    result = estimator(torch.empty(0, dtype=torch.int64), rows, alone, **NEEDED.get(estimator, {}))
    assert len(result["advantages"]) == 0 and result["advantages"].values.dtype == torch.float32


@pytest.mark.parametrize("estimator", ALL)
def test_only_empty_responses(estimator):
    result = estimator(torch.tensor([0, 1]), simple_rows([0, 0]), alone, **NEEDED.get(estimator, {}))
    assert result["advantages"].tolist() == [[], []]


def test_kl_in_the_reward_needs_a_reference():
    with pytest.raises(KeyError, match="log_probs"):
        gae(torch.tensor([0]), simple_rows([2]), alone, kl_coef=0.1)


def test_rank_count_does_not_change_sums_that_round(monkeypatch):
    """The example that plain left-to-right float sums get wrong: 1e16 + 1 - 1e16."""
    rows = simple_rows([1, 1, 1, 1], values=[[0.0]] * 4, reward=[1e16, 1.0, -1e16, 1.0])
    ids = torch.arange(4)
    whole = gae(ids, rows, alone)
    for cuts in ([1], [2], [1, 2, 3]):
        assert equal_bits(spread(gae, ids, rows, cuts), whole)
    assert (
        statistics.total(rows["reward"].double()[:, None], torch.ones(4, 1, dtype=torch.bool), alone) == 2.0
    )


@pytest.mark.parametrize("estimator", ALL)
def test_the_declared_columns_suffice(estimator):
    """Only declared columns move to the rank that computes: reading another one would fail in a run."""
    rows, ids = oracles.rows("mask_right"), oracles.ids("group_equal")
    wanted, params = estimator.needs, NEEDED.get(estimator, {})
    usual = {"advantages", "returns", "loss_mask", *wanted.writes}
    least = estimator(ids, {name: rows[name] for name in wanted.always}, alone, **params)
    assert set(least) == usual
    most = estimator(ids, {name: rows[name] for name in wanted.always + wanted.optional}, alone, **params)
    assert set(most) == usual | {"kl"} and equal_bits({name: most[name] for name in least}, least)
