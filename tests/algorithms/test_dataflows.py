"""The dataflow functions: which calls they make, in which order, on which columns."""

from __future__ import annotations

from hpcflow.algorithms.grpo import grpo
from hpcflow.algorithms.ppo import ppo

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
