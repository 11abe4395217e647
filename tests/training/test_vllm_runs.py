"""Runs with vLLM inside the actor's ranks: a tiny model under two placements and with tensor parallelism; SmolLM2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcflow import rank, run_folder
from hpcflow.config import compose
from hpcflow.data.columns import flat
from hpcflow.mpi.guard import rank as rank_number
from hpcflow.store import open as open_run
from hpcflow.store import read_lines
from hpcflow.store.reader import Run
from tests.training.programs import TINY, train
from tests.training.test_same_training import POOLS, digests, equal, placed
from tests.worlds import run_world

VLLM = ["protocol.generation.engine=vllm", "protocol.generation.dtype=float32", "iterations=2"]


def gap(run: Run, number: int) -> float:
    """Largest difference of training and generation log-probs."""
    columns = run.iteration(number).columns
    return float((flat(columns["old_log_probs"]) - flat(columns["rollout_log_probs"])).abs().max())


def be_rank_whose_vllm_fails(run: str) -> int:
    """vLLM raises in the second worker's rank, in the fourth step of iteration 1, with requests half way."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from hpcflow.engines.vllm import VLLMEngine

    generate, step, at_work, steps = VLLMEngine.generate, LLMEngine.step, [], []

    def noted(self: VLLMEngine, prompts: list, *args: Any, **options: Any) -> Any:
        at_work[:] = [self.version]
        print(f"rank {rank_number()} generates {len(prompts)} with version {self.version}", flush=True)
        return generate(self, prompts, *args, **options)

    def failing(self: LLMEngine) -> Any:
        if at_work == [1]:
            steps.append(1)
        if rank_number() == 3 and len(steps) == 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step(self)

    VLLMEngine.generate, LLMEngine.step = noted, failing
    return rank.main(Path(run))


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("colocate"), [*placed("colocate"), *VLLM], vllm=True)[0]


def test_weights_reach_the_engine(colocated: Run) -> None:
    """In every iteration vLLM samples from the weights that were just trained."""
    assert gap(colocated, 0) < 1e-4 and gap(colocated, 1) < 1e-4
    moved = flat(colocated.iteration(1).columns["kl"]).abs().max()
    assert moved > 1e-3  # they did change in between


def test_an_engine_that_raises_is_rebuilt_and_only_its_samples_are_redone(
    tmp_path: Path, colocated: Run
) -> None:
    config = compose([*TINY, f"run.dir={tmp_path}", *placed("colocate"), *VLLM])
    run = run_folder.create(config)
    function = "tests.training.test_vllm_runs:be_rank_whose_vllm_fails"
    result = run_world(config.world_size, function, {"run": str(run)}, vllm=True, timeout=180).check()
    # Not by line: what two ranks print may come before either's line end.
    generated = sorted(re.findall(r"rank \d generates \d with version \d", result.stdout))
    assert generated == [
        *(f"rank 2 generates 4 with version {version}" for version in (0, 1)),
        *(f"rank 3 generates 4 with version {version}" for version in (0, 1, 1)),
    ]
    found = open_run(run)
    for number in (0, 1):
        a, b = colocated.iteration(number), found.iteration(number)
        assert torch.equal(a.ids, b.ids) and set(a.columns) == set(b.columns)
        assert all(equal(a.columns[name], b.columns[name]) for name in a.columns)
    assert digests(found) == digests(colocated)
    assert found.iteration(1).metrics["actor/engines_rebuilt"] == 1.0
    (entry,) = read_lines(run / "failures.jsonl")
    assert (entry["event"], entry["iteration"]) == ("in_world", 1)
    assert "engine 1 of actor" in entry["error"] and "illegal memory access" in entry["error"]


def test_other_pools_are_bitwise_equal(tmp_path: Path, colocated: Run) -> None:
    other = train(tmp_path, [*placed("split"), *VLLM], vllm=True)[0]
    for number in (0, 1):
        a, b = colocated.iteration(number), other.iteration(number)
        assert torch.equal(a.ids, b.ids)
        assert all(equal(a.columns[name], b.columns[name]) for name in a.columns)
    assert digests(other) == digests(colocated)


def test_one_engine_over_two_ranks(tmp_path: Path, colocated: Run) -> None:
    """Tensor parallelism in generation: same draws, log-probs within rounding."""
    run = train(tmp_path, [*placed("colocate"), *VLLM, "protocol.generation.tensor_parallel=2"], vllm=True)[0]
    a, b = colocated.iteration(0), run.iteration(0)
    assert torch.equal(a.ids, b.ids)
    assert equal(a.columns["response_ids"], b.columns["response_ids"])
    assert gap(run, 0) < 1e-4 and gap(run, 1) < 1e-4


SMOLLM2 = [
    "experiment=ppo_quickstart",
    "iterations=1",
    "run.eval=false",
    "run.keep=1",
    "algorithm.batch={prompts: 4, draws: 1, mini_batches: 1, epochs: 1}",
    "algorithm.sampling.max_tokens=8",
    "protocol.training.dtype=float32",
    "protocol.generation.dtype=float32",
    "models.actor.optimizer.eps=1e-4",
    "models.critic.optimizer.eps=1e-4",
    "models.reward.processes=1",
]


def small(folder: Path, pools: str) -> Run:
    placement = ["placement.name=test", f"placement.pools={pools}"]
    return train(folder, placement, base=SMOLLM2, vllm=True, timeout=400)[0]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return small(tmp_path_factory.mktemp("one"), POOLS["one"])


@pytest.mark.parametrize(
    "pools",
    [
        "{a: {ranks: 1, models: [actor, reference]}, b: {ranks: 1, models: [critic, reward]}}",
        "{a: {ranks: 1, models: [actor]}, b: {ranks: 1, models: [critic]}, "
        "c: {ranks: 1, models: [reference]}, d: {ranks: 1, models: [reward]}}",
    ],
    ids=["split", "standalone"],
)
def test_smollm2_is_bitwise_equal_in_other_pools(tmp_path: Path, smollm2: Run, pools: str) -> None:
    other = small(tmp_path, pools)
    a, b = smollm2.iteration(0), other.iteration(0)
    assert torch.equal(a.ids, b.ids)
    for name in a.columns:
        assert equal(a.columns[name], b.columns[name]), name
    assert digests(other) == digests(smollm2)


def test_smollm2_on_two_data_parallel_ranks(tmp_path: Path, smollm2: Run) -> None:
    other = small(tmp_path, POOLS["colocate"])
    a, b = smollm2.iteration(0), other.iteration(0)
    assert torch.equal(a.ids, b.ids)
    assert equal(a.columns["response_ids"], b.columns["response_ids"])
    for name in ("old_log_probs", "ref_log_probs", "values", "returns"):
        assert (flat(a.columns[name]) - flat(b.columns[name])).abs().max() < 1e-4, name
    for name in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-3, abs=1e-5), name
