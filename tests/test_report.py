"""The report: numbers against hand-made ones, and every state that a run can be in."""

import json
import math
import subprocess

import matplotlib.image
import pytest
import torch

from hpcflow import store
from hpcflow.data.columns import Ragged, text_column
from hpcflow.report import Mean, difference, quarters, rate, report, reward, weighted
from tests.store.runs import ids_of


def write(writer, iteration, rewards, **facts):
    columns = {
        "reward": torch.tensor(rewards, dtype=torch.float32),
        "reward_ok": torch.ones(len(rewards), dtype=torch.bool),
        "response_ids": Ragged.from_lists([[1] * 8] * len(rewards), torch.int64),
    }
    stamps = {name: (iteration, "actor", iteration) for name in columns}
    writer.record(iteration, ids_of(iteration), columns, stamps)
    node = {
        "call": 1,
        "model": "actor",
        "method": "update_actor",
        "ranks": [2],
        "start": 0.0,
        "end": 3.0,
        "bytes": 1 << 20,
    }
    writer.commit(
        iteration,
        {
            "versions": {"actor": iteration + 1, "critic": iteration + 1},
            "wall_s": 4.0,
            "tokens": 32,
            "accelerator_s": 8.0,
            "idle": {"trainer waits for batch": 2.0, "straggler": 0.5},
            "nodes": [node],
            "metrics": {"kl": iteration / 10, "actor/loss": -0.1},
            **facts,
        },
    )


@pytest.fixture
def run(tmp_path):
    """Eight iterations of four samples; rewards rise by one per iteration."""
    (tmp_path / "config.yaml").write_text("name: x\niterations: 8\n")
    objects = {n: {"sha256": n[0] * 64, "content": {}} for n in ("algorithm", "protocol", "placement")}
    (tmp_path / "objects.json").write_text(json.dumps(objects))
    store.append_line(tmp_path / "launches.jsonl", {"time": 100.0, "host": "n1", "world": 4})
    with store.RunWriter(tmp_path) as writer:
        for i in range(8):
            write(writer, i, [i, i + 1.0, i, i + 1.0])
    return tmp_path


def lines(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


def test_a_finished_run(run):
    for when, mean, error in (("before", 0.25, 0.03), ("after", 0.75, 0.04)):
        entry = {"when": when, "reward_mean": mean, "reward_se": error, "samples": 32}
        store.append_line(run / "evals.jsonl", entry)
    store.append_line(run / "exits.jsonl", {"rank": 0, "exit": 0, "signal": None, "time": 200.0})
    text = report(run)
    assert max(map(len, text.splitlines())) <= 110 + len(str(run))
    assert lines(text, "state")[0].startswith("state      8 of 8 iterations committed, the last at 2")
    assert "badly" not in text and "running" not in text
    # Quarter 1: 0 1 0 1 1 2 1 2: mean 1, variance 4 / 7, standard error sqrt(1 / 14) = 0.267
    table = [line.split() for line in text.splitlines() if line.lstrip().startswith(("0-1", "6-7"))]
    assert table == [
        ["0-1", "1", "+-", "0.267", "0.05", "8", "-", "8", "4"],
        ["6-7", "7", "+-", "0.267", "0.65", "8", "-", "8", "4"],
    ]
    # 6 / sqrt(2 / 14) = 15.9
    assert "first to last quarter: reward 1 -> 7, +6 = +15.9 standard errors" in text
    assert "held-out   before: reward 0.25 +- 0.03 (32 samples)" in text
    assert "held-out   before to after: 0.25 -> 0.75, +0.5 = +10.0 standard errors" in text
    assert [line.split() for line in text.splitlines() if "update_actor" in line] == [
        ["actor.update_actor", "8", "3", "75.0", "%", "1"],  # of all iterations
        ["actor.update_actor", "0", "3", "1024"],  # of the last
    ]
    assert "capacity   8 updates; per update 4 samples, 32 tokens, 8 accelerator-seconds" in text
    assert lines(text, "idle") == [
        "idle       trainer waits for batch: 16 accelerator-seconds (25.0 % of all)",
        "idle       straggler: 4 accelerator-seconds (6.2 % of all)",
    ]
    assert "lineage    32 samples from 8 weight versions of actor (0 to 7)" in text
    assert "versions   actor 8, critic 8" in text
    for name in ("algorithm", "protocol", "placement"):
        assert f"{name:<10} sha256 {name[0] * 64}" in text
    assert lines(text, "continue") == [f"continue   hpcflow train --resume {run} iterations=12"]
    assert lines(text, "curves") == [f"curves     {run}/report/curves.png"]
    assert (run / "report/report.txt").read_text() == text
    assert sorted(path.name for path in (run / "report").iterdir()) == ["curves.png", "report.txt"]
    image = matplotlib.image.imread(run / "report/curves.png")
    assert image.shape[1] == 1200 and image.std() > 0.01
    assert report(run) == text


def test_a_live_and_a_crashed_run(run):
    (run / "config.yaml").write_text("name: x\niterations: 20\n")
    text = report(run)
    assert "state      8 of 20" in text and "running, or cut off without a trace" in text
    assert lines(text, "continue") == [f"continue   hpcflow train --resume {run}"]
    # Rank 7 ended in an earlier launch.
    store.append_line(run / "exits.jsonl", {"rank": 7, "exit": 1, "signal": None, "time": 50.0})
    store.append_line(run / "exits.jsonl", {"rank": 3, "exit": None, "signal": 9, "time": 150.0})
    store.append_line(run / "exits.jsonl", {"rank": 1, "exit": 1, "signal": None, "time": 151.0})
    text = report(run)
    assert "ended badly: rank 3 by signal 9, rank 1 by exit code 1" in text and "rank 7" not in text
    store.append_line(run / "launches.jsonl", {"time": 300.0})
    assert "in 2 launches; running" in report(run)


def decided(event, time, iteration, node, kept=(), replayed=None, **more):
    decision = {"iteration": iteration, "node": node, "kept": list(kept), "replayed": replayed, "why": "x"}
    return {"event": event, "time": time, "decision": decision, **more}


def test_failures_and_what_was_run_again(run):
    text = report(run)
    assert not lines(text, "failures") and not lines(text, "rewards")
    error = 'rank 2 failed in actor.update_actor (call 9):\nTraceback (most recent call last):\n  File "x"\nOSError: no'
    inside = 'engine 1 of actor raised and was rebuilt: Traceback (most recent call last):\n  File "y"\nRuntimeError: CUDA'
    update = (2, "actor.update_actor", ["actor.load_prompts", "actor.generate_sequences"], [0, 1])
    for entry in (
        {
            "event": "in_world",
            "time": 10.0,
            "iteration": 1,
            "node": "actor.generate_sequences#1",
            "error": inside,
        },
        decided("failure", 20.0, *update, error=error, seconds=3.25),
        decided("resume", 30.0, *update, seconds=3.0),
        decided("resume", 40.0, 4, "", seconds=None),  # after an orderly stop: nothing failed
        decided("resume", 50.0, 5, "critic.update_critic", seconds=1.5),  # the controller died
        {"event": "failure", "time": 60.0, "error": "rank 3 died; last known: idle"},
        decided("failure", 70.0, 6, "actor.load_prompts", error="rank 3 failed: " + "zz " * 99, seconds=0.5),
    ):
        store.append_line(run / "failures.jsonl", entry)
    found = report(run).splitlines()
    start = found.index("failures   5: 1 made good inside the launch, 4 by another one")
    assert [line[23:] if line[2] != " " else line for line in found[start + 1 : start + 11]] == [
        "engine 1 of actor raised and was rebuilt: RuntimeError: CUDA",
        "    in the living world: iteration 2, actor.generate_sequences: only the samples of what failed were made",
        "    again",
        "rank 2 failed in actor.update_actor (call 9): OSError: no",
        "    relaunched, again from iteration 3, actor.update_actor (stopped 3.2 s into that iteration, 2 of its nodes",
        "    kept); iterations 1 to 2 replayed",
        "the launch ended without a word",
        "    relaunched, again from iteration 6, critic.update_critic (stopped 1.5 s into that iteration)",
        "rank 3 died; last known: idle",
        "    not relaunched yet; no iteration was in progress",
    ]
    long = "".join(line[4 if number else 23 :] for number, line in enumerate(found[start + 11 : start + 13]))
    assert long.startswith("rank 3 failed: ") and long.endswith("...") and "zz" in long
    assert found[start + 13].startswith("    not relaunched yet, again from iteration 7, actor.load_prompts")
    for number in range(20):
        store.append_line(
            run / "failures.jsonl", decided("resume", 80.0 + number, number, "a.b", seconds=1.0)
        )
    found = report(run).splitlines()
    start = found.index("failures   24: 1 made good inside the launch, 23 by another one")
    assert found[start + 1] == "  (14 earlier ones are in failures.jsonl)"
    assert sum("again from iteration" in line for line in found[start:]) == 10


def test_steps_that_were_not_taken(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        for i, (actor, critic) in enumerate([(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.0, 0.0)]):
            writer.commit(i, {"metrics": {"actor/skipped": actor, "critic/skipped": critic}})
    found = lines(report(tmp_path), "skipped")
    assert found == ["skipped    actor: 37.5 % of its mini-batches took no step, in 2 iterations"]


def test_rewards_that_failed_are_counted_by_error(tmp_path):
    said = [["", "slow", "slow", ""], ["", "", "", ""], ["bad", "slow", "", ""]]
    attempts = [[1, 2, 2, 2], [2, 1, 1, 1], [1, 2, 1, 1]]
    with store.RunWriter(tmp_path) as writer:
        for i, (errors, made) in enumerate(zip(said, attempts, strict=True)):
            columns = {
                "reward": torch.ones(4),
                "reward_ok": torch.tensor([not error for error in errors]),
                "reward_error": text_column(errors),
                "reward_attempts": torch.tensor(made, dtype=torch.int32),
            }
            writer.record(i, ids_of(i), columns, {name: (i, "reward", 0) for name in columns})
            writer.commit(i, {})
    found = report(tmp_path).splitlines()
    start = found.index("rewards    of 12 samples 4 failed for good, 5 were asked for more than once")
    assert found[start + 1 : start + 3] == ["        3  slow", "        1  bad"]


def test_the_calls_of_the_last_iteration_in_their_order(tmp_path):
    """Two policies that take turns: the same method twice, times from the first call on."""
    calls = [
        ("proposer", "generate_sequences", 10.0, 12.0, 0),
        ("judge", "generate_sequences", 12.5, 14.0, 2048),
        ("proposer", "continue_sequences", 14.0, 14.5, 512),
        ("recorder", "record", 14.0, 14.1, 99),
    ]
    names = ("model", "method", "start", "end", "bytes")
    nodes = [
        {"call": 7 + k, "ranks": [2]} | dict(zip(names, call, strict=True)) for k, call in enumerate(calls)
    ]
    with store.RunWriter(tmp_path) as writer:
        write(writer, 0, [0.0, 1.0, 0.0, 1.0])
        write(
            writer, 1, [0.0, 1.0, 0.0, 1.0], nodes=nodes[::-1], metrics={"judge/loss": 1.0, "cost/mean": 2.0}
        )
    (tmp_path / "config.yaml").write_text("name: x\niterations: 2\n")
    text = report(tmp_path).splitlines()
    begin = next(i for i, line in enumerate(text) if "iteration 1, call by call" in line)
    assert [line.split() for line in text[begin + 1 : begin + 5]] == [
        ["proposer.generate_sequences", "0", "2", "0"],
        ["judge.generate_sequences", "2.5", "1.5", "2"],
        ["proposer.continue_sequences", "4", "0.5", "0.5"],
        [],
    ]


def test_no_iterations(tmp_path):
    (tmp_path / "config.yaml").write_text("iterations: 4\n")
    text = report(tmp_path)
    assert "0 of 4 iterations committed" in text and f"hpcflow train --resume {tmp_path}" in text
    assert not (tmp_path / "report/curves.png").exists() and "curves" not in text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_iterations_than_quarters(tmp_path, count):
    with store.RunWriter(tmp_path) as writer:
        for i in range(count):
            write(writer, i, [1.0, 0.0, 1.0, 0.0])
    text = report(tmp_path)
    assert f"{count} of ? iterations committed" in text
    assert ("first to last quarter" in text) == (count > 1)
    assert (tmp_path / "report/curves.png").exists()


def test_iterations_without_anything_measured(tmp_path):
    with store.RunWriter(tmp_path) as writer:
        writer.commit(0, {})
        writer.commit(1, {"metrics": {"actor/loss": math.nan}})
    text = report(tmp_path)
    assert "2 of ? iterations" in text and "first to last quarter: reward - -> -" in text


def test_evaluations_of_several_launches(run):
    for when, mean in (("before", 0.25), ("after", 0.5), ("before", None), ("after", 0.75)):
        entry = {"when": when, "reward_mean": mean, "reward_se": 0.0, "samples": 4 if mean else 0}
        store.append_line(run / "evals.jsonl", entry)
    text = report(run)
    assert "held-out   before: reward - +- 0 (0 samples)" in text
    assert "held-out   before to after: 0.25 -> 0.75, +0.5\n" in text


def test_damaged_files_are_named(run):
    (run / "iterations/000000003.h5").write_bytes(b"")
    text = report(run)
    assert "7 of 8 iterations" in text and "skipped    iterations/000000003.h5: foreign or empty" in text


def test_a_read_only_run(run, tmp_path_factory):
    point = tmp_path_factory.mktemp("ro")
    made = subprocess.run(["mount", "--bind", run, point], capture_output=True)
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", point], check=True)
        text = report(point)
    finally:
        subprocess.run(["umount", point], check=True)
    assert "8 of 8 iterations" in text and "curves     not written: [Errno 30] Read-only" in text


def test_no_run(tmp_path):
    with pytest.raises(ValueError, match="no run directory"):
        report(tmp_path / "nothing")


def test_pooled_reward_is_that_of_all_samples(tmp_path):
    generator = torch.Generator().manual_seed(0)
    groups = [torch.randn(n, generator=generator) + i for i, n in enumerate((5, 1, 0, 9))]
    history = []
    with store.RunWriter(tmp_path) as writer:
        for i, rewards in enumerate(groups):
            writer.record(i, torch.arange(len(rewards)), {"reward": rewards}, {"reward": (i, "reward", 0)})
            writer.commit(i, {})
        history = store.open(tmp_path).history()
    everything = torch.cat(groups).double()
    pooled = reward(history)
    assert pooled.count == 15 and pooled.value == pytest.approx(everything.mean().item())
    assert pooled.error == pytest.approx(everything.std().item() / math.sqrt(15))


def test_parts_and_means():
    assert [len(part) for part in quarters([{}] * 10)] == [2, 3, 2, 3]
    assert [len(part) for part in quarters([{}] * 3)] == [1, 1, 1] and quarters([]) == []
    part = [
        {"metrics": {"kl": 1.0}, "samples": 1, "tokens": 100, "wall_s": 1.0},
        {"metrics": {"kl": 2.0}, "samples": 3, "tokens": 100, "wall_s": 9.0},
        {"metrics": {}},
    ]
    assert weighted(part, "kl") == 1.75 and rate(part) == 20.0
    assert math.isnan(weighted(part, "x")) and math.isnan(rate([{}]))
    assert difference(Mean(1, 0.3, 9), Mean(2, 0.4, 9)) == "1 -> 2, +1 = +2.0 standard errors"
    assert difference(Mean(1, math.nan, 1), Mean(0.5, 0.1, 2)) == "1 -> 0.5, -0.5"
