"""Evaluations on held-out prompts: each is recorded once, whatever kills the run and wherever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcflow import run_folder
from hpcflow.store import RunWriter
from hpcflow.store import open as open_run
from tests.training.programs import start
from tests.training.test_kills import assert_same_run, new_run, point

OPTIONS = ["iterations=2", "run.eval=true", "run.eval_every=1"]
KILLS = [
    point(0, "critic.update_critic", "before"),  # in the first iteration, after the evaluation before it
    point(1, "recorder.evaluation", "before", "recorder"),  # between an iteration's commit and its evaluation
    point(2, "recorder.evaluation", "before", "recorder"),  # after the last checkpoint
    point(2, "recorder.evaluation", "after", "recorder"),  # the last one is recorded, but nobody was told
]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in entry.items() if k != "time"} for entry in open_run(run).evals]


def test_each_is_recorded_once_wherever_the_run_is_killed(tmp_path: Path) -> None:
    config, whole = new_run(tmp_path / "whole", OPTIONS)
    start(config, whole).check()
    expected = evaluations(whole)
    assert [(entry["when"], entry["iteration"]) for entry in expected] == [
        ("before", 0), ("iteration 1", 1), ("after", 2)
    ]  # fmt: skip
    config, run = new_run(tmp_path / "killed", OPTIONS)
    for fault, recorded in zip(KILLS, (1, 1, 2, 3), strict=True):
        assert start(config, run, fault=fault).rc != 0, f"{fault} did not happen"
        assert evaluations(run) == expected[:recorded]
        assert run_folder.complete(run, config) == (recorded == 3)
        assert (run_folder.iterations_done(run) == 2) == (recorded > 1)
    assert "held-out" not in start(config, run).check().stdout  # nothing is left to do
    assert evaluations(run) == expected
    assert_same_run(open_run(run), open_run(whole))


def test_what_a_branch_leaves(tmp_path: Path) -> None:
    """Evaluations of states before the branch count on, also where no iteration was committed in between."""
    lines = [(0, 0), (2, 2), (3, 3)]  # after so many iterations, at that sequence
    log = "".join(f'{{"iteration": {i}, "sequence": {s}}}\n' for i, s in lines)
    (tmp_path / "evals.jsonl").write_text(log + '{"iteration": 1, "sequ')
    with RunWriter(tmp_path) as writer:
        for iteration in range(3):
            writer.commit(iteration, {})
        assert run_folder.evaluated(tmp_path) == {0, 2, 3}
        writer.rewind(2)
        assert run_folder.evaluated(tmp_path) == {0, 2}
        writer.rewind(1)
        assert run_folder.evaluated(tmp_path) == {0}
        with (tmp_path / "evals.jsonl").open("a") as file:
            file.write(f'\n{{"iteration": 1, "sequence": {writer.next_sequence}}}\n')
        assert run_folder.evaluated(tmp_path) == {0, 1}
        writer.commit(1, {})
        assert run_folder.evaluated(tmp_path) == {0, 1}
        writer.rewind(0)
        assert run_folder.evaluated(tmp_path) == {0}
