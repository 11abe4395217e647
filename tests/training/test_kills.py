"""Runs that are killed again and again end, bit by bit, like one that was left alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcflow import run_folder
from hpcflow.config import Config, compose
from hpcflow.store import open as open_run
from hpcflow.store import read_lines
from hpcflow.store.reader import Run
from tests.training import matrix
from tests.training.faults import VICTIMS
from tests.training.programs import TINY, start
from tests.training.test_same_training import digests, equal, placed

MODEL = "random:llama?vocab_size=512&hidden_size=32&layers=2&heads=2&kv_heads=2&seed=0&vocab=words"
SMALL = [
    *placed("colocate"),
    "models.reward.processes=1",
    *(f"models.{name}.path='{MODEL}'" for name in ("actor", "critic", "cost_critic", "reference")),
]
TIMING = {"tokens_per_s"}

NODES = [
    "actor.load_prompts",
    "actor.generate_sequences",
    "critic.compute_values",
    "reference.compute_log_prob",
    "reward.compute_reward",
    "actor.compute_advantages",
    "critic.update_critic",
    "actor.update_actor",
]


def point(iteration: int, node: str, when: str, victim: str = "worker") -> dict[str, Any]:
    return {"iteration": iteration, "node": node, "when": when, "victim": victim}


POINTS = [
    *(point(1, node, when) for node in NODES for when in ("middle", "after")),
    point(2, "recorder.record", "middle", "recorder"),
    point(2, "critic.update_critic", "middle", "everything"),
    point(2, "recorder.commit", "middle", "recorder"),
    point(2, "recorder.commit", "after", "recorder"),
    point(3, "actor.generate_sequences", "middle", "controller"),
    point(3, "actor.update_actor", "after", "controller"),
    point(3, "recorder.commit", "after", "everything"),
    point(3, "actor.save", "middle", "worker"),
    point(3, "recorder.finish_checkpoint", "middle", "recorder"),
]


def new_run(folder: Path, overrides: list[str]) -> tuple[Config, Path]:
    config = compose([*TINY, f"run.dir={folder}", *SMALL, *overrides])
    return config, run_folder.create(config)


def assert_same_run(found: Run, wanted: Run) -> None:
    """Ids, every column, every metric but times, versions and weights, bit by bit; each update once."""
    assert found.iterations == wanted.iterations
    assert found.superseded == [] and found.skipped == {} and found.damage() == {}
    for number in wanted.iterations:
        a, b = wanted.iteration(number), found.iteration(number)
        assert torch.equal(a.ids, b.ids)
        assert set(a.columns) == set(b.columns)
        for name in a.columns:
            assert equal(a.columns[name], b.columns[name]), f"{name} in iteration {number}"
        assert a.stamps == b.stamps and a.versions == b.versions
        assert {n: v for n, v in a.metrics.items() if n not in TIMING} == {
            n: v for n, v in b.metrics.items() if n not in TIMING
        }, f"iteration {number}"
    assert digests(found) == digests(wanted)


def decisions(run: Path, event: str) -> list[dict[str, Any]]:
    return [entry for entry in read_lines(run / "failures.jsonl") if entry["event"] == event]


def test_kills_in_and_after_every_node(tmp_path: Path) -> None:
    """One run, killed at every point of the list, one launch after another."""
    overrides = ["iterations=4", "run.checkpoint_every=2"]
    config, whole = new_run(tmp_path / "whole", overrides)
    start(config, whole).check()
    config, run = new_run(tmp_path / "killed", overrides)
    for fault in POINTS:
        result = start(config, run, fault=fault)
        assert result.rc != 0, f"{fault} did not happen"
        first = result.exits[0]
        assert first.signal == 9, result.stderr
        assert fault["victim"] == "everything" or first.rank == VICTIMS[fault["victim"]], result.stderr
        assert open_run(run).skipped == {}  # whatever was being written
    start(config, run).check()
    resumed = decisions(run, "resume")
    assert len(resumed) == len(POINTS)
    assert_same_run(open_run(run), open_run(whole))
    _check_decisions(POINTS, resumed)
    for fault, entry in zip(POINTS, resumed, strict=True):
        decision = entry["decision"]
        first, last = decision["replayed"] or (0, -1)
        going_on = (decision["iteration"] + 1, decision["node"] or "(begins)")
        spared = (f"{len(decision['kept'])} nodes", f"{last + 1 - first} iterations")
        matrix.add(*_where(fault), *going_on, *spared, "same run")


def _where(fault: dict[str, Any]) -> tuple[Any, ...]:
    return fault["iteration"] + 1, fault["node"], fault["when"], fault["victim"]


def _check_decisions(points: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """Nothing that is recorded runs again: generation from its end on, all scores from the first update on.

    Calls whose result somebody needs are made in the order of need, so among scores the earliest may be any.
    """
    for number, (fault, entry) in enumerate(zip(points, resumed, strict=True)):
        if fault["iteration"] != 1:
            continue
        decision, place = entry["decision"], NODES.index(fault["node"])
        # what was replayed is checkpointed, so that it is not replayed a second time
        assert decision["iteration"] == 1 and decision["replayed"] == ([0, 0] if number == 0 else None)
        scored, trained = place >= 2, place >= 6
        assert set(decision["kept"]) == set(NODES[: 6 if trained else 2 if scored else 0]), entry
        if trained:
            assert decision["node"] == "critic.update_critic" and "never repeated in place" in decision["why"]
        else:
            assert decision["node"] in (NODES[2:6] if scored else NODES[:1]), entry


OTHERS = {
    # several generations in an iteration, and samples that are kept inside a worker in between
    "dapo": ["algorithm.batch.draws=4", "algorithm.batch.prompts=4"],
    # a number that one update hands to the next, three trained models
    "safe_rlhf": [
        "models.cost.function=tests.training.judges:upper_half",
        "models.cost.limit=0.3",
        "placement.pools={all: {ranks: 2, models: [actor, critic, cost_critic, reference, reward, cost]}}",
    ],
}


@pytest.mark.parametrize("algorithm", OTHERS)
def test_kills_under_other_algorithms(tmp_path: Path, algorithm: str) -> None:
    overrides = [
        f"algorithm={algorithm}",
        *OTHERS[algorithm],
        "algorithm.sampling.max_tokens=8",
        "iterations=3",
    ]
    points = [
        point(1, "reward.compute_reward", "after"),
        point(1, "actor.update_actor", "middle"),
        point(2, "actor.generate_sequences", "after", "everything"),
    ]
    config, whole = new_run(tmp_path / "whole", overrides)
    start(config, whole).check()
    config, run = new_run(tmp_path / "killed", overrides)
    for fault in points:
        assert start(config, run, fault=fault).rc != 0
    said = start(config, run).check().stdout
    assert "iteration 2 replayed" in said and "metrics of its updates as recorded" in said
    assert "calls made besides" not in said
    assert_same_run(open_run(run), open_run(whole))
    for fault in points:
        number, node, *rest = _where(fault)
        matrix.add(number, f"{algorithm}: {node}", *rest, "", "", "", "", "same run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_at_random_instants(tmp_path: Path, seed: int) -> None:
    """Fifty kills of a random rank, or of all, at random instants."""
    draw = random.Random(seed)
    overrides = ["iterations=60", f"run.checkpoint_every={draw.randint(2, 6)}"]
    config, run = new_run(tmp_path / "killed", overrides)
    kills, points = 0, []
    while kills < 50:
        victim = draw.choice(["worker", "worker", "recorder", "controller", "everything"])
        history = open_run(run).history()
        pace = history[-1]["wall_s"] if history else 1.0
        fault = {"victim": victim, "seconds": draw.uniform(0.0, 3 * pace)}
        if victim == "worker":
            fault["rank"] = draw.choice([2, 3])
        result = start(config, run, fault=fault)
        if result.rc == 0:
            break
        kills += 1
        assert open_run(run).skipped == {}
        done = len(open_run(run).iterations)
        points.append((done, f"{fault['seconds']:.2f} s", victim))
    assert kills >= 50, f"the run was over after {kills} kills"
    start(config, run, timeout=600).check()
    config, whole = new_run(tmp_path / "whole", overrides)
    start(config, whole, timeout=600).check()
    assert_same_run(open_run(run), open_run(whole))
    for done, seconds, victim in points:
        matrix.add(done + 1, "any", seconds, victim, "", "", "", "", "same run")
