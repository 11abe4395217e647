"""A real writer process, killed at random instants or followed while it writes."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from hpcflow import store
from hpcflow.store import reader as reader_module
from hpcflow.store import segments
from tests.store.runs import assert_iteration, columns_of, ids_of, write

KILLS = 24


def write_forever(run: Path, pipe, stop_at: int) -> None:
    """In a process of its own: record (as drafts) and commit iteration after iteration, acknowledging each."""
    segments.FAN = 3
    with store.RunWriter(run) as writer:
        for iteration in range(len(writer.iterations), stop_at):
            known = writer.recover(iteration)
            for name, column in columns_of(iteration).items():
                if name not in known:
                    stamp = {name: (iteration, "actor", iteration)}
                    writer.record(iteration, ids_of(iteration), {name: column}, stamp, draft=True)
            writer.commit(iteration, {"versions": {"actor": iteration + 1}})
            pipe.send(iteration)


@pytest.fixture(scope="module")
def processes():
    """Processes that start in milliseconds, from a server that imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.test_kill"])
    return context


def start(processes, run: Path, stop_at: int):
    pipe, other = processes.Pipe(duplex=False)
    process = processes.Process(target=write_forever, args=(run, other, stop_at), daemon=True)
    process.start()
    other.close()
    return process, pipe


def test_kills_at_random_instants_lose_no_acknowledged_iteration(tmp_path, processes):
    pick = random.Random(7)
    acknowledged = []
    for _ in range(KILLS):
        process, pipe = start(processes, tmp_path, 10_000)
        acknowledged.append(pipe.recv())
        time.sleep(pick.uniform(0, 0.06))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        while pipe.poll():
            try:
                acknowledged.append(pipe.recv())
            except EOFError:
                break
        run = store.open(tmp_path)
        assert run.skipped == {}
        # At most one more was committed just before it could be acknowledged; the next launch counts it.
        assert run.iterations in (list(range(acknowledged[-1] + 1)), list(range(acknowledged[-1] + 2)))
    assert len(set(acknowledged)) == len(acknowledged) >= KILLS
    assert [sample["id"] for sample in run.samples()] == [
        id for iteration in run.iterations for id in ids_of(iteration).tolist()
    ]
    for iteration in run.iterations:
        assert_iteration(run, iteration)
    assert run.damage() == {} and run.superseded == []


def test_a_reader_follows_a_live_run(tmp_path, processes):
    (tmp_path / "iterations").mkdir()
    process, pipe = start(processes, tmp_path, 60)
    run, last, rounds = store.open(tmp_path), 0, 0
    while last < 60 and (process.is_alive() or rounds == 0 or last < len(run.iterations)):
        acknowledged = 0
        while pipe.poll() and acknowledged < 60:
            try:
                acknowledged = pipe.recv() + 1
            except EOFError:
                break
        found = run.iterations
        assert found == list(range(len(found))) and len(found) >= max(last, acknowledged)
        assert run.skipped == {}
        assert len(run.history()) >= len(found)
        for iteration in found[last:]:
            assert_iteration(run, iteration)
        for iteration in random.Random(rounds).sample(found, min(3, len(found))):
            assert_iteration(run, iteration)
        last, rounds = len(found), rounds + 1
    process.join()
    assert process.exitcode == 0 and run.iterations == list(range(60)) and rounds > 3


def test_files_merged_under_a_reader_are_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "FAN", 2)
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
        run = store.open(tmp_path)
        early = run.iteration(0)
        write(writer, 1)
        write(writer, 2)
        assert early.columns["reward"].tolist() == [0, 1, 2, 3]
        assert_iteration(run, 0)

        # Merged between the listing and the opening of a file, and in the middle of a scan.
        real = reader_module.index_of
        pending = [3]

        def merge_first(folder, segment):
            if pending and segment.first == 2:
                write(writer, pending.pop())
            return real(folder, segment)

        monkeypatch.setattr(reader_module, "index_of", merge_first)
        assert store.open(tmp_path).iterations == [0, 1, 2, 3]
        assert pending == []

        scan = store.open(tmp_path)._scan(lambda group: group["ids"][0])
        write(writer, 4)
        assert next(scan) == 0
        write(writer, 5)
        assert list(scan) == [4, 8, 12, 16]


def test_a_file_removed_by_hand_is_an_error_not_a_loop(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0)
        write(writer, 1)
    run = store.open(tmp_path)
    early = run.iteration(1)
    (tmp_path / "iterations/000000001.h5").unlink()
    with pytest.raises(store.Unreadable, match="000000001.h5 was removed"):
        early.columns["reward"]
    assert run.iterations == [0] and len(run.history()) == 1
