"""The 70B run on 128 GPUs, scaled down: the same pools, components and protocols with a tiny model on CPU
ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcflow.config import compose
from hpcflow.slurm.components import blocks
from hpcflow.store import open as open_run
from tests import worlds
from tests.slurm.cluster import Cluster

# Data parallelism first: 64 + 32 + 32 ranks become 4 + 2 + 2 (and generation groups of 8 become groups of 2).
TWIN = [
    "experiment=ppo_70b",
    "model=tiny",
    "name=twin",
    "models.reward.path=null",
    "models.reward.function=tests.training.judges:lower_half",
    "placement.pools.policy.ranks=4",
    "placement.pools.value.ranks=2",
    "placement.pools.judge.ranks=2",
    "cluster.components.gpu.ranks_per_node=4",
    "cluster.components.gpu.cpus=1",
    "cluster.components.gpu.memory_gib=4",
    "cluster.threads_per_rank=1",
    "cluster.slurm.time=00:10:00",
    "algorithm.batch.prompts=8",
    "algorithm.batch.mini_batches=2",
    "algorithm.sampling.max_tokens=8",
    "data.max_prompt_tokens=64",
    "protocol.training.dtype=float32",
    "protocol.generation.dtype=float32",
    "protocol.generation.max_model_len=128",
    "protocol.generation.kv_cache_gib=0.1",
    "protocol.generation.max_num_seqs=16",
    "iterations=1",
    "run.eval=false",
]


@pytest.mark.parametrize(
    "engine, tensor_parallel", [("plain", 1), pytest.param("vllm", 2, marks=pytest.mark.slow)]
)
def test_the_70b_job_on_cpu_ranks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, tensor_parallel: int
) -> None:
    monkeypatch.setenv("HPCFLOW_FORKSERVER", worlds.server(vllm=engine == "vllm").socket)
    protocol = [
        f"protocol.generation.engine={engine}",
        f"protocol.generation.tensor_parallel={tensor_parallel}",
    ]
    words = [*TWIN, *protocol, f"run.dir={tmp_path}"]
    big, small = (blocks(compose(each)) for each in (["experiment=ppo_70b"], words))
    assert [(b.name, b.component.gpus) for b in big] == [(b.name, b.component.gpus) for b in small]
    job = cluster.submit(*words)
    job.ends("COMPLETED", 300)
    run = open_run(job.run)
    assert run.iterations == [0] and len(run.iteration(0).ids) == 8
    assert run.iteration(0).versions == {"actor": 1, "critic": 1, "reference": 0, "reward": 0}
