"""Losses: invariances and hostile cases; their values are compared with other libraries in test_peers.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcflow.algorithms.losses import clipped_value, gspo, negative_log_likelihood, ppo_clip
from hpcflow.data.columns import Columns, Ragged, select_rows
from hpcflow.engines.batching import AGGREGATIONS, counts, token_weights
from tests.algorithms import oracles

MASKS = ("mask_right", "mask_empty", "mask_holes")


def total(loss, predictions: Ragged, rows: Columns, agg: str, parts: list[list[int]] | None = None):
    """(loss, gradient [T], metrics as masked token means), the rows taken in micro-batches ``parts``."""
    flat = predictions.values.clone().requires_grad_()
    tokens, full, _ = counts(rows["loss_mask"])
    everything = rows | {"predictions": predictions.like(torch.arange(flat.shape[0]))}
    value, metrics = 0.0, {}
    for part in parts if parts is not None else [list(range(len(predictions)))]:
        micro = select_rows(everything, torch.tensor(part, dtype=torch.int64))
        per_token, here = loss(flat[micro["predictions"].values], micro)
        value = value + (per_token * token_weights(micro["loss_mask"], agg, tokens, full)).sum()
        for name, metric in here.items():
            assert not metric.requires_grad and metric.shape == per_token.shape
            metrics[name] = metrics.get(name, 0.0) + float(metric[micro["loss_mask"].values].sum()) / tokens
    value.backward()
    return float(value.detach()), flat.grad, metrics


def assert_close(got, expected) -> None:
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_value_loss_without_clipping():
    rows = {
        "values": Ragged.from_lists([[0.0]], torch.float32),
        "returns": Ragged.from_lists([[3.0]], torch.float32),
        "loss_mask": Ragged.from_lists([[True]], torch.bool),
    }
    loss, metrics = clipped_value(torch.tensor([1.0]), rows, clip=None)
    assert loss.tolist() == [2.0]
    assert metrics["value_error"].tolist() == [4.0] and metrics["value_clip_fraction"].tolist() == [0.0]


@pytest.mark.parametrize(("kl", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531)])
def test_kl_is_added_to_the_loss(kl, value):
    rows = {
        "old_log_probs": Ragged.from_lists([[-1.0]], torch.float32),
        "ref_log_probs": Ragged.from_lists([[-1.5]], torch.float32),
        "advantages": Ragged.from_lists([[2.0]], torch.float32),
        "loss_mask": Ragged.from_lists([[True]], torch.bool),
    }
    loss, metrics = ppo_clip(torch.tensor([-1.0]), rows, kl_coef=0.1, kl=kl)
    assert_close(loss, [-2.0 + 0.1 * value])
    assert_close(metrics["kl_loss"], [value])


@pytest.mark.parametrize("bad", [1.0, 0.5])
def test_dual_clip_below_one_is_refused(bad):
    with pytest.raises(ValueError, match=f"dual_clip={bad} must be greater than 1"):
        ppo_clip(torch.zeros(0), {}, dual_clip=bad)


def test_an_unknown_kl_is_refused():
    rows = oracles.rows("mask_right")
    log_probs = oracles.ragged(oracles.tensor("logprobs"), "mask_right").values
    with pytest.raises(ValueError, match="kl='k4' is not known; it must be k1, k2, k3"):
        ppo_clip(log_probs, rows, kl_coef=0.1, kl="k4")


def loss_cases():
    return [
        (lambda p, rows: ppo_clip(p, rows, dual_clip=3.0, kl_coef=0.05), "logprobs"),
        (lambda p, rows: ppo_clip(p, rows, importance_cap=2.0, length=12), "logprobs"),
        (lambda p, rows: gspo(p, rows, clip=0.2, kl_coef=0.05, importance_cap=2.0), "logprobs"),
        (negative_log_likelihood, "logprobs"),
        (clipped_value, "values_new"),
    ]


@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize(("loss", "predictions"), loss_cases())
@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5)))
@settings(max_examples=15, deadline=None)
def test_micro_batches_change_nothing(loss, predictions, agg, order, cuts):
    bounds = [0, *sorted(cuts), 6]
    parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
    column, rows = oracles.ragged(oracles.tensor(predictions), "mask_holes"), oracles.rows("mask_holes")
    whole_value, whole_gradient, whole_metrics = total(loss, column, rows, agg)
    value, gradient, metrics = total(loss, column, rows, agg, parts)
    assert value == pytest.approx(whole_value, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-7)
    assert metrics == pytest.approx(whole_metrics, abs=1e-6)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("agg", AGGREGATIONS)
@pytest.mark.parametrize(("loss", "predictions"), loss_cases())
def test_junk_in_excluded_tokens_and_padding_changes_nothing(loss, predictions, agg, junk):
    keep = oracles.tensor("mask_holes") > 0

    def spoilt(column: Ragged) -> Ragged:
        return oracles.ragged(column.to_padded(junk).masked_fill(~keep, junk), "mask_holes")

    column, rows = oracles.ragged(oracles.tensor(predictions), "mask_holes"), oracles.rows("mask_holes")
    clean_value, clean_gradient, _ = total(loss, column, rows, agg)
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns"):
        rows[name] = spoilt(rows[name])
    value, gradient, metrics = total(loss, spoilt(column), rows, agg)
    assert value == clean_value
    assert torch.equal(gradient, clean_gradient)
    assert all(abs(metric) < 100 for metric in metrics.values())


def test_extreme_log_ratios_stay_finite():
    rows = {
        "old_log_probs": Ragged.from_lists([[-200.0, 0.0]], torch.float32),
        "ref_log_probs": Ragged.from_lists([[0.0, -200.0]], torch.float32),
        "advantages": Ragged.from_lists([[-1.0, -1.0]], torch.float32),
        "loss_mask": Ragged.from_lists([[True, True]], torch.bool),
    }
    log_probs = torch.tensor([0.0, -200.0], requires_grad=True)
    loss, _ = ppo_clip(log_probs, rows, kl_coef=0.1)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(log_probs.grad).all()


def test_no_rows():
    empty = Ragged.from_lists([], torch.float32)
    names = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")
    rows = dict.fromkeys(names, empty) | {"loss_mask": Ragged.from_lists([], torch.bool)}
    for loss in (ppo_clip, gspo, negative_log_likelihood, clipped_value):
        per_token, metrics = loss(torch.empty(0, requires_grad=True), rows)
        assert per_token.shape == (0,) and all(metric.shape == (0,) for metric in metrics.values())


@pytest.mark.parametrize(
    ("loss", "params"), [(ppo_clip, {"kl_coef": 0.1}), (gspo, {"kl_coef": 0.1}), (clipped_value, {})]
)
def test_the_declared_columns_suffice(loss, params):
    """Only declared columns move to the rank that trains: reading another one would fail in a run."""
    rows = oracles.rows("mask_right")
    predictions = oracles.ragged(oracles.tensor("logprobs"), "mask_right").values
    loss(predictions, {name: rows[name] for name in loss.needs.always})
    declared = {name: rows[name] for name in loss.needs.always + loss.needs.optional}
    torch.testing.assert_close(
        loss(predictions, declared, **params)[0], loss(predictions, rows, **params)[0], rtol=0, atol=0
    )
