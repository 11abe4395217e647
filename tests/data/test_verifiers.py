"""The verifiers that come with hpcflow, called directly and in a pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcflow.data.rewards import VerifierPool
from hpcflow.data.verifiers import ReasoningGymRecords, reasoning_gym, vader_sentiment

ROOT = Path(__file__).parents[2]


def test_sentiment():
    """The sentences of VADER's own documentation and its published scores."""
    assert vader_sentiment("", "VADER is smart, handsome, and funny.", {}) == 0.8316
    assert vader_sentiment("", "VADER is not smart, handsome, nor funny.", {}) == -0.7424
    assert vader_sentiment("", "", {}) == 0.0
    assert vader_sentiment("I love it!", "The table.", {}) == 0.0


def test_reasoning_gym_scores_by_the_tasks_own_rule():
    records = ReasoningGymRecords("reasoning_gym:chain_sum?size=5&seed=3&min_terms=2&max_terms=2")
    for i in range(5):
        record = records[i]
        assert reasoning_gym("", record["answer"], record) == 1.0
        assert reasoning_gym("", f" {record['answer']}\n", record) == 1.0
        assert reasoning_gym("", "no idea", record) == 0.0


def test_entries_depend_on_settings_and_index_alone():
    path = "reasoning_gym:spell_backward?size=5&seed=3&max_word_len=4"
    assert [ReasoningGymRecords(path)[i] for i in range(5)] == [
        ReasoningGymRecords(path)[i] for i in range(5)
    ]
    other = ReasoningGymRecords(path.replace("seed=3", "seed=4"))
    assert [other[i]["prompt"] for i in range(5)] != [
        ReasoningGymRecords(path)[i]["prompt"] for i in range(5)
    ]
    assert len(ReasoningGymRecords("reasoning_gym:chain_sum")) == 1000


@pytest.mark.parametrize("task", ["arc_agi", "rearc", "game_of_life", "countdown", "sudoku"])
def test_entries_that_json_would_spoil_score_rightly(task):
    record = ReasoningGymRecords(f"reasoning_gym:{task}?size=1&seed=1")[0]
    assert reasoning_gym("", record["answer"], record) == 1.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:chain_sums", "there is no such task; near it: chain_sum"),
        ("reasoning_gym:", "there is no such task"),
        ("reasoning_gym:chain_sum?terms=2", "has no setting terms; it has .*min_terms"),
        ("reasoning_gym:chain_sum?min_terms=0", "min_terms must be positive"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "max_terms must be"),
    ],
)
def test_wrong_tasks_are_explained(path, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGymRecords(path)


def test_settings_keep_their_types():
    records = ReasoningGymRecords(
        'reasoning_gym:basic_arithmetic?size=2&allow_parentheses=false&operators=["+","-"]&max_terms=3'
    )
    assert records.settings["allow_parentheses"] is False
    assert records.settings["operators"] == ["+", "-"] and records.settings["max_terms"] == 3
    assert reasoning_gym("", records[1]["answer"], records[1]) == 1.0


def test_a_record_of_another_kind_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="prompts must come from data.train=reasoning_gym:<task>"):
        reasoning_gym("", "4", {"prompt": "2 + 2", "answer": "4"})


def test_in_a_pool():
    record = ReasoningGymRecords("reasoning_gym:chain_sum?size=5&seed=3")[2]
    samples = [{"prompt": "", "response": text, "record": record} for text in (record["answer"], "?")]
    with VerifierPool("hpcflow.data.verifiers:reasoning_gym", processes=1, timeout_s=60) as pool:
        reward, ok, *_ = pool.score([*samples, {**samples[0], "record": {}}])
        assert reward.tolist() == [1, 0, 0] and ok.tolist() == [True, True, False]
    with VerifierPool("hpcflow.data.verifiers:vader_sentiment", processes=1, timeout_s=60) as pool:
        assert pool.score([{"prompt": "", "response": "I love it", "record": {}}])[
            0
        ].tolist() == pytest.approx([0.6369])


def test_libraries_are_imported_when_first_used():
    heavy = {"torch", "numpy", "reasoning_gym", "vaderSentiment"}
    code = f"import sys, hpcflow.data.verifiers; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"
