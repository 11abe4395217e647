"""The line of an iteration says what a person should know before reading the record."""

from __future__ import annotations

import pytest

from hpcflow.dataflow.progress import Progress


def line(capsys: pytest.CaptureFixture[str], metrics: dict[str, float]) -> str:
    progress = Progress(4, lambda: "")
    progress.begin(1)
    progress.end(metrics)
    return capsys.readouterr().out


def test_what_went_well_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    said = line(capsys, {"reward": 0.25, "actor/rollout_gap": 0.05, "actor/skipped": 0.0})
    assert said == "iteration 2/4  reward +0.250  0.0 s  left 0:00\n"


def test_steps_not_taken_and_engines_that_disagree_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = line(capsys, {"actor/rollout_gap": 4.479, "critic/skipped": 0.5})
    assert "critic skipped 50 % of its steps" in said
    assert "actor's engines disagree by 4.48 per token's log-prob" in said
