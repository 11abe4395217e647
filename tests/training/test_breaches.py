"""Contract violations injected into real runs: each stops the run, names both values, and trains on nothing
wrong.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hpcflow import run_folder
from hpcflow.store import open as open_run
from hpcflow.store import read_lines
from hpcflow.store.checkpoint import latest
from tests.training.programs import start
from tests.training.test_kills import new_run
from tests.worlds import run_world

BREACHES = {
    "stale shard": r"rank 3 failed in critic.compute_values .*expected weight version 1, but this rank has 0",
    "shard that changes while it is used": r"columns values: expected .* version 1, but rank 3 holds .* version 0",
    "stale generation weights": r"the ranks of actor would generate with weight versions \[1, 0\]",
    "swapped ids": r"ContractError: .*belong to samples \[\d+.*\] \(\d+ rows\), columns .* to samples \[\d+",
    "lost column": r"critic.compute_values \(call \d+\) must write values but returned \[\]",
    "call delivered twice": r"critic.compute_values .*a call came twice or late: number (\d+) after \1",
    "update issued twice": r"update_critic \(call \d+\): expected weight version 1, but this rank has 2",
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_stops_the_run_before_an_update(tmp_path: Path, breach: str) -> None:
    config, run = new_run(tmp_path, ["iterations=3"])
    run_folder.record_launch(run, config, resumed=False)
    function = "tests.training.breaches:be_rank"
    result = run_world(config.world_size, function, {"run": str(run), "breach": breach}, timeout=120)
    assert result.rc != 0
    assert re.search(BREACHES[breach], result.stderr, re.DOTALL), result.stderr
    assert open_run(run).iterations == [0]
    (failure,) = [entry for entry in read_lines(run / "failures.jsonl") if entry["event"] == "failure"]
    assert failure["decision"]["iteration"] == 1
    finished = {entry["call"] for entry in read_lines(run / "journal.jsonl") if entry["event"] == "finished"}
    updates = [
        entry["call"]
        for entry in read_lines(run / "journal.jsonl")
        if entry["event"] == "started" and entry["kind"] == "advancing" and entry["call"] in finished
    ]
    assert len(updates) == (1 if breach == "update issued twice" else 0)


def test_a_wrong_version_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    config, run = new_run(tmp_path, ["iterations=2", "run.checkpoint_every=1"])
    start(config, run).check()
    index = latest(run).folder / "complete.json"
    content = json.loads(index.read_text())
    content["meta"]["versions"]["critic"] = 7
    index.write_text(json.dumps(content))
    result = start(config, run)
    assert result.rc != 0
    assert (
        "critic has weight version 7 and digest" in result.stderr
        and "what was loaded has version 2" in result.stderr
    )
    assert open_run(run).iterations == [0, 1]


def test_weights_of_another_checkpoint_are_named_and_the_one_before_serves(tmp_path: Path) -> None:
    config, run = new_run(tmp_path, ["iterations=2", "run.checkpoint_every=1"])
    start(config, run).check()
    older, newer = run / "checkpoints/iteration_0", latest(run).folder
    name = "actor/00001-of-00002.safetensors"
    assert (older / name).stat().st_size == (newer / name).stat().st_size
    shutil.copy(older / name, newer / name)
    result = start(config, run)
    assert result.rc != 0
    assert re.search(
        r"actor/00001-of-00002.safetensors is damaged: its content has digest (\w+), written was (\w+)",
        result.stderr,
    )
    shutil.move(newer, tmp_path / "away")
    result = start(config, run).check()
    assert "iteration 2 replayed" in result.stdout
    assert latest(run).iteration == 1
