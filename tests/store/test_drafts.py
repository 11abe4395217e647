"""What is recorded before a commit survives its writer, whole or not at all, and is gone once it is not
needed.
"""

import os

import h5py
import pytest
import torch

from hpcflow import store
from hpcflow.data.columns import Ragged
from hpcflow.store import segments
from hpcflow.store.drafts import Drafts
from tests.store.runs import ids_of, write


def record(writer, iteration, names, place="m.f#1", rows=4, **options):
    columns = {name: torch.full((rows,), float(len(name))) for name in names}
    stamps = {name: (iteration, "m", 3) for name in names}
    writer.record(
        iteration,
        ids_of(iteration),
        columns,
        stamps,
        places=dict.fromkeys(names, place),
        draft=True,
        **options,
    )


def drafts(run):
    folder = run / "drafts"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_a_new_writer_takes_up_what_was_recorded(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
        record(writer, 1, ["a"])
        text = Ragged.from_lists([[1], [], [2, 3], [4]], torch.int64)
        writer.record(
            1, ids_of(1).flip(0), {"text": text}, {"text": (1, "m", 0)}, places={"text": "m.g#1"}, draft=True
        )
        assert drafts(tmp_path) == ["000000001-0.h5", "000000001-1.h5"]
        assert store.open(tmp_path).iterations == [0]
    with store.RunWriter(tmp_path) as writer:
        assert writer.recover(2) == {}
        assert writer.recover(1) == {"a": (1, "m", 3), "text": (1, "m", 0)}
        found = writer.recorded(1)
        assert found.columns["text"].tolist() == [
            [4],
            [2, 3],
            [],
            [1],
        ]  # in the order of the rows recorded first
        assert found.places == {"a": "m.f#1", "text": "m.g#1"}
        record(writer, 1, ["bb"])
        writer.commit(1, {})
        assert drafts(tmp_path) == []
        committed = writer.recorded(1)
        assert committed.columns["bb"].tolist() == [2.0] * 4 and committed.places == found.places
    assert sorted(store.open(tmp_path).iteration(1).columns) == ["a", "bb", "text"]


def test_a_column_of_another_call_takes_the_place_of_an_earlier_one(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        record(writer, 0, ["mask"], place="m.f#1")
        with pytest.raises(ValueError, match="column 'mask' recorded twice"):
            record(writer, 0, ["mask"], place="m.f#1")
        writer.record(
            0,
            ids_of(0),
            {"mask": torch.zeros(4)},
            {"mask": (0, "m", 3)},
            places={"mask": "m.g#1"},
            draft=True,
        )
    with store.RunWriter(tmp_path) as writer:
        writer.recover(0)
        assert writer.recorded(0).columns["mask"].tolist() == [0.0] * 4
        assert writer.recorded(0).places == {"mask": "m.g#1"}


def test_other_samples_restart_an_iteration(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        record(writer, 0, ["a"])
        with pytest.raises(ValueError, match="are of other samples"):
            writer.record(0, ids_of(5), {"b": torch.ones(4)}, {"b": (0, "m", 0)}, draft=True)
        writer.record(0, ids_of(5), {"b": torch.ones(4)}, {"b": (0, "m", 0)}, draft=True, restart=True)
        assert drafts(tmp_path) == ["000000000-0.h5"]
    with store.RunWriter(tmp_path) as writer:
        assert list(writer.recover(0)) == ["b"] and torch.equal(writer.recorded(0).ids, ids_of(5))


def test_damage_and_gaps_end_what_counts(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        for name in "abc":
            record(writer, 0, [name])
    path = tmp_path / "drafts/000000000-1.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    found = Drafts(tmp_path)
    assert [list(each.columns) for each in found.load(0)] == [["a"]]
    assert "truncated" in found.skipped["000000000-1.h5"]
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        file["000000001/columns/b"][0] = 17.0
    assert [list(each.columns) for each in found.load(0)] == [["a"]]
    assert "its content has digest" in found.skipped["000000000-1.h5"]


def test_drafts_go_when_the_run_goes_back_and_when_a_kill_left_committed_ones(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
        record(writer, 1, ["a"])
        left = (tmp_path / "drafts/000000001-0.h5").read_bytes()
        writer.commit(1, {})
        (tmp_path / "drafts/000000001-0.h5").write_bytes(left)  # killed between commit and clearing
        record(writer, 2, ["a"])
    with store.RunWriter(tmp_path) as writer:
        assert drafts(tmp_path) == ["000000002-0.h5"]
        assert writer.rewind(1) == [1] and drafts(tmp_path) == []
        assert writer.sequence_of(0) == 0


def test_every_commit_has_a_digest_of_its_content(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 2)
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
    run = store.open(tmp_path)
    assert run.damage() == {}  # two of them were merged: digests move along
    path = tmp_path / "iterations/000000002.h5"
    with h5py.File(path, "r+") as file:
        file["000000002/columns/reward"][1] = 1e9
    assert list(store.open(tmp_path).damage()) == ["iterations/000000002.h5, commit 2"]
