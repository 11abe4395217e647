"""``hpcflow check RUN``: every byte of a run directory against what was written."""

import shutil

import h5py
import pytest
import torch

from hpcflow import cli, store
from hpcflow.store.verification import verify
from tests.store.runs import ids_of, write


@pytest.fixture
def run(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
        for iteration in (0, 1):
            checkpoints = store.CheckpointDir(tmp_path)
            (checkpoints.begin(iteration) / "weights").write_bytes(bytes(1000))
            checkpoints.finish(iteration, {}, commit=iteration)
        columns = {"reward": torch.ones(4)}
        writer.record(3, ids_of(3), columns, {"reward": (3, "m", 3)}, draft=True)
    return tmp_path


def test_a_run_as_it_was_written(run, capsys):
    shutil.copytree(run / "checkpoints/iteration_1", run / "checkpoints/iteration_2.tmp")
    assert cli.main(["check", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "iterations: 3 committed",
        "checkpoints/iteration_0: state after iteration 1, 0.0 MiB, as written",
        "checkpoints/iteration_1: state after iteration 2, 0.0 MiB, as written",
        "checkpoints/iteration_2.tmp does not count: unfinished",
        "drafts: 1 columns of iteration 4, which is not committed",
    ]


def test_all_damage_is_named(run, capsys):
    weights = run / "checkpoints/iteration_0/weights"
    weights.write_bytes(bytes(999) + b"x")
    (run / "checkpoints/iteration_1/weights").unlink()
    with h5py.File(run / "iterations/000000001.h5", "r+") as file:
        file["000000001/lengths/response_ids"][0] = 9
    draft = run / "drafts/000000003-0.h5"
    draft.write_bytes(draft.read_bytes()[:-1])
    (run / "iterations/000000002.h5").unlink()
    assert cli.main(["check", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "iterations: 2 committed"
    damage = {line.split(":")[0]: line for line in lines[1:]}
    assert set(damage) == {
        "DAMAGED iterations/000000001.h5, commit 1",
        "DAMAGED checkpoints/iteration_0/weights",
        "DAMAGED checkpoints/iteration_1",
    }
    assert "its content has digest" in damage["DAMAGED iterations/000000001.h5, commit 1"]
    assert "written was" in damage["DAMAGED checkpoints/iteration_0/weights"]
    assert "weights has no bytes, written were 1000" in damage["DAMAGED checkpoints/iteration_1"]


def test_what_a_branch_superseded_is_well(run):
    with store.RunWriter(run) as writer:
        writer.rewind(1)
    lines, well = verify(run)
    assert well
    assert lines == [
        "iterations: 1 committed; 2 more superseded by a branch",
        "checkpoints/iteration_0: state after iteration 1, 0.0 MiB, as written",
        "checkpoints/iteration_1 does not count: superseded: the run has gone back before its iteration",
    ]


def test_not_a_run(tmp_path, capsys):
    assert cli.main(["check", str(tmp_path)]) == 2
    assert "no run directory" in capsys.readouterr().err
