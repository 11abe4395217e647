"""The dataflow functions: which calls they make, in which order, on which columns; how short they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hpcflow
from hpcflow.algorithms.dapo import dapo
from hpcflow.algorithms.grpo import grpo
from hpcflow.algorithms.ppo import ppo
from hpcflow.algorithms.remax import remax
from hpcflow.algorithms.safe_rlhf import safe_rlhf
from tests.algorithms import lines

WRITES = {
    "generate_sequences": {"prompt_ids", "response_ids"},
    "compute_values": {"values"},
    "compute_log_prob": {"ref_log_probs"},
    "compute_reward": {"reward"},
    "compute_advantages": {"advantages"},
    "update_critic": set(),
    "update_actor": set(),
}


class Recorder:
    """Stands for all models: every attribute is a model, every method call is recorded with its columns."""

    def __init__(self, calls: list, model: str = "") -> None:
        self.calls, self.model = calls, model

    def __getattr__(self, name: str):
        if not self.model:
            return Recorder(self.calls, name)

        def call(columns: set) -> set:
            self.calls.append((f"{self.model}.{name}", set(columns)))
            return set(WRITES[name])

        return call


def calls_of(algorithm) -> list:
    calls: list = []
    algorithm(Recorder(calls), {"prompt_ids"})
    return calls


def test_ppo():
    calls = calls_of(ppo)
    assert [name for name, _ in calls] == [
        "actor.generate_sequences",
        "critic.compute_values",
        "reference.compute_log_prob",
        "reward.compute_reward",
        "actor.compute_advantages",
        "critic.update_critic",
        "actor.update_actor",
    ]
    everything = {"prompt_ids", "response_ids", "values", "ref_log_probs", "reward", "advantages"}
    assert calls[4][1] == everything - {"advantages"}
    assert calls[5][1] == calls[6][1] == everything


def test_grpo():
    calls = calls_of(grpo)
    assert [name for name, _ in calls] == [
        "actor.generate_sequences",
        "reference.compute_log_prob",
        "reward.compute_reward",
        "actor.compute_advantages",
        "actor.update_actor",
    ]
    assert calls[-1][1] == {"prompt_ids", "response_ids", "ref_log_probs", "reward", "advantages"}


def test_safe_rlhf():
    """PPO with a cost, its critic and a pretraining loss between the same calls."""
    WRITES.update(compute_cost={"cost"}, compute_loss={"pretrain_loss"})
    names = [name for name, _ in calls_of(safe_rlhf)]
    added = [
        "cost_critic.compute_values",
        "cost.compute_cost",
        "actor.compute_loss",
        "cost_critic.update_critic",
    ]
    assert [name for name in names if name not in added] == [name for name, _ in calls_of(ppo)]
    assert [name for name in names if name in added] == added


def test_remax():
    """PPO without the critic, with one more generation and its reward."""
    WRITES.update(generate_greedy={"greedy_ids"}, compute_baseline={"baseline"})
    calls = calls_of(remax)
    added = ["actor.generate_greedy", "reward.compute_baseline"]
    names = [name for name, _ in calls if name not in added]
    assert names == [name for name, _ in calls_of(ppo) if not name.startswith("critic")]
    assert {"greedy_ids", "baseline", "reward"} <= calls[-1][1]


class Rounds(Recorder):
    """A group of models in which every round finds two groups that teach something."""

    def __init__(self, calls: list, model: str = "", missing: int = 5) -> None:
        super().__init__(calls, model)
        self.missing = [missing]

    def __getattr__(self, name: str):
        if name == "keep_groups":
            self.calls.append((f"{self.model}.keep_groups", set()))
            self.missing[0] = max(0, self.missing[0] - 2)
            return lambda batch: type("Handle", (), {"get": lambda _: [self.missing[0]]})()
        if name == "take_groups":
            self.calls.append((f"{self.model}.take_groups", set()))
            return lambda rows: {"prompt_ids", "response_ids", "reward"}
        if not self.model:
            other = Rounds(self.calls, name)
            other.missing = self.missing
            return other
        return super().__getattr__(name)


class Prompts(set):
    def more(self) -> Prompts:
        return Prompts(self)


@pytest.mark.parametrize(("missing", "rounds", "generated"), [(2, 4, 1), (5, 4, 3), (100, 4, 4), (100, 1, 1)])
def test_dapo_generates_until_the_batch_is_full_or_the_rounds_are_over(missing, rounds, generated):
    calls: list = []
    dapo(Rounds(calls, missing=missing), Prompts({"prompt_ids"}), rounds=rounds)
    names = [name for name, _ in calls]
    assert names.count("actor.generate_sequences") == names.count("actor.keep_groups") == generated
    assert names[-3:] == ["actor.take_groups", "actor.compute_advantages", "actor.update_actor"]


PACKAGE = Path(hpcflow.__file__).parent
MOST = {name: 8 for name in lines.NAMES} | {"safe_rlhf": 8 + 5, "dapo": 13, "propose_judge_revise": 29}


@pytest.mark.parametrize("name", lines.NAMES)
def test_an_algorithm_is_short(name):
    assert lines.count(name) <= MOST[name]


def test_every_algorithm_of_the_configs_is_counted():
    functions = re.findall(
        r"(?m)^function: hpcflow\.algorithms\.(\w+):\1$",
        "\n".join(path.read_text() for path in (PACKAGE.parent / "configs" / "algorithm").glob("*.yaml")),
    )
    assert set(functions) == set(lines.NAMES)


def test_no_layer_below_knows_an_algorithm():
    """Not by name, and not by an import: workers reach an algorithm's functions through the config alone."""
    imports = r"(from|import) hpcflow\.algorithms"
    known = re.compile(rf"(?i)(?<![a-z_])({'|'.join([*lines.NAMES, 'lagrange', imports])})(?![a-z])")
    for layer in ("workers", "engines", "mpi", "reshard", "dataflow"):
        for path in (PACKAGE / layer).glob("*.py"):
            assert not known.search(path.read_text()), f"{path}: {known.search(path.read_text())}"
