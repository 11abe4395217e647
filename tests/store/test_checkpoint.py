"""Only complete checkpoints count, what does not is named, and the last complete one is never deleted."""

import json
import os
import shutil

import pytest

from hpcflow import store
from hpcflow.store.checkpoint import CheckpointDir, file_digest


def save(checkpoints: CheckpointDir, iteration: int) -> store.Checkpoint:
    folder = checkpoints.begin(iteration)
    (folder / "actor").mkdir()
    (folder / "actor/0.distcp").write_bytes(bytes([iteration % 256]) * 100)
    (folder / "rng.json").write_text("{}")
    return checkpoints.finish(iteration, {"versions": {"actor": iteration}, "data_position": 32 * iteration})


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointDir(tmp_path)


def test_none_yet(tmp_path, checkpoints):
    assert store.latest(tmp_path) is None
    assert (checkpoints.complete(), checkpoints.skipped) == ([], {})
    assert not (tmp_path / "checkpoints").exists()


def test_the_last_one_counts_in_number_order(tmp_path, checkpoints):
    for iteration in (9, 10, 2):
        saved = save(checkpoints, iteration)
        assert saved.folder == tmp_path / f"checkpoints/iteration_{iteration}"
    assert [checkpoint.iteration for checkpoint in checkpoints.complete()] == [2, 9, 10]
    iteration, folder, meta, _ = store.latest(tmp_path)
    assert (iteration, meta) == (10, {"versions": {"actor": 10}, "data_position": 320})
    assert (folder / "actor/0.distcp").read_bytes() == bytes([10]) * 100
    content = json.loads((folder / "complete.json").read_text())
    assert {name: size for name, (size, _) in content["files"].items()} == {
        "actor/0.distcp": 100,
        "rng.json": 2,
    }


def test_what_does_not_count_is_named(tmp_path, checkpoints):
    save(checkpoints, 1)
    (checkpoints.begin(2) / "half").write_bytes(b"x")
    for iteration, spoil in {
        3: lambda folder: (folder / "complete.json").unlink(),
        4: lambda folder: (folder / "actor/0.distcp").write_bytes(b"short"),
        5: lambda folder: (folder / "actor/0.distcp").unlink(),
        6: lambda folder: (folder / "complete.json").write_text("{"),
    }.items():
        spoil(save(checkpoints, iteration).folder)
    (tmp_path / "checkpoints/mine").mkdir()
    (tmp_path / "checkpoints/iteration_0.trash").mkdir()
    assert checkpoints.latest().iteration == 1
    skipped = checkpoints.skipped
    assert skipped.pop("iteration_6")
    assert skipped == {
        "iteration_2.tmp": "unfinished",
        "iteration_3": "incomplete: no complete.json",
        "iteration_4": "damaged: actor/0.distcp has 5 bytes, written were 100",
        "iteration_5": "damaged: actor/0.distcp has no bytes, written were 100",
        "iteration_0.trash": "half deleted",
        "mine": "not a checkpoint's name",
    }


def test_a_killed_attempt_is_begun_afresh(checkpoints):
    (checkpoints.begin(3) / "old").write_bytes(b"x")
    folder = checkpoints.begin(3)
    assert list(folder.iterdir()) == []
    (folder / "new").write_bytes(b"y")
    assert sorted(os.listdir(checkpoints.finish(3, {}).folder)) == ["complete.json", "new"]


def test_a_second_one_of_an_iteration_counts_instead(checkpoints):
    save(checkpoints, 3)
    first, second = checkpoints.latest(), save(checkpoints, 3)
    assert second.folder.name == "iteration_3.1" and first.folder.exists()
    assert checkpoints.latest() == second
    shutil.rmtree(second.folder / "actor")
    assert checkpoints.latest() == first
    assert save(checkpoints, 3).folder.name == "iteration_3.2"


def test_retention_counts_complete_ones_only(tmp_path, checkpoints):
    for iteration in range(5):
        save(checkpoints, iteration)
    (tmp_path / "checkpoints/iteration_4/complete.json").unlink()
    checkpoints.begin(1)
    checkpoints.begin(7)
    assert {path.name for path in checkpoints.retain(2)} == {"iteration_0", "iteration_1", "iteration_1.tmp"}
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["iteration_2", "iteration_3", "iteration_4", "iteration_7.tmp"]
    assert checkpoints.retain(1) == [tmp_path / "checkpoints/iteration_2"]
    assert checkpoints.retain(1) == [] and checkpoints.latest().iteration == 3
    with pytest.raises(AssertionError, match="never deleted"):
        checkpoints.retain(0)


def test_changed_bytes_of_the_same_size_are_found_and_both_digests_named(checkpoints):
    saved = save(checkpoints, 1)
    assert saved.damage() == {} == checkpoints.latest().damage()
    (saved.folder / "actor/0.distcp").write_bytes(bytes([1]) * 99 + b"x")
    found = checkpoints.latest().damage()
    assert list(found) == ["actor/0.distcp"]
    assert file_digest(saved.folder / "actor/0.distcp") in found["actor/0.distcp"]
    assert saved.files["actor/0.distcp"][1] in found["actor/0.distcp"]


def test_digests_of_writers_are_taken_over(checkpoints):
    (checkpoints.begin(0) / "big").write_bytes(b"abc")
    assert checkpoints.finish(0, {}, digests={"big": "said by its writer"}).files == {
        "big": (3, "said by its writer")
    }


def test_checkpoints_beyond_a_branch_point_do_not_count(tmp_path, checkpoints):
    def committed(iteration: int, sequence: int) -> store.Checkpoint:
        (checkpoints.begin(iteration) / "x").write_bytes(b"x")
        return checkpoints.finish(iteration, {"sequence": sequence}, commit=sequence)

    for iteration in range(4):
        committed(iteration, iteration)
    (tmp_path / "iterations").mkdir()
    store.append_line(tmp_path / "iterations/rewinds.jsonl", {"sequence": 4, "iteration": 2})
    assert checkpoints.latest().iteration == 1
    assert {name: why[:10] for name, why in checkpoints.skipped.items()} == {
        "iteration_2": "superseded",
        "iteration_3": "superseded",
    }
    again = committed(2, 4)
    assert again.folder.name == "iteration_2.1" and checkpoints.latest() == again
    checkpoints.retain(2)
    assert sorted(os.listdir(checkpoints.folder)) == ["iteration_1", "iteration_2.1"]


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_kill_at_any_step_keeps_a_complete_one(tmp_path, monkeypatch):
    for countdown in range(1, 100):
        checkpoints = CheckpointDir(tmp_path / str(countdown))
        left = [countdown]

        def wrap(function, left=left):
            def step(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    raise Killed
                return function(*args, **kwargs)

            return step

        finished = []
        with monkeypatch.context() as patch:
            for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, wrap(getattr(os, name)))
            try:
                for iteration in range(3):
                    save(checkpoints, iteration)
                    finished.append(iteration)
                    checkpoints.retain(1)
            except Killed:
                pass
            else:
                break
        latest = checkpoints.latest()
        assert not finished or latest.iteration >= finished[-1]
        if latest is not None:
            assert latest.meta["data_position"] == 32 * latest.iteration
            assert (latest.folder / "actor/0.distcp").stat().st_size == 100
        save(checkpoints, 3)
        checkpoints.retain(1)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["iteration_3"]
    assert countdown > 40 and finished == [0, 1, 2]
