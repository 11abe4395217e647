"""Foreign, damaged, newer, read-only files; a full disk; two writers. None costs an iteration."""

import errno
import fcntl
import os
import subprocess

import h5py
import pytest
import torch

from hpcflow import store
from hpcflow.store import durable
from tests.store.runs import assert_iteration, ids_of, names, write


@pytest.fixture
def run(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
    return tmp_path


def damage(run, content):
    path = run / "iterations/000000001.h5"
    path.write_bytes(content(path.read_bytes()))


@pytest.mark.parametrize(
    "content, why",
    [
        (lambda old: old[: len(old) // 2], "truncated: "),
        (lambda old: old[:-1], "truncated: "),
        (lambda old: b"", "not an HDF5 file"),
        (lambda old: b"PK\x03\x04" + bytes(5000), "not an HDF5 file"),
    ],
)
def test_damaged_files_are_skipped_and_named(run, content, why):
    damage(run, content)
    reader = store.open(run)
    assert reader.iterations == [0, 2]
    assert list(reader.skipped) == ["iterations/000000001.h5"]
    assert why in reader.skipped["iterations/000000001.h5"]
    assert_iteration(reader, 2)
    with pytest.raises(ValueError, match="iteration 1 is not in"):
        reader.iteration(1)
    with store.RunWriter(run) as writer:
        assert writer.iterations == [0, 2]
        write(writer, 3)
    assert "000000001.h5" in names(run) and store.open(run).iterations == [0, 2, 3]


def test_damaged_facts_are_met_when_read(run):
    damage(run, lambda old: old.replace(b'"iteration"', b'"iter""ion"'))
    reader = store.open(run)
    assert reader.iterations == [0, 1, 2] and reader.skipped == {}
    assert [facts["iteration"] for facts in reader.history()] == [0, 2]
    assert [sample["iteration"] for sample in reader.samples()] == [0] * 4 + [2] * 4
    assert list(reader.skipped) == ["iterations/000000001.h5, commit 1"]
    with pytest.raises(store.Unreadable, match="000000001.h5, commit 1: damaged: its facts are not JSON"):
        reader.iteration(1)


def test_a_zeroed_block_costs_no_other_iteration(run):
    path = run / "iterations/000000001.h5"
    whole = path.read_bytes()
    for at in range(0, len(whole), 512):
        path.write_bytes(whole[:at] + bytes(512) + whole[at + 512 :])
        reader = store.open(run)
        assert {facts["iteration"] for facts in reader.history()} >= {0, 2}
        assert reader.iterations == [0, 1, 2] or "iterations/000000001.h5" in reader.skipped
        assert_iteration(reader, 0)
        store.RunWriter(run).close()


def test_foreign_and_newer_files(run):
    with h5py.File(run / "iterations/results.h5", "w") as file:
        file["x"] = 1
    with h5py.File(run / "iterations/000000007.h5", "w") as file:
        file["x"] = 1
    (run / "iterations/notes.txt").write_text("mine")
    reader = store.open(run)
    assert reader.iterations == [0, 1, 2]
    assert "foreign: not a name" in reader.skipped["iterations/results.h5"]
    assert "not of hpcflow's iterations" in reader.skipped["iterations/000000007.h5"]
    assert len(reader.skipped) == 2
    with store.RunWriter(run) as writer:
        write(writer, 3)
    assert "000000008.h5" in names(run)  # a foreign file keeps its name

    with h5py.File(run / "iterations/000000002.h5", "r+") as file:
        file.attrs["schema"] = 2
    reader = store.open(run)
    assert reader.iterations == [0, 1, 3]
    why = reader.skipped["iterations/000000002.h5"]
    assert "newer: schema 2, this hpcflow reads up to 1; update hpcflow" in why
    before = names(run)
    with pytest.raises(store.NewerSchema, match="000000002.h5: newer"):
        store.RunWriter(run)
    with pytest.raises(store.NewerSchema):  # and not "another process": the refusal let go of the run
        store.RunWriter(run)
    assert names(run) == before


def test_broken_config_and_objects_do_not_hide_the_iterations(run):
    (run / "config.yaml").write_text("a: [1")
    (run / "objects.json").write_text('{"algorithm"')
    reader = store.open(run)
    assert (reader.config, reader.objects, reader.iterations) == ({}, {}, [0, 1, 2])
    assert set(reader.skipped) == {"config.yaml", "objects.json"}


def test_no_run_directory(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        store.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither config.yaml nor iterations/"):
        store.open(tmp_path)
    with pytest.raises(ValueError, match="there is no run directory"):
        store.RunWriter(tmp_path / "nothing")


def test_a_run_that_only_has_a_config(tmp_path):
    (tmp_path / "config.yaml").write_text("name: x\niterations: 4\n")
    reader = store.open(tmp_path)
    assert reader.config == {"name": "x", "iterations": 4}
    assert (reader.iterations, reader.history(), reader.samples(), reader.skipped) == ([], [], [], {})
    assert (reader.launches, reader.exits, reader.evals) == ([], [], [])
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
    assert reader.iterations == [0]


def test_a_second_writer_is_refused(run):
    with store.RunWriter(run):
        with pytest.raises(ValueError, match="another process is recording"):
            store.RunWriter(run)
        assert store.open(run).iterations == [0, 1, 2]
    store.RunWriter(run).close()


def test_leftovers_of_a_killed_writer_are_removed_by_the_next(run):
    leftover = run / "iterations/000000003.h5.tmp"
    leftover.write_bytes(b"half")
    assert store.open(run).skipped == {}
    assert leftover.exists()
    store.RunWriter(run).close()
    assert not leftover.exists()


def test_a_full_disk_is_said_and_nothing_is_lost(tmpfs):
    def reward(size):
        return {"reward": torch.ones(4), "big": torch.ones(4, size)}

    stamps = {"reward": (1, "m", 0), "big": (1, "m", 0)}
    with store.RunWriter(tmpfs) as writer:
        write(writer, 0)
        filler = tmpfs / "filler"
        filler.write_bytes(bytes(5 << 19))
        writer.record(1, ids_of(1), reward(60_000), stamps)
        with pytest.raises(OSError, match="iteration 1 needs 1.9 MiB in .* only .* MiB are free") as caught:
            writer.commit(1, {})
        assert caught.value.errno == errno.ENOSPC
        assert names(tmpfs) == ["000000000.h5"] and store.open(tmpfs).iterations == [0]
        filler.unlink()
        writer.commit(1, {})
    run = store.open(tmpfs)
    assert run.iterations == [0, 1] and run.iteration(1).columns["big"].sum() == 240_000
    with pytest.raises(OSError, match="a checkpoint needs 101.0 MiB"):
        store.CheckpointDir(tmpfs).require_space(100 << 20)
    store.CheckpointDir(tmpfs).require_space(1 << 20)


def test_a_disk_that_fills_between_check_and_write(tmpfs, monkeypatch):
    monkeypatch.setattr(durable, "MARGIN_BYTES", -(1 << 30))  # as if the check had passed
    with store.RunWriter(tmpfs) as writer:
        big = {"big": torch.ones(4, 1 << 19)}
        writer.record(0, ids_of(0), big, {"big": (0, "m", 0)})
        with pytest.raises(OSError) as caught:
            writer.commit(0, {})
        assert caught.value.errno == errno.ENOSPC
        assert sorted(os.listdir(writer.folder)) == ["writer.lock"]
        subprocess.run(["mount", "-o", "remount,size=32m", tmpfs], check=True)
        writer.commit(0, {})
    assert store.open(tmpfs).iteration(0).columns["big"].shape == (4, 1 << 19)


def test_a_read_only_file_system_is_read(tmpfs):
    with store.RunWriter(tmpfs) as writer:
        write(writer, 0)
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    reader = store.open(tmpfs)
    assert_iteration(reader, 0)
    assert reader.skipped == {}
    with pytest.raises(OSError, match="Read-only"):
        store.RunWriter(tmpfs)


def test_files_that_somebody_else_has_locked_are_read(run):
    """HDF5's own locks are off: parallel file systems have none, or hang on them."""
    locked = [open(run / "iterations" / name, "rb") for name in names(run)]
    for file in locked:
        fcntl.flock(file, fcntl.LOCK_EX)
    reader = store.open(run)
    for iteration in range(3):
        assert_iteration(reader, iteration)
    with store.RunWriter(run) as writer:
        write(writer, 3)
    assert store.open(run).iterations == [0, 1, 2, 3]


def test_lines_survive_a_torn_one(tmp_path):
    path = tmp_path / "log.jsonl"
    assert store.read_lines(path) == []
    store.append_line(path, {"a": 1})
    with open(path, "ab") as file:
        file.write(b'{"a": 2, "b')
    store.append_line(path, {"a": 3})
    assert store.read_lines(path) == [{"a": 1}, {"a": 3}]


def test_write_atomic_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "x"
    store.write_atomic(path, b"one")
    store.write_atomic(path, b"two")
    assert path.read_bytes() == b"two"

    def fail(_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match="broken"):
        store.write_atomic(path, b"three")
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["x"]
