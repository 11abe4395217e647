"""Continuing a run: from the last checkpoint, exactly, also under another placement, and never as another training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hpcflow import cli, run_folder
from hpcflow.config import compose, load
from hpcflow.store import open as open_run
from hpcflow.store.checkpoint import latest
from tests.training.programs import TINY, start, train
from tests.training.test_same_training import digests, equal, placed


def go_on(run: Path, overrides: list[str]) -> None:
    config = cli._resumed(run, overrides, None)
    run_folder.write_config(run, config)
    start(config, run).check()


def test_resume_is_bitwise_the_run_in_one_go(tmp_path: Path) -> None:
    """4 iterations against 2 + resume + 2: ids, every column, losses, weights; and with one iteration to redo."""
    whole = train(tmp_path / "whole", [*placed("colocate"), "iterations=4"])[0]
    parts = train(tmp_path / "parts", [*placed("colocate"), "iterations=2"])[0]
    go_on(parts.path, ["iterations=4"])
    # the same, but killed one iteration after its last checkpoint: that iteration is computed again
    redone = train(tmp_path / "redone", [*placed("colocate"), "iterations=3", "run.checkpoint_every=2"])[0]
    shutil.rmtree(redone.path / "checkpoints" / "iteration_2")
    go_on(redone.path, ["iterations=4"])
    for other in (open_run(parts.path), open_run(redone.path)):
        assert other.iterations == [0, 1, 2, 3]
        for number in other.iterations:
            a, b = whole.iteration(number), other.iteration(number)
            assert torch.equal(a.ids, b.ids)
            assert all(equal(a.columns[name], b.columns[name]) for name in a.columns)
            assert a.metrics["actor/loss"] == b.metrics["actor/loss"]
        assert digests(other) == digests(whole)


def test_resume_under_another_placement(tmp_path: Path) -> None:
    """Other pools, same layouts: bitwise. The launches record both placements."""
    whole = train(tmp_path / "whole", [*placed("colocate"), "iterations=3"])[0]
    moved = train(tmp_path / "moved", [*placed("colocate"), "iterations=1"])[0]
    before = moved.objects["placement"]["sha256"]
    go_on(moved.path, ["iterations=3", *placed("split")])
    moved = open_run(moved.path)
    assert digests(moved) == digests(whole)
    assert [launch["objects"]["placement"] for launch in moved.launches][0] == before
    assert moved.objects["placement"]["sha256"] != before


def test_resume_with_another_data_parallel_size(tmp_path: Path) -> None:
    """Same ids and draws; what follows from the same state differs by rounding alone."""
    whole = train(tmp_path / "whole", [*placed("colocate"), "iterations=2"])[0]
    moved = train(tmp_path / "moved", [*placed("colocate"), "iterations=1"])[0]
    go_on(moved.path, ["iterations=2", *placed("one")])
    a, b = whole.iteration(1), open_run(moved.path).iteration(1)
    assert torch.equal(a.ids, b.ids)
    assert equal(a.columns["response_ids"], b.columns["response_ids"])
    assert a.metrics["actor/loss"] == pytest.approx(b.metrics["actor/loss"], rel=1e-4, abs=1e-6)


def test_another_training_is_refused(tmp_path: Path) -> None:
    config = compose([*TINY, f"run.dir={tmp_path}"])
    run = run_folder.create(config)
    with pytest.raises(ValueError, match=r"algorithm\.advantage\.args\.lam: 0\.95 -> 0\.5"):
        cli._resumed(run, ["algorithm.advantage.args.lam=0.5"], None)
    with pytest.raises(ValueError, match="it may only grow"):
        cli._resumed(run, ["iterations=1"], None)
    assert load(run / "config.yaml") == config


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = train(tmp_path, [*placed("colocate"), "iterations=2", "run.checkpoint_every=1", "run.keep=2"])[0]
    newest = latest(run.path)
    assert newest.iteration == 1
    victim = max((newest.folder / "actor").iterdir(), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-10])
    assert latest(run.path).iteration == 0
    go_on(run.path, ["iterations=3"])
    again = open_run(run.path)
    assert again.iterations == [0, 1, 2]
    assert again.superseded
