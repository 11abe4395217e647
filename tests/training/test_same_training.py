"""What "the same training" means: the table of promises, held on real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcflow.data.columns import Ragged, flat
from hpcflow.store.checkpoint import latest
from hpcflow.store.reader import Run
from tests.training.programs import train

POOLS = {
    "colocate": "{all: {ranks: 2, models: [actor, critic, reference, reward]}}",
    "split": "{a: {ranks: 2, models: [actor, reference]}, b: {ranks: 2, models: [critic, reward]}}",
    "odd": "{a: {ranks: 2, models: [critic, reference]}, b: {ranks: 2, models: [reward, actor]}}",
    "one": "{all: {ranks: 1, models: [actor, critic, reference, reward]}}",
    "uneven": "{a: {ranks: 3, models: [actor]}, b: {ranks: 1, models: [critic, reference, reward]}}",
}


def placed(name: str) -> list[str]:
    return [f"placement.name={name}", f"placement.pools={POOLS[name]}"]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Ragged) and not torch.equal(a.lengths, b.lengths):
        return False
    return torch.equal(flat(a), flat(b))


def digests(run: Run) -> dict[str, str]:
    return latest(run.path).meta["digests"]


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("colocate"), placed("colocate"))[0]


@pytest.mark.parametrize("placement", ["split", "odd"])
def test_other_pools_same_layouts_are_bitwise_equal(tmp_path: Path, colocated: Run, placement: str) -> None:
    """Ids, tokens, every column, losses and weights, over several iterations."""
    other = train(tmp_path, placed(placement))[0]
    assert other.iterations == colocated.iterations == [0, 1, 2]
    for number in other.iterations:
        a, b = colocated.iteration(number), other.iteration(number)
        assert torch.equal(a.ids, b.ids)
        assert set(a.columns) == set(b.columns)
        for name in a.columns:
            assert equal(a.columns[name], b.columns[name]), f"{name} in iteration {number}"
        same = {n: v for n, v in a.metrics.items() if n.startswith(("actor/", "critic/"))}
        assert same and same == {n: b.metrics[n] for n in same}
    assert digests(other) == digests(colocated)
    assert colocated.objects["algorithm"]["sha256"] == other.objects["algorithm"]["sha256"]
    assert colocated.objects["protocol"]["sha256"] == other.objects["protocol"]["sha256"]
    assert colocated.objects["placement"]["sha256"] != other.objects["placement"]["sha256"]


@pytest.mark.parametrize("placement", ["one", "uneven"])
def test_other_data_parallel_size_changes_only_rounding(
    tmp_path: Path, colocated: Run, placement: str
) -> None:
    """From one shared state, one iteration: same ids, draws and tokens; log-probs, losses and values within a bound."""
    other = train(tmp_path, [*placed(placement), "iterations=1"])[0]
    a, b = colocated.iteration(0), other.iteration(0)
    assert torch.equal(a.ids, b.ids)
    for name in ("prompt_ids", "response_ids", "reward", "record"):
        assert equal(a.columns[name], b.columns[name]), name
    for name in ("old_log_probs", "ref_log_probs", "values", "advantages", "returns"):
        assert (flat(a.columns[name]) - flat(b.columns[name])).abs().max() < 1e-5, name
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-4, abs=1e-6), name
    for name in ("actor/tokens", "actor/rows"):
        assert a.metrics[name] == b.metrics[name]


def test_columns_say_where_they_come_from(colocated: Run) -> None:
    stamps = colocated.iteration(2).stamps
    assert tuple(stamps["response_ids"]) == (2, "actor", 2)
    assert tuple(stamps["values"]) == (2, "critic", 2)
    assert tuple(stamps["ref_log_probs"]) == (2, "reference", 0)
    first = colocated.iteration(0)
    # The reference is the untrained actor, in the same types.
    assert flat(first.columns["kl"]).abs().max() == 0
    assert equal(first.columns["old_log_probs"], first.columns["ref_log_probs"])
    gap = flat(first.columns["old_log_probs"]) - flat(first.columns["rollout_log_probs"])
    assert gap.abs().max() < 1e-4


def test_the_first_mini_batch_is_on_policy(tmp_path: Path) -> None:
    """With recomputed log-probs the ratio of an update's only mini-batch is exactly 1: no KL, nothing clipped."""
    run = train(tmp_path, [*placed("colocate"), "iterations=1", "algorithm.batch.mini_batches=1"])[0]
    metrics = run.iteration(0).metrics
    assert metrics["actor/clip_fraction"] == 0
    assert abs(metrics["actor/approx_kl"]) < 1e-6


def test_micro_batches_change_only_rounding(tmp_path: Path, colocated: Run) -> None:
    other = train(tmp_path, [*placed("colocate"), "iterations=1", "protocol.training.micro_batch=1"])[0]
    a, b = colocated.iteration(0), other.iteration(0)
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-4, abs=1e-6), name


def test_disjoint_pools_overlap_in_time(tmp_path: Path) -> None:
    """The critic's update runs while the actor's does, and the reference scores while the critic does."""
    run = train(tmp_path, [*placed("split"), "iterations=2", "algorithm.batch.prompts=32"])[0]
    nodes = {(n["model"], n["method"]): n for n in run.iteration(1).nodes}

    def overlap(a: tuple[str, str], b: tuple[str, str]) -> float:
        return min(nodes[a]["end"], nodes[b]["end"]) - max(nodes[a]["start"], nodes[b]["start"])

    assert overlap(("critic", "update_critic"), ("actor", "update_actor")) > 0
    assert overlap(("critic", "compute_values"), ("reference", "compute_log_prob")) > 0
