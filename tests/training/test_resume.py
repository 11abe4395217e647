"""Continuing a run: from the last checkpoint, exactly, also under another placement, and never as another
training.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from hpcflow import cli, run_folder
from hpcflow.config import compose, load
from hpcflow.store import open as open_run
from hpcflow.store.checkpoint import latest
from tests.training.programs import TINY, start, train
from tests.training.test_kills import new_run
from tests.training.test_same_training import digests, equal, placed


def go_on(run: Path, overrides: list[str]) -> str:
    """Continue a run; returns what it printed."""
    config = cli._resumed(run, overrides, None)
    run_folder.write_config(run, config)
    return start(config, run).check().stdout


def test_resume_is_bitwise_the_run_in_one_go(tmp_path: Path) -> None:
    """4 iterations against 2 + resume + 2: ids, every column, losses, weights; and with one iteration to
    replay.
    """
    whole = train(tmp_path / "whole", [*placed("colocate"), "iterations=4"])[0]
    parts = train(tmp_path / "parts", [*placed("colocate"), "iterations=2"])[0]
    go_on(parts.path, ["iterations=4"])
    # the same, but killed one iteration after its last checkpoint: that iteration is replayed
    redone = train(tmp_path / "redone", [*placed("colocate"), "iterations=3", "run.checkpoint_every=2"])[0]
    shutil.rmtree(redone.path / "checkpoints" / "iteration_2")
    said = go_on(redone.path, ["iterations=4"])
    assert "iteration 3 replayed" in said and "metrics of its updates as recorded" in said
    assert "calls made besides" not in said  # nothing was generated or scored
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
    said = go_on(run.path, ["iterations=3"])
    assert "iteration_1 does not count: damaged" in said and "iteration 2 replayed" in said
    again = open_run(run.path)
    assert again.iterations == [0, 1, 2] and again.superseded == []


def test_branching_from_any_committed_iteration(tmp_path: Path) -> None:
    """In the middle between two checkpoints, then back to the beginning: each time the same run again."""
    options = ["iterations=4", "run.checkpoint_every=2", "run.keep=2", "run.eval=true", "run.eval_every=3"]
    run = train(tmp_path, [*placed("colocate"), *options])[0]
    columns = {k: dict(run.iteration(k).columns) for k in run.iterations}
    weights = digests(run)
    for done, loaded in ((3, 2), (0, 0)):
        assert cli._split(f"{run.path}@{done}") == (str(run.path), done)
        text = run_folder.branch(run.path, done)
        assert text == f"branching after iteration {done}; iterations {done + 1} to 4 count no more"
        assert run_folder.iterations_done(run.path) == loaded
        said = go_on(run.path, [])
        assert ("iteration 3 replayed" in said) == (done == 3)
        again = open_run(run.path)
        assert again.iterations == [0, 1, 2, 3] and again.damage() == {}
        for k in again.iterations:
            assert all(equal(columns[k][name], column) for name, column in again.iteration(k).columns.items())
        assert digests(again) == weights
    assert [iteration for iteration, _ in again.superseded] == [0, 1, 2, 3, 3]
    assert [entry["iteration"] for entry in again.evals] == [0, 3, 4, 4, 3, 4]
    assert len({(entry["iteration"], entry["reward_mean"]) for entry in again.evals}) == 3
    with pytest.raises(ValueError, match=r"@9: iteration 9 is not in the run; committed are 1 to 4"):
        run_folder.branch(run.path, 9)


def test_replay_under_another_data_parallel_size(tmp_path: Path) -> None:
    """Recorded samples are replayed: same samples, losses within rounding, and the run goes on from there."""
    run = train(tmp_path, [*placed("colocate"), "iterations=2"])[0]
    shutil.rmtree(run.path / "checkpoints")
    said = go_on(run.path, ["iterations=3", *placed("one")])
    gaps = [float(word) for word in re.findall(r"as recorded to (\S+)", said)]
    assert len(gaps) == 2 and max(gaps) < 1e-3
    assert open_run(run.path).iterations == [0, 1, 2]


def test_no_room_for_checkpoints_is_said_before_the_first_iteration(tmpfs: Path) -> None:
    """Three checkpoints of 2 MiB (two kept, one being written) do not fit 4 MiB."""
    config, run = new_run(tmpfs, ["iterations=1"])
    result = start(config, run)
    assert result.rc != 0
    assert re.search(r"room for 3 checkpoints needs .* MiB in .*, but only .* MiB are free", result.stderr)
    assert open_run(run).iterations == []
