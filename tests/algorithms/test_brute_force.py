"""Estimators and losses against formulas written row by row, on shapes, masks, seeds and scales of all
kinds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.algorithms.advantages import gae, reinforce_pp, remax, safe_gae
from hpcflow.algorithms.group_advantages import dapo, grpo, rloo
from hpcflow.algorithms.losses import gspo, negative_log_likelihood, ppo_clip
from hpcflow.data.columns import Ragged
from hpcflow.data.ids import group_key
from tests.algorithms.test_advantages import alone, batches
from tests.algorithms.test_losses import total


class Row:
    """One row in float64, kept tokens only."""

    def __init__(self, ids, rows, index: int, failed: str = "") -> None:
        keep = np.array(rows["loss_mask"].tolist()[index], dtype=bool)
        good = bool(rows["reward_ok"][index]) and (not failed or bool(rows[failed][index]))
        self.keep, self.good = keep & good, good
        token = lambda name: np.array(rows[name].tolist()[index], dtype=np.float64)[self.keep]
        self.value, self.cost_value = token("values"), token("cost_values")
        self.log_ratio = token("old_log_probs") - token("ref_log_probs")
        self.reward, self.cost = float(rows["reward"][index]), float(rows["cost"][index])
        self.baseline, self.length = float(rows["baseline"][index]), len(keep)
        self.truncated, self.key = bool(rows["truncated"][index]), int(group_key(ids)[index])

    def spread(self, numbers) -> np.ndarray:
        out = np.zeros(self.length)
        out[self.keep] = numbers
        return out

    def discounted(self, last: float, kl_coef: float, gamma: float) -> np.ndarray:
        rewards = -kl_coef * self.log_ratio
        if len(rewards):
            rewards[-1] += last
        return np.array(
            [sum(gamma ** (s - t) * r for s, r in enumerate(rewards) if s >= t) for t in range(len(rewards))]
        )

    def gae(self, last: float, value: np.ndarray, kl_coef: float, gamma: float, lam: float) -> np.ndarray:
        rewards = -kl_coef * self.log_ratio
        if len(rewards):
            rewards[-1] += last
        ahead = np.append(value[1:], 0.0)[: len(value)]
        delta = rewards + gamma * ahead - value
        return np.array(
            [
                sum((gamma * lam) ** (s - t) * d for s, d in enumerate(delta) if s >= t)
                for t in range(len(delta))
            ]
        )


def rows_of(batch, failed: str = "") -> list[Row]:
    return [Row(*batch, index, failed) for index in range(len(batch[0]))]


def whiten(parts: list[np.ndarray], unbiased: bool) -> list[np.ndarray]:
    everything = np.concatenate(parts) if parts else np.zeros(0)
    if len(everything) < 2:
        return [np.zeros(len(part)) for part in parts]
    spread = everything.var(ddof=int(unbiased))
    return [(part - everything.mean()) / math.sqrt(spread + 1e-8) for part in parts]


def assert_rows(column, rows: list[Row], expected: list, scale: float) -> None:
    for row, mine, wanted in zip(rows, column.tolist(), expected, strict=True):
        np.testing.assert_allclose(mine, row.spread(wanted), rtol=1e-5, atol=1e-5 * scale)


def size_of(rows: list[Row]) -> float:
    return max([1.0, *(abs(x) for r in rows for x in (r.reward, r.cost, r.baseline))])


def others(rows: list[Row], row: Row) -> list[float]:
    return [r.reward for r in rows if r.good and r.key == row.key]


@given(batch=batches(), m=st.floats(0.0, 5.0), kl_coef=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_safe_gae(batch, m, kl_coef):
    rows = rows_of(batch, "cost_ok")
    made = safe_gae(*batch, alone, multiplier=m, gamma=0.97, lam=0.9, kl_coef=kl_coef, whiten=False)
    reward = [r.gae(r.reward, r.value, kl_coef, 0.97, 0.9) for r in rows]
    cost = [r.gae(r.cost, r.cost_value, 0.0, 0.97, 0.9) for r in rows]
    scale = size_of(rows)
    combined = [(a - m * c) / (1 + m) for a, c in zip(reward, cost, strict=True)]
    assert_rows(made["advantages"], rows, combined, scale)
    everything = np.concatenate(combined)
    if len(everything) > 1 and everything.std() > 1e-3:  # below, whitening blows rounding up
        whitened = safe_gae(*batch, alone, multiplier=m, gamma=0.97, lam=0.9, kl_coef=kl_coef)
        assert_rows(whitened["advantages"], rows, whiten(combined, True), 10.0)
    assert_rows(made["returns"], rows, [a + r.value for a, r in zip(reward, rows, strict=True)], scale)
    assert_rows(
        made["cost_returns"], rows, [c + r.cost_value for c, r in zip(cost, rows, strict=True)], scale
    )


@given(batch=batches(), kl_coef=st.sampled_from([0.0, 0.3]), whitened=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_multiplier_of_zero_is_plain_gae_bitwise(batch, kl_coef, whitened):
    ids, rows = batch
    rows["cost_ok"][:] = True
    params = {"gamma": 0.97, "lam": 0.9, "kl_coef": kl_coef, "whiten": whitened}
    plain, safe = gae(ids, rows, alone, **params), safe_gae(ids, rows, alone, multiplier=0.0, **params)
    for name, column in plain.items():
        assert torch.equal(column.values, safe[name].values)


@given(batch=batches(), kl_coef=st.sampled_from([0.0, 0.3]))
@settings(max_examples=20, deadline=None)
def test_remax(batch, kl_coef):
    rows = rows_of(batch, "baseline_ok")
    made = remax(*batch, alone, kl_coef=kl_coef)
    assert_rows(
        made["advantages"],
        rows,
        [r.discounted(r.reward, kl_coef, 1.0) - r.baseline for r in rows],
        size_of(rows),
    )


@given(batch=batches(), baseline=st.booleans(), unbiased=st.booleans(), kl_coef=st.sampled_from([0.0, 0.3]))
@settings(max_examples=30, deadline=None)
def test_reinforce_pp(batch, baseline, unbiased, kl_coef):
    rows = rows_of(batch)
    taken = [np.mean(others(rows, r)) if baseline and r.good else 0.0 for r in rows]
    returns = [r.discounted(r.reward - b, kl_coef, 0.97) for r, b in zip(rows, taken, strict=True)]
    made = reinforce_pp(*batch, alone, gamma=0.97, kl_coef=kl_coef, baseline=baseline, unbiased=unbiased)
    assert_rows(made["returns"], rows, returns, size_of(rows))
    everything = np.concatenate(returns)
    if len(everything) > 1 and everything.std() > 1e-3:  # below, whitening blows rounding up
        assert_rows(made["advantages"], rows, whiten(returns, unbiased), 10.0)


@given(batch=batches())
@settings(max_examples=30, deadline=None)
def test_group_estimators(batch):
    rows = rows_of(batch)
    plain, divided, left = [], [], []
    for r in rows:
        group = others(rows, r) if r.good else []
        flat = len(group) < 2 or max(group) - min(group) <= 1e-6 * max(1.0, *map(abs, group))
        centred = 0.0 if flat else r.reward - float(np.mean(group))
        plain.append(centred)
        divided.append(0.0 if flat else centred / (float(np.std(group, ddof=1)) + 1e-6))
        left.append(0.0 if flat else r.reward - (sum(group) - r.reward) / (len(group) - 1))
    scale = size_of(rows)
    assert_rows(grpo(*batch, alone, scale="none")["advantages"], rows, plain, scale)
    assert_rows(grpo(*batch, alone)["advantages"], rows, divided, 10.0)
    assert_rows(dapo(*batch, alone, max_tokens=99)["advantages"], rows, divided, 10.0)
    assert_rows(rloo(*batch, alone)["advantages"], rows, left, scale)


def test_overlong_responses_are_punished_gradually():
    """Limit 10, buffer 4: nothing up to 6 tokens, a quarter more for each, all of it at 10."""
    lengths = torch.tensor([6, 7, 8, 9, 10])
    rows = {
        "reward": torch.ones(5),
        "reward_ok": torch.ones(5, dtype=torch.bool),
        "loss_mask": Ragged(torch.ones(40, dtype=torch.bool), lengths),
        "truncated": torch.tensor([False] * 4 + [True]),
    }
    ids = torch.arange(5)
    made = dapo(ids, rows, alone, max_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    shaped = 1 - 2 * torch.tensor([0, 0.25, 0.5, 0.75, 1.0])
    expected = (shaped - shaped.mean()) / (shaped.std() + 1e-6)
    torch.testing.assert_close(torch.tensor([r[0] for r in made["advantages"].tolist()]), expected)
    masked = dapo(ids, rows, alone, max_tokens=10, overlong_buffer=4, mask_truncated=True)
    assert [any(row) for row in masked["loss_mask"].tolist()] == [True] * 4 + [False]
    kept = dapo(ids, rows, alone, max_tokens=10, overlong_buffer=4)
    assert masked["advantages"].tolist()[:4] == kept["advantages"].tolist()[:4], (
        "still part of the statistics"
    )


@st.composite
def loss_rows(draw):
    """(log_probs, rows) of a loss, ragged, with holes and rows without a counted token."""
    lengths = torch.tensor([draw(st.integers(1, 7)), *draw(st.lists(st.integers(0, 7), max_size=7))])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    random = lambda: Ragged(torch.randn(int(lengths.sum()), generator=generator), lengths)
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    rows = {name: random() for name in names}
    rows["loss_mask"] = random().like(torch.rand(int(lengths.sum()), generator=generator) < 0.7)
    rows["loss_mask"].values[:1] = True
    return random(), rows


def by_hand(log_probs: torch.Tensor, rows, per_row, agg: str) -> torch.Tensor:
    """The aggregate of ``per_row(log_probs, old, ref, rollout, advantages)`` over counted tokens, row by
    row."""
    parts = []
    for new, old, ref, rollout, advantage, keep in zip(
        log_probs.split(rows["loss_mask"].lengths.tolist()),
        *(
            rows[name].split()
            for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "loss_mask")
        ),
        strict=True,
    ):
        if keep.any():
            parts.append(per_row(new[keep], old[keep], ref[keep], rollout[keep], advantage[keep]))
    if agg == "token-mean":
        return torch.cat(parts).mean()
    return torch.stack([p.mean() if agg == "seq-mean-token-mean" else p.sum() for p in parts]).mean()


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("kind", ["ppo", "dual", "corrected", "gspo"])
@given(case=loss_rows())
@settings(max_examples=12, deadline=None)
def test_policy_losses_and_gradients(kind, agg, case):
    log_probs, rows = case

    def surrogate(ratio, advantage, low, high):
        return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))

    def ppo(new, old, ref, rollout, advantage):
        loss = surrogate((new - old).exp(), advantage, 0.2, 0.28)
        if kind == "dual":
            loss = torch.where(advantage < 0, torch.minimum(loss, -3 * advantage), loss)
        if kind == "corrected":
            r = new - ref
            loss = loss * (old - rollout).exp().clamp(max=1.5) + 0.1 * ((-r).exp() - 1 + r)
            return loss / 7
        return loss

    def sequence(new, old, ref, rollout, advantage):
        mean = (new - old).mean().detach()
        return surrogate((mean + new - new.detach()).exp(), advantage, 0.2, 0.28)

    params = {"clip": 0.2, "clip_high": 0.28}
    params |= {
        "dual": {"dual_clip": 3.0},
        "corrected": {"importance_cap": 1.5, "kl_coef": 0.1, "length": 7},
    }.get(kind, {})
    loss = gspo if kind == "gspo" else ppo_clip
    value, gradient, _ = total(lambda p, r: loss(p, r, **params), log_probs, rows, agg)
    flat = log_probs.values.clone().requires_grad_()
    wanted = by_hand(flat, rows, sequence if kind == "gspo" else ppo, agg)
    wanted.backward()
    assert value == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradient, flat.grad, rtol=1e-4, atol=1e-5)


@given(case=loss_rows())
@settings(max_examples=12, deadline=None)
def test_language_modelling(case):
    log_probs, rows = case
    value, gradient, _ = total(negative_log_likelihood, log_probs, rows, "token-mean")
    keep = rows["loss_mask"].values
    assert value == pytest.approx(float(-log_probs.values[keep].mean()), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, -keep.float() / keep.sum())
