"""What a run survives without being launched again: a generation engine that raises, steps that must not be
taken.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from hpcflow import rank
from hpcflow.mpi.guard import rank as rank_number
from hpcflow.store import CheckpointDir, read_lines
from hpcflow.store import open as open_run
from tests.training.programs import start
from tests.training.test_kills import new_run
from tests.training.test_same_training import equal
from tests.worlds import Result, run_world

HERE = "tests.training.test_in_world:"


def be_rank_whose_engine_fails(run: str, times: int) -> int:
    """The second worker rank's generation engine raises in the middle of iteration 1, ``times`` times."""
    from hpcflow.engines.plain import PlainEngine

    decode, left = PlainEngine._decode, [times]

    def patched(self: Any, rows: Any, *args: Any) -> None:
        decode(self, rows, *args)
        if rank_number() == 3 and self.version == 1 and left[0]:
            left[0] -= 1
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    PlainEngine._decode = patched
    return rank.main(Path(run))


def be_rank_with_bad_numbers(run: str, what: str) -> int:
    """In iteration 1 the critic's loss of the second mini-batch is NaN, or its gradient a million times too
    large.
    """
    from hpcflow.algorithms import losses

    value, calls = losses.clipped_value, [0]

    def patched(values: Any, rows: Any, **args: Any) -> Any:
        loss, metrics = value(values, rows, **args)
        calls[0] += 1
        factor = {"nan": math.nan, "explode": 1e6}[what] if calls[0] == 4 else 1.0
        return loss * factor, metrics

    patched.__dict__.update(value.__dict__)
    losses.clipped_value = patched
    return rank.main(Path(run))


def be_rank_with_a_slow_disk(run: str) -> int:
    """Every checkpoint takes a second longer to write; how many copies of the state there are is noted."""
    from hpcflow.engines import sharded_state

    snapshot, write = sharded_state.snapshot, sharded_state.Snapshot.write
    alive, most = [0], [0]

    def taken(*args: Any) -> Any:
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return snapshot(*args)

    def slow(self: Any, folder: Path) -> Any:
        time.sleep(1.0)
        done = write(self, folder)
        alive[0] -= 1
        return done

    sharded_state.snapshot, sharded_state.Snapshot.write = taken, slow
    rank.main(Path(run))
    return most[0]


def launch(config: Any, run: Path, function: str, **arguments: Any) -> Result:
    return run_world(config.world_size, HERE + function, {"run": str(run), **arguments}, timeout=120)


def test_an_engine_that_raises_is_rebuilt_and_only_its_samples_are_redone(tmp_path: Path) -> None:
    config, whole = new_run(tmp_path / "whole", ["iterations=3"])
    start(config, whole).check()
    config, run = new_run(tmp_path / "failed", ["iterations=3"])
    result = launch(config, run, "be_rank_whose_engine_fails", times=1).check()
    assert "generation engines [1] of actor failed and are rebuilt" in result.stdout
    assert "illegal memory access" in result.stdout
    found, wanted = open_run(run), open_run(whole)
    assert found.iteration(1).facts["metrics"].pop("actor/engines_rebuilt") == 1.0
    for number in range(3):
        a, b = wanted.iteration(number), found.iteration(number)
        assert all(equal(a.columns[name], b.columns[name]) for name in a.columns)
        assert a.metrics["actor/loss"] == b.metrics["actor/loss"]
    (entry,) = read_lines(run / "failures.jsonl")
    assert entry["event"] == "in_world" and "engine 1 of actor" in entry["error"]
    assert (entry["iteration"], entry["node"]) == (1, "actor.generate_sequences#1")
    node = next(n for n in found.iteration(1).nodes if n["method"] == "generate_sequences")
    assert sorted(name for name, *_ in node["spans"]).count("build generation engine") == 2  # one a rank


def test_an_engine_that_fails_twice_stops_the_run(tmp_path: Path) -> None:
    config, run = new_run(tmp_path, ["iterations=2"])
    result = launch(config, run, "be_rank_whose_engine_fails", times=2)
    assert result.rc != 0
    assert "a generation engine of actor failed twice" in result.stderr
    assert "earliest node to run again: iteration 2, actor.load_prompts" in result.stderr
    start(config, run).check()
    assert open_run(run).iterations == [0, 1]


@pytest.mark.parametrize("what", ["nan", "explode"])
def test_bad_steps_stop_the_run_or_are_skipped_as_the_policy_says(tmp_path: Path, what: str) -> None:
    limit = ["protocol.training.explode_norm=1000"]
    config, run = new_run(tmp_path / "stop", ["iterations=2", *limit])
    result = launch(config, run, "be_rank_with_bad_numbers", what=what)
    assert result.rc != 0
    why = {"nan": "loss is nan", "explode": "above protocol.training.explode_norm=1000"}[what]
    assert "mini-batch 1 of update 1" in result.stderr and why in result.stderr
    assert open_run(run).iterations == [0]
    (failure,) = [entry for entry in read_lines(run / "failures.jsonl") if entry["event"] == "failure"]
    assert why in failure["error"] and failure["decision"]["node"] == "critic.update_critic"

    config, run = new_run(tmp_path / "skip", ["iterations=2", *limit, "protocol.training.bad_step=skip"])
    result = launch(config, run, "be_rank_with_bad_numbers", what=what).check()
    said = [line for line in result.stdout.splitlines() if "skipped" in line]
    assert len(said) == 1 and "iteration 2/2" in said[0] and "critic skipped 50 % of its steps" in said[0]
    first, second = (open_run(run).iteration(number).metrics for number in (0, 1))
    assert first["critic/skipped"] == 0.0 and second["critic/skipped"] == 0.5
    assert math.isfinite(second["critic/loss"]) and math.isfinite(second["critic/value_error"])


def test_checkpoints_are_written_while_training_goes_on(tmp_path: Path) -> None:
    """One copy of each model's state at a time, and none is lost."""
    config, run = new_run(tmp_path, ["iterations=3", "run.checkpoint_every=1", "run.keep=3"])
    result = launch(config, run, "be_rank_with_a_slow_disk").check()
    assert result.returned[2:] == [2, 2]  # actor and critic live in both ranks
    found = open_run(run)
    for number in (0, 1):
        written = (run / f"checkpoints/iteration_{number}/actor/00000-of-00002.safetensors").stat().st_mtime
        following = {node["method"]: node for node in found.iteration(number + 1).nodes}
        assert following["generate_sequences"]["start"] < written
    assert [each.iteration for each in CheckpointDir(run).complete()] == [0, 1, 2]
    assert all(each.damage() == {} for each in CheckpointDir(run).complete())
