"""Merging files in tiers: few files, flat cost, and every commit counts exactly once at every crash point."""

import errno
import os
import re
import time

import pytest
import torch

from hpcflow import store
from hpcflow.store import durable, schema, segments
from hpcflow.store.segments import Segment, find_owners, list_names, live_commits
from tests.store.runs import assert_iteration, names, write


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the product may catch it."""


def written_bytes() -> int:
    with open("/proc/self/io") as file:
        return int(re.search(r"wchar: (\d+)", file.read())[1])


def test_names():
    single, merged = Segment(12, 12, 0), Segment(0, 1023, 2)
    assert (single.name, merged.name) == ("000000012.h5", "000000000-000001023.tier2.h5")
    assert Segment.parse(single.name) == single and Segment.parse(merged.name) == merged
    assert Segment.parse("notes.h5") is None and Segment.parse("000000012.h5.tmp") is None


def test_three_thousand_iterations_in_few_files_at_flat_cost(tmp_path, monkeypatch):
    monkeypatch.setattr(durable.os, "fsync", lambda _: None)  # counted are bytes, not the disk's patience
    marks, most_files = [], 0
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3072):
            if iteration % 1024 == 0:
                marks.append(written_bytes())
            writer.commit(iteration, {"metrics": {"x": iteration / 2}})
            if iteration % 61 == 0 or iteration % 1024 > 1020:
                most_files = max(most_files, len(list(writer.folder.iterdir())))
        marks.append(written_bytes())
    assert most_files <= 31 + 31 + 3 + 1  # two tiers, the third, the lock
    first, second, third = (after - before for before, after in zip(marks, marks[1:], strict=False))
    assert second == pytest.approx(first, rel=0.02) and third == pytest.approx(first, rel=0.02)
    assert names(tmp_path) == [f"{1024 * i:09d}-{1024 * i + 1023:09d}.tier2.h5" for i in range(3)]
    history = store.open(tmp_path).history()
    assert [facts["iteration"] for facts in history] == list(range(3072))
    assert history[3000]["metrics"] == {"x": 1500.0}


def test_a_commit_only_adds_its_own_file_and_changes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 4)

    def state():
        stats = {path.name: path.stat() for path in folder.glob("*.h5")}
        return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats.items()}

    with store.RunWriter(tmp_path) as writer:
        folder = writer.folder
        for iteration in range(30):
            before = state()
            write(writer, iteration)
            after = state()
            assert all(after[name] == before[name] for name in before.keys() & after.keys())
            if (iteration + 1) % 4:
                assert after.keys() - before.keys() == {f"{iteration:09d}.h5"}
                assert before.keys() <= after.keys()
    run = store.open(tmp_path)
    assert run.iterations == list(range(30))
    for iteration in range(30):
        assert_iteration(run, iteration)


def crash_at(monkeypatch, countdown: int) -> None:
    """Raise `Killed` before the ``countdown``-th durable step (rename, unlink, fsync), odd ones after it."""
    left = [countdown]

    def wrap(function):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and countdown % 2 == 0:
                raise Killed
            result = function(*args, **kwargs)
            if left[0] == 0:
                raise Killed
            return result

        return step

    monkeypatch.setattr(os, "fsync", lambda _: None)
    for name in ("rename", "fsync", "unlink"):
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def test_each_commit_counts_once_after_a_crash_at_any_step(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 2)
    crashes = 0
    for countdown in range(1, 200):
        run = tmp_path / str(countdown)
        run.mkdir()
        committed = []
        with monkeypatch.context() as patch:
            crash_at(patch, countdown)
            try:
                with store.RunWriter(run) as writer:
                    for iteration in range(8):
                        write(writer, iteration)
                        committed.append(iteration)
            except Killed:
                crashes += 1
            else:
                break
        reader = store.open(run)
        found = reader.iterations
        assert found in (committed, [*committed, len(committed)]) and reader.skipped == {}
        for iteration in found:
            assert_iteration(reader, iteration)
        with store.RunWriter(run) as writer:  # the next launch goes on and tidies up
            assert writer.iterations == found
            write(writer, len(found))
            left = names(run)
        covered = [range(s.first, s.last + 1) for s in map(Segment.parse, left)]
        assert sorted(i for part in covered for i in part) == list(range(len(found) + 1))
        assert not list((run / "iterations").glob("*.tmp"))
        assert store.open(run).iterations == list(range(len(found) + 1))
    assert crashes > 40 and committed == list(range(8))


def test_parts_beside_their_merged_file_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 4)
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
        part = (writer.folder / "000000001.h5").read_bytes()
        write(writer, 3)
    (tmp_path / "iterations/000000001.h5").write_bytes(part)
    run = store.open(tmp_path)
    assert run.iterations == [0, 1, 2, 3] and len(run.samples()) == 16
    store.RunWriter(tmp_path).close()
    assert names(tmp_path) == ["000000000-000000003.tier1.h5"]


def test_a_damaged_part_is_left_alone_and_the_rest_is_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 4)
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(3):
            write(writer, iteration)
        damaged = writer.folder / "000000001.h5"
        damaged.write_bytes(damaged.read_bytes()[:-100])
        for iteration in range(3, 9):
            write(writer, iteration)
    assert names(tmp_path) == [
        "000000000-000000004.tier1.h5",
        "000000001.h5",
        "000000005-000000008.tier1.h5",
    ]
    run = store.open(tmp_path)
    assert run.iterations == [0, 2, 3, 4, 5, 6, 7, 8]
    assert list(run.skipped) == ["iterations/000000001.h5"]
    with store.RunWriter(tmp_path) as writer:
        assert write(writer, 1)["reward"] == 11.5  # computed again, under a sequence of its own
    run = store.open(tmp_path)
    assert run.iterations == list(range(9)) and "000000009.h5" in names(tmp_path)
    assert_iteration(run, 1)


def test_without_space_merging_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 4)

    def full(folder, needed, what):
        raise OSError(errno.ENOSPC, "full")

    with store.RunWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(segments, "require_space", full)
            for iteration in range(6):
                write(writer, iteration)
            assert len(names(tmp_path)) == 6
        write(writer, 6)
        assert names(tmp_path) == ["000000000-000000003.tier1.h5", *(f"{i:09d}.h5" for i in (4, 5, 6))]
    assert store.open(tmp_path).iterations == list(range(7))


def test_listing_cannot_miss_a_merge(tmp_path, monkeypatch):
    folder = tmp_path
    (folder / "000000000-000000003.tier1.h5").touch()
    real, passes = os.scandir, []

    def scandir(path):
        passes.append(path)
        # The first pass came too early for the merged file and too late for its parts.
        return iter([]) if len(passes) == 1 else real(path)

    monkeypatch.setattr(segments.os, "scandir", scandir)
    assert list_names(folder) == ["000000000-000000003.tier1.h5"] and len(passes) == 3


def test_owners_and_rewinds():
    a, b, merged = Segment(0, 0, 0), Segment(1, 1, 0), Segment(0, 1, 1)
    owners = find_owners({merged: [(0, 5), (1, 6)], a: [(0, 5)], b: [(1, 6)]})
    assert owners == {0: (5, merged), 1: (6, merged)}
    c = Segment(2, 2, 0)
    owners[2] = (6, c)
    assert live_commits(owners, []) == {5: 0, 6: 2}
    assert live_commits(owners, [(2, 6)]) == {5: 0, 6: 2}
    assert live_commits(owners, [(3, 6)]) == {5: 0}
    assert live_commits(owners, [(2, 5), (3, 9)]) == {6: 2}


def test_going_back_keeps_files_but_counts_the_new_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 4)
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(6):
            write(writer, iteration)
        old = store.open(tmp_path).iteration(4)
        writer.record(9, old.ids, dict(old.columns), old.stamps)  # half an iteration, dropped with the rest
        assert writer.rewind(9) == [] and writer.rewind(3) == [3, 4, 5]
        assert writer.iterations == [0, 1, 2] == store.open(tmp_path).iterations
        writer.commit(3, {"metrics": {"again": 1.0}})
    run = store.open(tmp_path)
    assert run.iterations == [0, 1, 2, 3]
    assert run.iteration(3).metrics == {"again": 1.0} and list(run.iteration(3).columns) == []
    assert run.superseded == [(3, 3), (4, 4), (5, 5)]
    assert run.samples_of("actor", 4).tolist() == []
    assert old.columns["reward"].tolist() == [40, 41, 42, 43]
    with store.RunWriter(tmp_path) as writer:
        assert writer.iterations == [0, 1, 2, 3]
        write(writer, 4)
    assert_iteration(store.open(tmp_path), 4)


def test_the_merged_file_is_plain_hdf5_with_the_documented_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 2)
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
        write(writer, 1)
    with schema.opened(tmp_path / "iterations/000000000-000000001.tier1.h5") as file:
        assert dict(file.attrs) == {"format": "hpcflow iterations", "schema": 1}
        assert file["index"][()].tolist() == [[0, 0], [1, 1]]
        assert sorted(file) == ["000000000", "000000001", "index"]
        commit = file["000000001"]
        assert commit["columns/response_ids"][()].tolist() == [10, 10, 11, 12]
        assert commit["lengths/response_ids"][()].tolist() == [1, 2, 0, 1]
        assert "reward" not in commit["lengths"] and commit["ids"][()].tolist() == [4, 5, 6, 7]


@pytest.mark.slow
def test_ten_thousand_iterations_are_under_a_hundred_files_and_commits_cost_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(durable.os, "fsync", lambda _: None)
    most, spent = 0, []
    with store.RunWriter(tmp_path) as writer:
        for iteration in range(10_000):
            columns = {"reward": torch.ones(2)}
            ids = torch.tensor([2 * iteration, 2 * iteration + 1])
            start = time.process_time()
            writer.record(iteration, ids, columns, {"reward": (iteration, "m", 0)}, draft=True)
            writer.commit(iteration, {})
            spent.append(time.process_time() - start)
            if iteration % 101 == 0 or iteration > 9_980:
                most = max(most, sum(path.is_file() for path in tmp_path.rglob("*")))
    first, last = sum(spent[:1000]), sum(spent[-1000:])
    print(f"at most {most} files; 1000 commits took {first:.2f} s of CPU time at first, {last:.2f} s at last")
    assert most < 100 and last < 2 * first
    assert len(store.open(tmp_path).iterations) == 10_000
