"""The journal's lines and the decision what to run again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcflow.dataflow import journal as journal_module
from hpcflow.dataflow.journal import Journal, Node, Progress, decide, read_progress
from hpcflow.mpi.messages import Call, CallState, Part, Stamp, Transfer

KINDS = {"load": "pure", "generate": "replayable", "value": "pure", "update": "advancing", "measure": "pure"}
RANKS = (2, 3)


def call(number: int, method: str, reads: dict[str, int], writes: tuple[str, ...]) -> Call:
    part = (Part(2, 0, 4),)
    inputs = tuple(
        Transfer(100 + number, source, (column,), Stamp(5, "m", 1), part, part)
        for column, source in reads.items()
    )
    return Call(number, "m", method, 5, 1, RANKS, {}, inputs, writes, (), KINDS[method], f"m.{method}#1")


CALLS = [
    call(1, "load", {}, ("prompts",)),
    call(2, "generate", {"prompts": 1}, ("tokens", "mask")),
    call(3, "value", {"tokens": 2}, ("values",)),
    call(4, "update", {"tokens": 2, "values": 3}, ()),
]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    found = Journal(tmp_path)
    found.begin(5, {"m": 1}, {"m.before#1": {2: {"gap": 0.25}}})
    return found


def test_what_is_written_is_read(tmp_path: Path, journal: Journal) -> None:
    for each in CALLS:
        journal.started(each)
    journal.finished(1, {})
    journal.finished(2, {2: {"gap": 0.5}, 3: {"gap": 0.5}})
    journal.finished(77, {})  # of before this iteration
    journal.recorded({"prompts": "m.load#1", "tokens": "m.generate#1"})
    progress = read_progress(tmp_path)
    assert progress.iteration == 5 and progress.recorded == {"prompts": "m.load#1", "tokens": "m.generate#1"}
    assert progress.values == {
        "m.before#1": {2: {"gap": 0.25}},
        "m.generate#1": {2: {"gap": 0.5}, 3: {"gap": 0.5}},
    }
    assert [node.call for node in progress.nodes] == [1, 2, 3, 4]
    assert [node.finished for node in progress.nodes] == [True, True, False, False]
    assert progress.nodes[1].values == {2: {"gap": 0.5}, 3: {"gap": 0.5}}
    assert progress.nodes[3].advances and progress.nodes[3].reads == {"tokens": 2, "values": 3}
    assert [str(node) for node in progress.readers(progress.nodes[1])] == ["m.value", "m.update"]


def test_a_new_iteration_begins_a_new_file_and_a_torn_line_is_left_out(
    tmp_path: Path, journal: Journal
) -> None:
    journal.started(CALLS[0])
    journal.begin(6, {}, {})
    journal.started(CALLS[1])
    with open(journal.path, "ab") as file:
        file.write(b'{"event": "finished", "ca')
    progress = read_progress(tmp_path)
    assert progress.iteration == 6 and [node.call for node in progress.nodes] == [2]
    assert not progress.nodes[0].finished
    journal.close()
    journal.started(CALLS[2])  # nothing is in progress
    assert len(read_progress(tmp_path).nodes) == 1 and not journal.writing


def test_no_journal(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "journal.jsonl").write_text('{"event": "beg')
    assert read_progress(tmp_path) is None


def test_an_update_starts_only_after_all_lines_are_on_the_disk(journal: Journal, monkeypatch) -> None:
    events = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(
        journal_module.os, "write", lambda f, b: (events.append("write"), real_write(f, b))[1]
    )
    monkeypatch.setattr(journal_module.os, "fsync", lambda f: (events.append("sync"), real_sync(f))[1])
    for each in CALLS:
        journal.started(each)
    assert events == ["write"] * 4 + ["sync"]


def progress_of(started: int, finished: int) -> Progress:
    nodes = [
        Node(
            c.number,
            c.place,
            c.kind,
            1,
            list(RANKS),
            list(c.writes),
            {column: t.source for t in c.inputs for column in t.columns},
            c.number <= finished,
        )
        for c in CALLS[:started]
    ]
    return Progress(5, nodes, {})


ALL = {"prompts": "m.load#1", "tokens": "m.generate#1", "mask": "m.generate#1", "values": "m.value#1"}


def some(*columns: str) -> dict[str, str]:
    return {column: ALL[column] for column in columns}


@pytest.mark.parametrize(("started", "finished", "durable", "node", "kept"), [
    (0, 0, {}, "", ()),
    (1, 0, {}, "m.load", ()),
    (3, 2, {}, "m.load", ()),
    (3, 2, some("prompts"), "m.generate", ("m.load",)),
    (3, 2, some("prompts", "tokens", "mask"), "m.value", ("m.load", "m.generate")),
    (3, 3, ALL, "", ("m.load", "m.generate", "m.value")),
    (4, 3, ALL, "m.update", ("m.load", "m.generate", "m.value")),
    (4, 4, ALL, "m.update", ("m.load", "m.generate", "m.value")),
])  # fmt: skip
def test_the_earliest_node_whose_result_is_not_recorded(started, finished, durable, node, kept) -> None:
    decision = decide(progress_of(started, finished), durable, {}, loaded=5, committed=5)
    assert (decision.node, decision.kept, decision.replayed, decision.iteration) == (node, kept, None, 5)


def test_committed_iterations_after_the_checkpoint_are_replayed() -> None:
    decision = decide(progress_of(4, 3), ALL, {}, loaded=2, committed=5)
    assert decision.replayed == (2, 4)
    text = str(decision)
    assert text.startswith("earliest node to run again: iteration 6, m.update: ")
    assert "kept, because recorded: m.load, m.generate, m.value" in text
    assert "before it iterations 3 to 5 replayed from recorded columns, training nodes only" in text


def test_a_journal_of_another_iteration_says_nothing() -> None:
    for progress in (None, progress_of(4, 3)):
        decision = decide(progress, ALL, {}, loaded=7, committed=7)
        assert (decision.node, decision.kept, decision.why) == ("", (), "it had not begun")


def states(**by_rank: tuple[str, bool, bool]) -> dict[int, dict[int, CallState]]:
    return {int(rank[1:]): {4: CallState(*state), 2: CallState(*state)} for rank, state in by_rank.items()}


def test_why_says_what_the_ranks_answered() -> None:
    answers = states(r2=("running", False, False), r3=("waiting", True, False))
    why = decide(progress_of(4, 3), ALL, answers, loaded=5, committed=5).why
    assert "running on rank 2" in why and "waiting on rank 3" in why
    assert "never repeated in place although ranks [3] had not begun" in why and "version 1 to 2" in why
    why = decide(progress_of(4, 3), ALL, states(r3=("running", False, False)), loaded=5, committed=5).why
    assert "running on rank 3" in why and "unknown on 2 (dead)" in why
    waiting = states(r2=("waiting", True, False), r3=("waiting", True, False))
    why = decide(progress_of(4, 3), ALL, waiting, loaded=5, committed=5).why
    assert why == "it was waiting on ranks 2, 3"
    why = decide(progress_of(4, 3), ALL, {}, loaded=5, committed=5).why
    assert "nobody could say how far it was" in why and "never repeated in place" in why


def test_why_says_who_has_seen_a_result() -> None:
    durable = some("prompts")
    seen = decide(progress_of(3, 2), durable, states(r2=("finished", True, True)), loaded=5, committed=5).why
    assert seen == (
        "it had finished, its result was in the ranks' memory only, it is safe to repeat, "
        "its result was visible to m.value"
    )
    unseen = decide(
        progress_of(3, 2), durable, states(r2=("finished", True, False)), loaded=5, committed=5
    ).why
    assert unseen.endswith("nobody has seen its result")
    # without answers, a reader that was started may have seen it; one that was not cannot
    assert "visible to m.value" in decide(progress_of(3, 2), durable, {}, loaded=5, committed=5).why
    assert "nobody has seen" in decide(progress_of(2, 2), durable, {}, loaded=5, committed=5).why
