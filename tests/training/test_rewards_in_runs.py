"""Rewards that fail inside a run, and a neural reward model in the same node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcflow import run_folder
from hpcflow.config import compose
from hpcflow.data.columns import texts
from tests.training.programs import TINY, start, train
from tests.training.test_same_training import digests, equal, placed

FLAKY = "models.reward.function=tests.training.judges:fails_sometimes"
WAYS = ("cannot judge this", "no answer within", "process ended", "returned nan")


def test_failed_rewards_are_recorded_and_left_out(tmp_path: Path) -> None:
    options = [FLAKY, "models.reward.max_error_rate=1", "models.reward.timeout_s=1"]
    run = train(tmp_path, [*placed("colocate"), "iterations=1", "algorithm.batch.prompts=32", *options])[0]
    iteration = run.iteration(0)
    ok = iteration.columns["reward_ok"]
    errors = texts(iteration.columns["reward_error"])
    assert 0 < int((~ok).sum()) < len(ok)
    assert all(bool(error) != good for error, good in zip(errors, ok.tolist(), strict=True))
    assert {way for way in WAYS for error in errors if way in error} == set(WAYS)
    again = [2 if error and "returned nan" not in error else 1 for error in errors]  # a number is a result
    assert iteration.columns["reward_attempts"].tolist() == again
    mask = iteration.columns["loss_mask"]
    counted = torch.tensor([bool(row.any()) for row in mask.split()])
    assert torch.equal(counted, ok)  # a failed reward trains nothing
    assert iteration.metrics["reward_error_rate"] == pytest.approx(float((~ok).double().mean()))
    assert iteration.metrics["actor/tokens"] < len(mask.values) / 2 + 1


def test_rewards_that_fail_at_first_are_asked_for_again_and_the_run_is_the_same(tmp_path: Path) -> None:
    base = [*placed("colocate"), "iterations=1", "algorithm.batch.prompts=24"]
    whole = train(tmp_path / "whole", base)[0]
    (notes := tmp_path / "notes").mkdir()
    flaky = "models.reward.function=tests.training.judges:fails_at_first"
    options = [flaky, f"models.reward.args={{notes: {notes}}}", "models.reward.timeout_s=1"]
    disturbed = train(tmp_path / "disturbed", [*base, *options])[0]
    a, b = whole.iteration(0), disturbed.iteration(0)
    assert torch.equal(a.ids, b.ids) and set(a.columns) == set(b.columns)
    assert all(equal(a.columns[name], b.columns[name]) for name in set(a.columns) - {"reward_attempts"})
    attempts = b.columns["reward_attempts"]
    assert set(attempts.tolist()) == {1, 2} and set(a.columns["reward_attempts"].tolist()) == {1}
    assert int((attempts == 2).sum()) == sum(1 for _ in notes.iterdir())
    assert b.metrics["reward_retry_rate"] == pytest.approx(float((attempts == 2).double().mean()))
    assert digests(disturbed) == digests(whole)


def test_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    options = [FLAKY, "models.reward.timeout_s=1", "models.reward.max_error_rate=0.01"]
    config = compose(
        [*TINY, f"run.dir={tmp_path}", *placed("colocate"), "algorithm.batch.prompts=16", *options]
    )
    result = start(config, run_folder.create(config))
    assert result.rc != 0
    assert "rewards failed, above models.reward.max_error_rate=0.01" in result.stderr
    assert any(way in result.stderr for way in WAYS)


def test_a_neural_reward_model_in_the_same_node(tmp_path: Path) -> None:
    """A sequence classifier over the actor's vocabulary; its scores are those of the plain model."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, num_labels=1, pad_token_id=0, max_position_embeddings=512, **sizes)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    options = ["models.reward.function=null", f"models.reward.path={tmp_path / 'judge'}"]
    run = train(tmp_path, [*placed("split"), "iterations=1", *options])[0]
    iteration = run.iteration(0)
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    for row in range(len(iteration.ids)):
        tokens = torch.cat(
            [iteration.columns[name].rows(row, row + 1).values for name in ("prompt_ids", "response_ids")]
        )
        with torch.no_grad():
            expected = judge(input_ids=tokens[None]).logits[0, 0]
        assert float(iteration.columns["reward"][row]) == pytest.approx(float(expected), abs=1e-5)
    assert bool(iteration.columns["reward_ok"].all())
